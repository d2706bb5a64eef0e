"""The keys of modifiers that quantize weights: which layer is stored in which scheme of compressed-tensors."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from torch import Tensor

from sparseautomodel.modifiers.base import Layer, Modifier, ModifierError, Weight
from sparseautomodel.modifiers.group_keys import (
    WITHOUT_DATA,
    Group,
    cache_args,
    explicit,
    group_sizes,
    largest_divisor,
    normal,
    observer_name,
    observes_inputs,
    search_of,
    values_of,
)
from sparseautomodel.ranges import InputRange
from sparseautomodel.scales import ErrorSearch, find_global_scale, find_input_scales, find_scales
from sparseautomodel.statistics import LayerError


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
    kv_cache_scheme: Mapping[str, Any] | None = None
    """How keys and values are stored in the cache: `{num_bits: 8, type: float}` for FP8, `{num_bits: 8, type: int}`.
    Only their scales are found and stored here; the cache is quantized by what runs the model."""
    weight_observer: InitVar[str | None] = None
    """What llm-compressor calls `observer`."""

    search: ClassVar[ErrorSearch] = ErrorSearch()
    """What `observer: mse` tries."""
    scheme_needed: ClassVar[bool] = True
    """False where the modifier has work to do without a scheme: then none leaves the number format alone."""

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
        object.__setattr__(self, "observer", observer_name("observer", given))
        for key in ("scheme", "config_groups"):
            object.__setattr__(self, key, normal(key, getattr(self, key)))
        cache = cache_args(values_of(self.kv_cache_scheme))
        if cache is not None:
            written = cache.model_dump(mode="json")
            parts = ("num_bits", "type", "strategy", "dynamic", "symmetric")
            object.__setattr__(self, "kv_cache_scheme", {part: written[part] for part in parts})
        if not self._groups and (self.group_size is not None or self.observer != "minmax" or self.skip_indivisible):
            raise ModifierError(
                "scheme",
                "group_size, observer and skip_indivisible say how weights are rounded. Write scheme: W4A16, or write "
                "these keys where the layers are quantized",
            )
        static = any(group.scheme is not None and observes_inputs(group.scheme) for group in self._groups)
        object.__setattr__(self, "needs_data", type(self).needs_data or static or cache is not None)

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        return (*super().keys(), "weight_observer")

    def patterns(self) -> tuple[str, ...]:
        return tuple(pattern for group in self._groups for pattern in group.targets) or super().patterns()

    def selects(self, layer: Layer) -> bool:
        if not self._groups:
            return super().selects(layer)
        group = self._group_of(layer)
        return group is not None and group.scheme is not None and not self.skips(layer)

    def skips(self, layer: Layer) -> bool:
        """Whether the layer is left dense, as `skip_indivisible` allows, because the groups do not divide it."""
        group = self._group_of(layer)
        if not self.skip_indivisible or group is None or group.scheme is None or group.automatic:
            return False
        return any(layer.shape[1] % size for size in group_sizes(group.scheme))

    def resolve(self, layers: Iterable[Layer]) -> SchemeKeys:
        chosen: dict[str, list[Layer]] = {}
        for layer in layers:
            group = self._group_of(layer)
            if group is not None and group.automatic:
                chosen.setdefault(group.automatic, []).append(layer)
        changes: dict[str, Any] = {}
        for place, mine in chosen.items():
            size = largest_divisor(mine, self.skip_indivisible)
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
        if not self._groups:
            return super().rows(layer)
        args = self.weights_of(layer)
        if args.strategy == "block":
            return args.block_structure[0]
        return layer.shape[0] if args.strategy in ("tensor", "tensor_group") else 1

    def columns(self, layer: Layer) -> int:
        args = self.weights_of(layer) if self._groups else None
        if args is not None and args.strategy == "group":
            return args.group_size
        return args.block_structure[1] if args is not None and args.strategy == "block" else super().columns(layer)

    def global_scale(self, layer: Layer, values: Sequence[Tensor]) -> Tensor | None:
        """The `[1]` float32 scale that NVFP4 layers share which a server runs as one (q/k/v, gate/up).

        `values` are the whole weights of all these layers. None where the scheme of `layer` has no such scale.
        """
        scheme = self.scheme_of(layer)
        needed = scheme is not None and self.weights_of(layer).strategy == "tensor_group"
        return find_global_scale(values) if needed else None

    def weights_of(self, layer: Layer) -> QuantizationArgs:
        """How the weights of the layer are stored. Raises ValueError where this modifier does not store it."""
        scheme = self.scheme_of(layer)
        if scheme is None or scheme.weights is None:
            raise ValueError(
                f"{layer.name} has no scheme here: it is not selected, or `group_size: auto` was not resolved"
            )
        sizes = [size for size in group_sizes(scheme) if layer.shape[1] % size]
        if sizes:
            raise ValueError(f"{layer.name} has {layer.shape[1]} inputs, no multiple of group size {sizes[0]}")
        return scheme.weights

    def share_global_scale(self, weights: Sequence[Weight]) -> None:
        """Give one global scale to all of `weights` that need one (NVFP4) and have none: layers that read one input."""
        if not self._groups:
            return
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

    def input_range(self, layer: Layer) -> InputRange | None:
        scheme = self.scheme_of(layer)
        return None if scheme is None or not observes_inputs(scheme) else InputRange(layer.shape[1])

    def set_input_scales(
        self, weights: Sequence[Weight], inputs: InputRange, others: Sequence[InputRange] = ()
    ) -> list[LayerError]:
        """Set `input_scale`, `input_zero_point` and `input_global_scale` where the scheme has them.

        As llm-compressor's `static_minmax`: what maps the extremes over all tokens to the ends of the scheme's numbers.
        An input without a token takes the extremes of `others`, or -1 and 1 where those have no token either.
        Raises ValueError for inputs that are not finite.
        """
        seen = [one for one in ((inputs,) if inputs.tokens else others) if one.tokens]
        low = min((float(one.low.min()) for one in seen), default=-1.0)
        high = max((float(one.high.max()) for one in seen), default=1.0)
        names = [weight.layer.name for weight in weights if self.input_range(weight.layer) is not None]
        if not math.isfinite(low) or not math.isfinite(high):
            raise ValueError(f"the inputs of {', '.join(names)} are not finite on the calibration data")
        for weight in weights:
            scheme = self.scheme_of(weight.layer)
            if scheme is not None and observes_inputs(scheme):
                found = find_input_scales(low, high, scheme.input_activations, weight.layer.dtype)
                scales = [None if one is None else one.to(weight.values.device) for one in found]
                weight.input_scale, weight.input_zero_point, weight.input_global_scale = scales
        if inputs.tokens:
            return []
        source = "the other experts' inputs" if seen else "inputs from -1 to 1"
        reason = f"no calibration token came to it: its input scale is that of {source}"
        return [LayerError(name, math.nan, math.nan, reason) for name in names]

    def cache_scheme(self) -> QuantizationArgs | None:
        """How keys and values are stored in the cache; None: as they are."""
        return cache_args(self.kv_cache_scheme)

    def without_data(self) -> str | None:
        """What to write instead where there is no calibration data; None where nothing takes its place."""
        if type(self).needs_data or not self.needs_data:
            return None
        if self.kv_cache_scheme is not None:
            return "kv_cache_scheme away"
        names = [self.scheme] if isinstance(self.scheme, str) else [*(self.scheme or {}), *(self.config_groups or {})]
        found = [WITHOUT_DATA[name] for name in names if name in WITHOUT_DATA]
        return f"scheme {found[0]}" if found else "dynamic: true in input_activations"

    def _group_of(self, layer: Layer) -> Group | None:
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
    def _groups(self) -> tuple[Group, ...]:
        if not self.scheme_needed and self.scheme is None and self.config_groups is None:
            return ()
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
                explicit(name, entry, str(self.observer), self.search)
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

    def _preset(self, key: str, name: str, targets: Any) -> Group:
        if name not in PRESET_SCHEMES:
            near = difflib.get_close_matches(name, PRESET_SCHEMES, 1, 0.5)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise ModifierError(key, f"there is no scheme {name!r}.{guess} Allowed: {', '.join(PRESET_SCHEMES)}")
        if not targets or not isinstance(targets, list) or not all(isinstance(item, str) for item in targets):
            raise ModifierError(key, f"{name} needs a list of targets, such as [Linear], got {targets!r}")
        scheme = preset_name_to_scheme(name, targets)
        if scheme.weights is None:
            return Group(tuple(targets), None)
        search = search_of("observer", str(self.observer), {}, self.search)
        if self.group_size is None or (scheme.weights.type, scheme.weights.strategy) != ("int", "group"):
            return Group(tuple(targets), scheme, search)
        if self.group_size == -1:
            scheme.weights = scheme.weights.model_copy(update={"strategy": "channel", "group_size": None})
        elif self.group_size != "auto":
            scheme.weights = scheme.weights.model_copy(update={"group_size": self.group_size})
        automatic = "group_size" if self.group_size == "auto" else None
        return Group(tuple(targets), scheme, search, automatic, sized=True)
