"""Blocks of columns that are rounded or pruned one after another, by functions of columns.c: on a CPU, in float32."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from sparseautomodel.compiler import compiled

SOURCE = Path(__file__).with_name("columns.c")

MOST = 256
"""Columns of a block."""


def are_compiled(matrix: Tensor) -> bool:
    """Whether there are such functions for this matrix."""
    return matrix.device.type == "cpu" and matrix.dtype == torch.float32 and not isinstance(_functions(), str)


def round_block(
    left: Tensor,
    columns: slice,
    factor: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    groups: Tensor,
    kept: Tensor | None,
    bounds: tuple[float, float],
) -> Tensor:
    """Make the `columns` of `left` `[rows, in]` numbers of a grid, those after each making up for its error, in place.

    The errors, divided by the diagonal of U, are given back, `[rows, columns]`: times the rest of `factor` they are
    what the columns after the block are owed. At most `MOST` columns.

    Args:
        factor: U, `[in, in]`.
        scale, zero_point: of integers, `[rows, groups]` float32.
        groups: of each column, int64.
        kept: bool like `left`: False stays 0.
        bounds: lowest and highest code.
    """
    functions, rows, first = _functions(), len(left), columns.start
    assert not isinstance(functions, str) and (kept is None or left.stride() == kept.stride())
    count = columns.stop - first
    errors = torch.empty(rows, count)
    scale = scale.contiguous()
    zero_point = None if zero_point is None else zero_point.contiguous()
    functions.round_block(
        _at(left, first),
        *(left.stride(0), rows, count, _at(factor, first, first), factor.stride(0)),
        *(_at(scale), _at(zero_point), scale.stride(0), groups.data_ptr() + 8 * first, _at(kept, first), *bounds),
        *(errors.data_ptr(), torch.get_num_threads()),
    )
    return errors


def prune_block(
    left: Tensor, columns: slice, factor: Tensor, alive: Tensor, keep: Tensor, structure: tuple[int, int] | None
) -> Tensor:
    """Prune the `columns` of `left` `[rows, in]`, those after each making up for it, in place. Gives errors as above.

    Args:
        alive: bool like `left`: what is False is gone already.
        keep: bool like `left`: given, or with a `structure` (n, m) chosen here, among what is alive.
    """
    functions, rows, first = _functions(), len(left), columns.start
    assert not isinstance(functions, str) and left.stride() == alive.stride() == keep.stride()
    count = columns.stop - first
    errors = torch.empty(rows, count)
    functions.prune_block(
        _at(left, first),
        *(left.stride(0), rows, count, _at(factor, first, first), factor.stride(0)),
        *(_at(alive, first), _at(keep, first), *(structure or (0, 0)), errors.data_ptr(), torch.get_num_threads()),
    )
    return errors


def _at(matrix: Tensor | None, column: int = 0, row: int = 0) -> int | None:
    """Where an entry of a matrix lies."""
    if matrix is None:
        return None
    assert matrix.stride(1) == 1
    return matrix.data_ptr() + matrix.itemsize * (row * matrix.stride(0) + column)


@functools.cache
def _functions() -> ctypes.CDLL | str:
    """Those of the C file, or why there are none."""
    found = compiled(SOURCE, frozenset())
    if isinstance(found, str):
        return found
    integer, pointer, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
    matrices = (pointer, integer, integer, integer, pointer, integer)
    grid = (pointer, pointer, integer, pointer, pointer, number, number)
    found.round_block.argtypes = (*matrices, *grid, pointer, integer)
    found.prune_block.argtypes = (*matrices, pointer, pointer, integer, integer, pointer, integer)
    return found
