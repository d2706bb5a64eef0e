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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparseautomodel.masks import prune_mask
from sparseautomodel.modifiers.base import Layer, ModifierError, Weight
from sparseautomodel.modifiers.sparsity_keys import SparsityKeys
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

_ROUNDS, _STEPS = 3, 7
"""Masks that the kept weights are solved for, and steps of each solution: more of either gain less than 2 %."""

_STAY = 1.2
"""How much more than a kept weight a pruned one must be worth to take its place."""


@dataclass(frozen=True, kw_only=True)
class SparseGPTModifier(SparsityKeys):
    """Prune, and move the weights that are kept, so that the output of each layer, on calibration data, changes least.

    >>> SparseGPTModifier(mask_structure="2:4")
    >>> SparseGPTModifier(sparsity=0.5)
    """

    block_size: int = 128
    """Columns whose mask is chosen together where pruning is unstructured: each block gets the same share of zeros."""
    dampening_frac: float = 0.01
    """Share of the mean of H's diagonal that is added to the diagonal; more where that is not enough."""

    needs_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.block_size) is not int or self.block_size < 1:
            raise ModifierError("block_size", f"block_size is a number of columns, got {self.block_size!r}. Write 128")
        if type(self.dampening_frac) not in (int, float) or not 0 <= self.dampening_frac <= 1:
            raise ModifierError(
                "dampening_frac", f"dampening_frac is a share from 0 to 1, got {self.dampening_frac!r}. Write 0.01"
            )

    def statistic(self, layer: Layer) -> Hessian:
        return Hessian(layer.shape[1], arithmetic="int8")

    @torch.no_grad()
    def solve(self, weights: Sequence[Weight], statistic: Hessian) -> list[LayerError]:
        """Prune and move `values`, set `keep`. What was zero stays zero, and counts as pruned.

        A layer whose solution is not finite, or changes its output more than pruning the smallest weights would, loses
        the smallest weights, and the others stay as they are.
        """
        hessian = statistic.value
        try:
            factor = inverse_factor(hessian, self.dampening_frac)
            reason = None if statistic.tokens else "no calibration token came to it"
        except NotPositiveDefinite as error:
            factor = torch.eye(len(hessian), device=hessian.device)
            reason = str(error)
        results = [torch.empty_like(weight.values) for weight in weights]
        masks = [torch.empty_like(weight.values, dtype=torch.bool) for weight in weights]
        squares = torch.zeros(len(weights), 3, dtype=torch.float64)
        for run in self._runs(weights):
            values = torch.cat([weights[number].values[rows].float() for number, rows in run])
            smallest = values * self._choose(values, values)
            with torch_threads(1, torch.get_num_threads()):
                solved, keep = sparsegpt(values, factor, self.sparsity, self.structure, self.block_size)
            solved, keep = self._solved_again(values, solved, keep, hessian, factor)
            sizes = [rows.stop - rows.start for _, rows in run]
            for (number, rows), part, kept in zip(run, solved.split(sizes), keep.split(sizes), strict=True):
                results[number][rows], masks[number][rows] = part, kept
            solved = torch.cat([results[number][rows].float() for number, rows in run])
            changes = (values, smallest - values, solved - values)
            lost = torch.stack([output_errors(change, hessian) for change in changes], 1)
            for (number, _), errors in zip(run, lost.split(sizes), strict=True):
                squares[number] += errors.double().sum(0).cpu()
        found = []
        for weight, result, mask, square in zip(weights, results, masks, squares.tolist(), strict=True):
            found.append(LayerError.of(weight.layer.name, square, reason))
            if found[-1].fallback is None:
                weight.values.copy_(result)
                weight.prune(mask)
            else:
                weight.prune(self._choose(weight.values, weight.values))
        return found

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
        added = max(self.dampening_frac * float(hessian.diagonal().mean()), torch.finfo(torch.float32).tiny)
        diagonal = hessian.diagonal() + added
        # A weight costs H_jj where no other makes up for it, and 1 / [H^-1]_jj where all others do: between the two.
        curvature = (diagonal / factor.square().sum(0)).sqrt()
        result, kept = solved, keep
        for number in range(_ROUNDS):
            if number:
                slope = ((result - values) @ hessian).add_(result - values, alpha=added)
                worth = torch.where(kept, _STAY * result, slope / curvature).mul_(curvature.sqrt())
                kept = self._choose(worth, values)
            result = solve_kept(values, result * kept, kept, hessian, added)
        errors = [output_errors(one - values, hessian) for one in (solved, result)]
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
            # Rounded so that the blocks add up to the share of the whole.
            pruned = round((sparsity or 0) * last * rows) - round((sparsity or 0) * first * rows)
            choose(slice(first, last), pruned / (last - first) / rows)
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


def solve_kept(values: Tensor, start: Tensor, keep: Tensor, hessian: Tensor, added: float) -> Tensor:
    """The weights, zero where `keep` is False, whose output is closest to that of `values` `[rows, in]`.

    `_STEPS` steps of conjugate gradients from `start`, all rows at once, preconditioned with the diagonal; `added` is
    added to the diagonal of the Hessian.
    """
    inverse, kept = 1 / (hessian.diagonal() + added), keep.float()
    result, tiny = start.clone(), torch.finfo(torch.float32).tiny
    difference = values - start
    residual = (difference @ hessian).add_(difference, alpha=added).mul_(kept)
    direction = residual * inverse
    image = torch.empty_like(direction)
    size = torch.linalg.vecdot(residual, direction).unsqueeze(1)
    for _ in range(_STEPS):
        torch.mm(direction, hessian, out=image).add_(direction, alpha=added).mul_(kept)
        step = size / torch.linalg.vecdot(direction, image).unsqueeze(1).clamp_(min=tiny)
        result.addcmul_(direction, step)
        residual.addcmul_(image, step, value=-1)
        before, scaled = size, torch.mul(residual, inverse, out=image)
        size = torch.linalg.vecdot(residual, scaled).unsqueeze(1)
        direction.mul_(size / before.clamp(min=tiny)).add_(scaled)
    return result
