from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from sparseautomodel.units import block_names, find_units
from tests.conftest import SIZES


def test_every_tensor_is_in_one_unit() -> None:
    for config in (
        LlamaConfig(**SIZES),
        MixtralConfig(**SIZES, num_local_experts=2),
        GPT2Config(n_layer=2, n_embd=64, n_head=4),
    ):
        model = AutoModelForCausalLM.from_config(config)
        units = find_units(model)
        held = [id(value.home) for unit in units for value in unit.values]
        there = {id(value) for value in [*model.parameters(), *model.buffers()]}
        assert len(held) == len(set(held)) and set(held) == there


def test_ties_are_one_unit_with_two_carriers() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=True))
    (tied,) = [unit for unit in find_units(model) if unit.gathered]
    assert tied.carriers == (model.lm_head,) and tied.gathered == (model.model.embed_tokens,)
    assert len(tied.values) == 1 and len(tied.values[0].places) == 2


def test_names_are_compared_at_dots() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
    assert block_names(model) == [f"blocks.{number}" for number in range(12)]
    assert [unit.name for unit in find_units(model)] == block_names(model)


def test_values_live_in_one_run_of_memory() -> None:
    (unit,) = find_units(nn.Linear(3, 5))
    before = [part.clone() for part in unit.parts()]
    memory = torch.zeros(unit.nbytes, dtype=torch.uint8)
    unit.take_home(memory)
    assert all(torch.equal(part, old) for part, old in zip(unit.parts(), before, strict=True))
    memory.zero_()
    assert all(not part.any() for part in unit.parts())


def test_a_unit_lies_in_the_memory_that_was_its_home() -> None:
    """Also a twin's, over the same tensors, but no other of the same sizes."""
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    (unit,), (foreign,) = find_units(model), find_units(other)
    memory = torch.empty(unit.nbytes, dtype=torch.uint8)
    assert not unit.lies_in(memory)
    unit.take_home(memory)
    assert unit.lies_in(memory) and find_units(model)[0].lies_in(memory)
    assert not foreign.lies_in(memory) and not unit.lies_in(memory[: unit.nbytes // 2])
