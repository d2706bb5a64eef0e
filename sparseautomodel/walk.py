"""Run a model over calibration batches, block by block, and stop at each set of layers that read one input.

Every batch is one ordinary forward of the model that can be left and taken up again (a greenlet). At the first layer of
a set each forward adds its input to the set's statistics and waits. When all have come, the set is solved, its weights
are changed, and the forwards go on with the changed weights. So there is one forward a batch, later layers see what
earlier layers have become, and nothing has to be traced, replayed or put in a module's place.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn


@dataclass(eq=False)
class LayerSet:
    """Layers that read one input, and what is known of that input."""

    names: tuple[str, ...]
    """Module names, in the order in which the forward calls them."""
    statistics: list[Any] = field(default_factory=list)
    """What `gather` made for the set; updated with inputs `[tokens, in_features]`."""
    num_tokens: int = 0
    solved: bool = False


class Callbacks:
    """What the walk asks for, in the order in which it does."""

    def enter(self, block: str) -> bool:
        """Give the block its weights. False when they are what the block has to become, and nothing is to be solved."""
        return True

    def gather(self, names: Sequence[str]) -> list[Any]:
        """Fresh statistics for a set of layers: objects with `update(inputs)`."""
        return []

    def solve(self, layers: LayerSet) -> None:
        """Change the weights of the layers, in the modules."""

    def leave(self, block: str) -> None:
        """The block is done: store what it has become, and free it."""


def walk(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    blocks: Sequence[str],
    layers: Mapping[str, Sequence[str]],
    callbacks: Callbacks,
) -> None:
    """Run every batch through `blocks` once, solving the layers of each block on the way.

    Args:
        model: its blocks may be without weights; `enter` gives them.
        blocks: names of the blocks in the order in which the model runs them. The forwards end after the last.
        layers: block -> names of the layers to solve in it.

    Raises:
        ValueError: a block is run more than once in a forward, or not at all.
        Whatever the model, `solve` or the other callbacks raise, with all forwards ended and all hooks removed.
    """
    with torch.no_grad():
        _Walk(model, batches, blocks, layers, callbacks).run()


def find_blocks(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """The blocks that hold `layers`: for each, the child of the outermost `ModuleList` on the way to it."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found: dict[str, None] = {}
    for layer in layers:
        outer = min((name for name in lists if layer.startswith(f"{name}.")), key=len, default=None)
        if outer is not None:
            found[f"{outer}.{layer.removeprefix(f'{outer}.').partition('.')[0]}"] = None
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return sorted(found, key=order.__getitem__)


class _Finished(Exception):
    """Ends a forward that has passed the last block."""


@dataclass(eq=False)
class _Forward:
    """One batch on its way through the model."""

    batch: Mapping[str, Tensor]
    light: greenlet | None = None
    waits_for: LayerSet | None = None
    done: bool = False


class _Walk:
    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Mapping[str, Tensor]],
        blocks: Sequence[str],
        layers: Mapping[str, Sequence[str]],
        callbacks: Callbacks,
    ) -> None:
        self._model, self._blocks, self._layers, self._callbacks = model, list(blocks), layers, callbacks
        self._forwards = [_Forward(batch) for batch in batches]
        self._sets: dict[str, list[LayerSet]] = {}
        self._set_of: dict[str, LayerSet] = {}
        self._order: list[LayerSet] = []
        self._entered: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._known_sets: dict[tuple[Any, ...], list[tuple[str, ...]]] = {}
        self._probe: dict[str, Tensor] | None = None
        # A cache would be filled twice by the probe, and keep what nobody reads.
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._extra = {"use_cache": False} if takes_cache else {}

    def run(self) -> None:
        hooks = [hook for name in self._blocks for hook in self._hook_block(name)]
        hooks += [self._hook_layer(name) for names in self._layers.values() for name in names]
        try:
            while not all(forward.done for forward in self._forwards):
                for forward in self._forwards:
                    if not forward.done and forward.waits_for is None:
                        self._advance(forward)
                waiting = [forward.waits_for for forward in self._forwards if forward.waits_for is not None]
                if waiting:
                    first = min(waiting, key=self._order.index)
                    self._solve(first)
                    for forward in self._forwards:
                        if forward.waits_for is first:
                            forward.waits_for = None
        finally:
            self._end()
            for hook in hooks:
                hook.remove()
        missed = [name for name in self._blocks if name not in self._left]
        if missed:
            raise ValueError(f"the model's forward does not run {', '.join(missed[:4])}, so they cannot be calibrated")

    def _advance(self, forward: _Forward) -> None:
        """Let one forward run until it waits for a set or ends."""
        if forward.light is None:
            forward.light = greenlet(self._forward)
        forward.light.switch(forward)

    def _forward(self, forward: _Forward) -> None:
        with contextlib.suppress(_Finished):
            self._model(**forward.batch, **self._extra)
        forward.done = True

    def _wait_for(self, layers: LayerSet) -> None:
        forward = self._current()
        forward.waits_for = layers
        assert forward.light is not None and forward.light.parent is not None
        forward.light.parent.switch()

    def _current(self) -> _Forward:
        return next(forward for forward in self._forwards if forward.light is getcurrent())

    def _end(self) -> None:
        """End the forwards that are still waiting, so that their frames let go of what they hold."""
        for forward in self._forwards:
            if forward.light is not None and not forward.light.dead:
                forward.light.throw(GreenletExit)

    def _hook_block(self, name: str) -> tuple[Any, Any]:
        block = self._model.get_submodule(name)
        before = block.register_forward_pre_hook(
            lambda module, args, kwargs: self._enter(name, module, args, kwargs), with_kwargs=True
        )
        return before, block.register_forward_hook(lambda module, args, output: self._leave(name))

    def _hook_layer(self, name: str) -> Any:
        return self._model.get_submodule(name).register_forward_pre_hook(lambda module, args: self._meet(name, args))

    def _enter(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._probe is not None:
            return
        self._entered[name] = self._entered.get(name, 0) + 1
        if self._entered[name] > len(self._forwards):
            raise ValueError(f"{name} is run more than once in a forward, which the walk over blocks cannot do")
        if self._entered[name] > 1:
            return
        if not self._callbacks.enter(name):
            return
        for names in self._find_sets(name, block, args, kwargs):
            layers = LayerSet(tuple(f"{name}.{part}" for part in names))
            layers.statistics = self._callbacks.gather(layers.names)
            self._sets.setdefault(name, []).append(layers)
            self._order.append(layers)
            self._set_of |= dict.fromkeys(layers.names, layers)

    def _find_sets(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> list[tuple[str, ...]]:
        """Which layers read one input, found by running the block once; blocks that are built alike are run once."""
        wanted = [layer.removeprefix(f"{name}.") for layer in self._layers.get(name, ())]
        kind = (type(block), tuple(wanted), tuple(type(module) for module in block.modules()))
        if wanted and kind not in self._known_sets:
            probe: dict[str, Tensor] = {}
            self._probe = probe
            try:
                block.forward(*args, **kwargs)
            finally:
                self._probe = None
            groups: dict[tuple[Any, ...], list[str]] = {}
            for layer, value in probe.items():
                key = (value.data_ptr(), tuple(value.shape), value.stride())
                groups.setdefault(key, []).append(layer.removeprefix(f"{name}."))
            self._known_sets[kind] = _with_unmet([tuple(names) for names in groups.values()], wanted)
        return self._known_sets.get(kind, [])

    def _meet(self, name: str, args: tuple[Any, ...]) -> None:
        if self._probe is not None:
            self._probe[name] = args[0]  # held, so that no other tensor gets its address
            return
        layers = self._set_of.get(name)
        if layers is None or layers.solved:
            return
        inputs = args[0].reshape(-1, args[0].shape[-1])
        for statistic in layers.statistics:
            statistic.update(inputs)
        layers.num_tokens += len(inputs)
        self._wait_for(layers)

    def _solve(self, layers: LayerSet) -> None:
        self._callbacks.solve(layers)
        layers.solved, layers.statistics = True, []

    def _leave(self, name: str) -> None:
        if self._probe is not None:
            return
        self._left[name] = self._left.get(name, 0) + 1
        if self._left[name] == len(self._forwards):
            for layers in self._sets.pop(name, []):
                if not layers.solved:  # no token has come to it: an expert that was never chosen
                    self._solve(layers)
                self._order.remove(layers)
            self._callbacks.leave(name)
        if name == self._blocks[-1]:
            raise _Finished


def _with_unmet(met: list[tuple[str, ...]], wanted: Sequence[str]) -> list[tuple[str, ...]]:
    """Sets for all of `wanted`: experts that the probe did not reach get the sets of the experts that it did.

    Experts run in the order of their numbers, so their sets stand in that order too.
    """
    reached = {name for names in met for name in names}
    shapes = {tuple(_numberless(name) for name in names): names for names in met if _number(names[0]) is not None}
    expert_sets: dict[int, list[tuple[str, ...]]] = {}
    for name in wanted:
        number = _number(name)
        if number is None or expert_sets.get(number) or not shapes:
            continue
        named = {_numberless(other): other for other in wanted if _number(other) == number}
        expert_sets[number] = [
            tuple(named[part] for part in shape) for shape in shapes if all(p in named for p in shape)
        ]
    first = next((at for at, names in enumerate(met) if _number(names[0]) is not None), len(met))
    plain = [names for names in met if _number(names[0]) is None]
    ordered = [names for number in sorted(expert_sets) for names in expert_sets[number]]
    reached |= {name for names in ordered for name in names}
    return [*plain[:first], *ordered, *plain[first:], *((name,) for name in wanted if name not in reached)]


def _number(name: str) -> int | None:
    """The number of the expert in a layer's name."""
    parts = name.split(".")
    return next((int(part) for part in parts if part.isdigit()), None)


def _numberless(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
