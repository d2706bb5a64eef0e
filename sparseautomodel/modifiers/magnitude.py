"""Magnitude pruning: the smallest weights become zero (Han et al., 2015, https://arxiv.org/abs/1506.02626)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass

import torch

from sparseautomodel.masks import global_threshold, prune_mask, threshold_mask
from sparseautomodel.modifiers.base import Layer, ModifierError, Weight
from sparseautomodel.modifiers.sparsity_keys import SparsityKeys, is_number, share


@dataclass(frozen=True, kw_only=True)
class MagnitudePruningModifier(SparsityKeys):
    """Zero the weights of smallest magnitude, without data.

    >>> MagnitudePruningModifier(mask_structure="2:4")          # 2 kept of every 4 consecutive inputs
    >>> MagnitudePruningModifier(sparsity=0.5)                  # half of each layer
    >>> MagnitudePruningModifier(sparsity=0.5, apply_globally=True)  # half of all layers together
    """

    apply_globally: bool = False
    """Choose among the values of all selected layers together, so that layers differ in sparsity."""
    threshold: float | None = None
    """With `apply_globally`: magnitudes up to this are pruned. `scan` finds it, reading all layers first.
    Ties with it are all pruned, so the sparsity reached can be higher than asked."""
    init_sparsity: InitVar[float | None] = None
    """Where a schedule starts, in recipes for training. There is no schedule here: checked, then dropped."""
    final_sparsity: InitVar[float | None] = None
    """What recipes for training call `sparsity`."""

    def __post_init__(self, init_sparsity: float | None, final_sparsity: float | None) -> None:
        final = share("final_sparsity", final_sparsity)
        if final is not None:
            if share("sparsity", self.sparsity) not in (None, final):
                raise ModifierError(
                    "final_sparsity", f"final_sparsity {final} contradicts sparsity {self.sparsity}. Remove one"
                )
            object.__setattr__(self, "sparsity", final)
        super().__post_init__()
        if not isinstance(self.apply_globally, bool):
            raise ModifierError("apply_globally", f"apply_globally is {self.apply_globally!r}. Write true or false")
        if self.structure is not None and self.apply_globally:
            raise ModifierError(
                "apply_globally", f"apply_globally does not go with {self.mask_structure}. Remove one of them"
            )
        if init_sparsity is not None:
            asked = self.sparsity if self.structure is None else 1 - self.structure[0] / self.structure[1]
            if not is_number(init_sparsity) or asked is None or not 0 <= init_sparsity <= asked:
                raise ModifierError(
                    "init_sparsity",
                    f"init_sparsity must be from 0 to sparsity ({asked}), got {init_sparsity!r}. Remove it",
                )
        self._check_threshold()

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        return (*super().keys(), "init_sparsity", "final_sparsity")

    def scan(self, read: Callable[[], Iterator[torch.Tensor]]) -> MagnitudePruningModifier:
        if not self.apply_globally or self.threshold is not None:
            return self
        assert self.sparsity is not None
        return dataclasses.replace(self, threshold=global_threshold(read, self.sparsity))

    def sparsity_of(self, layer: Layer) -> float | None:
        return None if self.apply_globally else super().sparsity_of(layer)

    def rows(self, layer: Layer) -> int:
        return 1 if self.apply_globally else super().rows(layer)

    def columns(self, layer: Layer) -> int:
        return 1 if self.apply_globally else super().columns(layer)

    def apply(self, weight: Weight) -> None:
        if not self.apply_globally:
            weight.prune(prune_mask(weight.values, self.sparsity, self.structure))
        elif self.threshold is not None:
            weight.prune(threshold_mask(weight.values, self.threshold))
        else:
            raise ValueError("apply_globally has no threshold yet: apply what scan(read) returns")

    def _check_threshold(self) -> None:
        if self.threshold is None:
            return
        if not self.apply_globally:
            raise ModifierError("threshold", "threshold is for apply_globally: true. Remove it")
        if not is_number(self.threshold) or not self.threshold >= 0:
            raise ModifierError("threshold", f"threshold must be a number from 0 up, got {self.threshold!r}")
