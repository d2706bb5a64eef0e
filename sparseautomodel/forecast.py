"""What will be resident under a `device_budget`, what a forward will stream, and how fast that can be at best."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparseautomodel.architecture import Architecture
from sparseautomodel.checkpoint import LazyTensor, StoredTensor
from sparseautomodel.mapped import MappedFiles
from sparseautomodel.placement import FIXED, place
from sparseautomodel.save import parse_size
from sparseautomodel.units import SMALL, find_units
from sparseautomodel.working import WorkingMemory

_SAMPLE = 1 << 26


@dataclass(frozen=True)
class Forecast:
    """A model under a budget, before anything is loaded."""

    budget: int
    least_nbytes: int
    """The smallest budget that there is."""
    resident_nbytes: int
    staging_nbytes: int
    working_nbytes: int
    streamed_nbytes: int
    """Bytes that a forward, and so each token of a decoded text, brings."""
    bandwidth: float
    """Bytes a second at which weights come on this machine, measured."""

    @property
    def fits(self) -> bool:
        return self.budget >= self.least_nbytes

    @property
    def seconds(self) -> float:
        """A forward takes at least this for what it streams; copies and computation overlap."""
        return self.streamed_nbytes / self.bandwidth

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits, "seconds": self.seconds}

    def __str__(self) -> str:
        if not self.fits:
            return f"device_budget={self.budget:,} is too small: at least {self.least_nbytes:,} bytes are needed"
        speed = f"at least {self.seconds * 1e3:.1f} ms at {self.bandwidth / 1e9:.1f} GB/s"
        return (
            f"under device_budget={self.budget:,}: {self.resident_nbytes:,} bytes stay, slots take "
            f"{self.staging_nbytes:,}, {self.streamed_nbytes:,} come with each token: {speed}"
        )


@dataclass
class _Predicted:
    """A unit as it will be."""

    kind: str
    level: int
    streamable: bool
    nbytes: int = 0


def forecast(
    tensors: Mapping[str, LazyTensor], architecture: Architecture, budget: int | str, device: torch.device
) -> Forecast:
    """The forecast for the tensors that will be loaded. Experts that are stored apart count as part of their block.

    Args:
        device: where the model is to run. Some of its memory is used for a moment to measure how fast weights come.
    """
    units = find_units(architecture.skeleton)
    predicted = [_Predicted(unit.kind, unit.level, unit.streamable) for unit in units]
    number_of = {id(value.home): number for number, unit in enumerate(units) for value in unit.values}
    names = dict(architecture.skeleton.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        dense = f"{name.rpartition('.')[0]}.weight"
        parameter = architecture.parameters.get(name) or architecture.parameters.get(dense)
        if parameter in names:
            predicted[number_of[id(names[parameter])]].nbytes += tensor.nbytes
    largest = max((unit.nbytes for unit in predicted), default=0)
    for unit in predicted:
        unit.kind = FIXED if unit.nbytes * SMALL <= largest else unit.kind
    room, working = parse_size(budget), WorkingMemory(architecture.skeleton).of((1, 1))
    found = place(predicted, room - working)
    return Forecast(
        room,
        place(predicted, -1).nbytes + working,
        sum(unit.nbytes for unit in found.resident),
        sum(map(sum, found.slots)),
        working,
        sum(unit.nbytes for unit in found.streamed if unit.streamable),
        _bandwidth(tensors, device),
    )


def _bandwidth(tensors: Mapping[str, LazyTensor], device: torch.device) -> float:
    """Bytes a second: of pages of the files that are in memory, or of copies from pinned memory to the device."""
    if device.type != "cpu":
        source = torch.empty(_SAMPLE, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=device)
        target.copy_(source)
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        torch.accelerator.synchronize(device)
        return _SAMPLE / (time.perf_counter() - started)
    files, views, taken = MappedFiles(), [], 0
    for tensor in tensors.values():
        view = files.stored(tensor, count=False) if isinstance(tensor, StoredTensor) and taken < _SAMPLE else None
        if view is not None:
            views.append(view)
            taken += view.nbytes
    runs = files.runs(views)
    files.bring_first(runs)
    files.drop(runs)
    started = time.perf_counter()
    files.bring(runs)
    return max(taken, 1) / (time.perf_counter() - started)
