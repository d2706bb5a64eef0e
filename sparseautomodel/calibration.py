"""Calibration data: whatever the user has, as batches of token rows, with nothing dropped silently.

Rows are batched with rows of their own length, so there is no padding, no mask to get wrong, and the batch size changes
no statistic.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparseautomodel.rows import MASKS, Row, read_rows, tokens_of


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
    model: nn.Module | None = None,
    num_samples: int = 512,
    max_length: int = 2048,
    batch_size: int = 8,
    held_out: int = 0,
) -> Batches:
    """The first `num_samples` rows of `data`, cut to `max_length` tokens.

    Args:
        data: None for prose that every CPython carries; a path to .txt (one running text, cut into rows), .jsonl,
            .json, .csv or .parquet; the name of a `datasets` data set, or one that is loaded; texts; dicts with
            `input_ids`, `text` or chat `messages`; or an iterable of ready batches such as a DataLoader. A dict with
            `input_ids` `[tokens]` is one row. With `[rows, tokens]`, or without `input_ids`, it is a batch: other
            inputs, such as images, stay with their rows.
        tokenizer: needed unless the rows have `input_ids`; a processor for messages with images.
        model: what the rows are for; it needs no weights. Columns that its forward does not take are left out, rows are
            cut to the positions that it has, and the decoder of an encoder-decoder gets the row's `labels`, or the same
            text as the encoder.
        held_out: up to so many rows more, as the `held_out` of the result: to measure on what calibration has not seen.

    Raises:
        ValueError: no rows are left, a row cannot be read, or a tokenizer is missing; says which row and what to do.
    """
    if num_samples < 1 or max_length < 1 or batch_size < 1:
        raise ValueError(
            f"num_samples={num_samples}, max_length={max_length} and batch_size={batch_size} must be 1 or more"
        )
    limit = min([max_length, *_positions(model, tokenizer)])
    left = _Left()
    found = _fitting(read_rows(data, tokenizer, limit), model, limit, left)
    rows = list(itertools.islice(found, num_samples))
    notes = [f"{len(rows)} rows were found, {num_samples} were asked for"] if len(rows) < num_samples else []
    notes += left.notes(limit)
    if not rows:
        raise ValueError(f"no calibration rows are left ({'; '.join(notes)}): give data with tokens in it")
    batches = tuple(_batched(rows, batch_size))
    tokens = sum(batch["input_ids"].numel() for batch in batches if "input_ids" in batch)
    return Batches(batches, len(rows), tokens, tuple(notes), tuple(itertools.islice(found, held_out)))


def _positions(model: nn.Module | None, tokenizer: Any) -> Iterator[int]:
    """Limits on the length of a row, where they are known."""
    if model is not None:
        config: Any = model.config
        known = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        if isinstance(known, int) and known > 0:
            yield known
        # What the model has may include positions that stand for padding.
        yield getattr(tokenizer, "model_max_length", known or sys.maxsize)


@dataclass
class _Left:
    """What became of rows that are not as they were given."""

    empty: int = 0
    long: int = 0
    cut: int = 0
    single: int = 0
    unknown: set[str] = field(default_factory=set)

    def notes(self, limit: int) -> list[str]:
        texts = (
            (self.empty, "empty rows were left out"),
            (self.long, f"rows with other inputs than tokens are longer than {limit} tokens and were left out"),
            (self.cut, f"rows were cut to {limit} tokens"),
            (self.single, "rows have one token only"),
        )
        found = [f"{count} {text}" for count, text in texts if count]
        if self.unknown:
            found.append(f"left out, since the model's forward does not take them: {', '.join(sorted(self.unknown))}")
        return found


def _fitting(rows: Iterable[Row], model: nn.Module | None, limit: int, left: _Left) -> Iterator[Row]:
    """The rows that have tokens, as the model takes them; what happened to them is counted."""
    takes = _parameters(model)
    for row in rows:
        labels = row.pop("labels", None)
        tokens = row["input_ids"].shape[1] if "input_ids" in row else None
        if tokens == 0:
            left.empty += 1
            continue
        if tokens and model is not None:
            _check_ids(row["input_ids"], model)
        if model is not None and "decoder_input_ids" in takes:
            row = _with_decoder_inputs(row, labels, model)
        unknown = [name for name in row if takes and name not in takes]
        left.unknown.update(unknown)
        row = {name: value for name, value in row.items() if name not in unknown}
        if not row:
            raise ValueError(f"the model's forward takes none of {', '.join(unknown)}. It takes {', '.join(takes)}")
        cut = _cut(row, limit)
        if cut is None:
            left.long += 1
            continue
        left.cut += any(cut[name].shape != row[name].shape for name in row)
        left.single += tokens == 1
        yield cut


def _check_ids(ids: Tensor, model: nn.Module) -> None:
    """Token ids that the embedding does not have are those of another tokenizer."""
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(embedding, "num_embeddings", None)
    lowest, highest = int(ids.min()), int(ids.max())
    if size is not None and (lowest < 0 or highest >= size):
        raise ValueError(
            f"a row has the token id {lowest if lowest < 0 else highest}, and the model has ids from 0 to {size - 1}: "
            "give the model's own tokenizer, or data that was tokenized with it"
        )


def _parameters(model: nn.Module | None) -> Sequence[str]:
    """What the model's forward takes by name; nothing where it takes anything, or is not known."""
    if model is None:
        return ()
    kinds = inspect.signature(model.forward).parameters
    return [name for name, kind in kinds.items() if kind.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)]


def _with_decoder_inputs(row: Row, labels: Tensor | None, model: nn.Module) -> Row:
    """Teacher forcing: the decoder reads the labels, or else what the encoder reads, shifted by one."""
    config: Any = model.config
    if not config.is_encoder_decoder or "decoder_input_ids" in row or "decoder_inputs_embeds" in row:
        return row
    given = labels[labels >= 0][None] if labels is not None and labels.ndim == 2 else row.get("input_ids")
    if given is None:
        raise ValueError(
            f"{type(model).__name__} has a decoder, and the rows have only {', '.join(row)}: add labels or "
            "decoder_input_ids to each row"
        )
    starts = (getattr(config, f"{kind}_token_id", None) for kind in ("decoder_start", "pad", "bos"))
    start = next((token for token in starts if token is not None), 0)
    return row | {"decoder_input_ids": torch.cat([given.new_full((1, 1), start), given[:, :-1]], dim=1)}


def _cut(row: Row, limit: int) -> Row | None:
    """The row with no more than `limit` tokens; None where its tokens belong to other inputs, such as images."""
    lengths = {ids: row[ids].shape[1] for ids in MASKS if ids in row}
    if all(length <= limit for length in lengths.values()):
        return row
    if any(tokens_of(name, value, row) is None for name, value in row.items()):
        return None
    return {name: value[:, :limit] for name, value in row.items()}


def _batched(rows: Sequence[Row], batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Rows of one shape together, in the order in which each shape first came."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key: tuple[Any, ...] = tuple((name, tuple(row[name].shape), row[name].dtype) for name in sorted(row))
        if any(len(value) != 1 for value in row.values()):
            key = (*key, len(alike))  # inputs that are not one a row cannot be put together
        alike.setdefault(key, []).append(row)
    for group in alike.values():
        for start in range(0, len(group), batch_size):
            part = group[start : start + batch_size]
            yield {name: torch.cat([row[name] for row in part]) for name in part[0]}
