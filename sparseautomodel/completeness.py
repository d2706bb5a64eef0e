"""Whether a checkpoint and a model class fit: every parameter has a tensor, every tensor a place, every compressed
layer all its parts. From names, shapes and dtypes alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sparseautomodel.architecture import Architecture
from sparseautomodel.checkpoint import Checkpoint, LazyTensor
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.modifiers import Layer
from sparseautomodel.quantization_config import CACHE_SCALES

EXPLAINED = re.compile(
    r"(^|\.)(mtp\w*|nextn\w*|medusa\w*|eagle\w*|rotary_emb\.inv_freq|embeddings\.position_ids)(\.|$)"
)
"""Names of draft heads, which servers use and model classes leave out, and of buffers that older versions saved."""


def check_names(
    checkpoint: Mapping[str, LazyTensor], architecture: Architecture, compressed: Collection[str]
) -> list[str]:
    """Every parameter has a tensor, of its shape where it is stored dense, and every tensor a place.

    `compressed` are the layers that have a scheme, whose tensors `check_parts` looks at.
    """
    skeleton, ties = architecture.skeleton, architecture.ties
    own = skeleton.state_dict()
    filled = {
        parameter
        for name, parameter in architecture.parameters.items()
        if name in checkpoint or name.removesuffix(".weight") in compressed
    }
    filled |= {one for one, other in ties.items() if other in filled} | {
        other for one, other in ties.items() if one in filled
    }
    missing = _without(sorted(set(own) - filled), skeleton._keys_to_ignore_on_load_missing)
    unneeded = explained(checkpoint)
    unknown, problems = [], [f"no tensor fills {few(missing)}"] if missing else []
    for name, tensor in checkpoint.items():
        owner, _, part = name.rpartition(".")
        if name not in architecture.parameters:
            if (owner not in compressed or part == "bias") and name not in unneeded:
                unknown.append(name)
        elif name not in architecture.merged and tuple(tensor.shape) != tuple(own[architecture.parameters[name]].shape):
            wanted = list(own[architecture.parameters[name]].shape)
            problems.append(f"{name} has shape {list(tensor.shape)}, the model says {wanted}")
    unknown = _without(unknown, skeleton._keys_to_ignore_on_load_unexpected)
    return problems + ([f"the model has no place for {few(unknown)}"] if unknown else [])


def explained(names: Iterable[str]) -> set[str]:
    """Tensors that a model class need not have a place for: draft heads, and what older versions computed and saved."""
    names = list(names)
    drafts = {match[1] for name in names if (match := re.match(r"(.*\blayers\.\d+)\.eh_proj\.", name))}
    in_draft = (match[1] in drafts if (match := re.match(r"(.*\blayers\.\d+)\.", name)) else False for name in names)
    return {name for name, drafted in zip(names, in_draft, strict=True) if drafted or EXPLAINED.search(name)}


def _without(names: list[str], patterns: Iterable[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def check_parts(
    checkpoint: Checkpoint, architecture: Architecture, layers: Iterable[Layer], schemes: Mapping[str, Any]
) -> list[str]:
    """A compressed layer has all tensors of its scheme, in their shapes and dtypes, and none besides; and nothing is
    stored in a few bits without a scale, which a loader would take for the values themselves."""
    by_owner: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in checkpoint.items():
        owner, _, part = name.rpartition(".")
        by_owner.setdefault(owner, {})[part] = tensor
    problems = []
    for layer in layers:
        if layer.name in schemes:
            problems += _layer_parts(layer, schemes[layer.name], by_owner.get(layer.name, {}))
    own = architecture.skeleton.state_dict()
    for name, parameter in architecture.parameters.items():
        if name not in checkpoint or not own[parameter].is_floating_point():
            continue
        dtype = checkpoint[name].dtype
        few_bits = dtype.itemsize == 1 or not dtype.is_floating_point
        if few_bits and "weight_scale" not in by_owner[name.rpartition(".")[0]]:
            problems.append(f"{name} is stored as {dtype} and has no scale")
    return problems


def _layer_parts(layer: Layer, scheme: Any, there: Mapping[str, LazyTensor]) -> list[str]:
    wanted = storage.layout(scheme, layer.shape, layer.dtype)
    prefix, allowed = f"{layer.name}.", {"bias"}
    for kind, args in (("input", scheme.input_activations), ("output", scheme.output_activations)):
        if args is not None and args.dynamic is not True:
            allowed |= {f"{kind}_scale", f"{kind}_zero_point", f"{kind}_global_scale"}
    problems = [f"{prefix}{part} is missing" for part in wanted if part not in there]
    for part, tensor in there.items():
        if part not in wanted:
            if part not in allowed:
                problems.append(f"{prefix}{part} does not belong to a {storage.format_of(scheme)} layer")
        elif (tuple(tensor.shape), tensor.dtype) != wanted[part]:
            shape, dtype = wanted[part]
            problems.append(
                f"{prefix}{part} is {list(tensor.shape)} {tensor.dtype}, the scheme says {list(shape)} {dtype}"
            )
    return problems


def check_cache(scales: Collection[str], modules: Mapping[str, tuple[str, int]]) -> list[str]:
    """Every attention module has a scale of its keys and one of its values, and nothing else has.

    Args:
        scales: names of the scales in the checkpoint, and of zero points.
        modules: the attention modules that hand keys and values to a cache, by their names in the checkpoint.
    """
    wanted = [f"{name}.{part}" for name in modules for part in CACHE_SCALES]
    lacking = [name for name in wanted if name not in scales]
    problems = [f"the cache is quantized, and {few(lacking)} are missing: servers take 1.0"] if lacking else []
    odd = [name for name in scales if name.rpartition(".")[0] not in modules]
    return problems + ([f"{few(odd)}: no attention module is there that has a cache"] if odd else [])


def few(names: Iterable[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    listed = ", ".join(names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
