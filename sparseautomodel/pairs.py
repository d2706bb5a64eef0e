"""Weights with two numbers in every four (2:4) on CPUs with AVX512, as those numbers and their columns.

The functions of pairs.c compute half of a dense product and read 9/16 of its bytes. torch has such products for GPUs
alone.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparseautomodel.compiler import compiled, is_followed
from sparseautomodel.scratch import scratch

SOURCE = Path(__file__).with_name("pairs.c")

_ROWS = 16
"""Of a panel."""

_TOKENS = 1024
"""Multiplied at once: what a call holds besides its output is for so many."""

_NEEDS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"})


@dataclass(frozen=True)
class Pairs:
    """A bfloat16 weight with at most two numbers that are not 0 in every four neighbours of a row."""

    numbers: Tensor
    """int32 `[panels, groups, 16]`: two bfloat16 of each of 16 rows."""
    places: Tensor
    """int64 `[panels, groups]`: of each of these rows 4 bits, the two columns of the group."""
    shape: tuple[int, int]

    def dense(self) -> Tensor:
        """The weight `[rows, columns]`, value for value; zeros may have lost their sign."""
        rows, columns = self.shape
        panels, groups = self.places.shape
        shifts = torch.arange(0, 4 * _ROWS, 2, device=self.places.device).view(_ROWS, 2)
        places = (self.places[..., None, None] >> shifts) & 3
        four = self.numbers.new_zeros(panels, groups, _ROWS, 4, dtype=torch.bfloat16)
        four.scatter_(3, places, self.numbers.view(torch.bfloat16).view(panels, groups, _ROWS, 2))
        return four.transpose(1, 2).reshape(panels * _ROWS, groups * 4)[:rows, :columns].contiguous()


def why_not() -> str | None:
    """Why there are no such products on this machine, for people; None where there are."""
    found = _functions()
    return found if isinstance(found, str) else None


def split(weight: Tensor) -> Pairs | None:
    """`weight` `[rows, columns]`, bfloat16 on the CPU, as pairs; None where three of four neighbours are not 0.

    Raises RuntimeError where there are no such products (`why_not`).
    """
    functions, (rows, columns) = _checked(), weight.shape
    if weight.dtype != torch.bfloat16 or not weight.is_cpu:
        raise ValueError(f"only bfloat16 weights on the CPU are split, this is {weight.dtype} on {weight.device}")
    weight = weight if columns < 2 or weight.stride(1) == 1 else weight.contiguous()
    panels, groups = -(-rows // _ROWS), -(-columns // 4)
    numbers = torch.empty(panels, groups, _ROWS, dtype=torch.int32, device="cpu")
    places = torch.empty(panels, groups, dtype=torch.int64, device="cpu")
    where = numbers.data_ptr(), places.data_ptr(), torch.get_num_threads()
    if functions.split(weight.data_ptr(), weight.stride(0), rows, columns, *where):
        return None
    return Pairs(numbers, places, (rows, columns))


def multiply(inputs: Tensor, weight: Pairs, bias: Tensor | None) -> Tensor:
    """`inputs` `[..., columns]` times the weight plus `bias`, as `functional.linear`, all bfloat16: `[..., rows]`.

    Sums are float32, and a token's do not depend on the others. Raises ValueError for inputs of another width.
    """
    flat = inputs.reshape(-1, inputs.shape[-1])
    if is_followed(flat):
        output: Tensor = _operator(flat, weight.numbers, weight.places, list(weight.shape), bias)
    else:
        output = _multiply(flat, weight.numbers, weight.places, weight.shape, bias, inputs)
    return output.view(*inputs.shape[:-1], weight.shape[0])


class _Last(threading.local):
    """The inputs of this thread's last product: those of the next layer may be the same, which are packed already."""

    inputs: weakref.ref[Tensor] | None = None
    state: tuple[int, int] | None = None

    def are(self, inputs: Tensor, memory: int) -> bool:
        """Whether they were these, unchanged, and were packed at this address; from now on they are."""
        state = None if inputs.is_inference() else (inputs._version, memory)
        same = self.inputs is not None and self.inputs() is inputs and state is not None and self.state == state
        self.inputs, self.state = weakref.ref(inputs), state
        return same


_last = _Last()


class _Weight(ctypes.Structure):
    """`Weight` of the C file."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pairs", "places", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
    ]


def _multiply(
    flat: Tensor, numbers: Tensor, places: Tensor, shape: tuple[int, int], bias: Tensor | None, whole: Tensor
) -> Tensor:
    """`whole`: the tensor that `flat` is rows of."""
    functions, (rows, columns) = _checked(), shape
    fits = flat.is_cpu and flat.dtype == torch.bfloat16 and flat.shape[1] == columns
    if not fits or (bias is not None and (bias.dtype != torch.bfloat16 or len(bias) != rows)):
        said = "" if bias is None else f", the bias {list(bias.shape)} in {bias.dtype}"
        raise ValueError(
            f"inputs are {list(flat.shape)} in {flat.dtype} on {flat.device}{said}: this layer takes [..., {columns}] "
            f"and a bias of {rows}, both torch.bfloat16 on the CPU"
        )
    flat = flat if columns < 2 or flat.stride(1) == 1 else flat.contiguous()
    bias = None if bias is None else bias.contiguous()
    output = torch.empty(len(flat), rows, dtype=torch.bfloat16, device="cpu")
    of = _Weight(numbers.data_ptr(), places.data_ptr(), None if bias is None else bias.data_ptr(), rows, columns)
    threads, tokens = torch.get_num_threads(), min(len(flat), _TOKENS)
    memory = scratch("pairs", functions.pairs_bytes(of, tokens, threads), dtype=torch.uint8)
    is_packed = _last.are(whole, memory.data_ptr()) and tokens == len(flat)
    for first in range(0, len(flat), _TOKENS):
        some = min(_TOKENS, len(flat) - first)
        inputs = flat.data_ptr() + 2 * first * flat.stride(0), flat.stride(0), is_packed
        functions.multiply_pairs(
            of, *inputs, output.data_ptr() + 2 * first * rows, rows, some, memory.data_ptr(), threads
        )
    return output


@torch.library.custom_op("sparseautomodel::multiply_pairs", mutates_args=())
def _operator(flat: Tensor, numbers: Tensor, places: Tensor, shape: list[int], bias: Tensor | None) -> Tensor:
    """`multiply` as an operation of torch, for those who trace a model."""
    return _multiply(flat, numbers, places, (shape[0], shape[1]), bias, flat)


@_operator.register_fake
def _(flat: Tensor, numbers: Tensor, places: Tensor, shape: list[int], bias: Tensor | None) -> Tensor:
    return flat.new_empty(len(flat), shape[0])


def _checked() -> ctypes.CDLL:
    functions = _functions()
    if isinstance(functions, str):
        raise RuntimeError(f"no products with pairs: {functions}")
    return functions


@functools.cache
def _functions() -> ctypes.CDLL | str:
    """Those of the C file, or why there are none."""
    found = compiled(SOURCE, _NEEDS)
    if isinstance(found, str):
        return found
    integer, pointer, of = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(_Weight)
    found.split.argtypes = (pointer, integer, integer, integer, pointer, pointer, integer)
    found.pairs_bytes.restype = integer
    found.pairs_bytes.argtypes = (of, integer, integer)
    found.multiply_pairs.argtypes = (of, pointer, integer, integer, pointer, integer, integer, pointer, integer)
    return found
