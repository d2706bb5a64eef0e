"""Tensors in mapped files whose pages are brought and let go of by hand.

Tensors of a checkpoint are mapped where they lie in the files. All others (computed, converted, cast) are written to a
file without a name and mapped there. A page that was let go of comes back by itself when it is touched.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparseautomodel.checkpoint import StoredTensor

SMALLEST = 1 << 16
"""Bytes below which a tensor stays in memory: its pages would be shared with its neighbors."""

_ARENA = 1 << 28
_LARGE_PAGE = 1 << 21
_DROP, _HUGE, _SMALL_PAGES, _POPULATE = 4, 14, 15, 22  # MADV_* of Linux; Python names not all of them
_FAST = 0.03e-9
"""Seconds a byte below which the pages of a file in memory are as large as they can be."""
_SLOW = 1e-9
"""Seconds a byte above which it is not worth to read a file again for larger pages."""

Run = tuple[int, int]
"""Address and length of whole pages."""


class MappedFiles:
    """The mapped files that hold one model."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._files: dict[str, Tensor] = {}
        self._starts: list[int] = []
        """Addresses of all mappings, sorted, and what is there: length, descriptor, whether ours to write to."""
        self._mappings: dict[int, tuple[int, int, bool]] = {}
        self._lock = threading.Lock()
        self._spill: int | None = None
        self._arena, self._arena_at, self._used = torch.empty(0, dtype=torch.uint8), 0, 0
        self._reread = True

    def stored(self, tensor: StoredTensor, count: bool = True) -> Tensor | None:
        """A checkpoint's tensor as a view on its file, counted as read; None where it has to be read to be used."""
        place = tensor.place()
        if place is None or tensor.nbytes < SMALLEST or place[1] % tensor.dtype.itemsize:
            return None
        path, offset = place
        with self._lock:
            if path not in self._files:
                self._files[path] = self._map_file(path)
        if count:
            tensor.count()
        return self._files[path][offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def keep(self, tensor: Tensor, anew: bool = False) -> Tensor:
        """The values of a tensor in host memory as a view on a file; small ones, and those mapped, as they are.

        Args:
            anew: a mapped tensor too: its pages were written to.
        """
        if tensor.nbytes < SMALLEST or tensor.is_meta or (self.holds(tensor) and not anew):
            return tensor
        plain = tensor.detach().contiguous()
        memory, at = self._reserve(plain.nbytes)
        data = plain.view(-1).view(torch.uint8).numpy().data
        assert self._spill is not None
        while data:
            count = os.pwrite(self._spill, data, at)
            data, at = data[count:], at + count
        return memory.view(plain.dtype).view(plain.shape)

    def reserve(self, nbytes: int) -> Tensor:
        """Bytes of a file to write to."""
        return self._reserve(nbytes)[0]

    def holds(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor are in one of the files."""
        return self._mapping_of(tensor.data_ptr()) is not None

    def runs(self, tensors: Iterable[Tensor]) -> list[Run]:
        """The pages of those tensors that are in files; neighbors are joined."""
        spans = []
        for tensor in tensors:
            if tensor.nbytes and self.holds(tensor):
                start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
                stop = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
                spans.append((start, stop))
        joined: list[list[int]] = []
        for start, stop in sorted(spans):
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(stop, joined[-1][1])
            else:
                joined.append([start, stop])
        return [(start, stop - start) for start, stop in joined]

    def bring(self, runs: Sequence[Run]) -> None:
        """Map all pages, reading those that are not in memory."""
        for address, length in runs:
            self._advise(address, length, _POPULATE)

    def bring_first(self, runs: Sequence[Run]) -> None:
        """`bring`, and see to it that the pages can be brought fast from now on.

        Mapping a file costs by the page. Files that were written or read in small pieces are in memory as 4 kB pages,
        and take a tenth of a second a GB; read anew, they come as pages of up to 2 MB and take a hundredth of that.
        """
        for address, length in runs:
            if self._seconds(address, length) < _FAST * length:
                continue
            self.drop([(address, length)])
            mapping = self._mapping_of(address)
            if self._seconds(address, length) < _FAST * length or not self._reread or mapping is None:
                continue
            start, (_, descriptor, own) = mapping
            if own or not hasattr(os, "posix_fadvise"):
                continue
            self.drop([(address, length)])
            os.posix_fadvise(descriptor, address - start, length, os.POSIX_FADV_DONTNEED)
            self._reread = self._seconds(address, length) < _SLOW * length

    def drop(self, runs: Sequence[Run]) -> None:
        """Let go of pages. What was written to a checkpoint's tensor in place is lost."""
        for address, length in runs:
            self._advise(address, length, _DROP)

    def rest(self) -> None:
        """Let go of all pages."""
        self.drop([(start, length) for start, (length, _, _) in self._mappings.items()])

    def touch_singly(self, runs: Sequence[Run]) -> None:
        """Rows of these will be read here and there: not more is to come with them than needed."""
        for address, length in runs:
            self._advise(address, length, _SMALL_PAGES)

    def _seconds(self, address: int, length: int) -> float:
        started = time.perf_counter()
        self._advise(address, length, _POPULATE)
        return time.perf_counter() - started

    def _advise(self, address: int, length: int, advice: int) -> None:
        # Through ctypes, which lets other threads run meanwhile; advice that a system does not know is not needed.
        if self._libc is not None:
            self._libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)

    def _mapping_of(self, address: int) -> tuple[int, tuple[int, int, bool]] | None:
        found = bisect.bisect_right(self._starts, address) - 1
        if found < 0:
            return None
        start = self._starts[found]
        return (start, self._mappings[start]) if address < start + self._mappings[start][0] else None

    def _map_file(self, path: str) -> Tensor:
        descriptor = os.open(path, os.O_RDONLY)
        length = os.fstat(descriptor).st_size
        return self._enter(mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY), length, descriptor, own=False)

    def _reserve(self, nbytes: int) -> tuple[Tensor, int]:
        with self._lock:
            start = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
            if start + nbytes > len(self._arena):
                self._arena_at += len(self._arena)
                self._arena, start = self._map_arena(max(_ARENA, nbytes)), 0
            self._used = start + nbytes
            return self._arena[start : start + nbytes], self._arena_at + start

    def _map_arena(self, nbytes: int) -> Tensor:
        if self._spill is None:
            with tempfile.TemporaryFile() as file:
                self._spill = os.dup(file.fileno())
        nbytes = -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE
        os.truncate(self._spill, self._arena_at + nbytes)
        pages = mmap.mmap(self._spill, nbytes, access=mmap.ACCESS_WRITE, offset=self._arena_at)
        return self._enter(pages, nbytes, self._spill, own=True)

    def _enter(self, pages: mmap.mmap, length: int, descriptor: int, own: bool) -> Tensor:
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._advise(memory.data_ptr(), length, _HUGE)
        bisect.insort(self._starts, memory.data_ptr())
        self._mappings[memory.data_ptr()] = length, descriptor, own
        return memory

    def __del__(self) -> None:
        for descriptor in {descriptor for _, descriptor, _ in vars(self).get("_mappings", {}).values()}:
            os.close(descriptor)
