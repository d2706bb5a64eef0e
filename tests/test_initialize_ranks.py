"""New models that gloo processes share: each value is that of one process, whatever the mesh."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from sparseautomodel import SparseAutoModelForCausalLM, init_module, materialize, verify
from tests.conftest import SIZES
from tests.ranks import in_ranks

SHARED = {"num_key_value_heads": 4}
CONFIG = LlamaConfig(**SIZES | SHARED, tie_word_embeddings=False)
TIED = LlamaConfig(**SIZES | SHARED, tie_word_embeddings=True)
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
W4A16: Any = {
    "QuantizationModifier": {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
        "ignore": ["lm_head"],
    }
}
IDS = torch.arange(8).view(2, 4)


class Blocks(nn.Module):
    """A module of nobody's library: blocks, a buffer, a matrix that is zero on purpose, a head that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)])
        self.last = nn.Linear(8, 8)
        nn.init.zeros_(self.last.weight)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("slopes", torch.arange(8) / 8, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) + self.slopes
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.last(hidden) + hidden)


def _in_ranks(count: int, function: Any, *args: Any) -> list[Any]:
    """What `function` returns on each rank, with the tensors in it, which outlive their process as bytes alone."""
    return [torch.load(io.BytesIO(found), weights_only=False) for found in in_ranks(count, _packed, function, *args)]


def _packed(rank: int, function: Any, *args: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(function(rank, *args), buffer)
    return buffer.getvalue()


def _whole(module: nn.Module) -> dict[str, Tensor]:
    state = {**module.state_dict(), **dict(module.named_buffers())}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def _from_config(rank: int, config: Any, given: dict[str, int], recipe: Any) -> tuple[Any, ...]:
    torch.manual_seed(rank)  # the seed of values is that of the call
    model = SparseAutoModelForCausalLM.from_config(
        config, recipe=recipe, seed=3, distributed_config=DistributedConfig(**given)
    )
    shared = sum(isinstance(value, DTensor) for value in model.parameters())
    logits = model(IDS).logits.detach()
    return _whole(model), shared, verify(model).problems, logits.full_tensor() if shared and _is(logits) else logits


def _is(value: Any) -> bool:
    return isinstance(value, DTensor)


@pytest.mark.parametrize("recipe", [None, W4A16], ids=["dense", "w4a16"])
@pytest.mark.parametrize(
    ("config", "given"),
    [
        (CONFIG, {"fsdp_size": 2}),
        (CONFIG, {"tp_size": 2}),
        (TIED, {"fsdp_size": 2}),
        (CONFIG, {"fsdp_size": 2, "tp_size": 2}),
    ],
    ids=["fsdp", "tp", "fsdp-tied", "fsdp-tp"],
)
def test_from_config_on_a_mesh(config: LlamaConfig, given: dict[str, int], recipe: Any) -> None:
    alone = SparseAutoModelForCausalLM.from_config(config, recipe=recipe, seed=3)
    expected = _whole(alone)
    count = given.get("fsdp_size", 1) * given.get("tp_size", 1)
    for found, shared, problems, logits in _in_ranks(count, _from_config, config, given, recipe):
        assert shared > 10
        assert problems == ()
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        torch.testing.assert_close(logits, alone(IDS).logits.detach(), rtol=1e-4, atol=1e-4)


def _any_module(rank: int) -> tuple[Any, ...]:
    with init_module(empty_weights=True, mesh=init_device_mesh("cpu", (2,)), seed=5):
        module = Blocks()
    materialize(module).eval()
    shared = [name for name, value in module.named_parameters() if not isinstance(value, DTensor)]
    tied = module.head.weight is module.embedding.weight
    return _whole(module), shared, tied, module(IDS).detach(), verify(module).problems


def test_any_module_over_a_mesh() -> None:
    with init_module(empty_weights=True):
        alone = Blocks()
    expected = _whole(materialize(alone, seed=5))
    assert not alone.last.weight.any()
    for found, whole, tied, output, problems in _in_ranks(2, _any_module):
        assert whole == []
        assert tied
        assert problems == ()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        torch.testing.assert_close(output, alone.eval()(IDS).detach())


def _without_a_seed(rank: int) -> Tensor:
    torch.manual_seed(100 + rank)
    with init_module(empty_weights=True, mesh=init_device_mesh("cpu", (2,))):
        module = nn.Linear(4, 4)
    return _whole(materialize(module))["weight"]


def test_without_a_seed_all_ranks_take_that_of_the_first() -> None:
    torch.manual_seed(100)
    with init_module(empty_weights=True):
        alone = nn.Linear(4, 4)
    materialize(alone)
    assert all(torch.equal(found, alone.weight) for found in _in_ranks(2, _without_a_seed))


NAMES = {"fsdp-tp": ("fsdp", "tp"), "tp": ("tp",), "fsdp": ("fsdp",), "hsdp": ("dp_replicate", "fsdp")}


def _over_a_mesh(rank: int, config: LlamaConfig, sizes: tuple[int, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with init_module(empty_weights=True, mesh=mesh, seed=3):
        model = LlamaForCausalLM(config)
    materialize(model)
    shared = sum(isinstance(value, DTensor) for value in model.parameters())
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    logits = model(IDS).logits.detach()
    return _whole(model), shared, tied, verify(model).problems, logits.full_tensor() if _is(logits) else logits


@pytest.mark.parametrize(
    ("config", "sizes", "kind"),
    [
        (CONFIG, (2, 2), "fsdp-tp"),
        (TIED, (2, 2), "fsdp-tp"),
        (CONFIG, (1, 2), "fsdp-tp"),
        (CONFIG, (2, 1), "fsdp-tp"),
        (CONFIG, (1, 1), "fsdp-tp"),
        (CONFIG, (2,), "tp"),
        (CONFIG, (2,), "fsdp"),
        (CONFIG, (2, 2), "hsdp"),
    ],
    ids=str,
)
def test_model_over_a_mesh_of_one_or_two_dimensions(config: LlamaConfig, sizes: tuple[int, ...], kind: str) -> None:
    with init_module(empty_weights=True):
        alone = LlamaForCausalLM(config)
    expected = _whole(materialize(alone, seed=3))
    world = math.prod(sizes)
    for found, shared, tied, problems, logits in _in_ranks(world, _over_a_mesh, config, sizes, NAMES[kind]):
        assert shared > 10 or world == 1
        assert tied is config.tie_word_embeddings
        assert problems == ()
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        torch.testing.assert_close(logits, alone(IDS).logits.detach(), rtol=1e-4, atol=1e-4)


def _shared_by_hand(rank: int) -> tuple[dict[str, Tensor], int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    with init_module(empty_weights=True):
        module = Blocks()
    plan = {f"blocks.{number}.linear1": ColwiseParallel() for number in range(2)}
    parallelize_module(
        module, mesh["tp"], plan | {f"blocks.{number}.linear2": RowwiseParallel() for number in range(2)}
    )
    fully_shard(module, mesh=mesh["fsdp"])
    materialize(module, seed=5)
    return _whole(module), max(len(value.placements) for value in module.parameters() if isinstance(value, DTensor))


def test_any_module_that_torch_shares_over_two_dimensions() -> None:
    with init_module(empty_weights=True):
        alone = Blocks()
    expected = _whole(materialize(alone, seed=5))
    for found, dimensions in _in_ranks(4, _shared_by_hand):
        assert dimensions == 2
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def _wrong_meshes(rank: int) -> list[str]:
    messages = []
    for sizes, names in (((1, 2), None), ((2, 1), ("tp", "fsdp")), ((1, 1, 2), ("a", "b", "c")), ((2,), ("tp",))):
        with pytest.raises(ValueError) as raised:
            with init_module(empty_weights=True, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names)):
                module = nn.Linear(2, 2)
            materialize(module)
        messages.append(str(raised.value))
    return messages


def test_meshes_that_cannot_be() -> None:
    for *dimensions, plan in in_ranks(2, _wrong_meshes):
        assert all('mesh_dim_names=("fsdp", "tp")' in message for message in dimensions)
        assert "a Linear has no plan" in plan
        assert "parallelize_module" in plan
