"""Slots that units come and go through, in a ring: while one is in use, the next unit is brought to another."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparseautomodel.devices import Device
from sparseautomodel.units import Unit


@dataclass(eq=False)
class Slot:
    """Memory for one unit at a time."""

    nbytes: int
    memory: Any
    used: Any = None
    """The ticket of the last use of what is in it."""
    unit: Unit | None = None
    ready: Any = None
    in_use: bool = False
    awaited: bool = False
    """The unit was brought ahead and has not run yet."""
    turn: int = 0
    """When it was last in use."""
    built: dict[Unit, list[Any]] = field(default_factory=dict)
    """What modules hold while a unit is in it, made once a unit."""


@dataclass
class Traffic:
    """What has been copied of one unit, and how long forwards waited for it."""

    copies: int = 0
    nbytes: int = 0
    stalled: float = 0.0

    def add(self, nbytes: int) -> None:
        self.copies, self.nbytes = self.copies + 1, self.nbytes + nbytes

    def add_rows(self, nbytes: int) -> None:
        self.nbytes += nbytes


class Ring:
    """The slots of one level, and the order in which its units have been running."""

    def __init__(self, device: Device, traffic: dict[Unit, Traffic], units: Sequence[Unit], ahead: bool) -> None:
        """
        Args:
            units: those that come and go, in the order in which they are expected.
            ahead: whether to bring units before they are asked for.
        """
        self._device, self._traffic, self._ahead = device, traffic, ahead
        self.slots: list[Slot] = []
        self._next = dict(zip(units, [*units[1:], *units[:1]], strict=True)) if ahead else {}
        self._last: Unit | None = None
        self._turns = itertools.count(1)

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def add(self, nbytes: int) -> Slot:
        slot = Slot(nbytes, self._device.allocate(nbytes), self._device.mark())
        self.slots.append(slot)
        return slot

    def clear(self) -> None:
        """Give all memory back."""
        for slot in self.slots:
            if slot.unit is not None:
                self._device.drop(slot.unit)
        self.slots.clear()

    def enter(self, unit: Unit) -> list[Any]:
        """The unit runs now; what its modules are to hold.

        Raises:
            torch.OutOfMemoryError: all slots are in use, and there is no memory for one more.
        """
        slot = self._holding(unit)
        if slot is None:
            slot = self._free(unit, demanded=True) or self._replace(unit)
            self._fetch(slot, unit)
        started = time.perf_counter()
        self._device.wait(slot.ready)
        self._traffic[unit].stalled += time.perf_counter() - started
        if unit not in slot.built:
            slot.built[unit] = self._device.build(unit, slot.memory)
        slot.in_use, slot.awaited, slot.turn = True, False, next(self._turns)
        if self._ahead and self._last is not None:
            self._next[self._last] = unit
        self._last = unit
        self.look_ahead()
        return slot.built[unit]

    def leave(self, unit: Unit) -> None:
        """The unit does not run any more. It stays in its slot until that is needed."""
        slot = self._holding(unit)
        if slot is not None and slot.in_use:
            slot.in_use, slot.used = False, self._device.mark()
            self.look_ahead()

    def look_ahead(self) -> None:
        """Bring what is expected next to slots whose unit has run."""
        unit = self._last
        for _ in self.slots if self._ahead else ():
            unit = self._next.get(unit) if unit is not None else None
            if unit is None:
                return
            if (slot := self._holding(unit)) is not None:
                slot.awaited = slot.awaited or not slot.in_use
                continue
            free = self._free(unit, demanded=False)
            if free is None:
                return
            self._fetch(free, unit)
            free.awaited = True

    def _holding(self, unit: Unit) -> Slot | None:
        return next((slot for slot in self.slots if slot.unit is unit), None)

    def _free(self, unit: Unit, demanded: bool) -> Slot | None:
        """The slot to bring a unit to: an empty one, else the one whose unit ran longest ago.

        One that waits for its unit to run is given up only for a unit that runs now.
        """
        fitting = [slot for slot in self.slots if not slot.in_use and slot.nbytes >= unit.nbytes]
        fitting = [slot for slot in fitting if demanded or not slot.awaited]
        return min(fitting, key=lambda one: (one.awaited, one.unit is not None, one.turn, one.nbytes), default=None)

    def _replace(self, unit: Unit) -> Slot:
        """A slot for a unit that no slot is large enough for, or that runs inside of those that have one."""
        for slot in [slot for slot in self.slots if not slot.in_use and slot.nbytes < unit.nbytes]:
            if slot.unit is not None:
                self._device.drop(slot.unit)
            self._device.settle()
            self.slots.remove(slot)
        return self.add(unit.nbytes)

    def _fetch(self, slot: Slot, unit: Unit) -> None:
        if slot.unit is not None:
            self._device.drop(slot.unit)
        slot.unit = None
        slot.ready = self._device.copy(unit, slot.memory, slot.used)
        slot.unit = unit
        self._traffic[unit].add(unit.nbytes)


def carried(rings: Iterable[Ring]) -> Iterator[Unit]:
    """The units that are in slots now."""
    return (slot.unit for ring in rings for slot in ring.slots if slot.unit is not None)
