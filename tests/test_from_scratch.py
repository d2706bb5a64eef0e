"""`from_config`: new models from a seed, dense and compressed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from sparseautomodel import SparseAutoModelForCausalLM, init_module, materialize, verify
from sparseautomodel.compressed_layers import CompressedLinear
from sparseautomodel.from_scratch import as_checkpoint
from sparseautomodel.plan import PlanError
from tests.conftest import SIZES

CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True, dtype="bfloat16"),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_seed_decides_and_random_state_is_not_used(name: str) -> None:
    before, config = torch.get_rng_state(), CONFIGS[name]
    asked = config.to_dict()
    one, same, other = (SparseAutoModelForCausalLM.from_config(config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert config.to_dict() == asked
    assert one.training
    assert verify(one).ok
    pairs = list(zip(one.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(value, again) for value, again in pairs)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.dtype == (config.dtype or torch.float32)


@pytest.mark.parametrize("recipe", ["w4a16", "2of4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_recipe_gives_what_saving_and_loading_gives(name: str, recipe: str, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    model = SparseAutoModelForCausalLM.from_config(CONFIGS[name], recipe=recipe, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    SparseAutoModelForCausalLM.from_config(CONFIGS[name], seed=1).save_pretrained(tmp_path)
    loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path, recipe=recipe)
    found, expected = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert isinstance(model.model.layers[0].self_attn.q_proj, CompressedLinear) is (recipe == "w4a16")
    assert model.training
    assert model.name_or_path == ""
    assert model(torch.arange(4)[None]).logits.isfinite().all()


def test_dtype_and_attention_are_passed_on() -> None:
    kwargs = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    for recipe in (None, "w4a16"):
        model = SparseAutoModelForCausalLM.from_config(CONFIGS["llama"], recipe=recipe, seed=0, **kwargs)
        assert model.dtype == torch.bfloat16
        assert model.config._attn_implementation == "eager"


def test_inside_init_module_it_stays_empty() -> None:
    with init_module(empty_weights=True):
        model = SparseAutoModelForCausalLM.from_config(CONFIGS["llama"])
    assert all(value.is_meta for value in model.parameters())
    eager = SparseAutoModelForCausalLM.from_config(CONFIGS["llama"], seed=4)
    materialize(model, seed=4)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), eager.parameters(), strict=True))


def test_recipe_that_does_not_fit() -> None:
    with pytest.raises(PlanError, match="data"):
        SparseAutoModelForCausalLM.from_config(CONFIGS["llama"], recipe="w4a16-gptq")


def test_config_of_a_compressed_checkpoint_is_refused() -> None:
    config = LlamaConfig(**SIZES, quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(ValueError, match=r"from_config\(config, recipe=\.\.\.\)"):
        SparseAutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpoint_in_memory_is_the_one_on_disk(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = SparseAutoModelForCausalLM.from_config(CONFIGS[name], seed=0)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    held = as_checkpoint(model)
    assert set(held) == set(stored)
    assert all(torch.equal(held[key][...], stored[key]) for key in stored)


@pytest.mark.parametrize("seed", ["a", 1.5, True, -3])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    message = r"from_config\(seed=.*\): a seed is a whole number from 0 on.*Write from_config\(\.\.\., seed=\d\)"
    with pytest.raises(ValueError, match=message):
        SparseAutoModelForCausalLM.from_config(CONFIGS["llama"], seed=seed)
    with pytest.raises(ValueError, match="materialize"):
        materialize(torch.nn.Linear(2, 2), seed=seed)
    with pytest.raises(ValueError, match="init_module"), init_module(seed=seed):
        pass
