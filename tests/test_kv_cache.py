"""Scales of a quantized cache: what is seen, what is stored, and what becomes of it when the result is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DeepseekV3Config,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)
from transformers.models.qwen3_next import Qwen3NextConfig

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, plan, verify
from sparseautomodel.kv_cache import ObservedCache, kv_scales
from sparseautomodel.modifiers import Layer, ModifierError
from sparseautomodel.modifiers.quantization import QuantizationModifier
from sparseautomodel.plan import PlanError
from tests.conftest import SIZES

pytestmark = pytest.mark.filterwarnings("ignore")

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
INT8 = FP8 | {"type": "int"}
IDS = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def tiny_qwen3_next(save_model: Callable[[PreTrainedConfig], Path]) -> Path:
    """A Qwen3-Next of one linear attention layer and one full one."""
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    types = ["linear_attention", "full_attention"]
    sizes = experts | {"shared_expert_intermediate_size": 32, "head_dim": 16, "layer_types": types}
    return save_model(Qwen3NextConfig(**SIZES, **linear, **sizes))


FAMILIES = ["tiny_llama", "tiny_qwen3_moe", "tiny_gemma3", "tiny_qwen3_next"]


def observe(model: PreTrainedModel, *batches: Tensor) -> ObservedCache:
    observed = ObservedCache()
    for batch in batches:
        model(batch, use_cache=False, **observed.argument(model))
    return observed


def recipe(cache: Any, **keys: Any) -> dict[str, Any]:
    return {"modifiers": [{"QuantizationModifier": {"scheme": "W8A8", **keys, "kv_cache_scheme": cache}}]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_is_as_without_a_cache_and_nothing_is_kept(family: str, request: pytest.FixtureRequest) -> None:
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(family))
    observed = ObservedCache()
    logits = model(IDS, use_cache=False, **observed.argument(model)).logits
    assert torch.equal(logits, model(IDS, use_cache=False).logits)
    assert observed.get_seq_length() == 0 and len(observed) == 0
    assert torch.equal(model(IDS, use_cache=False, **observed.argument(model)).logits, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_largest_magnitudes_are_those_of_what_a_cache_holds(family: str, request: pytest.FixtureRequest) -> None:
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(family))
    held = DynamicCache()
    if family == "tiny_qwen3_next":
        held = DynamicCache(config=model.config)
    model(IDS, use_cache=True, **{next(iter(ObservedCache().argument(model))): held})
    found = observe(model, IDS[:1], IDS[1:]).largest()
    expected = {index: layer for index, layer in enumerate(held.layers) if hasattr(layer, "keys")}
    assert found.keys() == expected.keys()
    for index, (keys, values) in found.items():
        assert torch.allclose(keys, expected[index].keys.abs().max(), rtol=1e-2)
        assert torch.allclose(values, expected[index].values.abs().max(), rtol=1e-2)


def test_what_is_run_for_something_else_does_not_count(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    observed = ObservedCache()
    observed.recording = False
    model(IDS, use_cache=False, **observed.argument(model))
    assert observed.largest() == {}
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has put nothing in its cache.*leave kv_cache_scheme out"):
        kv_scales(observed, model, QuantizationArgs(**FP8), layers_of(model))


def layers_of(model: nn.Module, prefix: str = "") -> list[Layer]:
    return [
        Layer(f"{prefix}{name}", name, ("Linear",), (module.out_features, module.in_features), torch.bfloat16)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]


@pytest.mark.parametrize("scheme", [FP8, INT8])
def test_scales_map_the_largest_to_the_end_of_the_scheme(scheme: dict[str, Any], tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    observed, args = observe(model, IDS), QuantizationArgs(**scheme)
    scales = kv_scales(observed, model, args, layers_of(model, "language_model."))
    names = [f"language_model.model.layers.{n}.self_attn.{part}" for n in (0, 1) for part in ("k_scale", "v_scale")]
    assert list(scales) == names
    for name, tensor in scales.items():
        largest = observed.largest()[int(name.split(".")[3])][name.endswith("v_scale")]
        expected, _ = calculate_qparams(-largest, largest, args)
        assert tensor.shape == (1,) and tensor.dtype == torch.bfloat16 and torch.equal(tensor[...], expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_keys_that_are_not_finite_are_refused(value: float, tiny_llama: Path) -> None:
    model, observed = AutoModelForCausalLM.from_pretrained(tiny_llama), ObservedCache()
    observed.update(torch.full((1, 2, 3, 4), value), torch.zeros(1, 2, 3, 4), 1)
    with pytest.raises(ValueError, match=r"k states of model.layers.1.self_attn are not finite"):
        kv_scales(observed, model, QuantizationArgs(**FP8), layers_of(model))


def test_a_layer_that_no_module_has_is_refused(tiny_llama: Path) -> None:
    model, observed = AutoModelForCausalLM.from_pretrained(tiny_llama), ObservedCache()
    observed.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 7)
    with pytest.raises(ValueError, match="layer 7 of the cache must belong to one attention module, found none"):
        kv_scales(observed, model, QuantizationArgs(**FP8), layers_of(model))


REFUSED: list[tuple[Any, str]] = [
    ("fp8", "got 'fp8'. Write"),
    (FP8 | {"num_bits": 4, "type": "int"}, "a cache has 8 bits"),
    (FP8 | {"strategy": "channel"}, "a cache has 8 bits"),
    (FP8 | {"dynamic": True}, "a cache has 8 bits"),
    (INT8 | {"symmetric": False}, "a cache has 8 bits"),
    (FP8 | {"observer": "mse"}, "a cache has 8 bits"),
    (FP8 | {"bits": 8}, "unknown key bits"),
]


@pytest.mark.parametrize(("scheme", "message"), REFUSED)
def test_a_scheme_that_no_server_has_is_refused(scheme: Any, message: str) -> None:
    with pytest.raises(ModifierError, match=message) as error:
        QuantizationModifier(scheme="W8A8", kv_cache_scheme=scheme)
    assert error.value.key == "kv_cache_scheme"


def test_the_key_has_one_spelling_and_needs_data() -> None:
    short = QuantizationModifier(scheme="W8A8", kv_cache_scheme={"type": "float"})
    assert short == QuantizationModifier(scheme="W8A8", kv_cache_scheme=QuantizationArgs(**FP8, observer="minmax"))
    assert short.to_dict() == {"scheme": "W8A8", "kv_cache_scheme": FP8}
    assert short.needs_data and short.cache_scheme() == QuantizationArgs(**FP8)
    assert QuantizationModifier(scheme="W8A8").cache_scheme() is None


def test_without_data_or_a_cache_it_is_refused(tiny_llama: Path, tiny_bert: Path) -> None:
    """E14: said before anything is read."""
    with pytest.raises(PlanError, match=r"needs calibration data.*kv_cache_scheme away"):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=recipe(FP8))
    with pytest.raises(PlanError, match="needs calibration data"):
        oneshot(AutoModelForCausalLM.from_pretrained(tiny_llama), recipe(FP8))
    twice = {"modifiers": recipe(FP8, targets=["re:.*mlp.*"])["modifiers"]}
    twice["modifiers"] += recipe(INT8, targets=["re:.*self_attn.*"])["modifiers"]
    assert plan(tiny_llama, twice).errors == ("kv_cache_scheme is given twice, and differently: a model has one cache",)
    assert "BertForMaskedLM has no attention that keeps keys and values" in plan(tiny_bert, recipe(FP8)).errors[0]
    assert not plan(tiny_llama, recipe(FP8)).errors


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4), "more than one attention"),
        (
            DeepseekV3Config(
                **SIZES,
                kv_lora_rank=16,
                q_lora_rank=None,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=16,
                first_k_dense_replace=2,
            ),
            "what the keys and values of DeepseekV3ForCausalLM are made of",
        ),
    ],
)
def test_caches_that_hold_something_else_are_refused(config: PreTrainedConfig, message: str, tmp_path: Path) -> None:
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    auto.from_config(config).bfloat16().save_pretrained(tmp_path)
    assert any(message in error for error in plan(tmp_path, recipe(FP8)).errors)


def compressed(source: Path, output: Path, scheme: dict[str, Any] = FP8, **changes: Tensor) -> dict[str, Tensor]:
    """W8A8 with the scales of a cache beside it, put together by hand."""
    oneshot(source, {"modifiers": [{"QuantizationModifier": {"scheme": "W8A8"}}]}, output=output)
    model = AutoModelForCausalLM.from_pretrained(source)
    scales = kv_scales(observe(model, IDS), model, QuantizationArgs(**scheme), layers_of(model))
    tensors = load_file(output / "model.safetensors") | {name: one[...] for name, one in scales.items()}
    write(tensors, output)
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (output / "config.json").write_text(json.dumps(config))
    return tensors


def write(tensors: dict[str, Tensor], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_the_result_is_loaded_strictly_and_saved_whole(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """E21: the scales are in the files under the names that servers read, and stay there."""
    tensors = compressed(request.getfixturevalue(family), tmp_path / "out")
    verify(tmp_path / "out").raise_for_problems()
    model, info = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    verify(model).raise_for_problems()
    names = [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]
    assert len(names) == 4
    for name in names:
        held = model.get_parameter(name)
        assert torch.equal(held, tensors[name]) and not held.requires_grad
    model.save_pretrained(tmp_path / "again")
    verify(tmp_path / "again").raise_for_problems()
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in names)
    written = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert written["kv_cache_scheme"] == FP8
    dense = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="dense")
    assert not any(name.endswith("k_scale") for name in dense.state_dict())
    oneshot(tmp_path / "out", "w8a16", output=tmp_path / "anew", requantize=True)
    assert not any(name.endswith("k_scale") for name in load_file(tmp_path / "anew" / "model.safetensors"))


def test_zero_points_that_older_tools_stored_are_kept(tiny_llama: Path, tmp_path: Path) -> None:
    tensors = compressed(tiny_llama, tmp_path / "out")
    zeros = {name.replace("_scale", "_zero_point"): one for name, one in tensors.items() if name.endswith("v_scale")}
    write(tensors | {name: torch.zeros_like(one, dtype=torch.int8) for name, one in zeros.items()}, tmp_path / "out")
    verify(tmp_path / "out").raise_for_problems()
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(model.get_parameter(name).dtype == torch.int8 for name in zeros) and len(zeros) == 2


def test_who_reads_it_is_said(tiny_llama: Path, tmp_path: Path) -> None:
    compressed(tiny_llama, tmp_path / "out")
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert len(info["unexpected_keys"]) == 4 and not info["missing_keys"]
    ours = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    exact, rounded = stock(IDS).logits, ours(IDS).logits
    assert (
        not torch.equal(exact, rounded) and torch.nn.functional.cosine_similarity(exact, rounded, dim=-1).min() > 0.99
    )
    for asked in (plan(tmp_path / "out"), plan(tiny_llama, recipe(FP8))):
        transformers, vllm = asked.consumers
        assert not transformers.reads and "leaves them out" in transformers.reasons[0] and vllm.reads
    assert "takes FP8 only" in plan(tiny_llama, recipe(INT8)).consumers[1].reasons[0]


NAME = "model.layers.1.self_attn.v_scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NAME: None}, "v_scale are missing: servers take 1.0"),
        ({"k_scale": None, "v_scale": None}, "are missing: servers take 1.0"),
        ({"k_scale": 1.0, "v_scale": 1.0}, "all scales of the cache are 1.0"),
        ({NAME: 0.0}, "not above zero"),
        ({NAME: float("nan")}, "not finite"),
        ({"model.layers.1.mlp.k_scale": 1.0}, "no attention module is there that has a cache"),
    ],
)
def test_scales_that_cannot_be_are_found(
    change: dict[str, float | None], message: str, tiny_llama: Path, tmp_path: Path
) -> None:
    tensors = compressed(tiny_llama, tmp_path / "out")
    for end, value in change.items():
        names = [name for name in tensors if name.endswith(end)] or [end]
        for name in names:
            if value is None:
                del tensors[name]
            else:
                tensors[name] = torch.tensor([value]).bfloat16()
    write(tensors, tmp_path / "out")
    assert any(message in problem for problem in verify(tmp_path / "out").problems)
