from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from sparseautomodel.architecture import read_architecture
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.completeness import check_cache, check_names, check_parts, explained, few


@pytest.mark.parametrize(
    "name",
    [
        *("mtp.layers.0.weight", "model.mtp_layers.0.mlp.up_proj.weight", "medusa_head.0.weight", "eagle.fc.weight"),
        *("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "nextn_predict.weight"),
    ],
)
def test_draft_heads_and_obsolete_buffers_are_explained(name: str) -> None:
    assert explained(["model.norm.weight", name]) == {name}


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.9.mlp.up_proj.weight", "lm_head.bias", "model.smtp.weight", "model.inv_freq", "attempt.weight"),
        *("model.layers.0.self_attn.rotary_emb.inv_freq_2", "teagle.weight", "model.layers.2.input_layernorm.weight"),
    ],
)
def test_nothing_else_is(name: str) -> None:
    assert not explained(["model.norm.weight", name])


def test_a_block_is_a_draft_where_it_joins_states_and_embeddings() -> None:
    draft = {f"model.layers.2.{part}" for part in ("eh_proj.weight", "mlp.up_proj.weight", "embed_tokens.weight")}
    rest = {"model.layers.1.mlp.up_proj.weight", "model.layers.22.mlp.up_proj.weight", "other.layers.2.mlp.weight"}
    assert explained(draft | rest) == draft


@pytest.mark.parametrize("fixture", ["tiny_llama", "tied_llama", "tiny_mixtral", "tiny_qwen3_moe", "tiny_gpt2"])
def test_sound_checkpoints_have_no_problem(request: pytest.FixtureRequest, fixture: str) -> None:
    folder = request.getfixturevalue(fixture)
    checkpoint = open_checkpoint(folder)
    architecture = read_architecture(AutoModelForCausalLM, AutoConfig.from_pretrained(folder), checkpoint)
    assert check_names(checkpoint, architecture, ()) == check_parts(checkpoint, architecture, (), {}) == []
    assert {times for times, _ in checkpoint.reads().values()} == {0}


def test_checkpoint_of_another_size_names_what_does_not_fit(tiny_llama: Path, tiny_mixtral: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    larger = AutoConfig.from_pretrained(tiny_llama, num_hidden_layers=3, vocab_size=300)
    problems = "\n".join(check_names(checkpoint, read_architecture(AutoModelForCausalLM, larger, checkpoint), ()))
    assert "no tensor fills model.layers.2." in problems
    assert "lm_head.weight has shape [256, 64], the model says [300, 64]" in problems
    smaller = AutoConfig.from_pretrained(tiny_llama, num_hidden_layers=1)
    problems = "\n".join(check_names(checkpoint, read_architecture(AutoModelForCausalLM, smaller, checkpoint), ()))
    assert "the model has no place for model.layers.1." in problems


def test_long_lists_are_cut(tmp_path: Path) -> None:
    assert few(["a", "b"]) == "a, b"
    assert few(map(str, range(10)), 3) == "0, 1, 2 and 7 more"


def test_a_quantized_cache_has_two_scales_an_attention_module() -> None:
    modules = {f"layers.{number}.self_attn": (f"layers.{number}.self_attn", number) for number in range(2)}
    names = [f"{name}.{part}" for name in modules for part in ("k_scale", "v_scale")]
    assert not check_cache(names, modules) and not check_cache([*names, "layers.1.self_attn.k_zero_point"], modules)
    missing = "the cache is quantized, and layers.1.self_attn.v_scale are missing: servers take 1.0"
    assert check_cache(names[:3], modules) == [missing]
    assert "layers.7.k_scale: no attention module" in check_cache([*names, "layers.7.k_scale"], modules)[0]
