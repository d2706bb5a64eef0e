"""Buffers that no file holds come back with the values that the constructor computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, verify
from sparseautomodel.buffers import meta_attributes, restore_buffers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, LlamaConfig
from transformers.modeling_outputs import CausalLMOutput

class TinyConfig(PreTrainedConfig):
    model_type = "tiny-remote"
    width: int = 32
    start: int = 1

class Table(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.register_buffer("ramp", torch.arange(start, start + 8).float(), persistent=False)
        self.register_buffer("position_ids", torch.arange(8).expand((1, -1)), persistent=False)
        self.register_buffer("eighths", torch.arange(start, start + 8).to(torch.float16) / 8, persistent=False)
        self.register_buffer("kept", torch.zeros(8))
        self.offsets = torch.tensor([3, 1, 4, 1, 5])

class Raw(nn.Module):
    # A parameter of its own, and nothing that could draw initial values for it.
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))

class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig
    _no_split_modules = []

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(64, config.width)
        self.table, self.raw = Table(config.start), Raw(config.width)
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=2))
        self.up, self.head = nn.Linear(config.width, 64), nn.Linear(64, 64, bias=False)
        self.post_init()

    def _init_weights(self, module):
        # As in much remote code: what the base class would do for rotary embeddings is not done.
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, **kwargs):
        hidden = self.embed(input_ids) * self.raw.gain * self.table.ramp.sum() + self.table.offsets.sum()
        return CausalLMOutput(logits=self.head(self.up(hidden)))
"""
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        **{"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.3 * i for i in range(8)]},
    },
}


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A folder with a model of remote code."""
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "modeling_tiny.py").write_text(CODE)
    config = {"model_type": "tiny-remote", "architectures": ["TinyForCausalLM"], "width": 32, "start": 1}
    config |= {"dtype": "bfloat16", "tie_word_embeddings": False}
    names = {"AutoConfig": "TinyConfig", "AutoModelForCausalLM": "TinyForCausalLM"}
    config["auto_map"] = {auto: f"modeling_tiny.{name}" for auto, name in names.items()}
    (folder / "config.json").write_text(json.dumps(config))
    built = AutoModelForCausalLM.from_config(_config(folder), trust_remote_code=True)
    torch.nn.init.normal_(built.raw.gain)
    weights = {name: values.bfloat16() for name, values in built.state_dict().items()}
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("recipe", [None, "w8a8-dynamic", "2of4"])
def test_buffers_computed_in_a_constructor_are_right_after_a_load(remote: Path, recipe: str | None) -> None:
    """A11, A12: floats, integers and plain attributes of remote code, each in its own dtype."""
    model = SparseAutoModelForCausalLM.from_pretrained(remote, recipe=recipe, trust_remote_code=True)
    _assert_buffers(model, start=1)
    assert {"table.ramp", "table.position_ids", "table.eighths", "table.offsets"} <= set(model.load_report.restored)
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_buffers_follow_the_config(remote: Path) -> None:
    config = _config(remote)
    config.start = 5
    model = SparseAutoModelForCausalLM.from_pretrained(remote, config=config, trust_remote_code=True)
    _assert_buffers(model, start=5)


def test_rotary_embedding_inside_remote_code(remote: Path) -> None:
    """A11: a model that initializes by itself leaves even transformers' own modules unfilled."""
    model = SparseAutoModelForCausalLM.from_pretrained(remote, trust_remote_code=True)
    eager = AutoModelForCausalLM.from_config(_config(remote), trust_remote_code=True)
    assert torch.equal(model.rotary.inv_freq, eager.rotary.inv_freq) and model.rotary.inv_freq[0] == 1
    assert torch.equal(model.rotary.original_inv_freq, eager.rotary.original_inv_freq)


def test_parameter_of_a_layer_without_initialization_is_filled_by_the_checkpoint(remote: Path) -> None:
    """A15: no `reset_parameters` is needed where the files have the values; where they do not, it is named."""
    expected = torch.load(remote / "pytorch_model.bin", weights_only=True)
    model = SparseAutoModelForCausalLM.from_pretrained(remote, trust_remote_code=True)
    assert torch.equal(model.raw.gain, expected["raw.gain"])
    torch.save({name: values for name, values in expected.items() if name != "raw.gain"}, remote / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no tensor of the checkpoint fills raw\.gain"):
        SparseAutoModelForCausalLM.from_pretrained(remote, trust_remote_code=True)


def test_compressed_remote_model_is_saved_and_reloaded(remote: Path, tmp_path: Path) -> None:
    oneshot(remote, "w8a8-dynamic", output=tmp_path / "out", trust_remote_code=True)
    assert verify(tmp_path / "out", against=remote, trust_remote_code=True).ok
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    _assert_buffers(model, start=1)
    model.save_pretrained(tmp_path / "again")
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    _assert_buffers(again, start=1)
    text = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(model(text).logits, again(text).logits)


@pytest.mark.parametrize("recipe", [None, "w8a8-dynamic"])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_of_rotary_embeddings(
    save_model: Callable[[PreTrainedConfig], Path], tiny_llama: Path, rope: str, recipe: str | None
) -> None:
    """A11: for every kind of rope what an eager build computes, in float32 whatever the dtype of the model."""
    config = LlamaConfig.from_pretrained(tiny_llama, rope_parameters=ROPES[rope])
    folder = save_model(config)
    eager = AutoModelForCausalLM.from_config(config).model.rotary_emb
    loaded = SparseAutoModelForCausalLM.from_pretrained(folder, recipe=recipe).model.rotary_emb
    assert eager.inv_freq[0] != 0 and loaded.inv_freq.dtype == torch.float32
    assert torch.equal(loaded.inv_freq, eager.inv_freq)
    assert torch.equal(loaded.original_inv_freq, eager.original_inv_freq)
    assert loaded.attention_scaling == eager.attention_scaling
    if rope == "default" and recipe is None:
        assert loaded.inv_freq[0] == 1.0


def test_nothing_is_built_for_models_of_transformers(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    ramp = torch.arange(3.0)
    model.model.rotary_emb.register_buffer("mine", ramp, persistent=False)
    assert restore_buffers(model) == [] and model.model.rotary_emb.mine is ramp


def test_module_that_was_put_in_later_is_left_to_verify(tiny_llama: Path) -> None:
    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("values", torch.empty(2, device="meta"), persistent=False)

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.model.late = Late()
    assert restore_buffers(model) == []
    assert "model.late.values" in verify(model).problems[0]


def test_attributes_on_meta_are_found_by_their_full_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    model.real, model[1].table, model.top = torch.ones(2), torch.empty(3, device="meta"), torch.empty(1, device="meta")
    assert [name for name, _ in meta_attributes(model)] == ["top", "1.table"]


def test_torch_is_as_it_was(remote: Path) -> None:
    register, init = torch.nn.Module.register_parameter, torch.nn.init.normal_
    SparseAutoModelForCausalLM.from_pretrained(remote, trust_remote_code=True)
    assert (torch.nn.Module.register_parameter, torch.nn.init.normal_) == (register, init)


def _config(folder: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=True)


def _assert_buffers(model: PreTrainedModel, start: int) -> None:
    ramp = torch.arange(start, start + 8)
    expected = {"ramp": ramp.float(), "position_ids": torch.arange(8)[None], "eighths": ramp.half() / 8}
    expected["offsets"] = torch.tensor([3, 1, 4, 1, 5])
    for name, values in expected.items():
        found = getattr(model.table, name)
        assert (found.dtype, found.device) == (values.dtype, model.device) and torch.equal(found, values)
    assert "ramp" in model.table._non_persistent_buffers_set and "table.ramp" not in model.state_dict()
