"""The plan against what then happens: the files that `oneshot` writes, the tensors that are read, the memory in use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from sparseautomodel import Recipe, SparseAutoModelForCausalLM, oneshot, plan
from sparseautomodel.checkpoint import StoredTensor
from sparseautomodel.plan import LIBRARIES_NBYTES, Plan, PlanError, PlanRow, size_text
from sparseautomodel.recipe import shipped
from sparseautomodel.safetensors_file import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")

FIXTURES = ["tiny_llama", "tied_llama", "tiny_mixtral", "tiny_qwen3_moe"]
W4 = {"scheme": "W4A16", "group_size": 32}


def quantizing(**keys: Any) -> dict[str, Any]:
    return {"modifiers": [{"QuantizationModifier": keys}]}


def pruning(**keys: Any) -> dict[str, Any]:
    return {"modifiers": [{"MagnitudePruningModifier": keys}]}


RECIPES: dict[str, Any] = {
    **{
        name: name
        for name in shipped()
        if name != "fp8-block" and not any(modifier.needs_data for modifier in Recipe.load(name).modifiers)
    },
    "asymmetric": quantizing(scheme="W4A16_ASYM", group_size=32),
    "blocks": quantizing(
        config_groups={
            "g": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 48]},
            }
        }
    ),
    "head": quantizing(targets=["Linear", "lm_head"], scheme="W8A8"),
    "in part": quantizing(**W4, ignore=["re:.*layers.1.*"]),
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("fixture", FIXTURES)
def test_rows_and_bytes_are_those_of_the_files_that_are_written(
    name: str, fixture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(fixture)
    planned = plan(folder, RECIPES[name])
    assert not planned.errors
    source = tensors_of(folder)
    assert planned.nbytes_before == sum(value.nbytes for value in source.values())
    oneshot(folder, RECIPES[name], output=tmp_path / "out")
    result = tensors_of(tmp_path / "out")
    assert planned.nbytes_after == sum(value.nbytes for value in result.values())
    for row in planned.rows:
        own = [value for key, value in result.items() if key.rpartition(".")[0] == row.name]
        assert row.nbytes_after == sum(value.nbytes for value in own), row.name
    assert planned.parameters == sum(value.numel() for value in source.values())
    changed = {row.name for row in planned.rows if row.modifiers}
    same = {key for key, value in source.items() if key in result and value.dtype == result[key].dtype}
    same = {key for key in same if torch.equal(source[key], result[key])}
    assert not {f"{key}.weight" for key in changed} & same and planned.parameters_changed == sum(
        row.shape[0] * row.shape[1] for row in planned.rows if row.modifiers
    )


def test_a_plan_alone_reads_no_weight(
    tiny_llama: Path, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2: the dry run needs config.json and file headers."""
    oneshot(tiny_mixtral, "w4a16", output=tmp_path / "out")

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(StoredTensor, "__getitem__", refuse)
    everywhere = pruning(targets=["Linear"], sparsity=0.5, apply_globally=True)
    for folder, recipe in (
        (tiny_llama, "w4a16"),
        (tiny_llama, everywhere),
        (tiny_mixtral, "2of4-w4a16"),
        (tmp_path / "out", None),
    ):
        assert plan(folder, recipe).rows
    with pytest.raises(PlanError):
        oneshot(tiny_llama, quantizing(targets=["re:nope"], **W4), output=tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_headers_alone_are_enough(tiny_llama: Path, tmp_path: Path) -> None:
    """H2: a plan of a file that was cut to its header (and as long as it says, by a hole)."""
    tensors = tensors_of(tiny_llama)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "model.safetensors"
    size, header = path.stat().st_size, path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    path.write_bytes(header)
    os.truncate(path, size)
    (tmp_path / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    one, other = plan(tmp_path, "w4a16").to_dict(), plan(tiny_llama, "w4a16").to_dict()
    for planned in (one, other):
        planned["layers"] = sorted(planned["layers"], key=lambda row: row["name"])
    assert one.pop("source") != other.pop("source") and one == other
    os.truncate(path, len(header))
    with pytest.raises(CheckpointError, match="truncated"):
        plan(tmp_path, "w4a16")


def test_text_is_a_table_with_everything_that_was_decided(tied_llama: Path) -> None:
    given = quantizing(targets=["Linear", "lm_head"], scheme="W4A16", group_size="auto", ignore=["re:nope"])
    planned = plan(tied_llama, given)
    lines = str(planned).splitlines()
    assert lines[0] == f"Plan for {tied_llama}"
    assert re.split(r"\s{2,}", lines[1].strip()) == ["layer", "count", "shape", "stored as", "zeros", "before", "after"]
    row = next(line for line in lines if "mlp.down_proj" in line)
    assert re.split(r"\s{2,}", row.strip()) == [
        *("model.layers.*.mlp.down_proj", "2", "64 x 128", "int4 group 64"),
        *(size_text(2 * 2 * 64 * 128), size_text(2 * (64 * 128 // 2 + 64 * 2 * 2 + 16))),
    ]
    text = "\n".join(lines)
    for part in ("changes 15 layers", "peak memory", "to load with the recipe", "transformers 5.24", "vLLM 0.32"):
        assert part in text
    assert "warning: QuantizationModifier: ignore 're:nope' matches nothing" in text
    assert "group_size: 64" in text and "tie_word_embeddings: false" in text
    assert "error: " in str(plan(tied_llama, quantizing(targets=["re:nope"], **W4)))


def test_zeros_are_in_the_table(tiny_llama: Path) -> None:
    lines = str(plan(tiny_llama, "2of4-w4a16")).splitlines()
    assert all("50%" in line for line in lines if "model.layers" in line)


def test_dict_is_json_and_complete(tiny_mixtral: Path) -> None:
    planned = plan(tiny_mixtral, "2of4-w4a16")
    data = json.loads(json.dumps(planned.to_dict()))
    assert data == planned.to_dict()
    assert [row["name"] for row in data["layers"]] == [row.name for row in planned.rows]
    row = next(row for row in data["layers"] if row["name"].endswith("experts.0.w1"))
    assert row == {
        "name": "model.layers.0.block_sparse_moe.experts.0.w1",
        "shape": [128, 64],
        "dtype": "bfloat16",
        "scheme": "int4 group 64",
        "sparsity": 0.5,
        "modifiers": ["MagnitudePruningModifier", "QuantizationModifier"],
        "nbytes_before": 128 * 64 * 2,
        "nbytes_after": 128 * 64 // 2 + 128 * 2 + 16,
    }
    assert set(data) == {
        *("source", "recipe", "layers", "parameters", "parameters_changed", "nbytes_before", "nbytes_after"),
        *("peak_load_nbytes", "peak_stream_nbytes", "consumers", "forecast", "notes", "warnings", "errors"),
    }


def test_automatic_choices_are_made_and_said(tiny_llama: Path, tmp_path: Path) -> None:
    planned = plan(tiny_llama, "w4a16")
    assert planned.recipe is not None and planned.recipe.modifiers[0].group_size == 64  # type: ignore[attr-defined]
    assert any(text.endswith("chosen for this model: group_size: 64") for text in planned.notes)
    again = plan(tiny_llama, planned.recipe)
    assert again.layers == planned.layers and not any("chosen" in text for text in again.notes)
    assert plan(tiny_llama, Recipe.load(planned.recipe.to_yaml())).to_dict()["layers"] == planned.to_dict()["layers"]


def test_without_a_recipe_it_describes_what_is_there(tiny_llama: Path, tmp_path: Path) -> None:
    dense = plan(tiny_llama)
    assert {row.scheme for row in dense.rows} == {None} and dense.parameters_changed == 0
    assert dense.nbytes_after == dense.nbytes_before and all(one.reads for one in dense.consumers)
    made = plan(tiny_llama, "w4a16")
    oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
    found = plan(tmp_path / "out")
    assert {row.name: row.nbytes_after for row in found.rows if row.scheme} == {
        row.name: row.nbytes_after for row in made.rows
    }
    assert found.consumers == made.consumers and found.nbytes_before == made.nbytes_after


def test_the_same_recipe_over_its_own_result_does_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    """A2: idempotent; another recipe is an error that names both, unless it is asked for."""
    for name in ("w4a16", "2of4-w4a16"):
        oneshot(tiny_llama, name, output=tmp_path / name)
        planned = plan(tmp_path / name, name)
        assert not planned.errors and not planned.layers and planned.parameters_changed == 0
    (error,) = plan(tmp_path / "w4a16", "w8a8-dynamic").errors
    assert "stored as int4 group 64, the recipe says int8 channel, input int8 token dynamic" in error
    assert "requantize=True" in error
    asked = plan(tmp_path / "w4a16", "w8a8-dynamic", requantize=True)
    dense = plan(tiny_llama, "w8a8-dynamic")
    assert not asked.errors and asked.nbytes_after == dense.nbytes_after < asked.nbytes_before + dense.nbytes_before
    assert {row.name: row.nbytes_before for row in asked.rows} == {
        row.name: row.nbytes_after for row in plan(tiny_llama, "w4a16").rows
    }
    part = quantizing(scheme="W8A8", ignore=["re:.*layers.0.*"])
    asked = plan(tmp_path / "w4a16", part, requantize=True)
    assert asked.nbytes_after == plan(tiny_llama, part).nbytes_after, "what the new recipe leaves out becomes dense"
    (error,) = plan(tmp_path / "w4a16", "2of4").errors
    assert "the recipe says dense" in error


TIES: dict[str, tuple[dict[str, Any], bool]] = {
    "neither": (quantizing(**W4), False),
    "head": (quantizing(targets=["lm_head"], **W4), True),
    "embedding": (quantizing(targets=["model.embed_tokens"], **W4), True),
    "both": (quantizing(targets=["lm_head", "model.embed_tokens"], **W4), True),
    "pruned alike": (pruning(targets=["lm_head", "model.embed_tokens"], sparsity=0.5), False),
    "head pruned": (pruning(targets=["lm_head"], sparsity=0.5), True),
    "embedding pruned": (pruning(targets=["model.embed_tokens"], sparsity=0.5), True),
}


@pytest.mark.parametrize("name", TIES)
@pytest.mark.parametrize("stored", ["embedding", "both"])
def test_who_comes_apart(name: str, stored: str, tied_llama: Path, tmp_path: Path) -> None:
    """B8: said in the plan, whether the files hold one tensor or both."""
    tensors = tensors_of(tied_llama)
    if stored == "both":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((tied_llama / "config.json").read_bytes())
    recipe, unties = TIES[name]
    planned = plan(tmp_path, recipe)
    assert planned.unties == unties and any("tie_word_embeddings: false" in text for text in planned.notes) == unties


def test_config_classes_that_cannot_untie(tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, T5Config

    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    AutoModelForSeq2SeqLM.from_config(T5Config(**sizes)).save_pretrained(tmp_path)
    (error,) = plan(tmp_path, quantizing(targets=["lm_head"], **W4)).errors
    assert error.startswith("T5Config always ties the head to the embedding") and "ignore" in error
    assert not plan(tmp_path, quantizing(**W4)).errors
    alike = pruning(targets=["shared", "lm_head", "encoder.embed_tokens", "decoder.embed_tokens"], sparsity=0.5)
    assert not plan(tmp_path, alike).errors


def test_misshapen_tensors_are_said_and_stop_a_recipe(tiny_llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors_of(tiny_llama) | {name: torch.ones(64, 64)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    wanted = f"{name} has shape [64, 64] in the checkpoint and [128, 64] in the model"
    assert wanted in plan(tmp_path).warnings
    assert plan(tmp_path, "w4a16").errors == (wanted,)
    assert not plan(tmp_path, quantizing(**W4, ignore=["re:.*(up|gate)_proj"])).errors


def test_plan_and_rows_are_values(tiny_llama: Path) -> None:
    planned = plan(tiny_llama, "w4a16")
    assert isinstance(planned, Plan) and isinstance(planned.rows[0], PlanRow)
    with pytest.raises(AttributeError):
        planned.source = "x"  # type: ignore[misc]
    planned.raise_for_errors()


def test_sizes_for_people() -> None:
    assert [size_text(size) for size in (0, 999, 1000, 123456, 2_500_000, 7.25e9)] == [
        *("0 B", "999 B", "1.0 kB", "123.5 kB", "2.5 MB", "7.25 GB")
    ]


PEAK = """
import sys, warnings
warnings.simplefilter("ignore")
from sparseautomodel import SparseAutoModelForCausalLM, oneshot
from sparseautomodel.report import peak_nbytes
if sys.argv[1] == "load":
    model = SparseAutoModelForCausalLM.from_pretrained(sys.argv[2], recipe="w4a16")
else:
    oneshot(sys.argv[2], "w4a16", output=sys.argv[3])
print(peak_nbytes())
"""


@pytest.mark.slow
def test_predicted_memory_is_what_is_used(tmp_path: Path) -> None:
    """H2: within a quarter, for loading with a recipe and for streaming to files."""
    sizes = {"vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=16, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    planned = plan(tmp_path / "dense", "w4a16")
    assert planned.nbytes_before > 200e6
    for what, predicted in (("load", planned.peak_load_nbytes), ("stream", planned.peak_stream_nbytes)):
        command = [sys.executable, "-c", PEAK, what, str(tmp_path / "dense"), str(tmp_path / "out")]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        used = int(done.stdout.split()[-1])
        assert predicted > LIBRARIES_NBYTES and abs(used / predicted - 1) <= 0.25, (what, used, predicted)


@pytest.mark.slow
def test_a_plan_of_many_experts_is_made_of_headers(tmp_path: Path) -> None:
    """Thousands of layers: no step compares each with each (that took minutes)."""
    from transformers import Qwen3MoeConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 64, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=24)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    planned = plan(tmp_path, quantizing(**W4))
    assert len(planned.rows) == 24 * (64 * 3 + 4) and not planned.errors
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path, recipe=quantizing(**W4))
    assert model.load_report.layers_compressed == len(planned.rows)
    assert {times for times, _ in model.load_report.reads.values()} == {1}
