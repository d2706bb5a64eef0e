"""Tensors of safetensors files on an HTTP server: only the header of a file and what is asked for are fetched.

A request that fails is tried again a few times and goes on where it stopped; what remains is a `DownloadError`.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

import httpx2
import torch

from sparseautomodel.checkpoint import LazyTensor, Reads
from sparseautomodel.safetensors_file import SAFETENSORS_DTYPES, CheckpointError

ATTEMPTS = 5
"""How often one range is asked for before it is given up."""

FIRST_WAIT = 0.25
"""Seconds before the second attempt; doubled before each further one."""

TIMEOUT = 30.0
"""Seconds for a connection to be made, or for the next bytes to come."""

MAX_HEADER_NBYTES = 100 << 20
"""The safetensors format allows no longer header."""

TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class DownloadError(CheckpointError):
    """A server does not give what was asked for. Names the address, the bytes, the reason and the attempts."""


def new_client() -> httpx2.Client:
    """Connections that several files of a server can share. They are closed when the last file is gone."""
    return _Client(follow_redirects=True, timeout=TIMEOUT)


class _Client(httpx2.Client):
    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process parts of it may be gone already
            self.close()


class RemoteFile:
    """A file on a server that answers requests for ranges of bytes."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, client: httpx2.Client | None = None) -> None:
        self.url, self._headers = url, dict(headers or {}) | {"Accept-Encoding": "identity"}
        self._client, self._lock = client or new_client(), threading.Lock()
        self.tag: str | None = None
        """What the server calls this version of the file: its ETag, or when it was changed."""
        self.nbytes: int | None = None

    def exists(self) -> bool:
        """Whether the server has the file.

        Raises:
            DownloadError: the server cannot be reached, or does not say.
        """
        try:
            self.read(0, 1)
        except DownloadError as error:
            if isinstance(error.__cause__, httpx2.HTTPStatusError) and error.__cause__.response.status_code == 404:
                return False
            raise
        return True

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes `start` to `stop`."""
        data = bytearray(stop - start)
        done, wait = 0, FIRST_WAIT
        for attempt in range(1, ATTEMPTS + 1):
            try:
                for piece in self._pieces(start + done, stop):
                    data[done : done + len(piece)] = piece
                    done += len(piece)
                if done == len(data):
                    return data
                reason: Exception = EOFError(f"the answer ends after {done} of {len(data)} bytes")
            except httpx2.HTTPStatusError as error:
                reason = error
                if error.response.status_code not in TRANSIENT:
                    break
            except httpx2.TransportError as error:
                reason = error
            if attempt < ATTEMPTS:
                time.sleep(wait)
                wait *= 2
        raise DownloadError(
            f"bytes {start} to {stop} of {self.url} did not come, {attempt} attempt(s): {reason}"
        ) from reason

    def whole(self) -> bytes:
        """All bytes of a small file."""
        self.read(0, 1)
        return bytes(self.read(0, self.nbytes or 0))

    def _pieces(self, start: int, stop: int) -> Any:
        headers = self._headers | {"Range": f"bytes={start}-{stop - 1}"}
        with self._client.stream("GET", self.url, headers=headers) as response:
            response.raise_for_status()
            if response.status_code != 206:
                raise DownloadError(
                    f"{self.url}: the server sends the whole file where {stop - start} bytes of it were asked for. "
                    "Download the files, and pass their folder"
                )
            self._check(response.headers, start)
            length = 0
            for piece in response.iter_raw():
                length += len(piece)
                if length > stop - start:
                    raise DownloadError(f"{self.url}: the server sends more than the {stop - start} bytes asked for")
                yield piece

    def _check(self, headers: Mapping[str, str], start: int) -> None:
        """That these are the bytes asked for, of the file that the first answer was from."""
        span, _, size = headers.get("content-range", "").removeprefix("bytes ").partition("/")
        if span.partition("-")[0].strip() != str(start):
            raise DownloadError(f"{self.url}: asked for bytes from {start} on, the server sends {span or 'others'}")
        tag = headers.get("x-linked-etag") or headers.get("etag") or headers.get("last-modified") or size
        with self._lock:
            if self.tag not in (None, tag):
                raise DownloadError(f"{self.url} was changed while it was read")
            self.tag, self.nbytes = tag, int(size) if size.isdigit() else self.nbytes


class RemoteTensor(LazyTensor):
    """One tensor of a file on a server. `tensor[...]` fetches its bytes; any part of it fetches all of them."""

    def __init__(self, name: str, entry: Mapping[str, Any], file: RemoteFile, start: int, reads: Reads) -> None:
        super().__init__(name, tuple(entry["shape"]), SAFETENSORS_DTYPES[entry["dtype"]])
        self.file = file.url
        self._remote, self._reads, self._span = file, reads, [start + one for one in entry["data_offsets"]]

    def __getitem__(self, index: Any) -> torch.Tensor:
        start, stop = self._span
        if start == stop:
            return torch.empty(self.shape, dtype=self.dtype)[index]
        data = self._remote.read(start, stop)
        self._reads.add(self.name, len(data))
        return torch.frombuffer(data, dtype=self.dtype).view(self.shape)[index]


def remote_tensors(file: RemoteFile, reads: Reads) -> dict[str, RemoteTensor]:
    """The tensors of a safetensors file, from its header, which is fetched and checked.

    Raises:
        DownloadError: the header does not come.
        CheckpointError: it is none of the safetensors format, or the file is shorter than it says.
    """
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > MAX_HEADER_NBYTES or (file.nbytes is not None and 8 + length > file.nbytes):
        raise CheckpointError(f"{file.url} is no safetensors file, or damaged: its header would be {length} bytes long")
    try:
        header = json.loads(bytes(file.read(8, 8 + length)))
        header.pop("__metadata__", None)
        tensors = {name: RemoteTensor(name, entry, file, 8 + length, reads) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DownloadError):
            raise
        raise CheckpointError(f"{file.url} is no safetensors file, or damaged: {error!r}") from error
    for name, tensor in tensors.items():
        start, stop = tensor._span
        if stop - start != math.prod(tensor.shape) * tensor.dtype.itemsize:
            raise CheckpointError(f"{name} in {file.url} is {stop - start} bytes long, its shape says {tensor.nbytes}")
        if file.nbytes is not None and stop > file.nbytes:
            raise CheckpointError(f"{file.url} is truncated: {name} ends at byte {stop} of {file.nbytes}")
    return tensors
