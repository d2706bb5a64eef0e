"""What transformers knows about a model before any weight is read: its class, its modules, its names.

The only file that touches transformers' loader internals (names of checkpoint tensors against names of parameters).
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from sparseautomodel.checkpoint import LazyTensor
from sparseautomodel.modifiers import Layer

SEPARATE_PARTS = (
    ("vision", re.compile(r"(^|\.)(vision\w*|visual|image_encoder|img_\w+|vit|siglip)(\.|$)")),
    ("audio", re.compile(r"(^|\.)(audio\w*|speech_\w+)(\.|$)")),
    (
        "projector",
        re.compile(r"(^|\.)(multi_modal_projector|mm_projector|\w*projector|connector|merger|embed_\w+)(\.|$)"),
    ),
)
"""Parts of a multimodal model beside its language model, by the names that transformers gives them."""

BUILDING = threading.RLock()
"""Held while a model is built or loaded: transformers then sets torch's default dtype and init functions, which are
those of all threads. Reentrant, since remote code may load a model inside another."""

ROUTER_NAME = re.compile(r"(^|\.)(gate|router|\w+_gate|gate_\w*router\w*)(\.\w+)?$")
"""What routers of mixtures of experts are called; a name alone does not make one, see `_role`."""


@dataclass(frozen=True)
class Architecture:
    """A model class, its config, its modules on the meta device, and which tensor fills which parameter."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    skeleton: PreTrainedModel
    parameters: Mapping[str, str]
    """Checkpoint tensor name -> the model's parameter or buffer it fills. Tensors the model does not have are absent;
    a compressed layer is there under the name that its dense weight would have."""
    merged: frozenset[str]
    """Checkpoint tensors of experts, of which several become one parameter."""
    converted: frozenset[str] = frozenset()
    """Checkpoint tensors that transformers splits, joins or rearranges in other ways: none is one module's weight."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the config names, float32 where it names none."""
        return getattr(self.config, "dtype", None) or torch.float32

    @property
    def ties(self) -> dict[str, str]:
        """Parameter -> the parameter it shares its storage with, as the config says."""
        return dict(self.skeleton.all_tied_weights_keys)

    @property
    def can_untie(self) -> bool:
        """Whether `tie_word_embeddings: false` unties the model; to classes such as T5Config it means another thing."""
        untied = type(self.config).from_dict(self.config.to_dict() | {"tie_word_embeddings": False})
        return not getattr(untied, "tie_word_embeddings", False)

    def loaded_dtype(self, parameter: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a parameter when the model is loaded in `dtype`: some modules are kept in float32."""
        kept = self.skeleton._get_dtype_plan(dtype)
        pattern, names, _ = build_glob_alternation(list(kept))
        match = pattern.search(parameter) if kept else None
        return kept[names[str(match.lastgroup)]] if match else dtype

    def layers(self, tensors: Mapping[str, LazyTensor]) -> list[Layer]:
        """The matrices of a dense checkpoint that a recipe can change, in the order of the files."""
        return [layer for name in tensors if (layer := self._layer(name, tensors[name])) is not None]

    def _layer(self, name: str, tensor: LazyTensor) -> Layer | None:
        if name not in self.parameters or not name.endswith(".weight") or len(tensor.shape) != 2:
            return None
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            return None
        return self.layer_at(name.removesuffix(".weight"), (tensor.shape[0], tensor.shape[1]), tensor.dtype)

    def layer_at(self, name: str, stored: tuple[int, int], dtype: torch.dtype) -> Layer | None:
        """The layer that the checkpoint calls `name`, stored in this shape; None if it is no matrix."""
        module_name = self.parameters[f"{name}.weight"].rpartition(".")[0]
        if f"{name}.weight" in self.merged:
            return Layer(name, module_name, ("Linear",), stored, dtype, expert=True)
        module = self.skeleton.get_submodule(module_name)
        if not _is_matrix(module):
            return None
        transposed = type(module).__name__ == "Conv1D"
        shape = (stored[1], stored[0]) if transposed else stored
        role = _role(self.skeleton, module_name, module)
        return Layer(name, module_name, _kinds(module), shape, dtype, role=role, transposed=transposed)

    def tied_layers(self, layers: Iterable[Layer], tensors: Mapping[str, LazyTensor]) -> list[tuple[Layer, str]]:
        """Layers that the files do not hold because they are tied, each with the tensor that holds their values."""
        stored = {self.parameters[name]: name for name in tensors if name in self.parameters}
        by_parameter = {self.parameters[f"{layer.name}.weight"]: layer for layer in layers}
        groups: dict[str, list[str]] = {}
        for target, source in self.ties.items():
            groups.setdefault(source, [source]).append(target)
        found = []
        for names in groups.values():
            held = next((by_parameter[name] for name in names if name in by_parameter), None)
            for absent in (name for name in names if name.endswith(".weight")):
                module = self.skeleton.get_submodule(absent.rpartition(".")[0])
                if held is None or absent in stored or absent in by_parameter or not _is_storable(module):
                    continue
                module_name = absent.removesuffix(".weight")
                name, role = _checkpoint_spelling(module_name, held), _role(self.skeleton, module_name, module)
                layer = Layer(name, module_name, _kinds(module), held.shape, held.dtype, role=role)
                found.append((layer, f"{held.name}.weight"))
        return found

    def tied_names(self, tensors: Iterable[str]) -> dict[str, str]:
        """Tensors that are stored under the name of a tied head, and the embedding's name, which servers look for."""
        stored = {self.parameters[name]: name for name in tensors if name in self.parameters}
        return {
            stored[target]: stored[target].removesuffix(target) + source
            for target, source in self.ties.items()
            if target in stored and source not in stored and stored[target].endswith(target)
        }

    def unstored_layers(self, layers: Iterable[Layer]) -> list[Layer]:
        """Linear modules without a tensor of their own in the files: a new task head, the parts of a split tensor."""
        held = {layer.module for layer in layers}
        return [
            Layer(
                name,
                name,
                _kinds(module),
                (module.out_features, module.in_features),
                self.dtype,
                _role(self.skeleton, name, module),
            )
            for name, module in self.skeleton.named_modules()
            if isinstance(module, nn.Linear) and name not in held
        ]

    def stores(self, layer: Layer) -> bool:
        """Whether the layer alone is the weight of a Linear or Embedding of torch: what can be stored compressed."""
        if layer.expert:
            return True
        own = f"{layer.name}.weight" not in self.converted
        return own and _is_storable(self.skeleton.get_submodule(layer.module))

    def fused_experts(self) -> list[str]:
        """Names of parameters that hold several experts' matrices in one, and are the weight of no Linear."""
        return [
            name
            for name, parameter in self.skeleton.named_parameters()
            if "expert" in name.rpartition(".")[0]
            and (parameter.ndim == 3 or (parameter.ndim == 2 and not name.endswith((".weight", "bias"))))
        ]

    def initializes(self, layers: Iterable[Layer]) -> list[str]:
        """Classes for which the model draws initial values of the weights of `layers`, by reaching into their modules.

        transformers does that whether or not all weights are loaded, and fails where one has no plain `weight`. It
        fails on every embedding; those are not looked at.
        """
        seen: dict[type, None] = {}
        for layer in layers:
            if layer.expert or "Embedding" in layer.kinds:
                continue
            parent_name, _, name = layer.module.rpartition(".")
            parent = copy.copy(self.skeleton.get_submodule(parent_name))
            hollow = copy.copy(self.skeleton.get_submodule(layer.module))
            hollow._parameters = {key: value for key, value in hollow._parameters.items() if key != "weight"}
            parent._modules = parent._modules | {name: hollow}
            for module in (hollow, parent):
                if type(module) not in seen and not _survives(self.skeleton._init_weights, module):
                    seen[type(module)] = None
        return [cls.__name__ for cls in seen]

    def new_parameters(self, missing: Iterable[str]) -> list[str]:
        """Of the parameters that no tensor fills, those that the class which saved the checkpoint does not have either.

        They are what users of transformers expect to be new: a task head, and the pooler under it.
        """
        saved = getattr(transformers, (getattr(self.config, "architectures", None) or [""])[0], None)
        if saved is None or saved is self.model_class or not missing:
            return []
        with BUILDING, torch.device("meta"):
            theirs = saved(copy.deepcopy(self.config))
        prefix = re.compile(rf"^({re.escape(self.model_class.base_model_prefix)})\.")
        names = {prefix.sub("", name) for name in theirs.state_dict()}
        return sorted(name for name in missing if prefix.sub("", name) not in names)

    def misshapen(self, tensors: Mapping[str, LazyTensor]) -> list[str]:
        """Tensors that have not the shape of the parameter they fill: a sentence each, the name first."""
        own, others = self.skeleton.state_dict(), self.merged | self.converted
        alone = {name: key for name, key in self.parameters.items() if name not in others}
        return [
            f"{name} has shape {list(tensors[name].shape)} in the checkpoint and {list(own[key].shape)} in the model"
            for name, key in alone.items()
            if name in tensors
            and tensors[name].dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
            and tuple(tensors[name].shape) != tuple(own[key].shape)
        ]

    def missing_experts(self) -> list[str]:
        """Experts that the model fuses into one parameter and that the files do not all have: a sentence each."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.merged):
            found.setdefault(self.parameters[name], []).append(name.removesuffix(".weight"))
        merges = expert_merges(self.skeleton) if found else {}
        problems = []
        for key, names in found.items():
            module, _, parameter = key.rpartition(".")
            prefix, count = names[0].rsplit(".", 2)[0], self.skeleton.get_parameter(key).shape[0]
            wanted = {f"{prefix}.{number}.{part}" for number in range(count) for part in merges[module][parameter]}
            problems += [f"{name} is missing" for name in sorted(wanted.difference(names))]
            problems += [f"{name} is an expert that the model does not have" for name in sorted({*names} - wanted)]
        return problems


def read_architecture(
    auto_class: Any,
    config: PreTrainedConfig,
    tensors: Iterable[str],
    *,
    key_mapping: dict[str, str] | None = None,
    trust_remote_code: bool | None = None,
    code_revision: str | None = None,
) -> Architecture:
    """Build the model of `config` on the meta device and map the checkpoint's tensor names to it.

    Raises whatever `auto_class.from_config` raises for a config it does not know or code it may not run.
    """
    with BUILDING, contextlib.ExitStack() as stack:
        for context in PreTrainedModel.get_init_context(torch.float32, True, False, False):
            stack.enter_context(context)
        extra = {} if code_revision is None else {"code_revision": code_revision}
        try:
            skeleton = auto_class.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code, **extra)
        except AttributeError as error:
            if "'list' object has no attribute 'keys'" not in str(error):
                raise
            raise ValueError(
                "the model class declares _tied_weights_keys as a list, the form before transformers 5. Write it as a "
                "dict of target to source: _tied_weights_keys = {'lm_head.weight': 'model.embed_tokens.weight'}"
            ) from error
    tensors = list(tensors)
    packed = {
        f"{name.rpartition('.')[0]}.weight" for name in tensors if name.endswith((".weight_packed", ".weight_scale"))
    }
    parameters, merged, converted = _match_names(skeleton, packed.union(tensors), key_mapping)
    return Architecture(type(skeleton), skeleton.config, skeleton, parameters, merged, converted)


def expert_merges(model: PreTrainedModel) -> dict[str, dict[str, tuple[str, ...]]]:
    """Of each module that fuses its experts: its parameters, with the experts' projections that make each, in order."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for entry in get_model_conversion_mapping(model):
        if merges_experts(entry):
            parent, _, parameter = entry.target_patterns[0].rpartition(".")
            projections = [source.rpartition(".*.")[2].removesuffix(".weight") for source in entry.source_patterns]
            for name, module in model.named_modules():
                if f".{name}".endswith(f".{parent.lstrip('.')}") and parameter in module._parameters:
                    found.setdefault(name, {})[parameter] = tuple(projections)
    return found


def merges_experts(entry: Any) -> bool:
    """Whether a conversion of transformers does no more than stack experts' matrices, gate and up side by side."""
    return (
        isinstance(entry, WeightConverter)
        and all(".*." in source for source in entry.source_patterns)
        and isinstance(entry.operations[0], MergeModulelist)
        and all(isinstance(operation, Concatenate) for operation in entry.operations[1:])
    )


def auto_class_for(config: PreTrainedConfig) -> type:
    """The `AutoModelFor*` class whose model the checkpoint was saved from; `AutoModel` when none fits."""
    wanted = (getattr(config, "architectures", None) or [None])[0]
    for name, reference in (getattr(config, "auto_map", None) or {}).items():
        if name.startswith("AutoModel") and str(reference).rpartition(".")[2] == wanted:
            return getattr(transformers, name)
    for name in sorted(dir(transformers.models.auto.modeling_auto), key=lambda name: (name == "AutoModel", name)):
        auto = getattr(transformers.models.auto.modeling_auto, name)
        mapping = getattr(auto, "_model_mapping", None) if name.startswith("AutoModel") else None
        if mapping is not None and type(config) in mapping:
            classes = mapping[type(config)]
            classes = classes if isinstance(classes, (list, tuple)) else (classes,)
            if wanted in {cls.__name__ for cls in classes}:
                return auto
    return transformers.AutoModel


def _match_names(
    skeleton: PreTrainedModel, tensors: Collection[str], key_mapping: dict[str, str] | None
) -> tuple[dict[str, str], frozenset[str], frozenset[str]]:
    conversions = get_model_conversion_mapping(skeleton, key_mapping)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    own = skeleton.state_dict()
    prefix = skeleton.base_model_prefix
    parameters: dict[str, str] = {}
    merged, converted = set[str](), set[str]()
    for name in sorted(tensors, key=dot_natural_key):  # the order of the loader: some renamings depend on it
        key, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if key not in own and name in own:
            key, pattern = name, None
        if key in own:
            parameters[name] = key
            if pattern is not None:
                (merged if merges_experts(by_pattern[pattern]) else converted).add(name)
    return parameters, frozenset(merged), frozenset(converted)


def _role(skeleton: PreTrainedModel, name: str, module: Any) -> str:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if module is skeleton.get_output_embeddings() or _is_outside_base(skeleton, name):
        return "head"
    if ROUTER_NAME.search(name) and module.weight.shape[0] in _expert_counts(skeleton.config):
        return "router"
    if ROUTER_NAME.search(name) and module.weight.shape[0] == 1:
        return "router"  # the gate of a shared expert
    for role, pattern in SEPARATE_PARTS:
        if pattern.search(name) and getattr(skeleton.config, "sub_configs", None):
            return role
    return "block"


def _is_outside_base(skeleton: PreTrainedModel, name: str) -> bool:
    """Whether the module belongs to the task head: it is not part of the base model that the class wraps."""
    prefix = skeleton.base_model_prefix
    return bool(prefix) and hasattr(skeleton, prefix) and not f"{name}.".startswith(f"{prefix}.")


def _expert_counts(config: PreTrainedConfig) -> set[int]:
    text = config.get_text_config()
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_layer")
    return {value for key in keys if isinstance(value := getattr(text, key, None), int)}


def _kinds(module: nn.Module) -> tuple[str, ...]:
    return tuple(cls.__name__ for cls in type(module).__mro__ if cls not in (nn.Module, object))


def _is_matrix(module: nn.Module) -> bool:
    """Whether the module holds one matrix: a Linear, an Embedding, a Conv1D, a router of transformers 5."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 2


def _is_storable(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding))


def _survives(initialize: Any, module: nn.Module) -> bool:
    try:
        initialize(module)
    except AttributeError as error:
        return "weight" not in str(error)
    return True


def _checkpoint_spelling(module_name: str, held: Layer) -> str:
    """The name under which a tied module would be stored, given how the module it is tied to is stored."""
    if held.module == held.name or not held.name.endswith(held.module):
        return module_name
    return held.name.removesuffix(held.module) + module_name
