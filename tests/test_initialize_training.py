"""Twenty steps of training, with meta initialization and without it: the same losses, neither flat nor inflated."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from sparseautomodel import SparseAutoModelForCausalLM, init_module, materialize
from tests.conftest import SIZES
from tests.eager import eager
from tests.ranks import in_ranks

SEED = 7
STEPS = 20


def _config(tied: bool) -> LlamaConfig:
    return LlamaConfig(**SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=tied)


def _empty_first(config: LlamaConfig, mesh: object = None) -> LlamaForCausalLM:
    with init_module(empty_weights=True, mesh=mesh):  # type: ignore[arg-type]
        model = LlamaForCausalLM(config)
    return materialize(model, seed=SEED)  # type: ignore[return-value]


def _losses(model: LlamaForCausalLM) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(1, SIZES["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _is_a_curve_of_training(losses: list[float]) -> bool:
    """It starts at what guessing costs, and falls at every step."""
    falls = all(later < earlier for earlier, later in itertools.pairwise(losses))
    return abs(losses[0] - math.log(SIZES["vocab_size"])) < 0.5 and falls and losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("tied", [False, True])
def test_losses_are_those_of_the_model_that_was_never_empty(tied: bool) -> None:
    reference = eager(lambda: LlamaForCausalLM(_config(tied)), SEED)
    model = _empty_first(_config(tied))
    expected = dict(reference.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
    wanted, losses = _losses(reference), _losses(model)  # type: ignore[arg-type]
    assert _is_a_curve_of_training(wanted)
    assert max(abs(one - other) for one, other in zip(losses, wanted, strict=True)) < 1e-5


def test_torch_s_own_random_numbers_give_the_same_kind_of_curve() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wanted = _losses(LlamaForCausalLM(_config(False)))
    losses = _losses(_empty_first(_config(False)))
    assert _is_a_curve_of_training(wanted)
    assert _is_a_curve_of_training(losses)
    assert abs(losses[-1] - wanted[-1]) < 0.2


@pytest.mark.parametrize("way", ["from_config", "init_module"])
def test_losses_of_two_ranks_are_those_of_the_model_that_was_never_empty(way: str) -> None:
    wanted = _losses(eager(lambda: LlamaForCausalLM(_config(False)), SEED))  # type: ignore[arg-type]
    assert _is_a_curve_of_training(wanted)
    for losses, shared in in_ranks(2, _shared, way):
        assert shared
        assert max(abs(one - other) for one, other in zip(losses, wanted, strict=True)) < 1e-5


def _shared(rank: int, way: str) -> tuple[list[float], bool]:
    torch.manual_seed(rank)
    if way == "from_config":
        given = DistributedConfig(fsdp_size=2)
        model = SparseAutoModelForCausalLM.from_config(_config(False), seed=SEED, distributed_config=given)
    else:
        model = _empty_first(_config(False), init_device_mesh("cpu", (2,)))
    return _losses(model), all(isinstance(value, DTensor) for value in model.parameters())
