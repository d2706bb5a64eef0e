"""The seam to transformers' loader: modules are reshaped on the meta device, then filled from the checkpoint.

transformers calls a quantizer before it loads weights, and asks it what to save. Ours is registered under a name of its
own (`sparseautomodel`); what it writes to config.json is an ordinary compressed-tensors entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparseautomodel.architecture import expert_merges, merges_experts
from sparseautomodel.checkpoint import LazyTensor
from sparseautomodel.compressed_experts import CompressedExperts
from sparseautomodel.compressed_layers import CompressedEmbedding, CompressedLinear, Parts, compressed
from sparseautomodel.distributed import plan_for_compressed, restore_plan
from sparseautomodel.modifiers import Layer
from sparseautomodel.transform import loaded_dtype

NAME = "sparseautomodel"


@dataclass(frozen=True)
class StoredLayer:
    """How one layer is stored: all that a module needs to be built for it."""

    module: str
    """Full name of the module in the model; for an expert's projection, of the fused experts module."""
    scheme: QuantizationScheme
    parts: Parts
    shape: tuple[int, int]
    dtype: torch.dtype
    expert: str | None = None
    """For an expert's projection: its name under the experts module, `0.gate_proj`."""


@register_quantization_config(NAME)
class CompressedConfig(QuantizationConfigMixin):
    """What loading a compressed checkpoint needs to know. Written to config.json as compressed-tensors' own entry."""

    quant_method: Any = NAME

    def __init__(self, written: dict[str, Any], layers: tuple[StoredLayer, ...], cache: Parts | None = None) -> None:
        """
        Args:
            cache: the scales of a quantized cache, by their full names in the model.
        """
        self.written, self.layers, self.cache = written, layers, cache or {}

    def to_dict(self) -> dict[str, Any]:
        return dict(self.written)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedConfig:
        return self  # nothing in it changes, and transformers copies configs often


@register_quantizer(NAME)
class CompressedQuantizer(HfQuantizer):
    """Puts compressed modules where the checkpoint has compressed layers."""

    quantization_config: CompressedConfig
    is_trainable = True
    """Adapters are: gradients pass through compressed layers, which stay as they are."""
    is_compileable = True

    def __init__(self, quantization_config: CompressedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = True  # what the loader sees is a compressed checkpoint, whatever is on disk

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        experts: dict[str, list[StoredLayer]] = {}
        for layer in self.quantization_config.layers:
            if layer.expert is not None:
                experts.setdefault(layer.module, []).append(layer)
            else:
                put(model, layer)
        if experts:  # no experts are merged then, not even those that stay dense: the names do not tell them apart
            for name, merged in expert_merges(model).items():
                put_experts(model, name, experts.get(name, []), merged)
        for name, (shape, dtype) in self.quantization_config.cache.items():
            owner, _, part = name.rpartition(".")
            scale = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            model.get_submodule(owner).register_parameter(part, scale)
        ties = getattr(model, "all_tied_weights_keys", None)
        if ties:
            packed = {f"{layer.module}.weight" for layer in self.quantization_config.layers}
            model.all_tied_weights_keys = {a: b for a, b in ties.items() if a not in packed and b not in packed}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Scales are no parameters to train: no gradient reaches them."""
        restore_plan(model.tp_plan)
        for module in model.modules():
            if isinstance(module, (CompressedLinear, CompressedEmbedding)):
                for name, value in module.named_parameters(recurse=False):
                    value.requires_grad_(name == "bias")
        for name in self.quantization_config.cache:
            model.get_parameter(name).requires_grad_(False)

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """How several processes cut compressed layers. There is no plan of transformers for compressed experts."""
        plan_for_compressed(model, plan)

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Experts that stay compressed are not merged: their tensors go to the modules of the same names."""
        if not any(isinstance(module, CompressedExperts) for module in model.modules()):
            return weight_conversions
        return [entry for entry in weight_conversions if not merges_experts(entry)]


def held_layers(
    tensors: Mapping[str, LazyTensor], layers: Sequence[Layer], schemes: Mapping[str, QuantizationScheme]
) -> tuple[StoredLayer, ...]:
    """How each compressed layer is held in the model, read off the tensors that the loader will see."""
    found: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        owner, _, part = name.rpartition(".")
        if owner in schemes and part != "bias":
            found.setdefault(owner, {})[part] = tensor
    result = []
    for layer in layers:
        if layer.name in schemes:
            parts = {
                part: (tuple(tensor.shape), loaded_dtype(part, tensor.dtype, layer.dtype))
                for part, tensor in found[layer.name].items()
            }
            match = re.match(r".*\.(\d+\..+)$", layer.name) if layer.expert else None
            expert = match[1] if match else None
            result.append(StoredLayer(layer.module, schemes[layer.name], parts, layer.shape, layer.dtype, expert))
    return tuple(result)


def put(model: nn.Module, layer: StoredLayer) -> None:
    """Replace one Linear or Embedding by a module that holds it compressed."""
    old = model.get_submodule(layer.module)
    model.set_submodule(layer.module, compressed(old, layer.scheme, layer.parts, layer.dtype))


def put_experts(
    model: nn.Module, name: str, layers: Sequence[StoredLayer], merged: Mapping[str, Sequence[str]]
) -> None:
    """Replace one fused experts module by one with a layer for each expert's projection: those of `layers` compressed.

    `merged` are the fused parameters, with the projections that each is made of.
    """
    fused: Any = model.get_submodule(name)
    stored = {layer.expert: layer for layer in layers}
    modules = {}
    for parameter, projections in merged.items():
        count, rows, columns = fused.get_parameter(parameter).shape
        for projection in projections:
            for expert in range(count):
                module = nn.Linear(columns, rows // len(projections), bias=False)
                layer = stored.get(f"{expert}.{projection}")
                if layer is not None:
                    module = compressed(module, layer.scheme, layer.parts, layer.dtype)
                modules[f"{expert}.{projection}"] = module
    (outer,) = merged["down_proj"]
    inner = [projection for projections in merged.values() for projection in projections if projection != outer]
    model.set_submodule(name, CompressedExperts(fused, modules, inner, outer))
