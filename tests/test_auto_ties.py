"""Tied embeddings: the whole table of who is changed and what the files hold, against the dense source."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, plan, verify

pytestmark = pytest.mark.filterwarnings("ignore")

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
INT8 = {"num_bits": 8, "strategy": "group", "group_size": 32}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}


def quantizing(**groups: Any) -> dict[str, Any]:
    return {"modifiers": [{"QuantizationModifier": {"config_groups": groups}}]}


def pruning(*targets: str) -> dict[str, Any]:
    return {"modifiers": [{"MagnitudePruningModifier": {"targets": list(targets), "sparsity": 0.5}}]}


RECIPES: dict[str, dict[str, Any]] = {
    "neither": quantizing(a={"targets": ["Linear"], "weights": INT4}),
    "head": quantizing(a={"targets": [HEAD], "weights": INT8}),
    "embedding": quantizing(a={"targets": [EMBEDDING], "weights": INT8}),
    "both alike": quantizing(a={"targets": [HEAD, EMBEDDING], "weights": INT8}),
    "both apart": quantizing(a={"targets": [HEAD], "weights": INT8}, b={"targets": [EMBEDDING], "weights": INT4}),
    "pruned alike": pruning(HEAD, EMBEDDING),
    "head pruned": pruning(HEAD),
    "embedding pruned": pruning(EMBEDDING),
}
BITS = {"head": (None, 8), "embedding": (8, None), "both alike": (8, 8), "both apart": (4, 8)}
PRUNED = {"pruned alike": (True, True), "head pruned": (False, True), "embedding pruned": (True, False)}
STAY_TIED = ("neither", "pruned alike")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(params=["embedding", "head", "both", "both, different"])
def source(request: pytest.FixtureRequest, tied_llama: Path, tmp_path: Path) -> Path:
    """A tied Llama whose files hold the embedding, the head, both, or two that differ."""
    tensors = tensors_of(tied_llama)
    values = tensors.pop(f"{EMBEDDING}.weight")
    held = {f"{EMBEDDING}.weight": values, f"{HEAD}.weight": values.clone()}
    if request.param == "both, different":
        held[f"{HEAD}.weight"] = values.flip(0).contiguous()
    names = {"embedding": [EMBEDDING], "head": [HEAD]}.get(request.param, [EMBEDDING, HEAD])
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(
        tensors | {f"{name}.weight": held[f"{name}.weight"] for name in names},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_bytes((tied_llama / "config.json").read_bytes())
    return folder


def ends(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


def check_values(name: str, found: torch.Tensor, values: torch.Tensor, side: int) -> None:
    """One side of the result against the dense source, by plain code."""
    bits = BITS.get(name, (None, None))[side]
    if bits is not None:
        error = (found.float() - values.float()).norm() / values.float().norm()
        assert 0 < error < {4: 0.2, 8: 0.02}[bits]
    elif PRUNED.get(name, (False, False))[side]:
        zeros = found == 0
        assert zeros.sum() == values.numel() // 2 and torch.equal(found[~zeros], values[~zeros])
        assert values[zeros].abs().max() <= values[~zeros].abs().min()
    else:
        assert torch.equal(found, values)


@pytest.mark.parametrize("name", RECIPES)
def test_values_files_and_flags(name: str, source: Path, tmp_path: Path) -> None:
    """B8, B7, B3, B11: never a half state, whichever side is changed and whichever is stored; the files win."""
    dense = AutoModelForCausalLM.from_pretrained(source)
    different = not torch.equal(*ends(dense))
    model = SparseAutoModelForCausalLM.from_pretrained(source, recipe=RECIPES[name], execution="compressed")
    assert {times for times, _ in model.load_report.reads.values()} == {1}
    assert not any(value.is_meta for value in model.parameters())
    for side, (found, values) in enumerate(zip(ends(model), ends(dense), strict=True)):
        check_values(name, found, values, side)
    oneshot(source, RECIPES[name], output=tmp_path / "out")
    verify(tmp_path / "out").raise_for_problems()
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for one, other in zip(ends(model), ends(again), strict=True):
        assert torch.equal(one, other)
    check_flags(name, source, tmp_path / "out", model, again, different)


def check_flags(name: str, source: Path, out: Path, model: Any, again: Any, different: bool) -> None:
    stored = {key.rpartition(".")[0] for key in tensors_of(out)} & {EMBEDDING, HEAD}
    both = f"{HEAD}.weight" in tensors_of(source) and f"{EMBEDDING}.weight" in tensors_of(source)
    flag = json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    assert flag == (name in STAY_TIED)
    assert stored == ({EMBEDDING, HEAD} if both or not flag else {EMBEDDING}), "the embedding's name is the one kept"
    tied = flag and not different
    for one in (model, again):
        assert one.config.tie_word_embeddings == tied
        sides = [
            module._parameters.get("weight") for module in (one.get_input_embeddings(), one.get_output_embeddings())
        ]
        assert (sides[0] is not None and sides[0] is sides[1]) == tied
    reads = plan(out).consumers[0].reads
    assert reads == (name not in ("embedding", "both alike", "both apart"))
    if not reads:
        with pytest.raises((AttributeError, RuntimeError)):
            AutoModelForCausalLM.from_pretrained(out)
        return
    stock, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    ids = torch.arange(12).view(1, 12)
    assert not any(info.values()) and torch.equal(stock(ids).logits, model(ids).logits)


@pytest.mark.parametrize("recipe", [None, "neither"])
@pytest.mark.parametrize("device_map", [None, "auto", {"model": "cpu", "lm_head": "cpu"}])
def test_one_storage_and_one_identity(recipe: str | None, device_map: Any, tied_llama: Path) -> None:
    """B1: placing a model by a map does not untie it, in identity or in bytes."""
    given = None if recipe is None else RECIPES[recipe]
    model = SparseAutoModelForCausalLM.from_pretrained(
        tied_llama, recipe=given, device_map=device_map, execution="compressed"
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    storages = {value.untyped_storage().data_ptr(): value.nbytes for value in model.parameters()}
    assert sum(storages.values()) == plan(tied_llama, given).nbytes_after


HANDMADE = '''
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class HandConfig(PreTrainedConfig):
    model_type = "tied_by_hand_of_these_tests"
    tie_word_embeddings = True


class HandLM(PreTrainedModel):
    """Two embeddings that share one parameter by assignment, and say so."""

    config_class = HandConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"second.weight": "first.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.first, self.second = nn.Embedding(64, 32), nn.Embedding(64, 32)
        self.second.weight = self.first.weight
        self.block = nn.Linear(32, 32)
        self.post_init()
'''


def test_ties_made_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: parameters that the constructor assigns to each other are one after a load."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "modeling_hand.py").write_text(HANDMADE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    code = importlib.import_module("modeling_hand")
    code.HandConfig.register_for_auto_class()
    code.HandLM.register_for_auto_class("AutoModelForCausalLM")
    code.HandLM(code.HandConfig()).save_pretrained(tmp_path / "model")
    del sys.modules["modeling_hand"]
    assert set(tensors_of(tmp_path / "model")) == {"first.weight", "block.weight", "block.bias"}
    given = quantizing(a={"targets": ["Linear"], "weights": INT4})
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "model", recipe=given, trust_remote_code=True)
    assert model.first.weight is model.second.weight and model.load_report.layers_compressed == 1


def test_a_body_in_4_bits_and_a_head_in_8(tied_llama: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """B10: saved, reloaded and opened by stock before anybody relies on it."""
    given = quantizing(body={"targets": ["Linear"], "weights": INT4}, head={"targets": [HEAD], "weights": INT8})
    for folder in (tied_llama, tiny_llama):
        out = tmp_path / folder.name
        oneshot(folder, given, output=out)
        model = SparseAutoModelForCausalLM.from_pretrained(folder, recipe=given, execution="compressed")
        assert model.lm_head.quantization_scheme.weights.num_bits == 8
        assert model.model.layers[0].mlp.up_proj.quantization_scheme.weights.num_bits == 4
        model.save_pretrained(tmp_path / f"{folder.name}-again")
        ids = torch.arange(12).view(1, 12)
        for place in (out, tmp_path / f"{folder.name}-again"):
            stock, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
            assert not any(info.values()) and torch.equal(stock(ids).logits, model(ids).logits)


def test_files_that_say_tied_and_hold_a_quantized_head(tied_llama: Path, tmp_path: Path) -> None:
    """B8: what another quantizer left behind, a tie flag that its files do not keep, loads as the files say."""
    oneshot(tied_llama, RECIPES["head"], output=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    right = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not model.config.tie_word_embeddings
    assert all(torch.equal(one, other) for one, other in zip(ends(right), ends(model), strict=True))


def test_experts_and_ties_together(tiny_mixtral: Path, tmp_path: Path) -> None:
    """B8: a mixture whose head comes apart."""
    tensors = tensors_of(tiny_mixtral)
    tensors.pop("lm_head.weight", None)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny_mixtral / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    given = quantizing(a={"targets": ["Linear"], "weights": INT4}, b={"targets": [HEAD], "weights": INT8})
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path, recipe=given)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(ends(model)[0], ends(dense)[0])
    assert 0 < (ends(model)[1] - ends(dense)[1]).float().norm() / ends(dense)[1].float().norm() < 0.02


def test_an_embedding_that_scales_goes_on_scaling(tmp_path: Path) -> None:
    """B9: Gemma's embedding has a forward of its own, which a compressed one must keep."""
    config = Gemma3TextConfig(
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16},
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["full_attention"],
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path, recipe=RECIPES["both apart"])
    ids = torch.arange(12).view(1, 12)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(embedded, model.get_input_embeddings().weight[ids] * torch.tensor(8.0, dtype=torch.bfloat16))
    error = (embedded - dense.get_input_embeddings()(ids)).float().norm() / embedded.float().norm()
    assert type(model.get_input_embeddings()).__name__ == "CompressedGemma3TextScaledWordEmbedding" and error < 0.2
    model.save_pretrained(tmp_path / "saved")
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(ids).logits, model(ids).logits)
