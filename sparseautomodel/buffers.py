"""Buffers that no file holds. transformers fills those of its own classes after a load; those of custom code come back
as whatever was in memory (transformers#48892), and plain tensor attributes stay on the meta device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights


def restore_buffers(model: PreTrainedModel) -> list[str]:
    """Give non-persistent buffers and tensor attributes of custom code the values that their constructors compute.

    The model is built once more with its parameters on the meta device, which costs no memory to speak of; nothing is
    built when every module is transformers' or torch's own. Each keeps the dtype that it has in `model`. Returns the
    names of what was restored. Functions of torch are replaced meanwhile: callers hold the lock for building models.
    """
    names = [*_custom_buffers(model), *(name for name, _ in meta_attributes(model))]
    if not names:
        return []
    with no_init_weights(), init_empty_weights(include_buffers=False):
        fresh = type(model)(model.config)
    restored = []
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        try:
            value = getattr(fresh.get_submodule(path), attribute)
        except AttributeError:
            continue  # a module that was put in after construction; verify says if it is left without values
        if isinstance(value, torch.Tensor) and not value.is_meta:
            setattr(module, attribute, value.to(_device(module, model), getattr(module, attribute).dtype))
            restored.append(name)
    return restored


def meta_attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain tensor attributes (neither parameters nor buffers) that are on the meta device, with their full names."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield f"{path}.{attribute}".removeprefix("."), value


def _custom_buffers(model: nn.Module) -> Iterator[str]:
    """Buffers that transformers does not fill: those of custom modules, and of all modules where the model is custom,
    since it is `_init_weights` of the model that fills them."""
    everywhere = not _is_known(model)
    for path, module in model.named_modules():
        if _is_known(module) and not everywhere:
            continue
        for name in module._non_persistent_buffers_set:
            if module._buffers.get(name) is not None:
                yield f"{path}.{name}".removeprefix(".")


def _is_known(module: nn.Module) -> bool:
    """Whether the class comes with transformers, torch or this library; remote code lives in `transformers_modules`."""
    return type(module).__module__.partition(".")[0] in ("transformers", "torch", "sparseautomodel")


def _device(module: nn.Module, model: PreTrainedModel) -> torch.device:
    own = next((value.device for value in module.parameters() if not value.is_meta), None)
    return own or model.device
