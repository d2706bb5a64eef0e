"""Tensors as plain dense parts, and back. A quantized tensor object is never moved: its parts are, and it is rebuilt.

Most values are one plain tensor. NF4 and LLM.int8 of bitsandbytes keep scales on the tensor object and a second
reference to them on the module, so that both are put in place and taken back together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

Place = tuple[nn.Module, str, str]
"""A module, `_parameters` or `_buffers`, and the name there."""


class Value:
    """One parameter or buffer that is a plain tensor, in all the places where it is seen."""

    def __init__(self, home: Any, places: Sequence[Place]) -> None:
        self.home, self.places = home, tuple(places)

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self.home.data]

    def rebase(self, parts: Sequence[torch.Tensor]) -> None:
        """`parts` hold the values of home from now on."""
        self.home.data = parts[0]

    def build(self, parts: Sequence[torch.Tensor]) -> Any:
        """What a module is to hold instead of home, over `parts`, wherever they are."""
        return nn.Parameter(parts[0], requires_grad=False) if isinstance(self.home, nn.Parameter) else parts[0]

    def show(self, built: Any) -> None:
        for module, store, key in self.places:
            getattr(module, store)[key] = built

    def hide(self, built: Any) -> None:
        for module, store, key in self.places:
            values = getattr(module, store)
            if values.get(key) is built:
                values[key] = self.home


class NF4Value(Value):
    """`Params4bit`, with or without double quantization. The module has a second reference to the quant state."""

    @property
    def parts(self) -> list[torch.Tensor]:
        state = self.home.quant_state
        nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
        return [self.home.data, state.absmax, state.code, *nested]

    def rebase(self, parts: Sequence[torch.Tensor]) -> None:
        self.home.data = parts[0]
        _fill(self.home.quant_state, parts)

    def build(self, parts: Sequence[torch.Tensor]) -> Any:
        state = copy.copy(self.home.quant_state)
        if state.nested:
            state.state2 = copy.copy(state.state2)
        _fill(state, parts)
        kept = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
        options = {name: getattr(self.home, name) for name in kept}
        made = type(self.home)(parts[0], requires_grad=False, quant_state=state, bnb_quantized=True, **options)
        return made, state

    def show(self, built: Any) -> None:
        for module, _, key in self.places:
            module._parameters[key], module.quant_state = built

    def hide(self, built: Any) -> None:
        for module, _, key in self.places:
            module._parameters[key], module.quant_state = self.home, self.home.quant_state


class Int8Value(Value):
    """`Int8Params`. After its first run the layer has the weight and its scales in `module.state`."""

    def __init__(self, home: Any, places: Sequence[Place]) -> None:
        super().__init__(home, places)
        module: Any = places[0][0]
        self._states: list[Any] = [module.state for module, _, _ in places]
        self._scales = home.SCB if home.SCB is not None else module.state.SCB

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self.home.data, self._scales]

    def rebase(self, parts: Sequence[torch.Tensor]) -> None:
        self.home.data, self._scales = parts
        self.home.CB, self.home.SCB = self.home.data, self._scales
        self.hide(None)

    def build(self, parts: Sequence[torch.Tensor]) -> Any:
        made = type(self.home)(parts[0], requires_grad=False, has_fp16_weights=False, CB=parts[0], SCB=parts[1])
        states = []
        for old in self._states:
            state = copy.copy(old)
            state.CB, state.SCB = parts
            states.append(state)
        return made, states

    def show(self, built: Any) -> None:
        made, states = built
        for (module, _, key), state in zip(self.places, states, strict=True):
            module._parameters[key], module.state = made, state

    def hide(self, built: Any) -> None:
        for (module, _, key), state in zip(self.places, self._states, strict=True):
            state.CB, state.SCB = self.home.data, self._scales
            module._parameters[key], module.state = self.home, state


def value_of(tensor: torch.Tensor, places: Sequence[Place]) -> Value:
    """The value that a parameter or buffer is.

    Raises:
        ValueError: a tensor subclass whose parts are not known.
    """
    kind = type(tensor).__name__
    if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer):
        return Value(tensor, places)
    if kind == "Params4bit" and getattr(tensor, "quant_state", None) is not None:
        return NF4Value(tensor, places)
    if kind == "Int8Params":
        return Int8Value(tensor, places)
    module, _, key = places[0]
    raise ValueError(
        f"{key} of a {type(module).__name__} is a {kind}, whose parts device_budget does not know: leave device_budget "
        "out, or load the model in another format"
    )


def _fill(state: Any, parts: Sequence[torch.Tensor]) -> None:
    state.absmax, state.code = parts[1], parts[2]
    if state.nested:
        state.offset, state.state2.absmax, state.state2.code = parts[3:]
