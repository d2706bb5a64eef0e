"""Random initial values that depend on the seed, the tensor's name and the element's place in it, and on nothing else.

One process and any mesh of processes draw the same values, each of them only those that it holds. The generator is
Philox4x32-10: a function from a key (seed and name) and a counter (place and number of the draw) to values.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from sparseautomodel.philox import normals, philox, uniforms
from sparseautomodel.writes import local

_CHUNK = {"cpu": 1 << 17}
"""Elements drawn at a time: on a CPU so many that they stay in a core's cache."""


@contextlib.contextmanager
def drawing(named: Mapping[str, Tensor], seed: int) -> Iterator[None]:
    """Random fills inside the `with` draw values that depend on `seed`, the tensor's name and the element alone.

    `normal_`, `uniform_` and all of `torch.nn.init` on a tensor of `named`, or on a view of one, give the values that
    any other layout gives: a `DTensor` gets those of the elements that it holds, no others are drawn. Filling a tensor
    again repeats its values. Temporary tensors that are made after one of `named` are drawn for it. Other random
    tensors (`torch.rand(n)` and the like) depend on the tensor that was filled last and on how many were drawn since.
    The state of torch's own generators is neither used nor changed, nor the `generator` that a call gives. Only the
    calling thread is affected.

    Args:
        named: canonical name -> tensor with storage; of tensors that share their storage, the first name counts.
        seed: any int.

    Raises:
        NotImplementedError: inside the `with`, for another random fill (such as `bernoulli_`) of a tensor of `named`.

    >>> layer = torch.nn.Linear(4, 4)
    >>> with drawing(dict(layer.named_parameters()), seed=0):
    ...     _ = torch.nn.init.normal_(layer.weight)
    """
    with Drawing(named, seed):
        yield


def checked_seed(seed: Any, call: str) -> int | None:
    """`seed` as an int, or None; a ValueError that names `call` for what is no whole number from 0 on."""
    if seed is None:
        return None
    whole = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)
    if not whole or seed < 0:
        raise ValueError(
            f"{call}(seed={seed!r}): a seed is a whole number from 0 on, or None, which draws one from torch's random "
            f"state. Write {call}(..., seed={abs(int(seed)) if whole else 0})"
        )
    return int(seed)


def normal(seed: int, name: str, index: Tensor, draw: int = 0) -> Tensor:
    """Standard normal float32 values of the elements at the flat places `index` (int64, any shape) of tensor `name`."""
    return _at(_key(seed, name), index.reshape(-1), draw, normals).view(index.shape)


def uniform(seed: int, name: str, index: Tensor, draw: int = 0) -> Tensor:
    """Float32 values in [0, 1), multiples of 2**-24, of the elements at the flat places `index` of tensor `name`."""
    return _at(_key(seed, name), index.reshape(-1), draw, uniforms).view(index.shape)


@dataclass
class _Named:
    name: str
    tensor: Tensor
    draws: int = 0
    """Draws for temporary tensors since the tensor itself was filled."""


class Drawing(TorchDispatchMode):
    """The mode of `drawing`. Tensors may be named while it lasts."""

    def __init__(self, named: Mapping[str, Tensor], seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._by_storage: dict[int, list[_Named]] = {}
        self._temporary: Any = WeakTensorKeyDictionary()
        self._selected: Any = WeakTensorKeyDictionary()
        """Copies that DTensor made where a view was asked for -> the tensor, the dimension and the index in it."""
        self._other = _Named("beside ", torch.empty(0))
        for name, tensor in named.items():
            self.name(name, tensor)

    def name(self, name: str, tensor: Tensor) -> None:
        """From now on a tensor with storage is `name`, unless it has a name already."""
        if not local(tensor).is_meta:
            entries = self._by_storage.setdefault(local(tensor).untyped_storage().data_ptr(), [])
            if all(_span(one.tensor) != _span(tensor) for one in entries):
                entries.append(_Named(name, tensor))

    def forget(self, tensor: Tensor) -> None:
        """What lies in the storage of a tensor has no name any more, and is not held here."""
        self._by_storage.pop(local(tensor).untyped_storage().data_ptr(), None)

    def owns(self, tensor: Tensor) -> bool:
        """Whether it is drawn as a tensor that has a name: it lies in its memory, or was made after it."""
        return self._find(tensor) is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func in _FILLS and not local(args[0]).is_meta:
            a, b = _arguments(func, args, kwargs)
            self._fill(args[0], _FILLS[func], a, b)
            return args[0]
        if func in _FACTORIES:
            made = torch.empty_like(first, **kwargs) if first is not None else torch.empty(*args, **_plain(kwargs))
            self._inherit(made, first)
            if not made.is_meta:
                self._fill(made, _FACTORIES[func], 0.0, 1.0)
            return made
        if func is torch.ops.aten.randperm.default:
            words = self._draw(torch.empty(args[0], device=kwargs.get("device")), uniforms)
            return words.sort(stable=True).indices.to(kwargs.get("dtype") or torch.int64)
        owner = None if first is None else self._find(first)
        if owner is not None and torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(
                f"{owner.name} is filled by {func}, which has no values that are independent of the layout. "
                "Initialize it by torch.nn.init, normal_ or uniform_"
            )
        if owner is not None and func is torch.ops.aten.copy_.default:
            self._start(owner)
        if torch.Tag.nondeterministic_seeded in func.tags:
            func, kwargs = self._from_generator(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is torch.ops.aten.select.int and isinstance(first, DTensor) and owner is not None:
            self._selected[result] = first, *args[1:]
        if func in _CONSTANT and first in self._selected:
            _fill_selected(*self._selected[first], *args[1:])
        if func in _INHERITING:
            for source in args:
                self._inherit(result, source)
        return result

    def _from_generator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Other draws of tensors without a name: by torch, from a generator of their own."""
        if any(isinstance(one, Tensor) and one.is_meta for one in args) or str(kwargs.get("device")) == "meta":
            return func, kwargs
        self._other.draws += 1
        if all(one.name != "generator" for one in func._schema.arguments):
            name = {"default": "generator", "low_dtype": "low_generator_dtype"}.get(func._overloadname)
            other = getattr(func.overloadpacket, name or f"{func._overloadname}_generator", None)
            if other is None:  # dropout
                return func, kwargs
            func = other
        device = next((one.device for one in args if isinstance(one, Tensor)), kwargs.get("device") or "cpu")
        seed, more = _key(self._seed, f"{self._other.name}\0{self._other.draws}")
        return func, kwargs | {"generator": torch.Generator(device).manual_seed(seed << 31 ^ more)}

    def _fill(self, tensor: Tensor, kind: Any, a: float, b: float) -> None:
        """`a` + value * `b` (normal), or values from `a` to below `b`, rounded once to the tensor's dtype."""
        place = local(tensor)
        wide = torch.float64 if place.dtype == torch.float64 else torch.float32
        end = None
        if kind is uniforms and b > a:
            end = torch.nextafter(torch.tensor(b, dtype=place.dtype), torch.tensor(a, dtype=place.dtype)).item()

        def finish(values: Tensor) -> Tensor:
            values = values.to(wide)
            rounded = values.mul_(b if kind is normals else b - a).add_(a).to(place.dtype)
            return rounded if end is None else rounded.clamp_(max=end)

        if place.is_contiguous():  # a few at a time: the values need no memory to speak of
            self._draw(tensor, kind, place.view(-1), finish)
        else:
            place.copy_(finish(self._draw(tensor, kind)))

    def _draw(
        self, tensor: Tensor, kind: Any, into: Tensor | None = None, finish: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Tensor:
        """Float32 values for the elements that this process holds of `tensor`, in the shape of its part.

        Or what `finish` makes of them, where they are to go into the flat tensor `into`.
        """
        owner = self._temporary.get(tensor) or self._find(tensor) or self._other
        place = local(tensor)
        if owner is not self._other and tensor not in self._temporary:
            self._start(owner)
            places = _places(owner.tensor)
            if _span(tensor) == _span(owner.tensor):
                shape = place.shape
            else:
                found = _at(_key(self._seed, owner.name), _view_index(place, owner, places), 0, kind)
                return (found if into is None else into.copy_(finish(found))).view(place.shape)
        else:
            owner.draws += 1
            places, shape = _places(tensor), place.shape
        full = tuple(tensor.shape) if tensor.shape else (1,)
        key = _key(self._seed, owner.name)
        count = math.prod(len(place) for place in places)
        into = torch.empty(count, device=place.device) if into is None else into
        _in_runs(key, places, full, owner.draws, kind, into, finish)
        return into.view(shape)

    def _start(self, owner: _Named) -> None:
        owner.draws = 0
        self._other = _Named(f"beside {owner.name}", torch.empty(0))

    def _find(self, tensor: Tensor) -> _Named | None:
        """Whose values `tensor` holds: those of one of `named`, or of one that it was made after."""
        if tensor in self._temporary:
            return self._temporary[tensor]
        held = local(tensor)
        if held.is_meta:
            return None
        start = held.storage_offset()
        for entry in self._by_storage.get(held.untyped_storage().data_ptr(), ()):
            begin, extent = _span(entry.tensor)[:2]
            if begin <= start < begin + extent or (start == begin and not extent):
                return entry
        return None

    def _inherit(self, made: Any, source: Any) -> None:
        if isinstance(source, Tensor) and isinstance(made, Tensor) and made.numel() == source.numel():
            owner = self._find(source)
            if owner is not None and made not in self._temporary and self._find(made) is None:
                self._temporary[made] = owner


def _span(tensor: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Where a tensor lies in its storage: first element, extent, shape and strides."""
    held = local(tensor)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(held.shape, held.stride(), strict=True))
    return int(held.storage_offset()), extent if held.numel() else 0, tuple(held.shape), tuple(held.stride())


def _fill_selected(tensor: DTensor, dim: int, index: int, value: float = 0.0) -> None:
    """`tensor.select(dim, index).fill_(value)` on what this process holds; DTensor itself fills a copy."""
    place = (_places(tensor)[dim] == index % tensor.shape[dim]).nonzero()
    if len(place):
        tensor._local_tensor.select(dim, int(place)).fill_(value)


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[float, float]:
    names = ("mean", "std") if func is torch.ops.aten.normal_.default else ("from", "to")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    return float(given.get(names[0], 0.0)), float(given.get(names[1], 1.0))


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "generator"}


def _places(tensor: Tensor) -> list[Tensor]:
    """For each dimension of `tensor`, the places along it that this process holds, in the order in which it does."""
    places = [torch.arange(size) for size in (tensor.shape or (1,))]
    if not isinstance(tensor, DTensor):
        return places
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return [place[:0] for place in places]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError("a tensor that is a partial sum on each rank cannot be initialized")
        dim = placement.dim % tensor.ndim  # type: ignore[attr-defined]
        groups = placement.split_factor if isinstance(placement, _StridedShard) else 1
        held = [_part(group, mesh.size(axis), coordinate[axis]) for group in places[dim].chunk(groups)]
        places[dim] = torch.cat(held)
    return places


def _part(places: Tensor, count: int, number: int) -> Tensor:
    """What torch's sharding gives number `number` of `count`: runs of equal size, the last ones short or empty."""
    size = -(-len(places) // count)
    return places[number * size : (number + 1) * size]


def _view_index(view: Tensor, owner: _Named, places: Sequence[Tensor]) -> Tensor:
    """Flat places in the whole tensor of the elements of a view into the part of it that is here."""
    base = local(owner.tensor)
    if not base.is_contiguous():
        raise NotImplementedError(f"a part of {owner.name}, which is not contiguous, is filled. Fill the whole tensor")
    offset = torch.full((1,) * max(1, view.ndim), int(view.storage_offset() - base.storage_offset()), dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        offset = offset + (torch.arange(size) * stride).view([-1 if one == dim else 1 for one in range(view.ndim)])
    rest, flat, step = offset.reshape(-1), torch.zeros(1, dtype=torch.int64), 1
    for place, size in reversed(list(zip(places, owner.tensor.shape, strict=True))):
        flat, rest, step = flat + place[rest % len(place)] * step, rest // len(place), step * size
    return flat.to(view.device)


def _in_runs(
    key: tuple[int, int],
    places: Sequence[Tensor],
    shape: Sequence[int],
    draw: int,
    kind: Any,
    result: Tensor,
    finish: Callable[[Tensor], Tensor],
) -> None:
    """Values for the product of `places` in a tensor of `shape`, put into the flat `result` in runs of neighbours."""
    length, outer = 1, len(places)
    while outer and len(places[outer - 1]) == shape[outer - 1]:  # whole trailing dimensions lie in one run
        outer -= 1
        length *= shape[outer]
    step = length
    starts = torch.zeros(1, dtype=torch.int64)
    if outer:
        last = places[outer - 1]
        if len(last) and int(last[-1] - last[0]) + 1 == len(last):
            starts, length, step, outer = last[:1] * length, length * len(last), length * shape[outer - 1], outer - 1
    for dim in reversed(range(outer)):
        starts = (places[dim].view(-1, 1) * step + starts.view(1, -1)).reshape(-1)
        step *= shape[dim]
    if not len(result):
        return
    device = result.device
    chunk = _CHUNK.get(device.type, 1 << 24)
    rows = max(1, chunk // length)
    for row in range(0, len(starts), rows):
        here = starts[row : row + rows].to(device)
        for column in range(0, length, chunk):
            size = min(chunk, length - column)
            block = result[row * length : (row + len(here)) * length].view(len(here), length)
            block[:, column : column + size] = finish(_runs(key, here + column, size, draw, kind))


def _runs(key: tuple[int, int], starts: Tensor, length: int, draw: int, kind: Any) -> Tensor:
    """Values `[runs, length]` of the elements from each start on: four to a counter, neighbours share one."""
    first = starts >> 2
    number = (length + 6) >> 2
    counters = first.unsqueeze(1) + torch.arange(number, device=starts.device)
    values = kind(philox(counters, draw, key)).view(len(starts), 4 * number)
    shift = starts & 3
    if bool((shift == shift[0]).all()):
        begin = int(shift[0])
        return values[:, begin : begin + length]
    return values.gather(1, shift.unsqueeze(1) + torch.arange(length, device=starts.device))


def _at(key: tuple[int, int], index: Tensor, draw: int, kind: Any) -> Tensor:
    parts = [_runs(key, part, 1, draw, kind).view(-1) for part in index.split(1 << 16)]
    return torch.cat(parts) if parts else torch.empty(0, device=index.device)


def _key(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


_FILLS = {torch.ops.aten.normal_.default: normals, torch.ops.aten.uniform_.default: uniforms}
_CONSTANT = (torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar)
_FACTORIES = {
    torch.ops.aten.randn.default: normals,
    torch.ops.aten.rand.default: uniforms,
    torch.ops.aten.randn_like.default: normals,
    torch.ops.aten.rand_like.default: uniforms,
}
_INHERITING = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.where.self,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
)
"""What makes temporary tensors after one of `named`."""
