"""`oneshot` on a model in memory gives, tensor by tensor, what the stream from files to files gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, verify
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.verify import VerificationError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TEXT = torch.tensor([[*range(1, 250, 7)]])


def _prune(*targets: str) -> list[Any]:
    return [{"MagnitudePruningModifier": {"targets": list(targets), "sparsity": 0.5}}]


def _quantize(*targets: str, scheme: str = "W8A16") -> list[Any]:
    return [{"QuantizationModifier": {"targets": list(targets), "scheme": scheme, "group_size": 32}}]


@pytest.mark.parametrize(
    ("fixture", "recipe"),
    [
        *(("tiny_llama", name) for name in ("w4a16", "w8a8-dynamic", "fp8-dynamic", "nvfp4a16", "2of4", "2of4-w4a16")),
        ("tiny_llama", [{"MagnitudePruningModifier": {"sparsity": 0.5, "apply_globally": True}}]),
        ("tied_llama", "w8a16"),
        ("tiny_bert", "w8a8-dynamic"),
        ("tiny_bert", "2of4-w4a16"),
        ("tiny_gpt2", _prune("Conv1D")),
        ("tiny_gpt2", _prune("re:.*c_fc")),
    ],
    ids=str,
)
def test_live_equals_streamed(request: pytest.FixtureRequest, tmp_path: Path, fixture: str, recipe: Any) -> None:
    source = request.getfixturevalue(fixture)
    model = _load(source)
    live = oneshot(model, recipe, output=tmp_path / "live")
    streamed = oneshot(source, recipe, output=tmp_path / "streamed")
    _assert_equal(tmp_path / "live", tmp_path / "streamed")
    verify(model).raise_for_problems()
    assert (live.nbytes_after, live.structures) == (streamed.nbytes_after, streamed.structures)
    rows = [sorted(report.layers, key=lambda row: row["name"]) for report in (live, streamed)]
    assert rows[0] == rows[1] and len(rows[0]) > 1
    if fixture != "tiny_bert":
        with torch.no_grad():
            streamed_model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "streamed")
            assert torch.equal(model(TEXT).logits, streamed_model(TEXT).logits)


def test_model_in_memory_is_saved_by_its_own_method(tiny_llama: Path, tmp_path: Path) -> None:
    model = _load(tiny_llama)
    report = oneshot(model, "w4a16")
    assert report.output is None and report.source == str(tiny_llama)
    model.save_pretrained(tmp_path / "saved")
    oneshot(tiny_llama, "w4a16", output=tmp_path / "streamed")
    _assert_equal(tmp_path / "saved", tmp_path / "streamed")
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values())
    exact = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "saved", execution="compressed")
    with torch.no_grad():
        assert (stock(TEXT).logits - exact(TEXT).logits).abs().max() <= 2**-7 * stock(TEXT).logits.abs().max()
    mine, theirs = model.state_dict(), exact.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_folder_of_a_live_model_has_all_that_belongs_to_it(
    tiny_llama: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    oneshot(_load(tiny_llama), "w4a16", output=tmp_path / "out", tokenizer=tiny_tokenizer, max_shard_size="40kB")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "recipe.yaml", "compression_report.json", "README.md", "tokenizer.json"} <= names
    assert "model.safetensors.index.json" in names
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tiny_tokenizer.chat_template
    assert f'base_model: "{tiny_llama.name}"' in (tmp_path / "out" / "README.md").read_text()


def test_biases_and_everything_else_are_left_as_they_are(tiny_bert: Path) -> None:
    model, before = _load(tiny_bert), _load(tiny_bert).state_dict()
    oneshot(model, "w8a8-dynamic")
    after = model.state_dict()
    untouched = [name for name in before if not name.endswith("weight") or "LayerNorm" in name or "embeddings" in name]
    assert len(untouched) > 20
    assert all(torch.equal(after[name], before[name]) for name in untouched)
    assert after["bert.encoder.layer.0.attention.self.query.weight"].dtype == torch.int8


@pytest.mark.parametrize("recipe", [_prune("lm_head"), _quantize("lm_head"), _prune("model.embed_tokens")], ids=str)
def test_one_side_of_a_tie_is_changed_alone(tied_llama: Path, tmp_path: Path, recipe: list[Any]) -> None:
    model, before = _load(tied_llama), _load(tied_llama).model.embed_tokens.weight
    oneshot(model, recipe, output=tmp_path / "live")
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    changed, kept = (embedding, head) if "embed" in str(recipe) else (head, embedding)
    assert torch.equal(kept, before) and not torch.equal(changed, before)
    assert not model.config.tie_word_embeddings and head is not embedding
    oneshot(tied_llama, recipe, output=tmp_path / "streamed")
    _assert_equal(tmp_path / "live", tmp_path / "streamed")
    loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "live")
    assert torch.equal(loaded.lm_head.weight, head) and torch.equal(loaded.model.embed_tokens.weight, embedding)


def test_both_sides_of_a_tie_pruned_alike_stay_one(tied_llama: Path, tmp_path: Path) -> None:
    model, recipe = _load(tied_llama), _prune("lm_head", "model.embed_tokens")
    oneshot(model, recipe, output=tmp_path / "live")
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings
    assert (model.lm_head.weight == 0).float().mean() == 0.5
    oneshot(tied_llama, recipe, output=tmp_path / "streamed")
    _assert_equal(tmp_path / "live", tmp_path / "streamed")
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "live")


def test_ties_of_other_parameters_survive(tiny_bert: Path) -> None:
    """Untying the head says nothing about the bias that it shares with its parent."""
    model = _load(tiny_bert)
    shared = model.cls.predictions.bias
    oneshot(model, _prune("cls.predictions.decoder"))
    assert "cls.predictions.decoder.weight" not in model.all_tied_weights_keys
    assert "cls.predictions.decoder.bias" in model.all_tied_weights_keys
    assert model.cls.predictions.decoder.bias is shared


def test_model_stays_trainable_where_it_is_dense(tiny_llama: Path) -> None:
    model = _load(tiny_llama)
    oneshot(model, "2of4")
    model(TEXT, labels=TEXT).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_model_without_a_name_and_with_other_heads(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = AutoModel.from_config(config)
    report = oneshot(model, "w8a8-dynamic", output=tmp_path / "out")
    assert report.source == "LlamaModel" and len(report.layers) == 7
    assert "SparseAutoModel.from_pretrained" in (tmp_path / "out" / "README.md").read_text()
    assert verify(tmp_path / "out").ok


def test_compressed_model_is_refused_with_the_way_out(tiny_llama: Path) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16")
    with pytest.raises(ValueError, match=r"compressed already.*execution='dense'.*requantize=True"):
        oneshot(model, "w8a16")


def test_offloaded_model_is_refused_by_name(tiny_llama: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(tiny_llama))
    with pytest.raises(ValueError, match=r"without values.*model\.embed_tokens\.weight"):
        oneshot(model, "w4a16")


def test_arguments_of_files_are_refused(tiny_llama: Path) -> None:
    with pytest.raises(TypeError, match="revision, requantize: for a model that is read from files"):
        oneshot(_load(tiny_llama), "w4a16", revision="main", requantize=True)


def test_existing_output_is_refused_before_the_model_is_changed(tiny_llama: Path, tmp_path: Path) -> None:
    model, before = _load(tiny_llama), _load(tiny_llama).state_dict()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        oneshot(model, "w4a16", output=tmp_path / "out")
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


def test_source_of_a_live_model_is_never_written_to(tiny_llama: Path, tmp_path: Path) -> None:
    """transformers maps the files of a model; what is changed in memory must not reach them."""
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    files = {path: path.read_bytes() for path in source.glob("*.safetensors")}
    oneshot(_load(source), "2of4")
    assert all(path.read_bytes() == content for path, content in files.items())


def test_a_number_that_is_not_finite_is_refused_before_the_model_is_changed(tiny_llama: Path) -> None:
    model = _load(tiny_llama)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    before = {name: values.clone() for name, values in model.state_dict().items()}
    with pytest.raises(VerificationError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        oneshot(model, "w4a16")
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name].nan_to_num(), values.nan_to_num()) for name, values in before.items())


def _load(source: Path) -> PreTrainedModel:
    loader = AutoModelForMaskedLM if "bert" in source.name else AutoModelForCausalLM
    return loader.from_pretrained(source)


def _assert_equal(one: Path, other: Path) -> None:
    found, expected = open_checkpoint(one), open_checkpoint(other)
    assert set(found) == set(expected)
    assert not [name for name in expected if not torch.equal(found[name][...], expected[name][...])]
