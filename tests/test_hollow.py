"""Models with some of their parameters alone, and what remains numbered anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, GPT2Config

from sparseautomodel.architecture import read_architecture
from sparseautomodel.hollow import Absent, assemble, cut_config, hollow_class, take_out
from sparseautomodel.stack import find_stack, stack_class
from tests.block_families import BLOCKS, FAMILIES


def test_absent_modules_let_hidden_states_pass() -> None:
    hidden = torch.randn(1, 2, 4)
    assert Absent()(hidden) is hidden
    assert Absent(nn.LayerNorm(4))(None, inputs_embeds=hidden) is hidden
    embedding = Absent(nn.Embedding(3, 4))
    assert torch.equal(hidden + embedding(torch.ones(1, 2)), hidden)
    assert torch.equal(hidden + embedding(torch.ones(1, 2, dtype=torch.long)), hidden)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_there_but_what_is_wanted(name: str, folder_of: Callable[[str], Path]) -> None:
    config = AutoConfig.from_pretrained(folder_of(name))
    architecture = read_architecture(stack_class(config), config, [])
    stack = find_stack(architecture)
    for blocks in (range(0, 1), range(1, 2), range(2, 3)):
        wanted = stack.wanted(blocks)
        with torch.device("meta"):
            model = hollow_class(architecture.model_class, stack, wanted)(copy.deepcopy(config))
        assert set(model.state_dict()) == set(wanted)
        assert type(model).__name__ == architecture.model_class.__name__
        assert type(model).__module__ == architecture.model_class.__module__
        assemble(model, stack, blocks, wanted)
        assert len(model.get_submodule(stack.name)) == 1  # type: ignore[arg-type]
        numbers = {vars(one)["layer_idx"] for one in model.modules() if vars(one).get("layer_idx") is not None}
        assert numbers <= {0}
        assert model.config.get_text_config().num_hidden_layers == 1


def test_ties_to_what_is_absent_are_forgotten(folder_of: Callable[[str], Path]) -> None:
    config = AutoConfig.from_pretrained(folder_of("llama-tied"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stack = find_stack(read_architecture(AutoModelForCausalLM, config, []))
    assert model.all_tied_weights_keys
    take_out(model, stack, frozenset(stack.wanted(range(2, 3))))
    assert not model.all_tied_weights_keys


def test_lists_with_an_entry_a_block_are_cut() -> None:
    config = copy.deepcopy(FAMILIES["gemma3"])
    assert isinstance(config, Gemma3TextConfig)
    config.eos_token_id = [1, 2, 3]
    cut_config(config, range(1, 3))
    assert config.layer_types == ["full_attention", "sliding_attention"]
    assert config.num_hidden_layers == 2
    assert config.eos_token_id == [1, 2, 3]
    renamed = GPT2Config(n_layer=BLOCKS)
    cut_config(renamed, range(0, 1))
    assert renamed.n_layer == 1
