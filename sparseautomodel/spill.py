"""Tensors that wait in a file instead of in memory."""

from __future__ import annotations

import mmap
import tempfile
import time
import weakref
from pathlib import Path

import torch
from torch import Tensor

from sparseautomodel.allocator import give_back, held_nbytes, used_nbytes

_SLACK = 3 << 26
"""Bytes of freed memory that the process may hold above the most that it has used, at first."""

_SHARE = 0.02
"""Of the time, which giving memory back may take: where it takes more, half of `_SLACK` more is allowed each time, up
to twice as much. What grows back lies between what is used, and to get it back takes longer than to give it."""

_SMALLEST = 1 << 16
"""Bytes below which a tensor is not worth a file of its own."""


class Spill:
    """Moves the values of waiting tensors to mapped files, once those in memory are more than `budget` bytes.

    A tensor that was moved stays the same object and is used as before: its pages come back as they are read. The files
    have no name, so they are gone when the tensors are, also after the process was killed.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder, self._budget = folder, budget
        self._waiting: dict[int, int] = {}
        """Tensors in memory, and their bytes."""
        self._held = 0
        self._apart = held_nbytes() - used_nbytes()
        """Memory of the process that is not the allocator's."""
        self._slack, self._spent, self._started = _SLACK, 0.0, time.perf_counter()
        self._needed = 0
        """The most that the process has been seen to use."""
        self._mapped: weakref.WeakValueDictionary[int, _Map] = weakref.WeakValueDictionary()
        """Address -> the pages there."""

    def wait(self, tensor: Tensor) -> None:
        """`tensor` will not be used for a while. Only whole, contiguous tensors in host memory are moved."""
        whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        if tensor.device.type != "cpu" or not whole or tensor.nbytes < _SMALLEST or self.holds(tensor):
            return
        if id(tensor) in self._waiting:
            return
        if self._held + tensor.nbytes <= self._budget:
            self._held += tensor.nbytes
            self._waiting[id(tensor)] = tensor.nbytes
            weakref.finalize(tensor, self._forget, id(tensor))
            return
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.truncate(tensor.nbytes)
            pages = _Map(file.fileno(), tensor.nbytes)
        moved = torch.frombuffer(pages, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        tensor.set_(moved.copy_(tensor))  # type: ignore[call-overload]
        self._mapped[tensor.data_ptr()] = pages

    def rest(self) -> None:
        """Let go of all pages in memory; what was written is in the files."""
        for pages in list(self._mapped.values()):
            pages.madvise(mmap.MADV_DONTNEED)

    def trim(self) -> None:
        """Give back to the system what the allocator keeps of tensors that are gone, if memory has grown.

        Up to what the process has used before, giving memory back lowers no peak, and each page costs a fault when it
        is used again.
        """
        held = held_nbytes()
        if held > self._needed + self._slack:
            self._needed = max(self._needed, self._apart + used_nbytes())
        if held > self._needed + self._slack:
            clock = time.perf_counter()
            give_back()
            now = time.perf_counter()
            self._spent += now - clock
            if self._spent > _SHARE * (now - self._started):
                self._slack = min(self._slack + _SLACK // 2, 2 * _SLACK)

    def trim_to(self, slack: int) -> None:
        """Give back all but `slack` bytes of what is not used now: large matrices come, which lie apart.

        For times when much is computed: it is not weighed against what giving back costs.
        """
        if held_nbytes() > self._apart + used_nbytes() + slack:
            give_back()

    def __len__(self) -> int:
        """How many tensors wait in files."""
        return len(self._mapped)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor are in a file."""
        return tensor.data_ptr() in self._mapped

    def _forget(self, key: int) -> None:
        self._held -= self._waiting.pop(key)


class _Map(mmap.mmap):
    """Pages that can be known without being kept."""
