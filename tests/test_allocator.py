"""The allocator: freed memory stays for a while, goes back when asked, and what it holds is counted."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from sparseautomodel import allocator
from sparseautomodel.allocator import freed_memory_stays, give_back, held_nbytes, used_nbytes

glibc = pytest.mark.skipif(allocator._LIBC is None, reason="needs glibc")
SIZE = 24 << 20  # below what is always given back at once


def anonymous() -> int:
    """Bytes of this process that no file stands behind."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@glibc
def test_memory_of_the_process_is_counted_without_files() -> None:
    before, size = held_nbytes(), 40 << 20
    fresh = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a tensor may get memory that was freed
    fresh.write(b"1" * size)
    assert 0.9 < (held_nbytes() - before) / size < 2.5
    assert abs(held_nbytes() - anonymous()) < 8 << 20


@glibc
def test_used_memory_is_what_was_not_freed() -> None:
    before = used_nbytes()
    tensor = torch.ones(SIZE, dtype=torch.uint8)
    assert 0.9 * SIZE < used_nbytes() - before < 1.5 * SIZE
    del tensor
    assert abs(used_nbytes() - before) < SIZE // 4


@glibc
def test_freed_memory_stays_until_it_is_given_back() -> None:
    give_back()
    with freed_memory_stays():
        start = anonymous()
        tensors = [torch.ones(SIZE // 8, dtype=torch.uint8) for _ in range(16)]
        full = anonymous()
        assert full - start > SIZE
        del tensors
        assert anonymous() > full - SIZE // 4
        give_back()
        assert anonymous() < full - SIZE
        tensors = [torch.ones(SIZE // 8, dtype=torch.uint8) for _ in range(16)]
        full = anonymous()
        del tensors
    assert anonymous() < full - SIZE


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_LIBC", None)
    with freed_memory_stays():
        give_back()
    assert used_nbytes() == held_nbytes() == 0
