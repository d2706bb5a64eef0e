"""The keys of modifiers that quantize weights: which layer is stored in which scheme of compressed-tensors."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from pydantic import BaseModel, ValidationError
from torch import Tensor

from sparseautomodel.modifiers.base import Layer, Modifier, ModifierError, Weight
from sparseautomodel.scales import ErrorSearch, find_global_scale, find_scales

GROUP_SIZES = (128, 64, 32)
"""What `group_size: auto` chooses from."""


@dataclass(frozen=True, kw_only=True)
class SchemeKeys(Modifier, registered=False):
    """A modifier whose keys say how its layers are stored.

    Where several groups match a layer, an exact name comes before a `re:` pattern, and that before a class name.
    """

    scheme: str | Mapping[str, Any] | None = None
    """A preset of compressed-tensors such as `W4A16`, `W8A8` or `FP8_DYNAMIC`; or presets with their targets."""
    config_groups: Mapping[str, Any] | None = None
    """Instead of `scheme`: group -> {targets, weights, input_activations}, or preset -> targets."""
    group_size: int | str | None = None
    """Weights to a scale instead of the 128 of integer presets: a number, -1 for one scale a row, or `auto`, the
    largest of 128, 64 and 32 that divides every layer. In an explicit group it stands inside `weights`."""
    observer: str | Mapping[str, str] = "minmax"
    """`minmax`, or `mse`: the scale of least error, slower to find and mostly better below 8 bits."""
    skip_indivisible: bool = False
    """Leave layers dense whose width the groups do not divide."""
    weight_observer: InitVar[str | None] = None
    """What llm-compressor calls `observer`."""

    search: ClassVar[ErrorSearch] = ErrorSearch()
    """What `observer: mse` tries."""

    def __post_init__(self, weight_observer: str | None) -> None:
        super().__post_init__()
        given = self.observer
        if weight_observer is not None:
            if given not in ("minmax", weight_observer):
                raise ModifierError("weight_observer", "weight_observer is observer: write observer alone")
            given = weight_observer
        if isinstance(given, Mapping):
            if set(given) != {"weights"}:
                raise ModifierError("observer", f"only weights are observed, got {dict(given)}: observer: mse")
            given = given["weights"]
        if not isinstance(self.skip_indivisible, bool):
            raise ModifierError("skip_indivisible", f"got {self.skip_indivisible!r}. Write true or false")
        # One spelling for one meaning: recipes that do the same are equal and are written alike.
        object.__setattr__(self, "observer", _observer_name("observer", given))
        for key in ("scheme", "config_groups"):
            object.__setattr__(self, key, _normal(key, getattr(self, key)))
        self._groups  # noqa: B018  reads all groups, so what is wrong with them is said here

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        return (*super().keys(), "weight_observer")

    def patterns(self) -> tuple[str, ...]:
        return tuple(pattern for group in self._groups for pattern in group.targets)

    def selects(self, layer: Layer) -> bool:
        group = self._group_of(layer)
        return group is not None and group.scheme is not None and not self.skips(layer)

    def skips(self, layer: Layer) -> bool:
        """Whether the layer is left dense, as `skip_indivisible` allows, because the groups do not divide it."""
        group = self._group_of(layer)
        if not self.skip_indivisible or group is None or group.scheme is None or group.automatic:
            return False
        return any(layer.shape[1] % size for size in _group_sizes(group.scheme))

    def resolve(self, layers: Iterable[Layer]) -> SchemeKeys:
        chosen: dict[str, list[Layer]] = {}
        for layer in layers:
            group = self._group_of(layer)
            if group is not None and group.automatic:
                chosen.setdefault(group.automatic, []).append(layer)
        changes: dict[str, Any] = {}
        for place, mine in chosen.items():
            size = _largest_divisor(mine, self.skip_indivisible)
            if place == "group_size":
                changes["group_size"] = size
            else:
                groups = changes.setdefault("config_groups", dict(self.config_groups or {}))
                groups[place] = {**groups[place], "weights": {**groups[place]["weights"], "group_size": size}}
        return dataclasses.replace(self, **changes) if changes else self

    def scheme_of(self, layer: Layer) -> QuantizationScheme | None:
        """The scheme of the group that has the layer; None too while its `group_size: auto` is not resolved."""
        group = self._group_of(layer)
        return None if group is None or group.automatic or self.skips(layer) else group.scheme

    def rows(self, layer: Layer) -> int:
        args = self.weights_of(layer)
        if args.strategy == "block":
            return args.block_structure[0]
        return layer.shape[0] if args.strategy in ("tensor", "tensor_group") else 1

    def global_scale(self, layer: Layer, values: Sequence[Tensor]) -> Tensor | None:
        """The `[1]` float32 scale that NVFP4 layers share which a server runs as one (q/k/v, gate/up).

        `values` are the whole weights of all these layers. None where the scheme of `layer` has no such scale.
        """
        return find_global_scale(values) if self.weights_of(layer).strategy == "tensor_group" else None

    def weights_of(self, layer: Layer) -> QuantizationArgs:
        """How the weights of the layer are stored. Raises ValueError where this modifier does not store it."""
        scheme = self.scheme_of(layer)
        if scheme is None or scheme.weights is None:
            raise ValueError(
                f"{layer.name} has no scheme here: it is not selected, or `group_size: auto` was not resolved"
            )
        sizes = [size for size in _group_sizes(scheme) if layer.shape[1] % size]
        if sizes:
            raise ValueError(f"{layer.name} has {layer.shape[1]} inputs, no multiple of group size {sizes[0]}")
        return scheme.weights

    def share_global_scale(self, weights: Sequence[Weight]) -> None:
        """Give one global scale to all of `weights` that need one (NVFP4) and have none: layers that read one input."""
        lacking = [
            weight
            for weight in weights
            if weight.global_scale is None and self.weights_of(weight.layer).strategy == "tensor_group"
        ]
        shared = find_global_scale([weight.values for weight in lacking]) if lacking else None
        for weight in lacking:
            weight.global_scale = shared

    def set_scales(self, weight: Weight, importance: Tensor | None = None) -> None:
        """Set `scale`, and `zero_point` where the scheme is asymmetric; for NVFP4 `global_scale` too, if it is not yet.

        `importance` `[in_features]` says how much errors in each column count where scales are searched.
        """
        args, group = self.weights_of(weight.layer), self._group_of(weight.layer)
        self.share_global_scale([weight])
        search = group.search if group else None
        weight.scale, weight.zero_point = find_scales(
            weight.values, args, global_scale=weight.global_scale, search=search, importance=importance
        )

    def _group_of(self, layer: Layer) -> _Group | None:
        if self.ignores(layer):
            return None
        ranked: list[tuple[int, str, int]] = []
        for number, group in enumerate(self._groups):
            for pattern in group.targets:
                if layer.named_by(pattern):
                    ranked.append((int(pattern.startswith("re:")), pattern, number))
                elif layer.targeted_by(pattern):
                    ranked.append((2, pattern, number))
        return self._groups[min(ranked)[2]] if ranked else None

    @functools.cached_property
    def _groups(self) -> tuple[_Group, ...]:
        if (self.scheme is None) == (self.config_groups is None):
            raise ModifierError("scheme", "give either scheme or config_groups. Write for example scheme: W4A16")
        if isinstance(self.scheme, str):
            groups = [self._preset("scheme", self.scheme, list(self.targets))]
        elif self.targets != Modifier.targets:
            raise ModifierError("targets", "where there are groups, each names its own targets")
        elif self.scheme is not None:
            groups = [self._preset("scheme", name, entry) for name, entry in self.scheme.items()]
        else:
            assert self.config_groups is not None
            groups = [
                _explicit(name, entry, str(self.observer), self.search)
                if isinstance(entry, Mapping)
                else self._preset("config_groups", name, entry)
                for name, entry in self.config_groups.items()
            ]
        patterns = [pattern for group in groups for pattern in group.targets]
        twice = [pattern for pattern in patterns if patterns.count(pattern) > 1]
        if twice:
            raise ModifierError("targets", f"{twice[0]} is a target twice: which group it belongs to is open")
        if all(group.scheme is None for group in groups):
            raise ModifierError("scheme", "UNQUANTIZED changes nothing. Write for example scheme: W4A16")
        self._check_group_size(any(group.sized for group in groups))
        return tuple(groups)

    def _check_group_size(self, applies: bool) -> None:
        size = self.group_size
        if size not in (None, "auto", -1) and (type(size) is not int or size < 1):
            raise ModifierError("group_size", f"got {size!r}. Write a number, auto, or -1 for one scale a row")
        if size is not None and not applies:
            raise ModifierError("group_size", "only integer presets with groups have one, such as W4A16: leave it out")

    def _preset(self, key: str, name: str, targets: Any) -> _Group:
        if name not in PRESET_SCHEMES:
            near = difflib.get_close_matches(name, PRESET_SCHEMES, 1, 0.5)
            guess = f" Did you mean {near[0]}?" if near else ""
            allowed = [preset for preset in PRESET_SCHEMES if preset not in _NEED_DATA]
            raise ModifierError(key, f"there is no scheme {name!r}.{guess} Allowed: {', '.join(allowed)}")
        if name in _NEED_DATA:
            raise ModifierError(
                key,
                f"{name} needs calibration data for its activation scales. Without data: {_NEED_DATA[name]}",
            )
        if not targets or not isinstance(targets, list) or not all(isinstance(item, str) for item in targets):
            raise ModifierError(key, f"{name} needs a list of targets, such as [Linear], got {targets!r}")
        scheme = preset_name_to_scheme(name, targets)
        if scheme.weights is None:
            return _Group(tuple(targets), None)
        search = _search("observer", str(self.observer), {}, self.search)
        if self.group_size is None or (scheme.weights.type, scheme.weights.strategy) != ("int", "group"):
            return _Group(tuple(targets), scheme, search)
        if self.group_size == -1:
            scheme.weights = scheme.weights.model_copy(update={"strategy": "channel", "group_size": None})
        elif self.group_size != "auto":
            scheme.weights = scheme.weights.model_copy(update={"group_size": self.group_size})
        automatic = "group_size" if self.group_size == "auto" else None
        return _Group(tuple(targets), scheme, search, automatic, sized=True)


@dataclass(frozen=True)
class _Group:
    targets: tuple[str, ...]
    scheme: QuantizationScheme | None
    """None leaves the layers dense."""
    search: ErrorSearch | None = None
    """None for `observer: minmax`."""
    automatic: str | None = None
    """Where `group_size: auto` stands: the modifier's key, or the name of an explicit group."""
    sized: bool = False
    """Whether the modifier's `group_size` applies."""


def _static_presets() -> dict[str, str]:
    """Presets whose activation scales are found from data -> the nearest one that needs none."""
    found = {}
    for name, preset in PRESET_SCHEMES.items():
        activations = preset.get("input_activations")
        if activations is not None and activations.dynamic is not True:
            near = (f"{name}_DYNAMIC", f"{name}A16", "W8A8")
            found[name] = next(preset for preset in near if preset in PRESET_SCHEMES)
    return found


_NEED_DATA = _static_presets()


def _normal(key: str, given: Any) -> Any:
    """One spelling for one meaning: presets in capitals, targets as lists, models of compressed-tensors as values."""
    if given is None or (key == "scheme" and isinstance(given, str)):
        return given and given.upper()
    if not isinstance(given, Mapping) or not given or not all(isinstance(name, str) for name in given):
        raise ModifierError(key, f"{key} must map names to targets or groups, got {given!r}")
    entries: dict[str, Any] = {}
    for name, entry in given.items():
        entry = _values(entry)
        if isinstance(entry, Mapping) and key == "config_groups":
            entries[name] = {part: _values(value) for part, value in entry.items()}
        else:
            entries[name.upper()] = [entry] if isinstance(entry, str) else entry
    return entries


def _values(given: Any) -> Any:
    if isinstance(given, BaseModel):
        return given.model_dump(mode="json", exclude_defaults=True)
    return list(given) if isinstance(given, tuple) else given


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "num_bits": tuple(range(2, 9)),
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "block", "tensor_group"),
}
"""Values of the keys of `weights` that compressed-tensors would refuse without naming what it allows."""


def _explicit(name: str, entry: Mapping[str, Any], observer: str, defaults: ErrorSearch) -> _Group:
    """A group of `config_groups` that is spelled out, checked by compressed-tensors and for what can be stored."""
    key, given = "config_groups", {} if entry.get("weights") is None else entry["weights"]
    if not isinstance(given, Mapping):
        raise ModifierError(key, f"{name}: weights must be keys such as num_bits, got {given!r}")
    weights = dict(given)
    found = _observer_name(key, weights.pop("observer", None) or observer)
    search = _search(key, found, weights.pop("observer_kwargs", None) or {}, defaults)
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
    return _Group(tuple(scheme.targets), scheme, search, automatic)


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error).splitlines()[0]
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"{where}: {first['msg'].splitlines()[0].removeprefix('Value error, ')}"
    model = QuantizationScheme if len(first["loc"]) == 1 else QuantizationArgs
    near = difflib.get_close_matches(str(first["loc"][-1]), model.model_fields, 1)
    guess = f" Did you mean {near[0]}?" if near else ""
    return f"unknown key {where}.{guess} Allowed: {', '.join(model.model_fields)}"


def _unsupported(scheme: QuantizationScheme) -> str | None:
    """Why a scheme that compressed-tensors accepts cannot be had without data, or be stored."""
    weights, activations = scheme.weights, (scheme.input_activations, scheme.output_activations)
    if not scheme.targets:
        return "targets are missing. Write for example targets: [Linear]"
    if any(args is not None and args.dynamic is not True for args in activations):
        return "activation scales that are not dynamic need calibration data. Write dynamic: true"
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
    return None


def _observer_name(key: str, name: Any) -> str:
    names = {"memoryless_minmax": "minmax", "static_minmax": "minmax", "memoryless_mse": "mse"}
    if names.get(name, name) not in ("minmax", "mse"):
        raise ModifierError(key, f"there is no observer {name!r}. Allowed: minmax, mse")
    return names.get(name, name)


def _search(key: str, observer: str, options: Mapping[str, Any], defaults: ErrorSearch) -> ErrorSearch | None:
    allowed = [field.name for field in dataclasses.fields(ErrorSearch)] if observer == "mse" else []
    unknown = [name for name in options if name not in allowed]
    if unknown:
        raise ModifierError(key, f"observer {observer} has no {unknown[0]}. Allowed: {', '.join(allowed) or 'nothing'}")
    return dataclasses.replace(defaults, **options) if observer == "mse" else None


def _group_sizes(scheme: QuantizationScheme) -> list[int]:
    """What must divide the inputs of a layer."""
    parts = (scheme.weights, scheme.input_activations, scheme.output_activations)
    return [args.group_size for args in parts if args is not None and args.strategy in ("group", "tensor_group")]


def _largest_divisor(layers: Sequence[Layer], skip: bool) -> int:
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
