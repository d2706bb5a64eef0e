"""What is used of transformers and torch beyond their public names. A failure says what to look at after an update.

transformers keeps the distributed parts of a model in a mixin, and changed them in every minor version of 5.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.core_model_loading import spawn_materialize
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.distributed.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    TensorParallelLayer,
    apply_tensor_parallelism,
)
from transformers.quantizers.base import HfQuantizer

from sparseautomodel.distributed import PREFIX, STYLES
from sparseautomodel.shards import PATTERN


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (PreTrainedModel.prepare_distribute_model, ["distributed_config", "device_map"]),
        (PreTrainedModel.maybe_distribute_model, ["model", "distributed_config", "mesh_manager"]),
        (PreTrainedModel.initialize_weights, ["self"]),
        (PreTrainedModel._initialize_weights, ["self", "module", "is_custom_code"]),
        (HfQuantizer.update_parallel_plan, ["self", "model", "plan"]),
        (TensorParallelLayer.validate_param, ["self", "module", "param", "mesh", "parameter_name"]),
        (TensorParallelLayer.shard_param, ["self", "module", "param", "mesh"]),
        (TensorParallelLayer.context_around_forward, ["self", "module", "mesh"]),
        (ColwiseParallel.__init__, ["self", "input_layouts", "output_layouts", "use_local_output"]),
        (RowwiseParallel.__init__, ["self", "input_layouts", "output_layouts", "use_local_output"]),
        (DtensorShardOperation.shard_tensor, ["self", "source", "tensor_idx", "device", "dtype"]),
        (spawn_materialize, ["thread_pool", "tensor", "device", "dtype", "sharding_op", "tensor_idx"]),
    ],
)
def test_signatures(function: Any, parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == parameters


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        # Compressed layers are put in, and their plan changed, before the model is shared, and that before it is read.
        (
            PreTrainedModel.from_pretrained,
            ["hf_quantizer.preprocess_model(", "cls.maybe_distribute_model(", "cls._load_pretrained_model("],
        ),
        (HfQuantizer.preprocess_model, ["_process_model_before_weight_loading(", "update_parallel_plan("]),
        # A cut that is not allowed is found before the parameter is cut, and all before the first weight is read.
        (apply_tensor_parallelism, [".validate_param(", ".shard_param(", ".install_forward("]),
        # Slices are asked for as one tuple of slices; whole tensors as `...`.
        (DtensorShardOperation.shard_tensor, ["source[...]", "source[tuple(slice_parts)]"]),
        # Parameters of compressed layers are local tensors inside their forward.
        (ColwiseParallel.should_use_local_tensors, ["_hf_quantized_needs_local_tp"]),
        (RowwiseParallel.should_use_local_tensors, ["_hf_quantized_needs_local_tp"]),
        (TensorParallelLayer.install_forward, ["transform_inputs_pre_forward", "context_around_forward"]),
        # What has the flag keeps its values when missing parameters are initialized.
        (PreTrainedModel._initialize_weights, ["_is_hf_initialized"]),
    ],
)
def test_order_of_events(function: Any, texts: list[str]) -> None:
    source = inspect.getsource(function)
    places = [source.find(text) for text in texts]
    assert -1 not in places, f"{function.__qualname__} does not say {texts[places.index(-1)]!r} any more"
    assert places == sorted(places), f"{function.__qualname__} has another order: {texts}"


def test_styles_stand_for_transformers_own() -> None:
    for name, mine in STYLES.items():
        theirs = ALL_PARALLEL_STYLES[name]
        assert isinstance(mine, type(theirs))
        ours = vars(ALL_PARALLEL_STYLES[PREFIX + name])
        assert ours == vars(theirs), f"{name} is made with {vars(theirs)}"


def test_names_in_plans_and_settings() -> None:
    assert replace_layer_number_by_wildcard("model.layers.3.mlp.down_proj") == "model.layers.*.mlp.down_proj"
    config = LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=8, vocab_size=8)
    plan = LlamaForCausalLM(config).tp_plan
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert plan["model.layers.*.mlp.up_proj"] == "colwise"
    given = DistributedConfig(tp_size=2, fsdp_size=3)
    assert (given.tp_size, given.fsdp_size, given.tp_plan) == (2, 3, None)


def test_torch_cuts_as_it_did() -> None:
    """Chunks of equal size, the last ones short or empty; the order of a strided shard."""
    assert [Shard.local_shard_size_and_offset(10, 4, rank) for rank in range(4)] == [(3, 0), (3, 3), (3, 6), (1, 9)]
    assert [Shard.local_shard_size_and_offset(5, 4, rank)[0] for rank in range(4)] == [2, 2, 1, 0]
    assert _StridedShard(0, split_factor=2).split_factor == 2


def test_torch_names_the_files_of_ranks_as_it_did() -> None:
    from fnmatch import fnmatch

    from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, _gen_file_name

    assert (CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY) == ("DCP_SHARDING_INFO", "saved_offsets")
    assert fnmatch(_gen_file_name(1, 1, 3), PATTERN)


def test_random_operations_that_are_replaced() -> None:
    """In-place fills reach the dispatcher under these names, whatever function of torch.nn.init is called."""
    for name in ("normal_", "uniform_", "randn", "rand", "randn_like", "rand_like"):
        assert hasattr(getattr(torch.ops.aten, name), "default")
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.bernoulli_.float.tags
