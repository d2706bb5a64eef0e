"""Write a checkpoint tensor by tensor, whatever its size, and make it appear only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import json
import math
import os
import re
import secrets
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from sparseautomodel.checkpoint import LazyTensor, StoredTensor
from sparseautomodel.safetensors_file import DTYPE_NAMES, CheckpointError
from sparseautomodel.shards import PATTERN, open_shards, shard_files
from sparseautomodel.threads import SIDE_BY_SIDE

SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.jinja",
    "additional_chat_templates/*",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
    "audio_tokenizer_config.json",
    "normalizer.json",
    "*.tiktoken",
    "*.spm",
    "spiece.model",
    "spm*.model",
    "sentencepiece*.model",
    "prophetnet.tokenizer",
    "*_vocab.json",
    "bpe.codes",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "word_*.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
"""What is copied beside the weights: all that a tokenizer, processor or remote code needs. Never weights, recipes or
reports of an earlier run."""

COPY_ROWS_NBYTES = 16 << 20
"""A tensor that is stored as it was passes through memory in pieces of this size."""

COMPUTED_AHEAD = 6
"""Tensors that are computed before they are written: those of about two layers."""


@contextlib.contextmanager
def appear_when_complete(output: str | os.PathLike[str], nbytes: int) -> Iterator[Path]:
    """A temporary folder beside `output` that takes its name when the block ends well, and is removed otherwise.

    Folders that killed runs to the same output have left are removed first. A symbolic link is followed.

    Raises:
        FileExistsError: `output` is a file, or a folder with something in it.
        OSError: `nbytes` do not fit on the disk, or the place cannot be written to; nothing is left behind.
    """
    target = Path(output).resolve()
    _refuse_existing(target)
    _remove_leftovers(target)
    temporary, lock = _locked_folder(target)
    try:
        if shutil.disk_usage(temporary).free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield temporary
        _refuse_existing(target)
        os.replace(temporary, target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(target.parent).free
        sizes = f"{output} takes {nbytes / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free in {target.parent}"
        raise OSError(error.errno, f"{error.strerror}: {sizes}. Nothing was kept") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def write_tensors(
    tensors: Mapping[str, LazyTensor],
    folder: Path,
    max_shard_nbytes: int,
    on_tensor: Callable[[str, int], None] = lambda name, nbytes: None,
) -> None:
    """Safetensors files, and their index where there are several. Holds the few tensors that are computed ahead.

    Tensors are computed in the order of `tensors`, each written to its place as it comes, so that nothing waits in
    memory for the order of the file. `on_tensor` is told the name and bytes of each that is written.
    """
    shards = _shards(tensors, max_shard_nbytes)
    weight_map = {}
    workers = ThreadPoolExecutor(SIDE_BY_SIDE)
    try:
        for number, names in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map.update(dict.fromkeys(names, file))
            _write_shard({name: tensors[name] for name in names}, folder / file, workers, on_tensor)
    finally:
        workers.shutdown(cancel_futures=True)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
        index = {"metadata": {"total_size": total, "total_parameters": parameters}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def consolidate(
    folder: str | os.PathLike[str], output: str | os.PathLike[str], max_shard_size: int | str = "5GB"
) -> None:
    """Write the checkpoint that stock tools read from what `save_pretrained(..., distributed_checkpoint=True)` wrote.

    One process calls it. It holds a few tensors at a time and changes none; config.json and the tokenizer come along.
    (What torch has for this fails for integers, which compressed layers are stored as.)

    Raises:
        CheckpointError: `folder` holds no distributed checkpoint, or not all of it.
        FileExistsError: there is something in `output`.
    """
    if not shard_files(folder):
        raise CheckpointError(f"{folder} holds no distributed checkpoint: it has no files {PATTERN}")
    checkpoint = open_shards(folder)
    with appear_when_complete(output, checkpoint.nbytes) as target:
        write_tensors(checkpoint, target, parse_size(max_shard_size))
        shutil.copyfile(Path(folder) / "config.json", target / "config.json")
        copy_side_files(folder, target)


def copy_side_files(source: str | os.PathLike[str], folder: Path, subfolder: str = "", **hub: Any) -> list[str]:
    """Copy what `SIDE_FILES` names from a local folder or a hub repository; returns the names."""
    root = Path(source)
    if not root.is_dir():
        names = ("revision", "token", "cache_dir", "local_files_only")
        patterns = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in SIDE_FILES]
        root = Path(
            snapshot_download(str(source), allow_patterns=patterns, **{key: hub[key] for key in names if key in hub})
        )
    copied = []
    for pattern in SIDE_FILES:
        for file in sorted((root / subfolder).glob(pattern)):
            name = file.relative_to(root / subfolder)
            if file.is_file() and str(name) not in copied:
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, folder / name)
                copied.append(str(name))
    return copied


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str, allow_nan=False) + "\n")


def parse_size(size: int | str) -> int:
    """Bytes from a number, or from text such as `5GB`, `500MB`, `6GiB`.

    >>> parse_size("6GiB")
    6442450944
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B\s*", str(size))
    if match is None:
        raise ValueError(f"size {size!r} is not a number of bytes or text such as '5GB' or '6GiB'")
    power = "_KMGT".index(match[2].upper() or "_")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _write_shard(
    tensors: Mapping[str, LazyTensor], path: Path, workers: ThreadPoolExecutor, on_tensor: Callable[[str, int], None]
) -> None:
    # Readers view the bytes of a file as numbers in place, so the widest numbers come first and all are aligned.
    offsets, offset = {}, 0
    for name in sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize):
        offsets[name] = (offset, offset + tensors[name].nbytes)
        offset = offsets[name][1]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (begin, end) in offsets.items():
        tensor = tensors[name]
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        if hasattr(os, "posix_fallocate") and offset:
            os.posix_fallocate(descriptor, 0, start + offset)  # a full disk is known now, not at the last tensor
        _write_at(descriptor, struct.pack("<Q", len(header)) + header, 0)
        for name, pieces in _computed_ahead(tensors, workers):
            at = start + offsets[name][0]
            for piece in pieces:
                at += _write_at(descriptor, _bytes_of(piece), at)
            if at != start + offsets[name][1]:
                raise RuntimeError(f"{name} came out {at - start - offsets[name][1]} bytes longer than its shape says")
            on_tensor(name, tensors[name].nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _computed_ahead(
    tensors: Mapping[str, LazyTensor], workers: ThreadPoolExecutor
) -> Iterator[tuple[str, Iterable[torch.Tensor]]]:
    """Each tensor with its values, in order; the next few are computed while one is written."""
    ahead: deque[tuple[str, Future[torch.Tensor] | None]] = deque()
    names = iter(tensors)
    while True:
        for name in itertools.islice(names, COMPUTED_AHEAD - len(ahead)):
            stored = isinstance(tensors[name], StoredTensor)
            ahead.append((name, None if stored else workers.submit(tensors[name].__getitem__, ...)))
        if not ahead:
            return
        name, future = ahead.popleft()
        yield name, _pieces(tensors[name]) if future is None else [future.result()]


def _pieces(tensor: LazyTensor) -> Iterator[torch.Tensor]:
    """A stored tensor in runs of rows."""
    if len(tensor.shape) == 0:
        yield tensor[...]
        return
    rows = tensor.shape[0]
    step = max(1, COPY_ROWS_NBYTES * rows // max(1, tensor.nbytes))
    for start in range(0, rows, step):
        yield tensor[start : start + step]


def _bytes_of(values: torch.Tensor) -> Any:
    if not values.numel():
        return b""
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _write_at(descriptor: int, data: Any, offset: int) -> int:
    written, view = 0, memoryview(data)
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], offset + written)
    return written


def _shards(tensors: Mapping[str, LazyTensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _refuse_existing(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        if os.path.ismount(target):  # it cannot be renamed over, which would show after all the work
            raise OSError(errno.EBUSY, f"output {target} is a mount point. Name a folder in it")
        return
    if os.path.lexists(target):
        raise FileExistsError(f"output {target} exists already. Name a new folder, or remove it first")


def _locked_folder(target: Path) -> tuple[Path, int]:
    """A new folder beside `target`, and the descriptor that locks it until it is closed or this process ends.

    The system lets go of the lock of a killed process, which tells its folder from one that is still written to;
    numbers of processes would not, they are used again.
    """
    folder = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise OSError(error.errno, f"cannot write to {target.parent}: {error.strerror}") from error
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return _locked_folder(target)  # another run took it for a leftover before it was locked
    if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
        return folder, descriptor
    os.close(descriptor)
    return _locked_folder(target)


def _remove_leftovers(target: Path) -> None:
    """Folders of earlier runs to the same output that were killed."""
    for folder in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with contextlib.suppress(OSError):  # it has just been removed, or is not ours to remove
            descriptor = os.open(folder, os.O_RDONLY)
            if _lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether the file is locked now: False where another run has the lock, None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
