"""Rotated checkpoints against compressed-tensors: it rotates a model, and runs it with its own hooks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.transform import TransformBase, TransformConfig, apply_transform_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, plan, verify
from sparseautomodel.plan import PlanError
from sparseautomodel.quantized_cache import ByteLayer
from sparseautomodel.verify import VerificationError
from tests.test_compressed_layers import pickled
from tests.test_kv_cache import FP8, compressed

IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(5))
QKV = "re:.*self_attn\\.[qkv]_proj$"


def _pair(kind: str, target: str, location: str = "input", **keys: Any) -> dict[str, Any]:
    """A rotation of activations, and its inverse in the weights that take them or make them."""
    inverse = {"targets": [target], "location": f"weight_{location}", "inverse": True}
    return {"type": kind, "apply": [{"targets": [target], "location": location}, inverse], **keys}


CONFIGS: dict[str, dict[str, Any]] = {
    "hadamard": {"r4": _pair("hadamard", "re:.*down_proj$")},
    "blocks": {"r4": _pair("hadamard", "re:.*down_proj$", head_dim=32), "u": _pair("hadamard", QKV)},
    "random-hadamard": {"r1": _pair("random-hadamard", QKV), "r4": _pair("random-hadamard", "re:.*down_proj$")},
    "permuted": {"r1": _pair("hadamard", QKV, randomize=True)},
    "random-matrix": {"m": _pair("random-matrix", "re:.*[qo]_proj$")},
    "outputs": {"v": _pair("hadamard", "re:.*v_proj$", "output", head_dim=16)},
    "twice": {"a": _pair("random-hadamard", "re:.*o_proj$"), "b": _pair("random-matrix", "re:.*o_proj$")},
    "offline": {
        "r": {
            "type": "random-hadamard",
            "head_dim": 16,
            "apply": [
                {"targets": ["re:.*v_proj$"], "location": "weight_output"},
                {"targets": ["re:.*o_proj$"], "location": "weight_input", "inverse": True},
            ],
        }
    },
}
QUERIES_AND_KEYS = {
    "r3": {
        "type": "random-hadamard",
        "head_dim": 16,
        "apply": [{"targets": ["re:.*self_attn$"], "location": one} for one in ("q_attn", "k_cache")],
    }
}


@pytest.fixture(scope="session")
def rotated(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str, str], tuple[Path, Any]]:
    """The folder of a rotated W4A16 Qwen3 or Llama, and the model that compressed-tensors rotated, with its weights."""
    made: dict[tuple[str, str], tuple[Path, Any]] = {}

    def make(name: str, family: str = "tiny_llama") -> tuple[Path, Any]:
        if (name, family) not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name, family] = folder / "out", build(request.getfixturevalue(family), CONFIGS[name], folder)
        return made[name, family]

    return make


def build(source: Path, groups: dict[str, Any], folder: Path, recipe: str = "w4a16") -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(source)
    config = TransformConfig.model_validate({"config_groups": groups})
    apply_transform_config(model, config)
    whole = model.state_dict()
    model.save_pretrained(folder / "whole")
    matrices = {name for name, module in model.named_modules() if isinstance(module, TransformBase)}
    extra = {
        n: t for n, t in load_file(folder / "whole" / "model.safetensors").items() if n.rpartition(".")[0] in matrices
    }
    plain = AutoModelForCausalLM.from_pretrained(source)
    plain.load_state_dict({n: t for n, t in whole.items() if n.rpartition(".")[0] not in matrices})
    plain.save_pretrained(folder / "plain")
    oneshot(folder / "plain", small_groups(recipe), output=folder / "out")
    add(folder / "out", extra, config.model_dump(mode="json"))
    for name, weight in dense(folder / "out").items():
        model.get_parameter(f"{name}.weight").data.copy_(weight)
    return model


def small_groups(recipe: str) -> Any:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 16}
    entry = {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    return {"modifiers": [{"QuantizationModifier": entry}]} if recipe == "w4a16" else recipe


def add(folder: Path, tensors: dict[str, Tensor], transforms: Any) -> None:
    whole = load_file(folder / "model.safetensors") | tensors
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["transform_config"] = transforms
    (folder / "config.json").write_text(json.dumps(config))


def dense(folder: Path) -> dict[str, Tensor]:
    """The compressed layers of a folder as compressed-tensors decompresses them."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors, result = load_file(folder / "model.safetensors"), {}
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    for name in [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]:
        state = {part.rpartition(".")[2]: one for part, one in tensors.items() if part.startswith(f"{name}.weight_")}
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        result[name] = compressor.decompress(state, scheme)["weight"]
    return result


@pytest.mark.parametrize("execution", ["auto", "compressed", "dense"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_it_gives_what_compressed_tensors_gives(name: str, execution: str, rotated: Callable[..., Any]) -> None:
    folder, reference = rotated(name)
    verify(folder).raise_for_problems()
    model = SparseAutoModelForCausalLM.from_pretrained(folder, execution=execution)
    wanted, found = reference(IDS).logits.float(), model(IDS).logits.float()
    error = (found - wanted).norm() / wanted.norm()
    limits = {"dense": 2e-2, "auto": 2e-2, "compressed": 1e-2}  # weights that are multiplied are rounded once more
    assert error < (5e-2 if (name, execution) == ("random-matrix", "dense") else limits[execution])
    if name != "offline":
        without = copy.deepcopy(model)
        for module in without.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        assert execution == "dense" or (without(IDS).logits - wanted).norm() / wanted.norm() > 0.1


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_what_is_saved_is_what_was_loaded(name: str, rotated: Callable[..., Any], tmp_path: Path) -> None:
    folder, _ = rotated(name)
    model = SparseAutoModelForCausalLM.from_pretrained(folder)
    wanted = model(IDS).logits
    assert {n for n, (times, _) in model.load_report.reads.items() if times != 1} == set()
    model.save_pretrained(tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    configs = [json.loads((one / "config.json").read_text())["quantization_config"] for one in (folder, tmp_path)]
    assert configs[0]["transform_config"] == configs[1]["transform_config"]
    verify(tmp_path).raise_for_problems()
    for other in (copy.deepcopy(model), pickled(model), SparseAutoModelForCausalLM.from_pretrained(tmp_path)):
        assert torch.equal(other(IDS).logits, wanted)


@torch.no_grad()
def test_dense_is_a_plain_model(rotated: Callable[..., Any], tmp_path: Path) -> None:
    folder, _ = rotated("twice")
    model = SparseAutoModelForCausalLM.from_pretrained(folder, execution="dense")
    assert not any(isinstance(module, TransformBase) for module in model.modules())
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_dense_weights_that_are_rotated(tiny_llama: Path, tmp_path: Path) -> None:
    """Nothing is compressed: config.json has no other entry than the rotations, and the head is left out."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    groups = TransformConfig.model_validate({"config_groups": CONFIGS["random-hadamard"]})
    apply_transform_config(model, groups)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    entry = {
        "quant_method": "compressed-tensors",
        "sparsity_config": {},
        "transform_config": groups.model_dump(mode="json"),
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    for execution in ("auto", "dense"):
        found = SparseAutoModelForCausalLM.from_pretrained(tmp_path, execution=execution)
        error = (found(IDS).logits - model(IDS).logits).norm() / model(IDS).logits.norm()
        assert error < (1e-6 if execution == "auto" else 2e-2)


@torch.no_grad()
def test_queries_and_keys(tiny_llama: Path, tmp_path: Path) -> None:
    """Their rotation turns the directions in which a cache rounds keys, and nothing else."""
    compressed(tiny_llama, tmp_path / "out", FP8 | {"dynamic": False})
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    apply_transform_config(model, TransformConfig.model_validate({"config_groups": QUERIES_AND_KEYS}))
    extra = {
        f"{name}.weight": module.weight.detach().clone()
        for name, module in model.named_modules()
        if isinstance(module, TransformBase) and name.startswith("model.layers.0.")
    }
    extra.popitem()  # one matrix for all
    before = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    add(tmp_path / "out", extra, {"config_groups": QUERIES_AND_KEYS})
    after = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    outputs = [one(IDS, use_cache=True) for one in (before, after)]
    assert isinstance(outputs[1].cache.layers[0], ByteLayer)
    error = (outputs[0].logits - outputs[1].logits).norm() / outputs[0].logits.norm()
    assert 0 < error < 0.2
    layer, (keys, _) = outputs[1].cache.layers[0], outputs[1].cache.layers[0].codecs
    matrix = extra.popitem()[1] / 4
    turned = keys.decode(layer.keys, torch.bfloat16).float() @ matrix
    numbers = layer.keys.view(torch.float8_e4m3fn).float() * after.model.layers[0].self_attn.k_scale.float()
    torch.testing.assert_close(turned, numbers, atol=3e-2, rtol=3e-2)
    single = {"r3": QUERIES_AND_KEYS["r3"] | {"apply": QUERIES_AND_KEYS["r3"]["apply"][:1]}}
    add(tmp_path / "out", {}, {"config_groups": single})
    with pytest.raises(ValueError, match=r"self_attn must rotate queries \(q_attn\) and keys"):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("drop", "extra", "message"),
    [
        ("r1_input.weight", {}, "no tensor of the checkpoint fills model.layers.0.self_attn.q_proj.r1_input, 64 x 64"),
        (None, {"model.layers.1.mlp.up_proj.r1_input.weight": torch.eye(48)}, "r1_input.weight belong to no layer"),
    ],
)
def test_matrices_that_do_not_fit_are_named(
    drop: str | None, extra: dict[str, Tensor], message: str, rotated: Callable[..., Any], tmp_path: Path
) -> None:
    folder, _ = rotated("random-hadamard")
    tensors = load_file(folder / "model.safetensors") | extra
    kept = {name: one for name, one in tensors.items() if drop is None or not name.endswith(drop)}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises((ValueError, VerificationError), match=message):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_recipe_over_rotations_is_refused(rotated: Callable[..., Any], tmp_path: Path) -> None:
    folder, _ = rotated("hadamard")
    assert any("is rotated (transform_config)" in text for text in plan(folder, "w8a16").errors)
    with pytest.raises(PlanError, match=r"is rotated.*execution=\"dense\""):
        SparseAutoModelForCausalLM.from_pretrained(folder, recipe="w8a16", requantize=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["transform_config"]["config_groups"]["r4"]["kind"] = "?"
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="transform_config is not one that compressed-tensors accepts"):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path)
