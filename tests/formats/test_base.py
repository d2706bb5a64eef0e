"""Codes and packed bits against compressed-tensors' own functions, over every float there is where that is possible."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8, unpack_fp6_from_uint8
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, round_to_quantized_type_args
from compressed_tensors.quantization.utils import calculate_range
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseautomodel.formats.base import as_dtype, float_codes, int_codes, numbers_of, pack, unpack, words

BITS = range(2, 9)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 100), st.integers(0, 2**32 - 1), st.booleans())
def test_packing_is_that_of_compressed_tensors(bits: int, rows: int, columns: int, seed: int, turned: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (columns, rows) if turned else (rows, columns)
    codes = torch.randint(0, 2**bits, shape, generator=generator).to(torch.uint8)
    codes = codes.t() if turned else codes  # strided as zero points are, which are packed along the rows
    packed = as_dtype(pack(codes, bits)[:, : 4 * words(columns, bits)], torch.int32)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(packed, pack_to_int32(signed, bits))
    assert torch.equal(unpack(as_dtype(packed, torch.uint8), bits, columns), codes)
    assert torch.equal(unpack_from_int32(packed, bits, (rows, columns)), signed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_int_codes_are_rounded_half_to_even_and_clamped(bits: int, dtype: torch.dtype) -> None:
    half = 2 ** (bits - 1)
    numbers = _floats(dtype, 2.0**bits)
    expected = numbers.double().round().clamp(-half, half - 1).to(torch.int16) + half
    assert torch.equal(int_codes(numbers.clone(), bits).to(torch.int16), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", (4, 6, 8))
def test_float_codes_are_those_of_compressed_tensors(bits: int, dtype: torch.dtype) -> None:
    numbers = _floats(dtype, 4.0 if bits < 8 else 500.0)
    args = QuantizationArgs(num_bits=bits, type="float")
    numbers = numbers + 0.0 if bits == 8 else numbers
    rounded = round_to_quantized_type_args(numbers, args, *calculate_range(args, torch.device("cpu")))
    if bits == 8:
        expected = rounded.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        rows = rounded.view(-1, 4)
        expected = pack_fp4_to_uint8(rows) if bits == 4 else pack_fp6_to_uint8(rows)
        expected = unpack(expected, bits, 4).flatten()
    assert torch.equal(float_codes(numbers, bits), expected)


def test_negative_zero_is_stored_as_zero_in_fp8() -> None:
    for dtype in DTYPES:
        assert float_codes(torch.tensor([-0.0, 0.0], dtype=dtype), 8).tolist() == [0, 0]


def test_numbers_of_every_byte() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(64, 4)
    assert _same(numbers_of(codes, "float", 8), codes.view(torch.float8_e4m3fn).to(torch.bfloat16))
    assert _same(numbers_of(codes, "float", 4), unpack_fp4_from_uint8(codes, 64, 8))
    assert _same(numbers_of(codes, "int", 4), unpack(codes, 4, 8).to(torch.bfloat16) - 8)
    six = codes & 63
    assert _same(numbers_of(six, "float", 6), unpack_fp6_from_uint8(pack(six.repeat(1, 8), 6), 64, 32)[:, :4])


def test_an_odd_number_of_bytes_from_an_odd_place() -> None:
    codes = torch.arange(64, dtype=torch.int32).to(torch.uint8)
    for first in (0, 1):
        odd = codes[first : first + 15].view(3, 5)
        assert _same(numbers_of(odd, "float", 8), odd.view(torch.float8_e4m3fn).to(torch.bfloat16))


def _floats(dtype: torch.dtype, scale: float) -> torch.Tensor:
    """All finite floats of a two-byte dtype; of float32 a spread, and the neighbours of every tie up to `scale`."""
    if dtype.itemsize == 2:
        every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
        every = every[every.isfinite()]
        return every[: len(every) // 4 * 4]
    ties = torch.arange(-512, 512).float() / 1024 * scale
    close = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-torch.inf, torch.inf)]
    wide = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    return torch.cat([ties, *close, wide * scale, wide * 1e-4, wide * 1e6, torch.zeros(4)])


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int16), other.contiguous().view(torch.int16))
