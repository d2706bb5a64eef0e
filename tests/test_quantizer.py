"""The seam to transformers' loader: which modules are put in, what is asked of them, what is written to config.json."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.trainer_utils import validate_quantization_for_training

from sparseautomodel import SparseAutoModelForCausalLM, oneshot
from sparseautomodel.architecture import expert_merges, merges_experts
from sparseautomodel.compressed_experts import CompressedExperts
from sparseautomodel.compressed_layers import CompressedLinear
from sparseautomodel.modifiers.quantization import QuantizationModifier
from sparseautomodel.quantizer import NAME, CompressedConfig, CompressedQuantizer, StoredLayer, put, put_experts

pytestmark = pytest.mark.filterwarnings("ignore")

SCHEME = QuantizationModifier(scheme="W8A16", group_size=32)._groups[0].scheme
PARTS = {
    "weight_packed": ((64, 16), torch.int32),
    "weight_scale": ((64, 2), torch.bfloat16),
    "weight_shape": ((2,), torch.int64),
}
W4 = {"scheme": "W4A16", "group_size": 32}


def stored(module: str, expert: str | None = None, shape: tuple[int, int] = (64, 64)) -> StoredLayer:
    return StoredLayer(module, SCHEME, PARTS, shape, torch.bfloat16, expert)


def skeleton(folder: Path) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)


def recipe(**keys: Any) -> dict[str, Any]:
    return {"modifiers": [{"QuantizationModifier": keys}]}


def test_a_layer_is_replaced_and_keeps_its_bias() -> None:
    model = nn.ModuleDict({"inner": nn.ModuleDict({"layer": nn.Linear(64, 64)})})
    bias = model["inner"]["layer"].bias
    put(model, stored("inner.layer"))
    new = model["inner"]["layer"]
    assert type(new) is CompressedLinear and new.bias is bias and (new.in_features, new.out_features) == (64, 64)
    assert {name: (tuple(value.shape), value.dtype) for name, value in new.named_parameters()} == PARTS | {
        "bias": ((64,), torch.float32)
    }


def test_modules_are_built_without_memory(tiny_llama: Path) -> None:
    model = skeleton(tiny_llama)
    config = CompressedConfig({}, (stored("model.layers.0.self_attn.q_proj"),))
    with torch.device("meta"):
        CompressedQuantizer(config).preprocess_model(model)
    assert all(value.is_meta for value in model.parameters())
    assert isinstance(model.model.layers[0].self_attn.q_proj, CompressedLinear)


@pytest.mark.parametrize("fixture", ["tiny_mixtral", "tiny_qwen3_moe"])
def test_experts_become_layers_under_their_own_names(fixture: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(fixture)
    model = skeleton(folder)
    merges = expert_merges(model)
    name = "model.layers.0.mlp.experts"
    inner, outer = merges[name]["gate_up_proj"], merges[name]["down_proj"]
    with torch.device("meta"):
        put_experts(model, name, [stored(name, f"2.{inner[0]}")], merges[name])
    module = model.get_submodule(name)
    assert isinstance(module, CompressedExperts) and module.num_experts == 4
    assert {key.rpartition(".")[0] for key in module.state_dict()} == {
        f"{i}.{part}" for i in range(4) for part in (*inner, *outer)
    }
    assert isinstance(module.get_submodule(f"2.{inner[0]}"), CompressedLinear)
    assert type(module.get_submodule(f"2.{inner[1]}")) is nn.Linear, "what is not compressed stays dense"
    width = AutoConfig.from_pretrained(folder).intermediate_size if fixture == "tiny_mixtral" else 64
    assert module.get_submodule(f"0.{inner[1]}").weight.shape == (width, 64)
    assert module.get_submodule(f"0.{outer[0]}").weight.shape == (64, width)


def test_no_experts_are_merged_once_some_stay_compressed(tiny_mixtral: Path) -> None:
    for layers in ((), (stored("model.layers.0.mlp.experts", "0.w1"),)):
        model = skeleton(tiny_mixtral)
        quantizer = CompressedQuantizer(CompressedConfig({}, layers))
        with torch.device("meta"):
            quantizer.preprocess_model(model)
        conversions = get_model_conversion_mapping(model, None, quantizer)
        assert any(map(merges_experts, conversions)) == (not layers)
        kinds = {type(layer.mlp.experts).__name__ for layer in model.model.layers}
        assert kinds == ({"CompressedExperts"} if layers else {"MixtralExperts"})


def test_ties_of_what_is_stored_compressed_are_dropped(tied_llama: Path) -> None:
    for module, left in (
        ("lm_head", {}),
        ("model.layers.0.self_attn.q_proj", {"lm_head.weight": "model.embed_tokens.weight"}),
    ):
        model = skeleton(tied_llama)
        with torch.device("meta"):
            CompressedQuantizer(CompressedConfig({}, (stored(module),))).preprocess_model(model)
        assert model.all_tied_weights_keys == left


def test_the_config_is_written_as_compressed_tensors_own() -> None:
    written = {"quant_method": "compressed-tensors", "config_groups": {}}
    config = CompressedConfig(written, (stored("a"),))
    assert config.to_dict() == written and config.to_dict() is not written
    assert json.loads(config.to_json_string(use_diff=False)) == written
    assert copy.deepcopy(config) is config


def test_registered_under_a_name_of_its_own() -> None:
    assert (
        AUTO_QUANTIZER_MAPPING[NAME] is CompressedQuantizer
        and AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] is CompressedConfig
    )
    assert AUTO_QUANTIZER_MAPPING["compressed-tensors"] is not CompressedQuantizer, "stock's own is left alone"
    quantizer = CompressedQuantizer(CompressedConfig({}, ()))
    assert quantizer.is_serializable() and quantizer.is_trainable and quantizer.pre_quantized


@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_mixtral", "tiny_qwen3_moe"])
@pytest.mark.parametrize("keys", [W4, W4 | {"ignore": ["re:.*experts.1.*", "re:.*up_proj", "re:.*gate_proj"]}])
def test_what_save_pretrained_writes_is_what_oneshot_writes(
    fixture: str, keys: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(fixture)
    model = SparseAutoModelForCausalLM.from_pretrained(folder, recipe=recipe(**keys))
    model.save_pretrained(tmp_path / "saved")
    oneshot(folder, recipe(**keys), output=tmp_path / "streamed")
    saved, streamed = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "streamed"))
    assert saved.keys() == streamed.keys()
    for name, value in streamed.items():
        assert value.dtype == saved[name].dtype and torch.equal(value, saved[name]), name
    one, other = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("saved", "streamed"))
    assert one["quantization_config"] == other["quantization_config"]
    assert one["quantization_config"]["quant_method"] == "compressed-tensors"
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_a_loaded_model_is_marked_quantized_and_cannot_be_trained_by_mistake(tiny_llama: Path) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=recipe(**W4))
    assert model.is_quantized and not model.training
    with pytest.raises(ValueError, match="attach trainable adapters"):
        validate_quantization_for_training(model)
    names = {name for name, value in model.named_parameters() if "q_proj" in name and value.requires_grad}
    assert not names
