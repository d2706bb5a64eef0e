"""GPTQ against the paper in slow float64, every scheme against what is read back, and what must not break it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from torch import Tensor

from sparseautomodel import statistics
from sparseautomodel.formats.compressed_tensors import decode, encode, layout
from sparseautomodel.modifiers import Layer, ModifierError, Weight, gptq
from sparseautomodel.modifiers.gptq import GPTQModifier
from sparseautomodel.scales import Grid
from sparseautomodel.statistics import Hessian

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRESETS = ("NVFP4A16", "MXFP4A16", "MXFP6A16", "MXFP8A16", "FP8_DYNAMIC", "W8A8")
WEIGHTS: dict[str, dict[str, Any]] = {
    "int4-group": {"num_bits": 4, "group_size": 32},
    "int4-group-asymmetric": {"num_bits": 4, "group_size": 32, "symmetric": False},
    "int2-group": {"num_bits": 2, "group_size": 16},
    "int3-channel-asymmetric": {"num_bits": 3, "strategy": "channel", "symmetric": False},
    "int8-channel": {"num_bits": 8, "strategy": "channel"},
    "int5-tensor": {"num_bits": 5, "strategy": "tensor"},
    "int8-block": {"num_bits": 8, "strategy": "block", "block_structure": [32, 40]},
    "fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 48]},
} | {name: PRESET_SCHEMES[name]["weights"].model_dump(mode="json", exclude_defaults=True) for name in PRESETS}
SHAPE = (40, 96)


pytestmark = pytest.mark.usefixtures("compiled_or_not")


@pytest.mark.parametrize("observer", ["minmax", "mse"])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_solutions_are_those_of_the_paper(weights: dict[str, Any], observer: str) -> None:
    for actorder, block_size in (("static", 128), (None, 7)):
        modifier = _modifier(weights, observer=observer, actorder=actorder, block_size=block_size)
        weight, hessian = _weight(), _gathered(_inputs())
        exact, before = weight.values.double(), hessian.value.clone()
        (error,) = modifier.solve([weight], hessian)
        assert torch.equal(hessian.value, before), "the statistic is read alone"
        order = torch.arange(SHAPE[1])
        if actorder:
            order = hessian.diagonal.argsort(descending=True, stable=True)
        expected = _paper(exact, hessian.value.double(), _grid(modifier, weight), order)
        assert weight.values.dtype == torch.float32
        assert _differing_rows(weight.values, expected) <= 1
        plain = _grid(modifier, weight).nearest(exact.float()).double()
        assert error.before == pytest.approx(_relative(plain, exact, hessian.value), rel=1e-3)
        assert error.after == pytest.approx(_relative(weight.values.double(), exact, hessian.value), rel=1e-3)
        assert error.fallback is None and 0 < error.after < error.before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_what_was_solved_is_what_is_stored_and_read(weights: dict[str, Any], dtype: torch.dtype) -> None:
    modifier, weight = _modifier(weights, observer="mse"), _weight(dtype=dtype)
    modifier.solve([weight], _gathered(_inputs().to(dtype)))
    scale_dtype = torch.float32 if weight.global_scale is not None else dtype
    assert weight.scale.dtype == scale_dtype and bool((weight.scale > 0).all())
    for read_as in (torch.float32, dtype):
        # Nothing is rounded but the product of number and scale: what comes back is each number that was chosen.
        product = torch.bfloat16 if weight.global_scale is not None else read_as
        rounded = weight.values.to(product).to(read_as)
        assert torch.allclose(_stored(modifier, weight, read_as), rounded, rtol=1e-6, atol=0)


def test_layers_of_one_input_are_solved_together_as_they_are_alone() -> None:
    modifier, hessian = _modifier(WEIGHTS["int4-group"]), _gathered(_inputs())
    rows = (16, 1, 70, 33)
    together, alone = ([_weight((count, 96), seed=count) for count in rows] for _ in range(2))
    errors = modifier.solve(together, hessian)
    assert [error.name for error in errors] == [weight.layer.name for weight in together]
    for weight, error, other in zip(together, errors, alone, strict=True):
        (expected,) = modifier.solve([other], hessian)
        assert torch.allclose(weight.values, other.values, rtol=1e-5) and torch.equal(weight.scale, other.scale)
        assert error.after == pytest.approx(expected.after, rel=1e-4)


def test_layers_of_several_schemes_share_an_input() -> None:
    groups = {name: {"targets": [name], "weights": WEIGHTS[f"int{name}"]} for name in ("8-channel", "4-group")}
    modifier, hessian = GPTQModifier(config_groups=groups), _gathered(_inputs())
    names = ("8-channel", "4-group", "4-group", "8-channel")
    # A layer has no name twice: targets by pattern stand for q and k here.
    weights = [_weight(name=name, seed=number) for number, name in enumerate(names)]
    errors = modifier.solve(weights, hessian)
    for number, name in enumerate(names):
        alone = _weight(name=name, seed=number)
        (expected,) = modifier.solve([alone], hessian)
        assert torch.allclose(weights[number].values, alone.values, rtol=1e-5)
        assert errors[number].after == pytest.approx(expected.after, rel=1e-4)
    assert errors[0].after < errors[1].after / 10


def test_rows_do_not_depend_on_how_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    modifier, hessian = _modifier(WEIGHTS["int4-group-asymmetric"]), _gathered(_inputs())
    whole, cut = ([_weight((50, 96), keep=0.7), _weight((20, 96), seed=1)] for _ in range(2))
    expected = modifier.solve(whole, hessian)
    monkeypatch.setattr(statistics, "_RUN_ROWS", 12)
    errors = modifier.solve(cut, hessian)
    for one, other in zip(whole, cut, strict=True):
        assert torch.allclose(one.values, other.values, rtol=1e-5)
    assert [error.after for error in errors] == pytest.approx([error.after for error in expected], rel=1e-4)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_what_was_pruned_stays_zero_and_takes_no_update(weights: dict[str, Any]) -> None:
    modifier, hessian = _modifier(weights), _gathered(_inputs())
    weight = _weight(keep=0.5)
    weight.values[3, 5:20] = 0  # zero, though not said to be pruned
    exact, zeros = weight.values.double(), weight.values == 0
    (error,) = modifier.solve([weight], hessian)
    assert not weight.values[zeros].any() and not _stored(modifier, weight, torch.bfloat16)[zeros].any()
    order = hessian.diagonal.argsort(descending=True, stable=True)
    expected = _paper(exact, hessian.value.double(), _grid(modifier, weight), order, ~zeros)
    assert _differing_rows(weight.values, expected) <= 1
    assert error.after <= error.before


def test_without_a_mask_zeros_are_weights_like_others() -> None:
    weight = _weight()
    weight.values[:, ::3] = 0
    _modifier(WEIGHTS["int4-group"]).solve([weight], _gathered(_inputs()))
    assert weight.keep is None and weight.values[:, ::3].any()


@pytest.mark.parametrize("actorder", ["static", None])
def test_dead_columns_are_rounded_to_nearest(actorder: str | None) -> None:
    inputs = _inputs()
    inputs[:, [0, 31, 32, 95]] = 0
    modifier, weight = _modifier(WEIGHTS["int4-group"], actorder=actorder), _weight()
    exact = weight.values.float()
    (error,) = modifier.solve([weight], _gathered(inputs))
    nearest = _grid(modifier, weight).nearest(exact)
    assert torch.equal(weight.values[:, [0, 31, 32, 95]], nearest[:, [0, 31, 32, 95]])
    assert error.fallback is None and error.after < error.before


@pytest.mark.parametrize("dampening", [0.0, 0.01])
def test_one_repeated_token_is_solved(dampening: float) -> None:
    modifier, weight = _modifier(WEIGHTS["int4-group"], dampening_frac=dampening), _weight()
    (error,) = modifier.solve([weight], _gathered(_inputs(1).repeat(200, 1)))
    assert weight.values.isfinite().all() and error.fallback is None
    assert error.after < 0.1 * error.before


def test_huge_outliers_are_solved() -> None:
    inputs = _inputs()
    inputs[:, 4] *= 1e3
    inputs[7] = 6e4
    modifier, weight = _modifier(WEIGHTS["int4-group"]), _weight(dtype=torch.float16)
    for arithmetic in ("float32", "int8"):
        (error,) = modifier.solve([weight], _gathered(inputs.half(), arithmetic))
        assert weight.values.isfinite().all() and error.fallback is None and error.after <= error.before


@pytest.mark.parametrize(("case", "reason"), [("inf", "not finite"), ("nan", "not finite"), ("none", "no calibration")])
def test_without_a_usable_statistic_weights_are_rounded_to_nearest(case: str, reason: str) -> None:
    inputs = _inputs(0 if case == "none" else 30)
    if case != "none":
        inputs[3, 3] = float(case)
    for observer in ("minmax", "mse"):
        modifier, weight = _modifier(WEIGHTS["int4-group"], observer=observer), _weight()
        exact = weight.values.float()
        (error,) = modifier.solve([weight], _gathered(inputs, "int8"))
        assert reason in error.fallback and math.isnan(error.before) and math.isnan(error.after)
        assert torch.equal(weight.values, _grid(modifier, weight).nearest(exact))
        assert weight.scale.isfinite().all()


def test_a_layer_that_is_worse_falls_back_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = gptq.round_columns

    def spoiled(values: Tensor, *args: Any) -> Tensor:
        result = solve(values, *args)
        result[SHAPE[0] : 2 * SHAPE[0]] += 1
        result[2 * SHAPE[0] :] = math.nan
        return result

    modifier, hessian = _modifier(WEIGHTS["int4-group"]), _gathered(_inputs())
    good, weights = [_weight(seed=number) for number in range(3)], [_weight(seed=number) for number in range(3)]
    expected = modifier.solve(good, hessian)
    monkeypatch.setattr(gptq, "round_columns", spoiled)
    errors = modifier.solve(weights, hessian)
    assert errors[0] == expected[0] and torch.equal(weights[0].values, good[0].values)
    for number, reason in ((1, "worse than the plain method"), (2, "not finite")):
        exact = _weight(seed=number).values.float()
        assert reason in errors[number].fallback
        assert errors[number].after == errors[number].before == pytest.approx(expected[number].before)
        assert torch.equal(weights[number].values, _grid(modifier, weights[number]).nearest(exact))


def test_layers_of_one_input_get_one_global_scale() -> None:
    modifier, hessian = GPTQModifier(scheme="NVFP4A16"), _gathered(_inputs())
    weights = [_weight(seed=number) for number in range(3)]
    weights[1].values *= 7
    largest = _weight(seed=1).values * 7
    modifier.solve(weights, hessian)
    expected = modifier.global_scale(weights[1].layer, [largest])
    assert all(torch.equal(weight.global_scale, expected) for weight in weights)
    given = _weight()
    given.global_scale = expected / 2
    modifier.solve([given], hessian)
    assert torch.equal(given.global_scale, expected / 2)


def test_the_scale_search_lowers_the_error() -> None:
    hessian = _gathered(_inputs())
    errors = {}
    for observer in ("minmax", "mse"):
        weights = [_weight((200, 96), seed=number) for number in range(4)]
        for weight in weights:
            weight.values.pow_(3)  # a few large ones, as trained weights have
        errors[observer] = sum(
            error.after for error in _modifier(WEIGHTS["int4-group"], observer=observer).solve(weights, hessian)
        )
    assert errors["mse"] < 0.95 * errors["minmax"]


ORDERED = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "actorder": "weight"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"actorder": "group"}, "actorder", "no reader opens. Write static"),
    ({"actorder": True}, "actorder", "Write static"),
    ({"actorder": "random"}, "actorder", "Write static or null"),
    ({"block_size": 0}, "block_size", "Write 128"),
    ({"block_size": 64.0}, "block_size", "Write 128"),
    ({"refine": 10**9}, "refine", "from 0 to 100"),
    ({"refine": 1e9}, "refine", "from 0 to 100"),
    ({"dampening_frac": -0.1}, "dampening_frac", "from 0 to 1"),
    ({"dampening_frac": "small"}, "dampening_frac", "from 0 to 1"),
    ({"dampening_frac": True}, "dampening_frac", "from 0 to 1"),
    ({"scheme": None}, "scheme", "either scheme or config_groups"),
    (
        {
            "scheme": None,
            "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "actorder": "weight"}}},
        },
        "config_groups",
        "beside config_groups",
    ),
]


@pytest.mark.parametrize(("keys", "key", "message"), REFUSED)
def test_a_wrong_key_is_said_with_what_is_allowed(keys: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ModifierError, match=message) as error:
        GPTQModifier(**{"scheme": "W4A16", **keys})
    assert error.value.key == key


def test_one_meaning_has_one_spelling_and_the_order_is_not_stored() -> None:
    assert GPTQModifier(scheme="W4A16", actorder="weight") == GPTQModifier(scheme="w4a16", actorder="static")
    assert GPTQModifier(scheme="W4A16", actorder=None).to_dict() == {"scheme": "W4A16", "actorder": None}
    modifier = GPTQModifier(scheme="W4A16")
    assert modifier.scheme_of(_weight((8, 128)).layer).weights.actorder is None
    assert isinstance(modifier.statistic(_weight((8, 128)).layer), Hessian) and modifier.needs_data


def _paper(
    values: Tensor, hessian: Tensor, grid: Grid, order: Tensor, keep: Tensor | None = None, dampening: float = 0.01
) -> Tensor:
    """The method as the paper derives it, from Optimal Brain Quantization: the inverse itself, one column at a time."""
    left, found = values.clone(), torch.zeros_like(values)
    damped = hessian + dampening * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.linalg.inv(damped)
    for place, column in enumerate(order.tolist()):
        if keep is not None:
            left[:, column] *= keep[:, column]
        found[:, column] = _nearest(grid, left, column)
        error = (left[:, column] - found[:, column]) / inverse[column, column]
        rest = order[place + 1 :]
        left[:, rest] -= error[:, None] * inverse[column, rest]
        inverse = inverse - inverse[:, [column]] * inverse[[column]] / inverse[column, column]
    return found


def _nearest(grid: Grid, values: Tensor, column: int) -> Tensor:
    """Plain rounding of one column: the nearest of all numbers of the scheme, of two the one with an even code."""
    scale = grid.scale[:, column // grid.width].double()
    zero = torch.zeros_like(scale) if grid.zero_point is None else grid.zero_point[:, column // grid.width].double()
    numbers = _numbers(grid.args)
    distance = ((values[:, column] / scale + zero)[:, None] - numbers).abs()
    codes = (torch.arange(len(numbers)) - len(numbers) // 2).abs()
    return (numbers[(distance + 1e-9 * (codes % 2)).argmin(1)] - zero) * scale


def _numbers(args: QuantizationArgs) -> Tensor:
    if args.type == "int":
        return torch.arange(-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1)).double()
    exponent, mantissa = {4: (2, 1), 6: (2, 3), 8: (4, 3)}[args.num_bits]
    bias, positive = 2 ** (exponent - 1) - 1, []
    for power in range(2**exponent):
        for part in range(2**mantissa):
            lead, shift = (1, power - bias) if power else (0, 1 - bias)
            positive.append((lead + part / 2**mantissa) * 2.0**shift)
    positive = positive[:-1] if args.num_bits == 8 else positive  # of E4M3 the last is NaN
    return torch.tensor(sorted({*positive, *(-number for number in positive)})).double()


def _differing_rows(found: Tensor, expected: Tensor) -> int:
    """A number within float32's precision of halfway goes either way, and takes the rest of its row along."""
    return int((~torch.isclose(found.double(), expected, rtol=1e-4, atol=1e-7)).any(1).sum())


def _relative(found: Tensor, exact: Tensor, hessian: Tensor) -> float:
    change, hessian = found - exact, hessian.double()
    return float(torch.trace(change @ hessian @ change.t()) / torch.trace(exact @ hessian @ exact.t()))


def _modifier(weights: dict[str, Any], **keys: Any) -> GPTQModifier:
    return GPTQModifier(config_groups={"a": {"targets": ["Linear"], "weights": weights}}, **keys)


def _grid(modifier: GPTQModifier, weight: Weight) -> Grid:
    args = modifier.weights_of(weight.layer)
    return Grid.of(args, weight.values.shape, weight.scale, weight.zero_point, weight.global_scale)


def _stored(modifier: GPTQModifier, weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values that a model of `dtype` reads."""
    scheme = modifier.scheme_of(weight.layer)
    parts = layout(scheme, weight.layer.shape, dtype)
    out = {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in parts.items()}
    parameters = {"scale": weight.scale, "zero_point": weight.zero_point, "global_scale": weight.global_scale}
    encode(weight.values, scheme, out, **parameters)
    return decode(out, scheme, dtype=dtype)


def _weight(
    shape: Sequence[int] = SHAPE,
    *,
    name: str = "layer",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    keep: float | None = None,
) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(*shape, generator=generator) * 0.02 + 0.004).to(dtype)
    weight = Weight(Layer(name, name, ("Linear",), (shape[0], shape[1]), dtype), values)
    if keep is not None:
        weight.prune(torch.rand(*shape, generator=generator) < keep)
    return weight


def _inputs(tokens: int = 400, columns: int = SHAPE[1]) -> Tensor:
    """Correlated, with columns of different size."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(columns, columns, generator=generator) / 4 + torch.eye(columns)
    return torch.randn(tokens, columns, generator=generator) @ mixing * torch.linspace(0.2, 3, columns).flip(0)


def _gathered(inputs: Tensor, arithmetic: str = "float32") -> Hessian:
    hessian = Hessian(inputs.shape[1], arithmetic=arithmetic)
    hessian.update(inputs)
    return hessian
