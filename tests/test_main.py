"""The commands, run as a user runs them: what they print where, exit status, and the same answers as the functions."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from sparseautomodel import Recipe, SparseAutoModelForCausalLM
from sparseautomodel import plan as make_plan
from sparseautomodel import verify as check
from sparseautomodel.__main__ import app
from sparseautomodel.console import shipped
from sparseautomodel.inspection import inspect
from sparseautomodel.report import perplexity

ROOT = Path(__file__).resolve().parents[1]
TEXT = "The quick brown fox jumps over the lazy dog. " * 5


@pytest.fixture(scope="module")
def compressed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("compressed") / "w8a16"
    assert _run("oneshot", tiny_llama, "w8a16", "--output", output).exit_code == 0
    return output


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def _run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def _json(*arguments: Any, status: int = 0) -> Any:
    result = _run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_module_runs_as_a_program() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    module = [sys.executable, "-m", "sparseautomodel"]
    version = subprocess.run([*module, "--version"], capture_output=True, text=True, env=environment, check=True)
    assert version.stdout.startswith("sparseautomodel")
    shown = subprocess.run([*module, "--help"], capture_output=True, text=True, env=environment, check=True)
    for command in ("plan", "oneshot", "verify", "inspect", "generate", "eval", "report", "recipes"):
        assert f"\n  {command} " in shown.stdout


def test_document_names_every_command_and_no_option_that_is_not_there() -> None:
    document = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert len(commands) == 7
    for command in commands:
        assert f"\n## {command}\n" in document
    nested = [("recipes", "show"), ("recipes", "check"), ("recipes",)]
    shown = "".join(_run(*command, "--help").stdout for command in [*((name,) for name in commands), *nested])
    missing = [option for option in re.findall(r"--[a-z][a-z-]+", document) if f"{option} " not in shown]
    assert not missing


def test_help_and_recipes_do_without_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from sparseautomodel.__main__ import app\n"
        "for line in (['--help'], ['plan', '--help'], ['recipes'], ['recipes', 'show', '2of4'], ['--version']):\n"
        "    assert CliRunner().invoke(app, line).exit_code == 0, line\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan",),
        ("plan", "absent-folder", "2of4"),
        ("plan", "{model}", "absent-recipe"),
        ("plan", "{model}", "absent.yaml"),
        ("plan", "{model}", "2of4", "--subfolder", "absent"),
        ("plan", "{model}", "2of4", "--no-such-option"),
        ("oneshot", "{model}", "2of4"),
        ("oneshot", "{model}", "2of4", "--output", "{new}", "--max-shard-size", "5 parsecs"),
        ("oneshot", "{model}", "2of4", "--output", "{new}", "--device", "no-such-device"),
        ("verify", "absent-folder"),
        ("verify", "{model}", "--against", "absent-folder"),
        ("inspect", "absent-folder"),
        ("generate", "{model}"),
        ("generate", "{model}", "--prompt", "x", "--execution", "slow"),
        ("generate", "{model}", "--prompt", "x", "--max-new-tokens", "0"),
        ("generate", "{model}", "--prompt", "x", "--recipe", "absent-recipe"),
        ("eval", "{model}", "absent.txt"),
        ("eval", "{model}", "{model}/config.json", "--window", "8", "--stride", "9"),
        ("report", "absent-folder"),
        ("report", "{model}/config.json"),
        ("recipes", "show", "absent-recipe"),
        ("recipes", "check", "absent-recipe"),
        ("recipes", "check", "2of4", "--model", "absent-folder"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...], tiny_llama: Path, tmp_path: Path) -> None:
    result = _run(*(part.format(model=tiny_llama, new=tmp_path / "new") for part in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: " in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "new").exists()


def test_plan(tiny_llama: Path) -> None:
    expected = make_plan(tiny_llama, "2of4")
    result = _run("plan", tiny_llama, "2of4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    (row,) = (line for line in lines if "up_proj" in line)
    assert " ".join(row.split()) == "model.layers.*.mlp.up_proj 2 128 x 64 bfloat16 50% 32.8 kB 32.8 kB"
    text = str(expected).splitlines()
    assert lines[0] == text[0]
    assert lines[-4:] == text[-4:]
    assert _json("plan", tiny_llama, "2of4") == json.loads(json.dumps(expected.to_dict()))


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_is_planned_as_one_document(name: str, tiny_llama: Path) -> None:
    status = 1 if name == "fp8-block" else 0  # 64 is no multiple of 128
    document = _json("plan", tiny_llama, name, status=status)
    assert bool(document["errors"]) == bool(status)
    assert document["source"] == str(tiny_llama)


def test_plan_that_does_not_fit_is_status_1(tiny_llama: Path) -> None:
    result = _run("plan", tiny_llama, "fp8-block")
    assert result.exit_code == 1
    assert "\nerror: " in result.stdout


def test_oneshot_verify_inspect(tiny_llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "sparse"
    result = _run("oneshot", tiny_llama, "2of4", "--output", output)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tiny_llama} -> {output}: 14 layers")
    assert check(output, against=tiny_llama).ok

    verdict = _json("verify", output, "--against", tiny_llama)
    assert (verdict["ok"], verdict["problems"]) == (True, [])
    assert _run("verify", output).stdout == f"{check(output)}\n"

    shown = _run("inspect", output).stdout.splitlines()
    (row,) = (line for line in shown if "up_proj" in line)
    assert " ".join(row.split()) == "model.layers.*.mlp.up_proj 2 128 x 64 bfloat16 50.0% 2:4 32.8 kB"
    assert len(_run("inspect", output, "--layers").stdout.splitlines()) == len(shown) + 7  # 7 kinds in 2 blocks
    assert _json("inspect", output) == json.loads(json.dumps(inspect(output).to_dict()))
    headers = _json("inspect", output, "--no-values")
    assert not headers["values_read"] and {layer["zeros"] for layer in headers["layers"]} == {None}


def test_oneshot_says_each_warning_once_on_stderr(tiny_llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    keys = "{scheme: W8A16, group_size: auto, ignore: [no_such_layer]}"
    recipe.write_text(f"modifiers:\n  - QuantizationModifier: {keys}\n")
    result = _run("oneshot", tiny_llama, recipe, "--output", tmp_path / "small", "--max-shard-size", "64KB")
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(set(warnings)) > 0
    assert ".py" not in result.stderr
    assert "warning: " not in result.stdout
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 1
    document = _json("oneshot", tiny_llama, recipe, "--output", tmp_path / "again")
    assert [f"warning: {text}" for text in document["warnings"]] == warnings
    assert document["output"] == str(tmp_path / "again")


def test_failure_is_a_message_and_status_1(compressed: Path, tiny_llama: Path) -> None:
    before = sorted(file.stat().st_mtime_ns for file in compressed.iterdir())
    result = _run("oneshot", tiny_llama, "2of4", "--output", compressed)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"error: output {compressed} exists already" in result.stderr
    assert "Traceback" not in result.stderr
    assert before == sorted(file.stat().st_mtime_ns for file in compressed.iterdir())
    shown = _run("oneshot", tiny_llama, "2of4", "--output", compressed, "--traceback")
    assert shown.exit_code == 1
    assert isinstance(shown.exception, FileExistsError)


def test_recipe_over_another_needs_requantize(compressed: Path, tmp_path: Path) -> None:
    refused = _run("plan", compressed, "fp8-dynamic")
    assert refused.exit_code == 1 and "requantize" in refused.stdout
    assert _run("plan", compressed, "fp8-dynamic", "--requantize").exit_code == 0
    output = tmp_path / "fp8"
    assert _run("oneshot", compressed, "fp8-dynamic", "--requantize", "--output", output).exit_code == 0
    assert {layer["scheme"].split(",")[0] for layer in _json("inspect", output)["layers"]} == {
        "bfloat16",
        "float8 channel",
    }


def test_damage_is_a_bad_verdict(compressed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(compressed, tmp_path / "damaged")
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    verdict = _json("verify", folder, status=1)
    assert not verdict["ok"] and file.name in verdict["problems"][0]
    for command in (("verify", folder), ("inspect", folder), ("generate", folder, "--prompt", "x")):
        result = _run(*command)
        assert result.exit_code == 1
        assert file.name in result.output and "Traceback" not in result.output


@pytest.mark.parametrize("chat", [None, "--chat", "--no-chat"])
def test_generate_is_the_greedy_text_of_the_stock_model(chat: str | None, tiny_llama: Path) -> None:
    options = [chat] if chat else []
    answer = _json("generate", tiny_llama, "--prompt", "hello", "--max-new-tokens", 12, *options)
    streamed = _run("generate", tiny_llama, "--prompt", "hello", "--max-new-tokens", 12, *options)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    prompt = "hello" if chat == "--no-chat" else "user: hello\n"
    tokens = _greedy(tiny_llama, tokenizer(prompt, return_tensors="pt")["input_ids"])
    assert answer == {"text": tokenizer.decode(tokens, skip_special_tokens=True), "tokens": len(tokens)}
    assert streamed.exit_code == 0
    assert streamed.stdout == answer["text"] + "\n"
    assert "0 layers compressed" in streamed.stderr


def test_generate_with_a_recipe_is_what_the_compressed_folder_says(tiny_llama: Path, compressed: Path) -> None:
    options = ("--prompt", "hello", "--max-new-tokens", 12)
    loaded = _json("generate", tiny_llama, "--recipe", "w8a16", *options)
    assert loaded == _json("generate", compressed, *options)
    dense = _json("generate", compressed, "--execution", "dense", *options)
    assert dense["tokens"] == loaded["tokens"]
    result = _run("generate", tiny_llama, "--recipe", "w8a16", *options)
    assert "14 layers compressed" in result.stderr


def test_generate_samples_at_a_temperature(tiny_llama: Path) -> None:
    options = ("--prompt", "hello", "--max-new-tokens", 8, "--temperature", 2.0)
    texts = set()
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.add(_json("generate", tiny_llama, *options)["text"])
    assert len(texts) == 2


def test_chat_without_a_template_is_wrong_usage(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    result = _run("generate", folder, "--prompt", "x", "--chat")
    assert result.exit_code == 2 and "no chat template" in result.stderr
    options = ("--prompt", "hello", "--max-new-tokens", 4)
    assert _json("generate", folder, *options) == _json("generate", tiny_llama, "--no-chat", *options)


def test_eval_is_the_perplexity_of_the_stock_model(tiny_llama: Path, text: Path) -> None:
    ids = torch.tensor([list(TEXT.encode())])
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp().item()
    found = _json("eval", tiny_llama, text)
    assert found["tokens"] == len(TEXT) - 1
    assert math.isclose(found["value"], expected, rel_tol=1e-3)
    assert _run("eval", tiny_llama, text).stdout == f"perplexity {expected:.2f} over {len(TEXT) - 1} tokens\n"


def test_eval_passes_window_stride_and_recipe_on(tiny_llama: Path, text: Path) -> None:
    options = ("--window", 32, "--stride", 16, "--max-tokens", 100, "--recipe", "w8a16")
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w8a16")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    expected = perplexity(model, tokenizer, TEXT, window=32, stride=16, max_tokens=100)
    assert _json("eval", tiny_llama, text, *options) == expected.to_dict()
    assert _json("eval", tiny_llama, text, "--window", 32, "--max-tokens", 100)["value"] != expected.value


def test_eval_refuses_what_is_no_text_or_too_short(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("a")
    for name, reason in (("bytes", "is not UTF-8 text: invalid start byte at byte 0"), ("short", "1 tokens")):
        result = _run("eval", tiny_llama, tmp_path / name)
        assert result.exit_code == 1 and result.stdout == ""
        assert reason in result.stderr


def test_report_writes_a_page(compressed: Path, tiny_llama: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = _run("report", compressed, "--output", page)
    assert (result.exit_code, result.stdout) == (0, f"{page}\n")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert _json("report", compressed, "--output", page) == {"page": str(page)}
    refused = _run("report", tiny_llama, "--output", page)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: ") and "compression_report.json" in refused.stderr


def test_recipes_lists_and_shows_what_is_shipped() -> None:
    listed = _json("recipes")
    assert [entry["name"] for entry in listed] == list(shipped())
    table = _run("recipes").stdout.splitlines()
    assert [line.split()[0] for line in table[1:]] == list(shipped())
    for name, file in shipped().items():
        assert _run("recipes", "show", name).stdout == file.read_text()
        assert _json("recipes", "show", name)["text"] == file.read_text()


def test_recipes_check(tiny_llama: Path, tmp_path: Path) -> None:
    assert _run("recipes", "check", "2of4").stdout == "2of4 is a valid recipe\n"
    document = _json("recipes", "check", "2of4")
    assert (document["ok"], document["errors"]) == (True, [])
    assert Recipe.load(document["recipe"]) == Recipe.load("2of4")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("modifiers:\n  - MagnitudePruningModifier:\n      mask_struture: '2:4'\n")
    result = _run("recipes", "check", wrong)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"error: {wrong}:3:7: unknown key 'mask_struture'" in result.stderr
    document = _json("recipes", "check", wrong, status=1)
    assert not document["ok"] and "mask_structure" in document["errors"][0]
    assert isinstance(_run("recipes", "check", wrong, "--json", "--traceback").exception, ValueError)


def test_recipes_check_for_a_model(tiny_llama: Path) -> None:
    fits = _run("recipes", "check", "w8a16", "--model", tiny_llama)
    assert fits.exit_code == 0 and fits.stdout.endswith(f"w8a16 fits {tiny_llama}\n")
    document = _json("recipes", "check", "w8a16", "--model", tiny_llama)
    assert document["recipe"]["modifiers"][0]["QuantizationModifier"]["group_size"] == 64
    document = _json("recipes", "check", "fp8-block", "--model", tiny_llama, status=1)
    assert document["errors"] == list(make_plan(tiny_llama, "fp8-block").errors)
    misfit = _run("recipes", "check", "fp8-block", "--model", tiny_llama)
    assert misfit.exit_code == 1 and f"fp8-block does not fit {tiny_llama}" in misfit.stdout


@torch.no_grad()
def _greedy(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """12 tokens, or those up to the end of the text, one forward of the stock model each."""
    model, start = AutoModelForCausalLM.from_pretrained(folder), ids.shape[1]
    while ids.shape[1] < start + 12 and (ids.shape[1] == start or ids[0, -1] != 0):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, start:]
