"""A cache in 8 bits against plain code: the same model with a cache that rounds by `fake_quantize` on the way in."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING, QuantizedCache

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, verify
from sparseautomodel.quantized_cache import ByteLayer, nbytes_a_token
from sparseautomodel.report import perplexity
from tests.test_compressed_layers import pickled
from tests.test_kv_cache import FP8, IDS, INT8, compressed, recipe

SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": FP8,
    "int8": INT8,
    "fp8-heads": FP8 | {"strategy": "attn_head"},
    "int8-asymmetric": INT8 | {"symmetric": False},
    "fp8-dynamic": FP8 | {"dynamic": True},
    "int8-token": INT8 | {"strategy": "token", "dynamic": True},
}
FAMILIES = ["tiny_llama", "tiny_qwen3", "tiny_gemma3", "tiny_mixtral"]
PROMPT = {"input_ids": IDS[:, :11], "attention_mask": torch.ones(3, 11, dtype=torch.int64)}
PROMPT["attention_mask"][1, :4] = 0


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str, str], Path]:
    """The W8A8 checkpoint of a family with the scales of a cache, by the name of the scheme."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, scheme: str) -> Path:
        if (family, scheme) not in made:
            output = made[family, scheme] = tmp_path_factory.mktemp(f"{family}-{scheme}") / "out"
            args = SCHEMES[scheme]
            tensors = compressed(request.getfixturevalue(family), output, FP8 if args["type"] == "float" else INT8)
            save_file(dict(_with_scales(tensors, args)), output / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((output / "config.json").read_text())
            config["quantization_config"]["kv_cache_scheme"] = args
            (output / "config.json").write_text(json.dumps(config))
        return made[family, scheme]

    return make


def _with_scales(tensors: dict[str, Tensor], args: dict[str, Any]) -> Any:
    for name, tensor in tensors.items():
        if not name.endswith(("k_scale", "v_scale")):
            yield name, tensor
        elif not args["dynamic"]:
            heads = torch.tensor([1.0, 0.5], dtype=tensor.dtype).view(2, 1, 1)
            yield name, tensor * heads if args["strategy"] == "attn_head" else tensor
            if not args["symmetric"]:
                yield name.replace("scale", "zero_point"), torch.tensor([7], dtype=torch.int8)


class Rounding:
    """Keeps plain numbers, rounded on the way in."""

    def __init__(self, model: Any, args: QuantizationArgs, **sizes: int) -> None:
        super().__init__(config=model.config, **sizes)
        self.args = args
        self.modules = {m.layer_idx: m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "q_proj")}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **others: Any) -> Any:
        module = self.modules[layer_idx]
        keys, values = self.rounded(module, "k", key_states), self.rounded(module, "v", value_states)
        return super().update(keys, values, layer_idx, *rest, **others)

    def rounded(self, module: Any, part: str, states: Tensor) -> Tensor:
        if not self.args.dynamic:
            zero_point = getattr(module, f"{part}_zero_point", None)
            return fake_quantize(states, getattr(module, f"{part}_scale"), zero_point, self.args)
        tokens = states.unbind(2) if self.args.strategy == "token" else [states]
        found = []
        for token in tokens:
            scale, zero_point = compute_dynamic_scales_and_zp(token, self.args, module)
            found.append(
                fake_quantize(token, scale.view(*token.shape[:2], 1) if len(tokens) > 1 else scale, None, self.args)
            )
        return torch.stack(found, 2) if self.args.strategy == "token" else found[0]


class RoundingDynamic(Rounding, DynamicCache):
    pass


class RoundingStatic(Rounding, StaticCache):
    pass


def plain(model: Any) -> Any:
    """A copy of the model that knows nothing of 8 bits."""
    other = copy.deepcopy(model)
    for module in other.modules():
        module._forward_pre_hooks.clear()
    return other


def caches(model: Any) -> Any:
    return [layer for layer in model(IDS, use_cache=True).cache.layers if layer.is_initialized]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_it_gives_what_rounded_keys_and_values_give(family: str, scheme: str, folder: Callable[..., Path]) -> None:
    """A prompt of several rows, one of them padded, then a token at a time, past the window of Gemma 3."""
    model = SparseAutoModelForCausalLM.from_pretrained(folder(family, scheme))
    reference, args = plain(model), QuantizationArgs(**SCHEMES[scheme])
    mine, theirs = None, RoundingDynamic(reference, args)
    mask = PROMPT["attention_mask"]
    exact = DynamicCache(config=model.config)
    for ids in (PROMPT["input_ids"], *IDS[:, 11:19].split(1, 1)):
        mask = mask if ids.shape[1] > 1 else torch.cat([mask, torch.ones(3, 1, dtype=torch.int64)], 1)
        output = model(ids, attention_mask=mask, use_cache=True, cache=mine)
        mine = output.cache
        wanted = reference(ids, attention_mask=mask, use_cache=True, cache=theirs).logits
        assert torch.equal(output.logits, wanted)
        reference(ids, attention_mask=mask, use_cache=True, cache=exact)
    for held, dense in zip(mine.layers, exact.layers, strict=True):
        behind = 2 * args.dynamic
        assert isinstance(held, ByteLayer) and isinstance(held, type(dense)) and held.keys.dtype == torch.uint8
        assert held.keys.shape == (*dense.keys.shape[:-1], dense.keys.shape[-1] + behind)
        assert held.keys.nbytes / dense.keys.nbytes == 0.5 + behind / 2 / dense.keys.shape[-1]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_forward_without_a_cache_gives_the_same(family: str, folder: Callable[..., Path]) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(folder(family, "fp8"))
    assert torch.equal(model(IDS, use_cache=False).logits, model(IDS, use_cache=True).logits)
    assert not torch.equal(model(IDS).logits, plain(model)(IDS).logits)


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}]
)
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3"])
def test_generate_uses_it(family: str, how: dict[str, Any], folder: Callable[..., Path]) -> None:
    """Greedy, beams that are reordered, memory made beforehand, tokens that are taken back again."""
    model = SparseAutoModelForCausalLM.from_pretrained(folder(family, "fp8"))
    reference = plain(model)
    one = "prompt_lookup_num_tokens" in how
    prompt = {"input_ids": IDS[:1, :7].repeat(1, 2)} if one else PROMPT
    asked = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
    found = model.generate(**prompt, **asked, **how)
    assert all(isinstance(layer, ByteLayer) for layer in found.cache.layers)
    assert all(layer.keys.dtype == torch.uint8 for layer in found.cache.layers)
    args = QuantizationArgs(**FP8)
    if "cache_implementation" in how:
        others = {"cache": RoundingStatic(reference, args, max_cache_len=found.cache.get_max_length())}
    else:
        others = {"cache": RoundingDynamic(reference, args)}
    others |= {key: value for key, value in how.items() if key == "num_beams"}
    wanted = reference.generate(**prompt, **asked, **others).sequences
    assert torch.equal(found.sequences, wanted)


@torch.no_grad()
def test_caches_that_are_passed_in(tiny_llama: Path, folder: Callable[..., Path]) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(folder("tiny_llama", "fp8"))
    wanted = model(IDS, use_cache=True).logits
    bare, static = DynamicCache(), StaticCache(config=model.config, max_cache_len=64)
    for cache in (bare, static):
        assert torch.equal(model(IDS, cache=cache).logits, wanted)
        assert all(isinstance(layer, ByteLayer) and layer.keys.dtype == torch.uint8 for layer in cache.layers)
    early = StaticCache(config=model.config, max_cache_len=64)
    early.early_initialization(3, 2, 16, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(model(IDS, cache=early).logits, wanted) and early.layers[0].keys.shape == (3, 2, 64, 16)
    early.reset()
    assert torch.equal(model(IDS, cache=early).logits, wanted)
    grown = DynamicCache(config=model.config)
    plain(model)(IDS[:, :9], cache=grown)
    model(IDS[:, 9:], cache=grown)
    assert grown.layers[1].keys.shape == bare.layers[1].keys.shape and grown.layers[1].keys.dtype == torch.uint8
    again = copy.deepcopy(bare)
    for cache in (pickle.loads(pickle.dumps(bare)), again, bare):
        cache.crop(-20)
        assert cache.get_seq_length() == 20
        torch.testing.assert_close(model(IDS[:, 20:], cache=cache).logits, wanted[:, 20:])
    bare.batch_select_indices(torch.tensor([2, 0]))
    bare.batch_repeat_interleave(2)
    assert bare.layers[0].keys.shape == (4, 2, 40, 16)


def test_no_table_of_transformers_is_changed(folder: Callable[..., Path]) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(folder("tiny_gemma3", "int8"))
    model(IDS, use_cache=True)
    for kind in (*DYNAMIC_LAYER_TYPE_MAPPING.values(), *STATIC_LAYER_TYPE_MAPPING.values()):
        assert not issubclass(kind, ByteLayer)
    dense = SparseAutoModelForCausalLM.from_pretrained(folder("tiny_gemma3", "int8"), execution="dense")
    assert not any(isinstance(layer, ByteLayer) for layer in caches(dense)) and dense.load_report.cache is None


def test_a_cache_of_its_own_kind_is_left_alone(folder: Callable[..., Path]) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(folder("tiny_llama", "fp8"))
    own = QuantizedCache("fp8", model.config)
    with pytest.warns(UserWarning, match="Fp8QuantizedLayer keeps keys and values its own way"):
        model(IDS, cache=own)
    assert not any(isinstance(layer, ByteLayer) for layer in own.layers)


@pytest.mark.parametrize("use_cache", [True, False])
def test_gradients_pass_as_if_nothing_were_rounded(use_cache: bool, folder: Callable[..., Path]) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(folder("tiny_llama", "fp8"))
    gradients = []
    for one in (model, plain(model)):
        embeddings = one.get_input_embeddings()(IDS).detach().requires_grad_()
        logits = one(inputs_embeds=embeddings, use_cache=use_cache).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten()).backward()
        gradients.append(embeddings.grad.flatten())
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


@torch.no_grad()
def test_copies_pickles_casts_and_saved_ones_keep_bytes(folder: Callable[..., Path], tmp_path: Path) -> None:
    source = folder("tiny_llama", "fp8")
    model = SparseAutoModelForCausalLM.from_pretrained(source)
    wanted = model(IDS).logits
    model.save_pretrained(tmp_path)
    verify(tmp_path).raise_for_problems()
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    others = [SparseAutoModelForCausalLM.from_pretrained(tmp_path), copy.deepcopy(model), pickled(model)]
    for other in others:
        assert torch.equal(other(IDS).logits, wanted) and isinstance(caches(other)[0], ByteLayer)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(IDS).logits, wanted)
    assert (
        isinstance(caches(others[1].to(torch.float32))[0], ByteLayer) and others[1](IDS).logits.dtype == torch.float32
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(caches(others[1])[0], ByteLayer)


def test_what_is_saved_is_said(folder: Callable[..., Path]) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(folder("tiny_llama", "fp8"))
    assert model.load_report.cache == nbytes_a_token(model) == (2 * 2 * 2 * 16 * 2, 2 * 2 * 2 * 16)
    assert "cache of keys and values: 256 -> 128 bytes a token" in str(model.load_report)
    held = caches(model)
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in held) == 128 * IDS.numel()
    tokens = SparseAutoModelForCausalLM.from_pretrained(folder("tiny_llama", "int8-token"))
    held = caches(tokens)
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in held) == tokens.load_report.cache[1] * IDS.numel()
    assert nbytes_a_token(plain(model)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 4, "type": "int"}, "kept in 8 bits, the scheme says 4"),
        ({"strategy": "group", "group_size": 8, "dynamic": True}, "one a tensor or one a token, symmetric, not group"),
        ({"strategy": "channel"}, "one a tensor or one a head, not channel"),
    ],
)
def test_schemes_that_are_not_kept_are_named(
    change: dict[str, Any], message: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(folder("tiny_llama", "fp8"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=message):
        model = SparseAutoModelForCausalLM.from_pretrained(tmp_path)
    assert not isinstance(caches(model)[0], ByteLayer)


def test_a_checkpoint_that_has_nothing_else_compressed(
    tiny_llama: Path, folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Weights as they are, the cache alone in 8 bits."""
    source = folder("tiny_llama", "fp8")
    scales = {
        name: one
        for name, one in load_file(source / "model.safetensors").items()
        if name.endswith(("k_scale", "v_scale"))
    }
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    tensors = {name: one for file in tmp_path.glob("*.safetensors") for name, one in load_file(file).items()}
    for file in (*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.index.json")):
        file.unlink()
    save_file(tensors | scales, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    entry = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": FP8}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    verify(tmp_path).raise_for_problems()
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(caches(model)[0], ByteLayer) and model.load_report.cache == (256, 128)
    model.save_pretrained(tmp_path / "again")
    verify(tmp_path / "again").raise_for_problems()
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == (tensors | scales).keys()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "limit"), [(FP8, 0.02), (INT8, 0.02)], ids=["fp8", "int8"])
def test_perplexity_of_a_real_model(
    scheme: dict[str, Any], limit: float, smollm2: Path, smollm2_tokenizer: Any, tmp_path: Path
) -> None:
    """SmolLM2-135M against its unquantized cache."""
    prose = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))  # every CPython carries it
    rows = [smollm2_tokenizer(prose[at : at + 2000], return_tensors="pt")["input_ids"] for at in range(0, 32000, 2000)]
    oneshot(smollm2, recipe(scheme), data=[{"input_ids": row} for row in rows], output=tmp_path / "out")
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    unseen = prose[-40000:]
    found, exact = (perplexity(one, smollm2_tokenizer, unseen, max_tokens=4096).value for one in (model, plain(model)))
    assert found != exact and abs(found / exact - 1) < limit, f"{found:.3f} with 8 bits, {exact:.3f} without"
    before, after = model.load_report.cache
    assert (before, after) == (30 * 2 * 3 * 64 * 2, 30 * 2 * 3 * 64)
