"""SparseGPT: weights are pruned column after column, and the columns that follow make up for each that is gone.

Frantar, Alistarh: SparseGPT, 2023, https://arxiv.org/abs/2301.00774. In the words of the paper:

    W   weights [rows, in] of all layers that read one input X [tokens, in], on top of each other
    H   X^T X
    U   upper Cholesky factor of (H + dampening)^-1
    M   mask: True is kept
    E   what was pruned of the columns in hand, divided by their entries on the diagonal of U

When a column has been passed, its kept weights are no longer moved, and its mask is not reconsidered. So afterwards,
beyond the paper, all kept weights are solved for again together, by conjugate gradients, and weights that have become
worth more than kept ones of their group change places with them.

With a scheme the kept weights are then rounded, as section 3.5 of the paper (joint sparsification and quantization) has
it: the error of a rounded column is made up for by those that follow. A column's error goes into all others, pruned or
not, and what goes into pruned ones is lost: so a part of the columns is rounded, the kept weights of all others are
solved for again, exactly, and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparseautomodel.column_blocks import MOST, are_compiled, prune_block
from sparseautomodel.columns import round_columns
from sparseautomodel.masks import prune_mask
from sparseautomodel.modifiers.base import Layer, ModifierError, Weight
from sparseautomodel.modifiers.scheme_keys import SchemeKeys
from sparseautomodel.modifiers.sparsity_keys import SparsityKeys
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

_INNER = 32
"""Columns whose errors are passed on one by one: as many as stay in a core's own cache."""

_STEPS = (4, 6, 8)
"""Steps of solution for each mask: all but the last are there to choose the next mask. More gain less than 1 %."""

_PARTS, _PART_STEPS = 3, 3
"""Parts in which columns are rounded, and steps of the solutions between them: more of either gain less than 1 %."""

_ROWS = 512
"""Rows that are solved for at once, so that what belongs to them stays near the cores."""

_STAY = 1.2
"""How much more than a kept weight a pruned one must be worth to take its place."""


@dataclass(frozen=True, kw_only=True)
class SparseGPTModifier(SchemeKeys, SparsityKeys):
    """Prune, and move the weights that are kept, so that the output of each layer, on calibration data, changes least.

    With a scheme the kept weights are rounded too, in the same work. Without one the number format stays.

    >>> SparseGPTModifier(mask_structure="2:4")
    >>> SparseGPTModifier(sparsity=0.5)
    >>> SparseGPTModifier(mask_structure="2:4", scheme="W4A16", group_size="auto", observer="mse")
    """

    block_size: int = 128
    """Columns whose mask is chosen together where pruning is unstructured: each block gets the same share of zeros."""
    dampening_frac: float = 0.01
    """Share of the mean of H's diagonal that is added to the diagonal; more where that is not enough."""

    refine: bool = True
    """Whether the kept weights are solved for again together, and masks changed where that pays: it takes about as long
    as all else, and lowers the error of a layer by a fifth. false: the paper."""

    needs_data: ClassVar[bool] = True

    scheme_needed: ClassVar[bool] = False
    search: ClassVar[ErrorSearch] = ErrorSearch(maxshrink=0.4, grid=32.0, norm=2.0, maxgrow=0.07)

    def __post_init__(self, weight_observer: str | None) -> None:
        super().__post_init__(weight_observer)
        if not isinstance(self.refine, bool):
            raise ModifierError("refine", f"got {self.refine!r}. Write true or false")
        if type(self.block_size) is not int or self.block_size < 1:
            raise ModifierError("block_size", f"block_size is a number of columns, got {self.block_size!r}. Write 128")
        if type(self.dampening_frac) not in (int, float) or not 0 <= self.dampening_frac <= 1:
            raise ModifierError(
                "dampening_frac", f"dampening_frac is a share from 0 to 1, got {self.dampening_frac!r}. Write 0.01"
            )

    def rows(self, layer: Layer) -> int:
        return max(SparsityKeys.rows(self, layer), super().rows(layer))

    def statistic(self, layer: Layer) -> Hessian:
        return Hessian(layer.shape[1], arithmetic="int8")

    @torch.no_grad()
    def solve(self, weights: Sequence[Weight], statistic: Hessian) -> list[LayerError]:
        """Prune and move `values`, set `keep`. What was zero stays zero, and counts as pruned.

        With a scheme, `values` become float32 numbers that it holds exactly, pruned ones exactly zero, and the scales
        are set. A layer whose solution is not finite, or changes its output more than pruning the smallest weights (and
        rounding to nearest) would, loses the smallest weights, and the others stay as they are (or are rounded).
        """
        hessian, solutions, factor = statistic.value, None, None
        order = hessian.diagonal().argsort(descending=True, stable=True)
        smallest = [self._choose(weight.values, weight.values) for weight in weights]
        reason = None if statistic.tokens else "no calibration token came to it"
        try:
            if reason is None:
                factor = inverse_factor(hessian, self.dampening_frac)
                solutions = self._solutions(weights, hessian, factor)
                del factor  # two matrices of this size are enough
                factor = inverse_factor(hessian, self.dampening_frac, order) if self._groups else None
        except NotPositiveDefinite as error:
            reason = str(error)
        self.share_global_scale(weights)
        found = []
        for number, weight in enumerate(weights):
            plain = (weight.values, smallest[number])
            solution = None if solutions is None else solutions[number]
            found.append(self._decide(weight, plain, solution, hessian, factor, order, reason))
        return found

    def _solutions(self, weights: Sequence[Weight], hessian: Tensor, factor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each of `weights` the pruned values, float32, and what is kept."""
        found = [
            (torch.empty_like(weight.values, dtype=torch.float32), torch.empty_like(weight.values, dtype=torch.bool))
            for weight in weights
        ]
        for run in self._runs(weights):
            values = torch.cat([weights[number].values[rows].float() for number, rows in run])
            with torch_threads(1, torch.get_num_threads()):
                solved, keep = sparsegpt(values, factor, self.sparsity, self.structure, self.block_size)
            if self.refine:
                solved, keep = self._solved_again(values, solved, keep, hessian, factor)
            sizes = [rows.stop - rows.start for _, rows in run]
            for (number, rows), part, kept in zip(run, solved.split(sizes), keep.split(sizes), strict=True):
                found[number][0][rows], found[number][1][rows] = part, kept
        return found

    def _decide(
        self,
        weight: Weight,
        plain: tuple[Tensor, Tensor],
        solution: tuple[Tensor, Tensor] | None,
        hessian: Tensor,
        factor: Tensor | None,
        order: Tensor,
        reason: str | None,
    ) -> LayerError:
        """Give `weight` its solution, rounded where there is a scheme, or the plain result where that is better."""
        importance = None
        if factor is not None:
            importance = torch.empty_like(hessian[0]).index_copy_(0, order, factor.diagonal().pow(-2))
        results: list[Weight] = []
        for values, keep in (plain, solution or plain):
            result = dataclasses.replace(weight, values=values.to(weight.values.dtype, copy=True))
            result.prune(keep)
            if self._groups:
                self.set_scales(result, importance)
                assert result.scale is not None
                shape, args = values.shape, self.weights_of(weight.layer)
                grid = Grid.of(args, shape, result.scale, result.zero_point, result.global_scale)
                if results and factor is not None:
                    result.values = self._rounded(weight.values, values, keep, grid, hessian, factor, order)
                else:
                    result.values = grid.nearest(result.values.float())
            results.append(result)
        squares = torch.zeros(3, dtype=torch.float64)
        for ((_, rows),) in row_runs([len(weight.values)], len(hessian)):
            exact = weight.values[rows].float()
            changes = (exact, *(result.values[rows].float() - exact for result in results))
            squares += torch.stack([output_errors(change, hessian).double().sum() for change in changes]).cpu()
        error = LayerError.of(weight.layer.name, squares.tolist(), reason)
        chosen = results[0 if error.fallback else 1]
        weight.values, weight.keep = chosen.values, chosen.keep
        weight.scale, weight.zero_point = chosen.scale, chosen.zero_point
        return error

    def _rounded(
        self, exact: Tensor, values: Tensor, keep: Tensor, grid: Grid, hessian: Tensor, factor: Tensor, order: Tensor
    ) -> Tensor:
        result, added = torch.empty_like(values), self._added(hessian)
        for ((_, rows),) in row_runs([len(values)], len(hessian)):
            mine = (exact[rows].float(), values[rows], keep[rows], grid[rows])
            result[rows] = round_kept(*mine, hessian, added, factor, order, self.block_size)
        return result

    def _added(self, hessian: Tensor) -> float:
        """What is added to the diagonal."""
        return max(self.dampening_frac * float(hessian.diagonal().mean()), torch.finfo(torch.float32).tiny)

    def _runs(self, weights: Sequence[Weight]) -> Iterator[list[tuple[int, slice]]]:
        """Rows that are solved at once: those of one layer, where its weights compete with each other."""
        counts = [len(weight.values) for weight in weights]
        if self.structure is None:
            return iter([[(number, slice(0, count))] for number, count in enumerate(counts)])
        return row_runs(counts, weights[0].values.shape[1])

    def _choose(self, scores: Tensor, values: Tensor) -> Tensor:
        """What to keep of `values`, by the scores of those that are not zero."""
        return prune_mask(scores * (values != 0), self.sparsity, self.structure) & (values != 0)

    def _solved_again(
        self, values: Tensor, solved: Tensor, keep: Tensor, hessian: Tensor, factor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`solved` and `keep`, or what is better: row by row, or all rows where they compete with each other."""
        added = self._added(hessian)
        diagonal = hessian.diagonal() + added
        # A weight costs H_jj where no other makes up for it, and 1 / [H^-1]_jj where all others do: between the two.
        curvature = diagonal.sqrt() / torch.linalg.vector_norm(factor, dim=0)
        kept = keep
        result, slope = solve_kept(values, solved, kept, hessian, added, _STEPS[0])
        for steps in _STEPS[1:]:
            worth = torch.where(kept, _STAY * result, slope.div_(curvature)).mul_(curvature.sqrt())
            kept = self._choose(worth, values)
            result, slope = solve_kept(values, result * kept, kept, hessian, added, steps)
        change = result - values
        again = torch.linalg.vecdot(change, slope.neg_().sub_(change, alpha=added))
        errors = [output_errors(solved - values, hessian), again]
        if self.structure is None:
            errors = [error.sum().expand(len(values)) for error in errors]
        better = (errors[1] < errors[0]).unsqueeze(1)
        return torch.where(better, result, solved), torch.where(better, kept, keep)


def sparsegpt(
    values: Tensor,
    factor: Tensor,
    sparsity: float | None,
    structure: tuple[int, int] | None = None,
    block_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """`values` `[rows, in]` float32 pruned and made up for, and what is kept of them; zeros stay and count as pruned.

    Args:
        factor: U, `[in, in]`.
        sparsity: share of zeros of the whole matrix; it does not count with a `structure` (n, m).
    """
    if max(block_size, structure[1] if structure else 0) <= MOST and are_compiled(values):
        return _sparsegpt_compiled(values, factor, sparsity, structure, block_size)
    left = values.t().clone(memory_format=torch.contiguous_format)  # transposed, a column is a run of memory
    alive = left != 0
    keep, gone = torch.empty_like(alive), torch.empty_like(alive)
    (columns, rows), diagonal = left.shape, factor.diagonal().unsqueeze(1)
    width = 1 if structure is None else structure[1]
    block, inner = max(1, block_size // width) * width, _INNER // width * width
    steps, errors = (1 / factor.diagonal()).tolist(), torch.empty_like(left[:block])

    def choose(part: slice, share: float | None) -> None:
        scores = (left[part] / diagonal[part]).mul_(alive[part])
        keep[part] = prune_mask(scores.t().contiguous(), share, structure).t().logical_and_(alive[part])
        torch.logical_xor(keep[part], alive[part], out=gone[part])

    for first in range(0, columns, block):
        last = min(columns, first + block)
        if structure is None:
            choose(slice(first, last), _share(sparsity, rows, first, last))
        for start in range(first, last, inner):
            stop = min(last, start + inner)
            for column in range(start, stop):
                if structure is not None and column % width == 0:
                    choose(slice(column, column + width), None)
                weight, error = left[column], errors[column - first]
                torch.mul(weight, gone[column], out=error).mul_(steps[column])
                weight.mul_(keep[column])
                left[column + 1 : stop].addr_(factor[column, column + 1 : stop], error, alpha=-1)
            left[stop:last].addmm_(factor[start:stop, stop:last].t(), errors[start - first : stop - first], alpha=-1)
        left[last:].addmm_(factor[first:last, last:].t(), errors[: last - first], alpha=-1)
    return left.t().contiguous(), keep.t().contiguous()


def _sparsegpt_compiled(
    values: Tensor, factor: Tensor, sparsity: float | None, structure: tuple[int, int] | None, block_size: int
) -> tuple[Tensor, Tensor]:
    left, (rows, columns) = values.clone(memory_format=torch.contiguous_format), values.shape
    alive = left != 0
    keep = torch.empty_like(alive)
    width = 1 if structure is None else structure[1]
    block = max(1, block_size // width) * width
    for first in range(0, columns, block):
        part, rest = slice(first, min(columns, first + block)), slice(first + block, columns)
        if structure is None:
            scores = left[:, part] / factor.diagonal()[part] * alive[:, part]
            share = _share(sparsity, rows, part.start, part.stop)
            keep[:, part] = prune_mask(scores, share).logical_and_(alive[:, part])
        errors = prune_block(left, part, factor, alive, keep, structure)
        if rest.start < columns:
            left[:, rest].addmm_(errors, factor[part, rest], alpha=-1)
    return left, keep


def _share(sparsity: float | None, rows: int, first: int, last: int) -> float:
    """Of zeros in a block of columns: rounded so that the blocks add up to the share of the whole."""
    pruned = round((sparsity or 0) * last * rows) - round((sparsity or 0) * first * rows)
    return pruned / (last - first) / rows


def solve_kept(
    values: Tensor, start: Tensor, keep: Tensor, hessian: Tensor, added: float, steps: int
) -> tuple[Tensor, Tensor]:
    """The weights, moved where `keep` is True alone, whose output is closest to that of `values` `[rows, in]`.

    `steps` steps of conjugate gradients from `start`, all rows at once, preconditioned with the diagonal; `added` is
    added to the diagonal of the Hessian. Second is `(values - result) (H + added)`: which way each weight would go.
    """
    result, slope = start.clone(), torch.empty_like(values)
    inverse, tiny = 1 / (hessian.diagonal() + added), torch.finfo(torch.float32).tiny
    parts = (tensor.split(_ROWS) for tensor in (values, result, slope, keep))
    for exact, found, left, kept in zip(*parts, strict=True):
        difference, scaling = exact - found, kept * inverse
        torch.addmm(difference, difference, hessian, beta=added, out=left)
        direction = left * scaling
        size = torch.linalg.vecdot(left, direction).unsqueeze(1)
        image = torch.empty_like(direction)
        for _ in range(steps):
            torch.addmm(direction, direction, hessian, beta=added, out=image)
            step = size / torch.linalg.vecdot(direction, image).unsqueeze(1).clamp_(min=tiny)
            found.addcmul_(direction, step)
            left.addcmul_(image, step, value=-1)
            before, scaled = size, torch.mul(left, scaling, out=image)
            size = torch.linalg.vecdot(left, scaled).unsqueeze(1)
            direction.mul_(size / before.clamp(min=tiny)).add_(scaled)
    return result, slope


def round_kept(
    exact: Tensor,
    values: Tensor,
    keep: Tensor,
    grid: Grid,
    hessian: Tensor,
    added: float,
    factor: Tensor,
    order: Tensor,
    block_size: int = 128,
) -> Tensor:
    """`values` `[rows, in]` float32, zero where `keep` is False, as numbers of `grid`, in `order`; zeros stay.

    Args:
        exact: the weights whose output is aimed at.
        factor: U of the columns in `order`, `[in, in]`.
    """
    left, free, first = values.clone(), keep.clone(), 0
    parts = order.chunk(_PARTS)
    for number, columns in enumerate(parts):
        part, group = slice(first, first + len(columns)), columns // grid.width
        first = part.stop
        zeros = None if grid.zero_point is None else grid.zero_point[:, group]
        own = dataclasses.replace(grid, scale=grid.scale[:, group], zero_point=zeros, width=1)
        places = torch.arange(len(columns), device=columns.device)
        with torch_threads(1, torch.get_num_threads()):
            left[:, columns] = round_columns(
                left[:, columns], own, factor[part, part], places, block_size, keep[:, columns]
            )
        free[:, columns] = False
        if number + 1 < len(parts):
            left, _ = solve_kept(exact, left, free, hessian, added, _PART_STEPS)
    return left
