"""Rounding column after column: the loop of GPTQ, and coordinate descent from where it ends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from compressed_tensors.quantization.utils import calculate_range
from torch import Tensor

from sparseautomodel.column_blocks import MOST, are_compiled, round_block
from sparseautomodel.scales import Grid, rounding

_INNER = 32
"""Columns whose errors are passed on one by one: as many as stay in a core's own cache."""


def round_columns(
    values: Tensor,
    grid: Grid,
    factor: Tensor,
    order: Tensor,
    block_size: int = 128,
    keep: Tensor | None = None,
) -> Tensor:
    """`values` `[rows, in]` float32 as numbers of `grid`, those that follow in `order` making up for each error.

    Args:
        factor: U of the columns in `order`, `[in, in]`.
        keep: bool `[rows, in]`: where it is False, values are 0 and stay 0.
    """
    if block_size <= MOST and grid.args.type == "int" and are_compiled(values):
        return _round_compiled(values, grid, factor, order, block_size, keep)
    # Transposed, a column is a run of memory.
    left = values.t().index_select(0, order)
    kept = None if keep is None else keep.t().index_select(0, order)
    done, errors = torch.empty_like(left), torch.empty_like(left[:block_size])
    scales, zeros = grid.scale.t().contiguous(), None if grid.zero_point is None else grid.zero_point.t().contiguous()
    steps, groups = (1 / factor.diagonal()).tolist(), (order // grid.width).tolist()
    round_, columns = rounding(grid.args), len(order)
    for first in range(0, columns, block_size):
        last = min(columns, first + block_size)
        for start in range(first, last, _INNER):
            stop = min(last, start + _INNER)
            for column in range(start, stop):
                weight, number, error, group = left[column], done[column], errors[column - first], groups[column]
                if kept is not None:
                    weight.mul_(kept[column])  # what the columns before have put there is taken back
                _nearest(number.copy_(weight), scales[group], None if zeros is None else zeros[group], round_)
                torch.sub(weight, number, out=error).mul_(steps[column])
                left[column + 1 : stop].addr_(factor[column, column + 1 : stop], error, alpha=-1)
            left[stop:last].addmm_(factor[start:stop, stop:last].t(), errors[start - first : stop - first], alpha=-1)
        left[last:].addmm_(factor[first:last, last:].t(), errors[: last - first], alpha=-1)
    return left.index_copy_(0, order, done).t().contiguous()


def _round_compiled(
    values: Tensor, grid: Grid, factor: Tensor, order: Tensor, block_size: int, keep: Tensor | None
) -> Tensor:
    left = values.index_select(1, order)
    kept = None if keep is None else keep.index_select(1, order)
    groups, columns = order // grid.width, len(order)
    lowest, highest = (float(end) for end in calculate_range(grid.args, order.device))
    for first in range(0, columns, block_size):
        part, rest = slice(first, min(columns, first + block_size)), slice(first + block_size, columns)
        errors = round_block(left, part, factor, grid.scale, grid.zero_point, groups, kept, (lowest, highest))
        if rest.start < columns:
            left[:, rest].addmm_(errors, factor[part, rest], alpha=-1)
    return torch.empty_like(left).index_copy_(1, order, left)


def descend(
    values: Tensor, found: Tensor, grid: Grid, hessian: Tensor, rounds: int, keep: Tensor | None = None
) -> Tensor:
    """`found`, numbers of `grid`, moved so that their output is closer to that of `values`: coordinate descent.

    One column after another takes the numbers that are best while all others stay, `rounds` times. So the error
    `tr(D H D^T)`, `D = found - values`, does not rise. This is the iteration of QuantEase (Behdin et al., 2023,
    https://arxiv.org/abs/2309.01885).

    Args:
        values, found: `[rows, in]` float32.
        keep: bool `[rows, in]`: where it is False, values are 0 and stay 0.
    """
    target, number = values.t().contiguous(), found.t().contiguous()
    kept = None if keep is None else keep.t().contiguous()
    change = number - target
    # A column without inputs stays where it is.
    inverse = torch.where(hessian.diagonal() > 0, 1 / hessian.diagonal(), 0.0).tolist()
    scales, zeros = grid.scale.t().contiguous(), None if grid.zero_point is None else grid.zero_point.t().contiguous()
    round_, columns, best = rounding(grid.args), len(number), torch.empty_like(number[0])
    for _ in range(rounds):
        for first in range(0, columns, _INNER):
            last = min(columns, first + _INNER)
            slope = hessian[first:last] @ change
            for column in range(first, last):
                group = column // grid.width
                torch.add(number[column], slope[column - first], alpha=-inverse[column], out=best)
                if kept is not None:
                    best.mul_(kept[column])
                _nearest(best, scales[group], None if zeros is None else zeros[group], round_)
                torch.sub(best, number[column], out=number[column])  # by how much it moves
                change[column].add_(number[column])
                slope.addr_(hessian[first:last, column], number[column])
                number[column].copy_(best)
    return number.t().contiguous()


def _nearest(values: Tensor, scale: Tensor, zero_point: Tensor | None, round_: Callable[[Tensor], Tensor]) -> Tensor:
    """`values` of one column as the nearest numbers of its scales, in place."""
    values.div_(scale)
    if zero_point is None:
        return round_(values).mul_(scale)
    return round_(values.add_(zero_point)).sub_(zero_point).mul_(scale)
