"""Checkpoints of which only what is asked for is opened: in a folder, the cache of a hub, or on a server."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils._headers import build_hf_headers

from sparseautomodel.checkpoint import (
    Checkpoint,
    LazyTensor,
    Reads,
    StoredTensor,
    hub_finder,
    local_finder,
    open_checkpoint,
    open_files,
    read_weight_map,
)
from sparseautomodel.ranged import DownloadError, RemoteFile, new_client, remote_tensors
from sparseautomodel.safetensors_file import CheckpointError

File = str | RemoteFile


@dataclass(frozen=True)
class Source:
    """Names of tensors, and the file that holds each. No file is opened before a tensor of it is asked for."""

    name: str
    files: Mapping[str, str]
    """Tensor -> name of its file."""
    find: Callable[[str], File | None]
    """Name of a file -> where it is."""
    opened: Checkpoint | None = None
    """Where the names were in no index but in the file itself."""

    def open(self, names: Iterable[str]) -> Checkpoint:
        """A checkpoint of these tensors alone; only headers are read.

        Raises:
            CheckpointError: a file or tensor is missing or damaged.
            DownloadError: a server does not give it.
        """
        names = list(names)
        if self.opened is not None:
            return self.opened.only(names)
        files = {file: self._find(file) for file in dict.fromkeys(self.files[name] for name in names)}
        local = [place for place in files.values() if isinstance(place, str)]
        reads = Reads()
        tensors: dict[str, LazyTensor] = dict(open_files(local, reads))
        for place in files.values():
            if isinstance(place, RemoteFile):
                tensors |= remote_tensors(place, reads)
        missing = [f"{name} is in the index but not in {self.files[name]}" for name in names if name not in tensors]
        if missing:
            raise CheckpointError(f"the index of {self.name} does not fit its files:\n  " + "\n  ".join(missing))
        return Checkpoint(cast(dict[str, StoredTensor], tensors), local, reads).only(names)

    def versions(self, names: Iterable[str]) -> dict[str, list[Any]]:
        """What tells whether a file has changed: of each that holds one of `names`, its place, length and date (on a
        server: its tag)."""
        result: dict[str, list[Any]] = {}
        for file in sorted({self.files[name] for name in names}):
            place = self._find(file)
            if isinstance(place, RemoteFile):
                if place.tag is None:
                    place.exists()
                result[file] = [place.url, place.nbytes, place.tag]
            else:
                status = os.stat(place)
                result[file] = [os.path.realpath(place), status.st_size, status.st_mtime_ns]
        return result

    def is_remote(self, names: Iterable[str]) -> bool:
        return any(isinstance(self._find(file), RemoteFile) for file in {self.files[name] for name in names})

    def _find(self, file: str) -> File:
        place = self.find(file)
        if place is None:
            raise CheckpointError(f"the index of {self.name} names {file}, which is not there")
        return place


def is_url(name_or_path: str | os.PathLike[str]) -> bool:
    return str(name_or_path).startswith(("http://", "https://"))


def open_source(
    name_or_path: str | os.PathLike[str],
    *,
    subfolder: str = "",
    variant: str | None = None,
    use_safetensors: bool | None = None,
    **hub: Any,
) -> Source:
    """The checkpoint in a folder, in a hub repository, or below an address (`http://server/folder`).

    Files of a repository that are in the cache are read there; of others only ranges are fetched, and nothing is added
    to the cache but the index.

    Raises:
        CheckpointError: there is no checkpoint, or its index is damaged.
        DownloadError: a server cannot be reached or does not answer.
    """
    root = Path(name_or_path)
    if is_url(name_or_path):
        find = _remote_finder(str(name_or_path), subfolder)
    elif root.is_dir():
        find = local_finder(root / subfolder)
    else:
        find = _repository_finder(str(name_or_path), subfolder, hub)
    name, stem = str(name_or_path), f".{variant}" if variant else ""
    if use_safetensors is not False:
        single, index = find(f"model{stem}.safetensors"), find(f"model.safetensors.index{stem}.json")
        if index is not None and single is None:
            return Source(name, _read_index(index), find)
        if isinstance(single, RemoteFile):
            reads = Reads()
            remote = cast(dict[str, StoredTensor], remote_tensors(single, reads))
            opened = Checkpoint(remote, [], reads)
            return Source(name, dict.fromkeys(opened, f"model{stem}.safetensors"), find, opened)
        if single is not None and index is None:
            opened = open_files([single])
            return Source(name, dict.fromkeys(opened, f"model{stem}.safetensors"), find, opened)
    if is_url(name_or_path):
        raise CheckpointError(f"{name} has neither model{stem}.safetensors nor its index")
    opened = open_checkpoint(name_or_path, subfolder=subfolder, variant=variant, use_safetensors=use_safetensors, **hub)
    return Source(name, {one: opened[one].file for one in opened}, lambda file: file, opened)


def fetch_configs(url: str, subfolder: str = "") -> tempfile.TemporaryDirectory[str]:
    """A temporary folder with the config files below an address."""
    folder, client = tempfile.TemporaryDirectory(), new_client()
    for name in ("config.json", "generation_config.json"):
        file = _remote_file(url, subfolder, name, client)
        if file.exists():
            Path(folder.name, name).write_bytes(file.whole())
        elif name == "config.json":
            folder.cleanup()
            raise DownloadError(f"{file.url} is not there: an address must be that of a folder with config.json")
    return folder


def _read_index(index: File) -> dict[str, str]:
    if isinstance(index, str):
        weight_map, place = read_weight_map(index), index
    else:
        place = index.url
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.write(index.whole())
            file.flush()
            weight_map = read_weight_map(file.name)
    outside = sorted({shard for shard in weight_map.values() if os.path.basename(shard) != shard})
    if outside or not weight_map:
        raise CheckpointError(
            f"{place} points outside its folder: {', '.join(outside)}" if outside else f"{place} names no tensor"
        )
    return weight_map


def _remote_file(url: str, subfolder: str, file: str, client: httpx2.Client) -> RemoteFile:
    return RemoteFile("/".join(part.strip("/") for part in (url, subfolder, file) if part), client=client)


def _remote_finder(url: str, subfolder: str) -> Callable[[str], File | None]:
    known: dict[str, RemoteFile | None] = {}
    client = new_client()

    def find(file: str) -> RemoteFile | None:
        if file not in known:
            remote = _remote_file(url, subfolder, file, client)
            known[file] = remote if remote.exists() else None
        return known[file]

    return find


def _repository_finder(name: str, subfolder: str, hub: Mapping[str, Any]) -> Callable[[str], File | None]:
    known: dict[str, File | None] = {}
    revision = hub.get("revision") or "main"
    fetch = hub_finder(name, subfolder, dict(hub))
    client = functools.cache(new_client)  # made when the first file is not in the cache
    may_fetch = not (hub.get("local_files_only") or constants.is_offline_mode())

    def look(file: str) -> File | None:
        path = f"{subfolder}/{file}" if subfolder else file
        cached = try_to_load_from_cache(name, path, cache_dir=hub.get("cache_dir"), revision=revision)
        if isinstance(cached, str) and not hub.get("force_download"):
            return cached
        if not may_fetch or not file.endswith(".safetensors"):
            return fetch(file)
        url = hf_hub_url(name, file, subfolder=subfolder or None, revision=revision)
        remote = RemoteFile(url, build_hf_headers(token=hub.get("token")), client())
        return remote if remote.exists() else None

    def find(file: str) -> File | None:
        if file not in known:
            known[file] = look(file)
        return known[file]

    return find
