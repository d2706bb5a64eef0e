from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from sparseautomodel import SparseAutoModelForCausalLM, oneshot
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.report import LoadReport, Perplexity, Report, model_card, peak_nbytes, perplexity, versions

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TEXT = "The quick brown fox jumps over the lazy dog, and what it finds there is quite another fox. " * 3


# Perplexity


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("window", "stride", "max_tokens"),
    [
        (64, None, None),
        (64, 32, None),
        (64, 5, 90),
        (50, 37, 120),
        (512, None, None),
        (64, None, 129),
        (2, None, 11),
        (40, 40, 41),
    ],
)
def test_perplexity_is_that_of_the_plain_loop(
    model: Any,
    tiny_tokenizer: PreTrainedTokenizerBase,
    window: int,
    stride: int | None,
    max_tokens: int | None,
    batch_size: int,
) -> None:
    found = perplexity(
        model, tiny_tokenizer, TEXT, window=window, stride=stride, max_tokens=max_tokens, batch_size=batch_size
    )
    ids = tiny_tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :max_tokens]
    value, tokens = _plain_perplexity(model, ids, window, stride or window)
    assert found.tokens == tokens
    assert found.value == pytest.approx(value, rel=1e-5)


def test_every_token_is_predicted_once_with_a_stride(model: Any, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    count = len(tiny_tokenizer(TEXT)["input_ids"])
    for stride in (7, 30):
        assert perplexity(model, tiny_tokenizer, TEXT, window=40, stride=stride).tokens == count - 1


def test_perplexity_of_known_models(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """One that knows nothing has the size of the vocabulary, a hopeless one infinity, and neither is an error."""

    def constant(wrong: float) -> Any:
        def forward(input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
            logits = torch.zeros(*input_ids.shape, 256)
            logits[..., 0] = wrong
            return SimpleNamespace(logits=logits)

        forward.device = torch.device("cpu")  # type: ignore[attr-defined]
        return forward

    assert perplexity(constant(0), tiny_tokenizer, TEXT).value == pytest.approx(256, rel=1e-5)
    assert perplexity(constant(1e4), tiny_tokenizer, TEXT).value == math.inf


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "0 tokens; at least 2"),
        ("x", {}, "1 tokens; at least 2"),
        (TEXT, {"max_tokens": 1}, "max_tokens=1 must be at least 2"),
        (TEXT, {"window": 1}, "window=1 must be at least 2"),
        (TEXT, {"stride": 0}, "stride=0 must be between 1 and window=512"),
        (TEXT, {"window": 8, "stride": 9}, "stride=9 must be between 1 and window=8"),
    ],
)
def test_wrong_arguments_of_perplexity(
    model: Any, tiny_tokenizer: PreTrainedTokenizerBase, text: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        perplexity(model, tiny_tokenizer, text, **options)


def test_perplexity_for_people_and_for_programs() -> None:
    assert str(Perplexity(12.3456, 99)) == "perplexity 12.35 over 99 tokens"
    assert Perplexity(12.5, 99).to_dict() == {"value": 12.5, "tokens": 99}


# The report of a load


def test_load_report_says_what_was_read_how_often_and_how_long(tiny_llama: Path) -> None:
    report = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16").load_report
    assert isinstance(report, LoadReport)
    source = open_checkpoint(tiny_llama)
    assert report.reads == {name: (1, tensor.nbytes) for name, tensor in source.items()}
    assert report.nbytes == source.nbytes and report.source == str(tiny_llama)
    assert (report.unread, report.initialized, report.restored) == ((), (), ())
    assert report.layers_compressed == 14 and 0.5 < report.share_changed < 1
    assert report.seconds.keys() == {"plan", "load", "verify", "settle"} and min(report.seconds.values()) >= 0
    text = str(report)
    for part in (str(tiny_llama), "21 tensors read once", "14 layers compressed", "plan", "verify"):
        assert part in text


def test_load_report_names_what_is_new_and_what_was_left(tiny_llama: Path) -> None:
    report = LoadReport("x", {"a": (1, 10), "b": (2, 20)}, ("mtp.weight",), ("score.weight",), (), 0, 0.0, {})
    assert "2 tensors read 1 or 2 times, 30 B" in str(report)
    assert "not read: mtp.weight" in str(report) and "newly initialized: score.weight" in str(report)


def test_load_report_is_json(tiny_llama: Path) -> None:
    report = SparseAutoModelForCausalLM.from_pretrained(tiny_llama).load_report
    written = json.loads(json.dumps(report.to_dict()))
    assert written.keys() == {field.name for field in dataclasses.fields(LoadReport)} | {"nbytes"}
    assert written["reads"]["lm_head.weight"] == [1, 256 * 64 * 2]
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.source = "y"


# The report of a run


@pytest.mark.parametrize("recipe", ["w4a16", "2of4", "fp8-dynamic"])
def test_report_is_json_and_says_it_in_two_lines(tiny_llama: Path, tmp_path: Path, recipe: str) -> None:
    report = oneshot(tiny_llama, recipe, output=tmp_path / "out")
    assert isinstance(report, Report)
    written = json.loads(json.dumps(report.to_dict()))
    assert written.keys() == {field.name for field in dataclasses.fields(Report)}
    assert written["reads"] == {"tensors": 21, "times": [1], "nbytes": open_checkpoint(tiny_llama).nbytes}
    first, second, *rest = str(report).splitlines()
    assert first.startswith(f"{tiny_llama} -> {tmp_path / 'out'}: 14 layers, ") and first.endswith("changed")
    assert "21 tensors read once" in second and all(line.startswith("note: ") for line in rest)
    assert report.peak_nbytes > 50e6 and report.seconds > 0


def test_report_of_a_run_with_data_says_how_good_it_is(tiny_mixtral: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": torch.randint(1, 250, (6,))} for _ in range(4)]
    recipe = {"modifiers": [{"GPTQModifier": {"scheme": "W4A16", "group_size": 32}}]}
    report = oneshot(tiny_mixtral, recipe, data=rows, output=tmp_path / "out", num_samples=1)
    text, card = str(report), (tmp_path / "out" / "README.md").read_text()
    verdict = report.calibration["verdict"]["text"]
    assert "calibrated on 1 rows, 6 tokens" in text and verdict in text and f"| quality | {verdict} |" in card
    known = [layer for layer in report.calibration["layers"] if layer["after"] is not None]
    worst = max(known, key=lambda layer: layer["after"])
    assert f"largest relative error: {worst['name']}, {worst['after']:.2%}" in text
    fallen = [layer for layer in report.calibration["layers"] if layer["fallback"]]
    assert fallen and f"{len(fallen)} layers fell back" in text  # six tokens do not reach all experts


def test_report_of_a_model_in_memory_says_so(tiny_llama: Path) -> None:
    report = oneshot(AutoModelForCausalLM.from_pretrained(tiny_llama), "2of4")
    assert "-> in memory: 14 layers" in str(report) and report.to_dict()["output"] is None


def test_model_card_is_readable_whatever_the_names(tiny_llama: Path, tmp_path: Path) -> None:
    report = oneshot(tiny_llama, "2of4", output=tmp_path / "out")
    card = model_card(report, 'odd: "name"', None, "AutoModelForMaskedLM")
    front = yaml.safe_load(card.split("---")[1])
    assert front == {
        "library_name": "transformers",
        "base_model": 'odd: "name"',
        "tags": ["compressed-tensors", "sparseautomodel"],
    }
    assert yaml.safe_load(model_card(report, "x", "mit").split("---")[1])["license"] == "mit"
    assert "| stored as | dense |" in card and "| zeros | 2:4 |" in card
    assert card.count("AutoModelForMaskedLM") == 3 and "CausalLM" not in card


def test_versions_and_memory() -> None:
    assert versions().keys() == {
        "sparseautomodel",
        "python",
        "torch",
        "transformers",
        "compressed-tensors",
        "safetensors",
    }
    before = peak_nbytes()
    filled = torch.ones(50_000_000)
    assert peak_nbytes() >= filled.nbytes and peak_nbytes() >= before > 50e6


def _plain_perplexity(model: Any, ids: torch.Tensor, window: int, stride: int) -> tuple[float, int]:
    """The loop of transformers' own guide: one window after another, labels of context masked."""
    total, tokens, previous = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        inputs = ids[:, begin:end]
        labels = inputs.clone()
        labels[:, : -(end - previous)] = -100
        predicted = int((labels[:, 1:] != -100).sum())
        if predicted:
            with torch.no_grad():
                total += float(model(inputs, labels=labels).loss) * predicted
            tokens += predicted
        previous = end
        if end == ids.shape[1]:
            break
    return math.exp(total / tokens), tokens
