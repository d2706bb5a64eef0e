"""A model of a config with initial values, on any layout the same; and those values as a checkpoint."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_tie_weights

from sparseautomodel.architecture import BUILDING
from sparseautomodel.checkpoint import Checkpoint, Reads, StoredTensor
from sparseautomodel.distributed import common_seed, distribute, rank_device
from sparseautomodel.initialize import init_module, materialize


def build(
    auto_class: Any, config: PreTrainedConfig, seed: int | None, distributed_config: Any, kwargs: dict[str, Any]
) -> PreTrainedModel:
    """The dense model: built empty, shared by processes where `distributed_config` says so, then materialized.

    It goes where tensors are made in this place: the default device, or that of a `torch.device` or `init_module`
    around the call; on the meta device it stays empty.
    """
    place = torch.empty(0).device
    # What is shared is tied afterwards, as transformers' own load does it.
    ties = contextlib.nullcontext() if distributed_config is None else no_tie_weights()
    with BUILDING, ties, init_module(empty_weights=True):
        model: PreTrainedModel = auto_class.from_config(copy.deepcopy(config), **kwargs)
    if distributed_config is not None:
        distribute(model, distributed_config)
        place = rank_device(distributed_config) or place
    if place.type == "meta":
        return model
    if seed is None:
        drawn = int(torch.randint(2**62, ()).item())
        seed = drawn if distributed_config is None else common_seed(drawn)
    materialize(model, place, seed)
    return model


def as_checkpoint(model: PreTrainedModel) -> Checkpoint:
    """The tensors of a model in memory, under the names and in the shapes in which it is saved."""
    held = {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}
    reads = Reads()
    stored = {
        name: StoredTensor(name, tuple(value.shape), value.dtype, "memory", value.detach(), reads)
        for name, value in revert_weight_conversion(model, held).items()
    }
    return Checkpoint(stored, [], reads)
