"""The layers of a checkpoint as it stands: dense ones from the names and shapes, compressed ones from their tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import QuantizationScheme
from torch import nn

from sparseautomodel.architecture import Architecture
from sparseautomodel.checkpoint import LazyTensor
from sparseautomodel.modifiers import Layer
from sparseautomodel.quantization_config import CACHE_SCALES, QUANT_METHOD, read_schemes, with_order


@dataclass(frozen=True)
class StoredLayers:
    """The layers of a checkpoint as it stands, dense or compressed."""

    layers: tuple[Layer, ...]
    schemes: Mapping[str, QuantizationScheme]
    other_parameters: int
    problems: tuple[str, ...] = ()


def stored_layers(checkpoint: Mapping[str, LazyTensor], architecture: Architecture) -> StoredLayers:
    """Every layer in the files; for the compressed ones their scheme, taken from the tensors that are there.

    Which layers are quantized is read off the tensors, not off `ignore`, whose names can be those of another version.
    """
    layers = architecture.layers(checkpoint)
    counted = {f"{layer.name}.weight" for layer in layers}
    config = quantization_of(architecture.config)
    if config is None:
        rest = sum(math.prod(tensor.shape) for name, tensor in checkpoint.items() if name not in counted)
        return StoredLayers(tuple(layers), {}, rest)
    compressed = _compressed_layers(checkpoint, architecture)
    schemes = read_schemes(dict(config) | {"ignore": []}, compressed)
    schemes |= {name: with_order(one) for name, one in schemes.items() if f"{name}.weight_g_idx" in checkpoint}
    problems = [
        f"{layer.name} has packed or scaled tensors, but no group of quantization_config matches it"
        for layer in compressed
        if layer.name not in schemes
    ]
    owned = {layer.name for layer in compressed}
    rest = sum(
        math.prod(tensor.shape)
        for name, tensor in checkpoint.items()
        if name not in counted and name.rpartition(".")[0] not in owned
    )
    everything = [layer for layer in layers if layer.name not in owned] + compressed
    return StoredLayers(tuple(everything), schemes, rest, tuple(problems))


def attention_modules(model: nn.Module, layers: Iterable[Layer]) -> dict[str, tuple[str, int]]:
    """Modules that hand keys and values to a cache: name in the checkpoint -> name in the model, index in the cache.

    Those that take the keys and values of another layer are not among them. What a module is called in the checkpoint
    is told by the names of `layers`.
    """
    found = {name: int(module.layer_idx) for name, module in model.named_modules() if is_attention(module)}
    result: dict[str, tuple[str, int]] = {}
    for layer in layers:
        module = "" if layer.expert else layer.module
        while module := module.rpartition(".")[0]:
            inside = layer.module.removeprefix(module)
            if module in found and layer.name.endswith(inside):
                result[layer.name.removesuffix(inside)] = module, found[module]
    return result


def is_attention(module: nn.Module) -> bool:
    """Whether a module hands keys and values to a cache."""
    named = "attention" in type(module).__name__.lower() and isinstance(getattr(module, "layer_idx", None), int)
    encodes, shares = not getattr(module, "is_causal", True), getattr(module, "is_kv_shared_layer", False)
    return named and not encodes and not shares


def cache_scales(names: Iterable[str], config: Any) -> dict[str, None]:
    """The tensors that hold the scales of a quantized cache, where the config says that there is one; with them the
    zero points, all 0, that older tools stored."""
    if not (quantization_of(config) or {}).get("kv_cache_scheme"):
        return {}
    parts = (*CACHE_SCALES, "k_zero_point", "v_zero_point")
    return dict.fromkeys(name for name in names if name.rpartition(".")[2] in parts)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The config's compressed-tensors entry, or None for a dense (or otherwise quantized) checkpoint."""
    entry = getattr(config, "quantization_config", None)
    if entry is None:
        return None
    entry = entry if isinstance(entry, dict) else entry.to_dict()
    return entry if entry.get("quant_method") == QUANT_METHOD else None


def _compressed_layers(checkpoint: Mapping[str, LazyTensor], architecture: Architecture) -> list[Layer]:
    names = dict.fromkeys(
        name.rpartition(".")[0] for name in checkpoint if name.endswith((".weight_packed", ".weight_scale"))
    )
    return [layer for name in names if (layer := _compressed_layer(name, checkpoint, architecture)) is not None]


def _compressed_layer(name: str, checkpoint: Mapping[str, LazyTensor], architecture: Architecture) -> Layer | None:
    parameter = architecture.parameters.get(f"{name}.weight")
    if parameter is None:
        return None
    scale = checkpoint.get(f"{name}.weight_scale")
    dtype = scale.dtype if scale is not None and scale.dtype.itemsize > 1 else architecture.dtype
    values = checkpoint.get(f"{name}.weight_packed", checkpoint.get(f"{name}.weight"))
    if values is None:
        return None
    columns = architecture.skeleton.get_parameter(parameter).shape[-1]
    return architecture.layer_at(name, (values.shape[0], columns), dtype)
