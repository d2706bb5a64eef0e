"""Tensors that wait in a file instead of in memory."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None)
"""glibc keeps freed tensors of up to 32 MB for itself, several hundred MB in all, until it is asked."""

_SMALLEST = 1 << 16
"""Bytes below which a tensor is not worth a file of its own."""


class Spill:
    """Moves the values of waiting tensors to mapped files, once those in memory are more than `budget` bytes.

    A tensor that was moved stays the same object and is used as before: its pages come back as they are read. The files
    have no name, so they are gone when the tensors are, also after the process was killed.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder, self._budget = folder, budget
        self._waiting: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._mapped: weakref.WeakSet[_Map] = weakref.WeakSet()

    def wait(self, tensor: Tensor) -> None:
        """`tensor` will not be used for a while. Only whole, contiguous tensors in host memory are moved."""
        whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        if tensor.device.type != "cpu" or not whole or tensor.nbytes < _SMALLEST or self._is_mapped(tensor):
            return
        self._waiting = {key: held for key, held in self._waiting.items() if held[0]() is not None}
        others = sum(nbytes for key, (_, nbytes) in self._waiting.items() if key != id(tensor))
        if others + tensor.nbytes <= self._budget:
            self._waiting[id(tensor)] = weakref.ref(tensor), tensor.nbytes
            return
        self._waiting.pop(id(tensor), None)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.truncate(tensor.nbytes)
            pages = _Map(file.fileno(), tensor.nbytes)
        moved = torch.frombuffer(pages, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        tensor.set_(moved.copy_(tensor))  # type: ignore[call-overload]
        self._mapped.add(pages)
        pages.start = tensor.data_ptr()

    def rest(self) -> None:
        """Let go of all pages in memory; what was written is in the files."""
        for pages in self._mapped:
            pages.madvise(mmap.MADV_DONTNEED)

    def trim(self) -> None:
        """Give back to the system what the allocator keeps of tensors that are gone."""
        if hasattr(_LIBC, "malloc_trim"):
            _LIBC.malloc_trim(0)

    def _is_mapped(self, tensor: Tensor) -> bool:
        return any(pages.start == tensor.data_ptr() for pages in self._mapped)


class _Map(mmap.mmap):
    start = 0
