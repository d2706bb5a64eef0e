"""Models whose parameters are shared by several processes: the only file that calls transformers' distributed parts.

transformers shards a model on the meta device and lets each process read its slices. Here is what it does not know: how
the tensors of a compressed layer are cut, and initial values that do not depend on the cut. What is used of it beyond
its public names is held by tests/test_distributed_contract.py, which fails where one of them changes.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel, TensorParallelLayer

from sparseautomodel.compressed_experts import CompressedExperts
from sparseautomodel.compressed_layers import CompressedEmbedding, CompressedLinear
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.random_values import drawing

PREFIX = "compressed_"
"""What the names of this file's parallel styles have before those of transformers."""


class DistributedError(ValueError):
    """A model cannot be shared by processes as it was asked for. Raised before any weight is read."""


def distribute(model: PreTrainedModel, config: DistributedConfig | dict[str, Any]) -> PreTrainedModel:
    """`model`, built on the meta device, with its parameters shared by the processes of `config`; nothing is allocated.

    Every process calls it, with the same model. Parameters become `DTensor`s, and layers talk to their like on other
    processes: this is transformers' own FSDP2 and tensor parallelism.
    """
    cls = type(model)
    given, _, mesh = cls.prepare_distribute_model(config)
    return cls.maybe_distribute_model(model, given, mesh)


def check_mesh(mesh: DeviceMesh) -> None:
    """Whether a module that is built empty can be sharded over `mesh`; a ValueError that says what can."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 2 or (mesh.ndim == 2 and not names) or (mesh.ndim == 2 and "tp" in names and names[1] != "tp"):
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions, named {names or None}. It may have one (FSDP2), or two with names: "
            'init_device_mesh(device, (2, 4), mesh_dim_names=("fsdp", "tp")), for instance, the second of them "tp" or '
            "the one that FSDP2 shards over, while the first repeats"
        )


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Share a module on the meta device by the processes of a mesh; nothing is allocated.

    FSDP2 makes one group a block, the rest is one more. A dimension "tp" is for models of transformers, which have a
    plan; ties that transformers declares are to be made again.
    """
    if "tp" not in (mesh.mesh_dim_names or ()):
        for one in list(module.modules()):
            for block in one if isinstance(one, nn.ModuleList) else ():
                if next(block.parameters(), None) is not None:
                    fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return
    if not isinstance(module, PreTrainedModel):
        raise ValueError(
            f'mesh has a dimension "tp", and a {type(module).__name__} has no plan for it. '
            "Build it without mesh, share it by torch's parallelize_module(module, mesh['tp'], plan) and "
            "fully_shard(module, mesh=mesh['fsdp']), then call materialize(module)"
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(torch.distributed.get_world_size())):
        raise ValueError(f"mesh has the processes {ranks}: tensor parallelism needs all of them, in order")
    for target in getattr(module, "all_tied_weights_keys", None) or {}:
        path, _, key = target.rpartition(".")
        value = module.get_parameter(target)
        setattr(module.get_submodule(path), key, nn.Parameter(value.detach(), requires_grad=value.requires_grad))
    count = mesh.size(mesh.ndim - 1)
    distribute(module, DistributedConfig(tp_size=count, fsdp_size=mesh.size() // count))


def initialize_missing(model: PreTrainedModel, names: Collection[str], seed: int) -> None:
    """Give the parameters `names`, which no file fills, values that depend on `seed` and their names alone.

    transformers has initialized them once; its `_init_weights` does it again for these, with other random numbers.
    """
    parameters = {name: value for name, value in model.named_parameters() if name in names}
    for name, value in parameters.items():
        value._is_hf_initialized = False  # type: ignore[attr-defined]
        parts = name.split(".")
        for length in range(len(parts)):  # a module around may be the one that initializes it
            model.get_submodule(".".join(parts[:length]))._is_hf_initialized = False  # type: ignore[assignment]
    if parameters:
        with drawing(parameters, seed):
            model.initialize_weights()


def common_seed(seed: int) -> int:
    """The seed of the first process, for all that share a model: each of them has to call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return seed
    box = [seed]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def is_shared(model: PreTrainedModel) -> bool:
    """Whether processes share `model`. Else each has one of its own, or only one of them loads."""
    return getattr(model, "_mesh_manager", None) is not None


def rank_device(config: DistributedConfig | dict[str, Any] | None) -> torch.device | None:
    """Where this process's part of the model goes; None where the model is in one process."""
    if config is None or not torch.accelerator.is_available():
        return None if config is None else torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type if accelerator else "cpu", int(os.environ.get("LOCAL_RANK", "0")))


def plan_for_compressed(model: PreTrainedModel, plan: dict[str, str]) -> None:
    """Change a tensor-parallel plan of transformers in place, so that compressed layers are cut as they are stored.

    Column and row styles become those of this file, which do for dense layers what transformers does. Experts and
    embeddings that are compressed are left whole on every process.
    """
    for name, module in model.named_modules():
        rule = replace_layer_number_by_wildcard(name)
        if isinstance(module, (CompressedExperts, CompressedEmbedding)):
            for key in [key for key in plan if key == rule or key.startswith(f"{rule}.")]:
                del plan[key]
        elif isinstance(module, CompressedLinear):
            style = plan.get(rule, "replicate").removeprefix(PREFIX)
            cuts = type(ALL_PARALLEL_STYLES.get(style, _WHOLE)).shard_param is not TensorParallelLayer.shard_param
            if cuts and style not in STYLES:
                raise DistributedError(
                    f"{name} is compressed, and the tensor-parallel style {style!r} cannot cut it. Leave it dense: add "
                    f"it to ignore in the recipe"
                )
            module._hf_quantized_needs_local_tp = True  # type: ignore[assignment]
    plan.update({key: PREFIX + style for key, style in plan.items() if style in STYLES})


def config_for_compressed(config: DistributedConfig | dict[str, Any] | None) -> DistributedConfig | None:
    """The config with the styles of this file in the rules that the user gave."""
    config = DistributedConfig.from_dict(config) if isinstance(config, dict) else config
    if config is None or not isinstance(config.tp_plan, dict):
        return config
    rules = {key: PREFIX + style if style in STYLES else style for key, style in config.tp_plan.items()}
    return replace(config, tp_plan=rules)


def restore_plan(plan: dict[str, str]) -> None:
    """Give the styles in a plan transformers' names again: it looks for them when it makes a cache."""
    plan.update({key: style.removeprefix(PREFIX) for key, style in plan.items()})


def cut_problem(scheme: QuantizationScheme, shape: tuple[int, int], axis: int, count: int) -> str | None:
    """Why a compressed matrix cannot be cut into `count` parts along `axis` (0: rows); None where it can.

    Each part has to hold whole words, groups and blocks, so that it is what the part of the whole matrix is stored as.
    """
    size, stored = shape[axis], storage.layout(scheme, shape, torch.bfloat16)
    chunk = -(-size // count)
    spans = {part: span for part, both in storage.spans(scheme).items() if (span := both[axis]) is not None}
    for part, span in spans.items():
        stored_chunk = -(-stored[part][0][axis] // count)
        if any(stored_chunk * number * span != chunk * number for number in range(1, count) if chunk * number < size):
            unit = math.lcm(*(one.numerator for one in spans.values()))
            return f"{size} {('rows', 'columns')[axis]} are {chunk} for each of {count}, no multiple of {unit} ({part})"
    return None


class _Compressed:
    """What both styles of this file do for a compressed layer."""

    axis: int

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        if not isinstance(module, CompressedLinear):
            return
        scheme, shape = module.quantization_scheme, (module.out_features, module.in_features)
        problem = cut_problem(scheme, shape, self.axis, mesh.size())
        if problem is not None:
            possible = [count for count in range(1, 65) if cut_problem(scheme, shape, self.axis, count) is None]
            layer = str(parameter_name).rpartition(".")[0]
            raise DistributedError(
                f"{layer} cannot be cut by tensor parallelism over {mesh.size()} processes: {problem}. Choose tp_size "
                f"among {possible}, or a recipe with a smaller group_size or with this layer in ignore"
            )

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        value = module._parameters.get(param)
        if not isinstance(module, CompressedLinear) or param == "bias" or value is None:
            super().shard_param(module, param, mesh)  # type: ignore[misc]
            return
        span = storage.spans(module.quantization_scheme)[param][self.axis]
        placement = Replicate() if span is None else Shard(self.axis)
        part = distribute_tensor(value, mesh, [placement], src_data_rank=None)
        module._parameters[param] = nn.Parameter(part, requires_grad=False)

    @contextlib.contextmanager
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        with super().context_around_forward(module, mesh):  # type: ignore[misc]
            if not isinstance(module, CompressedLinear):
                yield
                return
            with _as_small_layer(module, mesh, self.axis):
                yield


class CompressedColwise(_Compressed, ColwiseParallel):
    """transformers' column-wise style, for compressed layers too."""

    axis = 0


class CompressedRowwise(_Compressed, RowwiseParallel):
    """transformers' row-wise style, for compressed layers too."""

    axis = 1


@contextlib.contextmanager
def _as_small_layer(module: CompressedLinear, mesh: DeviceMesh, axis: int) -> Iterator[None]:
    """The layer as whoever runs it should see it: a layer that has the size of this process's part."""
    name = ("out_features", "in_features")[axis]
    size, kernel, whole_shape = getattr(module, name), module.kernel, module._parameters.get("weight_shape")
    part, _ = Shard.local_shard_size_and_offset(size, mesh.size(), mesh.get_local_rank())
    setattr(module, name, int(part))
    shape = (module.out_features, module.in_features)
    module.kernel = replace(kernel, shape=shape)
    if whole_shape is not None:
        module._parameters["weight_shape"] = nn.Parameter(torch.tensor(shape), requires_grad=False)
    try:
        yield
    finally:
        setattr(module, name, size)
        module.kernel = kernel
        if whole_shape is not None:
            module._parameters["weight_shape"] = whole_shape


_REPLICATED, _WHOLE = Replicate(), TensorParallelLayer()
STYLES = {
    "colwise": CompressedColwise(),
    "colwise_rep": CompressedColwise(output_layouts=_REPLICATED),
    "colwise_gather_output": CompressedColwise(output_layouts=_REPLICATED),
    "rowwise": CompressedRowwise(),
    "rowwise_rep": CompressedRowwise(input_layouts=_REPLICATED),
    "rowwise_split_input": CompressedRowwise(input_layouts=_REPLICATED),
}
"""transformers' name of a style -> the one that knows compressed layers."""
for _name, _style in STYLES.items():
    ALL_PARALLEL_STYLES.register(PREFIX + _name, _style)  # type: ignore[arg-type]
