"""The device of `tests.fake.device` as one that units are copied to."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from sparseautomodel.devices import Accelerator
from sparseautomodel.mapped import MappedFiles
from sparseautomodel.units import Unit
from tests.fake.device import DEVICE, meter


class FakeAccelerator(Accelerator):
    """`Accelerator` on the fake device, which has no streams: copies are done when they are asked for."""

    def __init__(self, files: MappedFiles | None = None, weights_only: bool = False) -> None:
        """
        Args:
            weights_only: as if calls needed no memory besides.
        """
        self._weights_only = weights_only
        self.device, self._files, self._pins = DEVICE, files, False
        self._base = meter.live
        self._homes: MutableMapping[Unit, Tensor] = weakref.WeakKeyDictionary()
        self._starts: MutableMapping[int, Tensor] = weakref.WeakValueDictionary()
        self._arena = torch.empty(0, dtype=torch.uint8)
        self.home = "file" if files else "host"

    def copy(self, unit: Unit, memory: Tensor, used: Any) -> None:
        memory[: unit.nbytes].copy_(self._homes[unit])
        self.drop(unit)

    def mark(self) -> None:
        return None

    def settle(self) -> None:
        pass

    def in_use(self) -> int:
        return 0 if self._weights_only else meter.live - self._base

    def peak(self) -> int:
        return 0 if self._weights_only else meter.peak - self._base

    def reset_peak(self) -> None:
        meter.peak = meter.live
