"""What `from_pretrained` was given: checked, and read into a config, a dtype and a device."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.accelerate import check_and_set_device_map

from sparseautomodel.checkpoint import HUB_KEYS, LazyTensor
from sparseautomodel.layers import quantization_of
from sparseautomodel.recipe import Recipe
from sparseautomodel.save import parse_size

EXECUTIONS = ("auto", "compressed", "dense")


def check_arguments(
    execution: str,
    device_budget: int | str | None,
    recipe: Any,
    kwargs: dict[str, Any],
    positional: Sequence[Any] = (),
) -> None:
    if recipe is None and positional and isinstance(positional[0], (str, dict, list, Recipe)):
        raise ValueError(
            f"a recipe goes by its name: from_pretrained(path, recipe={str(positional[0])[:60]!r}); what stands there "
            "without a name is passed on to the model's constructor"
        )
    if execution not in EXECUTIONS:
        raise ValueError(f"execution={execution!r} is not one of {', '.join(map(repr, EXECUTIONS))}")
    if device_budget is not None and not _is_size(device_budget):
        raise ValueError(f"device_budget={device_budget!r} must be bytes, or text such as '6GiB'")
    if device_budget is None and "device" in kwargs:
        raise ValueError(
            f"device={kwargs['device']!r} goes with device_budget. Write device_map={str(kwargs['device'])!r} to have "
            "the model there, or give device_budget='6GiB' as well"
        )
    if recipe is not None and kwargs.get("quantization_config") is not None:
        raise ValueError("recipe and quantization_config both say how to quantize: leave one of them out")


def _is_size(given: Any) -> bool:
    try:
        return not isinstance(given, bool) and parse_size(given) > 0
    except ValueError:
        return False


def is_for_transformers_alone(name_or_path: Any, recipe: Recipe | None, kwargs: dict[str, Any]) -> bool:
    """Sources whose loading is another story (GGUF, adapters, a state dict in memory): transformers does all of it."""
    reason = next((key for key in ("gguf_file", "state_dict") if kwargs.get(key) is not None), None)
    if name_or_path is None:
        reason = reason or "no checkpoint (name_or_path is None)"
    elif os.path.isfile(os.path.join(name_or_path, "adapter_config.json")):
        reason = reason or "an adapter"
    if reason and recipe is not None:
        raise ValueError(
            f"a recipe cannot be applied to {reason} while it is loaded. Load it with transformers, save it with "
            "save_pretrained, then: from_pretrained(saved_folder, recipe=...)"
        )
    device_map = kwargs.get("device_map")
    if isinstance(device_map, dict) and "disk" in device_map.values():
        raise ValueError(
            "device_map places modules on 'disk', where weights stay files and cannot be compressed on the way. Write "
            "the compressed checkpoint first: oneshot(path, recipe, output=folder), then load the folder with "
            "transformers and this device_map"
        )
    return reason is not None


def is_foreign(config: PreTrainedConfig, kwargs: dict[str, Any]) -> bool:
    """Whether another quantization method is at work, which transformers loads by itself."""
    entry = getattr(config, "quantization_config", None)
    return kwargs.get("quantization_config") is not None or (entry is not None and quantization_of(config) is None)


def read_config(
    name_or_path: str | os.PathLike[str], kwargs: dict[str, Any]
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config, and the arguments it did not take; those of the config class are applied to it."""
    kwargs = dict(kwargs)
    config = kwargs.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        return copy.deepcopy(config), kwargs
    named = (*HUB_KEYS, "trust_remote_code", "subfolder", "code_revision")
    keep = (
        "dtype",
        "torch_dtype",
        "quantization_config",
        "output_loading_info",
        "device_map",
        "key_mapping",
        "distributed_config",
    )
    kept = {key: kwargs.pop(key) for key in (*keep, *named) if key in kwargs}
    names = {key: kept[key] for key in named if key in kept}
    config, unused = AutoConfig.from_pretrained(
        config if config is not None else name_or_path, return_unused_kwargs=True, **names, **kwargs
    )
    return config, unused | kept


def asked_dtype(kwargs: dict[str, Any], config: PreTrainedConfig, tensors: Mapping[str, LazyTensor]) -> torch.dtype:
    """The dtype asked for; "auto" (the default) is the config's, else that of the first floating tensor."""
    asked = kwargs.get("dtype", kwargs.get("torch_dtype"))
    if isinstance(asked, dict):  # a dtype a sub-config: transformers takes the one for all
        asked = asked.get("", torch.get_default_dtype())
    if asked not in (None, "auto"):
        asked = getattr(torch, asked, asked) if isinstance(asked, str) else asked
        if not isinstance(asked, torch.dtype):
            raise ValueError(f"dtype={asked!r} is no dtype of torch. Write 'auto', torch.bfloat16 or 'bfloat16'")
        return asked
    named = getattr(config, "dtype", None)
    if isinstance(named, torch.dtype):
        return named
    wide = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return next((tensor.dtype for tensor in tensors.values() if tensor.dtype in wide), torch.float32)


def compression_device(device_map: Any) -> torch.device:
    """Where modifiers run: where the weights go, so that a dense weight crosses once; else the accelerator there is."""
    device_map = check_and_set_device_map(device_map)
    if device_map is None:
        return torch.device("cpu")
    places = set(device_map.values()) if isinstance(device_map, dict) else set()
    if len(places) == 1:
        return torch.device(places.pop())
    return accelerator() or torch.device("cpu")


def check_device(device: torch.device) -> None:
    there_is = accelerator()
    if device.type not in ("cpu", "meta", there_is.type if there_is else "cpu"):
        there = f"'cpu' or {there_is.type!r}" if there_is else "only 'cpu'"
        raise ValueError(f"the model is to be on {str(device)!r}, and this machine and torch have {there}")


def accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
