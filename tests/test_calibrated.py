"""Calibration from files to files: read once, resumable bit by bit, independent of how the data is batched."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from sparseautomodel import Recipe, SparseAutoModelForCausalLM, oneshot, plan, verify
from sparseautomodel.__main__ import app
from sparseautomodel.calibrated import _parts, scratch_of
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.masks import satisfies
from sparseautomodel.plan import PlanError
from sparseautomodel.recipe import shipped
from sparseautomodel.solving import Solving

pytestmark = pytest.mark.filterwarnings("ignore")

GPTQ: dict[str, Any] = {"GPTQModifier": {"scheme": "W4A16", "group_size": 32}}
ASYMMETRIC: dict[str, Any] = {"GPTQModifier": {"scheme": "W4A16_ASYM", "group_size": 32}}
SPARSE: dict[str, Any] = {"SparseGPTModifier": {"mask_structure": "2:4"}}
WANDA: dict[str, Any] = {"WandaPruningModifier": {"mask_structure": "2:4"}}


def recipe(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"modifiers": list(entries)}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 250, (length,), generator=generator)} for length in (24, 24, 17, 24, 9, 17)]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor[...] for name, tensor in open_checkpoint(folder).items()}


def equal(one: Path, other: Path) -> bool:
    a, b = tensors_of(one), tensors_of(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("model", ["tiny_llama", "tied_llama", "tiny_mixtral", "tiny_bert"])
@pytest.mark.parametrize(
    "entries", [[GPTQ], [SPARSE], [WANDA], [SPARSE, ASYMMETRIC]], ids=["gptq", "sparse", "wanda", "both"]
)
def test_result_is_sound_and_each_tensor_was_read_once(
    model: str, entries: list[Any], rows: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(model)
    report = oneshot(source, recipe(*entries), data=rows, output=tmp_path / "out", batch_size=2)
    assert verify(tmp_path / "out", against=None if SPARSE in entries or WANDA in entries else source).ok
    assert {times for times, _ in report.reads.values()} == {1}
    assert report.calibration["num_tokens"] == 24 * 3 + 17 * 2 + 9
    layers = report.calibration["layers"]
    assert len(layers) == len(report.layers) * len(entries)
    assert all(layer["after"] <= layer["before"] * (1 + 1e-6) for layer in layers if layer["fallback"] is None)
    assert not scratch_of(tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", [name for name in shipped() if any(modifier.needs_data for modifier in Recipe.load(name).modifiers)]
)
def test_shipped_recipe_runs_and_stock_transformers_opens_the_result(
    name: str, tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("some running text, again and again. " * 40)
    command = [str(tiny_llama), name, "--output", str(tmp_path / "out"), "--data", str(tmp_path / "text.txt")]
    sizes = ["--num-samples", "8", "--max-length", "64", "--batch-size", "2"]
    result = CliRunner().invoke(app, ["oneshot", *command, *sizes])
    assert result.exit_code == 0, result.output
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    inputs = torch.arange(1, 9)[None]
    ours = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="compressed")
    assert torch.equal(stock(inputs).logits, ours(inputs).logits)


def test_prune_then_quantize_keeps_two_zeros_in_every_four(tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    oneshot(tiny_llama, recipe(SPARSE, ASYMMETRIC), data=rows, output=tmp_path / "out")
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="dense")
    layers = [
        module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and "layers" in name
    ]
    assert len(layers) == 14 and all(satisfies(layer.weight, 2, 4) for layer in layers)


def test_gptq_is_nearer_to_the_model_than_round_to_nearest(tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama)
    inputs = torch.stack([row["input_ids"] for row in rows if len(row["input_ids"]) == 24])
    oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "gptq")
    nearest = {"QuantizationModifier": GPTQ["GPTQModifier"]}
    models = [tmp_path / "gptq", oneshot(tiny_llama, recipe(nearest), output=tmp_path / "rtn").output]
    with torch.no_grad():
        wanted = dense(inputs).logits.float()
        errors = [
            float((SparseAutoModelForCausalLM.from_pretrained(path)(inputs).logits.float() - wanted).norm())
            for path in models
        ]
    assert errors[0] < errors[1]


def test_stock_transformers_computes_the_same(tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "out")
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    inputs = torch.arange(1, 9)[None]
    ours = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="compressed")
    assert torch.equal(stock(inputs).logits, ours(inputs).logits)


def test_padding_and_batch_size_change_nothing(tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row["input_ids"], (0, width - len(row["input_ids"]))) for row in rows])
    mask = torch.stack([torch.arange(width) < len(row["input_ids"]) for row in rows]).long()
    errors = []
    for number, (data, size) in enumerate([(rows, 1), (rows, 8), ([{"input_ids": ids, "attention_mask": mask}], 4)]):
        report = oneshot(tiny_llama, recipe(GPTQ), data=data, output=tmp_path / str(number), batch_size=size)
        errors.append([layer["before"] for layer in report.calibration["layers"]][:3])  # seen by no earlier rounding
    torch.testing.assert_close(torch.tensor(errors[0]), torch.tensor(errors[1]), rtol=1e-2, atol=0)
    assert errors[1] == errors[2] or torch.allclose(torch.tensor(errors[1]), torch.tensor(errors[2]), rtol=1e-2)


def test_same_input_gives_the_same_output(tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    for name in ("one", "other"):
        oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / name)
    assert equal(tmp_path / "one", tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("entries", [[GPTQ], [SPARSE, ASYMMETRIC]], ids=["gptq", "both"])
def test_killed_and_resumed_is_bit_equal(entries: list[Any], tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    oneshot(tiny_llama, recipe(*entries), data=rows, output=tmp_path / "whole")
    torch.save(rows, tmp_path / "rows.pt")
    script = f"""
import signal, os, sys, torch
from sparseautomodel import oneshot
from sparseautomodel.solving import Solving
leave = Solving.leave
def leave_and_die(self, block):
    leave(self, block)
    if block.endswith(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
Solving.leave = leave_and_die
rows = torch.load({str(tmp_path / "rows.pt")!r})
oneshot({str(tiny_llama)!r}, {recipe(*entries)!r}, data=rows, output={str(tmp_path / "out")!r}, resume=True)
"""
    for block in ("layers.0", "layers.1"):
        done = subprocess.run([sys.executable, "-c", script, block], capture_output=True, cwd=Path(__file__).parents[1])
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert not (tmp_path / "out").exists() and scratch_of(tmp_path / "out").is_dir()
    oneshot(tiny_llama, recipe(*entries), data=rows, output=tmp_path / "out", resume=True)
    assert equal(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("changed", ["data", "recipe", "model", "compiler"])
def test_a_run_with_other_inputs_is_not_resumed(
    changed: str, tiny_llama: Path, tied_llama: Path, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("sparseautomodel.oneshot"), "write_tensors", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "out")
    source = tied_llama if changed == "model" else tiny_llama
    data = rows[:-1] if changed == "data" else rows
    other = recipe(ASYMMETRIC) if changed == "recipe" else recipe(GPTQ)
    if changed == "compiler":
        monkeypatch.setattr("sparseautomodel.pairs._functions", lambda: "there was one before")
    with pytest.raises(ValueError, match=f"with another .*{changed}.*resume=False"):
        oneshot(source, other, data=data, output=tmp_path / "out", resume=True)
    oneshot(source, other, data=data, output=tmp_path / "out")
    assert verify(tmp_path / "out").ok


def test_loading_with_a_recipe_that_needs_data_says_what_to_run(tiny_llama: Path) -> None:
    with pytest.raises(PlanError, match=r"GPTQModifier needs calibration data.*Run oneshot\(path, recipe, data="):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=recipe(GPTQ))
    assert not plan(tiny_llama, recipe(GPTQ)).errors


def test_data_that_cannot_be_had_leaves_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no calibration rows"):
        oneshot(tiny_llama, recipe(GPTQ), data=[], output=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_texts_use_the_tokenizer_of_the_source(tiny_llama: Path, tmp_path: Path) -> None:
    report = oneshot(tiny_llama, recipe(GPTQ), data=["some text of the user"] * 4, output=tmp_path / "out")
    written = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    assert (
        written["calibration"] == json.loads(json.dumps(report.calibration))
        and written["calibration"]["num_samples"] == 4
    )


def test_zeros_of_the_source_stay_zeros_through_gptq(tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    """Pruned in an earlier run, quantized in this one (E8)."""
    oneshot(tiny_llama, recipe(SPARSE), data=rows, output=tmp_path / "pruned")
    oneshot(tmp_path / "pruned", recipe(ASYMMETRIC), data=rows, output=tmp_path / "out")
    assert verify(tmp_path / "out", against=tmp_path / "pruned").ok


def test_modifiers_run_in_the_order_of_the_recipe_whatever_a_layer_skips(
    tiny_llama: Path, rows: Any, tmp_path: Path
) -> None:
    """q_proj is not pruned and comes first; k_proj and v_proj of the same set are, before they are quantized."""
    pruning = {"MagnitudePruningModifier": {"mask_structure": "2:4", "ignore": ["re:.*q_proj$"]}}
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    groups = {"GPTQModifier": {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}}
    oneshot(tiny_llama, recipe(pruning, groups), data=rows, output=tmp_path / "out")
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="dense")
    attention = model.model.layers[0].self_attn
    assert satisfies(attention.k_proj.weight, 2, 4) and satisfies(attention.v_proj.weight, 2, 4)
    assert not satisfies(attention.q_proj.weight, 2, 4)


def test_a_global_threshold_is_found_before_the_walk(tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    pruning = {"MagnitudePruningModifier": {"sparsity": 0.5, "apply_globally": True}}
    oneshot(tiny_llama, recipe(pruning, GPTQ), data=rows, output=tmp_path / "out")
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="dense")
    layers = [module.weight for name, module in model.named_modules() if "_proj" in name]
    zeros = sum(int((weight == 0).sum()) for weight in layers)
    assert zeros >= 0.5 * sum(weight.numel() for weight in layers)


def test_report_is_strict_json_where_no_token_came(tiny_mixtral: Path, tmp_path: Path) -> None:
    report = oneshot(tiny_mixtral, recipe(GPTQ), data=[{"input_ids": [5]}], output=tmp_path / "out")
    assert any(layer["after"] is None for layer in report.calibration["layers"])

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    json.loads((tmp_path / "out" / "compression_report.json").read_text(), parse_constant=refuse)


def test_a_compressed_source_says_what_to_do(tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    oneshot(tiny_llama, "w8a16", output=tmp_path / "small")
    with pytest.raises(ValueError, match="calibration runs the dense model"):
        oneshot(tmp_path / "small", recipe(GPTQ), data=rows, output=tmp_path / "out", requantize=True)
    assert not (tmp_path / "out").exists()


def test_the_callers_random_state_is_untouched(tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "out", seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_on_a_cpu_a_forward_takes_few_rows() -> None:
    batch = {"input_ids": torch.arange(10).view(5, 2).repeat(1, 256), "other": torch.arange(5)}
    parts = list(_parts(batch, torch.device("cpu")))
    assert [len(part["input_ids"]) for part in parts] == [2, 2, 1]
    assert all(torch.equal(torch.cat([part[name] for part in parts]), value) for name, value in batch.items())
    assert list(_parts(batch, torch.device("cuda"))) == [batch]


def test_inputs_that_are_not_one_a_row_stay_whole() -> None:
    images = {"input_ids": torch.zeros(1, 512, dtype=torch.int64), "pixel_values": torch.rand(256, 4)}
    rows = {"input_ids": torch.zeros(4, 512, dtype=torch.int64), "position_ids": torch.zeros(3, 4, 512)}
    for batch in (images, rows):
        assert list(_parts(batch, torch.device("cpu"))) == [batch]
    long = {"input_ids": torch.ones(1, 3000)}
    assert [part["input_ids"].shape for part in _parts(long, torch.device("cpu"))] == [(1, 3000)]
    pictures = {"pixel_values": torch.ones(5, 3, 4, 4)}  # how many there are to a row is not known
    assert list(_parts(pictures, torch.device("cpu"))) == [pictures]


INT4_INPUTS = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 4, "strategy": "tensor"},
}


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mixtral", "tiny_gemma3"])
@pytest.mark.parametrize("keys", ["W8A8", "FP8", "FP8_DYNAMIC", "NVFP4", {"config_groups": {"group": INT4_INPUTS}}])
def test_verdict_is_of_the_result_as_it_runs(
    model: str, keys: Any, rows: Any, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs that are rounded at run time are rounded in the verdict too, also in blocks of a run before it."""
    source, keys = request.getfixturevalue(model), {"scheme": keys} if isinstance(keys, str) else keys
    run: dict[str, Any] = {"data": rows, "num_samples": 4, "output": tmp_path / "out"}

    leave = Solving.leave

    def stop(self: Solving, block: str) -> None:
        leave(self, block)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after the first block is written
        patch.setattr(Solving, "leave", stop)
        with pytest.raises(KeyboardInterrupt):
            oneshot(source, recipe({"GPTQModifier": keys}), **run)
    report = oneshot(source, recipe({"GPTQModifier": keys}), resume=True, **run)
    result = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="compressed")
    losses = []
    for row in rows[4:]:
        ids = row["input_ids"][None]
        with torch.no_grad():
            losses.append(cross_entropy(result(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none"))
    perplexity = float(torch.cat(losses).mean().exp())
    assert report.calibration["verdict"]["result"] == pytest.approx(perplexity, rel=4e-3)  # bfloat16
