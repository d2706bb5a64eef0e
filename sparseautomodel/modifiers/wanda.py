"""Wanda: weights are pruned by their magnitude times that of their input, row by row; the others stay as they are.

Sun, Liu, Bair, Kolter: A Simple and Effective Pruning Approach for Large Language Models, 2023,
https://arxiv.org/abs/2306.11695.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparseautomodel.masks import prune_mask
from sparseautomodel.modifiers.base import Layer, Weight
from sparseautomodel.modifiers.sparsity_keys import SparsityKeys
from sparseautomodel.statistics import ColumnNorm, LayerError, row_runs


@dataclass(frozen=True, kw_only=True)
class WandaPruningModifier(SparsityKeys):
    """Prune the weights whose magnitude times the norm of their input is smallest, of each row or each group of a row.

    >>> WandaPruningModifier(mask_structure="2:4")
    >>> WandaPruningModifier(sparsity=0.5)
    """

    needs_data: ClassVar[bool] = True

    def sparsity_of(self, layer: Layer) -> float | None:
        if self.structure is not None:
            return super().sparsity_of(layer)
        return round((self.sparsity or 0) * layer.shape[1]) / layer.shape[1]

    def rows(self, layer: Layer) -> int:
        return 1

    def statistic(self, layer: Layer) -> ColumnNorm:
        return ColumnNorm(layer.shape[1])

    @torch.no_grad()
    def solve(self, weights: Sequence[Weight], statistic: ColumnNorm) -> list[LayerError]:
        """Set what is pruned to zero, and `keep`.

        Errors are those of inputs that do not depend on each other, since only their norms are known. Where these are
        not finite, or no token came, the smallest weights of each row are pruned.
        """
        squares = statistic.value
        reason = None if statistic.tokens else "no calibration token came to it"
        if not squares.isfinite().all():
            reason = "the inputs of the layer are not finite, or their squares are not"
        found = []
        for weight in weights:
            keep = torch.empty_like(weight.values, dtype=torch.bool)
            smallest, sums = torch.empty_like(keep), torch.zeros(3, dtype=torch.float64)
            for ((_, rows),) in row_runs([len(keep)], len(squares)):
                values = weight.values[rows].float()
                smallest[rows] = self._choose(values)
                keep[rows] = self._choose(values * squares.sqrt())
                values = values.square()
                lost = (values, values * ~smallest[rows], values * ~keep[rows])
                sums += torch.stack([(one @ squares).double().sum() for one in lost]).cpu()
            found.append(LayerError.of(weight.layer.name, sums.tolist(), reason))
            weight.prune(keep if found[-1].fallback is None else smallest)
        return found

    def _choose(self, scores: Tensor) -> Tensor:
        return prune_mask(scores, self.sparsity, self.structure, per_row=True)
