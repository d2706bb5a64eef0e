"""Up to how many tokens the one of two ways to multiply is faster: measured once a device and kept.

Kept for the process, and in a file for later ones, so that a model does not change its way, and with it the last bit of
its results, from one start to the next. `SPARSEAUTOMODEL_CACHE` names the folder; `~/.cache/sparseautomodel` else.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sparseautomodel.cache_folder import cache_folder

REPEATS = 5
"""Of which the fastest counts: others were disturbed."""

_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

Way = Callable[[int], object]
"""Multiplies that many tokens once."""


def crossover(name: str, device: torch.device, between: tuple[int, int], ways: Callable[[], tuple[Way, Way]]) -> int:
    """The most tokens for which the first way is the faster one, within `between`.

    Args:
        name: of the pair of ways, with all that their speed depends on but the machine.
        ways: makes the two ways; not called where the answer is kept.
    """
    low, high = between
    if low >= high:
        return low
    key = f"{name}, {_machine(device)}"
    kept = _kept()
    if key not in kept:
        kept[key] = _measured(between, device, *ways())
        _keep(kept)
    return min(max(low, kept[key]), high)


def _measured(between: tuple[int, int], device: torch.device, first: Way, second: Way) -> int:
    low, high = between
    best = low
    for count in _COUNTS:
        if low < count < high:
            if _seconds(first, count, device) > _seconds(second, count, device):
                break
            best = count
    return best


def _seconds(way: Way, count: int, device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first call warms up
        _wait(device)
        started = time.perf_counter()
        way(count)
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{device.type} {_processor()}{threads}, torch {torch.__version__}"


@functools.cache
def _processor() -> str:
    """Name of the processor: what Linux says, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


@functools.cache
def _kept() -> dict[str, int]:
    """What earlier processes measured; a file that is not ours or not whole counts as none."""
    try:
        read = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in read.items() if isinstance(value, int)} if isinstance(read, dict) else {}


def _keep(kept: dict[str, int]) -> None:
    """Write all that is known; a folder that cannot be written to only means that others measure again."""
    try:
        path = _file()
        part = path.with_name(f"{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError:
        return


def _file() -> Path:
    """Raises OSError where there is no place for it."""
    return cache_folder() / "crossover.json"
