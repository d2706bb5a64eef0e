"""Sums of squares against float64, compiled and not."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from sparseautomodel.squares import column_squares

pytestmark = pytest.mark.usefixtures("compiled_or_not")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 3, 63, 64, 65, 700, 9000])
@pytest.mark.parametrize("columns", [1, 15, 16, 50])
def test_close_to_exact(tokens: int, columns: int, dtype: torch.dtype) -> None:
    inputs = torch.randn(tokens, columns + 3).to(dtype)[:, 1 : columns + 1]
    found = column_squares(inputs)
    assert found.dtype == torch.float64 and found.shape == (columns,)
    torch.testing.assert_close(found, inputs.double().square().sum(0), rtol=1e-6, atol=0)


def test_inputs_stay_as_they_are_and_columns_may_lie_apart() -> None:
    inputs = torch.randn(40, 70)
    before = inputs.clone()
    torch.testing.assert_close(column_squares(inputs.t()), inputs.double().square().sum(1), rtol=1e-6, atol=0)
    halves = inputs.bfloat16()
    torch.testing.assert_close(column_squares(halves.t()), halves.double().square().sum(1), rtol=1e-6, atol=0)
    assert torch.equal(inputs, before)


def test_threads_change_no_bit() -> None:
    inputs = torch.randn(1000, 70).bfloat16()
    one = column_squares(inputs)
    torch.set_num_threads(3)
    try:
        assert torch.equal(column_squares(inputs), one)
    finally:
        torch.set_num_threads(1)


def test_numbers_that_are_none_stay_none() -> None:
    inputs = torch.ones(10, 20).bfloat16()
    inputs[3, 4], inputs[5, 6] = float("nan"), float("inf")
    found = column_squares(inputs)
    assert found[4].isnan() and found[6].isinf() and found.isfinite().sum() == 18


def test_tensors_without_memory_have_sums_without_memory() -> None:
    assert column_squares(torch.ones(3, 4, dtype=torch.bfloat16, device="meta")).is_meta
    with FakeTensorMode():
        assert column_squares(torch.ones(3, 4, dtype=torch.bfloat16)).shape == (4,)
