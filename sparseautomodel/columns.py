"""The loop of GPTQ: columns are rounded one after another, and those that follow make up for each error."""

from __future__ import annotations

import torch
from torch import Tensor

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
                torch.div(weight, scales[group], out=number)
                if zeros is None:
                    round_(number).mul_(scales[group])
                else:
                    round_(number.add_(zeros[group])).sub_(zeros[group]).mul_(scales[group])
                torch.sub(weight, number, out=error).mul_(steps[column])
                left[column + 1 : stop].addr_(factor[column, column + 1 : stop], error, alpha=-1)
            left[stop:last].addmm_(factor[start:stop, stop:last].t(), errors[start - first : stop - first], alpha=-1)
        left[last:].addmm_(factor[first:last, last:].t(), errors[: last - first], alpha=-1)
    return left.index_copy_(0, order, done).t().contiguous()
