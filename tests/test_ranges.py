"""The range of inputs, against that of all of them at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel.ranges import InputRange


@given(cuts=st.lists(st.integers(0, 40), max_size=5), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_ends_are_those_of_all_tokens_however_they_are_cut(cuts: list[int], dtype: torch.dtype) -> None:
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = InputRange(6)
    places = [0, *sorted(cuts), 40]
    for first, last in pairwise(places):
        found.update(inputs[first:last])
    assert found.tokens == 40
    assert torch.equal(found.low, inputs.float().amin(0)) and torch.equal(found.high, inputs.float().amax(0))
    assert torch.equal(found.largest, inputs.float().abs().amax(0))
    assert found.low.dtype == found.largest.dtype == torch.float32


def test_without_a_token_all_is_0() -> None:
    found = InputRange(3)
    found.divide(torch.full((3,), 2.0))
    assert found.tokens == 0
    assert found.low.tolist() == found.high.tolist() == found.largest.tolist() == [0, 0, 0]


def test_dividing_is_as_if_the_inputs_had_been_divided() -> None:
    inputs, factors = torch.randn(20, 4), torch.tensor([0.5, 2.0, 4.0, 1.0])
    found, expected = InputRange(4), InputRange(4)
    found.update(inputs)
    found.divide(factors)
    expected.update(inputs / factors)
    assert torch.equal(found.low, expected.low) and torch.equal(found.high, expected.high)
    found.update(inputs)
    expected.update(inputs)
    assert torch.equal(found.largest, expected.largest)


def test_inputs_are_not_held_or_changed() -> None:
    inputs = torch.ones(2, 3)
    found = InputRange(3)
    found.update(inputs)
    inputs.fill_(9)
    assert found.high.tolist() == [1, 1, 1]


@pytest.mark.parametrize("inputs", [torch.ones(3), torch.ones(2, 4), torch.ones(2, 3, dtype=torch.int64)])
def test_other_inputs_are_refused(inputs: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"inputs must be \[tokens, 3\] of a float dtype"):
        InputRange(3).update(inputs)


def test_its_memory_is_two_numbers_a_column() -> None:
    found = InputRange(5)
    found.update(torch.ones(2, 5))
    assert found.nbytes == found.low.nbytes + found.high.nbytes
