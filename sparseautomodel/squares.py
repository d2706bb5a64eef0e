"""Sums of squares of columns, without a copy of the numbers in float32 where squares.c can be compiled."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from sparseautomodel.compiler import compiled, is_followed
from sparseautomodel.scratch import scratch

SOURCE = Path(__file__).with_name("squares.c")

_PART = 64
"""As in the C file."""

_TOKENS = 4096
"""At once, by the C file: memory is taken for so many."""

_CACHED = 512
"""Tokens whose squares stay in a core's own cache until they are summed: twice as fast as from memory."""


def column_squares(inputs: Tensor) -> Tensor:
    """The sum of squares of each column of `inputs` `[tokens, columns]` of any float dtype: `[columns]` float64.

    Added up in float32 for a few hundred tokens at a time.
    """
    fits = inputs.dtype == torch.bfloat16 and inputs.is_cpu and inputs.stride(1) == 1 and not is_followed(inputs)
    functions = _functions() if fits else "not for these"
    columns = inputs.shape[1]
    sums = torch.zeros(columns, dtype=torch.float64, device=inputs.device)
    if isinstance(functions, str):
        for chunk in inputs.split(_CACHED):
            exact = chunk.to(torch.float32, copy=True)
            sums += exact.mul_(exact).sum(0)
        return sums
    for chunk in inputs.split(_TOKENS):
        memory = scratch("squares", -(-len(chunk) // _PART), columns, dtype=torch.float32)
        places, threads = (sums.data_ptr(), memory.data_ptr()), torch.get_num_threads()
        functions.squares(chunk.data_ptr(), chunk.stride(0), len(chunk), columns, *places, threads)
    return sums


@functools.cache
def _functions() -> ctypes.CDLL | str:
    """Those of the C file, or why there are none."""
    found = compiled(SOURCE, frozenset({"avx512f", "avx512bw", "avx512vl"}))
    if isinstance(found, str):
        return found
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    found.squares.argtypes = (pointer, integer, integer, integer, pointer, pointer, integer)
    return found
