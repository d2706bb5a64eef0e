"""Faults that users of other tools met while calibrating, each a kind; the label of the entry is in the docstring."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig

from sparseautomodel import Recipe, SparseAutoModelForCausalLM, oneshot, verify
from sparseautomodel.calibrated import scratch_of
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.masks import satisfies
from sparseautomodel.modifiers import MODIFIERS, Weight
from sparseautomodel.recipe import RecipeError, shipped
from sparseautomodel.statistics import LayerError
from tests.conftest import SIZES

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).resolve().parents[1]
GPTQ: dict[str, Any] = {"GPTQModifier": {"scheme": "W4A16", "group_size": 32}}
ASYMMETRIC: dict[str, Any] = {"GPTQModifier": {"scheme": "W4A16_ASYM", "group_size": 32}}
SPARSE: dict[str, Any] = {"SparseGPTModifier": {"mask_structure": "2:4"}}
WANDA: dict[str, Any] = {"WandaPruningModifier": {"mask_structure": "2:4"}}
BLOCK = "model.layers.0"
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel"}
STATIC_W8A8: dict[str, Any] = {
    "QuantizationModifier": {
        "config_groups": {"all": {"targets": ["Linear"], "weights": CHANNELS, "input_activations": STATIC}}
    }
}


@pytest.fixture
def rows() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(1, 250, (length,))} for length in (24, 24, 17, 24)]


@pytest.mark.parametrize("entry", [GPTQ, SPARSE, WANDA], ids=["gptq", "sparsegpt", "wanda"])
def test_inputs_of_low_rank_are_solved_all_the_same(entry: Any, tiny_llama: Path, tmp_path: Path) -> None:
    """E1: one token again and again, and a dead column: the Hessian has no inverse of its own."""
    source = edited(tiny_llama, tmp_path / "source", f"{BLOCK}.input_layernorm.weight", {5: 0.0, 6: 0.0})
    for name, path in (("repeated", tiny_llama), ("dead", source)):
        report = oneshot(path, modifiers(entry), data=[{"input_ids": [7] * 64}], output=tmp_path / name)
        sound(tmp_path / name)
        for layer in report.calibration["layers"]:
            assert layer["fallback"] is None and layer["after"] <= layer["before"] * (1 + 1e-6), layer


@pytest.mark.parametrize("entry", [GPTQ, SPARSE, WANDA], ids=["gptq", "sparsegpt", "wanda"])
def test_overflow_in_float16_falls_back_and_is_said(entry: Any, tiny_llama: Path, tmp_path: Path, rows: Any) -> None:
    """E1: inputs that are not finite leave the layers that see them at the plain method, by name, and no others."""
    source = edited(tiny_llama, tmp_path / "source", "model.layers.1.input_layernorm.weight", {3: 6e4}, torch.float16)
    report = oneshot(source, modifiers(entry), data=rows, output=tmp_path / "out")
    sound(tmp_path / "out")
    fallen = {layer["name"]: layer["fallback"] for layer in report.calibration["layers"] if layer["fallback"]}
    assert all("not finite" in reason for reason in fallen.values())
    assert {f"model.layers.1.self_attn.{name}_proj" for name in "qkv"} <= fallen.keys()
    assert not any(name.startswith(BLOCK) for name in fallen)


@pytest.mark.parametrize("config", [{"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "gptq"}])
def test_source_that_another_tool_has_quantized_is_refused_at_once(
    config: dict[str, Any], tiny_llama: Path, tmp_path: Path, rows: Any
) -> None:
    """E7: a broadcast error in the middle of the run, from codes that were taken for weights."""
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    whole = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(whole | {"quantization_config": config}))
    with pytest.raises(ValueError, match=config["quant_method"]):
        oneshot(source, modifiers(GPTQ), data=rows, output=tmp_path / "out")
    assert not (tmp_path / "out").exists() and not scratch_of(tmp_path / "out").exists()


@pytest.mark.parametrize("pruning", [WANDA, SPARSE], ids=["wanda", "sparsegpt"])
@pytest.mark.parametrize("runs", [1, 2])
def test_zeros_survive_gptq_with_zero_points(
    pruning: Any, runs: int, tiny_llama: Path, tmp_path: Path, rows: Any
) -> None:
    """E8: pruned, quantized asymmetrically, saved, reloaded: two exact zeros in every four, as served."""
    if runs == 2:
        oneshot(tiny_llama, modifiers(pruning), data=rows, output=tmp_path / "pruned")
        oneshot(tmp_path / "pruned", modifiers(ASYMMETRIC), data=rows, output=tmp_path / "out")
        verify(tmp_path / "out", against=tmp_path / "pruned").raise_for_problems()
    else:
        oneshot(tiny_llama, modifiers(pruning, ASYMMETRIC), data=rows, output=tmp_path / "out")
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="dense")
    model.save_pretrained(tmp_path / "again")
    for folder in (tmp_path / "out", tmp_path / "again"):
        model = SparseAutoModelForCausalLM.from_pretrained(folder, execution="dense")
        weights = [value for name, value in model.named_parameters() if name.endswith("_proj.weight")]
        assert len(weights) == 14 and all(satisfies(weight, 2, 4) for weight in weights)


def pairs() -> dict[str, Any]:
    """Every recipe of the project's texts that has more than one modifier."""
    found = {name: Recipe.load(name) for name in shipped()}
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "recipes" / "README.md"]:
        for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", file.read_text(), re.DOTALL)):
            try:
                found[f"{file.name} {number}"] = Recipe.load(text)
            except RecipeError:
                continue  # not a recipe, or one that shows a mistake
    return {name: recipe for name, recipe in found.items() if len(recipe.modifiers) > 1}


@pytest.mark.parametrize("name", pairs())
def test_documented_pairs_of_modifiers_run(name: str, tiny_llama: Path, tmp_path: Path, rows: Any) -> None:
    """E9: the documented prune-then-quantize example failed in its own mask handling."""
    recipe = pairs()[name]
    data = rows if any(modifier.needs_data for modifier in recipe.modifiers) else None
    report = oneshot(tiny_llama, recipe, data=data, output=tmp_path / "out")
    sound(tmp_path / "out")
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="dense")
    assert model(torch.arange(1, 9)[None]).logits.isfinite().all()
    weights = dict(model.named_parameters())
    for layer, structure in report.structures.items():
        most, group = map(int, structure.split(":"))
        assert satisfies(weights[f"{layer}.weight"], most, group), layer


def test_pruned_and_quantized_model_says_something(tiny_llama: Path, tmp_path: Path, rows: Any) -> None:
    """E10: the run succeeded and the model emitted zeros: greedy tokens, and how far its logits are from the dense."""
    oneshot(tiny_llama, modifiers(SPARSE, GPTQ), data=rows, output=tmp_path / "out")
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    inputs = rows[0]["input_ids"][None]
    with torch.no_grad():
        wanted, found = dense(inputs).logits, model(inputs).logits
    assert (found - wanted).norm() < 0.7 * wanted.norm()
    tokens = model.generate(inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, inputs.shape[1] :]
    assert len(tokens) == 8 and tokens.any()


@pytest.mark.parametrize("entry", [GPTQ, SPARSE, WANDA], ids=["gptq", "sparsegpt", "wanda"])
def test_experts_that_saw_no_token_are_named_and_finite(
    entry: Any, save_model: Callable[[PreTrainedConfig], Path], tmp_path: Path
) -> None:
    """E11: eight experts, one a token, two samples: those unseen got scales of NaN."""
    source = save_model(MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=1))
    data = [{"input_ids": [3, 4]}, {"input_ids": [5]}]
    report = oneshot(source, modifiers(entry), data=data, output=tmp_path / "out")
    sound(tmp_path / "out")
    layers = {layer["name"]: layer for layer in report.calibration["layers"] if "experts" in layer["name"]}
    assert len(layers) == 2 * 8 * 3
    unseen = {name for name, layer in layers.items() if "no calibration token" in (layer["fallback"] or "")}
    assert len(unseen) >= 2 * (8 - 3) * 3
    for name in set(layers) - unseen:
        assert layers[name]["after"] is not None, name


def test_experts_that_saw_no_token_have_scales_of_their_inputs(
    save_model: Callable[[PreTrainedConfig], Path], tmp_path: Path
) -> None:
    """E11: activation scales of experts without a token were NaN."""
    source = save_model(MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=1))
    report = oneshot(
        source, modifiers(STATIC_W8A8), data=[{"input_ids": [3, 4]}, {"input_ids": [5]}], output=tmp_path / "out"
    )
    sound(tmp_path / "out")
    scales = {name: value for name, value in tensors_of(tmp_path / "out").items() if name.endswith("input_scale")}
    assert len(scales) == 2 * (4 + 8 * 3)
    said = {layer["name"] for layer in report.calibration["layers"] if layer["fallback"]}
    assert len([name for name in said if ".experts." in name]) >= 2 * (8 - 3) * 3


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3_moe"])
def test_scales_of_the_cache_are_stored_for_every_layer(
    model: str, tmp_path: Path, rows: Any, request: pytest.FixtureRequest
) -> None:
    """E21: servers fell back to a scale of 1.0, since the scales were absent or misnamed."""
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    entry = {"QuantizationModifier": {"scheme": "W8A16", "group_size": 32, "kv_cache_scheme": cache}}
    oneshot(request.getfixturevalue(model), modifiers(entry), data=rows, output=tmp_path / "out")
    sound(tmp_path / "out")
    tensors = tensors_of(tmp_path / "out")
    names = [f"model.layers.{number}.self_attn.{kind}_scale" for number in range(2) for kind in "kv"]
    assert sorted(name for name in tensors if name.endswith(("k_scale", "v_scale"))) == sorted(names)
    assert all(float(tensors[name]) != 1.0 for name in names)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]


def test_rows_that_are_missing_or_empty_are_counted_and_none_is_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    """E13: an empty set failed far away, as statistics that had not been collected."""
    data = ["a text", "", "x", "   "]
    report = oneshot(tiny_llama, modifiers(GPTQ), data=data, num_samples=6, output=tmp_path / "out")
    said = "\n".join(report.warnings)
    assert "2 rows were found, 6 were asked for" in said and "2 empty rows" in said and "1 rows have one token" in said
    assert (report.calibration["num_samples"], report.calibration["num_tokens"]) == (2, 7)
    for nothing in ([], [""], [{"input_ids": [1, 2], "attention_mask": [0, 0]}]):
        with pytest.raises(ValueError, match="no calibration rows are left"):
            oneshot(tiny_llama, modifiers(GPTQ), data=nothing, output=tmp_path / "none")


def test_only_what_needs_data_asks_for_it(tiny_llama: Path, tmp_path: Path) -> None:
    """E14: `NoneType` errors, deep in a loop."""
    nearest = {"QuantizationModifier": GPTQ["GPTQModifier"]}
    assert verify(oneshot(tiny_llama, modifiers(nearest), output=tmp_path / "nearest").output).ok
    for entry in (GPTQ, SPARSE, WANDA):
        with pytest.raises(ValueError, match=r"needs calibration data.*Run oneshot\(path, recipe, data="):
            SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=modifiers(entry))
    report = oneshot(tiny_llama, modifiers(WANDA), num_samples=2, max_length=64, output=tmp_path / "default")
    assert report.calibration["num_tokens"] == 128


@pytest.mark.parametrize("modifier", ["QuantizationModifier", "GPTQModifier"])
def test_layers_with_one_input_have_one_global_scale(
    modifier: str, tiny_llama: Path, tmp_path: Path, rows: Any
) -> None:
    """E17: q, k and v, gate and up had different global scales, and accuracy fell with no error."""
    data = rows if modifier == "GPTQModifier" else None
    oneshot(tiny_llama, modifiers({modifier: {"scheme": "NVFP4A16"}}), data=data, output=tmp_path / "out")
    tensors = tensors_of(tmp_path / "out")
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        scales = {float(tensors[f"{BLOCK}.{name}.weight_global_scale"]) for name in names}
        assert len(scales) == 1 and scales.pop() > 0


def test_run_that_failed_leaves_nothing_behind_for_the_next(
    tiny_llama: Path, tied_llama: Path, tmp_path: Path, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E20: session state of one run leaked into the next."""
    oneshot(tiny_llama, modifiers(GPTQ), data=rows, output=tmp_path / "first")
    threads = set(threading.enumerate())
    gptq = MODIFIERS["GPTQModifier"]
    solve = gptq.solve

    def failing(self: Any, weights: Sequence[Weight], statistic: Any) -> list[LayerError]:
        if "layers.1.mlp" in weights[0].layer.name:
            raise RuntimeError("half-way")
        return solve(self, weights, statistic)

    with monkeypatch.context() as patch:
        patch.setattr(gptq, "solve", failing)
        with pytest.raises(RuntimeError, match="half-way"):
            oneshot(tied_llama, modifiers(GPTQ), data=rows, output=tmp_path / "second")
    assert not (tmp_path / "second").exists() and set(threading.enumerate()) <= threads
    hooks = importlib.import_module("torch.nn.modules.module")
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    oneshot(tiny_llama, modifiers(GPTQ), data=rows, output=tmp_path / "third")
    first, third = tensors_of(tmp_path / "first"), tensors_of(tmp_path / "third")
    assert first.keys() == third.keys() and all(torch.equal(first[name], third[name]) for name in first)


def modifiers(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"modifiers": list(entries)}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor[...] for name, tensor in open_checkpoint(folder).items()}


def sound(folder: Path) -> None:
    """The result is in order, and every scale is finite and above zero."""
    verify(folder).raise_for_problems()
    for name, value in tensors_of(folder).items():
        if value.is_floating_point():
            assert value.float().isfinite().all(), name
        if name.endswith("_scale"):
            assert (value.float() > 0).all(), name


def edited(
    source: Path, target: Path, name: str = "", values: dict[int, float] | None = None, dtype: torch.dtype | None = None
) -> Path:
    """A copy of the folder with other values in one tensor, and perhaps another dtype."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = {key: value.to(dtype or value.dtype) for key, value in load_file(file).items()}
        for at, value in (values or {}).items() if name in tensors else ():
            tensors[name][at] = value
        save_file(tensors, file, metadata={"format": "pt"})
    if dtype is not None:
        config = json.loads((target / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(config))
    return target
