"""Rows of calibration data from whatever the user has, as tensors without padding."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy
import torch
from torch import Tensor

READERS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
TEXT_KEYS = ("text", "content", "prompt", "sentence")
CHAT_KEYS = ("messages", "conversations", "conversation")
MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
ROLES = {"human": "user", "gpt": "assistant"}
"""Names of ShareGPT's `from`, and what templates call them."""

Row = dict[str, Tensor]
"""Inputs of a model's forward for one row, each with its batch dimension."""

_PIECE = 2**17
"""Characters of a running text that are tokenized at once, so that only what is needed of a long one is."""


def read_rows(data: Any, tokenizer: Any, limit: int) -> Iterator[Row]:
    """The rows of `data`, which is what `calibration.read_batches` takes, without masked tokens; they may be empty.

    Args:
        tokenizer: needed unless the rows have `input_ids`.
        limit: length of the rows into which a running text is cut. Others keep theirs.

    Raises:
        ValueError: a row cannot be read; its number is said.
    """
    if data is None:
        data = (f"{topics.topics[name]}\n\n" for name in sorted(topics.topics))
        yield from _windows(data, tokenizer, limit)
        return
    if isinstance(data, (str, os.PathLike)):
        path = Path(data)
        if path.suffix == ".txt" and path.is_file():
            with path.open(encoding="utf-8") as file:
                yield from _windows(file, tokenizer, limit)
            return
        data = _read_file(path) if path.suffix in READERS else _read_dataset(str(data))
    if isinstance(data, Mapping):
        data = [data]
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise ValueError(
            f"calibration data must be texts, rows, a file or the name of a data set, not of {type(data).__name__} "
            f"({data!r}): data=[text, ...] or data='texts.jsonl'"
        )
    for number, row in enumerate(data):
        try:
            yield from _split(_encoded(row, tokenizer))
        except ValueError as error:
            raise ValueError(f"calibration row {number}: {error}") from error


def tokens_of(name: str, value: Tensor, row: Mapping[str, Tensor]) -> str | None:
    """Which tokens `value` has one entry for: those of `input_ids`, of `decoder_input_ids`, or of neither."""
    ids = "decoder_input_ids" if name.startswith("decoder_") else "input_ids"
    return ids if ids in row and value.shape[:2] == row[ids].shape else None


def _windows(lines: Iterable[str], tokenizer: Any, limit: int) -> Iterator[Row]:
    """A running text in rows of `limit` tokens, each with the token in front that the tokenizer puts there."""
    tokenizer = _text_part(tokenizer)
    first = tokenizer("")["input_ids"]
    first = first if first == [tokenizer.bos_token_id] and limit > 1 else []
    size = limit - len(first)
    waiting: list[int] = []
    for piece in _pieces(lines):
        waiting += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        whole = len(waiting) // size * size
        for start in range(0, whole, size):
            yield {"input_ids": torch.tensor([first + waiting[start : start + size]])}
        waiting = waiting[whole:]
    if waiting:
        yield {"input_ids": torch.tensor([first + waiting])}


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Whole lines together, until they are long enough."""
    piece: list[str] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= _PIECE:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _read_file(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise ValueError(f"calibration data: there is no file {path.absolute()}")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    with path.open(encoding="utf-8-sig", newline="" if path.suffix == ".csv" else None) as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
            return
        numbered = [(1, file.read())] if path.suffix == ".json" else enumerate(file, 1)
        for number, text in numbered:
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                place = f"{path}:{number - 1 + error.lineno}"
                raise ValueError(f"calibration data: {place} is not JSON: {error}") from error
            if path.suffix == ".jsonl":
                yield value
            elif isinstance(value, list):
                yield from value
            else:
                raise ValueError(
                    f"calibration data: {path} must hold a list of texts or objects, not a {type(value).__name__}"
                )


def _read_parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs pyarrow: pip install pyarrow") from error
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _read_dataset(name: str) -> Iterable[Any]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"calibration data {name!r} is neither a file ({', '.join(READERS)}) nor, without the datasets package, "
            "the name of a data set. For texts pass a list: data=[text]"
        ) from error
    return load_dataset(name, split="train")


def _encoded(row: Any, tokenizer: Any) -> dict[str, Any]:
    """The row as a dict with `input_ids` `[tokens]`, or as a batch of tensors."""
    if isinstance(row, str):
        return {"input_ids": _text_part(tokenizer)(row, verbose=False)["input_ids"] if row.strip() else []}
    if isinstance(row, Tensor) or (isinstance(row, (list, tuple)) and row and isinstance(row[0], int)):
        return {"input_ids": row}
    if isinstance(row, list) and row and isinstance(row[0], Mapping):
        row = {CHAT_KEYS[0]: row}
    if isinstance(row, Mapping):
        chat = next((row[key] for key in CHAT_KEYS if row.get(key) is not None), None)
        text = next((row[key] or "" for key in TEXT_KEYS if isinstance(row.get(key, 0), str | None)), None)
        if "input_ids" in row:
            return dict(row)
        if chat is not None:
            chat = [_message(message) for message in chat]
            options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
            return dict(_needed(tokenizer).apply_chat_template(chat, **options))
        if text is not None:
            return _encoded(text, tokenizer)
        if any(isinstance(value, Tensor) for value in row.values()):
            return {name: value for name, value in row.items() if isinstance(value, Tensor) and value.ndim}
        if any(hasattr(value, "column_names") for value in row.values()):
            raise ValueError(f"the data set has splits, pass one of them: data[{next(iter(row))!r}]")
    raise ValueError(
        f"it is a {type(row).__name__}"
        + (f" with keys {sorted(map(str, row))}" if isinstance(row, Mapping) else "")
        + f"; it must be a text, or a dict with input_ids, one of {', '.join(TEXT_KEYS)}, or chat {CHAT_KEYS[0]}"
    )


def _message(message: Any) -> Any:
    """ShareGPT's `from` and `value` as the `role` and `content` of templates, which would leave them out unsaid."""
    if isinstance(message, Mapping) and "from" in message and "value" in message:
        return {"role": ROLES.get(message["from"], message["from"]), "content": message["value"]}
    return message


def _split(batch: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a batch, each without its masked tokens."""
    tensors = {name: value for name in batch if (value := _tensor(name, batch[name])) is not None}
    ids = tensors.get("input_ids")
    if ids is not None and ids.ndim == 1:
        tensors = {name: value[None] for name, value in tensors.items()}
        ids = tensors["input_ids"]
    sizes = {len(value) for value in tensors.values() if value.ndim}
    rows = len(ids) if ids is not None else next(iter(sizes)) if len(sizes) == 1 else 1
    apart = [name for name, value in tensors.items() if value.shape[:1] != (rows,)]
    if apart and rows > 1:
        raise ValueError(
            f"a batch of {rows} rows with {apart[0]} {list(tensors[apart[0]].shape)}, of which it is not known what "
            "belongs to which row: give one row a batch, DataLoader(..., batch_size=1)"
        )
    for at in range(rows):
        yield _unmasked({name: value if name in apart else value[at : at + 1] for name, value in tensors.items()})


def _unmasked(row: Row) -> Row:
    for ids, mask in MASKS.items():
        if ids in row and mask in row and row[mask].ndim == 2 and row[mask].shape != row[ids].shape:
            raise ValueError(
                f"{mask} has {row[mask].shape[1]} entries and {ids} has {row[ids].shape[1]}: give one a token, or none"
            )
        if ids in row and mask in row and row[mask].shape == row[ids].shape:
            kept = row[mask][0].bool()
            mine = [name for name, value in row.items() if tokens_of(name, value, row) == ids and name != "labels"]
            row = row | {name: row[name][:, kept] for name in mine if name != mask}
            del row[mask]
    return row


def _tensor(name: str, value: Any) -> Tensor | None:
    """Numbers as a tensor in the memory of the CPU, None for what holds none."""
    if isinstance(value, (list, tuple)):
        try:
            if numpy.asarray(value).dtype.kind not in "biuf" and len(value):
                return None
        except ValueError as error:
            if name == "input_ids":
                raise ValueError("input_ids has rows of different lengths: give one dict a row") from error
            return None
    elif not isinstance(value, (Tensor, numpy.ndarray)):
        return None
    found = torch.as_tensor(value).detach().cpu()
    if name != "input_ids":
        return found
    if (found.is_floating_point() and found.numel()) or found.dtype == torch.bool:
        raise ValueError(f"input_ids must be whole numbers, got {found.dtype}")
    return found.long()


def _text_part(tokenizer: Any) -> Any:
    """The tokenizer itself, where a processor was given."""
    return getattr(_needed(tokenizer), "tokenizer", tokenizer)


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ValueError("calibration text needs a tokenizer: pass tokenizer=AutoTokenizer.from_pretrained(...)")
    return tokenizer
