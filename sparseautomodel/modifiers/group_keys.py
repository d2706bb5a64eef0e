"""Groups of layers and the scheme of each, as recipes write them: read, checked by compressed-tensors, and named."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from pydantic import BaseModel, ValidationError

from sparseautomodel.modifiers.base import Layer, ModifierError
from sparseautomodel.scales import ErrorSearch

GROUP_SIZES = (128, 64, 32)
"""What `group_size: auto` chooses from."""


@dataclass(frozen=True)
class Group:
    """Layers that are stored alike."""

    targets: tuple[str, ...]
    scheme: QuantizationScheme | None
    """None leaves the layers dense."""
    search: ErrorSearch | None = None
    """None for `observer: minmax`."""
    automatic: str | None = None
    """Where `group_size: auto` stands: the modifier's key, or the name of an explicit group."""
    sized: bool = False
    """Whether the modifier's `group_size` applies."""


def observes_inputs(scheme: QuantizationScheme) -> bool:
    """Whether something of the layer's inputs is stored, and so has to be found from data."""
    return scheme.input_activations is not None and scheme.input_activations.dynamic is not True


def cache_args(given: Any) -> QuantizationArgs | None:
    """How keys and values are stored in a cache: in 8 bits, integers or FP8, with a scale a layer found from data."""
    key, example = "kv_cache_scheme", "{num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ModifierError(key, f"got {given!r}. Write {example}")
    try:
        args = QuantizationArgs(**{name: value for name, value in given.items() if name != "observer"})
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModifierError(key, f"{_reason(error, QuantizationArgs)}. Write {example}") from error
    kind = (args.num_bits, args.strategy, args.dynamic, args.symmetric, args.scale_dtype)
    if kind != (8, "tensor", False, True, None) or given.get("observer") not in (None, "minmax", "static_minmax"):
        raise ModifierError(
            key,
            "a cache has 8 bits (type float or int) and one scale for the keys and one for the values of each layer, "
            f"found from the largest of all tokens. Write {example}",
        )
    return args


def _static_presets() -> dict[str, str]:
    found = {}
    for name, preset in PRESET_SCHEMES.items():
        activations = preset.get("input_activations")
        if activations is not None and activations.dynamic is not True:
            near = (f"{name}_DYNAMIC", f"{name}A16", "W8A8")
            found[name] = next(preset for preset in near if preset in PRESET_SCHEMES)
    return found


WITHOUT_DATA = _static_presets()
"""Presets whose activation scales are found from data -> the nearest one that needs none."""


def normal(key: str, given: Any) -> Any:
    """One spelling for one meaning: presets in capitals, targets as lists, models of compressed-tensors as values."""
    if given is None or (key == "scheme" and isinstance(given, str)):
        return given and given.upper()
    if not isinstance(given, Mapping) or not given or not all(isinstance(name, str) for name in given):
        raise ModifierError(key, f"{key} must map names to targets or groups, got {given!r}")
    entries: dict[str, Any] = {}
    for name, entry in given.items():
        entry = values_of(entry)
        if isinstance(entry, Mapping) and key == "config_groups":
            entries[name] = {part: values_of(value) for part, value in entry.items()}
        else:
            entries[name.upper()] = [entry] if isinstance(entry, str) else entry
    return entries


def values_of(given: Any) -> Any:
    """Models of compressed-tensors as plain values, tuples as lists."""
    if isinstance(given, BaseModel):
        return given.model_dump(mode="json", exclude_defaults=True)
    return list(given) if isinstance(given, tuple) else given


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "num_bits": tuple(range(2, 9)),
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "block", "tensor_group"),
}
"""Values of the keys of `weights` that compressed-tensors would refuse without naming what it allows."""


def explicit(name: str, entry: Mapping[str, Any], observer: str, defaults: ErrorSearch) -> Group:
    """A group of `config_groups` that is spelled out, checked by compressed-tensors and for what can be stored."""
    key, given = "config_groups", {} if entry.get("weights") is None else entry["weights"]
    if not isinstance(given, Mapping):
        raise ModifierError(key, f"{name}: weights must be keys such as num_bits, got {given!r}")
    weights = dict(given)
    found = observer_name(key, weights.pop("observer", None) or observer)
    search = search_of(key, found, weights.pop("observer_kwargs", None) or {}, defaults)
    automatic = name if weights.get("group_size") == "auto" else None
    if automatic:
        weights["group_size"] = GROUP_SIZES[0]
    bits = {"num_bits": (4, 6, 8)} if str(weights.get("type")).lower() == "float" else {}
    for part, allowed in (_ALLOWED | bits).items():
        value = weights.get(part)
        value = value.lower() if isinstance(value, str) else value
        if value is not None and value not in allowed:
            names = [str(choice) for choice in allowed]
            near = difflib.get_close_matches(str(value), names, 1)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise ModifierError(key, f"{name}: weights.{part} is {value!r}.{guess} Allowed: {', '.join(names)}")
    if type(weights.get("group_size", -1)) not in (int, type(None)):
        raise ModifierError(key, f"{name}: weights.group_size must be a number or auto, got {weights['group_size']!r}")
    try:
        scheme = QuantizationScheme(**{"targets": [], **entry, "weights": weights})
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModifierError(key, f"{name}: {_reason(error)}") from error
    problem = "weights are missing" if entry.get("weights") is None else _unsupported(scheme)
    if problem is not None:
        raise ModifierError(key, f"{name}: {problem}")
    return Group(tuple(scheme.targets), scheme, search, automatic)


def _reason(error: Exception, top: type[BaseModel] = QuantizationScheme) -> str:
    if not isinstance(error, ValidationError):
        return str(error).splitlines()[0]
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"{where}: {first['msg'].splitlines()[0].removeprefix('Value error, ')}"
    model = top if len(first["loc"]) == 1 else QuantizationArgs
    near = difflib.get_close_matches(str(first["loc"][-1]), model.model_fields, 1)
    guess = f" Did you mean {near[0]}?" if near else ""
    return f"unknown key {where}.{guess} Allowed: {', '.join(model.model_fields)}"


def _unsupported(scheme: QuantizationScheme) -> str | None:
    """Why a scheme that compressed-tensors accepts cannot be found, or be stored."""
    weights = scheme.weights
    if not scheme.targets:
        return "targets are missing. Write for example targets: [Linear]"
    if weights.dynamic:
        return "weights are not dynamic: they are rounded once"
    if weights.actorder is not None:
        return (
            "actorder is the order in which GPTQModifier works and needs calibration data: write it beside "
            "config_groups there, or leave it out"
        )
    if weights.type == "int":
        if weights.strategy == "tensor_group":
            return "the strategy tensor_group is that of NVFP4; integer weights have group"
        if weights.scale_dtype is not None or weights.zp_dtype != torch.int8:
            return "scales have the dtype of the weights, zero points int8: leave scale_dtype and zp_dtype out"
    elif not weights.symmetric:
        return "float weights are symmetric"
    elif weights.num_bits != 8 or weights.scale_dtype or weights.strategy == "tensor_group":
        kind = (weights.num_bits, weights.strategy, weights.group_size, weights.scale_dtype)
        names = ("NVFP4A16", "MXFP4A16", "MXFP6A16", "MXFP8A16")
        presets = [PRESET_SCHEMES[name]["weights"] for name in names]
        if kind not in [(one.num_bits, one.strategy, one.group_size, one.scale_dtype) for one in presets]:
            return f"besides FP8 without scale_dtype, float weights are those of {', '.join(names)}"
    inferred = infer_module_format(torch.nn.Linear, scheme).value
    if scheme.format not in (None, inferred):
        return f"the format of this scheme is {inferred}, not {scheme.format}: leave format out"
    return _unsupported_activations(scheme)


def _unsupported_activations(scheme: QuantizationScheme) -> str | None:
    """The same for activations whose scales are found from data."""
    args, outputs = scheme.input_activations, scheme.output_activations
    if outputs is not None and outputs.dynamic is not True:
        return "only inputs are observed: leave output_activations out, or write dynamic: true there"
    if args is None or args.dynamic is True:
        return None
    if args.observer not in (None, "minmax", "static_minmax"):
        return f"inputs are observed by their extremes over all tokens: write observer: minmax, not {args.observer}"
    if args.dynamic == "local":
        nvfp4, parts = (
            PRESET_SCHEMES["NVFP4"],
            ("num_bits", "type", "symmetric", "strategy", "group_size", "scale_dtype"),
        )
        for mine, its in ((scheme.weights, nvfp4["weights"]), (args, nvfp4["input_activations"])):
            if any(getattr(mine, part) != getattr(its, part) for part in parts):
                return "dynamic: local is for the weights and inputs of NVFP4. Write scheme: NVFP4"
        return None
    if args.strategy != "tensor":
        return f"inputs that are not dynamic have one scale: write strategy: tensor, not {args.strategy}"
    if args.num_bits > 8 or (args.type == "float" and (args.num_bits != 8 or not args.symmetric)):
        return "inputs that are not dynamic are integers of up to 8 bits, or symmetric FP8"
    if args.scale_dtype is not None or args.zp_dtype not in (torch.int8, torch.float8_e4m3fn):
        return "scales of inputs have the dtype of the weights: leave scale_dtype and zp_dtype out"
    return None


def observer_name(key: str, name: Any) -> str:
    names = {"memoryless_minmax": "minmax", "static_minmax": "minmax", "memoryless_mse": "mse"}
    if names.get(name, name) not in ("minmax", "mse"):
        raise ModifierError(key, f"there is no observer {name!r}. Allowed: minmax, mse")
    return names.get(name, name)


def search_of(key: str, observer: str, options: Mapping[str, Any], defaults: ErrorSearch) -> ErrorSearch | None:
    allowed = [field.name for field in dataclasses.fields(ErrorSearch)] if observer == "mse" else []
    unknown = [name for name in options if name not in allowed]
    if unknown:
        raise ModifierError(key, f"observer {observer} has no {unknown[0]}. Allowed: {', '.join(allowed) or 'nothing'}")
    return dataclasses.replace(defaults, **options) if observer == "mse" else None


def group_sizes(scheme: QuantizationScheme) -> list[int]:
    """What must divide the inputs of a layer."""
    parts = (scheme.weights, scheme.input_activations, scheme.output_activations)
    return [args.group_size for args in parts if args is not None and args.strategy in ("group", "tensor_group")]


def largest_divisor(layers: Sequence[Layer], skip: bool) -> int:
    """The largest of GROUP_SIZES that divides all layers, or where some may be skipped, the most of them."""
    divided = {size: [layer for layer in layers if layer.shape[1] % size == 0] for size in GROUP_SIZES}
    best = max(GROUP_SIZES, key=lambda size: (len(divided[size]), size))
    if len(divided[best]) == len(layers) or (skip and divided[best]):
        return best
    odd = [layer for layer in layers if layer not in divided[best]]
    named = ", ".join(f"{layer.name} ({layer.shape[1]} inputs)" for layer in odd[:5])
    raise ModifierError(
        "group_size",
        f"auto: none of {', '.join(map(str, GROUP_SIZES))} divides all layers, not {named}"
        f"{f' and {len(odd) - 5} more' if len(odd) > 5 else ''}. Write group_size: -1 (one scale a row), a number "
        "that divides them, skip_indivisible: true, or put them in ignore",
    )
