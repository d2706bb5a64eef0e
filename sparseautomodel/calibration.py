"""Calibration data: whatever the user has, as batches of token rows, with nothing dropped silently.

Rows are batched with rows of their own length, so there is no padding, no mask to get wrong, and the batch size changes
no statistic.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

READERS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
TEXT_KEYS = ("text", "content", "prompt", "sentence")
CHAT_KEYS = ("messages", "conversations", "conversation")


@dataclass(frozen=True)
class Batches:
    """Calibration rows, ready for `model(**batch)`."""

    batches: tuple[dict[str, Tensor], ...]
    """Each a dict of tensors; `input_ids` is `[rows, tokens]`, without padding."""
    num_samples: int
    num_tokens: int
    notes: tuple[str, ...] = ()
    """What happened to rows that are not in the batches as they were given."""
    held_out: tuple[dict[str, Tensor], ...] = ()
    """Rows of the data that come after those, one a batch; nothing above, nor the fingerprint, has to do with them."""

    @property
    def fingerprint(self) -> str:
        """A hash of every number in the batches."""
        digest = hashlib.sha256()
        for batch in self.batches:
            for name in sorted(batch):
                value = batch[name].contiguous()
                digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
                digest.update(value.view(-1).view(torch.uint8).numpy().data if value.numel() else b"")
        return digest.hexdigest()


def read_batches(
    data: Any = None,
    tokenizer: Any = None,
    *,
    num_samples: int = 512,
    max_length: int = 2048,
    batch_size: int = 8,
    held_out: int = 0,
) -> Batches:
    """The first `num_samples` rows of `data`, cut to `max_length` tokens.

    Args:
        data: None for prose that every CPython carries; a path to .txt (one running text, cut into rows), .jsonl,
            .json, .csv or .parquet; the name of a `datasets` data set, or one that is loaded; texts; dicts with
            `input_ids`, `text` or chat `messages`; or an iterable of ready batches such as a DataLoader.
        tokenizer: needed unless the rows have `input_ids`.
        held_out: up to so many rows more, as the `held_out` of the result: to measure on what calibration has not seen.

    Raises:
        ValueError: no rows are left, a row cannot be read, or a tokenizer is missing; says which row and what to do.
    """
    if num_samples < 1 or max_length < 1 or batch_size < 1:
        raise ValueError(
            f"num_samples={num_samples}, max_length={max_length} and batch_size={batch_size} must be 1 or more"
        )
    counts = {"empty": 0, "cut": 0, "single": 0}
    found = _fitting(_rows(data, tokenizer, max_length), max_length, counts)
    rows = list(itertools.islice(found, num_samples))
    if not rows:
        raise ValueError(f"no calibration rows are left ({counts['empty']} were empty): give data with tokens in it")
    notes = []
    if len(rows) < num_samples:
        notes.append(f"{len(rows)} rows were found, {num_samples} were asked for")
    texts = {
        "empty": "empty rows were left out",
        "cut": f"rows were cut to {max_length} tokens",
        "single": "rows have one token only",
    }
    notes += [f"{counts[key]} {text}" for key, text in texts.items() if counts[key]]
    more = tuple(_batched(list(itertools.islice(found, held_out)), 1))
    batches = tuple(_batched(rows, batch_size))
    tokens = sum(batch["input_ids"].numel() for batch in batches if "input_ids" in batch)
    return Batches(batches, len(rows), tokens, tuple(notes), more)


def _fitting(
    rows: Iterable[dict[str, Tensor]], max_length: int, counts: dict[str, int]
) -> Iterator[dict[str, Tensor]]:
    """The rows that have tokens, cut to `max_length`; what happened to them is counted."""
    for row in rows:
        tokens = row["input_ids"].shape[-1] if "input_ids" in row else 1
        if tokens == 0:
            counts["empty"] += 1
            continue
        counts["single"] += tokens == 1 and "input_ids" in row
        if tokens > max_length:
            counts["cut"] += 1
            row = {name: value[:max_length] if value.shape[:1] == (tokens,) else value for name, value in row.items()}
        yield row


def _rows(data: Any, tokenizer: Any, max_length: int) -> Iterator[dict[str, Tensor]]:
    """Rows as dicts of tensors without a batch dimension."""
    if data is None:
        data = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
        yield from _windows(data, tokenizer, max_length)
        return
    if isinstance(data, (str, os.PathLike)):
        path = Path(data)
        if path.suffix == ".txt" and path.is_file():
            yield from _windows(path.read_text(encoding="utf-8"), tokenizer, max_length)
            return
        data = _read_file(path) if path.suffix in READERS else _read_dataset(str(data))
    if isinstance(data, Mapping):
        data = [data]
    for number, row in enumerate(data):
        yield from _tokenized(row, number, tokenizer)


def _windows(text: str, tokenizer: Any, max_length: int) -> Iterator[dict[str, Tensor]]:
    ids = _needed(tokenizer)(text, add_special_tokens=False, verbose=False)["input_ids"]
    for start in range(0, len(ids), max_length):
        yield {"input_ids": torch.tensor(ids[start : start + max_length])}


def _read_file(path: Path) -> Iterable[Any]:
    if not path.is_file():
        raise ValueError(f"calibration data: there is no file {path.absolute()}")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError(
                f"calibration data: {path} must hold a list of texts or objects, not a {type(rows).__name__}"
            )
        return rows
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs pyarrow: pip install pyarrow") from error
    return parquet.read_table(path).to_pylist()


def _read_dataset(name: str) -> Iterable[Any]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"calibration data {name!r} is neither a file ({', '.join(READERS)}) nor, without the datasets package, "
            "the name of a data set. For texts pass a list: data=[text]"
        ) from error
    return load_dataset(name, split="train")


def _tokenized(row: Any, number: int, tokenizer: Any) -> Iterator[dict[str, Tensor]]:
    if isinstance(row, str):
        yield {"input_ids": _ids(_needed(tokenizer)(row, verbose=False))}
        return
    if isinstance(row, Mapping):
        row = dict(row)
        if "input_ids" in row:
            yield from _unpadded({name: torch.as_tensor(value) for name, value in row.items() if _is_numeric(value)})
            return
        chat = next((row[key] for key in CHAT_KEYS if key in row), None)
        if chat is not None:
            yield {"input_ids": _ids(_needed(tokenizer).apply_chat_template(chat, tokenize=True, return_dict=True))}
            return
        text = next((row[key] for key in TEXT_KEYS if isinstance(row.get(key), str)), None)
        if text is not None:
            yield {"input_ids": _ids(_needed(tokenizer)(text, verbose=False))}
            return
        if row and all(isinstance(value, Tensor) for value in row.values()):
            yield {name: value[0] if value.shape[:1] == (1,) else value for name, value in row.items()}
            return
    raise ValueError(
        f"calibration row {number} is a {type(row).__name__}"
        + (f" with keys {sorted(row)}" if isinstance(row, Mapping) else "")
        + f"; it must be a text, or a dict with input_ids, one of {', '.join(TEXT_KEYS)}, or chat {CHAT_KEYS[0]}"
    )


def _unpadded(batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The rows of a ready batch, each without its masked tokens."""
    ids = batch["input_ids"]
    if ids.ndim == 1:
        batch = {name: value[None] if value.shape[:1] == ids.shape else value for name, value in batch.items()}
        ids = batch["input_ids"]
    mask = batch.pop("attention_mask", torch.ones_like(ids)).bool()
    for row in range(ids.shape[0]):
        kept = mask[row]
        yield {
            name: value[row][kept] if value.shape[:2] == ids.shape else value[row]
            for name, value in batch.items()
            if name != "labels" and value.shape[:1] == ids.shape[:1]
        }


def _batched(rows: Sequence[dict[str, Tensor]], batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Rows of one shape together, in the order in which each shape first came."""
    alike: dict[tuple[Any, ...], list[dict[str, Tensor]]] = {}
    for row in rows:
        key = tuple((name, tuple(row[name].shape), row[name].dtype) for name in sorted(row))
        alike.setdefault(key, []).append(row)
    for group in alike.values():
        for start in range(0, len(group), batch_size):
            part = group[start : start + batch_size]
            yield {name: torch.stack([row[name] for row in part]) for name in part[0]}


def _ids(encoded: Any) -> Tensor:
    ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    return ids[0] if ids.ndim == 2 else ids


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (Tensor, list, tuple)) and not (
        isinstance(value, (list, tuple)) and any(isinstance(item, str) for item in value)
    )


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ValueError("calibration text needs a tokenizer: pass tokenizer=AutoTokenizer.from_pretrained(...)")
    return tokenizer
