"""Scales of activations found from data, from the modifier through the files to stock transformers and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from sparseautomodel import SparseAutoModelForCausalLM, plan, verify
from sparseautomodel.architecture import auto_class_for, expert_merges, read_architecture
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.consumers import TRANSFORMERS
from sparseautomodel.modifiers import Weight
from sparseautomodel.plan import make_plan
from sparseautomodel.quantization_config import write_config
from sparseautomodel.quantizer import put_experts
from sparseautomodel.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore")


def int8(**inputs: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "strategy": "channel"}
    inputs = {"num_bits": 8, "strategy": "tensor", **inputs}
    return {"config_groups": {"group": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}}


SCHEMES: dict[str, dict[str, Any]] = {
    "FP8": {"scheme": "FP8"},
    "INT8": int8(),
    "INT8 asymmetric": int8(symmetric=False),
    "NVFP4": {"scheme": "NVFP4"},
}
STORED = {
    "FP8": {"input_scale": torch.bfloat16},
    "INT8": {"input_scale": torch.bfloat16},
    "INT8 asymmetric": {"input_scale": torch.bfloat16, "input_zero_point": torch.int8},
    "NVFP4": {"input_global_scale": torch.float32},
}
IDS = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(3))


def compress(source: Path, keys: dict[str, Any], output: Path) -> dict[str, Tensor]:
    """What calibration does, plainly: all ranges are those of the dense model, and all layers in memory at once."""
    config = AutoConfig.from_pretrained(source)
    checkpoint = open_checkpoint(source)
    architecture = read_architecture(auto_class_for(config), config, checkpoint)
    planned = make_plan(
        str(source), checkpoint, architecture, Recipe.load({"modifiers": [{"QuantizationModifier": keys}]})
    )
    planned.raise_for_errors()
    ranges = dict(observed(source, planned.layers))
    tensors = {name: tensor[...] for name, tensor in checkpoint.items()}
    weights = {item.layer.name: Weight(item.layer, tensors.pop(item.source)) for item in planned.layers}
    for names in [*planned.shared_scales, *([name] for name in weights)]:
        planned.layers[0].modifiers[0].share_global_scale([weights[name] for name in names])
    for item in planned.layers:
        (modifier,), weight = item.modifiers, weights[item.layer.name]
        assert not modifier.set_input_scales([weight], ranges[item.layer.name])
        modifier.apply(weight)
        stored = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in item.outputs().items()}
        item.store(weight, stored)
        tensors |= stored
    output.mkdir()
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    text["quantization_config"] = write_config(planned.schemes, planned.all_layers)
    (output / "config.json").write_text(json.dumps(text))
    return tensors


def observed(source: Path, layers: Any) -> Iterator[tuple[str, Any]]:
    """The range of each layer's inputs in the dense model, experts as layers of their own."""
    model = SparseAutoModelForCausalLM.from_pretrained(source)
    for name, merged in expert_merges(model).items():
        weights = {key: value for key, value in open_checkpoint(source).items() if key.startswith(f"{name}.")}
        put_experts(model, name, [], merged)
        for key, value in weights.items():
            model.get_parameter(key).data = value[...]
    for item in layers:
        seen = item.modifiers[0].input_range(item.layer)
        module = model.get_submodule(item.layer.name)
        module.register_forward_pre_hook(lambda module, args, seen=seen: seen.update(args[0].flatten(0, -2)))
        yield item.layer.name, seen
    model(IDS)


@pytest.mark.parametrize("name", SCHEMES)
def test_stock_transformers_runs_the_result_as_we_do(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    tensors = compress(tiny_llama, SCHEMES[name], tmp_path / "out")
    for part, dtype in STORED[name].items():
        found = {key: value for key, value in tensors.items() if key.endswith(f".{part}")}
        assert len(found) == 14 and all(value.shape == (1,) and value.dtype == dtype for value in found.values())
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    ours = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="compressed")
    logits = ours(IDS).logits
    theirs, mine = stock(IDS).logits, logits
    if name.startswith("INT8"):  # sums of integers, not of floats: the same but for bfloat16's rounding, so without it
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(IDS).logits
        mine = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(IDS).logits
        assert (mine - theirs).norm() < 1e-5 * theirs.norm()
    else:
        assert torch.equal(theirs, mine)
    assert logits.isfinite().all()
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama)(IDS).logits
    assert 0 < (logits - dense).norm() / dense.norm() < (0.6 if name == "NVFP4" else 0.2)
    assert next(one for one in plan(tmp_path / "out").consumers if one.name == TRANSFORMERS).reads


@pytest.mark.parametrize("name", SCHEMES)
def test_the_result_is_verified_saved_and_decoded(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    tensors = compress(tiny_llama, SCHEMES[name], tmp_path / "out")
    verify(tmp_path / "out", against=tiny_llama).raise_for_problems()
    ours = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    verify(ours).raise_for_problems()
    ours.save_pretrained(tmp_path / "again")
    again = open_checkpoint(tmp_path / "again")
    assert again.keys() == tensors.keys()
    assert all(
        torch.equal(again[key][...].view(torch.uint8), value.view(torch.uint8)) for key, value in tensors.items()
    )
    dense = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="dense")
    assert not hasattr(dense.config, "quantization_config") and dense(IDS).logits.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_scale_of_inputs_that_cannot_be_is_found(value: float, tiny_llama: Path, tmp_path: Path) -> None:
    tensors = compress(tiny_llama, SCHEMES["FP8"], tmp_path / "out")
    name = "model.layers.1.mlp.up_proj.input_scale"
    tensors[name].fill_(value)
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert any(name in problem for problem in verify(tmp_path / "out").problems)
    with pytest.raises(ValueError, match="input_scale"):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_scale_of_inputs_that_is_missing_is_found(tiny_llama: Path, tmp_path: Path) -> None:
    tensors = compress(tiny_llama, SCHEMES["FP8"], tmp_path / "out")
    name = "model.layers.1.mlp.up_proj.input_scale"
    del tensors[name]
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert any(f"{name} is missing" in problem for problem in verify(tmp_path / "out").problems)


def test_layers_that_read_one_input_have_the_same_global_scales(tiny_llama: Path, tmp_path: Path) -> None:
    """E17: q, k, v and gate, up have one global scale of their weights and one of their inputs."""
    tensors = compress(tiny_llama, SCHEMES["NVFP4"], tmp_path / "out")
    for number in range(2):
        for block, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            for part in ("weight_global_scale", "input_global_scale"):
                keys = [f"model.layers.{number}.{block}.{name}_proj.{part}" for name in names]
                assert len({float(tensors[key]) for key in keys}) == 1, keys
    name = "model.layers.1.self_attn.k_proj.weight_global_scale"
    tensors[name] *= 2
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    (problem,) = verify(tmp_path / "out").problems
    assert "model.layers.1.self_attn.q_proj" in problem and "weight_global_scale" in problem


def test_data_is_needed_and_what_is_not(tiny_llama: Path) -> None:
    for keys, instead in ((SCHEMES["FP8"], "FP8_DYNAMIC"), (SCHEMES["NVFP4"], "NVFP4A16"), (int8(), "dynamic: true")):
        with pytest.raises(ValueError, match=f"QuantizationModifier needs calibration data.*or take .*{instead}"):
            SparseAutoModelForCausalLM.from_pretrained(
                tiny_llama, recipe={"modifiers": [{"QuantizationModifier": keys}]}
            )


@pytest.mark.parametrize("name", SCHEMES)
def test_experts(name: str, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """Each projection of an expert has a scale of its inputs; whether stock transformers reads it is what we say."""
    compress(tiny_qwen3_moe, SCHEMES[name], tmp_path / "out")
    verify(tmp_path / "out", against=tiny_qwen3_moe).raise_for_problems()
    ours = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits
    assert ours.isfinite().all()
    dense = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe)(IDS).logits
    assert (ours - dense).norm() / dense.norm() < 0.5
    found = next(one for one in plan(tmp_path / "out").consumers if one.name == TRANSFORMERS)
    assert not found.reads and "scales of their inputs" in " ".join(found.reasons)
    try:
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        left_out = {key for key in info["unexpected_keys"] if key.startswith("model.layers.0.mlp.experts.0.")}
        assert len(left_out) == 3 * len(STORED[name])
    except RuntimeError:
        assert name.startswith("INT8")
