"""Slices of a matrix's stored tensors against the slices of the whole, and what was computed for them."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparseautomodel.checkpoint import Reads, StoredTensor
from sparseautomodel.modifiers import Layer
from sparseautomodel.modifiers.magnitude import MagnitudePruningModifier
from sparseautomodel.modifiers.quantization import QuantizationModifier
from sparseautomodel.pieces import Pieces, Range, Window
from sparseautomodel.transform import LayerPlan, transform

ONE = Fraction(1)
SPANS = {"packed": (ONE, Fraction(8)), "scale": (ONE, Fraction(16)), "zeros": (Fraction(8), Fraction(16))}
SHAPE = (52, 64)


def whole() -> dict[str, Tensor]:
    """Each stored number is told by the first row and column it stands for."""
    rows, columns = torch.arange(SHAPE[0]) * 1000, torch.arange(SHAPE[1])
    dense = rows.view(-1, 1) + columns
    return {name: dense[:: int(high), :: int(wide)].contiguous() for name, (high, wide) in SPANS.items()}


class Counted:
    def __init__(self, units: tuple[int, int] = (1, 16)) -> None:
        self.areas: list[tuple[Range, Range]] = []
        self.pieces = Pieces(SHAPE, SPANS, units, self._compute)

    def _compute(self, rows: Range, columns: Range) -> dict[str, Tensor]:
        self.areas.append((rows, columns))
        assert rows[0] % 8 == 0 and columns[0] % 16 == 0, "whole words of zero points, whole groups"
        dense = (torch.arange(*rows) * 1000).view(-1, 1) + torch.arange(*columns)
        return {name: dense[:: int(high), :: int(wide)].clone() for name, (high, wide) in SPANS.items()}


@given(st.integers(1, 5), st.permutations(list(SPANS)), st.booleans())
def test_ranks_that_cut_rows_get_the_slices_of_the_whole(count: int, order: list[str], both: bool) -> None:
    for rank in range(count):
        counted = Counted()
        for name in order:
            rows = len(whole()[name])
            size = -(-rows // count)
            part = (min(rank * size, rows), min((rank + 1) * size, rows))
            if part[0] == part[1]:
                continue
            columns = (0, whole()[name].shape[1]) if both else None
            assert torch.equal(counted.pieces.take(name, part, columns), whole()[name][slice(*part)])
        computed = sorted(rows for rows, _ in counted.areas)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(computed)), "worked on twice"


@pytest.mark.parametrize("rank", [0, 1])
def test_columns_are_computed_alone(rank: int) -> None:
    counted = Counted()
    for name, value in whole().items():
        half = value.shape[1] // 2
        part = (rank * half, (rank + 1) * half)
        assert torch.equal(counted.pieces.take(name, (0, len(value)), part), value[:, slice(*part)])
    assert counted.areas == [((0, 52), (32 * rank, 32 * rank + 32))]


def test_where_all_columns_are_needed_all_are_computed_and_some_given() -> None:
    counted = Counted(units=(1, 64))
    for name, value in whole().items():
        assert torch.equal(counted.pieces.take(name, (0, len(value)), (1, 2)), value[:, 1:2])
    assert counted.areas == [((0, 52), (0, 64))]


def test_what_was_taken_whole_is_the_computed_tensor_itself() -> None:
    pieces = Pieces((4, 4), {"weight": (ONE, ONE)}, (1, 1), lambda rows, columns: {"weight": kept})
    kept = torch.ones(4, 4)
    assert pieces.take("weight", (0, 4), (0, 4)).data_ptr() == kept.data_ptr()


def test_what_is_left_of_a_piece_does_not_keep_the_rest() -> None:
    counted = Counted()
    first = counted.pieces.take("packed", (0, 50))
    again = counted.pieces.take("packed", (50, 52))
    assert torch.equal(torch.cat([first, again]), whole()["packed"])
    assert again.untyped_storage().nbytes() == again.nbytes
    assert len(counted.areas) == 1


def test_a_window_reads_nothing_else() -> None:
    reads = Reads()
    values = torch.arange(48.0).view(6, 8)
    window = Window(StoredTensor("w", (6, 8), values.dtype, "f", values, reads), (1, 5), (2, 6))
    assert torch.equal(window[1:3], values[2:4, 2:6])
    assert torch.equal(window[...], values[1:5, 2:6])
    assert reads.nbytes("w") == (8 + 16) * 4


SCHEMES: dict[str, dict[str, Any]] = {
    "int4 group": {"num_bits": 4, "strategy": "group", "group_size": 16},
    "int4 group asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    "int3 channel asymmetric": {"num_bits": 3, "strategy": "channel", "symmetric": False},
    "int8 channel": {"num_bits": 8, "strategy": "channel"},
    "fp8 block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    "int8 tensor": {"num_bits": 8, "strategy": "tensor"},
    "int5 group mse": {"num_bits": 5, "strategy": "group", "group_size": 32, "observer": "mse"},
}


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_slices_of_a_compressed_layer_are_those_of_the_whole(name: str, pruned: bool) -> None:
    values = torch.randn(100, 128).bfloat16()
    layer = Layer("a", "a", ("Linear",), (100, 128), values.dtype)
    group = {"targets": ["Linear"], "weights": SCHEMES[name]}
    quantize = QuantizationModifier(config_groups={"g": group})
    modifiers = (MagnitudePruningModifier(mask_structure="2:4"), quantize) if pruned else (quantize,)
    scheme = quantize.scheme_of(layer)
    assert isinstance(scheme, QuantizationScheme)
    plan = LayerPlan(layer, "a.weight", modifiers, scheme)

    def lazy(reads: Reads) -> dict[str, Any]:
        tensor = StoredTensor("a.weight", (100, 128), values.dtype, "f", values, reads)
        return dict(transform({"a.weight": tensor}, [plan]))

    wanted = {one: tensor[...] for one, tensor in lazy(Reads()).items()}
    for rank in range(3):
        by_rows, by_columns = lazy(Reads()), lazy(Reads())
        for one, value in wanted.items():
            size = -(-len(value) // 3)
            rows = slice(min(rank * size, len(value)), min((rank + 1) * size, len(value)))
            index = (rows, *[slice(0, size) for size in value.shape[1:]])
            assert torch.equal(_bits(by_rows[one][index]), _bits(value[rows])), one
            if value.ndim == 2 and value.shape[1] > 1:
                size = value.shape[1] // 4
                columns = slice(rank * size, (rank + 1) * size)
                index = (slice(0, len(value)), columns)
                assert torch.equal(_bits(by_columns[one][index]), _bits(value[:, columns])), one


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8) if value.itemsize == 1 else value
