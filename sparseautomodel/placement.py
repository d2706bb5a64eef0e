"""Which units stay on the device under a budget, and how large the slots are that the others come and go through."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FIXED = "fixed"
"""The kind of a unit that is always there."""


class Sized(Protocol):
    """What has to be known of a unit to place it."""

    kind: str

    @property
    def nbytes(self) -> int: ...

    @property
    def level(self) -> int:
        """1 for what is brought while a unit of level 0 is in use."""

    @property
    def streamable(self) -> bool:
        """Whether it comes as a whole when it is not resident; False: by rows."""


@dataclass(frozen=True)
class Placement:
    """Units that stay and units that come and go, in the order in which they run, and slots for the latter."""

    resident: tuple[Any, ...]
    streamed: tuple[Any, ...]
    slots: tuple[tuple[int, ...], ...]
    """Bytes of each slot, level by level."""

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(unit.nbytes for unit in self.resident) + sum(map(sum, self.slots))


def place(units: Sequence[Sized], nbytes: int) -> Placement:
    """The placement that streams least within `nbytes`; the smallest there is where even that is more.

    Resident blocks are spread evenly over those that are streamed: then two slots suffice for copies to go on while
    resident blocks compute. Blocks come before experts, of which few run. What of the rest finds room stays too;
    embeddings, of which few rows are read, come last.
    """
    free = [unit for unit in units if unit.kind != FIXED]
    blocks = [unit for unit in free if unit.streamable and unit.level == 0]
    experts = [unit for unit in free if unit.streamable and unit.level == 1]
    rows = [unit for unit in free if not unit.streamable]
    everything = _placement(units, free, 2)
    if everything.nbytes <= nbytes:
        return everything
    for depth in (2, 1):

        def fits(kept: Sequence[Any], depth: int = depth) -> bool:
            return _placement(units, kept, depth).nbytes <= nbytes

        if not fits([]):
            continue
        kept = _most(blocks, [], fits)
        if len(kept) == len(blocks):
            kept = _most(experts, kept, fits)
        others = [unit for unit in [*sorted(blocks, key=lambda unit: -unit.nbytes), *rows] if unit not in kept]
        for unit in others:
            if fits([*kept, unit]):
                kept.append(unit)
        return _placement(units, kept, depth)
    return _placement(units, [], 1)


def spread(units: Sequence[Any], count: int) -> list[Any]:
    """`count` of the units, so that the others lie at even distances."""
    away = len(units) - count
    streamed = {min(round(number * len(units) / away), len(units) - 1) for number in range(away)}
    return [unit for number, unit in enumerate(units) if number not in streamed]


def _most(units: Sequence[Any], kept: Sequence[Any], fits: Any) -> list[Any]:
    """`kept` and as many of `units` as fit beside them."""
    count = bisect.bisect_left(range(1, len(units) + 1), True, key=lambda n: not fits([*kept, *spread(units, n)]))
    return [*kept, *spread(units, count)]


def _placement(units: Sequence[Sized], kept: Collection[Any], depth: int) -> Placement:
    stays = set(map(id, kept)) | {id(unit) for unit in units if unit.kind == FIXED}
    streamed = [unit for unit in units if id(unit) not in stays]
    slots = []
    for level in (0, 1):
        whole = [unit.nbytes for unit in streamed if unit.streamable and unit.level == level]
        slots.append(_slots(sorted(whole, reverse=True), depth))
    return Placement(tuple(unit for unit in units if id(unit) in stays), tuple(streamed), tuple(slots))


def _slots(sizes: Sequence[int], depth: int) -> tuple[int, ...]:
    """One slot takes any unit. The second takes most: a head that is far larger than the blocks waits for the first."""
    return tuple(sizes[:1]) if depth == 1 else tuple(sizes[:1]) + tuple(sizes[len(sizes) // 2 :][: len(sizes) > 1])
