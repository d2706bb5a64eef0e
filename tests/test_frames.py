"""What the frames of running constructors say."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch import nn

from sparseautomodel.frames import arguments, constructors, in_contract


class Noting(nn.Module):
    seen: Any = None
    inside = True

    def __init__(self, first: int, *more: int, key: str = "k", **named: Any) -> None:
        super().__init__()
        self.seen = arguments(sys._getframe())
        self.reset_parameters()
        self.outside = in_contract(sys._getframe())

    def reset_parameters(self) -> None:
        self.inside = in_contract(sys._getframe())
        self.running = [module for _, module in constructors(sys._getframe())]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Noting(1)


def test_arguments_as_they_were_given() -> None:
    assert Noting(1, 2, 3, key="x", extra=4).seen == ((1, 2, 3), {"key": "x", "extra": 4})


def test_constructors_from_the_innermost_out() -> None:
    outer = Outer()
    assert outer.inner.running == [outer.inner, outer]


@pytest.mark.parametrize(("place", "expected"), [("inside", True), ("outside", False)])
def test_whether_an_initialization_method_runs(place: str, expected: bool) -> None:
    assert getattr(Outer().inner, place) is expected
