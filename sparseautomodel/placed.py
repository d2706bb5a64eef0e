"""A model whose weights come and go, as its callers see it: where it runs, and what a failed call leaves behind."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def set_classes(model: nn.Module, placed: bool) -> None:
    """Let a model and the models in it say the device that they run on, and call their `residency`; or not any more."""
    for module in model.modules():
        cls: Any = type(module)
        if isinstance(module, PreTrainedModel) and placed != getattr(cls, "is_placed", False):
            module.__class__ = _placed(cls) if placed else cls.__base__


def length_of(cache: Any) -> int:
    """Tokens in a cache of keys and values; 0 where there is none."""
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0


def crop(cache: Any, length: int) -> bool:
    """Take a cache back to `length` tokens; whether it can be."""
    if any(getattr(layer, "is_sliding", False) for layer in getattr(cache, "layers", ())):
        return False
    try:
        cache.crop(length)
    except (AttributeError, NotImplementedError, ValueError):
        return False
    return True


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
