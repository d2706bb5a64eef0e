"""The keys of modifiers that prune: how many of a layer's weights become zero, and in which structure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparseautomodel.masks import parse_structure
from sparseautomodel.modifiers.base import Layer, Modifier, ModifierError


@dataclass(frozen=True, kw_only=True)
class SparsityKeys(Modifier, registered=False):
    """A modifier that prunes a share of each layer."""

    sparsity: float | None = None
    """Share of zeros, above 0 and up to 1. `mask_structure: "N:M"` implies it, all else needs it."""
    mask_structure: str = "unstructured"
    """`unstructured`, or `N:M`: N kept of every M consecutive inputs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        structure, asked = self._parsed(), share("sparsity", self.sparsity)
        if structure is None and asked is None:
            raise ModifierError("sparsity", 'no sparsity. Write sparsity: 0.5, or mask_structure: "2:4"')
        if structure is not None and asked is not None and abs(asked - (1 - structure[0] / structure[1])) > 0.005:
            n, m = structure
            raise ModifierError(
                "sparsity", f"sparsity {asked} contradicts {n}:{m}, which implies {1 - n / m:.4g}. Remove sparsity"
            )
        # One spelling for one meaning: recipes that do the same are equal and are written alike.
        object.__setattr__(self, "sparsity", asked if structure is None else None)
        spelled = "unstructured" if structure is None else f"{structure[0]}:{structure[1]}"
        object.__setattr__(self, "mask_structure", spelled)

    @property
    def structure(self) -> tuple[int, int] | None:
        """`(n, m)`: n kept of every m; None where pruning is unstructured."""
        return parse_structure(self.mask_structure)

    def sparsity_of(self, layer: Layer) -> float | None:
        if self.structure is not None:
            return 1 - self.structure[0] / self.structure[1]
        size = math.prod(layer.shape)
        return round((self.sparsity or 0) * size) / size

    def rows(self, layer: Layer) -> int:
        return layer.shape[0] if self.structure is None else 1

    def columns(self, layer: Layer) -> int:
        return layer.shape[1] if self.structure is None else self.structure[1]

    def _parsed(self) -> tuple[int, int] | None:
        try:
            return parse_structure(self.mask_structure)
        except ValueError as error:
            raise ModifierError("mask_structure", f"mask_structure: {error}") from error


def share(key: str, value: Any) -> float | None:
    """The value of a key that is a share. Raises ModifierError, with a guess where percent were written."""
    if value is None:
        return None
    if not is_number(value) or not 0 < value <= 1:
        hint = f". Write {key}: {value / 100:g}" if is_number(value) and 1 < value < 100 else ""
        raise ModifierError(key, f"{key} is a share above 0 and up to 1, got {value!r}{hint}")
    return float(value)


def is_number(value: Any) -> bool:
    """Whether the value is a number, which true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
