"""Poison is found wherever it is left, and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel.numbers import is_finite, poison, poisoned, spread

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_is_counted(dtype: torch.dtype) -> None:
    value = torch.zeros(3, 5).to(dtype)
    assert poisoned(value) == 0
    poison(value)
    assert poisoned(value) == 15
    assert value.is_floating_point() is not is_finite(value)
    value[1] = 1
    assert poisoned(value) == (10 if value.is_floating_point() else 0), "integers can be any number"


def test_packed_weights_may_hold_the_pattern() -> None:
    packed = torch.randint(-(2**31), 2**31, (64, 8)).to(torch.int32)
    packed[0, 0] = packed[3, 5] = 0x7FED7FED
    assert poisoned(packed) == 0


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool], ids=str
)
def test_small_dtypes_have_no_pattern(dtype: torch.dtype) -> None:
    value = torch.zeros(4).to(dtype)
    poison(value)
    assert poisoned(value) == 0


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point], ids=str)
def test_nan_of_a_computation_is_no_poison(dtype: torch.dtype) -> None:
    zero = torch.zeros(4, dtype=dtype)
    for value in (zero / zero, torch.full((4,), math.nan, dtype=dtype), zero.log() * 0, -(zero / zero)):
        assert bool(value.isnan().all())
        assert poisoned(value) == 0


@given(st.lists(st.floats(width=32), min_size=1))
def test_spread_and_finiteness_agree_with_plain_python(values: list[float]) -> None:
    tensor = torch.tensor(values)
    low, high = spread(tensor)
    assert is_finite(tensor) == all(map(math.isfinite, values))
    if any(map(math.isnan, values)):
        assert math.isnan(low)
        assert math.isnan(high)
    else:
        assert (low, high) == (min(values), max(values))
