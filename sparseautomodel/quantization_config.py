"""`quantization_config` of config.json: written as short as the stock parser allows, read back to a scheme a layer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_args import ActivationOrdering
from pydantic import ValidationError

from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.modifiers import Layer

QUANT_METHOD = "compressed-tensors"

CACHE_SCALES = ("k_scale", "v_scale")
"""What an attention module has where its keys and values are quantized."""

SCALE_DTYPE_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")
"""Formats that are told apart by `scale_dtype`; elsewhere older parsers refuse the field."""


def write_config(
    schemes: Mapping[str, QuantizationScheme], layers: Sequence[Layer], cache: QuantizationArgs | None = None
) -> dict[str, Any]:
    """The config for a checkpoint whose `layers` are stored by `schemes` (layer name -> scheme), all others dense.

    The scheme of most layers is written for the class `Linear`, which servers look for, with what stays dense in
    `ignore`; other schemes are written for name patterns, which come before class names. Fields that do not apply or
    have their default value are left out, `sparsity_config` among them: older and stricter parsers refuse them. `cache`
    is how keys and values are stored.

    Raises:
        ValueError: what was written would be read back differently.
    """
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        if layer.name in schemes:
            groups.setdefault(_key(schemes[layer.name]), []).append(layer)
    by_size = sorted(groups.values(), key=len, reverse=True)
    main = next((group for group in by_size if any(layer.role == "block" for layer in group)), None)
    formats = {storage.format_of(schemes[group[0].name]) for group in by_size}
    config_groups = {}
    for number, group in enumerate(by_size):
        scheme = schemes[group[0].name]
        mine = {layer.name for layer in group}
        others = [layer for layer in layers if layer.name not in mine]
        named = [layer for layer in group if group is not main or "Linear" not in layer.kinds]
        targets = (["Linear"] if group is main else []) + _patterns(named, others)
        entry = {"targets": targets} | _scheme(scheme)
        if len(formats) > 1:
            entry["format"] = storage.format_of(scheme)
        config_groups[f"group_{number}"] = entry
    dense = [layer for layer in layers if layer.name not in schemes and _could_match(layer)]
    config = {
        "quant_method": QUANT_METHOD,
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision" if formats else "dense",
        "config_groups": config_groups,
        "ignore": _patterns(dense, [layer for layer in layers if layer.name in schemes]),
    }
    if cache is not None:
        config["kv_cache_scheme"] = _args(cache, False)
    _check_round_trip(config, schemes, layers)
    return config


def read_schemes(config: Mapping[str, Any], layers: Iterable[Layer]) -> dict[str, QuantizationScheme]:
    """The scheme of each of `layers` that `config` quantizes, by layer name.

    Exact names come before `re:` patterns, and those before class names, each in alphabetical order, as in
    compressed-tensors.

    Raises:
        ValueError: the stock parser does not accept the config; its reason is quoted.
    """
    try:
        parsed = _parsed(config)
    except (ValidationError, KeyError, ValueError) as error:
        raise ValueError(f"quantization_config is not one that compressed-tensors accepts: {error}") from error
    schemes = {}
    for layer in layers:
        if any(layer.matches(pattern) for pattern in parsed.ignore or ()):
            continue
        scheme = _best_match(layer, parsed.config_groups.values())
        if scheme is not None and scheme.weights is not None:
            schemes[layer.name] = scheme
    return schemes


def with_order(scheme: QuantizationScheme) -> QuantizationScheme:
    """The scheme of a layer whose groups are in the order of activations: `weight_g_idx` has the group of each column.

    compressed-tensors 0.20 does not take it from a config any more, and so it is put in beside its parser.
    """
    weights = scheme.weights.model_copy(update={"actorder": ActivationOrdering.GROUP})
    return scheme.model_copy(update={"weights": weights})


def same_storage(one: QuantizationScheme, other: QuantizationScheme) -> bool:
    """Whether two schemes store and run a layer alike, whatever their targets and observers."""
    return _key(one) == _key(other)


def _parsed(config: Mapping[str, Any]) -> QuantizationConfig:
    """What compressed-tensors makes of `config`, and of what it has no word for: rotations alone, ordered groups."""
    given = ({"config_groups": {}} if config.get("transform_config") else {}) | dict(config)
    groups, ordered = dict(given.get("config_groups") or {}), []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and str(weights.get("actorder")).lower() in ("group", "dynamic", "true"):
            groups[name] = group | {"weights": weights | {"actorder": None}}
            ordered.append(name)
    parsed = QuantizationConfig.model_validate(given | ({"config_groups": groups} if groups else {}))
    for name in ordered:
        parsed.config_groups[name] = with_order(parsed.config_groups[name])
    return parsed


def _best_match(layer: Layer, groups: Iterable[Any]) -> QuantizationScheme | None:
    ranked: list[tuple[int, str, QuantizationScheme]] = []
    for scheme in groups:
        for target in scheme.targets:
            if target in (layer.name, layer.module):
                ranked.append((0, target, scheme))
            elif layer.named_by(target):
                ranked.append((1, target, scheme))
            elif target in layer.kinds:
                ranked.append((2, target, scheme))
    return min(ranked, key=lambda item: item[:2])[2] if ranked else None


def _could_match(layer: Layer) -> bool:
    """Whether a reader of `targets: [Linear]` would take the layer for one: routers are Linear in servers."""
    return "Linear" in layer.kinds or layer.role == "router"


def _key(scheme: QuantizationScheme) -> str:
    return json.dumps([_scheme(scheme), storage.format_of(scheme)], sort_keys=True)


def _scheme(scheme: QuantizationScheme) -> dict[str, Any]:
    with_scale_dtype = storage.format_of(scheme) in SCALE_DTYPE_FORMATS
    parts = {}
    for name in ("weights", "input_activations", "output_activations"):
        args = getattr(scheme, name)
        if args is not None:
            parts[name] = _args(args, with_scale_dtype)
    return parts


def _args(args: QuantizationArgs, with_scale_dtype: bool) -> dict[str, Any]:
    short: dict[str, Any] = {
        "num_bits": args.num_bits,
        "type": args.type,
        "symmetric": args.symmetric,
        "strategy": args.strategy,
        "dynamic": args.dynamic,
    }
    if args.strategy in ("group", "tensor_group"):
        short["group_size"] = args.group_size
    if args.strategy == "block":
        short["block_structure"] = list(args.block_structure or ())
    if args.actorder is not None and args.strategy == "group":
        short["actorder"] = ActivationOrdering(args.actorder).value
    if with_scale_dtype and args.scale_dtype is not None:
        short["scale_dtype"] = str(args.scale_dtype)
    return short


def _patterns(layers: Sequence[Layer], others: Sequence[Layer]) -> list[str]:
    """Names for exactly `layers`: a `re:` pattern over the indices where that catches none of `others`, else literals.

    Names are written as in the checkpoint, and as in the model too where the two differ: readers match either.
    """
    taken = {name for layer in others for name in (layer.name, layer.module)}
    grouped: dict[str, list[str]] = {}
    for layer in layers:
        for name in dict.fromkeys((layer.name, *([] if layer.expert else [layer.module]))):
            *parents, last = name.split(".")
            parts = [r"\d+" if part.isdigit() else re.escape(part) for part in parents]
            grouped.setdefault(r"\.".join([*parts, re.escape(last)]), []).append(name)
    result = []
    for pattern, names in grouped.items():
        if len(names) == 1 or any(re.match(f"{pattern}$", name) for name in taken):
            result += names
        else:
            result.append(f"re:^{pattern}$")
    return result


def _check_round_trip(
    config: dict[str, Any], schemes: Mapping[str, QuantizationScheme], layers: Sequence[Layer]
) -> None:
    read = read_schemes(config, layers)
    wrong = [
        layer.name
        for layer in layers
        if (layer.name in read) != (layer.name in schemes)
        or (layer.name in schemes and not same_storage(read[layer.name], schemes[layer.name]))
    ]
    if wrong:
        raise ValueError(f"quantization_config would not be read back as it is for {', '.join(wrong)}")
