"""Calibration data: every form gives the rows it holds, and what is left out is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from sparseautomodel.calibration import read_batches

TEXTS = ["the first row", "a second, longer row of text", "x", ""]


def rows_of(batches: Any) -> list[list[int]]:
    return sorted(row.tolist() for batch in batches.batches for row in batch["input_ids"])


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_every_form_of_the_same_texts_gives_the_same_rows(tmp_path: Path, tiny_tokenizer: Any) -> None:
    ids = [tiny_tokenizer(text)["input_ids"] for text in TEXTS if text]
    padded = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for number, row in enumerate(ids):
        padded[number, : len(row)], mask[number, : len(row)] = torch.tensor(row), 1
    objects = [{"text": text} for text in TEXTS]
    csv = "text\n" + "\n".join(json.dumps(text) for text in TEXTS) + "\n"
    forms = [
        TEXTS,
        objects,
        [{"input_ids": row} for row in ids],
        [{"input_ids": padded, "attention_mask": mask}],
        DataLoader([{"input_ids": a, "attention_mask": b} for a, b in zip(padded, mask, strict=True)], batch_size=2),
        write(tmp_path / "rows.json", json.dumps(TEXTS)),
        write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, objects)) + "\n\n"),
        write(tmp_path / "rows.csv", csv),
    ]
    for form in forms:
        assert rows_of(read_batches(form, tiny_tokenizer)) == sorted(ids), form


def test_chat_messages_go_through_the_template(tiny_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (row,) = rows_of(read_batches([{"messages": messages}], tiny_tokenizer))
    assert tiny_tokenizer.decode(row) == "user: hello\n"


def test_a_text_file_is_one_running_text_in_windows(tmp_path: Path, tiny_tokenizer: Any) -> None:
    file = write(tmp_path / "text.txt", "abcdefghij" * 3)
    batches = read_batches(file, tiny_tokenizer, max_length=8)
    assert batches.num_tokens == 30 and sorted(map(len, rows_of(batches))) == [6, 8, 8, 8]


def test_left_padding_and_right_padding_are_taken_off_alike() -> None:
    ids = torch.tensor([[5, 6, 7, 0, 0], [0, 0, 5, 6, 7]])
    batches = read_batches([{"input_ids": ids, "attention_mask": (ids != 0).long()}])
    assert rows_of(batches) == [[5, 6, 7], [5, 6, 7]]


def test_rows_of_one_length_are_batched_together() -> None:
    data = [{"input_ids": list(range(1, 1 + length))} for length in (3, 5, 3, 5, 3)]
    shapes = [tuple(batch["input_ids"].shape) for batch in read_batches(data, batch_size=2).batches]
    assert shapes == [(2, 3), (1, 3), (2, 5)]


def test_what_happened_to_rows_is_said(tiny_tokenizer: Any) -> None:
    batches = read_batches(TEXTS, tiny_tokenizer, max_length=20, num_samples=5)
    said = "\n".join(batches.notes)
    assert batches.num_samples == 3
    for text in (
        "3 rows were found, 5 were asked for",
        "1 empty rows",
        "1 rows were cut to 20",
        "1 rows have one token",
    ):
        assert text in said


def test_no_data_is_prose_that_every_python_has(tiny_tokenizer: Any) -> None:
    batches = read_batches(None, tiny_tokenizer, num_samples=4, max_length=64)
    assert batches.num_tokens == 256 and not batches.notes
    assert "statement" in tiny_tokenizer.decode(torch.cat([row for b in batches.batches for row in b["input_ids"]]))


def test_the_first_samples_are_taken_and_no_more(tiny_tokenizer: Any) -> None:
    endless = ({"input_ids": [number, number]} for number in iter(int, 1))
    assert read_batches(endless, tiny_tokenizer, num_samples=3).num_samples == 3


def test_tensors_of_other_inputs_pass_through() -> None:
    pixels = torch.rand(1, 3, 4, 4)
    (batch,) = read_batches([{"pixel_values": pixels}]).batches
    assert torch.equal(batch["pixel_values"], pixels)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ([], "no calibration rows are left"),
        (["", ""], "2 empty rows were left out"),
        ([{"label": 3}], "row 0: it is a dict with keys ['label']"),
        ([3], "row 0: it is a int"),
        ("nowhere.txt", "there is no file"),
        ("no-such-set", "neither a file"),
    ],
)
def test_errors_say_what_is_wrong(data: Any, part: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=part.replace("[", r"\[").replace("]", r"\]")):
        read_batches(data, tiny_tokenizer)


def test_text_without_a_tokenizer_is_an_error() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        read_batches(["text"])


@pytest.mark.parametrize("key", ["num_samples", "max_length", "batch_size"])
def test_sizes_below_one_are_errors(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        read_batches([{"input_ids": [1]}], **{key: 0})


def test_fingerprint_depends_on_every_token() -> None:
    one, other = ([{"input_ids": [1, 2, last]}] for last in (3, 4))
    assert read_batches(one).fingerprint == read_batches(one).fingerprint != read_batches(other).fingerprint


def test_held_out_rows_come_after_the_others_and_change_nothing() -> None:
    data = [{"input_ids": [number] * length} for number, length in enumerate((3, 5, 3, 0, 4, 3), 1)]
    plain, both = (read_batches(data, num_samples=2, held_out=held_out) for held_out in (0, 2))
    assert [batch["input_ids"].tolist() for batch in both.held_out] == [[[3] * 3], [[5] * 4]]
    assert both.fingerprint == plain.fingerprint and both.notes == plain.notes == () and not plain.held_out
    assert (both.num_samples, both.num_tokens) == (2, 8) and rows_of(both) == rows_of(plain)
    assert len(read_batches(data, num_samples=4, held_out=9).held_out) == 1


def test_columns_that_the_model_does_not_take_are_left_out_and_said(tiny_llama: Path, tiny_bert: Path) -> None:
    row = {"input_ids": [1, 2, 3], "token_type_ids": [0, 1, 1], "labels": [1, 2, 3], "weights": [0.5, 0.5, 1.0]}
    llama, bert = hollow(tiny_llama), hollow(tiny_bert)
    batches = read_batches([row], model=llama)
    assert set(batches.batches[0]) == {"input_ids"}
    assert batches.notes[1:] == ("left out, since the model's forward does not take them: token_type_ids, weights",)
    assert set(read_batches([row], model=bert).batches[0]) == {"input_ids", "token_type_ids"}
    assert set(read_batches([row]).batches[0]) == {"input_ids", "token_type_ids", "weights"}
    with pytest.raises(ValueError, match="takes none of pixel_values"):
        read_batches([{"pixel_values": torch.rand(1, 3, 4, 4)}], model=llama)


def test_a_model_that_takes_anything_gets_everything() -> None:
    class Anything(nn.Module):
        config = LlamaConfig()

        def forward(self, **inputs: Tensor) -> None: ...

    assert set(read_batches([{"input_ids": [1], "other": [2]}], model=Anything()).batches[0]) == {"input_ids", "other"}


def test_rows_are_cut_to_the_positions_of_the_model(tiny_bert: Path, tiny_tokenizer: Any) -> None:
    batches = read_batches(["x" * 600], tiny_tokenizer, model=hollow(tiny_bert))
    assert batches.num_tokens == 512 and "1 rows were cut to 512 tokens" in batches.notes


def test_the_decoder_of_an_encoder_decoder_reads_labels_or_the_same_text(tiny_tokenizer: Any) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=256, decoder_start_token_id=9, **sizes))
    given = {"input_ids": [5, 6, 7], "decoder_input_ids": [1, 2]}
    labeled = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[8, 3, -100]])}
    rows: list[Any] = ["abc", given, labeled]
    batches = read_batches(rows, tiny_tokenizer, model=model).batches
    found = sorted(row.tolist() for batch in batches for row in batch["decoder_input_ids"])
    assert found == [[1, 2], [9, 8], [9, 97, 98]]
    for batch in batches:
        assert model(**batch).logits.isfinite().all()
    long = read_batches(["a" * 50], tiny_tokenizer, model=model, max_length=10).batches[0]
    assert {tuple(value.shape) for value in long.values()} == {(1, 10)}


def test_an_encoder_decoder_without_text_asks_for_labels() -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    config = WhisperConfig(vocab_size=64, decoder_attention_heads=2, decoder_start_token_id=1, pad_token_id=0, **sizes)
    model = WhisperForConditionalGeneration(config)
    features = {"input_features": torch.rand(2, 80, 3000)}
    with pytest.raises(ValueError, match="add labels or decoder_input_ids to each row"):
        read_batches([features], model=model)
    (batch,) = read_batches([features | {"labels": torch.tensor([[4, 5], [6, 7]])}], model=model).batches
    assert batch["decoder_input_ids"].tolist() == [[1, 4], [1, 6]] and batch["input_features"].shape == (2, 80, 3000)


def test_images_of_one_size_are_batched_and_others_stay_alone() -> None:
    ids, grid = torch.ones(1, 6, dtype=torch.long), torch.tensor([[1, 2, 2]])
    one_a_row = [{"input_ids": ids, "pixel_values": torch.rand(1, 3, 4, 4)} for _ in range(3)]
    patches = [{"input_ids": ids, "pixel_values": torch.rand(4, 12), "image_grid_thw": grid} for _ in range(2)]
    shapes = [tuple(batch["pixel_values"].shape) for batch in read_batches([*one_a_row, *patches]).batches]
    assert shapes == [(3, 3, 4, 4), (4, 12), (4, 12)]
    batches = read_batches([*one_a_row, {"input_ids": torch.ones(1, 3, dtype=torch.long)}], max_length=4)
    assert batches.num_samples == 1
    assert batches.notes[1] == "3 rows with other inputs than tokens are longer than 4 tokens and were left out"


def test_rows_without_a_token_that_counts_are_counted_as_empty() -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    batches = read_batches([{"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 0], [0, 1, 1]])}])
    assert batches.num_samples == 1 and batches.num_tokens == 2 and "1 empty rows were left out" in batches.notes


def hollow(folder: Path) -> nn.Module:
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForMaskedLM if config.model_type == "bert" else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)
