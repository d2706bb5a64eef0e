"""The keys of modifiers that smooth: which layers, and what makes their input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from compressed_tensors.utils.match import match_name

from sparseautomodel.modifiers.base import Modifier, ModifierError

_EXAMPLE = '[[["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"]]'


@dataclass(frozen=True, kw_only=True)
class SmoothingKeys(Modifier, registered=False):
    """A modifier that divides inputs of layers where it finds what makes them, and multiplies their weights.

    Which module makes an input is found by running a block (`smoothing.find_pairs`), so no table is needed.
    """

    mappings: tuple[Any, ...] | None = None
    """Only these are smoothed: `[[layers that read one input, ...], what makes it]`, names or `re:` regexes; or entries
    `{smooth_layer: ..., balance_layers: [...]}`. null: wherever smoothing changes nothing."""

    needs_data: ClassVar[bool] = True
    smooths: ClassVar[bool] = True
    only_norms: ClassVar[bool] = False
    """Whether, without `mappings`, only the inputs are smoothed that a norm makes."""

    def __post_init__(self, *given: Any) -> None:
        super().__post_init__(*given)
        if self.mappings is not None:
            if not isinstance(self.mappings, (list, tuple)) or not self.mappings:
                raise ModifierError("mappings", f"mappings is a list, got {self.mappings!r}. Write {_EXAMPLE}")
            object.__setattr__(self, "mappings", tuple(_mapping(entry) for entry in self.mappings))

    def moves(self, layers: Sequence[str], producer: str, kind: str) -> bool:
        """Whether the input of `layers` may be smoothed by way of `producer`, all by full module names.

        `kind` is that of a `smoothing.Pair`. A producer that `ignore` names is left alone.
        """
        if any(match_name(producer, pattern) for pattern in self.ignore):
            return False
        if self.mappings is None:
            return kind != "rows" or not self.only_norms
        return any(
            match_name(producer, maker) and any(match_name(layer, pattern) for layer in layers for pattern in readers)
            for readers, maker in self.mappings
        )


def _mapping(entry: Any) -> tuple[tuple[str, ...], str]:
    if isinstance(entry, Mapping) and {"smooth_layer", "balance_layers"} <= set(entry):
        unknown = sorted(set(entry) - {"smooth_layer", "balance_layers", "activation_hook_target"})
        if unknown:
            raise ModifierError(
                "mappings", f"unknown key {unknown[0]!r} in {dict(entry)}. Allowed: smooth_layer, balance_layers"
            )
        entry = (entry["balance_layers"], entry["smooth_layer"])
    if isinstance(entry, (list, tuple)) and len(entry) == 2:
        readers, maker = ((part,) if isinstance(part, str) else part for part in entry)
        lists = isinstance(readers, (list, tuple)) and isinstance(maker, (list, tuple))
        if lists and readers and len(maker) == 1 and all(isinstance(name, str) for name in (*readers, *maker)):
            return tuple(readers), maker[0]
    raise ModifierError(
        "mappings", f"an entry is [[layers that read one input], what makes it], got {entry!r}. Write {_EXAMPLE}"
    )
