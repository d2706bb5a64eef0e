"""Magnitude pruning: the smallest weights become zero (Han et al., 2015, https://arxiv.org/abs/1506.02626)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass
from typing import Any

import torch

from sparseautomodel.masks import global_threshold, parse_structure, prune_mask, threshold_mask
from sparseautomodel.modifiers.base import Layer, Modifier, ModifierError, Weight


@dataclass(frozen=True, kw_only=True)
class MagnitudePruningModifier(Modifier):
    """Zero the weights of smallest magnitude, without data.

    >>> MagnitudePruningModifier(mask_structure="2:4")          # 2 kept of every 4 consecutive inputs
    >>> MagnitudePruningModifier(sparsity=0.5)                  # half of each layer
    >>> MagnitudePruningModifier(sparsity=0.5, apply_globally=True)  # half of all layers together
    """

    sparsity: float | None = None
    """Share of zeros, above 0 and up to 1. `mask_structure: "N:M"` implies it, all else needs it."""
    mask_structure: str = "unstructured"
    """`unstructured`, or `N:M`: N kept of every M consecutive inputs."""
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
        super().__post_init__()
        if not isinstance(self.apply_globally, bool):
            raise ModifierError("apply_globally", f"apply_globally is {self.apply_globally!r}. Write true or false")
        structure = self._structure()
        asked = self._asked(final_sparsity)
        if structure is not None:
            self._check_implied(asked, *structure)
        elif asked is None:
            raise ModifierError("sparsity", 'no sparsity. Write sparsity: 0.5, or mask_structure: "2:4"')
        if init_sparsity is not None:
            self._check_start(init_sparsity, asked if structure is None else 1 - structure[0] / structure[1])
        self._check_threshold()
        # One spelling for one meaning: recipes that do the same are equal and are written alike.
        object.__setattr__(self, "sparsity", asked if structure is None else None)
        spelled = "unstructured" if structure is None else f"{structure[0]}:{structure[1]}"
        object.__setattr__(self, "mask_structure", spelled)

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        return (*super().keys(), "init_sparsity", "final_sparsity")

    def scan(self, read: Callable[[], Iterator[torch.Tensor]]) -> MagnitudePruningModifier:
        if not self.apply_globally or self.threshold is not None:
            return self
        assert self.sparsity is not None
        return dataclasses.replace(self, threshold=global_threshold(read, self.sparsity))

    def sparsity_of(self, layer: Layer) -> float | None:
        if self.apply_globally:
            return None
        structure = parse_structure(self.mask_structure)
        if structure is not None:
            return 1 - structure[0] / structure[1]
        size = math.prod(layer.shape)
        return round((self.sparsity or 0) * size) / size

    def rows(self, layer: Layer) -> int:
        return layer.shape[0] if self.mask_structure == "unstructured" and not self.apply_globally else 1

    def apply(self, weight: Weight) -> None:
        if not self.apply_globally:
            weight.prune(prune_mask(weight.values, self.sparsity, parse_structure(self.mask_structure)))
        elif self.threshold is not None:
            weight.prune(threshold_mask(weight.values, self.threshold))
        else:
            raise ValueError("apply_globally has no threshold yet: apply what scan(read) returns")

    def _structure(self) -> tuple[int, int] | None:
        try:
            structure = parse_structure(self.mask_structure)
        except ValueError as error:
            raise ModifierError("mask_structure", f"mask_structure: {error}") from error
        if structure is not None and self.apply_globally:
            raise ModifierError(
                "apply_globally", f"apply_globally does not go with {self.mask_structure}. Remove one of them"
            )
        return structure

    def _asked(self, final_sparsity: float | None) -> float | None:
        """`sparsity` under either of its names."""
        sparsity = _share("sparsity", self.sparsity)
        final = _share("final_sparsity", final_sparsity)
        if sparsity is not None and final is not None and sparsity != final:
            raise ModifierError("final_sparsity", f"final_sparsity {final} contradicts sparsity {sparsity}. Remove one")
        return final if sparsity is None else sparsity

    def _check_implied(self, asked: float | None, n: int, m: int) -> None:
        implied = 1 - n / m
        if asked is not None and abs(asked - implied) > 0.005:
            raise ModifierError(
                "sparsity",
                f"sparsity {asked} contradicts {n}:{m}, which implies {implied:.4g}. Remove sparsity",
            )

    def _check_start(self, start: Any, sparsity: float | None) -> None:
        if not _is_number(start) or sparsity is None or not 0 <= start <= sparsity:
            raise ModifierError(
                "init_sparsity",
                f"init_sparsity must be from 0 to sparsity ({sparsity}), got {start!r}. Remove it",
            )

    def _check_threshold(self) -> None:
        if self.threshold is None:
            return
        if not self.apply_globally:
            raise ModifierError("threshold", "threshold is for apply_globally: true. Remove it")
        if not _is_number(self.threshold) or not self.threshold >= 0:
            raise ModifierError("threshold", f"threshold must be a number from 0 up, got {self.threshold!r}")


def _share(key: str, value: Any) -> float | None:
    if value is None:
        return None
    if not _is_number(value) or not 0 < value <= 1:
        hint = f". Write {key}: {value / 100:g}" if _is_number(value) and 1 < value < 100 else ""
        raise ModifierError(key, f"{key} is a share above 0 and up to 1, got {value!r}{hint}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
