"""Products with weights of 4 or 8 bits on CPUs with AVX512, by the functions of registers.c.

A weight becomes bfloat16 in the registers that it is multiplied in, or for many tokens once in the cache, so that a
product reads a quarter or half of the bytes that a dense one does and is faster at any number of tokens. torch has no
such product but for one layout of 4 bits and few tokens.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sparseautomodel.compiler import compiled, is_followed

SOURCE = Path(__file__).with_name("registers.c")

CODES = ("int4", "fp4", "int8", "uint8", "fp8")
"""Kinds of codes, in the order of the C file. int4 and uint8 have an offset of 8 and 128."""

FEW = 4
"""Tokens up to which a weight is multiplied where it was expanded, the limit of `multiply_int8`."""

TOKENS = 512
"""Multiplied at once: what a call holds besides its output is for so many."""

_NEEDS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "f16c", "fma"})

_SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3, torch.uint8: 4}

_NO_ZEROS, _PACKED_ZEROS, _BYTE_ZEROS = range(3)

WHOLE = 62
"""As a shift: all rows or columns have one scale."""


class _Memory(threading.local):
    """What this thread's products work in, the same memory each time: see scratch.py."""

    held: Tensor | None = None
    size = pointer = 0

    def of(self, size: int) -> int:
        """Where there are so many bytes."""
        if size > self.size:
            self.held = torch.empty(size, dtype=torch.uint8, device="cpu")
            self.size, self.pointer = size, self.held.data_ptr()
        return self.pointer


_memory = _Memory()


class Shape(ctypes.Structure):
    """`Shape` of the C file: all of a weight but where its tensors lie."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "row_bytes", "groups")),
        *((name, ctypes.c_int32) for name in ("row_shift", "column_shift", "codes", "scales", "zeros")),
    ]


def why_not() -> str | None:
    """Why there are no such products on this machine, for people; None where there are."""
    found = _functions()
    return found if isinstance(found, str) else None


def row_shift(height: int | None) -> int | None:
    """How `multiply` is told that a scale is that of so many rows, None for all; None where it cannot have that."""
    if height is None:
        return WHOLE
    return height.bit_length() - 1 if height & (height - 1) == 0 else None


def column_shift(width: int | None, kind: str) -> int | None:
    """The same for columns."""
    return row_shift(width) if width is None or width >= (16 if kind in ("int4", "fp4") else 32) else None


def multiply(
    flat: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    divisor: Tensor | None,
    kind: str,
    shape: tuple[int, int],
    shifts: tuple[int, int],
) -> Tensor:
    """`flat [tokens, in_features]` times a weight, both bfloat16: a new tensor `[tokens, out_features]`.

    Each weight is `(code - zero point) * scale` rounded to bfloat16, as it is when it is dequantized; sums are made in
    float32.

    Args:
        codes: `[out_features, bytes]`, contiguous; two codes of 4 bits a byte, the lower half first.
        scales: `[row groups, column groups]` or `[1]`: floats, or bytes that are E4M3 (float8) or E8M0 (uint8).
        zeros: as `scales` in int8, or packed along rows in int32, or None.
        divisor: one float32 by which all scales are divided, or None.
        kind: one of `CODES`.
        shape: out_features, in_features.
        shifts: a scale is that of so many rows and columns, as exponents of two (`row_shift`, `column_shift`).

    Raises ValueError for groups that are too narrow and for inputs of another width or on another device, and
    RuntimeError where there are no such products (`why_not`).
    """
    if is_followed(flat):
        return _operator(flat, codes, scales, zeros, divisor, kind, shape, shifts)
    return _multiply(_functions(), flat, codes, scales, zeros, divisor, kind, shape, shifts)


def multiplies_int8(flat: Tensor, scale: Tensor) -> bool:
    """Whether `multiply_int8` is there for these inputs and this scale of a weight."""
    if is_followed(flat) or not flat.is_cpu:  # before sizes are compared, which binds those that trace them
        return False
    tokens, columns = flat.shape
    if not 0 < tokens <= FEW or columns > 2**15 or flat.dtype != torch.bfloat16:
        return False
    if scale.dtype not in (torch.bfloat16, torch.float32):
        return False
    return why_not() is None and hasattr(_functions(), "multiply_int8")


def multiply_int8(
    flat: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, num_bits: int, given: Tensor | None
) -> Tensor:
    """`flat [tokens, in_features]` rounded to integers, times an int8 `weight [out_features, in_features]` + bias.

    Sums of integers are exact. Inputs are rounded as compressed-tensors does, in bfloat16, and scales are applied in
    float32: that of a token, then that of a row.

    Args:
        scale: of the weight, one a row or one.
        num_bits: of the inputs.
        given: the scale of all inputs; None for one a token, its largest magnitude / (2 ** num_bits - 1) * 2.

    Raises ValueError for inputs of another width.
    """
    functions: Any = _functions()
    tokens, columns = flat.shape
    _check(flat, weight.shape[1])
    weight, scale = weight.contiguous(), scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    output = torch.empty(tokens, len(weight), dtype=torch.bfloat16, device="cpu")
    given = None if given is None else given.float()
    functions.multiply_int8(
        weight.data_ptr(),
        weight.stride(0),
        len(weight),
        columns,
        scale.data_ptr(),
        _SCALES[scale.dtype],
        scale.numel() == 1,
        None if bias is None else bias.data_ptr(),
        flat.data_ptr(),
        flat.stride(0),
        2.0**num_bits - 1,
        None if given is None else given.data_ptr(),
        output.data_ptr(),
        tokens,
        _memory.of(tokens * columns),
        torch.get_num_threads(),
    )
    return output


def _check(flat: Tensor, columns: int) -> None:
    """Raise ValueError where memory would be read that is not there."""
    if not flat.is_cpu or flat.shape[1] != columns:
        raise ValueError(
            f"inputs are {list(flat.shape)} on {flat.device}: this layer, on the CPU, takes [..., {columns}] there"
        )


def _multiply(
    functions: ctypes.CDLL | str,
    flat: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    divisor: Tensor | None,
    kind: str,
    shape: tuple[int, int],
    shifts: tuple[int, int],
) -> Tensor:
    if isinstance(functions, str):
        raise RuntimeError(f"no products in registers: {functions}")
    _check(flat, shape[1])
    zeros_kind = _NO_ZEROS if zeros is None else _PACKED_ZEROS if zeros.dtype == torch.int32 else _BYTE_ZEROS
    of = _shape(kind, shape, shifts, codes.stride(0) * codes.itemsize, _SCALES[scales.dtype], zeros_kind)
    output = torch.empty(len(flat), shape[0], dtype=torch.bfloat16, device="cpu")
    flat, threads = flat if flat.stride(1) == 1 else flat.contiguous(), torch.get_num_threads()
    for first in range(0, len(flat), TOKENS):
        some, place = (
            (flat, output) if len(flat) <= TOKENS else (part[first : first + TOKENS] for part in (flat, output))
        )
        failed = functions.multiply(
            of,
            codes.data_ptr(),
            scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
            None if divisor is None else divisor.data_ptr(),
            some.data_ptr(),
            some.stride(0),
            place.data_ptr(),
            shape[0],
            len(some),
            _memory.of(functions.working_bytes(of, len(some), threads)),
            threads,
        )
        if failed:
            raise ValueError(f"groups of {2 ** shifts[1]} columns are too narrow for {kind}")
    return output


@torch.library.custom_op("sparseautomodel::multiply_in_registers", mutates_args=())
def _operator(
    flat: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    divisor: Tensor | None,
    kind: str,
    shape: list[int],
    shifts: list[int],
) -> Tensor:
    """`multiply` as an operation of torch, for those who trace a model."""
    size, groups = (shape[0], shape[1]), (shifts[0], shifts[1])
    return _multiply(_functions(), flat, codes, scales, zeros, divisor, kind, size, groups)


@_operator.register_fake
def _(flat: Tensor, codes: Any, scales: Any, zeros: Any, divisor: Any, kind: str, shape: Any, shifts: Any) -> Tensor:
    return flat.new_empty(len(flat), shape[0])


@functools.cache
def _shape(kind: str, shape: tuple[int, int], shifts: tuple[int, int], row_bytes: int, scales: int, zeros: int) -> Any:
    """A pointer to the `Shape`."""
    rows, columns = shape
    groups = -(-columns >> shifts[1]) if shifts[1] < WHOLE else 1
    return ctypes.pointer(Shape(rows, columns, row_bytes, groups, *shifts, CODES.index(kind), scales, zeros))


@functools.cache
def _functions() -> ctypes.CDLL | str:
    """Those of the C file, or why there are none. Tried once before they are trusted."""
    found = compiled(SOURCE, _NEEDS)
    if isinstance(found, str):
        return found
    integer, pointer, of = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(Shape)
    weight: list[Any]
    inputs: list[Any]
    found.working_bytes.restype = integer
    found.working_bytes.argtypes = [of, integer, integer]
    weight = [pointer, pointer, pointer, pointer]
    found.multiply.argtypes = [of, *weight, pointer, integer, pointer, integer, integer, pointer, integer]
    if hasattr(found, "multiply_int8"):  # the compiler knows of VNNI and has it for this processor
        weight = [pointer, integer, integer, integer, pointer, integer, integer, pointer]
        inputs = [pointer, integer, ctypes.c_double, pointer]
        found.multiply_int8.argtypes = [*weight, *inputs, pointer, integer, pointer, integer]
    with _disable_current_modes():
        return found if _is_right(found) else "the compiled products are wrong on this machine"


def _is_right(functions: ctypes.CDLL) -> bool:
    """Whether small products of whole numbers come out exactly."""
    numbers = torch.arange(9 * 80, device="cpu").mul_(7).remainder_(5).sub_(2).view(9, 80)
    scale = torch.ones(1, dtype=torch.float32, device="cpu")
    for tokens in (2, 9):
        flat = numbers[:tokens].bfloat16()
        made = _multiply(functions, flat, numbers.char(), scale, None, None, "int8", (9, 80), (WHOLE, WHOLE))
        if not torch.equal(made.float(), flat.float() @ numbers.t().float()):
            return False
    return True
