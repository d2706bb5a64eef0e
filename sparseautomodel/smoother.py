"""Smoothing while a model is walked through: which inputs are divided, by how much, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparseautomodel.modifiers import Modifier, Weight
from sparseautomodel.sets import LayerSet
from sparseautomodel.smoothing import Names, Pair, find_pairs, multiply_columns
from sparseautomodel.transform import LayerPlan

_NOISE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Relative change of a block's output that rounding may cause; for short floats more."""


class Smoother:
    """Divides the inputs of layers, as the recipe's smoothing modifiers ask, where a block's output stays the same."""

    def __init__(self, modifiers: Sequence[Modifier], plans: Mapping[str, LayerPlan]) -> None:
        self._modifiers = [modifier for modifier in modifiers if modifier.smooths]
        self._plans = plans
        self._name, self._block = "", nn.Module()
        self._run: Callable[[], Tensor] = lambda: torch.empty(0)
        self._known: dict[Any, dict[Names, Pair]] = {}
        self._pairs: dict[Names, Pair] = {}
        self._solved: dict[str, Weight] = {}
        self.smoothed: set[str] = set()
        """Layers, by their modules, whose inputs have been divided."""
        self.undone: list[str] = []
        """Layers for which that would have changed more than rounding does."""

    def enter(self, name: str, block: nn.Module, sets: Sequence[LayerSet], run: Callable[[], Tensor]) -> None:
        """Find what makes the input of each set. Blocks that are built alike are searched once."""
        self._name, self._block, self._run, self._solved = name, block, run, {}
        if not self._modifiers:
            return
        parts = [tuple(layer.removeprefix(f"{name}.") for layer in layers.names) for layers in sets]
        kind = (tuple(parts), tuple(type(module) for module in block.modules()))
        if kind not in self._known:
            self._known[kind] = find_pairs(block, run, parts, self._wants)
        self._pairs = self._known[kind]

    def notes(self) -> tuple[str, ...]:
        """What could not be smoothed, in words."""
        names = ", ".join(sorted({type(modifier).__name__ for modifier in self._modifiers}))
        if self._known and not any(self._known.values()):
            return (f"{names} has changed nothing: no input of the layers can be divided without changing the model",)
        if self.undone:
            return (f"{names}: undone, since it changed the output of the block: {', '.join(self.undone)}",)
        return ()

    def keep(self, path: str, weight: Weight) -> None:
        """`weight` is solved. It is kept if it makes the input of a later set, and so may be divided yet."""
        if any(f"{self._name}.{pair.producer}" == path for pair in self._pairs.values()):
            self._solved[path] = weight

    def solved(self, path: str) -> Weight:
        """A layer that was kept."""
        return self._solved[path]

    def smooth(self, layers: LayerSet, weights: Sequence[Weight]) -> str | None:
        """Divide the input of a set, and multiply its weights, if a modifier finds factors that are better than none.

        Returns the solved layer whose `weight` has changed by that and has to be stored anew; mostly None.
        """
        pair = self._pairs.get(tuple(name.removeprefix(f"{self._name}.") for name in layers.names))
        plans = [self._plans[name] for name in layers.names]
        changed = None
        for modifier in self._modifiers if pair is not None else ():
            assert pair is not None
            producer = f"{self._name}.{pair.producer}"
            whole = all(any(modifier is one for one in plan.modifiers) for plan in plans)
            if not whole or not modifier.moves(layers.names, producer, pair.kind):
                continue
            wanted = type(modifier.statistic(plans[0].layer))
            statistic = next(one for one in layers.statistics if type(one) is wanted)
            factors = modifier.smooth(weights, statistic, [plan.scheme for plan in plans], pair.allowed)
            if factors is None:
                continue
            if self._divide(pair, producer, layers, weights, factors):
                self.smoothed |= set(layers.names)
                changed = producer if producer in self._solved else changed
            else:
                self.undone += layers.names
        return changed

    def _divide(self, pair: Pair, producer: str, layers: LayerSet, weights: Sequence[Weight], factors: Tensor) -> bool:
        """Do it, unless the output of the block changes: then all is as it was."""
        before, parameters = self._run(), _parameters(self._block)
        solved = self._solved.get(producer)
        kept = None if solved is None else (solved.values, solved.scale)
        if solved is None:
            channels = pair.divide(self._block, factors)
        else:
            channels = pair.allowed(factors)
            self._divide_solved(pair, solved, pair.producer_factors(factors))
            for name in pair.companions:
                multiply_columns(self._block.get_submodule(name), channels)
        values = [weight.values.float() * channels for weight in weights]
        for name, weight, value in zip(layers.names, weights, values, strict=True):
            module = self._module(name)
            dense = value.to(weight.layer.dtype)
            _put(module, "weight", dense.t().contiguous() if weight.layer.transposed else dense)
        after = self._run()
        most = _NOISE.get(before.dtype, 0.05) * before.float().norm()
        if not bool((after.float() - before.float()).norm() <= most):
            for module, name, old in parameters:
                module._parameters[name] = old
            if solved is not None and kept is not None:
                solved.values, solved.scale = kept
            return False
        for weight, value in zip(weights, values, strict=True):
            weight.values = value
        for statistic in layers.statistics:
            statistic.divide(channels)
        for inputs in layers.inputs:
            inputs.div_(channels.to(inputs.dtype))
        return True

    def _divide_solved(self, pair: Pair, weight: Weight, divisors: Tensor) -> None:
        """Divide the rows of a layer that is solved: their scales, so that the numbers which are stored stay."""
        along = divisors.unsqueeze(1)
        if weight.scale is not None:
            weight.scale = (weight.scale.float() / along).to(weight.scale.dtype)
        weight.values = weight.values.float() / along
        module = self._module(f"{self._name}.{pair.producer}")
        dense = (weight.values).to(weight.layer.dtype)
        _put(module, "weight", dense.t().contiguous() if weight.layer.transposed else dense)
        bias = module._parameters.get("bias")
        if bias is not None:
            _put(module, "bias", (bias.float() / divisors).to(bias.dtype))

    def _wants(self, names: Names, producer: str, kind: str) -> bool:
        """Whether a modifier smooths this set so, and what its producer will be stored as allows it."""
        layers, maker = [f"{self._name}.{name}" for name in names], f"{self._name}.{producer}"
        scheme = self._plans[maker].scheme if maker in self._plans else None
        rows_have_scales = (
            scheme is None
            or scheme.weights is None
            or (scheme.weights.strategy in ("channel", "group") and scheme.weights.scale_dtype is None)
        )
        return rows_have_scales and any(modifier.moves(layers, maker, kind) for modifier in self._modifiers)

    def _module(self, path: str) -> nn.Module:
        return self._block.get_submodule(path.removeprefix(f"{self._name}."))


def _parameters(block: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter | None]]:
    return [(module, name, value) for module in block.modules() for name, value in module._parameters.items()]


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    module._parameters[name] = nn.Parameter(value, requires_grad=False)
