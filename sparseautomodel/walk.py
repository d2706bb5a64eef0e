"""Run a model over calibration batches, block by block, and stop at each set of layers that read one input.

Every batch is one ordinary forward of the model that can be left and taken up again (a greenlet). All wait in front of
a block until it has its weights. At the first layer of a set each forward adds its input to the set's statistics and
waits. When all have come, the set is solved, its weights are changed, and the forwards go on with the changed weights.
So there is one forward a batch, later layers see what earlier layers have become, and nothing has to be traced,
replayed or put in a module's place.

Where so many forwards cannot wait inside a block, they wait in front of it, and the block is run for one after another
until a set (or as many as have room) has seen all of them: the same result, with more forwards.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from sparseautomodel.allocator import give_back
from sparseautomodel.callbacks import Callbacks
from sparseautomodel.fast_forward import FastForward
from sparseautomodel.forwards import Forward, first_tensor, run_block, wait
from sparseautomodel.kv_cache import ObservedCache
from sparseautomodel.sets import LayerSet, input_sets, is_expert
from sparseautomodel.spill import Spill

_TRIM = 1 << 25
"""Bytes of hidden states that have passed a block before freed memory goes back: each time costs page faults later."""

_LARGE, _LITTLE = 1 << 24, 1 << 24
"""Bytes of statistics from which freed memory, but for a little, goes back before and after a set is solved."""

END = ""
"""Where forwards wait that have left all blocks."""


@dataclass(frozen=True)
class Room:
    """How much of the calibration may be in memory at once."""

    spill: Spill | None = None
    """Where inputs go that wait; None: they stay in memory."""
    state_nbytes: int = 1 << 30
    """Activations that may wait inside a block, and statistics that are gathered at once where they may not."""


def walk(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    blocks: Sequence[str],
    layers: Mapping[str, Sequence[str]],
    callbacks: Callbacks,
    *,
    outside: Sequence[str] = (),
    witnesses: Sequence[Mapping[str, Tensor]] = (),
    room: Room = Room(),
    cache: ObservedCache | None = None,
) -> None:
    """Run every batch through `blocks` once, solving the layers of each block on the way.

    Args:
        model: its blocks may be without weights; `enter` gives them.
        blocks: names of the blocks. The forwards end after the last.
        layers: block -> names of the layers to solve in it.
        outside: layers to solve that are in none of the blocks; they must have their weights, but for the head.
        witnesses: rows that no statistic sees, and that run through the model as it was and as it becomes.
        cache: what the forwards of the batches hand their keys and values to.

    Raises:
        ValueError: a block is run more than once in a forward, or not at all.
        Whatever the model, `solve` or the other callbacks raise, with all forwards ended and all hooks removed.
    """
    with torch.no_grad():
        run = _Walk(model, batches, blocks, layers, callbacks, outside, witnesses, room, cache)
        run.run()


class _Finished(Exception):
    """Ends a forward that has passed all that is to be solved."""


class _Gathered(Exception):
    """Ends a run of a block that has passed the sets which are gathered."""


class _Walk:
    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Mapping[str, Tensor]],
        blocks: Sequence[str],
        layers: Mapping[str, Sequence[str]],
        callbacks: Callbacks,
        outside: Sequence[str],
        witnesses: Sequence[Mapping[str, Tensor]],
        room: Room,
        cache: ObservedCache | None,
    ) -> None:
        self._model, self._blocks, self._layers, self._callbacks = model, list(blocks), layers, callbacks
        self._forwards = [Forward(batch) for batch in batches]
        self._sources = [Forward(row, witness=True) for row in witnesses]
        self._results = [Forward(row, witness=True, result=True) for row in witnesses]
        self._room, self._by_light, self._fast = room, dict[Any, Forward](), FastForward()
        self._set_of: dict[str, LayerSet] = {}
        self._left: set[str] = set()
        self._known_sets: dict[tuple[Any, ...], list[tuple[str, ...]]] = {}
        self._gathering: Sequence[LayerSet] | None = None
        self._seen: set[LayerSet] = set()
        self._passed = 0
        self._outside = [LayerSet((name,)) for name in outside]
        # A cache would be filled twice by a probe, and keep what nobody reads.
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._extra: dict[str, Any] = {"use_cache": False} if takes_cache else {}
        self._cache = cache
        if cache is not None:
            self._extra |= cache.argument(model)
            cache.recording = False  # but in forwards of batches

    def run(self) -> None:
        hooks = [hook for name in self._blocks for hook in self._hook_block(name)]
        names = [name for names in self._layers.values() for name in names]
        hooks += [self._hook_layer(name) for name in [*names, *(layers.names[0] for layers in self._outside)]]
        head = getattr(self._model, "get_output_embeddings", lambda: None)()
        if head is not None:
            hooks.append(head.register_forward_pre_hook(lambda module, args: self._meet_head()))
        try:
            for layers in self._outside:
                self._expect(layers)
            self._callbacks.outside(True)
            self._advance(self._sources)
            self._callbacks.outside(False)
            self._advance(self._forwards)
            self._solve_met(self._outside)
            self._advance(self._results)
            while (block := self._next_block()) is not None:
                self._solve_block(block)
                self._solve_met(self._outside)
            missed = [name for name in self._blocks if name not in self._left]
            if missed:
                raise ValueError(
                    f"the model's forward does not run {', '.join(missed[:4])}, so they cannot be calibrated"
                )
            self._solve_unmet(self._outside)
            self._end_witnesses()
        finally:
            self._end()
            for hook in hooks:
                hook.remove()

    def _next_block(self) -> str | None:
        """The first of the blocks that forwards wait for: not all rows run through all blocks (pictures)."""
        waited = {forward.at for forward in [*self._forwards, *self._sources]} - {END}
        return next((name for name in self._blocks if name in waited), None)

    def _solve_block(self, name: str) -> None:
        if name in self._left:
            raise ValueError(f"{name} is run more than once in a forward, which the walk over blocks cannot do")
        block = self._model.get_submodule(name)
        here, sources, results = (
            [forward for forward in forwards if forward.at == name]
            for forwards in (self._forwards, self._sources, self._results)
        )
        self._callbacks.enter(name)
        self._advance(sources)
        sets: list[LayerSet] = []
        if here and not self._callbacks.restore(name):
            sets = self._find_sets(name, block, here[0])
            for layers in sets:
                self._expect(layers)
            probe = (results or here)[0]  # of a witness: one row
            self._callbacks.found(name, sets, partial(run_block, block, probe.args, probe.kwargs or {}))
            if not self._fits(block, here, sets):
                self._solve_in_parts(block, here, sets)
        self._advance(here)
        self._solve_met(sets)
        self._solve_unmet(sets)
        self._advance(results)
        for source, result in zip(sources, results, strict=True):
            assert source.hidden is not None and result.hidden is not None
            self._callbacks.compare(name, source.hidden, result.hidden)
        self._left.add(name)
        self._callbacks.leave(name)

    def _advance(self, forwards: Sequence[Forward]) -> None:
        """Let forwards run, one after another, until each waits or ends."""
        for forward in forwards:
            if forward.done or forward.waits_for is not None:
                continue
            if forward.light is None:
                forward.light = greenlet(self._forward)
                self._by_light[forward.light] = forward
            forward.at, forward.args, forward.kwargs = None, (), None
            if self._cache is not None:
                self._cache.recording = not forward.witness
            with self._fast:
                forward.light.switch(forward)
            if self._cache is not None:
                self._cache.recording = False
            self._rest(forward)

    def _solve_met(self, sets: Sequence[LayerSet]) -> None:
        """Solve those of `sets` that forwards wait for, in order, and let them go on, until none waits for one."""
        while waited := [forward.waits_for for forward in self._forwards if forward.waits_for in sets]:
            first = next(layers for layers in sets if layers in waited)
            self._solve(first)
            freed = [forward for forward in self._forwards if forward.waits_for is first]
            for forward in freed:
                forward.waits_for = None
            self._advance(freed)

    def _solve_unmet(self, sets: Sequence[LayerSet]) -> None:
        """Solve the sets that no token has come to, such as those of an expert that was never chosen."""
        for layers in sets:
            if not layers.solved:
                self._solve(layers)

    def _solve_in_parts(self, block: nn.Module, here: Sequence[Forward], sets: Sequence[LayerSet]) -> None:
        """Run the block for one forward after another, as often as its sets need, and solve them."""
        for part in self._parts(sets):
            self._gathering = part
            try:
                for forward in here:
                    self._seen = set()
                    with contextlib.suppress(_Gathered), self._fast:
                        run_block(block, forward.args, forward.kwargs or {})
                    self._rest(forward)
            finally:
                self._gathering = None
            for layers in part:
                self._solve(layers)

    def _parts(self, sets: Sequence[LayerSet]) -> Iterator[list[LayerSet]]:
        part: list[LayerSet] = []
        for layers in sets:
            held = [statistic.nbytes for one in [*part, layers] for statistic in one.statistics]
            if part and sum(held) > self._room.state_nbytes:
                yield part
                part = []
            part.append(layers)
        if part:
            yield part

    def _fits(self, block: nn.Module, here: Sequence[Forward], sets: Sequence[LayerSet]) -> bool:
        """Whether all forwards can wait inside the block: with its widest input, and some of its own.

        Each may wait for another expert, so that many of their statistics are gathered at once.
        """
        if self._room.spill is None:
            return True
        hidden = [first_tensor((forward.args, forward.kwargs)) for forward in here]
        widest = max((p.shape[-1] for p in block.parameters() if p.ndim == 2), default=0) / max(1, hidden[0].shape[-1])
        experts = sorted(sum(one.nbytes for one in layers.statistics) for layers in sets if layers.expert)
        held = sum(experts[-len(here) :])
        return sum(one.nbytes for one in hidden) * (widest + 4) + held <= self._room.state_nbytes

    def _end_witnesses(self) -> None:
        """Let each witness go on to the end, in both models; one after another, since outputs may be large."""
        if self._sources:
            give_back()  # logits are larger than all before
            self._callbacks.load_head()
        for source, result in zip(self._sources, self._results, strict=True):
            self._callbacks.outside(True)
            self._advance([source])
            self._callbacks.outside(False)
            self._advance([result])
            self._callbacks.compare_ends(source.batch, source.output, result.output)
            source.output = result.output = None

    def _forward(self, forward: Forward) -> None:
        with contextlib.suppress(_Finished):
            output = self._model(**forward.batch, **self._extra)
            forward.output = output if forward.witness else None
        forward.done = True

    def _end(self) -> None:
        """End the forwards that are still waiting, so that their frames let go of what they hold."""
        for forward in [*self._forwards, *self._sources, *self._results]:
            if forward.light is not None and not forward.light.dead:
                forward.light.throw(GreenletExit)

    def _hook_block(self, name: str) -> tuple[Any, Any]:
        block = self._model.get_submodule(name)
        before = block.register_forward_pre_hook(
            lambda module, args, kwargs: self._enter(name, args, kwargs), with_kwargs=True
        )
        return before, block.register_forward_hook(lambda module, args, output: self._leave(name, output))

    def _hook_layer(self, name: str) -> Any:
        layer = self._model.get_submodule(name)
        return layer.register_forward_pre_hook(lambda module, args: self._meet(name, args[0]))

    def _rest(self, forward: Forward) -> None:
        """After a run of a forward, now and then: let go of pages in memory, and of what the allocator keeps."""
        spill, self._passed = self._room.spill, self._passed + forward.nbytes
        if spill is not None and self._passed > _TRIM * max(1, len(spill) // 32):
            self._passed = 0
            spill.rest()
            spill.trim()

    def _enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = self._by_light[getcurrent()]
        hidden = first_tensor((args, kwargs))
        forward.at, forward.args, forward.kwargs, forward.nbytes = name, args, kwargs, hidden.nbytes
        if self._room.spill is not None and not forward.witness:
            self._room.spill.wait(hidden)
        wait()

    def _leave(self, name: str, output: Any) -> None:
        forward = self._by_light[getcurrent()]
        forward.passed.add(name)
        if forward.witness:
            forward.hidden = first_tensor(output)
        if len(forward.passed) < len(self._blocks):
            return
        if forward.witness:
            self._stop(forward)
        elif all(layers.solved for layers in self._outside):
            raise _Finished

    def _meet_head(self) -> None:
        """The head is not computed for rows that only calibrate, and for witnesses once it has its weights."""
        forward = self._by_light[getcurrent()]
        if not forward.witness:
            raise _Finished
        self._stop(forward)

    def _stop(self, witness: Forward) -> None:
        if witness.at != END:
            witness.at = END
            wait()
            witness.at = END

    def _meet(self, name: str, inputs: Tensor) -> Tensor | None:
        """Called before a layer is; what it returns is given to the layer instead."""
        forward = self._by_light.get(getcurrent())
        if forward is not None and forward.result and inputs.is_floating_point():
            return self._callbacks.rounded(name, inputs)
        self._wait_for_set(name, inputs, forward)
        return None

    def _wait_for_set(self, name: str, inputs: Tensor, forward: Forward | None) -> None:
        layers = self._set_of.get(name)
        if layers is None or layers.solved or not inputs.is_floating_point():  # an embedding sees no statistic
            return
        if self._gathering is not None:
            if layers in self._gathering and layers not in self._seen:
                self._seen.add(layers)
                _see(layers, inputs)
                if layers is self._gathering[-1]:
                    raise _Gathered
            return
        if forward is None or forward.witness:
            return
        _see(layers, inputs)
        layers.inputs.append(inputs)
        forward.waits_for = layers
        if self._room.spill is not None:
            self._room.spill.wait(inputs)
        del inputs
        wait()

    def _expect(self, layers: LayerSet) -> None:
        layers.statistics = self._callbacks.gather(layers.names)
        self._set_of |= dict.fromkeys(layers.names, layers)

    def _solve(self, layers: LayerSet) -> None:
        large = sum(statistic.nbytes for statistic in layers.statistics) >= _LARGE
        if large and self._room.spill is not None:
            self._room.spill.trim_to(_LITTLE)
        self._callbacks.solve(layers)
        layers.solved, layers.statistics, layers.inputs = True, [], []
        if large and self._room.spill is not None:
            self._room.spill.trim_to(_LITTLE)

    def _find_sets(self, name: str, block: nn.Module, forward: Forward) -> list[LayerSet]:
        """Blocks that are built alike are probed once."""
        wanted = [layer.removeprefix(f"{name}.") for layer in self._layers.get(name, ())]
        kind = (type(block), tuple(wanted), tuple(type(module) for module in block.modules()))
        if wanted and kind not in self._known_sets:
            self._known_sets[kind] = input_sets(
                block, lambda: run_block(block, forward.args, forward.kwargs or {}), wanted
            )
        return [
            LayerSet(tuple(f"{name}.{part}" for part in names), expert=is_expert(names[0]))
            for names in self._known_sets.get(kind, [])
        ]


def _see(layers: LayerSet, inputs: Tensor) -> None:
    inputs = inputs.reshape(-1, inputs.shape[-1])
    for statistic in layers.statistics:
        statistic.update(inputs)
    layers.num_tokens += len(inputs)
