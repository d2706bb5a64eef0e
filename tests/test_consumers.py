"""Every verdict about stock transformers is tried: it holds our values where the verdict says so, and nowhere else."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, plan
from sparseautomodel.consumers import LIMITS, TRANSFORMERS, VLLM_CPU, consumers_of
from sparseautomodel.modifiers import Layer

pytestmark = pytest.mark.filterwarnings("ignore:.*left alone", "ignore:.*chosen for this model")


def weights(**args: Any) -> dict[str, Any]:
    return {"config_groups": {"group": {"targets": ["Linear"], "weights": args}}}


BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]}
SCHEMES: dict[str, dict[str, Any]] = {
    "W4A16": {"scheme": "W4A16", "group_size": 32},
    "W4A16_ASYM": {"scheme": "W4A16_ASYM", "group_size": 32},
    "W8A16 channel": {"scheme": "W8A16", "group_size": -1},
    "W8A8": {"scheme": "W8A8"},
    "W4A8": {"scheme": "W4A8", "group_size": 32},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "FP8 tensor": weights(num_bits=8, type="float", strategy="tensor"),
    "FP8 blocks": weights(**BLOCKS),
    "int8 blocks": weights(num_bits=8, strategy="block", block_structure=[32, 32]),
    "NVFP4A16": {"scheme": "NVFP4A16"},
    "MXFP4A16": {"scheme": "MXFP4A16"},
    "MXFP6A16": {"scheme": "MXFP6A16"},
    "MXFP6A8": {"scheme": "MXFP6A8"},
    "MXFP8A16": {"scheme": "MXFP8A16"},
}
NOT_LAYERS = {"W4A16_ASYM"}
NOT_EXPERTS = NOT_LAYERS | {"W8A8", "W4A8", "FP8 blocks", "NVFP4A16", "MXFP8A16"}


def recipe(**keys: Any) -> dict[str, Any]:
    return {"modifiers": [{"QuantizationModifier": keys}]}


def dense_values(folder: Path) -> dict[str, torch.Tensor]:
    """What the checkpoint holds, by our loader."""
    model = SparseAutoModelForCausalLM.from_pretrained(folder, execution="dense")
    return {name: value.detach() for name, value in model.named_parameters()}


def verdict(folder: Path) -> Any:
    return next(one for one in plan(folder).consumers if one.name == TRANSFORMERS)


@pytest.mark.parametrize("name", SCHEMES)
def test_layers_are_read_or_not_as_the_verdict_says(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    """F11: a table of schemes against who opens them."""
    before = plan(tiny_llama, recipe(**SCHEMES[name])).consumers[0]
    oneshot(tiny_llama, recipe(**SCHEMES[name]), output=tmp_path / "out")
    assert verdict(tmp_path / "out") == before and before.reads == (name not in NOT_LAYERS)
    if not before.reads:
        with pytest.raises(RuntimeError):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        return
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    ids = torch.arange(24).view(2, 12)
    ours = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="compressed")
    assert torch.equal(stock(ids).logits, ours(ids).logits)


@pytest.mark.parametrize("name", SCHEMES)
def test_experts_are_read_or_not_as_the_verdict_says(name: str, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """F8, F10: experts in NVFP4, asymmetric or unpacked: stock transformers gets them wrong, ours right."""
    oneshot(tiny_qwen3_moe, recipe(**SCHEMES[name]), output=tmp_path / "out")
    assert verdict(tmp_path / "out").reads == (name not in NOT_EXPERTS)
    wanted = {key: value for key, value in dense_values(tmp_path / "out").items() if ".experts." in key}
    source = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe).state_dict()
    for key, value in wanted.items():
        error = (value.float() - source[key].float()).norm() / source[key].float().norm()
        assert error < 0.2, f"ours is the source, rounded: {key}"
    try:
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        same = all(torch.equal(stock[key], value) for key, value in wanted.items())
    except RuntimeError:
        stock, same = {}, False
    assert same == (name not in NOT_EXPERTS)
    embedding = "model.embed_tokens.weight"
    assert not stock or torch.equal(stock[embedding], source[embedding]), "and what is no expert is left alone"
    if name == "NVFP4A16":
        key = next(iter(wanted))
        assert stock[key].abs().max() / wanted[key].abs().max() > 1000, "it drops the global scale"


@pytest.mark.parametrize("ignore", ["re:.*experts.1.*", "re:.*layers.0.*experts.*", "re:.*down_proj$"])
def test_experts_compressed_in_part(ignore: str, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    oneshot(tiny_qwen3_moe, recipe(**SCHEMES["W4A16"], ignore=[ignore]), output=tmp_path / "out")
    (reason,) = verdict(tmp_path / "out").reasons
    assert "some are compressed and some not" in reason
    try:
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert info["missing_keys"], "experts of random values"
    except RuntimeError:
        pass
    wanted = dense_values(tmp_path / "out")
    source = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe).state_dict()
    assert all(
        (value.float() - source[key].float()).norm() / source[key].float().norm() < 0.2 for key, value in wanted.items()
    )


def test_classes_whose_initialization_touches_packed_layers(tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    AutoModelForSeq2SeqLM.from_config(T5Config(**sizes)).save_pretrained(tmp_path / "dense")
    for name, reads in (("W4A16", False), ("FP8_DYNAMIC", True)):
        oneshot(tmp_path / "dense", recipe(**SCHEMES[name]), output=tmp_path / name)
        found = verdict(tmp_path / name)
        assert found.reads == reads and ("T5Attention" in "".join(found.reasons)) != reads
        if reads:
            AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name)
        else:
            with pytest.raises(AttributeError, match="weight"):
                AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name)


@pytest.mark.parametrize(("targets", "reads"), [(["lm_head"], True), (["model.embed_tokens"], False)])
def test_heads_and_embeddings(targets: list[str], reads: bool, tied_llama: Path, tmp_path: Path) -> None:
    """B9: heads and embeddings of a tied model, said before anything is done."""
    given = recipe(targets=targets, scheme="W8A16", group_size=32)
    before = plan(tied_llama, given)
    assert before.consumers[0].reads == reads
    assert not before.consumers[1].reads and "support depends on the model class" in before.consumers[1].reasons[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oneshot(tied_llama, given, output=tmp_path / "out")
    if reads:
        stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values())
        ids = torch.arange(12).view(1, 12)
        assert torch.equal(stock(ids).logits, SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits)
    else:
        with pytest.raises(AttributeError, match="weight"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out")


MEASURED = {
    "W4A16": True,
    "W8A8": True,
    "FP8_DYNAMIC": True,
    "W8A16": False,
    "W3A16": False,
    "FP8": False,
    "NVFP4A16": False,
    "MXFP4A16": False,
}


@pytest.mark.parametrize("name", MEASURED)
def test_what_a_cpu_build_of_vllm_opened(name: str) -> None:
    layer = Layer("q_proj", "q_proj", ("Linear",), (576, 576), torch.bfloat16)
    found = next(
        one for one in consumers_of([(layer, preset_name_to_scheme(name, ["Linear"]))]) if one.name == VLLM_CPU
    )
    assert found.reads == MEASURED[name] and found.reads != bool(found.reasons)


@pytest.mark.parametrize(("width", "reads"), [(576, False), (1024, True)])
def test_blocks_must_divide_for_vllm(width: int, reads: bool) -> None:
    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    layer = Layer("q_proj", "q_proj", ("Linear",), (width, width), torch.bfloat16)
    assert next(one for one in consumers_of([(layer, scheme)]) if one.name == VLLM_CPU).reads == reads


def test_a_dense_result_is_read_by_all() -> None:
    layer = Layer("q_proj", "q_proj", ("Linear",), (64, 64), torch.bfloat16)
    assert [(one.reads, one.reasons) for one in consumers_of([], [layer])] == [(True, ()), (True, ())]


def test_verdicts_are_data() -> None:
    assert {limit.consumer for limit in LIMITS} == {TRANSFORMERS, VLLM_CPU}
    assert not any("not tried" in limit.reason for limit in LIMITS if limit.consumer == TRANSFORMERS)
    scheme = QuantizationScheme(targets=["Linear"], weights={"num_bits": 4, "symmetric": False, "strategy": "channel"})
    layer = Layer("q_proj", "q_proj", ("Linear",), (64, 64), torch.bfloat16)
    found = consumers_of([(layer, scheme)])[0]
    assert json.loads(json.dumps(found.to_dict())) == {
        "name": TRANSFORMERS,
        "reads": False,
        "reasons": list(found.reasons),
    }
