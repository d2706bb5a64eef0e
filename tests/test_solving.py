"""What happens to a block: its weights come from the files, what it has become goes to a file, and it is freed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, verify, witness
from sparseautomodel.calibrated import scratch_of
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.solving import Solving

pytestmark = pytest.mark.filterwarnings("ignore")

GPTQ: dict[str, Any] = {"GPTQModifier": {"scheme": "W4A16", "group_size": 32}}


def recipe(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"modifiers": list(entries)}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 250, (24,), generator=generator)} for _ in range(10)]


@pytest.mark.parametrize("model", ["tiny_llama", "tied_llama"])
def test_the_head_is_calibrated_on_what_reaches_it(
    model: str, rows: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(model)
    head = {"GPTQModifier": {"scheme": "W8A16", "group_size": 32, "targets": ["re:.*lm_head"]}}
    report = oneshot(source, recipe(GPTQ, head), data=rows, output=tmp_path / "out", num_samples=6)
    assert verify(tmp_path / "out").ok
    layers = {layer["name"]: layer for layer in report.calibration["layers"]}
    assert layers["lm_head"]["tokens"] == 6 * 24 and layers["lm_head"]["fallback"] is None
    assert layers["lm_head"]["after"] < layers["lm_head"]["before"]
    assert set(times for times, _ in report.reads.values()) == {1}
    embedding = open_checkpoint(tmp_path / "out")["model.embed_tokens.weight"][...]
    assert torch.equal(embedding, open_checkpoint(source)["model.embed_tokens.weight"][...])
    SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.arange(1, 9)[None])


def test_an_embedding_has_no_inputs_to_count_and_is_rounded_to_nearest(
    tiny_llama: Path, rows: Any, tmp_path: Path
) -> None:
    both = {"GPTQModifier": {"scheme": "W8A16", "group_size": 32, "targets": ["Linear", "model.embed_tokens"]}}
    report = oneshot(tiny_llama, recipe(both), data=rows, output=tmp_path / "out")
    layers = {layer["name"]: layer for layer in report.calibration["layers"]}
    assert (
        layers["model.embed_tokens"]["tokens"] == 0
        and "no calibration token" in layers["model.embed_tokens"]["fallback"]
    )
    assert all(layer["fallback"] is None for name, layer in layers.items() if "embed" not in name)


def test_layers_outside_that_need_no_data_are_in_the_model_while_the_rest_is_calibrated(
    tiny_llama: Path, rows: Any, tmp_path: Path
) -> None:
    coarse = {"QuantizationModifier": {"scheme": "W4A16", "group_size": 32, "targets": ["model.embed_tokens"]}}
    with_it = oneshot(tiny_llama, recipe(coarse, GPTQ), data=rows, output=tmp_path / "out").calibration
    without = oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "plain").calibration
    assert verify(tmp_path / "out").ok
    # the source's hidden states are those of the dense embedding: the block's error has the embedding's in it
    assert with_it["blocks"][0]["error"] > 1.3 * without["blocks"][0]["error"]


def test_encoder_decoder(rows: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    report = oneshot(tmp_path / "t5", recipe(GPTQ), data=rows, output=tmp_path / "out", num_samples=4)
    assert verify(tmp_path / "out").ok
    blocks = [block["name"] for block in report.calibration["blocks"]]
    assert blocks == [f"{part}.block.{number}" for part in ("encoder", "decoder") for number in (0, 1)]
    assert all(block["error"] > 0 for block in report.calibration["blocks"])
    assert report.calibration["verdict"]["passed"]


def test_block_errors_and_verdict_are_those_of_the_two_models(tiny_llama: Path, rows: Any, tmp_path: Path) -> None:
    report = oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "out", num_samples=6)
    source = AutoModelForCausalLM.from_pretrained(tiny_llama)
    result = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", execution="dense")
    inputs = torch.stack([row["input_ids"] for row in rows[6:8]])
    with torch.no_grad():
        one, two = (model(inputs, output_hidden_states=True) for model in (source, result))
        losses = [float(model(inputs, labels=inputs).loss) for model in (source.float(), result.float())]
    first = report.calibration["blocks"][0]
    wanted = (two.hidden_states[1] - one.hidden_states[1]).float().square().sum() / one.hidden_states[
        1
    ].float().square().sum()
    assert first["name"] == "model.layers.0" and first["error"] == pytest.approx(float(wanted), rel=0.05)
    verdict = report.calibration["verdict"]
    assert verdict["tokens"] == 2 * 23 and not verdict["seen"]
    assert verdict["source"] == pytest.approx(math.exp(losses[0]), rel=0.02)
    assert verdict["result"] == pytest.approx(math.exp(losses[1]), rel=0.02)


def test_a_ruined_model_is_said(tiny_llama: Path, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "_WORSE", 0.5)  # a model of random weights cannot become twice as bad
    prune = recipe({"WandaPruningModifier": {"sparsity": 0.9}})
    with pytest.warns(UserWarning, match="far from the source"):
        report = oneshot(tiny_llama, prune, data=rows, output=tmp_path / "out")
    assert not report.calibration["verdict"]["passed"]


def test_a_resumed_run_reports_every_layer(tiny_llama: Path, rows: Any, tmp_path: Path, monkeypatch: Any) -> None:
    whole = oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "whole").calibration
    leave = Solving.leave

    def stop(self: Solving, block: str) -> None:
        leave(self, block)
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Solving, "leave", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "out")
    assert [path.name for path in scratch_of(tmp_path / "out").glob("*.safetensors")] == ["model.layers.0.safetensors"]
    resumed = oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "out", resume=True).calibration
    assert resumed["layers"] == whole["layers"] and resumed["verdict"] == whole["verdict"]
    assert [block["error"] for block in resumed["blocks"]] == [block["error"] for block in whole["blocks"]]


def test_token_ids_of_another_tokenizer_are_named_and_nothing_is_left(tiny_llama: Path, tmp_path: Path) -> None:
    for ids in ([1, 2, 999], [1, -100, 2]):
        with pytest.raises(ValueError, match=r"token id (999|-100), and the model has ids from 0 to 255"):
            oneshot(tiny_llama, recipe(GPTQ), data=[{"input_ids": ids}] * 4, output=tmp_path / "out")
    with pytest.raises(ValueError, match="whole numbers"):
        oneshot(tiny_llama, recipe(GPTQ), data=[{"input_ids": torch.rand(1, 4)}], output=tmp_path / "out")
    with pytest.raises(ValueError, match="memory_budget=-1"):
        oneshot(tiny_llama, recipe(GPTQ), data=[{"input_ids": [1, 2]}], output=tmp_path / "out", memory_budget=-1)
    assert not list(tmp_path.iterdir())


def test_a_failure_says_where_finished_blocks_are(
    tiny_llama: Path, rows: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    solve = Solving.solve

    def fail(self: Solving, layers: Any) -> None:
        if "layers.1" in layers.names[0]:
            raise MemoryError("no more memory")
        solve(self, layers)

    with monkeypatch.context() as patch:
        patch.setattr(Solving, "solve", fail)
        with pytest.raises(MemoryError) as caught:
            oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "out")
    scratch = scratch_of(tmp_path / "out")
    assert any(str(scratch) in note and "resume=True" in note for note in caught.value.__notes__)
    (scratch / "fingerprint.json").write_text('{"mod')  # damaged: nothing there can be trusted, so all starts anew
    oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "out", resume=True)
    assert verify(tmp_path / "out").ok and not scratch.exists()


def test_a_source_that_is_not_finite_is_named_before_it_is_calibrated(
    tiny_llama: Path, rows: Any, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = math.nan
    model.save_pretrained(tmp_path / "bad")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight of the source .* not finite"):
        oneshot(tmp_path / "bad", recipe(GPTQ), data=rows, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_lies_outside_the_blocks_waits_in_files(
    tiny_llama: Path, rows: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    enter, held = Solving.enter, []

    def look(self: Solving, block: str) -> None:
        held.append(self._files.holds(self.model.get_input_embeddings().weight))
        enter(self, block)

    monkeypatch.setattr(Solving, "enter", look)
    monkeypatch.setattr("sparseautomodel.spill._SMALLEST", 1)
    oneshot(tiny_llama, recipe(GPTQ), data=rows, output=tmp_path / "out")
    assert held == [True, True]
    source, result = open_checkpoint(tiny_llama), open_checkpoint(tmp_path / "out")
    assert torch.equal(source["model.embed_tokens.weight"][...], result["model.embed_tokens.weight"][...])
