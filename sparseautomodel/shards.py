"""Distributed checkpoints: the safetensors files that the ranks of a shared model write side by side.

Each file holds the slices of one rank and says in its header where they lie (torch.distributed.checkpoint's
`HuggingFaceStorageWriter`). Read here as one checkpoint of whole lazy tensors, on any number of processes.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sparseautomodel.checkpoint import Checkpoint, Reads, StoredTensor, open_files
from sparseautomodel.safetensors_file import CheckpointError

PATTERN = "shard-[0-9]*-model-[0-9]*-of-[0-9]*.safetensors"


def shard_files(folder: str | os.PathLike[str]) -> list[str]:
    """The files of a distributed checkpoint in `folder`, in the order of the ranks; empty where there is none."""
    return [str(path) for path in sorted(Path(folder).glob(PATTERN))] if os.path.isdir(folder) else []


def open_shards(folder: str | os.PathLike[str]) -> Checkpoint:
    """The whole tensors of a distributed checkpoint, lazily: a slice reads the bytes of that slice alone.

    Raises:
        CheckpointError: a file is damaged, or parts of a tensor are in no file; all are named.
    """
    files = shard_files(folder)
    chunks: dict[str, list[_Chunk]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            info = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
        for name, tensor in open_files([path]).items():
            offsets = info.get(name, {}).get("saved_offsets", [0] * len(tensor.shape))
            chunks.setdefault(name, []).append(_Chunk(tuple(offsets), tensor))
    reads, problems = Reads(), []
    tensors: dict[str, StoredTensor] = {}
    for name, parts in chunks.items():
        ends = [[offset + size for offset, size in zip(one.offsets, one.tensor.shape, strict=True)] for one in parts]
        shape = tuple(max(sizes) for sizes in zip(*ends, strict=True))
        held = sum(math.prod(one.tensor.shape) for one in parts)
        if held != math.prod(shape):
            problems.append(f"{name}: {held} numbers of {math.prod(shape)} are in the files")
        dtype = parts[0].tensor.dtype
        data = _Assembled(shape, dtype, parts)
        tensors[name] = StoredTensor(name, shape, dtype, parts[0].tensor.file, data, reads)
    if problems:
        raise CheckpointError(f"{folder} lacks the file of a rank:\n  " + "\n  ".join(problems))
    return Checkpoint(tensors, files, reads)


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    tensor: StoredTensor


class _Assembled:
    """Slicing of one tensor whose parts are in several files."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[_Chunk]) -> None:
        self._shape, self._dtype, self._chunks = shape, dtype, chunks

    def __getitem__(self, index: Any) -> Tensor:
        given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        ranges = [one.indices(size)[:2] for one, size in zip(given, self._shape, strict=False)]
        ranges += [(0, size) for size in self._shape[len(ranges) :]]
        result = torch.empty([max(0, stop - start) for start, stop in ranges], dtype=self._dtype)
        for chunk in self._chunks:
            inside, outside = [], []
            for (start, stop), offset, size in zip(ranges, chunk.offsets, chunk.tensor.shape, strict=True):
                first, last = max(start, offset), min(stop, offset + size)
                inside.append(slice(first - offset, max(first, last) - offset))
                outside.append(slice(first - start, max(first, last) - start))
            if all(one.stop > one.start for one in inside):
                result[tuple(outside)] = chunk.tensor[tuple(inside) or ...]
        return result
