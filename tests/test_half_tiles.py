"""Numbers of a few bits as halves, and products by tiles, against plain code."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from torch import Tensor
from torch.nn import functional as F

from sparseautomodel import half_tiles
from sparseautomodel.half_tiles import (
    E2M1_UNIT,
    E4M3_UNIT,
    e2m1_to_half,
    e4m3_to_half,
    e8m0_to_float,
    e8m0_to_half,
    multiply_few,
    multiply_many,
)

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def test_every_e4m3_number_is_exact() -> None:
    codes = BYTES.view(torch.float8_e4m3fn)
    halves = torch.empty(256, dtype=torch.float16)
    e4m3_to_half(codes, halves)
    wanted, numbers = codes.float(), halves.float() / E4M3_UNIT
    finite = wanted.isfinite()
    assert finite.sum() == 254 and torch.equal(numbers[finite], wanted[finite])
    assert torch.equal(numbers[finite].signbit(), wanted[finite].signbit())
    assert numbers[~finite].abs().tolist() == [480, 480]


def test_every_e2m1_number_is_exact_in_every_place() -> None:
    packed = torch.stack([BYTES, BYTES.flip(0)], 1).flatten().view(4, -1)
    halves = torch.empty(4, 4, 64 // 2 // 2 * 4, dtype=torch.float16)
    words = packed.view(torch.int16)
    halves = torch.empty(4, 4, words.shape[1], dtype=torch.float16)
    e2m1_to_half(words, halves)
    wanted = unpack_fp4_from_uint8(packed, 4, packed.shape[1] * 2, torch.float32)
    assert torch.equal(halves.float().transpose(1, 2).flatten(1) / E2M1_UNIT, wanted)


def test_exponents_become_the_powers_of_two() -> None:
    exponents = BYTES[1:255].view(2, -1)
    assert torch.equal(e8m0_to_float(exponents), decompress_mx_scale(exponents).float())
    halves, largest = e8m0_to_half(exponents)
    assert torch.equal(largest, e8m0_to_float(exponents.amax(1, keepdim=True)))
    wanted, numbers = e8m0_to_float(exponents), halves.float() * largest
    near = wanted > largest * 2.0**-15
    assert near.sum() == 30 and torch.equal(numbers[near], wanted[near])
    assert not halves[~near].any()


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 6e4], ids=str)
def test_few_tokens_of_any_size_neither_overflow_nor_vanish(
    tokens: int, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_tiles, "TILE_ELEMENTS", 3 * 512)  # tiles of three rows, the last one shorter
    weight = torch.full((10, 512), 1.75)
    weight[5:] = torch.randn(5, 512).clamp(-1.75, 1.75).half().float()
    flat = torch.rand(tokens, 512) * size

    def fill(rows: slice, out: Tensor) -> None:
        assert out.dtype == torch.float16
        out.copy_(weight[rows])

    product = multiply_few(flat, (10, 512), fill, 1.75)
    wanted = F.linear(flat.double(), weight.double())
    assert product.dtype == torch.float32
    assert ((product.double() - wanted).abs() <= 1e-3 * wanted.abs().amax(1, keepdim=True)).all()


def test_a_token_of_zeros_gives_zeros() -> None:
    output = multiply_few(torch.zeros(1, 8), (4, 8), lambda rows, out: out.fill_(1), 1.0)  # type: ignore[arg-type]
    assert torch.equal(output, torch.zeros(1, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_many_tokens_are_a_linear_layer(dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_tiles, "TILE_ELEMENTS", 3 * 64)
    weight, flat = torch.randn(10, 64).bfloat16().float(), torch.randn(tokens, 64, dtype=dtype)
    output = multiply_many(flat, (10, 64), lambda rows, out: out.copy_(weight[rows]))  # type: ignore[arg-type]
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    assert output.dtype == kind and output.shape == (tokens, 10)
    torch.testing.assert_close(output, F.linear(flat.to(kind), weight.to(kind)))
