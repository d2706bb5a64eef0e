"""Which tensors are written, and how, while initialization methods run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_WHOLE = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


class Writes(TorchDispatchMode):
    """A mode that notes writes to the memory of some tensors, and leaves out those to the memory of others.

    Args:
        empty: tensors that wait for values.
        protected: tensors that keep theirs.
    """

    def __init__(self, empty: Iterable[Tensor], protected: Iterable[Tensor]) -> None:
        super().__init__()
        self._empty = {storage(value) for value in empty if value.numel()}
        self._closed = {storage(value) for value in protected} - self._empty
        self._written: set[int] = set()
        self._drawn: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        targets = targets_of(func, args, kwargs)
        places = [storage(value) for value in targets]
        if any(place in self._closed for place in places):
            return targets[0] if len(targets) == 1 else tuple(targets)
        result = func(*args, **kwargs)
        self._written.update(places)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._drawn.update(places)
        elif func in _WHOLE:
            self._drawn.difference_update(places)
        return result

    @contextlib.contextmanager
    def closed(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Leave out writes to these, too."""
        before = self._closed
        self._closed = before | {storage(value) for value in tensors}
        yield
        self._closed = before

    def note(self, value: Tensor) -> None:
        """A tensor has been written outside of the mode."""
        self._written.add(storage(value))
        self._drawn.discard(storage(value))

    def lacks(self, value: Tensor) -> bool:
        """Whether a tensor still waits for values; not if it is in other memory now."""
        place = storage(value)
        return place in self._empty and place not in self._written

    def drawn(self, value: Tensor) -> bool:
        """Whether the last that was done to a tensor was a draw of random values."""
        return storage(value) in self._drawn


def targets_of(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operator writes to."""
    given = [args[place] if place < len(args) else kwargs.get(name) for place, name in _mutated(func)]
    return [
        one
        for value in given
        for one in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(one, Tensor)
    ]


def local(value: Tensor) -> Tensor:
    """The part of a sharded tensor that is here; any other tensor itself."""
    return value._local_tensor if isinstance(value, DTensor) else value


def storage(value: Tensor) -> int:
    """What tensors in the same memory have in common, on the meta device too."""
    return local(value).untyped_storage()._cdata


@functools.cache
def _mutated(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an operator writes to."""
    arguments = func._schema.arguments
    return tuple(
        (place, one.name)
        for place, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
