"""Calibration data: every form gives the rows it holds, and what is left out is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

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
        (["", ""], "2 were empty"),
        ([{"label": 3}], "row 0 is a dict with keys ['label']"),
        ([3], "row 0 is a int"),
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
