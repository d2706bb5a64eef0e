"""A model whose weights come and go, as its callers see it: where it runs, and what a failed call leaves behind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from sparseautomodel.hooks import drop_dead


def set_classes(model: nn.Module, residency: Any) -> None:
    """Let a model and the models in it, such as its encoder, be called through `residency`; None: not any more."""
    for module in model.modules():
        cls: Any = type(module)
        if not isinstance(module, PreTrainedModel):
            continue
        is_placed = getattr(cls, "is_placed", False)
        if residency is not None:
            module.__class__ = cls if is_placed else _placed(cls)
            module.residency = residency
        elif is_placed:
            module.__class__ = cls.__base__


def alias(model: Any, seen: Iterable[tuple[Any, Any]]) -> Any:
    """A copy of a model in all but its weights: one storage, two objects. None where one is no plain tensor.

    Args:
        seen: what modules may hold, and the parameter or buffer of home that it stands for.
    """
    memo: dict[int, Any] = {}
    for held, home in seen:
        if type(home) not in (nn.Parameter, nn.Buffer, Tensor):
            return None
        if id(home) not in memo:
            same = home.detach()
            memo[id(home)] = nn.Parameter(same, home.requires_grad) if isinstance(home, nn.Parameter) else same
        memo[id(held)] = memo[id(home)]
    made = copy.deepcopy(model, memo)
    drop_dead(made)
    return made


def lengths_of(kwargs: Mapping[str, Any]) -> list[int]:
    """Tokens in each layer of the cache of keys and values that a call is given."""
    return [int(layer.get_seq_length()) for layer in _layers(kwargs)]


def take_back(kwargs: Mapping[str, Any], lengths: Sequence[int]) -> bool:
    """Let the cache of a call that failed hold what it held before; whether that can be done."""
    layers = _layers(kwargs)
    if any(type(layer) is not DynamicLayer for layer in layers):
        return False
    for number, layer in enumerate(layers):
        length = lengths[number] if number < len(lengths) else 0
        if layer.is_initialized:  # keys and values may differ in length: memory can run out between them
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return True


def refuse_gradients(unit: str, values: Iterable[Any]) -> None:
    """Raise RuntimeError where the gradient of what a streamed unit is given is wanted."""
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        raise RuntimeError(
            f"{unit} is streamed, so its weights are gone when gradients come back to it. Call the model under "
            "torch.no_grad(), or give a device_budget that everything fits in"
        )


def _layers(kwargs: Mapping[str, Any]) -> list[Any]:
    """The layers of a cache that a call adds to; those of cross attention are written whole, or not."""
    caches = [value for value in kwargs.values() if isinstance(value, Cache)]
    return [layer for cache in caches for layer in getattr(cache, "self_attention_cache", cache).layers]


@functools.cache
def _placed(cls: type) -> type:
    """`cls` as it is while its weights come and go: it says the device that it runs on, not that of home."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(cls.__call__, self)
        residency = vars(self).get("residency")
        return residency.call(forward, args, kwargs) if residency is not None else forward(*args, **kwargs)

    def device(self: Any) -> torch.device:
        residency = vars(self).get("residency")
        own: Any = cls.device  # type: ignore[attr-defined]
        return residency._device.device if residency is not None else own.fget(self)

    body: dict[str, Any] = {"device": property(device), "__call__": call, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), body | {"__qualname__": cls.__qualname__, "is_placed": True})
