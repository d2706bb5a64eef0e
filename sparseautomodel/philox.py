"""Philox4x32-10 of Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011), on tensors; values of its words.

A function from a key and a counter to four words. Words become uniform and normal values by additions, multiplications,
divisions and square roots alone, which IEEE 754 rounds alike on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of each counter, as int64 in [0, 2**32)."""


def philox(counter: Tensor, draw: int, key: tuple[int, int]) -> Words:
    """Four words in [0, 2**32), as int64, for each 64-bit `counter`; `draw` is the third word of the counter."""
    a, b = counter & _WORD, counter >> 32
    c, d = torch.full_like(a, draw), torch.zeros_like(a)
    k0, k1 = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57  # wraps; the bits are those of the unsigned product
        a = (right >> 32).bitwise_and_(_WORD).bitwise_xor_(b).bitwise_xor_(k0)
        c = (left >> 32).bitwise_and_(_WORD).bitwise_xor_(d).bitwise_xor_(k1)
        b, d = right.bitwise_and_(_WORD), left.bitwise_and_(_WORD)
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return a, b, c, d


def uniforms(words: Words) -> Tensor:
    """Float32 values in [0, 1), multiples of 2**-24, four in the last dimension."""
    return (torch.stack(words, -1) >> 8).to(torch.float32).mul_(2.0**-24)


def normals(words: Words) -> Tensor:
    """Standard normal float32 values, by Box and Muller: two words are a radius and an angle, and give two values."""
    small = [word.to(torch.int32) for word in words]  # wraps; the bits stay
    angles = torch.stack((small[1], small[3]), -1)
    radius = torch.stack((small[0], small[2]), -1).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)
    radius = _log(radius.add_(1).to(torch.float32).mul_(2.0**-24)).mul_(-2.0).sqrt_()
    x = (angles >> 8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24).sub_(0.5).mul_(math.pi / 2)
    square = x * x
    sine = _polynomial(square, (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880)).mul_(x)
    cosine = _polynomial(square, (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320))
    swap = (angles & 2).bool()  # low bits choose the quadrant
    radius.view(torch.int32).bitwise_xor_(angles.bitwise_left_shift_(31))  # the sign
    pair = (torch.where(swap, sine, cosine).mul_(radius), torch.where(swap, cosine, sine).mul_(radius))
    return torch.stack(pair, -1)


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of float32 `x` in (0, 1]."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    high = mantissa > math.sqrt(2)
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    exponent = (exponent + high).to(torch.float32)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(ratio * ratio, (2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9)).mul_(ratio)
    return exponent.mul_(math.log(2)).add_(series)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result.mul_(x).add_(coefficient)
    return result
