"""Constant pruning: the zeros that a checkpoint already has stay."""

from __future__ import annotations

from dataclasses import dataclass

from sparseautomodel.modifiers.base import Layer, Modifier, Weight


@dataclass(frozen=True, kw_only=True)
class ConstantPruningModifier(Modifier):
    """Prune exactly the values that are zero already, so that no later modifier fills them.

    Changes no value. Stands first in the recipe of a checkpoint that was pruned before.
    """

    def columns(self, layer: Layer) -> int:
        return 1

    def apply(self, weight: Weight) -> None:
        weight.prune(weight.values != 0)
