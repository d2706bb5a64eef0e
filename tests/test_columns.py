"""The loop of GPTQ against the loop of the paper in plain float64 code."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from sparseautomodel.columns import descend, round_columns
from sparseautomodel.scales import Grid, find_scales
from sparseautomodel.statistics import inverse_factor, output_errors

pytestmark = pytest.mark.usefixtures("compiled_or_not")


def plainly(values: Tensor, scale: Tensor, group: int, factor: Tensor, order: list[int]) -> Tensor:
    left, done = values.double().clone(), torch.zeros_like(values, dtype=torch.float64)
    for place, column in enumerate(order):
        step = scale[:, column // group].double()
        done[:, column] = (left[:, column] / step).round().clamp(-8, 7) * step
        error = (left[:, column] - done[:, column]) / factor[place, place].double()
        for later in range(place + 1, len(order)):
            left[:, order[later]] -= error * factor[place, later].double()
    return done


@pytest.mark.parametrize("block_size", [8, 128])
@pytest.mark.parametrize("in_order", [True, False])
def test_against_the_plain_loop(block_size: int, in_order: bool) -> None:
    torch.manual_seed(0)
    values, inputs = torch.randn(6, 64), torch.randn(200, 64) * torch.rand(64)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
    scale, _ = find_scales(values, args)
    hessian = inputs.t() @ inputs
    order = torch.arange(64) if in_order else hessian.diagonal().argsort(descending=True)
    factor = inverse_factor(hessian, 0.01, order)
    found = round_columns(values, Grid.of(args, values.shape, scale), factor, order, block_size)
    torch.testing.assert_close(found.double(), plainly(values, scale, 16, factor, order.tolist()), rtol=1e-5, atol=1e-5)


def test_what_is_not_kept_stays_zero() -> None:
    torch.manual_seed(0)
    keep = torch.rand(6, 64) > 0.5
    values, inputs = torch.randn(6, 64) * keep, torch.randn(200, 64)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=16, symmetric=False)
    scale, zero_point = find_scales(values, args)
    order, grid = torch.arange(64), Grid.of(args, values.shape, scale, zero_point)
    found = round_columns(values, grid, inverse_factor(inputs.t() @ inputs, 0.01), order, 32, keep)
    assert not found[~keep].any() and found[keep].any()
    assert torch.equal(found, grid.nearest(found.clone()))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("pruned", [True, False])
def test_descent_never_loses_and_stays_on_the_grid(symmetric: bool, pruned: bool) -> None:
    torch.manual_seed(0)
    values, inputs = torch.randn(12, 80), torch.randn(300, 80) @ torch.randn(80, 80)
    inputs[:, 5] = 0  # a dead column
    keep = torch.rand(12, 80) > 0.3 if pruned else None
    values = values if keep is None else values * keep
    args = QuantizationArgs(num_bits=3, strategy="group", group_size=16, symmetric=symmetric)
    scale, zero_point = find_scales(values, args)
    grid, hessian = Grid.of(args, values.shape, scale, zero_point), inputs.t() @ inputs
    start = round_columns(values, grid, inverse_factor(hessian, 0.01), torch.arange(80), 128, keep)
    errors = [output_errors(start - values, hessian)]
    for rounds in (1, 2, 5):
        found = descend(values, start, grid, hessian, rounds, keep)
        torch.testing.assert_close(found, grid.nearest(found.clone()))
        assert keep is None or not found[~keep].any()
        assert torch.equal(found[:, 5], start[:, 5])
        errors.append(output_errors(found - values, hessian))
        assert bool((errors[-1] <= errors[-2] * (1 + 1e-4)).all())
    assert float(errors[-1].sum()) < 0.97 * float(errors[0].sum())


def test_one_round_against_the_plain_loop() -> None:
    torch.manual_seed(0)
    values, inputs = torch.randn(3, 48).double(), torch.randn(100, 48).double()
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
    scale, _ = find_scales(values.float(), args)
    grid, hessian = Grid.of(args, (3, 48), scale), inputs.t() @ inputs
    start = grid.nearest(values.float())
    found, step = start.double().clone(), scale.double()
    for column in range(48):
        slope = (found - values) @ hessian[:, column]
        best = found[:, column] - slope / hessian[column, column]
        found[:, column] = (best / step[:, column // 16]).round().clamp(-8, 7) * step[:, column // 16]
    ours = descend(values.float(), start.clone(), grid, hessian.float(), 1)
    torch.testing.assert_close(ours.double(), found, rtol=1e-5, atol=1e-5)
