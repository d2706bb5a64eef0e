"""What the keys of modifiers that quantize mean, and what is refused and how, shown with QuantizationModifier."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams

from sparseautomodel.modifiers import MODIFIERS, Layer, Modifier, ModifierError, Weight
from sparseautomodel.modifiers.gptq import GPTQModifier
from sparseautomodel.modifiers.quantization import QuantizationModifier
from sparseautomodel.modifiers.scheme_keys import SchemeKeys
from sparseautomodel.ranges import InputRange
from sparseautomodel.scales import ErrorSearch, find_global_scale, find_scales


def _layer(name: str = "model.layers.0.mlp.up_proj", shape: tuple[int, int] = (256, 256), **keys: Any) -> Layer:
    return Layer(name, name, keys.pop("kinds", ("Linear",)), shape, torch.bfloat16, **keys)


def _group(targets: Any = ("Linear",), **weights: Any) -> dict[str, Any]:
    return {"targets": list(targets), "weights": weights}


def test_the_keys_alone_are_no_modifier() -> None:
    assert SchemeKeys.__name__ not in MODIFIERS
    with pytest.raises(NotImplementedError, match="SchemeKeys has no data-free form"):
        SchemeKeys(scheme="W4A16").apply(Weight(_layer(), torch.zeros(256, 256)))


STATIC = {"num_bits": 8, "strategy": "tensor"}


def _static(weights: dict[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    return {"config_groups": {"a": _group(**(weights or {"num_bits": 8})) | {"input_activations": inputs or STATIC}}}


@pytest.mark.parametrize(
    ("keys", "instead"),
    [
        ({"scheme": "FP8"}, "scheme FP8_DYNAMIC"),
        ({"scheme": "nvfp4"}, "scheme NVFP4A16"),
        ({"scheme": {"W8A8": ["re:.*up"], "FP8": ["Linear"]}}, "scheme FP8_DYNAMIC"),
        ({"config_groups": {"W8A8": ["re:.*up"], "NVFP4": ["Linear"]}}, "scheme NVFP4A16"),
        (_static(), "dynamic: true in input_activations"),
    ],
)
def test_static_activations_need_data_and_name_what_does_not(keys: dict[str, Any], instead: str) -> None:
    modifier = QuantizationModifier(**keys)
    assert modifier.needs_data and not QuantizationModifier.needs_data
    assert modifier.without_data() == instead
    assert dataclasses.replace(modifier).needs_data and modifier == QuantizationModifier(**modifier.to_dict())
    dynamic = QuantizationModifier(scheme="W8A8")
    assert not dynamic.needs_data and dynamic.without_data() is None
    assert GPTQModifier(scheme="W8A8").needs_data and GPTQModifier(scheme="FP8").without_data() is None


def test_only_static_activations_are_observed() -> None:
    modifier = QuantizationModifier(scheme={"FP8": ["re:.*up_proj"], "W8A8": ["Linear"]})
    seen = modifier.input_range(_layer(shape=(64, 256)))
    assert isinstance(seen, InputRange) and seen.columns == 256 and seen.tokens == 0
    assert modifier.input_range(_layer("down_proj")) is None and modifier.statistic(_layer()) is None
    assert Modifier().input_range(_layer()) is None
    with pytest.raises(NotImplementedError, match="no scales of activations"):
        Modifier().set_input_scales([], seen)


def _weights(*names: str, dtype: torch.dtype = torch.bfloat16) -> list[Weight]:
    layers = [dataclasses.replace(_layer(name, (8, 64)), dtype=dtype) for name in names]
    return [Weight(layer, torch.randn(8, 64).to(dtype)) for layer in layers]


def _range(*inputs: torch.Tensor) -> InputRange:
    seen = InputRange(64)
    for one in inputs:
        seen.update(one)
    return seen


def test_layers_of_one_input_share_the_scales_of_their_input() -> None:
    keys = {"scheme": {"FP8": ["re:.*q", "re:.*k"], "W8A8": ["Linear"]}}
    inputs = torch.randn(30, 64).bfloat16()
    q, k, v = _weights("q", "k", "v")
    assert not QuantizationModifier(**keys).set_input_scales([q, k, v], _range(inputs[:7], inputs[7:]))
    expected = calculate_qparams(inputs.min(), inputs.max(), PRESET_SCHEMES["FP8"]["input_activations"])[0]
    for weight in (q, k):
        assert torch.equal(weight.input_scale, expected) and weight.input_scale.dtype == torch.bfloat16
        assert weight.input_zero_point is None and weight.input_global_scale is None
    assert v.input_scale is None


def test_an_input_without_a_token_takes_the_extremes_of_like_inputs() -> None:
    """E11: an expert that no token reaches has no scale that is NaN or made of nothing, and it is said."""
    modifier, others = QuantizationModifier(**_static()), [torch.randn(9, 64).bfloat16() * size for size in (1, 3)]
    (expert,), (alone,), (reached,) = _weights("experts.2.up"), _weights("up"), _weights("experts.0.up")
    (error,) = modifier.set_input_scales([expert], _range(), [_range(), *map(_range, others)])
    assert error.name == "experts.2.up" and "no calibration token" in error.fallback
    assert not modifier.set_input_scales([reached], _range(*others))
    assert torch.equal(expert.input_scale, reached.input_scale)
    (error,) = modifier.set_input_scales([alone], _range())
    assert "from -1 to 1" in error.fallback and math.isnan(error.before)
    assert alone.input_scale.tolist() == torch.tensor([1 / 127.5]).bfloat16().tolist()


def test_inputs_that_are_not_finite_are_refused() -> None:
    inputs = torch.randn(9, 64)
    for value in (torch.nan, torch.inf):
        inputs[4, 5] = value
        with pytest.raises(ValueError, match="inputs of up are not finite"):
            QuantizationModifier(**_static()).set_input_scales(_weights("up"), _range(inputs))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "scheme", "either scheme or config_groups"),
    ({"scheme": "W4A16", "config_groups": {"W8A8": ["Linear"]}}, "scheme", "either scheme or config_groups"),
    ({"scheme": "W4A61"}, "scheme", "Did you mean W4A16.*Allowed: .*W8A8"),
    ({"scheme": "UNQUANTIZED"}, "scheme", "changes nothing"),
    ({"scheme": 4}, "scheme", "must map names"),
    ({"scheme": {"W4A16": []}}, "scheme", "needs a list of targets"),
    ({"config_groups": {}}, "config_groups", "must map names"),
    ({"config_groups": {"W4A17": ["Linear"]}}, "config_groups", "Did you mean W4A16"),
    ({"config_groups": {"W4A16": ["Linear"]}, "targets": ["re:.*up"]}, "targets", "each names its own targets"),
    ({"scheme": {"W4A16": ["Linear"], "W8A8": "Linear"}}, "targets", "Linear is a target twice"),
    ({"scheme": "W8A8", "group_size": 64}, "group_size", "leave it out"),
    ({"scheme": "MXFP4A16", "group_size": 64}, "group_size", "leave it out"),
    ({"scheme": "W4A16", "group_size": 0}, "group_size", "Write a number, auto, or -1"),
    ({"scheme": "W4A16", "group_size": "small"}, "group_size", "Write a number, auto, or -1"),
    ({"scheme": "W4A16", "group_size": True}, "group_size", "Write a number, auto, or -1"),
    ({"scheme": "W4A16", "observer": "mce"}, "observer", "Allowed: minmax, mse"),
    ({"scheme": "W4A16", "observer": {"input": "minmax"}}, "observer", "only weights are observed"),
    ({"scheme": "W4A16", "observer": "mse", "weight_observer": "minmax"}, "weight_observer", "observer alone"),
    ({"scheme": "W4A16", "skip_indivisible": "yes"}, "skip_indivisible", "true or false"),
    ({"config_groups": {"a": _group(num_bits=9)}}, "config_groups", "a: weights.num_bits is 9. Allowed: 2, 3"),
    ({"config_groups": {"a": _group(num_bits=5, type="float")}}, "config_groups", "Allowed: 4, 6, 8"),
    ({"config_groups": {"a": _group(strategy="grop")}}, "config_groups", "Did you mean group"),
    ({"config_groups": {"a": _group(strategy="token")}}, "config_groups", "Allowed: tensor, channel"),
    ({"config_groups": {"a": _group(group_size="many")}}, "config_groups", "a number or auto, got 'many'"),
    ({"config_groups": {"a": _group(symetric=True)}}, "config_groups", "weights.symetric. Did you mean symmetric"),
    ({"config_groups": {"a": {"targets": ["Linear"], "weight": {}}}}, "config_groups", "Did you mean weights"),
    ({"config_groups": {"a": {"targets": ["Linear"], "weights": 4}}}, "config_groups", "weights must be keys"),
    ({"config_groups": {"a": {"targets": ["Linear"]}}}, "config_groups", "weights are missing"),
    ({"config_groups": {"a": _group([], num_bits=8)}}, "config_groups", "targets are missing"),
    ({"config_groups": {"a": _group(strategy="block")}}, "config_groups", "requires block structure"),
    ({"config_groups": {"a": _group(dynamic=True)}}, "config_groups", "not dynamic"),
    ({"config_groups": {"a": _group(group_size=32, actorder="weight")}}, "config_groups", "needs calibration data"),
    ({"config_groups": {"a": _group(scale_dtype="torch.float32")}}, "config_groups", "leave scale_dtype"),
    ({"config_groups": {"a": _group(strategy="tensor_group", group_size=16)}}, "config_groups", "NVFP4"),
    ({"config_groups": {"a": _group(type="float", symmetric=False)}}, "config_groups", "float weights are symmetric"),
    ({"config_groups": {"a": _group(num_bits=4, type="float", group_size=64)}}, "config_groups", "those of NVFP4A16"),
    ({"config_groups": {"a": _group(num_bits=4, observer="imatrix_mse")}}, "config_groups", "Allowed: minmax, mse"),
    (
        {"config_groups": {"a": _group(observer="mse", observer_kwargs={"patience": 5})}},
        "config_groups",
        "no patience. Allowed: maxshrink, grid, norm",
    ),
    ({"config_groups": {"a": _group() | {"format": "marlin-24"}}}, "config_groups", "is pack-quantized, not marlin-24"),
    (
        {"config_groups": {"a": _group() | {"output_activations": {"num_bits": 8}}}},
        "config_groups",
        "leave output_activations out, or write dynamic: true",
    ),
    *(
        ({"config_groups": {"a": _group() | {"input_activations": inputs}}}, "config_groups", message)
        for inputs, message in (
            ({"num_bits": 8, "strategy": "group", "group_size": 32}, "strategy: tensor, not group"),
            ({"num_bits": 8, "observer": "mse"}, "extremes over all tokens: write observer: minmax, not mse"),
            ({"num_bits": 16}, "integers of up to 8 bits, or symmetric FP8"),
            ({"num_bits": 8, "type": "float", "symmetric": False}, "or symmetric FP8"),
            ({"num_bits": 8, "scale_dtype": "torch.float32"}, "leave scale_dtype and zp_dtype out"),
            (
                {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
                "Write scheme: NVFP4",
            ),
        )
    ),
]


@pytest.mark.parametrize(("keys", "key", "message"), REFUSED)
def test_a_wrong_key_is_said_with_what_is_allowed(keys: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ModifierError, match=message) as error:
        QuantizationModifier(**keys)
    assert error.value.key == key


def test_one_meaning_has_one_spelling() -> None:
    plain = QuantizationModifier(scheme="W4A16", observer="mse")
    assert plain.to_dict() == {"scheme": "W4A16", "observer": "mse"}
    for observer in ({"observer": {"weights": "mse"}}, {"weight_observer": "mse"}, {"observer": "memoryless_mse"}):
        assert QuantizationModifier(scheme="w4a16", **observer) == plain
    args = QuantizationArgs(num_bits=4, group_size=32)
    given = QuantizationModifier(config_groups={"a": QuantizationScheme(targets=["Linear"], weights=args)})
    assert given.to_dict() == {"config_groups": {"a": _group(num_bits=4, group_size=32, strategy="group")}}
    assert QuantizationModifier(scheme={"W8A8": ("Linear",)}) == QuantizationModifier(scheme={"w8a8": "Linear"})
    assert MODIFIERS["QuantizationModifier"] is QuantizationModifier


def test_a_name_comes_before_a_pattern_and_that_before_a_class() -> None:
    modifier = QuantizationModifier(
        scheme={"W8A8": ["Linear"], "W4A16": ["re:.*up_proj"], "FP8_DYNAMIC": ["model.layers.1.mlp.up_proj"]},
        ignore=["re:.*gate_proj"],
    )
    assert modifier.patterns() == ("Linear", "re:.*up_proj", "model.layers.1.mlp.up_proj")
    found = {number: modifier.scheme_of(_layer(f"model.layers.{number}.mlp.up_proj")) for number in (0, 1)}
    assert found[0].weights.num_bits == 4 and found[1].weights.type == "float"
    assert modifier.scheme_of(_layer("model.layers.0.mlp.down_proj")).weights.num_bits == 8
    gate = _layer("model.layers.0.mlp.gate_proj")
    assert modifier.scheme_of(gate) is None and not modifier.selects(gate)


def test_a_class_leaves_heads_and_routers_alone_and_a_name_does_not() -> None:
    for role in ("head", "embedding", "router", "vision"):
        layer = _layer("part", role=role)
        assert not QuantizationModifier(scheme="W8A8").selects(layer)
        assert QuantizationModifier(scheme="W8A8", targets=["Linear", "part"]).selects(layer)
        assert QuantizationModifier(config_groups={"a": _group(["re:part"], num_bits=8)}).selects(layer)


def test_layers_of_an_unquantized_group_stay_dense() -> None:
    modifier = QuantizationModifier(scheme={"W4A16": ["Linear"], "UNQUANTIZED": ["re:.*up_proj"]})
    assert modifier.selects(_layer("a.down_proj")) and not modifier.selects(_layer("a.up_proj"))
    assert modifier.scheme_of(_layer("a.up_proj")) is None


@pytest.mark.parametrize(
    ("widths", "size"), [((256, 512), 128), ((576, 1536), 64), ((4096, 96), 32), ((128, 576, 1536), 64)]
)
def test_auto_is_the_largest_size_that_divides_all(widths: tuple[int, ...], size: int) -> None:
    layers = [_layer(f"layers.{width}", (64, width)) for width in widths]
    modifier = QuantizationModifier(scheme="W4A16", group_size="auto")
    assert modifier.selects(layers[0]) and modifier.scheme_of(layers[0]) is None
    resolved = modifier.resolve(layers)
    assert resolved.to_dict() == {"scheme": "W4A16", "group_size": size}
    assert resolved.scheme_of(layers[0]).weights.group_size == size
    assert resolved.resolve(layers) == resolved
    with pytest.raises(ValueError, match="was not resolved"):
        modifier.apply(Weight(layers[0], torch.zeros(64, widths[0])))


def test_auto_inside_a_group_is_chosen_for_its_layers() -> None:
    groups = {
        "up": _group(["re:.*up"], num_bits=4, group_size="auto"),
        "down": _group(["re:.*down"], num_bits=3, group_size="auto", symmetric=False),
        "rest": _group(num_bits=8, strategy="channel"),
    }
    modifier = QuantizationModifier(config_groups=groups)
    resolved = modifier.resolve([_layer("up", (8, 192)), _layer("down", (8, 256)), _layer("rest", (8, 7))])
    sizes = {name: group["weights"].get("group_size") for name, group in resolved.to_dict()["config_groups"].items()}
    assert sizes == {"up": 64, "down": 128, "rest": None}
    assert modifier.to_dict() == {"config_groups": groups}


def test_where_no_size_divides_the_layers_are_named() -> None:
    layers = [_layer("good", (8, 128)), _layer("vision.odd", (8, 4300))]
    modifier = QuantizationModifier(scheme="W4A16", group_size="auto")
    with pytest.raises(ModifierError, match=r"vision\.odd \(4300 inputs\).*group_size: -1") as error:
        modifier.resolve(layers)
    assert error.value.key == "group_size"


def test_a_layer_that_the_groups_do_not_divide_is_refused_or_skipped() -> None:
    odd, good = _layer("odd", (8, 576)), _layer("good", (8, 256))
    modifier = QuantizationModifier(scheme="W4A16")
    assert modifier.selects(odd) and not modifier.skips(odd)
    with pytest.raises(ValueError, match="odd has 576 inputs, no multiple of group size 128"):
        modifier.apply(Weight(odd, torch.zeros(8, 576)))
    skipping = QuantizationModifier(scheme="W4A16", skip_indivisible=True)
    assert skipping.skips(odd) and not skipping.selects(odd) and skipping.scheme_of(odd) is None
    assert not skipping.skips(good) and skipping.selects(good)
    automatic = QuantizationModifier(scheme="W4A16", group_size="auto", skip_indivisible=True)
    resolved = automatic.resolve([good, odd, _layer("odder", (8, 100))])
    assert resolved.group_size == 64 and resolved.selects(odd) and not resolved.selects(_layer("odder", (8, 100)))


def test_groups_of_activations_must_divide_the_inputs_too() -> None:
    odd = _layer("odd", (576, 576))
    assert QuantizationModifier(scheme="FP8_BLOCK", skip_indivisible=True).skips(odd)
    with pytest.raises(ValueError, match="no multiple of group size 128"):
        QuantizationModifier(scheme="FP8_BLOCK").apply(Weight(odd, torch.zeros(576, 576)))
    blocks = {"a": _group(num_bits=8, type="float", strategy="block", block_structure=[128, 128])}
    work = Weight(odd, torch.randn(576, 576))
    QuantizationModifier(config_groups=blocks).apply(work)
    assert work.scale is not None and work.scale.shape == (5, 5)


def test_minus_one_is_one_scale_a_row() -> None:
    scheme = QuantizationModifier(scheme="W4A16", group_size=-1).scheme_of(_layer())
    assert scheme is not None and scheme.weights == QuantizationArgs(num_bits=4, strategy="channel")


def test_rows_that_must_be_seen_together() -> None:
    layer = _layer(shape=(300, 256))
    expected = {"W4A16": 1, "W8A8": 1, "FP8_BLOCK": 128, "NVFP4A16": 300, "MXFP4A16": 1}
    assert {name: QuantizationModifier(scheme=name).rows(layer) for name in expected} == expected
    tensor = QuantizationModifier(config_groups={"a": _group(num_bits=8, strategy="tensor")})
    assert tensor.rows(layer) == 300


def test_fused_layers_share_a_global_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(32, 256, generator=generator).bfloat16() * size for size in (1, 4, 2)]
    modifier, layer = QuantizationModifier(scheme="NVFP4A16"), _layer(shape=(32, 256))
    shared = modifier.global_scale(layer, weights)
    assert shared is not None and torch.equal(shared, find_global_scale([weights[1]]))
    work = Weight(layer, weights[0], global_scale=shared)
    modifier.apply(work)
    assert work.global_scale is shared
    alone = Weight(layer, weights[0])
    modifier.apply(alone)
    assert alone.global_scale is not None and not torch.equal(alone.global_scale, shared)
    assert QuantizationModifier(scheme="W4A16").global_scale(layer, weights) is None


def test_the_observer_of_a_group_comes_before_that_of_all() -> None:
    options = {"observer": "mse", "observer_kwargs": {"norm": 2.0, "maxshrink": 0.4}}
    groups = {"a": _group(["a"], num_bits=4, group_size=32, **options), "b": _group(["b"], num_bits=4, group_size=32)}
    modifier = QuantizationModifier(config_groups=groups)
    values = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name, search in (("a", ErrorSearch(norm=2.0, maxshrink=0.4)), ("b", None)):
        layer = _layer(name, (16, 256))
        work = Weight(layer, values)
        modifier.apply(work)
        scheme = modifier.scheme_of(layer)
        assert scheme is not None and "observer" not in scheme.weights.model_dump()
        assert torch.equal(work.scale, find_scales(values, scheme.weights, search=search)[0])


def test_scales_are_searched_for_the_columns_that_count() -> None:
    layer, values = _layer(shape=(8, 256)), torch.randn(8, 256).bfloat16()
    importance = torch.rand(256) ** 4
    modifier, work = QuantizationModifier(scheme="W4A16", observer="mse"), Weight(layer, values)
    modifier.set_scales(work, importance)
    args = modifier.weights_of(layer)
    assert torch.equal(work.scale, find_scales(values, args, search=ErrorSearch(), importance=importance)[0])
    assert not torch.equal(work.scale, find_scales(values, args, search=ErrorSearch())[0])


def test_layers_of_one_input_share_what_global_scale_they_lack() -> None:
    modifier, weights = QuantizationModifier(scheme="NVFP4A16"), []
    for number, size in enumerate((1, 4, 2)):
        weights.append(Weight(_layer(f"layers.{number}", (32, 256)), torch.randn(32, 256).bfloat16() * size))
    given = weights[2].global_scale = torch.tensor([5.0])
    modifier.share_global_scale(weights)
    assert torch.equal(weights[0].global_scale, find_global_scale([weights[1].values]))
    assert weights[1].global_scale is weights[0].global_scale and weights[2].global_scale is given
    plain = Weight(_layer(), torch.randn(256, 256))
    QuantizationModifier(scheme="W4A16").share_global_scale([plain])
    assert plain.global_scale is None
