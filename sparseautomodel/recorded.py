"""What constructors did to tensors without values, call by call; and the same calls with values, when they are wanted.

A draw of random values is the same however often it is done again: a named tensor's come from its name, as they do when
it is initialized by `random_values.drawing`, those of any other from the first named tensor that depends on them.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from sparseautomodel.numbers import poison
from sparseautomodel.random_values import Drawing, drawing
from sparseautomodel.writes import storage

_MUTABLE = (np.ndarray, bytearray, array)
"""What a constructor may change after it has given it to torch."""
_ODD = {"bernoulli_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_"}
_CASTS = {"to", "half", "float", "double", "bfloat16", "type", "type_as"}
_RESHAPING = {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_", "as_strided_", "set_"}
"""What changes the shape of the very tensor that it is given."""


@dataclass(eq=False)
class Call:
    """One call that made or changed tensors on the meta device."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    written: tuple[Tensor, ...]
    in_contract: bool = True
    """Whether a method of initialization made it, and not a constructor that sets what its parts have set before."""
    maker: weakref.ReferenceType[nn.Module] | None = None
    """The module whose constructor made it."""
    line: str = ""
    """File and line of the constructor."""
    is_random: bool = False

    @property
    def is_odd(self) -> bool:
        """Whether it draws what `random_values` does not draw by places."""
        return getattr(self.func, "__name__", "").partition(".")[0] in _ODD

    def writes(self, place: int) -> bool:
        return any(storage(one) == place for one in self.written)

    def derives(self, place: int) -> bool:
        """Whether it makes a tensor in a storage of tensors in others."""
        inputs = {storage(one) for one in tensors_in(self.args, self.kwargs) if one.is_meta}
        made = any(storage(one) == place for one in tensors_in(self.result))
        return made and bool(inputs) and place not in inputs and not self.is_empty

    @property
    def is_empty(self) -> bool:
        return getattr(self.func, "__name__", "").startswith(("empty", "new_empty"))


@dataclass(frozen=True)
class Read:
    """A constructor made numbers of Python of a tensor that depends on random values."""

    how: str
    line: str
    draws: frozenset[int]
    """The calls that drew them."""


def rebind(tensor: Tensor) -> None:
    """Stands in the record for `tensor.data = value`: the tensor is in the memory of `value` from then on."""


@dataclass(eq=False)
class Record:
    """The calls of one construction, in order."""

    calls: list[Call] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    _touching: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Storage -> the calls that made or changed a tensor in it."""

    _versions: dict[int, tuple[Tensor, range]] = field(default_factory=dict)
    """Storage -> the tensor that was made with it, and its versions after the last call."""
    _unseen: set[int] = field(default_factory=set)

    def append(self, call: Call) -> None:
        for place, tensor in {storage(one): one for one in (*call.written, *tensors_in(call.result))}.items():
            if tensor.is_meta:
                self._touching[place].append(len(self.calls))
                first = self._versions.get(place, (tensor, range(0)))[0]
                operator = isinstance(call.func, torch._ops.OpOverload)  # its version rises after it has been noted
                self._versions[place] = first, range(first._version, first._version + 1 + operator)
        self.calls.append(call)

    def look(self, tensor: Tensor) -> None:
        """Before each call, at what it is given: whether something else has written to it."""
        if self.is_written_unseen(tensor):
            self._unseen.add(storage(tensor))

    def is_written_unseen(self, tensor: Tensor) -> bool:
        """Whether something has written to a tensor that is no call of the record: another thread, or a load later."""
        place = storage(tensor)
        first, versions = self._versions.get(place, (None, range(0)))
        return place in self._unseen or (first is not None and first._version not in versions)

    def knows(self, tensor: Tensor) -> bool:
        return storage(tensor) in self._touching

    def changed_outside(self, tensor: Tensor, managed: bool) -> Call | None:
        """The last call by which a constructor changed a tensor outside of a method of initialization.

        A tensor that is made of others, as a copy is, counts as changed. `managed`: a model of transformers initializes
        all of itself at the end of its constructor. Only what comes after that counts.
        """
        place = storage(tensor)
        calls = [self.calls[number] for number in self._touching.get(place, ())]
        inside = [at for at, call in enumerate(calls) if call.in_contract and call.writes(place)]
        outside = [at for at, call in enumerate(calls) if not call.in_contract and call.writes(place)]
        if not inside and not outside:
            outside = [at for at, call in enumerate(calls) if call.derives(place)]
        if not outside or (managed and (not inside or outside[-1] < inside[-1])):
            return None
        return calls[outside[-1]]

    def maker(self, tensor: Tensor) -> nn.Module | None:
        """The module whose constructor made a tensor, whichever modules have it now."""
        place = storage(tensor)
        calls = (self.calls[number] for number in self._touching.get(place, ()))
        made = (call.maker for call in calls if any(storage(one) == place for one in tensors_in(call.result)))
        return next((maker() for maker in made if maker is not None), None)

    def gives(self, tensor: Tensor) -> bool:
        """Whether a constructor put values into a tensor, by whatever it was made or written with."""
        return self._gives(storage(tensor), len(self.calls))

    def _gives(self, place: int, before: int) -> bool:
        for number in self._touching.get(place, ()):
            call = self.calls[number]
            if number >= before:
                break
            if call.func is not rebind and call.writes(place):
                return True
            inputs = {storage(one) for one in tensors_in(call.args, call.kwargs) if one.is_meta}
            if place not in inputs and not call.is_empty and all(self._gives(one, number) for one in inputs):
                return True
        return False

    def closure(self, tensor: Tensor) -> set[int]:
        """The calls that the values of a tensor depend on."""
        found: set[int] = set()
        waiting = [(storage(tensor), len(self.calls))]
        while waiting:
            place, before = waiting.pop()
            for number in self._touching.get(place, ()):
                if number >= before:
                    break
                if number not in found:
                    found.add(number)
                    call = self.calls[number]
                    waiting += [(storage(one), number) for one in tensors_in(call.args, call.kwargs) if one.is_meta]
        return found

    def draws(self, tensor: Tensor) -> set[int]:
        return {number for number in self.closure(tensor) if self.calls[number].is_random}

    def read(self, tensor: Tensor, how: str, line: str, seed: int) -> Tensor | None:
        """The value of a tensor of which a constructor makes numbers; noted where it is random."""
        draws = self.draws(tensor)
        if draws:
            self.reads.append(Read(how, line, frozenset(draws)))
        return next(value for _, value in self.values([tensor], {}, seed))

    def values(
        self, wanted: Sequence[Tensor], named: Mapping[str, Tensor], seed: int
    ) -> Iterator[tuple[int, Tensor | None]]:
        """For each of `wanted`, its place among them and what the constructors made of it, on the CPU.

        Args:
            wanted: tensors of the meta device.
            named: canonical name -> tensor of the meta device, for those of the module.
            seed: of what is random.

        None for one that was left as memory without values, that was not made here, or that depends on such a tensor.
        Each comes as soon as it is known, so that it need not be held.
        """
        numbers = sorted(set().union(*(self.closure(tensor) for tensor in wanted)))
        last: dict[int, int] = {}
        for number in numbers:
            call = self.calls[number]
            last.update(dict.fromkeys(map(storage, tensors_in(call.args, call.kwargs, call.result)), number))
        due = defaultdict(list)
        for index, tensor in enumerate(wanted):
            due[last.get(storage(tensor), -1)].append(index)
        names = {storage(tensor): (name, tensor) for name, tensor in reversed([*named.items()])}
        for name, tensor in named.items():
            for source in self._sources(tensor):
                names.setdefault(storage(source), (name, source))
        replay = _Replay(names, seed)
        yield from ((index, None) for index in due.pop(-1, ()))
        keys = self._keys(numbers, named, set(names))
        for number in numbers:
            replay.run(self.calls[number], keys.get(number, f"beside {number}"))
            for index in due.get(number, ()):
                yield index, replay.value(wanted[index])
            call = self.calls[number]
            for place in {storage(one) for one in tensors_in(call.args, call.kwargs, call.result)}:
                if last[place] == number:
                    replay.drop(place)

    def _sources(self, tensor: Tensor) -> Iterator[Tensor]:
        """What a tensor was cast from, and that from: they are drawn as it is."""
        before = len(self.calls)
        while True:
            place, made = storage(tensor), None
            for number in self._touching.get(place, ()):
                call = self.calls[number]
                if number < before and call.derives(place) and getattr(call.func, "__name__", "") in _CASTS:
                    made = number, call.args[0]
            if made is None or made[1].shape != tensor.shape:
                return
            before, tensor = made
            yield tensor

    def _keys(self, numbers: Iterable[int], named: Mapping[str, Tensor], places: set[int]) -> dict[int, str]:
        """Names for random values of tensors that have none: of the first named tensor that depends on them."""
        waiting = {
            number
            for number in numbers
            if self.calls[number].is_random
            and (self.calls[number].is_odd or not any(storage(one) in places for one in self.calls[number].written))
        }
        keys: dict[int, str] = {}
        for name, tensor in named.items():
            if not waiting:
                break
            for count, number in enumerate(sorted(self.closure(tensor) & waiting)):
                keys[number] = f"{name}\0{count}"
                waiting.discard(number)
        return keys


class _Replay:
    """Calls done on the CPU, one after another, on the values of those before."""

    def __init__(self, names: Mapping[int, tuple[str, Tensor]], seed: int) -> None:
        self._names, self._seed = names, seed
        self._known: dict[int, dict[Any, Tensor]] = defaultdict(dict)
        """Storage of the meta device -> what a tensor is in it -> the same with values."""
        self._hollow: set[int] = set()
        """Storages (of the meta device) without values."""
        self._lost: set[int] = set()
        """Storages whose values cannot be known."""
        self._drawing = Drawing({}, seed)

    def run(self, call: Call, key: str) -> None:
        if call.func is rebind:
            return
        inputs = [one for one in tensors_in(call.args, call.kwargs) if one.is_meta]
        touched = {storage(one) for one in (*call.written, *tensors_in(call.result)) if one.is_meta}
        try:
            real = {id(one): self._real(one) for one in inputs}
            result = self._do(call, real, key)
        except Exception:  # whatever an operator says to its inputs, what it would have made is not known
            self._lost |= touched
            return
        name = getattr(call.func, "__name__", "")
        written = {storage(one) for one in call.written}
        made = [one for one in tensors_in(call.result)]
        without = any(storage(one) in self._hollow for one in inputs if storage(one) not in written)
        without = without and not (name.endswith("_like") or name.startswith("new_"))
        for meta, value in zip(made, tensors_in(result) if made else [], strict=True):
            if call.is_empty:
                poison(value)
            if (call.is_empty or without) and storage(meta) not in written:
                self._hollow.add(storage(meta))
            self._learn(meta, value)
        self._hollow = self._hollow | written if without else self._hollow - written

    def value(self, meta: Tensor) -> Tensor | None:
        if storage(meta) in self._hollow:
            return None
        try:
            return self._real(meta)
        except LookupError:
            return None

    def drop(self, place: int) -> None:
        if place in self._names:
            for value in self._known.get(place, {}).values():
                self._drawing.forget(value)
        self._known.pop(place, None)

    def _do(self, call: Call, real: dict[int, Tensor], key: str) -> Any:
        args, kwargs = tree_map(lambda value: real.get(id(value), _on_cpu(value)), (call.args, call.kwargs))
        if getattr(call.func, "__name__", "").partition(".")[0] in _RESHAPING:
            args = (args[0].detach(), *args[1:])
        modes: list[Any] = [self._drawing]
        if call.is_random and (call.is_odd or not any(map(self._drawing.owns, tensors_in(args, kwargs)))):
            digest = hashlib.blake2b(f"{self._seed}\0{key}".encode(), digest_size=7).digest()
            own = drawing({}, int.from_bytes(digest, "little"))
            modes = [own] if call.is_odd else [*modes, own]
        with contextlib.ExitStack() as stack, torch.no_grad():
            for mode in modes:
                stack.enter_context(mode)
            return call.func(*args, **kwargs)

    def _real(self, meta: Tensor) -> Tensor:
        """The tensor with values for one of the meta device."""
        place = storage(meta)
        if place in self._lost:
            raise LookupError
        known = self._known.get(place, {})
        if (exact := known.get(_view(meta))) is not None:
            return exact
        for view, value in known.items():  # a view that no function of torch made
            if view[:4] == (value.storage_offset(), tuple(value.shape), value.stride(), value.dtype):
                where = (meta.storage_offset(), meta.shape, meta.stride())
                return torch.empty(0, dtype=meta.dtype).set_(value.untyped_storage(), *where)
        raise LookupError

    def _learn(self, meta: Tensor, value: Tensor) -> None:
        place = storage(meta)
        self._known[place][_view(meta)] = value
        if place in self._names:
            name, whole = self._names[place]
            with contextlib.suppress(LookupError):
                self._drawing.name(name, self._real(whole))


def tensors_in(*values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def kept(value: Any) -> Any:
    """What stays of an argument in the record: another object in the same place, a copy of what has values."""
    if isinstance(value, Tensor):
        return value.detach() if value.is_meta else value.detach().clone()
    return copy.copy(value) if isinstance(value, _MUTABLE) else value


def _view(meta: Tensor) -> tuple[Any, ...]:
    """What a tensor is in its storage: the same for a parameter and the tensor that it was made from."""
    return meta.storage_offset(), tuple(meta.shape), meta.stride(), meta.dtype


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "meta":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value == "meta" else value
