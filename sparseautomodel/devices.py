"""What holds the weights while they are used: an accelerator that they are copied to, or mapped files of the host.

`residency` decides what comes and goes, and calls one of these for it. Tests put others in their place
(tests/rigs.py): all that is asked of a device is here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor

from sparseautomodel.mapped import MappedFiles, Run
from sparseautomodel.units import Unit

_PINNED = 1 << 28
"""Bytes of pinned memory taken at a time: torch rounds each piece up to a power of two."""


class Device(Protocol):
    """Memory in which units are brought. A ticket is whatever says when something is done; None: it is."""

    device: torch.device
    copies_values: bool
    """Whether modules are given other tensors than those of home while they run."""
    home: str
    """Where weights are when they are not on the device: `pinned`, `host` or `file`."""

    def adopt(self, unit: Unit) -> None:
        """Bring the weights of a unit to where they are copied from."""

    def allocate(self, nbytes: int) -> Any:
        """Room for units, of which one is in it at a time.

        Raises:
            torch.OutOfMemoryError: there is none.
        """

    def copy(self, unit: Unit, memory: Any, used: Any) -> Any:
        """Start to bring a unit into `memory` once what `used` stands for is done; a ticket for it."""

    def wait(self, ready: Any) -> None:
        """Let what is computed from now on wait for a copy."""

    def mark(self) -> Any:
        """A ticket for what has been computed so far."""

    def build(self, unit: Unit, memory: Any) -> list[Any]:
        """What modules are to hold while the unit is in `memory`."""

    def drop(self, unit: Unit) -> None:
        """A unit is no longer in its memory."""

    def settle(self) -> None:
        """Wait for all that has been started: memory is about to be freed."""

    def in_use(self) -> int:
        """Bytes in use now, by the weights and by whatever else there is."""

    def peak(self) -> int:
        """The most bytes in use at once since `reset_peak`; 0 where it cannot be told."""

    def reset_peak(self) -> None: ...


class Accelerator:
    """A device of torch with streams: units are copied on a stream of their own, from pinned memory where there is."""

    copies_values = True

    def __init__(self, device: torch.device, files: MappedFiles | None = None) -> None:
        """
        Args:
            files: where weights have their home; None: in memory.
        """
        self.device, self._files = device, files
        self._copies = torch.Stream(device)
        self._homes: MutableMapping[Unit, Tensor] = weakref.WeakKeyDictionary()
        self._starts: MutableMapping[int, Tensor] = weakref.WeakValueDictionary()
        """Address of a unit's home -> it."""
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._pins = files is None
        self.home = "file" if files else "pinned"

    def adopt(self, unit: Unit) -> None:
        memory = self._starts.get(unit.parts()[0].data_ptr())
        if memory is None or not unit.lies_in(memory):  # else another model has it at home already
            memory = self._home_memory(unit.nbytes)
            unit.take_home(memory)
        self._homes[unit] = self._starts[memory.data_ptr()] = memory
        self.drop(unit)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, unit: Unit, memory: Tensor, used: Any) -> Any:
        with self._copies:
            if used is not None:
                self._copies.wait_event(used)
            memory[: unit.nbytes].copy_(self._homes[unit], non_blocking=True)
            if self._files is not None:
                self._files.drop(self._files.runs([self._homes[unit]]))
            return self._copies.record_event()

    def wait(self, ready: Any) -> None:
        if ready is not None:
            torch.accelerator.current_stream(self.device).wait_event(ready)

    def mark(self) -> Any:
        return torch.accelerator.current_stream(self.device).record_event()

    def build(self, unit: Unit, memory: Tensor) -> list[Any]:
        return unit.build(unit.cut(memory))

    def drop(self, unit: Unit) -> None:
        if self._files is not None:
            self._files.drop(self._files.runs([self._homes[unit]]))

    def settle(self) -> None:
        torch.accelerator.synchronize(self.device)

    def in_use(self) -> int:
        return torch.accelerator.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def _home_memory(self, nbytes: int) -> Tensor:
        if self._files is not None:
            return self._files.reserve(nbytes)
        if self._pins and len(self._arena) < nbytes:
            try:
                self._arena = torch.empty(max(_PINNED, nbytes), dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # the system allows no more of it, or the device knows none
                self._pins, self.home = False, "host"
        if not self._pins:
            return torch.empty(nbytes, dtype=torch.uint8)
        taken, self._arena = self._arena[:nbytes], self._arena[nbytes:]
        return taken


class MappedHost:
    """A processor without an accelerator: weights are pages of mapped files, brought by a thread that runs ahead.

    Modules keep their tensors. A page that nobody has brought comes when it is touched, so that nothing can go wrong
    but time, and memory until the unit is dropped.
    """

    copies_values = False
    home = "file"

    def __init__(self, files: MappedFiles) -> None:
        self.device, self._files = torch.device("cpu"), files
        self._runs: MutableMapping[Unit, list[Run]] = weakref.WeakKeyDictionary()
        self._versions: MutableMapping[Unit, list[int]] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakSet[Unit] = weakref.WeakSet()
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "weights")
        self._base = 0

    def adopt(self, unit: Unit) -> None:
        self._keep(unit)
        if unit.gathered:
            self._files.touch_singly(self._runs[unit])
        self.drop(unit)
        self._base = _anonymous()

    def allocate(self, nbytes: int) -> None:
        return None

    def copy(self, unit: Unit, memory: None, used: Any) -> concurrent.futures.Future[None]:
        first, runs = unit not in self._seen and not unit.gathered, self._runs[unit]
        self._seen.add(unit)
        return self._reader.submit(self._files.bring_first if first else self._files.bring, runs)

    def wait(self, ready: concurrent.futures.Future[None]) -> None:
        ready.result()

    def mark(self) -> None:
        return None

    def build(self, unit: Unit, memory: None) -> list[Any]:
        return []

    def drop(self, unit: Unit) -> None:
        if [value.home._version for value in unit.values] != self._versions[unit]:
            self._keep(unit)  # somebody has changed them in place
        self._files.drop(self._runs[unit])

    def settle(self) -> None:
        self._reader.submit(int).result()

    def in_use(self) -> int:
        return max(0, _anonymous() - self._base)

    def peak(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def _keep(self, unit: Unit) -> None:
        changed = self._versions.get(unit)
        for number, value in enumerate(unit.values):
            anew = changed is not None and changed[number] != value.home._version
            value.rebase([self._files.keep(part, anew) for part in value.parts])
        self._runs[unit] = self._files.runs(unit.parts())
        self._versions[unit] = [value.home._version for value in unit.values]


def _anonymous() -> int:
    """Bytes of memory of this process that are no file's; 0 where the system does not say."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
