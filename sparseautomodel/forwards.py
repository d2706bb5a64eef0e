"""Forwards of a model that can be left in the middle and taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from sparseautomodel.sets import LayerSet


@dataclass(eq=False)
class Forward:
    """One batch on its way through the model."""

    batch: Mapping[str, Tensor]
    witness: bool = False
    result: bool = False
    """Of a witness: whether it runs through what the model becomes, not through the source."""
    light: greenlet | None = None
    at: str | None = None
    """The block that it waits to enter, or END."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    """What the block is called with."""
    nbytes: int = 0
    """Of the hidden states in it."""
    waits_for: LayerSet | None = None
    passed: set[str] = field(default_factory=set)
    """Blocks that it has run through."""
    hidden: Tensor | None = None
    """Of a witness: the output of the last of them."""
    done: bool = False
    output: Any = None


def wait() -> None:
    light = getcurrent()
    assert light.parent is not None
    light.parent.switch()


def run_block(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The output of a block that is run alone, without its hooks."""
    return first_tensor(block.forward(*args, **kwargs))


def first_tensor(value: Any) -> Tensor:
    """The first float tensor in a block's arguments or output: the hidden states."""
    values = [value]
    while values:
        value = values.pop(0)
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
        if isinstance(value, Mapping):
            values[:0] = value.values()
        elif isinstance(value, (tuple, list)):
            values[:0] = value
    raise ValueError("a block has no float tensor among its arguments or in its output, so it cannot be calibrated")
