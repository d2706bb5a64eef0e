"""Numbers of a few bits as codes, and codes as streams of bits: what storage formats share.

A *code* is the unsigned integer that stands for a number: for an integer of `num_bits` its value plus
`2**(num_bits - 1)`, for FP8 (E4M3), FP6 (E2M3) and FP4 (E2M1) its sign, exponent and mantissa bits. All results equal
those of compressed-tensors 0.20 bit for bit; working on bytes and in tables is what makes it several times faster.
"""

from __future__ import annotations

import functools

import torch
from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8, unpack_fp6_from_uint8
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, round_to_quantized_type_args
from compressed_tensors.quantization.utils import calculate_range
from torch import Tensor


def int_codes(numbers: Tensor, num_bits: int) -> Tensor:
    """Codes (uint8) of real `numbers` rounded half to even and clamped to `num_bits`. Overwrites `numbers`."""
    half = 2 ** (num_bits - 1)
    first = 1 / torch.finfo(numbers.dtype).eps  # from here to twice as much, floats are the integers: bfloat16 128
    if 2**num_bits > first:
        return numbers.round_().clamp_(-half, half - 1).to(torch.int8).view(torch.uint8).add_(half)
    # Adding `first + half`, an even number, makes the addition itself round half to even, and leaves the code in the
    # low bits of the sum. Bits of floats are ordered as the floats are, so the clamp can be that of integers.
    numbers.add_(first + half)
    bits = numbers.view(torch.int16 if numbers.itemsize == 2 else torch.int32)
    lowest = int(torch.tensor(first, dtype=numbers.dtype, device="cpu").view(bits.dtype))
    return bits.clamp_(lowest, lowest + 2**num_bits - 1).to(torch.uint8)


def float_codes(numbers: Tensor, num_bits: int) -> Tensor:
    """Codes (uint8) of real `numbers` rounded to the nearest float of 8, 6 or 4 bits, saturating."""
    if numbers.dtype == torch.float32:
        # Rounded to bfloat16 towards the odd neighbour, which keeps the second rounding, in the table, exact.
        bits = numbers.view(torch.int32)
        inexact = bits.bitwise_and(0xFFFF).add_(0xFFFF).bitwise_right_shift_(16)
        index = bits.bitwise_right_shift(16).bitwise_and_(0xFFFF).bitwise_or_(inexact)
        table = _code_table(num_bits, torch.bfloat16, numbers.device)
    else:
        index = numbers.view(torch.uint16).to(torch.int32)
        table = _code_table(num_bits, numbers.dtype, numbers.device)
    return table.index_select(0, index.flatten()).view(numbers.shape)


def numbers_of(codes: Tensor, kind: str, num_bits: int) -> Tensor:
    """The numbers (bfloat16, exact) of bytes `[rows, bytes]` that hold a code each, or two of 4 bits, low one first.

    `kind` is `float`, or `int` for 4 bits.
    """
    flat = codes.flatten()
    if len(flat) % 2 or flat.storage_offset() % 2:
        flat = torch.nn.functional.pad(flat, (0, len(flat) % 2))
    table = _number_table(kind, num_bits, flat.device)
    numbers = table.index_select(0, flat.view(torch.uint16).to(torch.int32)).view(torch.bfloat16)
    per_byte = 2 if num_bits == 4 else 1
    return numbers[: codes.numel() * per_byte].view(len(codes), -1)


def words(count: int, num_bits: int) -> int:
    """How many 32-bit words `count` codes take."""
    return -(-count * num_bits // 32)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """Codes `[rows, columns]` (uint8) as a stream of bits, the lowest first: `[rows, bytes]`.

    Each row is padded with zeros to 32 codes, so it takes a whole number of 32-bit words. The words are those of
    compressed-tensors' `pack_to_int32`, which leaves out the ones that hold padding alone.
    """
    if codes.shape[1] % 32:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 32))
    if num_bits == 8:
        return codes
    if num_bits == 4:  # the width most used: one step, and the last copy closes the gap
        pairs = as_dtype(codes, torch.int16)
        return pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8)
    octets = as_dtype(codes, torch.int64)
    for width, gap, low in _merges(num_bits):
        octets = (octets & low).bitwise_or_((octets >> gap).bitwise_and_(low << width))
    return octets.view(torch.uint8).unflatten(1, (-1, 8))[..., :num_bits].flatten(1)


def unpack(packed: Tensor, num_bits: int, columns: int) -> Tensor:
    """The codes `[rows, columns]` of rows of bytes that `pack` made, cut off anywhere after the last code."""
    if num_bits == 8:
        return packed[:, :columns].clone()
    count = -(-columns // 8)
    octets = packed.new_zeros(len(packed), count, 8)
    whole = torch.nn.functional.pad(packed, (0, max(0, count * num_bits - packed.shape[1])))
    octets[..., :num_bits] = whole[:, : count * num_bits].unflatten(1, (count, num_bits))
    lanes = octets.view(torch.int64).squeeze(-1)
    for width, gap, low in reversed(_merges(num_bits)):
        lanes = (lanes & low).bitwise_or_((lanes & (low << width)).bitwise_left_shift_(gap))
    return lanes.view(torch.uint8)[:, :columns]


def as_dtype(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as numbers of another dtype."""
    if matrix.stride() != (matrix.shape[1], 1):  # contiguous() lets any stride of a single row or column pass
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(dtype)


@functools.cache
def _code_table(num_bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The code for each of the 65536 floats of a two-byte `dtype`, in the order of their bits."""
    floats = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.uint16).view(dtype)
    if num_bits == 8:
        floats = floats + 0.0  # compressed-tensors adds its zero point 0 here: -0.0 is stored as 0.0
    args = QuantizationArgs(num_bits=num_bits, type="float")
    lowest, highest = calculate_range(args, torch.device("cpu"))
    rounded = round_to_quantized_type_args(floats, args, lowest, highest)
    if num_bits == 8:
        codes = rounded.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        padded = torch.nn.functional.pad(rounded.unsqueeze(1), (0, 3))
        packed = pack_fp4_to_uint8(padded) if num_bits == 4 else pack_fp6_to_uint8(padded)
        codes = packed[:, 0] & (2**num_bits - 1)
    return codes.to(device)


@functools.cache
def _number_table(kind: str, num_bits: int, device: torch.device) -> Tensor:
    """For each two bytes the numbers that they hold in bfloat16, two or four of them seen as one integer."""
    code = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8).unsqueeze(1)
    if kind == "int":
        numbers = torch.cat([code & 15, code >> 4], 1).to(torch.bfloat16) - 8
    elif num_bits == 4:
        numbers = unpack_fp4_from_uint8(code, 256, 2)
    elif num_bits == 6:
        numbers = unpack_fp6_from_uint8(torch.nn.functional.pad(code & 63, (0, 2)), 256, 4)[:, :1]
    else:
        numbers = code.view(torch.float8_e4m3fn).to(torch.bfloat16)
    pairs = torch.cat([numbers.repeat(256, 1), numbers.repeat_interleave(256, 0)], 1).contiguous()
    return pairs.view(torch.int64 if pairs.shape[1] == 4 else torch.int32).flatten().to(device)


def _merges(num_bits: int) -> list[tuple[int, int, int]]:
    """How eight codes, a byte each in 64 bits, close the gaps between them: in pairs, in fours, all eight.

    Each step is the width of what moves, the gap that it closes, and a mask of the lower one of each two neighbours.
    """
    steps = []
    for codes, lane in ((1, 16), (2, 32), (4, 64)):
        width = codes * num_bits
        low = sum((2**width - 1) << first for first in range(0, 64, lane))
        steps.append((width, lane // 2 - width, low))
    return steps
