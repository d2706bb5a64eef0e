"""A model on a device that is smaller than its weights: `device_budget`.

The model stays a plain `PreTrainedModel`. Hooks bring the weights of a block before it runs and take them away after
it, while the next block is on its way. Between calls every module shows the weights of home, so that saving, counting
and copying need to know nothing of this. Where everything fits there are no hooks.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparseautomodel.devices import Device
from sparseautomodel.hooks import Rows, WatchedParameters, around
from sparseautomodel.placed import alias, lengths_of, refuse_gradients, set_classes, take_back
from sparseautomodel.placement import FIXED, Placement, place
from sparseautomodel.residency_report import ResidencyReport, report_unit
from sparseautomodel.save import parse_size
from sparseautomodel.slots import Ring, Traffic, carried
from sparseautomodel.units import LAYER, Unit, find_units
from sparseautomodel.working import SAFE, WorkingMemory, out_of_memory, shape_of

NOTHING = Placement((), (), ((), ()))


class Residency:
    """`model.residency`: which weights are on the device now, under a budget."""

    def __init__(self, model: PreTrainedModel, device: Device, budget: int | str, parked: str | None = None) -> None:
        """Take over the weights of a model whose tensors are in host memory or in files.

        Args:
            budget: bytes, or text such as "6GiB": weights, slots, and what a call needs besides.
            parked: all weights stay where they are until `set_budget`, as after `park(parked)`.

        Raises:
            ValueError: it is less than the largest block and a call of one token need.
        """
        self._model, self._device, self._budget = model, device, parse_size(budget)
        self._units: list[Unit] = []
        self._where: dict[int, tuple[Unit, int]] = {}
        """Value of home, by identity -> its unit, and its number there."""
        self._modules = 0
        self._rows: dict[nn.Module, Rows] = {}
        self._traffic: dict[Unit, Traffic] = {}
        self._resident: dict[Unit, tuple[Any, list[Any]]] = {}
        self._guests: dict[Unit, tuple[Any, list[Any]]] = {}
        self._shown: dict[Unit, list[Any]] = {}
        self._rings: list[Ring] = []
        self._hooks: list[Any] = []
        self._watched: list[nn.Module] = []
        self._lock = threading.RLock()
        self._working = WorkingMemory(model)
        self._placement = NOTHING
        self._room, self._parked, self._before = 0, True, 0
        self._closed: str | None = None
        self.neighbors: Callable[[], int] | None = None
        """Bytes on the device of other models with budgets of their own; None: there are no others."""
        self._running: nn.Module | None = None
        self._shape: tuple[int, ...] = ()
        self._adopt(find_units(model))
        if parked is None:
            self.set_budget(budget)
        else:
            self._check(budget)
            self.park(parked)

    def report(self) -> ResidencyReport:
        """What is on the device, and what has come and gone since the model was loaded."""
        units = [report_unit(unit, unit in self._resident, self._traffic[unit]) for unit in self._units]
        staging = sum(ring.nbytes for ring in self._rings)
        resident, expected = self.live_nbytes - staging, self._working.of((1, 1))
        place = str(self._device.device), self._device.home, self._budget
        return ResidencyReport(*place, resident, staging, expected, tuple(units))

    def set_budget(self, budget: int | str) -> None:
        """Hold another budget from now on. Between calls; only the difference is moved.

        Raises:
            ValueError: it is less than the largest block and a call of one token need. The old budget stays.
        """
        nbytes = self._check(budget)
        with self._lock:  # a call of another thread is waited for where weights are streamed
            self._budget, self._parked, self._closed = nbytes, False, None
            self._arrange(nbytes - self._working.of((1, 1)) - self._held())

    def park(self, reason: str | None = None) -> None:
        """Take all weights off the device. The next call, or `set_budget`, brings them back.

        Args:
            reason: why a call does not: until `set_budget`, a call is a RuntimeError that says it.
        """
        with self._lock:
            self._reset()
            self._arrange(-1, Placement((), tuple(self._units), ((), ())))
            self._parked, self._closed = True, reason

    def detach(self) -> None:
        """Take all weights off the device for good: the model is a plain one in host memory, without residency."""
        with self._lock:
            self.park()
            self._unhook()
            set_classes(self._model, None)
            for module in self._model.modules():
                vars(module).pop("residency", None)

    def twin(self) -> PreTrainedModel | None:
        """Another object of the model, plain and in host memory, over the same weights of home; None where a tensor is
        more than its values, such as those of bitsandbytes."""
        with self._lock:
            seen = [(home, home) for home in (value.home for unit in self._units for value in unit.values)]
            for unit, built in self._shown.items():
                seen += zip(built, (value.home for value in unit.values), strict=True)
            return alias(self._model, seen)

    @property
    def least_nbytes(self) -> int:
        """The smallest budget there is."""
        return place(self._units, -1).nbytes + self._working.of((1, 1))

    @property
    def whole_nbytes(self) -> int:
        """The smallest budget under which nothing is streamed."""
        return max(place(self._units, sys.maxsize).nbytes + self._working.of(SAFE), self.least_nbytes)

    @property
    def live_nbytes(self) -> int:
        """Bytes of weights on the device, and of slots for them."""
        there: list[Unit | Ring] = [*self._resident, *self._guests, *self._rings]
        return sum(one.nbytes for one in there)

    @property
    def homes(self) -> dict[int, int]:
        """Address of each tensor of home -> its bytes."""
        return {part.data_ptr(): part.nbytes for unit in self._units for part in unit.parts()}

    def __reduce__(self) -> Any:
        """A deep copy of the model is a plain model in host memory."""
        return type(None), ()

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`forward(*args, **kwargs)` with inputs on the device; once more with fewer weights there if memory runs out.

        Raises:
            torch.OutOfMemoryError: it is not enough either. The model is as before the call.
        """
        with self._lock:
            if self._running is not None:
                return forward(*args, **kwargs)
            args = tuple(self._moved(value) for value in args)
            kwargs = {name: self._moved(value) for name, value in kwargs.items()}
            lengths = lengths_of(kwargs)
            for again in (False, True):
                try:
                    if again:
                        self._arrange(-1)
                        self._room = -1  # as little as possible, until the call is over
                    return forward(*args, **kwargs)
                except torch.OutOfMemoryError as error:
                    traceback.clear_frames(error.__traceback__)
                    reason = str(error)
                self._reset()
                if not again and not take_back(kwargs, lengths):
                    reason = f"The cache cannot be taken back to call again. {reason}"
                    break
            raise out_of_memory(self._device.device, self._budget, reason)

    def _adopt(self, units: list[Unit]) -> None:
        for unit in units:
            self._device.adopt(unit)
            self._traffic[unit] = Traffic()
            self._units.append(unit)
            self._where |= {id(value.home): (unit, number) for number, value in enumerate(unit.values)}
        self._modules = sum(1 for _ in self._model.modules())

    def _check(self, budget: int | str) -> int:
        """A budget in bytes, of which there are enough."""
        nbytes, least = parse_size(budget), self.least_nbytes
        if nbytes < least:
            largest = max(self._units, key=lambda unit: unit.nbytes if unit.streamable else 0)
            raise ValueError(
                f"device_budget={budget!r} is {nbytes:,} bytes, and {type(self._model).__name__} needs at least "
                f"{least:,}: {largest.name} with {largest.nbytes:,}, what is always there, and "
                f"{self._working.of((1, 1)):,} to work with. Give at least device_budget={least}"
            )
        return nbytes

    def _held(self) -> int:
        """Bytes in use by others than the weights: caches of keys and values, the user's tensors."""
        mine = self.live_nbytes + (self.neighbors() if self.neighbors else 0) if self._device.copies_values else 0
        return max(0, self._device.in_use() - mine)

    def _arrange(self, room: int, placement: Placement | None = None) -> None:
        """Let units stay, and slots be, as is best within `room` bytes. What is given up goes first.

        Raises:
            torch.OutOfMemoryError: there is no memory for it. Nothing is on the device then.
        """
        new = placement or place(self._units, room)
        self._room = room
        if new == self._placement:
            return
        self._unhook()
        self._device.settle()
        for unit in [unit for unit in self._resident if unit not in set(new.resident)]:
            del self._resident[unit]
            self._device.drop(unit)
        if (new.slots, new.streamed) != (self._placement.slots, self._placement.streamed):
            self._clear_rings()
        try:
            self._fill(new)
            self._placement = new
        except torch.OutOfMemoryError:
            self._resident.clear()
            self._clear_rings()
            self._placement = Placement((), tuple(self._units), ((), ()))
            self._fill(self._placement)
            raise
        finally:
            self._hook()

    def _fill(self, placement: Placement) -> None:
        for unit in [unit for unit in placement.resident if unit not in self._resident]:
            self._resident[unit] = self._bring(unit)
        if not self._rings:
            for level, sizes in enumerate(placement.slots):
                whole = [unit for unit in placement.streamed if unit.streamable and unit.level == level]
                self._rings.append(Ring(self._device, self._traffic, whole, ahead=level == 0))
                for size in sizes:
                    self._rings[level].add(size)

    def _clear_rings(self) -> None:
        for ring in self._rings:
            ring.clear()
        self._rings = []

    def _bring(self, unit: Unit) -> tuple[Any, list[Any]]:
        memory = self._device.allocate(unit.nbytes)
        self._device.wait(self._device.copy(unit, memory, self._device.mark()))
        return memory, self._device.build(unit, memory)

    def _hook(self) -> None:
        """Meet every unit where it runs; where all are resident, put their values in place for good."""
        if not self._placement.streamed and self._budget >= self._placement.nbytes + self._working.of(SAFE):
            for unit in self._resident:
                self._show(unit, self._resident[unit][1])
            set_classes(self._model, None)
            return
        for unit in self._units:
            enter, leave = functools.partial(self._enter, unit), functools.partial(self._leave, unit)
            for module in unit.carriers:
                self._hooks += around(module, enter, leave)
            for module in unit.gathered:
                self._hook_rows(unit, module)
        for module in self._model.modules():
            if isinstance(module, PreTrainedModel) or module is self._model:
                self._hooks += around(module, self._begin, self._end)
        set_classes(self._model, self)
        if self._device.copies_values:
            self._watch()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._watched:
            module._parameters = dict(module._parameters.items())
        self._hooks, self._watched = [], []
        self._reset()

    def _hook_rows(self, unit: Unit, module: Any) -> None:
        if not self._device.copies_values or unit in self._resident:
            whole = unit in self._resident
            enter = functools.partial(self._enter, unit) if whole else lambda *_: None
            leave = functools.partial(self._leave, unit) if whole else lambda *_: self._drop_rows(unit)
            self._hooks += around(module, enter, leave)
            return
        rows = Rows(module, self._device.device, self._traffic[unit].add_rows)
        self._rows[module] = rows
        self._hooks += around(module, lambda module, args, kwargs: rows.enter(args, kwargs), lambda *_: rows.leave())

    def _drop_rows(self, unit: Unit) -> None:
        if unit not in carried(self._rings):
            self._device.drop(unit)

    def _watch(self) -> None:
        """Weights outside the blocks may be read by others than their modules."""
        outside = [value for unit in self._units if unit.kind in (LAYER, FIXED) for value in unit.values]
        places = [place for value in outside for place in value.places if place[1] == "_parameters"]
        self._watched = list(dict.fromkeys(module for module, _, _ in places))
        for module in self._watched:
            module._parameters = WatchedParameters(dict(module._parameters.items()), self._read)

    def _read(self, value: Any) -> Any:
        """What a parameter of a module reads as: while the model runs, its value on the device."""
        unit, number = self._where.get(id(value), (None, 0))
        if self._running is None or unit is None:
            return value
        held = self._resident.get(unit) or self._guests.get(unit)
        if held is None:
            held = self._guests[unit] = self._bring(unit)
            self._traffic[unit].add(unit.nbytes)
        built = held[1][number]
        return built[0] if isinstance(built, tuple) else built

    def _enter(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        unit.users += 1
        if unit.users > 1:
            return
        if unit in self._resident:
            self._show(unit, self._resident[unit][1])
            return
        if self._device.copies_values and torch.is_grad_enabled():
            refuse_gradients(unit.name, [*args, *kwargs.values()])
        self._show(unit, self._rings[unit.level].enter(unit))

    def _leave(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if unit.users == 0:  # a hook before ours has failed, so that it was not entered
            return
        unit.users -= 1
        if unit.users == 0:
            self._hide(unit)
            if unit not in self._resident:
                self._rings[unit.level].leave(unit)

    def _show(self, unit: Unit, built: list[Any]) -> None:
        if self._device.copies_values:
            self._shown[unit] = built
            unit.show(built)

    def _hide(self, unit: Unit) -> None:
        if unit in self._shown:
            unit.hide(self._shown.pop(unit))

    def _reset(self) -> None:
        """Put all weights of home in place, whatever was running."""
        for rows in self._rows.values():
            rows.leave()
        for unit in self._units:
            unit.users = 0
            self._hide(unit)
        for ring in self._rings:
            for slot in ring.slots:
                slot.in_use = False
        self._guests.clear()
        self._running = None

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._running is not None and self._running is not module:
            return  # the encoder in a model; it may also be called by itself
        if self._running is not None:
            self._reset()  # an earlier call was broken off
        self._find_adapters()
        self._shape = shape_of(args, kwargs)
        if self._closed is not None:
            raise RuntimeError(self._closed)
        if self._parked:
            self.set_budget(self._budget)
        if self._room >= 0:
            needed = self._working.of(self._shape, kwargs.get("logits_to_keep"))
            room = self._budget - needed - self._held()
            largest = max((unit.nbytes for unit in self._placement.streamed), default=0)
            if room < self._placement.nbytes or room > self._room + largest:
                self._arrange(max(room, 0))
        self._before = self._device.in_use()
        self._device.reset_peak()
        self._running = module

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._running is not module:
            return
        self._guests.clear()
        self._running = None
        if self.neighbors is None and (peak := self._device.peak()) and output is not None:
            self._working.learn(self._shape, max(0, peak - self._before))
        if self._room < 0:
            self._room = 0

    def _find_adapters(self) -> None:
        """Parameters that were added since, such as LoRA's: they stay on the device."""
        if not self._device.copies_values or self._modules == sum(1 for _ in self._model.modules()):
            return
        new = find_units(self._model, self._where)
        for unit in new:
            unit.kind = FIXED
        self._unhook()
        self._adopt(new)
        self._placement = NOTHING
        self._arrange(self._room)

    def _moved(self, value: Any) -> Any:
        return value.to(self._device.device) if isinstance(value, Tensor) else value
