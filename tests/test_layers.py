"""The layers of a checkpoint as it stands: counted against the files, schemes against what was asked for."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, BitsAndBytesConfig, LlamaConfig

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, plan
from sparseautomodel.architecture import auto_class_for, read_architecture
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.layers import (
    StoredLayers,
    attention_modules,
    cache_scales,
    is_attention,
    quantization_of,
    stored_layers,
)
from sparseautomodel.modifiers import Layer
from sparseautomodel.plan import PlanError

pytestmark = pytest.mark.filterwarnings("ignore")

MIXED = {
    "config_groups": {
        "a": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        },
        "b": {"targets": ["re:.*(down_proj|w2)$"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    }
}
RECIPE = {"modifiers": [{"QuantizationModifier": MIXED}]}


def stored(folder: Path) -> StoredLayers:
    config, checkpoint = AutoConfig.from_pretrained(folder), open_checkpoint(folder)
    return stored_layers(checkpoint, read_architecture(auto_class_for(config), config, checkpoint))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def edited(folder: Path, target: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(written | config))
    return target


@pytest.mark.parametrize("fixture", ["tiny_llama", "tied_llama", "tiny_mixtral", "tiny_gpt2", "tiny_bert"])
def test_every_parameter_of_a_dense_checkpoint_is_counted_once(fixture: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(fixture)
    found = stored(folder)
    total = sum(value.numel() for value in tensors_of(folder).values())
    assert sum(math.prod(layer.shape) for layer in found.layers) + found.other_parameters == total
    assert not found.schemes and not found.problems


@pytest.mark.parametrize("fixture", ["tiny_llama", "tied_llama", "tiny_mixtral", "tiny_qwen3_moe"])
def test_compressed_layers_are_those_that_were_planned(
    fixture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(fixture)
    planned, dense = plan(folder, RECIPE), stored(folder)
    oneshot(folder, RECIPE, output=tmp_path / "out")
    found = stored(tmp_path / "out")
    assert {layer.name: layer for layer in found.layers} == {layer.name: layer for layer in dense.layers}
    assert found.schemes.keys() == planned.schemes.keys() and not found.problems
    for name, scheme in found.schemes.items():
        assert scheme.weights.num_bits == (8 if name.endswith(("down_proj", "w2")) else 4)
    assert found.other_parameters == dense.other_parameters


def test_what_is_quantized_is_read_off_the_tensors(tiny_llama: Path, tmp_path: Path) -> None:
    """F6: names in `ignore` may be those of another version; the tensors say which layers are compressed."""
    given = {"modifiers": [{"QuantizationModifier": {"scheme": "W4A16", "group_size": 32, "ignore": ["re:.*o_proj"]}}]}
    oneshot(tiny_llama, given, output=tmp_path / "out")
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert any("o_proj" in name for name in entry["ignore"])
    entry["ignore"] = ["an.older.name.of.lm_head"]
    renamed = edited(tmp_path / "out", tmp_path / "renamed", tensors_of(tmp_path / "out"), quantization_config=entry)
    assert stored(renamed).schemes.keys() == stored(tmp_path / "out").schemes.keys()
    one, other = (SparseAutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", renamed))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_a_compressed_layer_without_a_group_is_a_problem(tiny_llama: Path, tmp_path: Path) -> None:
    oneshot(tiny_llama, RECIPE, output=tmp_path / "out")
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = entry["config_groups"].values()
    entry["config_groups"] = {"only": next(group for group in groups if "Linear" not in group["targets"])}
    broken = edited(tmp_path / "out", tmp_path / "broken", tensors_of(tmp_path / "out"), quantization_config=entry)
    found = stored(broken)
    assert found.problems and all("no group of quantization_config matches it" in text for text in found.problems)
    with pytest.raises(PlanError, match=r"q_proj has packed or scaled tensors, but no group"):
        SparseAutoModelForCausalLM.from_pretrained(broken)


def test_groups_in_the_order_of_activations_are_seen(tiny_llama: Path, tmp_path: Path) -> None:
    """F8: a tensor of the scheme that nobody uses makes every value of the layer wrong."""
    oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj"
    index = {f"{name}.weight_g_idx": torch.zeros(64, dtype=torch.int32)}
    ordered = edited(tmp_path / "out", tmp_path / "ordered", tensors_of(tmp_path / "out") | index)
    found = stored(ordered)
    assert {one for one, scheme in found.schemes.items() if scheme.weights.actorder == "group"} == {name}
    assert not found.problems


def test_scales_say_the_dtype_of_a_compressed_layer(tiny_llama: Path, tmp_path: Path) -> None:
    tensors = {name: value.half() for name, value in tensors_of(tiny_llama).items()}
    half = edited(tiny_llama, tmp_path / "half", tensors)
    for name, wanted in (
        ("w4a16", torch.float16),
        ("nvfp4a16", torch.bfloat16),
    ):  # NVFP4's scales are FP8: the config's
        oneshot(half, name, output=tmp_path / name)
        found = stored(tmp_path / name)
        assert {layer.dtype for layer in found.layers if layer.name in found.schemes} == {wanted}


def test_whose_quantization_a_config_holds() -> None:
    entry = {"quant_method": "compressed-tensors", "config_groups": {}}
    assert quantization_of(LlamaConfig()) is None
    assert quantization_of(LlamaConfig(quantization_config=entry)) == entry
    assert quantization_of(LlamaConfig(quantization_config={"quant_method": "gptq"})) is None
    assert quantization_of(LlamaConfig(quantization_config=BitsAndBytesConfig(load_in_8bit=True))) is None


def test_a_config_that_the_stock_parser_refuses(tiny_llama: Path, tmp_path: Path) -> None:
    oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    entry["config_groups"]["group_0"]["weights"]["num_bitz"] = 4
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "out" / "config.json").read_text()) | {"quantization_config": entry})
    )
    with pytest.raises(ValueError, match="num_bitz"):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path / "copy")


class TinyAttention(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (TinyAttention(layer_idx=3), True),
        (TinyAttention(layer_idx=3, is_causal=True), True),
        (TinyAttention(layer_idx=None), False),
        (TinyAttention(), False),
        (TinyAttention(layer_idx=3, is_causal=False), False),
        (TinyAttention(layer_idx=3, is_kv_shared_layer=True), False),
        (nn.Linear(4, 4), False),
    ],
)
def test_which_modules_hand_keys_and_values_to_a_cache(module: nn.Module, expected: bool) -> None:
    assert is_attention(module) == expected


def test_attention_modules_have_the_names_of_the_checkpoint() -> None:
    model = nn.ModuleDict({"inner": nn.ModuleList([TinyAttention(layer_idx=0), TinyAttention(layer_idx=1)])})
    layers = [
        Layer(name, module, ("Linear",), (4, 4), torch.bfloat16)
        for name, module in (("model.inner.0.q_proj", "inner.0.q_proj"), ("model.inner.1.query", "inner.1.q_proj"))
    ]
    assert attention_modules(model, layers) == {"model.inner.0": ("inner.0", 0)}


def test_scales_of_a_cache_are_those_that_the_config_announces(tiny_llama: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_llama)
    names = ["a.k_proj.weight", "a.k_scale", "a.v_scale", "a.q_scale", "a.k_proj.weight_scale"]
    assert not cache_scales(names, config)
    config.quantization_config = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    assert list(cache_scales(names, config)) == ["a.k_scale", "a.v_scale"]
