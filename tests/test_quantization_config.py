"""`quantization_config` as compressed-tensors itself reads it: by its parser, its matching and its module set-up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.utils.match import match_named_modules, match_targets
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from sparseautomodel import oneshot, plan
from sparseautomodel.modifiers import Layer
from sparseautomodel.quantization_config import read_schemes, same_storage, write_config

NEEDED = {
    "": {"quant_method", "quantization_status", "format", "config_groups", "ignore"},
    "group": {"targets", "weights", "input_activations", "output_activations", "format"},
    "args": {"num_bits", "type", "symmetric", "strategy", "dynamic", "group_size", "block_structure", "scale_dtype"},
}
"""Every field that has ever to be written. Others are refused by older or stricter parsers, or say nothing."""

PRESETS = ("W4A16", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "NVFP4", "NVFP4A16", "MXFP4A16", "W4A16_ASYM")
KINDS = {"head": "Linear", "embedding": "Embedding", "router": "Router", "vision": "Linear"}


def layer(name: str, role: str = "block", expert: bool = False, module: str | None = None) -> Layer:
    kinds = (KINDS.get(role, "Linear"),)
    return Layer(name, module or name, kinds, (128, 128), torch.bfloat16, role=role, expert=expert)


def scheme(name: str, **changes: Any) -> QuantizationScheme:
    made = preset_name_to_scheme(name, ["Linear"])
    return made.model_copy(update={"weights": made.weights.model_copy(update=changes)})


def tiny_tree(names: dict[str, str]) -> nn.Module:
    """A module tree with a module of the given class at each name, as a reader of the config would meet them."""
    root = nn.Module()
    for name, kind in names.items():
        parent = root
        *path, last = name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        made = nn.Embedding(4, 4) if kind == "Embedding" else nn.Linear(4, 4)
        if kind == "Router":  # its own class in transformers 5, a Linear in servers
            made = type("Router", (nn.Module,), {})()
        parent.add_module(last, made)
    return root


def stock_schemes(config: dict[str, Any], layers: list[Layer]) -> dict[str, QuantizationScheme]:
    """Name -> scheme by compressed-tensors' own matching on modules."""
    parsed = QuantizationConfig.model_validate(config)
    targets = {target: group for group in parsed.config_groups.values() for target in group.targets}
    kinds = {one.name: one.kinds[0] for one in layers}
    tree = tiny_tree(kinds)
    return {
        name: targets[match_targets(name, module, targets)[0]]
        for name, module in match_named_modules(tree, targets, parsed.ignore)
        if name in kinds  # and not a container on the way to it
    }


names = st.builds(
    "model.layers.{}.{}".format,
    st.integers(0, 11),
    st.sampled_from(
        ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "mlp.experts.1.w1", "up_proj"]
    ),
)
others = st.sampled_from(
    [
        ("lm_head", "head"),
        ("model.embed_tokens", "embedding"),
        ("model.layers.1.mlp.gate", "router"),
        ("visual.q_proj", "vision"),
    ]
)


@given(
    blocks=st.dictionaries(names, st.sampled_from([None, *PRESETS]), min_size=1, max_size=24),
    rest=st.dictionaries(others, st.sampled_from([None, "W8A16", "W4A16"]), max_size=4),
)
def test_every_set_of_layers_and_schemes_is_read_back_as_it_was(
    blocks: dict[str, str | None], rest: dict[tuple[str, str], str | None]
) -> None:
    layers = [layer(name) for name in blocks] + [layer(name, role) for name, role in rest]
    chosen = blocks | {name: preset for (name, role), preset in rest.items() if role != "router"}
    schemes = {name: scheme(preset) for name, preset in chosen.items() if preset is not None}
    if not schemes:
        return
    config = json.loads(json.dumps(write_config(schemes, layers)))
    for read in (read_schemes(config, layers), stock_schemes(config, layers)):
        assert read.keys() == schemes.keys()
        assert all(same_storage(read[name], schemes[name]) for name in schemes)
    check_fields(config)


def check_fields(config: dict[str, Any]) -> None:
    assert set(config) <= NEEDED[""] and not config.get("sparsity_config")
    for group in config["config_groups"].values():
        assert set(group) <= NEEDED["group"]
        for part in ("weights", "input_activations", "output_activations"):
            assert set(group.get(part, {})) <= NEEDED["args"]
        assert "group_size" not in group["weights"] or group["weights"]["strategy"] in ("group", "tensor_group")
        assert "block_structure" not in group["weights"] or group["weights"]["strategy"] == "block"


def test_a_field_that_does_not_apply_is_not_written() -> None:
    """F5: `actorder` means something for groups alone."""
    layers = [layer("model.layers.0.q_proj")]
    for name, changes, written in (
        ("W8A8", {"actorder": "static"}, False),
        ("W4A16", {"actorder": "static", "group_size": 64}, True),
        ("W4A16", {"observer": "mse"}, False),
    ):
        made = {layers[0].name: scheme(name, **changes)}
        args = write_config(made, layers)["config_groups"]["group_0"]["weights"]
        assert ("actorder" in args) == written and "observer" not in args
    assert (
        "scale_dtype"
        not in write_config({layers[0].name: scheme("W4A16")}, layers)["config_groups"]["group_0"]["weights"]
    )
    assert (
        "scale_dtype"
        in write_config({layers[0].name: scheme("MXFP4A16")}, layers)["config_groups"]["group_0"]["weights"]
    )


def test_targets_of_most_layers_are_the_class_that_servers_look_for() -> None:
    """C9: a server finds the scheme of fused experts by the class `Linear` alone."""
    layers = [
        layer(f"model.layers.{i}.mlp.experts.{j}.w1", expert=True, module=f"model.layers.{i}.mlp.experts")
        for i in (0, 1)
        for j in (0, 1)
    ]
    config = write_config({one.name: scheme("W4A16") for one in layers}, [*layers, layer("lm_head", "head")])
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"] and config["ignore"] == ["lm_head"]


def test_names_are_patterns_and_not_hundreds_of_paths() -> None:
    """F6: paths are those of the checkpoint (and of the model, where they differ), as patterns over the indices."""
    layers = [layer(f"model.layers.{i}.mlp.{part}") for i in range(60) for part in ("up_proj", "down_proj")]
    routers = [layer(f"model.layers.{i}.block.gate", "router", module=f"model.layers.{i}.mlp.gate") for i in range(60)]
    schemes = {one.name: scheme("W8A8" if "down" in one.name else "W4A16") for one in layers}
    config = write_config(schemes, [*layers, *routers])
    assert config["ignore"] == [r"re:^model\.layers\.\d+\.block\.gate$", r"re:^model\.layers\.\d+\.mlp\.gate$"]
    targets = sorted(target for group in config["config_groups"].values() for target in group["targets"])
    assert targets == ["Linear", r"re:^model\.layers\.\d+\.mlp\.down_proj$"]
    assert config["format"] == "mixed-precision"
    assert {group["format"] for group in config["config_groups"].values()} == {"pack-quantized", "int-quantized"}


@pytest.mark.parametrize("odd", range(4))
def test_patterns_never_catch_another_layer(odd: int) -> None:
    layers = [layer(f"model.layers.{i}.mlp.up_proj") for i in range(4)]
    schemes = {one.name: scheme("W4A16") for one in layers if one is not layers[odd]}
    config = write_config(schemes, layers)
    assert config["ignore"] == [layers[odd].name]
    assert stock_schemes(config, layers).keys() == schemes.keys()
    mixed = {one.name: scheme("W8A16" if one is layers[odd] else "W4A16") for one in layers}
    read = stock_schemes(write_config(mixed, layers), layers)
    assert {name: read[name].weights.num_bits for name in read} == {
        one.name: 8 if one is layers[odd] else 4 for one in layers
    }


def test_names_with_characters_of_regexes() -> None:
    layers = [layer(f"model.layers.{i}.a+b(c).w") for i in (0, 1)] + [layer(f"model.layers.{i}.aab.w") for i in (0, 1)]
    schemes = {layers[0].name: scheme("W4A16"), layers[1].name: scheme("W4A16")}
    config = write_config(schemes, layers)
    assert stock_schemes(config, layers).keys() == schemes.keys()
    assert all(re.compile(name.removeprefix("re:")) for name in config["ignore"])


def test_exact_names_come_before_patterns_and_those_before_classes() -> None:
    weights = {bits: {"num_bits": bits, "strategy": "channel"} for bits in (2, 3, 4, 8)}
    groups = {
        "class": {"targets": ["Linear"], "weights": weights[8]},
        "later": {"targets": ["re:.*q_proj$"], "weights": weights[4]},
        "sooner": {"targets": ["re:.*layers.*"], "weights": weights[3]},
        "exact": {"targets": ["model.layers.0.q_proj"], "weights": weights[2]},
    }
    layers = [
        layer(name) for name in ("model.layers.0.q_proj", "model.layers.1.q_proj", "other.q_proj", "other.k_proj")
    ]
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": []}
    for read in (read_schemes(config, layers), stock_schemes(config, layers)):
        assert {name: found.weights.num_bits for name, found in read.items()} == {
            "model.layers.0.q_proj": 2,
            "model.layers.1.q_proj": 3,  # of two patterns the first in the alphabet
            "other.q_proj": 4,
            "other.k_proj": 8,
        }


def test_what_the_stock_parser_refuses_is_a_value_error_with_its_reason() -> None:
    for config in (
        {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "bitz": 3}}}},
        {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "cabbage"}}}},
        {"quant_method": "compressed-tensors"},
    ):
        with pytest.raises(ValueError, match="not one that compressed-tensors accepts"):
            read_schemes(config, [layer("a")])


def test_storage_is_compared_without_targets_and_observers() -> None:
    assert same_storage(scheme("W4A16"), scheme("W4A16", observer="mse").model_copy(update={"targets": ["x"]}))
    assert not same_storage(scheme("W4A16"), scheme("W4A16", group_size=64))
    assert not same_storage(scheme("W8A16", group_size=None, strategy="channel"), scheme("W8A8"))


W4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
MIXED = {
    "config_groups": {
        "a": {"targets": ["Linear"], "weights": W4},
        "b": {"targets": ["re:.*(down_proj|w2)$"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
        "c": {"targets": ["lm_head"], "weights": {"num_bits": 8, "strategy": "channel"}},
    },
    "ignore": ["re:.*layers.1.self_attn.o_proj"],
}
RECIPES: dict[str, Any] = {"w4a16": "w4a16", "mixed": {"modifiers": [{"QuantizationModifier": MIXED}]}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fixture", ["tiny_llama", "tied_llama", "tiny_mixtral", "tiny_qwen3_moe"])
@pytest.mark.parametrize("name", RECIPES)
def test_stock_sets_up_exactly_the_planned_modules(
    name: str, fixture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """C8: what was targeted is never in `ignore`, and nothing else is set up by the stock code."""
    folder = request.getfixturevalue(fixture)
    planned = plan(folder, RECIPES[name])
    oneshot(folder, RECIPES[name], output=tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    entry = QuantizationConfig.model_validate(config.quantization_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    apply_quantization_config(model, entry, show_progress=False)
    found = {
        key: module.quantization_scheme
        for key, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    wanted = {
        one.name: planned.schemes[one.name]
        for one in planned.all_layers
        if one.name in planned.schemes and not one.expert
    }
    assert found.keys() == wanted.keys()
    assert all(same_storage(found[key], wanted[key]) for key in wanted)
    experts = [one for one in planned.all_layers if one.expert]
    assert stock_schemes(config.quantization_config, experts).keys() == {one.name for one in experts}
    check_fields(config.quantization_config)


@pytest.mark.parametrize("kind", ["float", "int"])
def test_a_cache_is_written_with_the_fields_that_apply_and_read_back(kind: str) -> None:
    cache = QuantizationArgs(num_bits=8, type=kind, strategy="tensor", observer="static_minmax")
    q = layer("model.layers.0.self_attn.q_proj")
    config = write_config({q.name: scheme("W8A8")}, [q], cache)
    written = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "tensor", "dynamic": False}
    assert json.loads(json.dumps(config["kv_cache_scheme"])) == written
    assert QuantizationConfig.model_validate(config).kv_cache_scheme == QuantizationArgs(**written)
    assert "kv_cache_scheme" not in write_config({q.name: scheme("W8A8")}, [q])
