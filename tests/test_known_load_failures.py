"""Faults that users of other tools met while loading, each a kind; the label of the entry is in the docstring."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    PreTrainedConfig,
    initialization,
)

from sparseautomodel import (
    SparseAutoModel,
    SparseAutoModelForCausalLM,
    SparseAutoModelForSequenceClassification,
    oneshot,
    verify,
)
from sparseautomodel.checkpoint import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

REMOTE = """
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class TinyConfig(PreTrainedConfig):
    model_type = "tiny-{kind}"

class Block(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate, self.proj = rate, nn.Linear(32, 32)

class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        {setup}
        self.head = nn.Linear(32, 64, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(logits=self.head(input_ids[..., None] * torch.ones(32)))
"""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Initial values that were drawn for tensors with memory, by function."""
    counted: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counted[name] += not tensor.is_meta
            return function(tensor, *args, **kwargs)

        return call

    for name, function in list(initialization.TORCH_INIT_FUNCTIONS.items()):
        monkeypatch.setattr(nn.init, name, counting(name, function))
        monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, name, counting(name, function))
    return counted


@pytest.mark.parametrize("recipe", [None, "w8a8-dynamic", "w4a16", "2of4"])
@pytest.mark.parametrize("fixture", ["tiny_llama", "tied_llama", "tiny_qwen3_moe"])
def test_weights_are_read_once_and_never_initialized(
    request: pytest.FixtureRequest, drawn: Counter[str], fixture: str, recipe: str | None
) -> None:
    """A1: each tensor read exactly once, zero calls of init functions, ties intact."""
    source = request.getfixturevalue(fixture)
    drawn.clear()
    model = SparseAutoModelForCausalLM.from_pretrained(source, recipe=recipe)
    assert {name: times for name, (times, _) in model.load_report.reads.items()} == dict.fromkeys(
        open_checkpoint(source), 1
    )
    assert not +drawn
    if fixture == "tied_llama":
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_integer_weights_are_not_initialized(tiny_llama: Path, tmp_path: Path, drawn: Counter[str]) -> None:
    """A5: a normal distribution drawn into int8 died; nothing is drawn for what the checkpoint fills."""
    oneshot(tiny_llama, "w8a8-dynamic", output=tmp_path / "out")
    drawn.clear()
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    weight = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == torch.int8 and torch.equal(weight, stored["model.layers.0.mlp.up_proj.weight"])
    assert not +drawn


def test_constructor_that_computes_with_tensors_builds(tmp_path: Path) -> None:
    """A10: `.tolist()` in a constructor, on what would be on the meta device."""
    setup = "self.blocks = nn.ModuleList([Block(rate) for rate in torch.linspace(0, 1, 3).tolist()])"
    folder = _remote(tmp_path / "source", "listing", setup)
    model = SparseAutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert [block.rate for block in model.blocks] == [0.0, 0.5, 1.0]
    oneshot(folder, "w8a8-dynamic", output=tmp_path / "out", trust_remote_code=True)
    verify(tmp_path / "out", against=folder, trust_remote_code=True).raise_for_problems()


def test_constructor_that_loads_another_model_says_what_is_wrong(tiny_llama: Path, tmp_path: Path) -> None:
    """A10: a nested `from_pretrained` cannot work on meta, and transformers says so."""
    folder = _remote(tmp_path, "nested", "self.block = Block(0)")
    code = (folder / "modeling_tiny.py").read_text()
    inner = f"self.inner = AutoModelForCausalLM.from_pretrained({str(tiny_llama)!r})\n        self.head ="
    (folder / "modeling_tiny.py").write_text(code.replace("self.head =", inner))
    with pytest.raises(RuntimeError, match="`from_pretrained` with a meta device context manager"):
        SparseAutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize("recipe", [None, "w4a16"])
def test_buffer_that_older_versions_saved_is_tolerated(tiny_llama: Path, tmp_path: Path, recipe: str | None) -> None:
    """A16: `rotary_emb.inv_freq` of old Llama checkpoints is left unread, and listed; anything like it is an error."""
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    _add(source, {name: torch.full((8,), 9.0)})
    model = SparseAutoModelForCausalLM.from_pretrained(source, recipe=recipe)
    assert model.load_report.unread == (name,) and model.model.rotary_emb.inv_freq[0] == 1
    assert verify(source).ok
    oneshot(source, "w4a16", output=tmp_path / "out")
    assert verify(tmp_path / "out", against=source).ok
    _add(source, {"model.layers.1.self_attn.rotary.frequencies": torch.full((8,), 9.0)})
    with pytest.raises(ValueError, match=r"no place for .*rotary\.frequencies"):
        SparseAutoModelForCausalLM.from_pretrained(source, recipe=recipe)


def test_head_that_the_checkpoint_does_not_have_is_new_and_said(
    save_model: Callable[[PreTrainedConfig], Path], tiny_llama: Path, tiny_bert: Path
) -> None:
    """The one exception from strictness, as users expect: a new task head over a checkpoint of another class."""
    model = SparseAutoModelForSequenceClassification.from_pretrained(tiny_llama, num_labels=3, recipe="w8a8-dynamic")
    assert model.load_report.initialized == ("score.weight",) and model.load_report.unread == ("lm_head.weight",)
    assert model.score.weight.shape == (3, 64) and model.score.weight.isfinite().all() and model.score.weight.std() > 0
    bert = SparseAutoModelForSequenceClassification.from_pretrained(tiny_bert, num_labels=3).load_report
    assert {"classifier.weight", "classifier.bias"} <= set(bert.initialized)
    assert all(name.startswith(("classifier.", "bert.pooler.")) for name in bert.initialized)
    assert bert.unread and all(name.startswith("cls.predictions.") for name in bert.unread)
    base = SparseAutoModel.from_pretrained(tiny_llama, recipe="w4a16")
    assert base.load_report.initialized == () and base.load_report.unread == ("lm_head.weight",)


def test_head_of_the_same_class_that_is_gone_is_damage(tiny_llama: Path, tmp_path: Path) -> None:
    """A head of random values in a model that was saved with one would pass for a bad model."""
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    index = json.loads((source / "model.safetensors.index.json").read_text())
    (source / index["weight_map"].pop("lm_head.weight")).unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"no tensor of the checkpoint fills lm_head\.weight: .* random values"):
        SparseAutoModelForCausalLM.from_pretrained(source)
    with pytest.warns(UserWarning, match=r"lm_head\.weight"):
        SparseAutoModelForCausalLM.from_pretrained(source, strict=False)


def test_head_without_its_base_is_no_new_head(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    state = BertForMaskedLM(config).state_dict()
    config.architectures = ["BertForPreTraining"]
    config.save_pretrained(tmp_path)
    save_file(
        {name: values.clone() for name, values in state.items() if "layer.0.output" not in name},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match=r"no tensor of the checkpoint fills bert\.encoder\.layer\.0\.output"):
        SparseAutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_dtype_survives_save_and_reload_without_arguments(tiny_llama: Path, tmp_path: Path) -> None:
    """F23, for save_pretrained of a loaded model."""
    for recipe in (None, "w4a16", "fp8-dynamic"):
        model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=recipe)
        model.save_pretrained(tmp_path / str(recipe))
        again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / str(recipe))
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / str(recipe))
        assert model.dtype == again.dtype == stock.dtype == torch.bfloat16


def test_two_tensors_in_the_files_win_over_a_tie_in_the_config(tied_llama: Path, tmp_path: Path) -> None:
    """Neither is overwritten by the other, in a load and in a stream."""
    source = Path(shutil.copytree(tied_llama, tmp_path / "source"))
    _add(source, {"lm_head.weight": torch.randn(256, 64).bfloat16()})
    head, embedding = (open_checkpoint(source)[name][...] for name in ("lm_head.weight", "model.embed_tokens.weight"))
    oneshot(source, "2of4", output=tmp_path / "out")
    for folder in (source, tmp_path / "out"):
        model = SparseAutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(model.lm_head.weight, head) and torch.equal(model.model.embed_tokens.weight, embedding)


def _remote(folder: Path, kind: str, setup: str) -> Path:
    """A folder with a model of remote code, whose constructor does `setup`."""
    folder.mkdir(exist_ok=True)
    (folder / "modeling_tiny.py").write_text(REMOTE.format(kind=kind, setup=setup))
    names = {"AutoConfig": "TinyConfig", "AutoModelForCausalLM": "TinyForCausalLM"}
    config = {"model_type": f"tiny-{kind}", "architectures": ["TinyForCausalLM"], "dtype": "float32"}
    config["auto_map"] = {auto: f"modeling_tiny.{name}" for auto, name in names.items()}
    (folder / "config.json").write_text(json.dumps(config))
    blocks = 3 if "ModuleList" in setup else 1
    names = [f"blocks.{number}.proj" for number in range(blocks)] if blocks > 1 else ["block.proj"]
    tensors = {f"{name}.weight": torch.randn(32, 32) for name in names} | {
        f"{name}.bias": torch.randn(32) for name in names
    }
    save_file(tensors | {"head.weight": torch.randn(64, 32)}, folder / "model.safetensors")
    return folder


def _add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One more shard."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = f"more-{len(index['weight_map'])}.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(tensors, name)
    path.write_text(json.dumps(index))
