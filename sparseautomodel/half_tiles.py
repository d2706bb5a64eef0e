"""Products with weights of 8 or 4 bits on a CPU, a tile of rows at a time, which stays in the cache.

Bits of a small float become those of a half by shifts alone, its subnormals too, and processors with F16C turn halves
into floats without the penalty that they have for subnormals elsewhere. A few tokens are multiplied by halves: that
product of a matrix and a vector reads two bytes a weight and is the fastest that torch has. Many are multiplied in
bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

TILE_ELEMENTS = 1 << 20
"""Weights of a tile: with what is made of them they stay in the cache, and calls of torch stay few."""

E4M3_UNIT = 2.0**-8
E2M1_UNIT = 2.0**-14
"""What the number 1 becomes as a half, by the difference of the exponents' biases."""

Fill = Callable[[slice, Tensor], None]
"""Writes a run of rows of the weight into a tile `[rows, columns]`."""


def e4m3_to_half(codes: Tensor, out: Tensor) -> None:
    """Write the E4M3 numbers `codes` (float8 or their bytes), times `E4M3_UNIT`, into `out`, halves of the same shape.

    Exact for every number. The two codes that are not a number read as 480, which no encoder writes.
    """
    bits = out.view(torch.int16)
    bits.copy_(codes.view(torch.int8)).mul_(1 << 7).bitwise_and_(_signed(0xBF80))


def e2m1_to_half(words: Tensor, out: Tensor) -> None:
    """Write the E2M1 numbers in `words [rows, n]` (int16, four codes each, the lowest bits first), times `E2M1_UNIT`.

    `out` is `[rows, 4, n]`, halves: those in the lowest bits of the words come first. Exact.
    """
    bits = out.view(torch.int16)
    for place in range(3):
        torch.bitwise_left_shift(words, 12 - 4 * place, out=bits[:, place])
    bits[:, :3].bitwise_right_shift_(3)
    torch.bitwise_right_shift(words, 3, out=bits[:, 3])
    bits.bitwise_and_(_signed(0x8E00))


def e8m0_to_float(exponents: Tensor) -> Tensor:
    """The powers of two (float32) that uint8 exponents stand for; 0 for the lowest, 2**-127."""
    return exponents.to(torch.int32).bitwise_left_shift_(23).view(torch.float32)


def e8m0_to_half(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """The same as halves relative to the largest of each row, and those largest `[rows, 1]` as floats.

    Those smaller than the largest by more than 2**14 become 0.
    """
    largest = exponents.amax(1, keepdim=True)
    fields = exponents.to(torch.int16).sub_(largest.to(torch.int16)).add_(15).clamp_(min=0)
    return fields.bitwise_left_shift_(10).view(torch.float16), e8m0_to_float(largest)


def multiply_few(flat: Tensor, shape: tuple[int, int], fill: Fill, largest: float) -> Tensor:
    """`flat [tokens, columns]` times the weight of `shape` that `fill` writes as halves: `[tokens, rows]`, float32.

    Sums are made in float32 and rounded to halves. `largest` is the largest magnitude that `fill` writes. Each token is
    scaled by a power of two that keeps its sums from overflowing and its numbers as exact as halves can be.
    """
    rows, columns = shape
    room = 2.0 ** math.floor(15 - math.log2(columns * largest))
    values = flat.float()
    power = values.abs().amax(1, keepdim=True).clamp_(min=2.0**-100).view(torch.int32)
    power = power.bitwise_and_(0x7F800000).view(torch.float32).mul_(2)
    halves = (values * (room / power)).half()
    output = torch.empty(len(flat), rows, dtype=torch.float16, device=flat.device)
    step = max(1, min(rows, TILE_ELEMENTS // max(1, columns)))
    tile = torch.empty(step, columns, dtype=torch.float16, device=flat.device)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        run = tile[: part.stop - start]
        fill(part, run)
        for token, vector in enumerate(halves):
            torch.mv(run, vector, out=output[token, part])
    return output.float().mul_(power / room)


def multiply_many(flat: Tensor, shape: tuple[int, int], fill: Fill) -> Tensor:
    """`flat [tokens, columns]` times the weight of `shape` that `fill` writes as floats: `[tokens, rows]`.

    In bfloat16 where `flat` is of it, else in float32, as products of halves are slow on CPUs and overflow.
    """
    rows, columns = shape
    kind = torch.bfloat16 if flat.dtype == torch.bfloat16 else torch.float32
    flat = flat.to(kind)
    output = torch.empty(len(flat), rows, dtype=kind, device=flat.device)
    step = max(1, min(rows, TILE_ELEMENTS // max(1, columns)))
    filled = max(1, step // 2)  # floats take twice the room of the numbers that are multiplied
    floats = torch.empty(filled, columns, dtype=torch.float32, device=flat.device)
    tile = torch.empty(step, columns, dtype=kind, device=flat.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        for first in range(start, stop, filled):
            part = slice(first, min(first + filled, stop))
            run = floats[: part.stop - first]
            fill(part, run)
            tile[first - start : part.stop - start].copy_(run)
        output[:, start:stop] = F.linear(flat, tile[: stop - start])
    return output


def _signed(bits: int) -> int:
    """Sixteen bits as the number that an int16 of them is."""
    return bits - (bits >> 15 << 16)
