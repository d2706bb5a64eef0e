"""Which writes are seen, and which are left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparseautomodel.writes import Writes


@pytest.mark.parametrize(
    "write",
    [
        lambda value: value.fill_(1.0),
        lambda value: value.data.normal_(),
        lambda value: nn.init.trunc_normal_(value),
        lambda value: value[0].zero_(),
        lambda value: torch.add(value, 1, out=value),
        lambda value: value.view(-1)[2:].copy_(torch.ones(2)),
    ],
)
def test_write_is_noted_or_left_out(write: Callable[[Tensor], object]) -> None:
    empty, kept = torch.zeros(2, 2), torch.full((2, 2), 7.0)
    writes = Writes([empty], [kept])
    assert writes.lacks(empty)
    with torch.no_grad(), writes:
        write(empty)
        write(kept)
    assert not writes.lacks(empty)
    assert bool((kept == 7.0).all())


def test_reading_is_no_write() -> None:
    empty = torch.zeros(3)
    writes = Writes([empty], [])
    with writes:
        _ = empty + 1, empty.clone().fill_(2.0), empty.sum()
    assert writes.lacks(empty)


def test_last_draw_counts() -> None:
    drawn, reset = torch.zeros(3), torch.zeros(3)
    writes = Writes([drawn, reset], [])
    with writes:
        drawn.normal_()
        reset.normal_().zero_()
    assert writes.drawn(drawn)
    assert not writes.drawn(reset)


def test_closed_for_a_while() -> None:
    value = torch.zeros(3)
    writes = Writes([value], [])
    with writes:
        with writes.closed([value]):
            value.fill_(1.0)
        assert float(value.sum()) == 0.0
        value.fill_(2.0)
    assert float(value.sum()) == 6.0


def test_tensor_in_other_memory_waits_no_longer() -> None:
    value = nn.Parameter(torch.zeros(3))
    writes = Writes([value], [])
    value.data = torch.ones(3)
    assert not writes.lacks(value)
