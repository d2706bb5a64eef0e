"""Rows from files, data sets, chats and ready batches, each without what is masked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from sparseautomodel import rows
from sparseautomodel.rows import read_rows


def ids_of(data: Any, tokenizer: Any = None, limit: int = 64) -> list[list[int]]:
    return [row["input_ids"][0].tolist() for row in read_rows(data, tokenizer, limit)]


def texts_of(data: Any, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row) for row in ids_of(data, tokenizer)]


@pytest.fixture
def starting_tokenizer(tiny_tokenizer: Any) -> Any:
    """Puts its first token in front of every text, as Llama's and Gemma's do."""
    tokenizer = type(tiny_tokenizer)(
        tokenizer_object=tiny_tokenizer.backend_tokenizer, bos_token=tiny_tokenizer.bos_token
    )
    start = tokenizer.bos_token
    inner = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    inner.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, tokenizer.bos_token_id)])
    return type(tiny_tokenizer)(tokenizer_object=inner, bos_token=start)


@pytest.mark.parametrize("name", ["data.json", "data.jsonl", "data.csv", "data.parquet"])
def test_files_give_their_rows_and_blank_ones_stay_empty(name: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    values = ["a b", "two\u2028lines", None, "  "]
    path = tmp_path / name
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"text": values, "id": [1, 2, 3, 4]}), path)
    elif path.suffix == ".csv":
        path.write_text("\ufefftext,id\n" + "".join(f'"{value or ""}",7\n' for value in values), encoding="utf-8")
    else:
        objects = [{"id": "x", "text": value} for value in values]
        lines = [json.dumps(value, ensure_ascii=False) for value in objects]
        path.write_text(f"[{','.join(lines)}]" if path.suffix == ".json" else "\n".join(lines), encoding="utf-8")
    assert texts_of(path, tiny_tokenizer) == ["a b", "two\u2028lines", "", ""]


@pytest.mark.parametrize(
    ("name", "text"), [("rows.jsonl", '{"text": "a"}\n{text: "b"}\n'), ("rows.json", '["a",\n x]')]
)
def test_damaged_files_are_named_with_the_line(name: str, text: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}:2 is not JSON"):
        texts_of(tmp_path / name, tiny_tokenizer)


def test_a_file_that_is_not_a_list_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    (tmp_path / "rows.json").write_text('{"train": ["a"]}')
    with pytest.raises(ValueError, match="must hold a list of texts or objects, not a dict"):
        texts_of(tmp_path / "rows.json", tiny_tokenizer)


def test_only_what_is_needed_of_a_long_text_is_tokenized(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_PIECE", 100)
    seen = []

    class Counting:
        bos_token_id = None

        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return tiny_tokenizer(text, **options)

    lines = "".join(f"line {number}\n" for number in range(1000))
    (tmp_path / "text.txt").write_text(lines)
    found = read_rows(tmp_path / "text.txt", Counting(), 64)
    first = [next(found)["input_ids"][0] for _ in range(4)]
    assert sum(seen) < 400 and tiny_tokenizer.decode(torch.cat(first)) == lines[:256]
    assert sum(map(len, ids_of(tmp_path / "text.txt", tiny_tokenizer))) == len(lines)


def test_windows_start_as_the_tokenizer_starts_a_text(tmp_path: Path, starting_tokenizer: Any) -> None:
    (tmp_path / "text.txt").write_text("abcdefghij")
    windows = ids_of(tmp_path / "text.txt", starting_tokenizer, limit=4)
    assert [len(row) for row in windows] == [4, 4, 4, 2] and {row[0] for row in windows} == {0}
    assert starting_tokenizer.decode([token for row in windows for token in row[1:]]) == "abcdefghij"
    assert ids_of(["ab", " "], starting_tokenizer) == [[0, 97, 98], []]  # nothing but the start is an empty row


def test_chats_in_every_spelling_go_through_the_template(tiny_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    forms = [messages, {"messages": messages, "prompt": "no"}, {"conversations": shared}]
    assert texts_of(forms, tiny_tokenizer) == ["user: hi\nassistant: yes\n"] * 3


def test_a_processor_keeps_the_images_of_its_messages() -> None:
    class Processor:
        def apply_chat_template(self, chat: Any, **options: Any) -> dict[str, Tensor]:
            assert options == {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
            ones = torch.ones(1, 3, dtype=torch.long)
            return {"input_ids": ones, "attention_mask": ones, "pixel_values": torch.rand(2, 3, 4, 4)}

    content = [{"type": "image", "url": "a.png"}, {"type": "text", "text": "what is this?"}]
    (row,) = read_rows([{"messages": [{"role": "user", "content": content}]}], Processor(), 64)
    assert {name: tuple(value.shape) for name, value in row.items()} == {
        "input_ids": (1, 3),
        "pixel_values": (2, 3, 4, 4),
    }


def test_plain_token_rows_are_rows() -> None:
    assert ids_of([[1, 2, 3], torch.tensor([4, 5])]) == [[1, 2, 3], [4, 5]]
    assert ids_of(torch.arange(6).reshape(2, 3)) == [[0, 1, 2], [3, 4, 5]]


def test_every_input_of_a_token_is_unpadded_with_it() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 0, 0]])
    batch = {
        "input_ids": torch.tensor([[0, 5, 6], [0, 0, 0]]),
        "attention_mask": mask,
        "position_ids": torch.tensor([[0, 0, 1], [0, 0, 0]]),
        "labels": torch.tensor([3, 4]),
        "decoder_input_ids": torch.tensor([[7, 8, 0], [7, 0, 0]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "text": ["a", "b"],
    }
    first, second = read_rows([batch], None, 64)
    assert {name: value.tolist() for name, value in first.items()} == {
        "input_ids": [[5, 6]],
        "position_ids": [[0, 1]],
        "labels": [3],
        "decoder_input_ids": [[7, 8]],
    }
    assert second["input_ids"].shape == (1, 0) and second["decoder_input_ids"].tolist() == [[7]]


def test_inputs_that_are_not_one_a_row_stay_with_their_only_row() -> None:
    row = {
        "input_ids": torch.ones(1, 5, dtype=torch.long),
        "pixel_values": torch.rand(16, 12),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    (found,) = read_rows([row], None, 64)
    assert all(torch.equal(found[name], value) for name, value in row.items())
    with pytest.raises(ValueError, match=r"row 1: a batch of 2 rows with pixel_values \[16, 12\].*batch_size=1"):
        list(read_rows([row, row | {"input_ids": torch.ones(2, 5, dtype=torch.long)}], None, 64))


def test_batches_without_tokens_are_split_into_rows() -> None:
    found = list(read_rows([{"pixel_values": torch.rand(3, 3, 4, 4), "label": torch.tensor([1, 2, 3])}], None, 64))
    assert len(found) == 3 and found[0]["pixel_values"].shape == (1, 3, 4, 4)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ([{"input_ids": [[1, 2], [3]]}], "row 0: input_ids has rows of different lengths"),
        (
            {"train": type("Dataset", (), {"column_names": ["text"]})()},
            r"has splits, pass one of them: data\['train'\]",
        ),
        (["a", 3.5], "row 1: it is a float"),
    ],
)
def test_rows_that_cannot_be_read_are_named(data: Any, part: str, tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=part):
        list(read_rows(data, tiny_tokenizer, 64))


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_mask has 4 entries and input_ids has 5"):
        list(read_rows([{"input_ids": [1, 2, 3, 4, 5], "attention_mask": [1, 1, 1, 1]}], None, 16))


def test_what_is_no_data_is_said() -> None:
    with pytest.raises(ValueError, match=r"calibration data must be texts.* not of int \(5\): data="):
        list(read_rows(5, None, 8))
