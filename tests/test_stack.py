"""What a range of blocks needs of a model, found by running it, for families that differ in what lies around blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AlbertConfig,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTextEncoding,
    LlamaConfig,
    PreTrainedConfig,
    T5Config,
)

from sparseautomodel import stack
from sparseautomodel.architecture import read_architecture
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.stack import AFTER, BEFORE, BESIDE, Stack, find_stack, stack_class
from tests.block_families import BLOCKS


def _stack(folder: Path) -> Stack:
    config = AutoConfig.from_pretrained(folder)
    return find_stack(read_architecture(stack_class(config), config, open_checkpoint(folder)))


@pytest.mark.parametrize(
    ("name", "blocks", "before", "beside", "after"),
    [
        ("llama", "model.layers", {"embed_tokens"}, set(), {"norm", "lm_head"}),
        ("mixtral", "model.layers", {"embed_tokens"}, set(), {"norm", "lm_head"}),
        ("gpt2", "transformer.h", {"wte", "wpe"}, set(), {"ln_f", "lm_head"}),
        ("bloom", "transformer.h", {"word_embeddings", "word_embeddings_layernorm"}, set(), {"ln_f", "lm_head"}),
        ("opt-projected", "model.decoder.layers", {"embed_tokens", "embed_positions", "project_in"}, set(), None),
        ("t5", "encoder.block", {"shared", "embed_tokens"}, set(), {"final_layer_norm"}),
        ("mpnet-bias-beside", "mpnet.encoder.layer", None, {"relative_attention_bias"}, None),
    ],
)
def test_edges(name: str, blocks: str, before: Any, beside: Any, after: Any, folder_of: Callable[[str], Path]) -> None:
    found = _stack(folder_of(name))
    assert (found.name, found.count) == (blocks, BLOCKS)
    for where, wanted in ((BEFORE, before), (BESIDE, beside), (AFTER, after)):
        owners = {one.split(".")[-2] for one, place in found.edges.items() if place == where}
        assert wanted is None or owners == wanted, where


def test_parameters_of_a_range(folder_of: Callable[[str], Path]) -> None:
    found = _stack(folder_of("llama"))
    middle = found.wanted(range(1, 2))
    assert set(middle) == found.parameters[1]
    assert set(middle.values()) == {"model.layers.1"}
    assert set(found.wanted(range(0, 1))) - found.parameters[0] == {"model.embed_tokens.weight"}
    assert set(found.wanted(range(2, 3))) - found.parameters[2] == {"model.norm.weight", "lm_head.weight"}
    assert len(found.wanted(range(0, 3))) == sum(map(len, found.parameters.values())) + 3


def test_what_the_first_block_hands_on(folder_of: Callable[[str], Path]) -> None:
    found = _stack(folder_of("t5"))
    (handed,) = found.handed_on
    assert handed.path == "layer.0.SelfAttention.relative_attention_bias"
    assert handed.flags == {"has_relative_attention_bias": (True, False)}
    assert found.wanted(range(1, 2))[f"encoder.block.0.{handed.path}.weight"] == BESIDE
    assert not _stack(folder_of("deepseek-dense-first")).handed_on


def test_a_model_that_does_not_run_without_values(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of its modules decides then, and what may be for all blocks is read with all."""
    monkeypatch.setattr(stack, "_run", lambda model, lists: None)
    found = _stack(folder_of("gpt2"))
    assert {one.split(".")[-2]: place for one, place in found.edges.items()} == {
        **dict.fromkeys(("wte", "wpe"), BEFORE),
        "ln_f": BESIDE,
        "lm_head": AFTER,
    }


def test_classes() -> None:
    assert stack_class(LlamaConfig(architectures=["LlamaForCausalLM"])) is AutoModelForCausalLM
    assert stack_class(LlamaConfig()) is AutoModel
    assert stack_class(T5Config(architectures=["T5ForConditionalGeneration"])) is AutoModelForTextEncoding


def test_shared_blocks_are_refused() -> None:
    sizes = {"vocab_size": 64, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 32}
    config: PreTrainedConfig = AlbertConfig(**sizes, num_hidden_layers=3, num_attention_heads=2)
    with pytest.raises(ValueError, match="has no list of 3 blocks"):
        find_stack(read_architecture(AutoModel, config, []))
