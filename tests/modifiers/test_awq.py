"""AWQ against a slow plain form of the paper that runs the layers, and what must never come out of its search."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparseautomodel.modifiers import Layer, ModifierError, Weight
from sparseautomodel.modifiers.awq import AWQModifier
from sparseautomodel.smoothing import Pair
from sparseautomodel.statistics import Hessian

COLUMNS = 64
WEIGHTS: dict[str, dict[str, Any]] = {
    "int4-group": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "int4-group-asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    "int3-channel": {"num_bits": 3, "strategy": "channel"},
    "int4-tensor": {"num_bits": 4, "strategy": "tensor"},
    "fp8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    "nvfp4": PRESET_SCHEMES["NVFP4A16"]["weights"].model_dump(mode="json", exclude_defaults=True),
}


def _scheme(**weights: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


INT4 = _scheme(**WEIGHTS["int4-group"])


def _weight(values: Tensor, name: str = "mlp.up_proj") -> Weight:
    return Weight(Layer(name, name, ("Linear",), tuple(values.shape), values.dtype), values)


def _inputs(columns: int = COLUMNS, tokens: int = 200, seed: int = 1) -> Tensor:
    """Inputs that depend on each other, and a few channels that are much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns
    inputs = torch.randn(tokens, columns, generator=generator) @ mixing
    inputs[:, ::17] *= 30
    return inputs


def _gathered(inputs: Tensor) -> Hessian:
    hessian = Hessian(inputs.shape[1])
    hessian.update(inputs)
    return hessian


def _same(factors: Tensor) -> Tensor:
    return factors


def _rounded(values: Tensor, args: QuantizationArgs) -> Tensor:
    """By compressed-tensors alone; scales of blocks and tensors from the largest weight of each."""
    groups = values.unflatten(1, (-1, args.group_size or values.shape[1]))
    lowest, highest = groups.amin(-1), groups.amax(-1)
    if args.strategy == "tensor":
        lowest, highest = lowest.amin().view(1), highest.amax().view(1)
    if args.strategy == "block":
        height, width = args.block_structure
        blocks = values.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        lowest, highest = blocks.amin((1, 3)), blocks.amax((1, 3))
    shared = None
    if args.strategy == "tensor_group":
        shared = (6 * 448 / values.abs().max()).view(1)
    scale, zero_point = calculate_qparams(lowest, highest, args, shared)
    return fake_quantize(values, scale, zero_point, args, global_scale=shared)


def _loss(values: Tensor, args: QuantizationArgs, inputs: Tensor, factors: Tensor) -> float:
    change = _rounded(values * factors, args) / factors - values
    return float((inputs.double() @ change.double().t()).square().sum())


def _paper(values: Tensor, args: QuantizationArgs, inputs: Tensor, duo: bool, count: int) -> dict[float, Tensor]:
    """Loss -> factors, for each step of the grid and for none."""
    size = inputs.square().mean(0).sqrt()
    groups = values.abs().unflatten(1, (-1, args.group_size or values.shape[1]))
    mean = (groups / groups.amax(-1, keepdim=True)).flatten(1).mean(0)
    candidates = [torch.ones(values.shape[1])]
    for step in range(count):
        share = step / (count - 1)
        factors = size**share / (mean ** (1 - share) if duo else 1)
        candidates.append(factors / (factors.max() * factors.min()).sqrt())
    return {_loss(values, args, inputs, factors): factors for factors in candidates}


@pytest.mark.parametrize("duo", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_factors_are_those_of_the_plain_search(weights: dict[str, Any], duo: bool) -> None:
    scheme, values, inputs = _scheme(**weights), torch.randn(48, COLUMNS) * 0.1, _inputs()
    tried = _paper(values, scheme.weights, inputs, duo, 20)
    before, hessian = values.clone(), _gathered(inputs)
    factors = AWQModifier(duo_scaling=duo).smooth([_weight(values)], hessian, [scheme], _same)
    assert torch.equal(values, before) and torch.equal(hessian.value, _gathered(inputs).value)
    assert factors is not None
    assert any(torch.allclose(factors, one, rtol=1e-4) for one in tried.values())
    # The largest weight of a group lies halfway between two numbers, so the last bit of a factor can move a loss a bit.
    assert _loss(values, scheme.weights, inputs, factors) == pytest.approx(min(tried), rel=0.02)
    assert min(tried) < 0.95 * _loss(values, scheme.weights, inputs, torch.ones(COLUMNS))


def test_layers_of_one_input_are_searched_together_each_in_its_own_scheme() -> None:
    inputs = _inputs()
    first, second, third = (torch.randn(rows, COLUMNS) * 0.1 for rows in (16, 40, 8))
    schemes = [INT4, _scheme(num_bits=3, strategy="channel"), None]
    weights = [_weight(one, str(number)) for number, one in enumerate((first, second, third))]
    factors = AWQModifier().smooth(weights, _gathered(inputs), schemes, _same)
    assert factors is not None

    def loss(by: Tensor) -> float:
        return _loss(first, schemes[0].weights, inputs, by) + _loss(second, schemes[1].weights, inputs, by)

    alone = AWQModifier().smooth(weights[:1], _gathered(inputs), schemes[:1], _same)
    assert loss(factors) <= min(loss(torch.ones(COLUMNS)), loss(alone)) * (1 + 1e-6)
    assert AWQModifier().smooth(weights, _gathered(inputs), [None] * 3, _same) is None


def test_all_is_left_as_it_is_where_that_is_best() -> None:
    """Every weight is a number of its scheme already."""
    scheme = _scheme(num_bits=8, strategy="channel", symmetric=True)
    exact = _rounded(torch.randn(32, COLUMNS), scheme.weights)
    assert AWQModifier().smooth([_weight(exact)], _gathered(_inputs()), [scheme], _same) is None


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    spread=st.floats(0, 6),
    size=st.floats(-8, 8),
    dead=st.sampled_from([0, 1, COLUMNS - 1, COLUMNS]),
    duo=st.sampled_from([True, False, "both"]),
)
def test_factors_are_finite_and_never_worse_than_none(
    seed: int, spread: float, size: float, dead: int, duo: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(40, COLUMNS, generator=generator)
    inputs *= (torch.randn(COLUMNS, generator=generator) * spread + size).exp()
    inputs[:, :dead] = 0
    values = torch.randn(24, COLUMNS, generator=generator)
    values[:, -2] = 0
    factors = AWQModifier(duo_scaling=duo, n_grid=6).smooth([_weight(values)], _gathered(inputs), [INT4], _same)
    if factors is not None:
        assert factors.shape == (COLUMNS,) and factors.isfinite().all() and (factors > 0).all()
        plain = _loss(values, INT4.weights, inputs, torch.ones(COLUMNS))
        assert _loss(values, INT4.weights, inputs, factors) <= plain * (1 + 1e-4)


def test_some_rows_stand_for_all() -> None:
    values, inputs = torch.randn(5000, COLUMNS) * 0.1, _inputs()
    factors = AWQModifier().smooth([_weight(values)], _gathered(inputs), [INT4], _same)
    assert factors is not None
    tried = _paper(values, INT4.weights, inputs, True, 20)
    assert _loss(values, INT4.weights, inputs, factors) == pytest.approx(min(tried), rel=0.02)


def test_factors_are_chosen_among_what_the_producer_can_hold() -> None:
    pair = Pair("v_proj", "rows", torch.arange(COLUMNS) // 32 * 16 + torch.arange(COLUMNS) % 16, 32)
    values, inputs = torch.randn(48, COLUMNS) * 0.1, _inputs()
    factors = AWQModifier().smooth([_weight(values)], _gathered(inputs), [INT4], pair.allowed)
    assert factors is not None
    assert torch.allclose(pair.allowed(factors), factors)
    assert _loss(values, INT4.weights, inputs, factors) < _loss(values, INT4.weights, inputs, torch.ones(COLUMNS))


def test_an_outlier_costs_less_than_with_rounding_to_nearest_alone() -> None:
    """Norm and layer as they are in a block: divided, multiplied, rounded, run."""
    norm, linear = nn.LayerNorm(COLUMNS), nn.Linear(COLUMNS, 96, bias=False)
    norm.weight.data[9] = 40
    inputs = torch.randn(300, COLUMNS)
    with torch.no_grad():
        states = norm(inputs)
        exact = linear(states)
        modifier = AWQModifier(scheme="W4A16_ASYM", group_size=32)
        plain, weight = _weight(linear.weight.clone()), _weight(linear.weight.clone())
        modifier.solve([plain], _gathered(states))
        gathered = _gathered(states)
        pair = Pair("0", "weight", torch.arange(COLUMNS), COLUMNS)
        factors = modifier.smooth([weight], gathered, [modifier.scheme_of(weight.layer)], pair.allowed)
        factors = pair.divide(nn.Sequential(norm, linear), factors)
        weight.values *= factors
        gathered.divide(factors)
        (error,) = modifier.solve([weight], gathered)
        smoothed = (norm(inputs) @ weight.values.t() - exact).square().sum()
        rounded = (states @ plain.values.t() - exact).square().sum()
    assert smoothed < 0.4 * rounded
    assert error.before == pytest.approx(float(smoothed / exact.square().sum()), rel=0.01)


def test_float16_with_a_channel_at_its_end_is_searched_in_float32() -> None:
    inputs = _inputs().half()
    inputs[:, 5] = 6e4
    values = (torch.randn(32, COLUMNS) * 0.1).half()
    hessian = AWQModifier().statistic(_weight(values).layer)
    hessian.update(inputs)
    factors = AWQModifier().smooth([_weight(values)], hessian, [INT4], _same)
    assert factors is not None and factors.isfinite().all()
    exact, inputs = values.float(), inputs.float()
    assert _loss(exact, INT4.weights, inputs, factors) < _loss(exact, INT4.weights, inputs, torch.ones(COLUMNS))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_inputs_that_are_not_finite_are_said_with_the_layer_and_rounded_to_nearest(bad: float) -> None:
    inputs, values = _inputs(), torch.randn(16, COLUMNS)
    inputs[3, 3] = bad
    modifier, weight = AWQModifier(scheme="W4A16", group_size=32, observer="mse"), _weight(values.clone())
    hessian = _gathered(inputs)
    assert modifier.smooth([weight], hessian, [INT4], _same) is None
    (error,) = modifier.solve([weight], hessian)
    assert error.fallback is not None and "mlp.up_proj" in error.fallback and "bfloat16" in error.fallback
    assert torch.equal(weight.values, _rounded(values, INT4.weights))


def test_without_a_token_nothing_is_smoothed_and_layers_are_rounded_to_nearest() -> None:
    modifier, values = AWQModifier(scheme="W4A16", group_size=32, observer="mse"), torch.randn(16, COLUMNS)
    weight, hessian = _weight(values.clone()), Hessian(COLUMNS)
    assert modifier.smooth([weight], hessian, [INT4], _same) is None
    (error,) = modifier.solve([weight], hessian)
    assert error.fallback == "no calibration token came to it"
    assert torch.equal(weight.values, _rounded(values, INT4.weights))


@pytest.mark.parametrize("observer", ["minmax", "mse"])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A8", "NVFP4A16", "FP8_BLOCK"])
def test_solutions_are_rounded_to_nearest_and_no_worse_than_with_plain_scales(scheme: str, observer: str) -> None:
    values, inputs = torch.randn(256, 128), _inputs(128)
    modifier, weight, hessian = AWQModifier(scheme=scheme, observer=observer), _weight(values.clone()), Hessian(128)
    hessian.update(inputs)
    before = hessian.value.clone()
    (error,) = modifier.solve([weight], hessian)
    assert torch.equal(hessian.value, before), "the statistic is read alone"
    args = modifier.scheme_of(weight.layer).weights
    read = fake_quantize(values, weight.scale, weight.zero_point, args, global_scale=weight.global_scale)
    assert torch.allclose(weight.values, read.float(), rtol=0.01, atol=1e-6)
    outputs = inputs.float() @ values.float().t()
    lost = (inputs.float() @ (weight.values - values.float()).t()).square().sum() / outputs.square().sum()
    assert error.after == pytest.approx(float(lost), rel=0.02)
    assert error.fallback is None
    assert error.after == error.before if observer == "minmax" else error.after <= error.before


def test_without_a_scheme_it_smooths_alone() -> None:
    modifier, weight = AWQModifier(targets=["re:.*up_proj"]), _weight(torch.randn(8, COLUMNS))
    assert modifier.selects(weight.layer) and modifier.patterns() == ("re:.*up_proj",)
    assert not AWQModifier(targets=["re:.*down_proj"]).selects(weight.layer)
    assert not AWQModifier(ignore=["Linear"]).selects(weight.layer)
    assert modifier.scheme_of(weight.layer) is None and modifier.global_scale(weight.layer, [weight.values]) is None
    assert modifier.resolve([weight.layer]) == modifier and modifier.rows(weight.layer) == 1
    before = weight.values.clone()
    modifier.share_global_scale([weight])
    assert modifier.solve([weight], _gathered(_inputs())) == []
    assert torch.equal(weight.values, before) and weight.scale is None and weight.global_scale is None


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"duo_scaling": "twice"}, "duo_scaling", "true, false or both"),
        ({"duo_scaling": 1}, "duo_scaling", "true, false or both"),
        ({"n_grid": 1}, "n_grid", "from 2 up"),
        ({"n_grid": 2.0}, "n_grid", "from 2 up"),
        ({"observer": "mse"}, "scheme", "say how weights are rounded"),
        ({"group_size": 64}, "scheme", "say how weights are rounded"),
        ({"scheme": "W4A17"}, "scheme", "there is no scheme"),
    ],
)
def test_other_keys_are_refused(keys: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ModifierError, match=message) as error:
        AWQModifier(**keys)
    assert error.value.key == key
