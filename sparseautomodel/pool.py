"""Several models under one budget of one device: those used last are on it, the others wait at home.

name -> entry -> room for it: models that nobody uses are parked, the least recently used first -> lease
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

import sparseautomodel.auto as auto
from sparseautomodel.arguments import accelerator, check_device
from sparseautomodel.budgeted import Home
from sparseautomodel.devices import Device
from sparseautomodel.plan import size_text
from sparseautomodel.recipe import Recipe
from sparseautomodel.residency import Residency
from sparseautomodel.save import parse_size

_PARKED = "this model of a ModelPool is not leased, and its weights are not on the device. Write: with pool.lease(name)"
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class PooledModel:
    """One model of a pool."""

    name: str
    source: str
    nbytes: int
    """Of all its weights, at home."""
    least_nbytes: int
    """Of the budget, that it can run with."""
    reserved_nbytes: int
    """Of the budget, that it has now: weights, slots and working memory. 0: all of its weights are at home alone."""
    live_nbytes: int
    """Of its weights on the device, and of slots for them."""
    leases: int
    pinned: bool
    shares_with: tuple[str, ...]
    """Models that have the same weights of home."""


@dataclass(frozen=True)
class PoolReport:
    """What a pool holds. `print(report)` is a table."""

    device: str
    budget: int
    home_nbytes: int
    """Of the weights at home, those that several models share counted once."""
    models: tuple[PooledModel, ...]
    """The one that was used last comes last."""

    @property
    def reserved_nbytes(self) -> int:
        return sum(model.reserved_nbytes for model in self.models)

    @property
    def live_nbytes(self) -> int:
        return sum(model.live_nbytes for model in self.models)

    @property
    def free_nbytes(self) -> int:
        """Of the budget, that no model has."""
        return self.budget - self.reserved_nbytes

    def to_dict(self) -> dict[str, Any]:
        sums = {name: getattr(self, name) for name in ("reserved_nbytes", "live_nbytes", "free_nbytes")}
        return asdict(self) | sums

    def __str__(self) -> str:
        lines = [
            f"on {self.device}: {size_text(self.reserved_nbytes)} of {size_text(self.budget)} in use, "
            f"{size_text(self.live_nbytes)} of it weights; at home {size_text(self.home_nbytes)}"
        ]
        for model in self.models:
            shared = f", one copy with {', '.join(model.shares_with)}" if model.shares_with else ""
            lines.append(f"  {model.name:24} {size_text(model.nbytes):>9}  {_state(model)}{shared}")
        return "\n".join(lines)


@dataclass(eq=False)
class _Entry:
    name: str
    source: str
    request: Any
    """What was loaded, to know the same again; None: it is not shared."""
    home: Home
    model: PreTrainedModel
    residency: Residency
    wanted: int | None
    """Bytes of the budget, as the user gave them."""
    share: int = 0
    leases: int = 0
    pinned: bool = False
    moving: bool = False
    """A thread is bringing it, parking it or taking it out."""
    used: int = 0

    @property
    def held(self) -> bool:
        return self.leases > 0 or self.pinned


class ModelPool:
    """Models that have a `device_budget` together. All methods may be called from several threads.

    A model is leased while it is used. What a lease needs is made free by parking models that are neither leased nor
    pinned, the least recently used first. A model that has all its room runs without hooks; where leased and pinned
    models leave less, but enough to stream, it streams.
    """

    def __init__(self, *, device: torch.device | str | Device | None = None, budget: int | str) -> None:
        """
        Args:
            device: `"cuda"`, `"cpu"`, ..., or what stands for one (`sparseautomodel.devices.Device`); None is the
                accelerator there is, else the processor.
            budget: bytes, or text such as "20GiB", for the weights of all models, their slots, and what calls need.

        >>> pool = ModelPool(device="cuda", budget="20GiB")  # doctest: +SKIP
        >>> pool.load("model-folder", "chat", recipe="w4a16")  # doctest: +SKIP
        >>> with pool.lease("chat") as model: model.generate(**inputs)  # doctest: +SKIP
        """
        self._budget = parse_size(budget)
        if self._budget <= 0:
            raise ValueError(f"budget={budget!r} must be bytes, or text such as '20GiB'")
        self._place: Device | None = None
        if device is None or isinstance(device, (str, torch.device)):
            self._device = torch.device(device) if device is not None else accelerator() or torch.device("cpu")
            check_device(self._device)
        else:
            self._place, self._device = device, device.device
        self._entries: dict[str, _Entry] = {}
        self._changed = threading.Condition()
        self._loading = threading.Lock()
        self._turns = itertools.count(1)

    def load(
        self,
        name_or_path: str | os.PathLike[str],
        name: str | None = None,
        *,
        auto_class: Any = None,
        device_budget: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        """Read a model, to be leased by its name. Nothing comes to the device yet.

        A checkpoint that another model of the pool was loaded from, with the same arguments, is not read again: both
        have their weights of home in common, which must not be changed in place then. It starts as the first one is by
        then: its settings and hooks too.

        Args:
            name: None is `name_or_path`.
            auto_class: whose `from_pretrained` loads it; None is `SparseAutoModelForCausalLM`.
            device_budget: of the pool's, what this model is given while it is leased, such as more than its weights
                for long inputs, or less so that others fit beside it; None is what all of its weights and a call of
                512 tokens need.
            kwargs: all else that `from_pretrained` takes, `recipe` and `dtype` above all.

        Raises:
            ValueError: the name is taken, or the least that the model needs is more than the budget.
        """
        name = str(name_or_path) if name is None else name
        cls: Any = auto_class or auto.SparseAutoModelForCausalLM  # type: ignore[attr-defined]
        is_ours = isinstance(cls, type) and issubclass(cls, auto.SparseAutoModel)
        if not is_ours:
            raise ValueError(
                f"auto_class={cls!r} loads no compressed models. Give one of sparseautomodel, such as "
                "auto_class=SparseAutoModelForSequenceClassification"
            )
        for given in ("device", "device_map", "output_loading_info"):
            if given in kwargs:
                raise ValueError(f"{given}={kwargs[given]!r}: a pool has its models on {self._device}; leave it out")
        wanted = None if device_budget is None else parse_size(device_budget)
        if wanted is not None and not 0 < wanted <= self._budget:
            raise ValueError(f"device_budget={device_budget!r} of {name!r} must be within the pool's {self._budget:,}")
        request = _request(name_or_path, cls, kwargs)
        with self._loading:  # one after another, so that the second of two finds what the first has read
            if name in self._entries:
                raise ValueError(f"{name!r} is in the pool already. Write: pool.load(path, 'another name')")
            first = next((one for one in self._entries.values() if request and one.request == request), None)
            model = first.residency.twin() if first is not None else None
            if first is None or model is None:
                home = Home(self._device, wanted or self._budget, _PARKED, self._place)
                model = cls.from_pretrained(name_or_path, device_map="cpu", device_budget=home, **kwargs)
            else:
                home = first.home
                home.attach(model, wanted or self._budget)
            residency: Any = model.residency
            entry = _Entry(name, str(name_or_path), request, home, model, residency, wanted)
            residency.neighbors = functools.partial(self._live_beside, entry)
            with self._changed:
                self._entries[name] = entry

    @contextlib.contextmanager
    def lease(self, name: str, timeout: float | None = 60.0) -> Iterator[PreTrainedModel]:
        """The model, ready to be called, and not to be parked until the `with` block is left.

        Args:
            timeout: seconds to wait while leased and pinned models leave too little room; None: without end.

        Raises:
            ValueError: there is no model of this name.
            TimeoutError: there was no room in time. Says who has it, and what would fit.
            torch.OutOfMemoryError: the device had less memory than the budget. The model is parked then.

        >>> with pool.lease("chat", timeout=5) as model: model.generate(**inputs)  # doctest: +SKIP
        """
        entry = self._hold(name, timeout, pin=False)
        try:
            yield entry.model
        finally:
            with self._changed:
                entry.leases -= 1
                entry.used = next(self._turns)
                self._changed.notify_all()

    def pin(self, name: str, timeout: float | None = 60.0) -> None:
        """Bring a model to the device and keep it there, leased or not, until `unpin`. Errors are those of `lease`."""
        self._hold(name, timeout, pin=True)

    def unpin(self, name: str) -> None:
        """Let a model be parked again when another needs its room.

        Raises:
            ValueError: it is not pinned.
        """
        with self._changed:
            entry = self._find(name)
            if not entry.pinned:
                pinned = ", ".join(repr(one.name) for one in self._entries.values() if one.pinned) or "none"
                raise ValueError(f"{name!r} is not pinned. Pinned are: {pinned}")
            entry.pinned = False
            self._changed.notify_all()

    def unload(self, name: str) -> None:
        """Forget a model. Its memory is given back, at home unless another model shares it.

        Who still holds the object has a plain model in host memory.

        Raises:
            ValueError: it is leased or pinned, or there is none of this name.
        """
        with self._loading:  # nobody is making another model of its weights
            with self._changed:
                while (entry := self._find(name)).moving:
                    self._changed.wait()
                if entry.held:
                    state = _state(self._row(entry))
                    raise ValueError(f"{name!r} {state}. Leave its leases, or unpin({name!r}), then unload({name!r})")
                entry.moving = True
            entry.residency.detach()
            entry.residency.neighbors = None
            with self._changed:
                del self._entries[name]
                self._changed.notify_all()

    def report(self) -> PoolReport:
        """What is on the device, for whom, and what is at home."""
        with self._changed:
            entries = sorted(self._entries.values(), key=lambda entry: entry.used)
            home: dict[int, int] = {}
            for entry in entries:
                home |= entry.residency.homes
            rows = tuple(map(self._row, entries))
            return PoolReport(str(self._device), self._budget, sum(home.values()), rows)

    def _hold(self, name: str, timeout: float | None, pin: bool) -> _Entry:
        """Have a model on the device, with a lease or a pin more."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                entry = self._find(name)
                found = None if entry.moving else self._room(entry)
                if found is not None:
                    break
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(self._full(entry, timeout))
                self._changed.wait(left)
            share, parked = found
            is_there = share == entry.share
            for one in parked:
                one.share = 0
            entry.share = share
            was_pinned = entry.pinned
            entry.leases, entry.pinned = entry.leases + (not pin), entry.pinned or pin
            entry.used = next(self._turns)
            if is_there:
                return entry
            for one in (entry, *parked):
                one.moving = True
        try:
            for one in parked:
                one.residency.park(_PARKED)
            entry.residency.set_budget(share)
        except BaseException:
            entry.residency.park(_PARKED)
            with self._changed:
                entry.share = 0
                entry.leases, entry.pinned = entry.leases - (not pin), was_pinned
            raise
        finally:
            with self._changed:
                for one in (entry, *parked):
                    one.moving = False
                self._changed.notify_all()
        return entry

    def _room(self, entry: _Entry) -> tuple[int, list[_Entry]] | None:
        """Bytes that a model can have now, and whom to park for them; None: there is not enough yet."""
        if entry.held and entry.share:
            return entry.share, []
        wanted = min(entry.wanted or entry.residency.whole_nbytes, self._budget)
        others = [one for one in self._entries.values() if one is not entry and one.share]
        idle = sorted((one for one in others if not one.held and not one.moving), key=lambda one: one.used)
        free, parked = self._budget - sum(one.share for one in others), []
        for one in idle:
            if free < wanted:
                parked.append(one)
                free += one.share
        share = min(free, wanted)
        return (share, parked) if share >= entry.residency.least_nbytes else None

    def _live_beside(self, entry: _Entry) -> int:
        """What is of others: their shares, which they are bringing or may use in a call; more where one has more."""
        others = [one for one in list(self._entries.values()) if one is not entry]
        return sum(max(one.share, one.residency.live_nbytes) for one in others)

    def _find(self, name: str) -> _Entry:
        if name not in self._entries:
            names = ", ".join(map(repr, self._entries)) or "no model"
            raise ValueError(f"{name!r} is not in the pool, which has {names}. Write: pool.load({name!r})")
        return self._entries[name]

    def _row(self, entry: _Entry) -> PooledModel:
        homes = entry.residency.homes
        sharing = [one.name for one in self._entries.values() if one is not entry and one.home is entry.home]
        return PooledModel(
            entry.name,
            entry.source,
            sum(homes.values()),
            entry.residency.least_nbytes,
            entry.share,
            entry.residency.live_nbytes,
            entry.leases,
            entry.pinned,
            tuple(sharing),
        )

    def _full(self, entry: _Entry, timeout: float | None) -> str:
        if entry.moving:
            return f"{entry.name!r} was still on its way, by another thread, after {timeout} s. Give a longer timeout"
        rows = [self._row(one) for one in self._entries.values() if one is not entry and one.share]
        taken = "; ".join(f"{row.name!r} {_state(row)}" for row in rows) or "no others"
        there = self._budget - sum(row.reserved_nbytes for row in rows if row.leases or row.pinned)
        return (
            f"no room for {entry.name!r} within {timeout} s: it needs at least {entry.residency.least_nbytes:,} bytes, "
            f"{entry.residency.whole_nbytes:,} without streaming, and of budget={self._budget:,} {there:,} are not "
            f"held. There are: {taken}. Leave a lease, unpin a model, or give the pool a larger budget"
        )


def _state(model: PooledModel) -> str:
    held = [f"leased {model.leases} x"] * bool(model.leases) + ["pinned"] * model.pinned
    where = f"has {size_text(model.reserved_nbytes)}" if model.reserved_nbytes else "parked"
    return ", ".join([where, *held])


def _request(name_or_path: Any, cls: Any, kwargs: dict[str, Any]) -> Any:
    """What says that the same is loaded again; None where that cannot be told."""
    rest = {key: value for key, value in kwargs.items() if key != "recipe"}
    if not all(isinstance(value, _PLAIN) for value in rest.values()):
        return None
    recipe = None if kwargs.get("recipe") is None else Recipe.load(kwargs["recipe"])
    folder = os.path.join(name_or_path, rest.get("subfolder") or "")
    files = []
    if os.path.isdir(folder):  # written anew, they are another checkpoint
        found = sorted((one for one in os.scandir(folder) if one.is_file()), key=lambda one: one.name)
        files = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in found]
        name_or_path = os.path.realpath(folder)
    return str(name_or_path), files, cls, recipe, rest
