"""What lies in the folder beside the weights, and what `oneshot` makes of its arguments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from sparseautomodel import Recipe, SparseAutoModelForCausalLM, SparseAutoModelForMaskedLM, oneshot, plan, verify
from sparseautomodel.checkpoint import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """\
# A comment that stays.
modifiers:
  - QuantizationModifier: {targets: [Linear], scheme: W4A16, group_size: auto}
"""
PRUNE = [{"MagnitudePruningModifier": {"sparsity": 0.5, "ignore": ["lm_head"]}}]
REMOTE_CODE = """
from transformers import LlamaForCausalLM

class TinyForCausalLM(LlamaForCausalLM):
    pass
"""


@pytest.fixture
def source(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "source"))


# The folder


def test_folder_is_complete_and_holds_nothing_of_an_earlier_run(source: Path, tmp_path: Path) -> None:
    """F18: remote code, chat template, tokenizer, license go along; the old recipe, report and weights do not."""
    for name in ("recipe.yaml", "compression_report.json", "modeling_extra.py", "LICENSE", "model.gguf"):
        (source / name).write_text("of the source")
    oneshot(source, RECIPE, output=tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "modeling_extra.py", "LICENSE", "recipe.yaml", "compression_report.json", "README.md"),
    }
    assert (tmp_path / "out" / "recipe.yaml").read_text() == RECIPE
    chat = [{"role": "user", "content": "hello"}]
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    assert after.apply_chat_template(chat, tokenize=False) == before.apply_chat_template(chat, tokenize=False) != ""
    assert after("some text")["input_ids"] == before("some text")["input_ids"]


@pytest.mark.parametrize("form", ["text", "file", "dict", "list", "name"])
def test_recipe_is_kept_as_it_was_given(tiny_llama: Path, tmp_path: Path, form: str) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    modifiers = [{"QuantizationModifier": {"targets": ["Linear"], "scheme": "W4A16", "group_size": "auto"}}]
    forms: dict[str, Any] = {"text": RECIPE, "file": tmp_path / "mine.yaml", "dict": {"modifiers": modifiers}}
    forms |= {"list": modifiers, "name": "w4a16"}
    oneshot(tiny_llama, forms[form], output=tmp_path / "out")
    kept = tmp_path / "out" / "recipe.yaml"
    assert Recipe.load(kept) == Recipe.load(RECIPE)
    assert form in ("dict", "list", "name") or kept.read_text() == RECIPE


def test_report_has_the_recipe_as_evaluated_and_a_row_a_layer(tiny_llama: Path, tmp_path: Path) -> None:
    report = oneshot(tiny_llama, RECIPE, output=tmp_path / "out")
    written = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    assert written == json.loads(json.dumps(report.to_dict()))
    assert written["recipe"]["modifiers"][0]["QuantizationModifier"]["group_size"] == 64
    assert len(written["layers"]) == 14
    assert written["layers"][0].keys() >= {"name", "shape", "scheme", "nbytes_before", "nbytes_after"}
    assert written["nbytes_after"] == open_checkpoint(tmp_path / "out").nbytes < written["nbytes_before"]
    assert written["versions"].keys() >= {"sparseautomodel", "torch", "transformers", "compressed-tensors"}
    assert any("lm_head" in text for text in written["notes"])
    assert Recipe.load(written["recipe"]) != Recipe.load(RECIPE)


def test_model_card_says_base_recipe_figures_license_and_how_to_load(source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text("---\nlicense: 'apache-2.0'\ntags: [x]\n---\n# Source\n")
    report = oneshot(source, "2of4-w4a16", output=tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for text in ('base_model: "source"', 'license: "apache-2.0"', "recipe.yaml", "int4 group 64", "2:4", "14 ("):
        assert text in card
    assert f"{report.nbytes_before / 1e3:.1f} kB -> {report.nbytes_after / 1e3:.1f} kB" in card
    code = card.split("```python\n")[1].split("```")[0].replace("this-folder", str(tmp_path / "out"))
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["model"].config.model_type == "llama"


def test_model_card_names_the_class_that_opens_the_model(tiny_bert: Path, tmp_path: Path) -> None:
    oneshot(tiny_bert, "w8a8-dynamic", output=tmp_path / "out")
    assert "SparseAutoModelForMaskedLM.from_pretrained" in (tmp_path / "out" / "README.md").read_text()
    assert SparseAutoModelForMaskedLM.from_pretrained(tmp_path / "out").load_report.layers_compressed == 12


def test_remote_code_goes_along_and_runs_only_on_request(source: Path, tmp_path: Path) -> None:
    """F18 and F20: the class file is copied, and nobody imports it without trust_remote_code."""
    marker = tmp_path / "imported"
    (source / "modeling_tiny.py").write_text(f"open({str(marker)!r}, 'w').close()\n" + REMOTE_CODE)
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    config["architectures"] = ["TinyForCausalLM"]
    (source / "config.json").write_text(json.dumps(config))
    oneshot(source, PRUNE, output=tmp_path / "plain", trust_remote_code=False)
    assert not marker.exists()
    oneshot(source, PRUNE, output=tmp_path / "out", trust_remote_code=True)
    assert marker.exists() and (tmp_path / "out" / "modeling_tiny.py").is_file()
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(model).__name__ == "TinyForCausalLM"
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).state_dict()
    assert all(torch.equal(values, stock[name]) for name, values in model.state_dict().items())


@pytest.mark.slow
def test_result_reloads_in_a_fresh_process_with_no_arguments(tiny_llama: Path, tmp_path: Path) -> None:
    """F21: all that a reader needs is in the folder."""
    oneshot(tiny_llama, "w8a8-dynamic", output=tmp_path / "out")
    script = "import sys, transformers as t; m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); print(m.dtype)"
    command = [sys.executable, "-c", script, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "torch.bfloat16\n"), done.stderr


@pytest.mark.parametrize("place", ["format", "sparsity_config", "config_groups", "compression_config"])
def test_names_in_a_config_never_import_code(tiny_llama: Path, tmp_path: Path, place: str) -> None:
    """F20: a string of config.json that looks like `file.py:Class` stays a string."""
    oneshot(tiny_llama, "w8a16", output=tmp_path / "out")
    marker = tmp_path / "imported"
    (tmp_path / "out" / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    string = f"{tmp_path / 'out' / 'evil.py'}:Evil"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    entry = config["quantization_config"]
    if place == "format":
        entry["format"] = string
    elif place == "sparsity_config":
        entry["sparsity_config"] = {"format": string}
    elif place == "config_groups":
        entry["config_groups"]["group_0"]["weights"] |= {"observer": string, "type": string}
    else:
        config["compression_config"] = {"format": string, "quant_method": string}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    verdict = verify(tmp_path / "out")
    assert verdict.ok == (place == "compression_config")
    for attempt in (plan, SparseAutoModelForCausalLM.from_pretrained):
        try:
            attempt(tmp_path / "out")
        except ValueError:
            assert place != "compression_config"
    assert not marker.exists()


# Sources and arguments


def test_pickled_source_gives_the_same_result(source: Path, tiny_llama: Path, tmp_path: Path) -> None:
    tensors = {name: tensor[...] for name, tensor in open_checkpoint(source).items()}
    for file in source.glob("model*"):
        file.unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    oneshot(source, "2of4-w4a16", output=tmp_path / "out")
    oneshot(tiny_llama, "2of4-w4a16", output=tmp_path / "safe")
    _assert_equal(tmp_path / "out", tmp_path / "safe")


def test_subfolder_and_variant(tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(source / "inner", variant="fp16")
    oneshot(source, PRUNE, output=tmp_path / "out", subfolder="inner", variant="fp16")
    oneshot(tiny_llama, PRUNE, output=tmp_path / "expected")
    _assert_equal(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize("subfolder", ["", "inner"])
def test_hub_repository_from_the_cache(source: Path, tiny_llama: Path, tmp_path: Path, subfolder: str) -> None:
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    root = tmp_path / "cache" / "models--someone--tiny"
    shutil.copytree(source, root / "snapshots" / ("0" * 40) / subfolder)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    hub = {"cache_dir": tmp_path / "cache", "local_files_only": True, "subfolder": subfolder}
    oneshot("someone/tiny", "w8a16", output=tmp_path / "out", **hub)
    oneshot(tiny_llama, "w8a16", output=tmp_path / "expected")
    _assert_equal(tmp_path / "out", tmp_path / "expected")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "expected"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'base_model: "someone/tiny"' in card and 'license: "mit"' in card


def test_tokenizer_that_is_given_is_saved(
    source: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for file in [*source.glob("tokenizer*"), *source.glob("*.jinja")]:
        file.unlink()
    oneshot(source, PRUNE, output=tmp_path / "out", tokenizer=tiny_tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tiny_tokenizer.chat_template


def test_relative_paths_and_missing_parents(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = oneshot("source", PRUNE, output="a/b/out")
    assert report.output == "a/b/out" and verify("a/b/out", against="source").ok
    assert json.loads((tmp_path / "a/b/out/compression_report.json").read_text())["source"] == "source"


def test_needless_data_is_said(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no modifier of the recipe needs data"):
        oneshot(tiny_llama, PRUNE, ["some text"], tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, r"needs output=folder.*from_pretrained\("),
        ({"output": "out", "max_shard_sise": 3}, TypeError, "max_shard_sise"),
        ({"output": "out", "max_shard_size": "5 apples"}, ValueError, "5 apples"),
    ],
)
def test_wrong_arguments_are_said_before_any_work(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict, error: type, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        oneshot(tiny_llama, PRUNE, **arguments)
    assert not list(tmp_path.iterdir())


def test_existing_output_is_refused_before_a_weight_is_read(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    monkeypatch.setattr(os, "preadv", lambda *given: pytest.fail("a weight was read"))
    globally = [{"MagnitudePruningModifier": {"sparsity": 0.5, "apply_globally": True}}]
    with pytest.raises(FileExistsError, match="exists already"):
        oneshot(tiny_llama, globally, output=tmp_path / "out")
    with pytest.raises(FileExistsError, match="exists already"):
        oneshot(tiny_llama, PRUNE, output=tiny_llama)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


# A source that is compressed already


def test_the_same_recipe_again_has_nothing_to_do(tiny_llama: Path, tmp_path: Path) -> None:
    oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
    with pytest.raises(ValueError, match="compressed by this recipe already"):
        oneshot(tmp_path / "out", "w4a16", output=tmp_path / "again")
    with pytest.raises(ValueError, match="requantize=True"):
        oneshot(tmp_path / "out", "w8a16", output=tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("first", ["w8a8-dynamic", "w4a16", "nvfp4a16"])
@pytest.mark.parametrize("second", ["w4a16", "2of4-w4a16", "2of4"])
def test_requantize_is_decode_and_compress_anew(
    save_model: Callable[[PreTrainedConfig], Path], tiny_llama: Path, tmp_path: Path, first: str, second: str
) -> None:
    if first == second:
        pytest.skip("the same recipe")
    oneshot(tiny_llama, first, output=tmp_path / "first")
    oneshot(tmp_path / "first", second, output=tmp_path / "out", requantize=True)
    dense = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "first", execution="dense")
    dense.save_pretrained(tmp_path / "dense")
    oneshot(tmp_path / "dense", second, output=tmp_path / "expected")
    _assert_equal(tmp_path / "out", tmp_path / "expected")
    verify(tmp_path / "out", against=tmp_path / "first").raise_for_problems()


def _assert_equal(one: Path, other: Path) -> None:
    """Two checkpoints hold the same tensors, and their configs the same quantization."""
    found, expected = open_checkpoint(one), open_checkpoint(other)
    assert set(found) == set(expected)
    assert not [name for name in expected if not torch.equal(found[name][...], expected[name][...])]
    entries = [json.loads((folder / "config.json").read_text()).get("quantization_config") for folder in (one, other)]
    assert entries[0] == entries[1]
