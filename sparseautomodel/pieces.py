"""Stored tensors of one matrix, asked for in slices: each part of the matrix is worked on once, for all of them.

Processes that share a model ask for their slices of a layer's tensors one after another. The packed numbers, scales and
zero points of some rows come from the same rows of the dense weight, which are read when the first slice is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from sparseautomodel.checkpoint import LazyTensor

Range = tuple[int, int]
"""First index and the one after the last."""
Spans = Mapping[str, tuple[Fraction | None, Fraction | None]]
"""Stored tensor -> rows and columns of the matrix that one index stands for; None where they do not follow it."""


class Window(LazyTensor):
    """Some rows and columns of a stored matrix, as a tensor of its own. Reads nothing else."""

    def __init__(self, tensor: LazyTensor, rows: Range, columns: Range) -> None:
        super().__init__(tensor.name, (rows[1] - rows[0], columns[1] - columns[0]), tensor.dtype)
        self._tensor, self._first, self._columns = tensor, rows[0], slice(*columns)

    def __getitem__(self, index: Any) -> Tensor:
        start, stop, _ = (slice(None) if index is Ellipsis else index).indices(self.shape[0])
        return self._tensor[self._first + start : self._first + stop, self._columns]


class Pieces:
    """What was computed of a matrix's stored tensors and has not been taken yet."""

    def __init__(
        self,
        shape: tuple[int, int],
        spans: Spans,
        units: tuple[int, int],
        compute: Callable[[Range, Range], dict[str, Tensor]],
    ) -> None:
        """
        Args:
            shape: of the matrix.
            units: rows and columns that have to be worked on together, counted from the first.
            compute: stored tensors of a range of rows and one of columns, by their names in `spans`.
        """
        self._shape, self._spans, self._compute = shape, spans, compute
        whole = [[one for one in sides if one is not None] for sides in zip(*spans.values(), strict=True)]
        self._units = tuple(
            min(size, math.lcm(unit, *(span.numerator for span in found)))
            for size, unit, found in zip(shape, units, whole, strict=True)
        )
        self._held: dict[Range, dict[str, list[tuple[int, Tensor]]]] = {}

    def take(self, name: str, rows: Range, columns: Range | None = None) -> Tensor:
        """The part of the tensor `name` with these of its own indices, which is then let go."""
        row_span, column_span = self._spans[name]
        assert row_span is not None
        width = (0, self._shape[1])
        if columns is not None and column_span is not None:
            width = _whole_units(columns, column_span, self._units[1], self._shape[1])
        held = self._held.setdefault(width, {one: [] for one in self._spans})
        for missing in _uncovered(rows, held[name]):
            area = _whole_units(missing, row_span, self._units[0], self._shape[0])
            for part, values in self._compute(area, width).items():
                span = self._spans[part][0]
                assert span is not None
                held[part].append((int(area[0] / span), values))
        taken, held[name] = _cut(held[name], rows)
        values = taken[0] if len(taken) == 1 else torch.cat(taken)
        if columns is not None and column_span is not None:
            first = int(width[0] / column_span)
            values = values[:, columns[0] - first : columns[1] - first]
        return values.contiguous()


def _whole_units(indices: Range, span: Fraction, unit: int, size: int) -> Range:
    """The rows (or columns) of the matrix behind a range of indices, out to the next multiples of `unit`."""
    return math.floor(indices[0] * span) // unit * unit, min(size, -(-math.ceil(indices[1] * span) // unit) * unit)


def _uncovered(indices: Range, pieces: list[tuple[int, Tensor]]) -> Iterator[Range]:
    place = indices[0]
    for first, values in sorted(pieces, key=lambda piece: piece[0]):
        if place < min(first, indices[1]):
            yield place, min(first, indices[1])
        place = max(place, first + len(values))
    if place < indices[1]:
        yield place, indices[1]


def _cut(pieces: list[tuple[int, Tensor]], indices: Range) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
    """The values at `indices`, in order; and the pieces that remain, copied where only a part of one does."""
    taken: list[Tensor] = []
    kept: list[tuple[int, Tensor]] = []
    place = indices[0]
    for first, values in sorted(pieces, key=lambda piece: piece[0]):
        last = first + len(values)
        start, stop = max(place, first), min(indices[1], last)
        if start >= stop:
            kept.append((first, values))
            continue
        whole = (start, stop) == (first, last)
        taken.append(values if whole else values[start - first : stop - first].clone())
        place = stop
        if start > first:
            kept.append((first, values[: start - first].clone()))
        if stop < last:
            kept.append((stop, values[stop - first :].clone()))
    return taken, kept
