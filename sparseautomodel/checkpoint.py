"""Checkpoints on disk: opened strictly, read lazily, every read counted.

`open_checkpoint` looks at file headers only. What it returns maps each tensor name to a `StoredTensor` that knows its
shape and dtype and reads when it is sliced, which is all that transformers asks of an entry of `state_dict=`.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import struct
import threading
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils.hub import cached_file

from sparseautomodel.safetensors_file import (
    DTYPE_NAMES,
    SAFETENSORS_DTYPES,
    CheckpointError,
    FileTensor,
    SafetensorsFile,
)

HUB_KEYS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
"""Arguments that say where a hub repository comes from."""

SHARD_NAME = re.compile(r"(?P<stem>.+)-\d+-of-\d+\.safetensors")


class LazyTensor:
    """A tensor that has not been read: what transformers, the writer and the transforms need to know of it."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return DTYPE_NAMES[self.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        raise NotImplementedError


class StoredTensor(LazyTensor):
    """One tensor of a file. `tensor[...]` reads it, `tensor[a:b]` reads rows `a` to `b` and no other byte."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, file: str, data: Any, reads: Reads):
        super().__init__(name, shape, dtype)
        self.file, self._data, self._reads = file, data, reads

    def __getitem__(self, index: Any) -> torch.Tensor:
        values = self._data[index]
        if isinstance(self._data, torch.Tensor):
            values = values.clone()  # whoever reads may write to what it got
        self._reads.add(self.name, values.nbytes)
        return values

    def place(self) -> tuple[str, int] | None:
        """The file and the offset of the bytes in it, where they lie there as they are. Whoever reads them counts."""
        return getattr(self._data, "place", None)

    def count(self) -> None:
        self._reads.add(self.name, self.nbytes)

    def __repr__(self) -> str:
        return f"StoredTensor({self.name}, {tuple(self.shape)}, {self.dtype}, {os.path.basename(self.file)})"


class Reads:
    """Bytes read of each tensor. Loading is threaded, so counting takes a lock."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, nbytes: int) -> None:
        with self._lock:
            self._bytes[name] += nbytes

    def nbytes(self, name: str) -> int:
        return self._bytes[name]


class Checkpoint(Mapping[str, StoredTensor]):
    """Lazy named tensors in the order of the files. Nothing is read until a tensor is sliced."""

    def __init__(self, tensors: dict[str, StoredTensor], files: list[str], reads: Reads) -> None:
        self._tensors, self.files, self._reads = tensors, files, reads

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.values())

    def only(self, names: Iterable[str]) -> Checkpoint:
        """The same files with these tensors alone."""
        return Checkpoint({name: self[name] for name in names}, self.files, self._reads)

    def reads(self) -> dict[str, tuple[float, int]]:
        """Of each tensor: how many times its bytes were read, and how many bytes that was."""
        result = {}
        for name, tensor in self.items():
            nbytes = self._reads.nbytes(name)
            times = nbytes / tensor.nbytes if tensor.nbytes else 1.0
            result[name] = (int(times) if times == int(times) else round(times, 3), nbytes)
        return result


def open_checkpoint(
    name_or_path: str | os.PathLike[str],
    *,
    subfolder: str = "",
    variant: str | None = None,
    use_safetensors: bool | None = None,
    **hub: Any,
) -> Checkpoint:
    """The checkpoint in a folder or hub repository, with its headers read and checked against the index.

    `hub` is where a repository comes from: revision, token, cache_dir, local_files_only, force_download, proxies.

    Raises:
        CheckpointError: a file or tensor is missing, truncated, stale, or stored twice; all are named.
        TypeError: an argument that nothing here takes.
    """
    if unknown := sorted(set(hub) - set(HUB_KEYS)):
        known = ", ".join(("subfolder", "variant", "use_safetensors", *HUB_KEYS))
        raise TypeError(f"unexpected argument {', '.join(unknown)}. What a checkpoint is opened with: {known}")
    root = Path(name_or_path)
    find = local_finder(root / subfolder) if root.is_dir() else hub_finder(str(name_or_path), subfolder, hub)
    stem = f".{variant}" if variant else ""
    single, index = f"model{stem}.safetensors", f"model.safetensors.index{stem}.json"
    if use_safetensors is not False:
        single_file, index_file = find(single), find(index)
        if single_file and index_file:
            _refuse_two_checkpoints(single_file, index_file)
        if index_file and not single_file:
            return _open_sharded(index_file, find)
        if single_file:
            return open_files([single_file])
    if use_safetensors is not True:
        single_file, index_file = find(f"pytorch_model{stem}.bin"), find(f"pytorch_model.bin.index{stem}.json")
        if single_file:
            return _open_pickled([single_file])
        if index_file:
            weight_map, files = _shards_of(index_file, find)
            return _open_pickled(files, weight_map)
    raise CheckpointError(
        f"{Path(name_or_path, subfolder)} holds no checkpoint: looked for {single}, {index}"
        + ("" if use_safetensors else f", pytorch_model{stem}.bin and its index")
        + ("" if root.is_dir() else " (not a local folder either)")
    )


def open_files(files: list[str], reads: Reads | None = None) -> Checkpoint:
    """The checkpoint in these safetensors files, whatever lies beside them. Headers are read and checked.

    Raises:
        CheckpointError: a file is truncated, or a tensor is stored twice; all are named.
    """
    reads, problems = reads or Reads(), []
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        try:
            file = SafetensorsFile(path)
        except (SafetensorError, OSError) as error:
            reason = f"it is truncated or damaged: {error}" if os.access(path, os.R_OK) else "permission denied"
            problems.append(f"{path} cannot be read, {reason}")
            continue
        for name, entry in file.entries.items():
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
            if dtype is None:
                problems.append(f"{name} in {path} has dtype {entry['dtype']}, which torch does not have")
            elif name in tensors:
                problems.append(f"{name} is stored twice: in {tensors[name].file} and in {path}")
            else:
                data = FileTensor(file, name)
                tensors[name] = StoredTensor(name, tuple(entry["shape"]), dtype, path, data, reads)
    if problems:
        raise CheckpointError("the checkpoint is damaged:\n  " + "\n  ".join(problems))
    return Checkpoint(tensors, files, reads)


def local_finder(folder: Path) -> Any:
    return lambda file: str(folder / file) if (folder / file).is_file() else None


def hub_finder(name: str, subfolder: str, hub: dict[str, Any]) -> Any:
    return lambda file: cached_file(
        name,
        file,
        subfolder=subfolder,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=True,
        **hub,
    )


def read_weight_map(index_file: str) -> dict[str, str]:
    """Tensor name -> name of its file, from an index."""
    try:
        weight_map = json.loads(Path(index_file).read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index_file} is not a checkpoint index: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index_file} is not a checkpoint index: weight_map must map tensor names to file names")
    return weight_map


def _shards_of(index_file: str, find: Any) -> tuple[dict[str, str], list[str]]:
    """Tensor name -> file, and the files, from an index; every file must be there."""
    weight_map = read_weight_map(index_file)
    if not weight_map:
        raise CheckpointError(f"{index_file} names no tensor: it is damaged, or nothing was saved")
    outside = sorted({shard for shard in weight_map.values() if os.path.basename(shard) != shard})
    if outside:
        raise CheckpointError(f"{index_file} points outside its folder: {', '.join(outside)}")
    found = {shard: find(shard) for shard in sorted(set(weight_map.values()))}
    missing = [shard for shard, path in found.items() if path is None]
    if missing:
        raise CheckpointError(
            f"{index_file} names {len(missing)} file(s) that are not there: {', '.join(missing)}. "
            "Download them again, or remove the index if model.safetensors is complete"
        )
    return {name: found[shard] for name, shard in weight_map.items()}, list(found.values())


def _open_sharded(index_file: str, find: Any) -> Checkpoint:
    weight_map, files = _shards_of(index_file, find)
    checkpoint = open_files(files)
    problems = []
    for name, file in weight_map.items():
        if name not in checkpoint:
            problems.append(f"{name} is in the index but in no file")
        elif checkpoint[name].file != file:
            problems.append(
                f"{name} is in {os.path.basename(checkpoint[name].file)}, the index says {os.path.basename(file)}"
            )
    problems += [
        f"{name} is in {os.path.basename(tensor.file)} but not in the index"
        for name, tensor in checkpoint.items()
        if name not in weight_map
    ]
    problems += [f"{name} is in the folder but not in the index" for name in _stale_shards(files)]
    if problems:
        raise CheckpointError(f"{index_file} does not fit its files:\n  " + "\n  ".join(problems))
    return checkpoint


def _stale_shards(files: list[str]) -> list[str]:
    """Shards beside `files` that are named like them: left behind by an earlier save."""
    named = {os.path.basename(file) for file in files}
    stems = {match["stem"] for name in named if (match := SHARD_NAME.fullmatch(name))}
    beside = set(os.listdir(os.path.dirname(files[0]))) - named
    return sorted(name for name in beside if (match := SHARD_NAME.fullmatch(name)) and match["stem"] in stems)


def _refuse_two_checkpoints(single_file: str, index_file: str) -> None:
    """A folder may hold `model.safetensors` beside an index only when both name the same tensors."""
    single, indexed = set(open_files([single_file])), set(read_weight_map(index_file))
    if single != indexed:
        raise CheckpointError(
            f"{os.path.dirname(index_file)} holds two checkpoints: {os.path.basename(single_file)} with {len(single)} "
            f"tensors and an index with {len(indexed)}. One of them is stale: remove it"
        )


def _open_pickled(files: list[str], indexed: Iterable[str] = ()) -> Checkpoint:
    """`.bin` files: only tensors are unpickled (`weights_only`), and mapped, not read."""
    reads, problems = Reads(), []
    tensors: dict[str, StoredTensor] = {}
    names: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for path in files:
        for name, value in _unpickled(path).items():
            if not isinstance(value, torch.Tensor):
                problems.append(f"{name} in {path} is a {type(value).__name__}, not a tensor")
                continue
            if name in names:
                problems.append(f"{name} is stored twice: in {names[name]} and in {path}")
            names[name] = path
            key = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
            if value.numel() and key in seen:
                continue  # a tie: the same storage under a second name
            seen[key] = name
            tensors[name] = StoredTensor(name, tuple(value.shape), value.dtype, path, value, reads)
    problems += [f"{name} is in the index but in no file" for name in indexed if name not in names]
    if problems:
        raise CheckpointError("the checkpoint is damaged:\n  " + "\n  ".join(problems))
    return Checkpoint(tensors, files, reads)


def _unpickled(path: str) -> dict[str, Any]:
    try:
        mapped = zipfile.is_zipfile(path)  # what torch wrote before 1.6 cannot be mapped
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it is damaged, or holds more than tensors, which could run code when it is opened. "
            f"Get the checkpoint as safetensors. torch says: {str(error).splitlines()[0]}"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, LookupError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read, it is truncated or damaged: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not a dict of tensors")
    return values
