"""The allocator of the C library: what it holds, and whether it keeps what was freed. Elsewhere than on glibc: nothing.

By its own rule glibc gives freed memory at the end of the heap back at once, and gets it again page by page, each with
a fault: in a walk over blocks, which frees and takes the same memory at every block, that is a tenth of the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h."""

_LARGEST_MMAP_THRESHOLD = 1 << 25
"""Both thresholds rise as large blocks are freed: this one to here, the other to twice as much."""

_NEVER = (1 << 31) - 1


class _Usage(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not all(hasattr(library, name) for name in ("mallopt", "malloc_trim", "mallinfo2")):
        return None
    library.mallinfo2.restype = _Usage
    return library


_LIBC = _library()


@contextlib.contextmanager
def freed_memory_stays() -> Iterator[None]:
    """While it is entered, freed memory is kept for what comes next, until `give_back`; what is free before goes back.

    The thresholds cannot be read. So afterwards they are what they become by themselves once 32 MB were freed.
    """
    if _LIBC is None:
        yield
        return
    give_back()
    _LIBC.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    _LIBC.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        _LIBC.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)
        give_back()


def give_back() -> None:
    """Give all pages of freed memory back to the system."""
    if _LIBC is not None:
        _LIBC.malloc_trim(0)


def used_nbytes() -> int:
    """Memory that was allocated and not freed."""
    if _LIBC is None:
        return 0
    usage = _LIBC.mallinfo2()
    return int(usage.uordblks) + int(usage.hblkhd)


def held_nbytes() -> int:
    """Memory of the process that no file stands behind: what is used, and freed memory that was not given back."""
    if _LIBC is None:
        return 0
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE
