"""Devices for tests of what comes and goes under a budget, without a GPU. Each is a `sparseautomodel.devices.Device`.

- `LabelledSlots`: copies in host memory. A copy that was not waited for, a slot that was given up and, on demand, the
  weights of home are filled with numbers that spoil every result, so that equal results prove which copy was used.
- `ClockDevice`: copies and computations take the time that is given, on two engines. Nothing else is timed.
- `tests.fake.device`: a device of torch that counts, refuses mixed devices and runs out of memory, with
  `tests.fake.accelerator.FakeAccelerator`; for a process of its own.

    model.residency = Residency(model, LabelledSlots(), budget)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseautomodel.units import Unit

POISON = 0xFF
"""All bits: NaN as a floating number of any size, -1 as an integer."""


class LabelledSlots:
    """Slots in host memory that show which of them was read."""

    copies_values, home = True, "host"

    def __init__(self, poison_homes: bool = False) -> None:
        self.device, self._poison_homes = torch.device("cpu"), poison_homes
        self.live = self.peak_live = 0
        self._values: dict[Unit, Tensor] = {}
        self._memory_of: dict[Unit, Tensor] = {}
        self._sizes: dict[int, int] = {}
        self.copied: list[str] = []
        """Names of units, one a copy."""

    def adopt(self, unit: Unit) -> None:
        home = torch.empty(unit.nbytes, dtype=torch.uint8)
        unit.take_home(home)
        self._values[unit] = home.clone()
        if self._poison_homes and not unit.gathered:
            home.fill_(POISON)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def copy(self, unit: Unit, memory: Tensor, used: Any) -> tuple[Tensor, Tensor]:
        memory.fill_(POISON)  # until somebody waits for it
        self._memory_of[unit] = memory
        self.copied.append(unit.name)
        return memory[: unit.nbytes], self._values[unit]

    def wait(self, ready: tuple[Tensor, Tensor]) -> None:
        ready[0].copy_(ready[1])

    def mark(self) -> None:
        return None

    def build(self, unit: Unit, memory: Tensor) -> list[Any]:
        return unit.build(unit.cut(memory))

    def drop(self, unit: Unit) -> None:
        if unit in self._memory_of:
            self._memory_of.pop(unit).fill_(POISON)

    def settle(self) -> None:
        pass

    def in_use(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass


class ClockDevice(LabelledSlots):
    """Time as it would pass with one engine that copies and one that computes, the host far ahead of both."""

    def __init__(self, bandwidth: float) -> None:
        super().__init__()
        self.now = 0.0
        """When what was computed so far is done."""
        self._bandwidth, self._copied = bandwidth, 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def copy(self, unit: Unit, memory: Tensor, used: Any) -> Any:
        pair = super().copy(unit, memory, used)
        self._copied = max(self._copied, used or 0.0) + unit.nbytes / self._bandwidth
        return pair, self._copied

    def wait(self, ready: Any) -> None:
        pair, when = ready
        super().wait(pair)
        self.now = max(self.now, when)

    def mark(self) -> Any:
        return self.now
