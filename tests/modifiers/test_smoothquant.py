"""SmoothQuant against its formula, and what has to come out of inputs and weights at their ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from torch import Tensor

from sparseautomodel.modifiers import Layer, ModifierError, Weight
from sparseautomodel.modifiers.smoothquant import SmoothQuantModifier
from sparseautomodel.ranges import InputRange

W8A8 = preset_name_to_scheme("W8A8", ["Linear"])


def _weights(*values: Tensor) -> list[Weight]:
    return [
        Weight(Layer(f"layer.{number}", f"layer.{number}", ("Linear",), tuple(one.shape), one.dtype), one)
        for number, one in enumerate(values)
    ]


def _seen(inputs: Tensor) -> InputRange:
    found = InputRange(inputs.shape[1])
    found.update(inputs)
    return found


def _factors(inputs: Tensor, *values: Tensor, **keys: Any) -> Tensor:
    weights = _weights(*values)
    factors = SmoothQuantModifier(**keys).smooth(weights, _seen(inputs), [W8A8] * len(weights), lambda found: found)
    assert factors is not None
    return factors


@pytest.mark.parametrize("strength", [0.0, 0.5, 0.8, 1.0, 1])
def test_factors_are_those_of_the_paper(strength: float) -> None:
    inputs, first, second = torch.randn(50, 24) * 3, torch.randn(8, 24), torch.randn(5, 24) / 4
    expected = [
        max(abs(float(x)) for x in inputs[:, column]) ** strength
        / max(abs(float(w)) for w in (*first[:, column], *second[:, column])) ** (1 - strength)
        for column in range(24)
    ]
    factors = _factors(inputs, first, second, smoothing_strength=strength)
    assert torch.allclose(factors, torch.tensor(expected), rtol=1e-5)


def test_an_input_that_is_hard_to_round_costs_less_afterwards() -> None:
    inputs, values = torch.randn(200, 64), torch.randn(32, 64) * 0.1
    inputs[:, 7] *= 100
    factors = _factors(inputs, values)

    def error(states: Tensor, weight: Tensor) -> float:
        return float((_rounded(states) @ _rounded(weight).t() - inputs @ values.t()).square().mean())

    assert torch.allclose((inputs / factors) @ (values * factors).t(), inputs @ values.t(), atol=1e-3)
    assert error(inputs / factors, values * factors) < 0.2 * error(inputs, values)


def _rounded(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round() * scale


def test_channels_without_input_or_weights_keep_their_size() -> None:
    inputs, values = torch.randn(30, 6), torch.randn(4, 6)
    inputs[:, 1] = 0
    values[:, 2] = 0
    factors = _factors(inputs, values)
    assert factors[1] == 1 and factors[2] == 1
    assert (factors[3:] != 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_factors_are_finite_and_above_0(dtype: torch.dtype) -> None:
    inputs, values = torch.rand(4, 4).to(dtype), torch.rand(4, 4).to(dtype)
    inputs[:, 0], values[:, 0] = 6e4, torch.finfo(dtype).tiny
    inputs[:, 1], values[:, 1] = torch.finfo(dtype).tiny, 6e4
    factors = _factors(inputs, values)
    assert factors.isfinite().all() and (factors > 0).all()


def test_nothing_is_smoothed_where_nothing_is_quantized_or_something_is_not_finite() -> None:
    modifier, weights, inputs = SmoothQuantModifier(), _weights(torch.ones(2, 4)), torch.ones(3, 4)
    assert modifier.smooth(weights, _seen(inputs), [None], lambda found: found) is None
    inputs[1, 1] = torch.inf
    assert modifier.smooth(weights, _seen(inputs), [W8A8], lambda found: found) is None
    weights = _weights(torch.full((2, 4), torch.nan))
    assert modifier.smooth(weights, _seen(torch.ones(3, 4)), [W8A8], lambda found: found) is None


def test_factors_are_what_the_producer_can_hold() -> None:
    weights, inputs = _weights(torch.randn(3, 4)), _seen(torch.randn(9, 4))
    assert SmoothQuantModifier().smooth(weights, inputs, [W8A8], lambda found: found * 0 + 2).tolist() == [2.0] * 4


def test_it_stores_and_solves_nothing() -> None:
    modifier, weights = SmoothQuantModifier(), _weights(torch.randn(3, 4))
    before = weights[0].values.clone()
    assert modifier.scheme_of(weights[0].layer) is None
    assert modifier.solve(weights, modifier.statistic(weights[0].layer)) == []
    assert torch.equal(weights[0].values, before) and weights[0].scale is None


@pytest.mark.parametrize("strength", [-0.1, 1.1, "half", True, None])
def test_other_strengths_are_refused(strength: Any) -> None:
    with pytest.raises(ModifierError, match="a number from 0 to 1") as error:
        SmoothQuantModifier(smoothing_strength=strength)
    assert error.value.key == "smoothing_strength"
