"""GPTQ: weights are rounded column after column, and the columns that follow make up for each error.

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, 2022, https://arxiv.org/abs/2210.17323. In the words of the paper:

    W   weights [rows, in] of all layers that read one input X [tokens, in], on top of each other
    H   X^T X
    U   upper Cholesky factor of (H + dampening)^-1
    Q   what W is rounded to
    E   errors (W - Q) of the columns in hand, each divided by its entry on the diagonal of U

tr((W - Q) H (W - Q)^T), which is to be least, is the sum of all E^2: so 1 / U_jj^2 is what an error in column j costs
once the others have made up for it, and what it counts for where scales are searched (`observer: mse`).

Beyond the paper, `refine` goes on from there by coordinate descent.

Scales are found before the first column and never moved, and are already rounded as they will be stored. The order of
the columns (`actorder`) is that of the work alone; groups stay where they are, so nothing of it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from sparseautomodel.columns import descend, round_columns
from sparseautomodel.modifiers.base import Layer, ModifierError, Weight
from sparseautomodel.modifiers.scheme_keys import SchemeKeys
from sparseautomodel.scales import ErrorSearch, Grid
from sparseautomodel.statistics import (
    Hessian,
    LayerError,
    NotPositiveDefinite,
    inverse_factor,
    output_errors,
    row_runs,
)
from sparseautomodel.threads import torch_threads

_MOST_ROUNDS = 100
"""Of descent: each takes about as long as the solution, and the first few do nearly all that there is to gain."""


@dataclass(frozen=True, kw_only=True)
class GPTQModifier(SchemeKeys):
    """Round weights so that the output of each layer, on calibration data, changes least.

    >>> GPTQModifier(scheme="W4A16", group_size="auto", observer="mse")
    """

    block_size: int = 128
    """Columns after which their errors are passed on to all others. It changes speed, not results."""
    dampening_frac: float = 0.01
    """Share of the mean of H's diagonal that is added to the diagonal; more where that is not enough."""
    actorder: str | None = "static"
    """`static` (or its other name, `weight`): columns with the largest inputs first. null: from left to right."""
    refine: int = 0
    """Rounds of coordinate descent afterwards (QuantEase): each takes less than the rounding and lowers the error of a
    layer, the first by about 2 to 3 % in 4 bits."""

    needs_data: ClassVar[bool] = True
    search: ClassVar[ErrorSearch] = ErrorSearch(maxshrink=0.4, grid=32.0, norm=2.0, maxgrow=0.07)

    def __post_init__(self, weight_observer: str | None) -> None:
        super().__post_init__(weight_observer)
        if type(self.block_size) is not int or self.block_size < 1:
            raise ModifierError("block_size", f"block_size is a number of columns, got {self.block_size!r}. Write 128")
        if type(self.dampening_frac) not in (int, float) or not 0 <= self.dampening_frac <= 1:
            raise ModifierError(
                "dampening_frac", f"dampening_frac is a share from 0 to 1, got {self.dampening_frac!r}. Write 0.01"
            )
        if self.actorder in ("group", "dynamic", True):
            raise ModifierError(
                "actorder",
                f"actorder {self.actorder} puts the groups themselves in the order of activations, a layout that "
                "compressed-tensors has removed and no reader opens. Write static",
            )
        if self.actorder not in ("static", "weight", None):
            raise ModifierError("actorder", f"there is no actorder {self.actorder!r}. Write static or null")
        if type(self.refine) is not int or not 0 <= self.refine <= _MOST_ROUNDS:
            raise ModifierError(
                "refine", f"refine is a number of rounds from 0 to {_MOST_ROUNDS}, got {self.refine!r}. Write 0 or 2"
            )
        object.__setattr__(self, "actorder", self.actorder and "static")

    def statistic(self, layer: Layer) -> Hessian:
        return Hessian(layer.shape[1], arithmetic="int8")

    @torch.no_grad()
    def solve(self, weights: Sequence[Weight], statistic: Hessian) -> list[LayerError]:
        """Set `values` to float32 numbers that the scheme holds exactly, and the scales that go with them.

        What was pruned stays exactly zero. A layer whose solution is not finite, or changes its output more than
        rounding to nearest with the same scales would, is rounded to nearest.
        """
        hessian = statistic.value
        order = torch.arange(len(hessian), device=hessian.device)
        if self.actorder:
            order = hessian.diagonal().argsort(descending=True, stable=True)
        try:
            factor = inverse_factor(hessian, self.dampening_frac, order)
            reason = None if statistic.tokens else "no calibration token came to it"
        except NotPositiveDefinite as error:
            factor = torch.eye(len(hessian), device=hessian.device)  # with which each column is rounded to nearest
            reason = str(error)
        importance = torch.empty_like(hessian[0]).index_copy_(0, order, factor.diagonal().pow(-2))
        self.share_global_scale(weights)
        for weight in weights:
            self.set_scales(weight, importance)
        grids = [self._grid(weight) for weight in weights]
        results = [torch.empty_like(weight.values, dtype=torch.float32) for weight in weights]
        squares = torch.zeros(len(weights), 3, dtype=torch.float64)
        for _, numbers in groupby(range(len(weights)), key=lambda number: grids[number].args):
            first, *_ = alike = list(numbers)
            for run in row_runs([len(weights[number].values) for number in alike], len(hessian)):
                parts = [(first + place, rows) for place, rows in run]
                values = torch.cat([weights[number].values[rows].float() for number, rows in parts])
                grid = Grid.stack([grids[number][rows] for number, rows in parts])
                with torch_threads(1, torch.get_num_threads()):
                    keep = _kept(weights, parts)
                    solved = round_columns(values, grid, factor, order, self.block_size, keep)
                    solved = descend(values, solved, grid, hessian, self.refine, keep) if self.refine else solved
                squared = [output_errors(values, hessian), output_errors(grid.nearest(values).sub_(values), hessian)]
                lost = torch.stack([*squared, output_errors(solved - values, hessian)], 1)
                sizes = [rows.stop - rows.start for _, rows in parts]
                for (number, rows), part, errors in zip(parts, solved.split(sizes), lost.split(sizes), strict=True):
                    results[number][rows] = part
                    squares[number] += errors.double().sum(0).cpu()
        found = []
        for weight, grid, result, square in zip(weights, grids, results, squares.tolist(), strict=True):
            found.append(LayerError.of(weight.layer.name, square, reason))
            weight.values = grid.nearest(weight.values.float()) if found[-1].fallback else result
        return found

    def _grid(self, weight: Weight) -> Grid:
        assert weight.scale is not None
        args = self.weights_of(weight.layer)
        return Grid.of(args, weight.values.shape, weight.scale, weight.zero_point, weight.global_scale)


def _kept(weights: Sequence[Weight], parts: Sequence[tuple[int, slice]]) -> Tensor | None:
    """Where these rows are not zero for good; None where nothing was pruned."""
    if all(weights[number].keep is None for number, _ in parts):
        return None
    found = []
    for number, rows in parts:
        values, keep = weights[number].values[rows], weights[number].keep
        found.append(torch.ones_like(values, dtype=torch.bool) if keep is None else keep[rows] & (values != 0))
    return torch.cat(found)
