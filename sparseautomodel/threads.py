"""How many threads torch uses for one operation.

Layers are worked on side by side, each with its share of the cores, instead of one after another with all of them: a
team of threads that loses a core to another process stalls at every operation, two independent threads do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SIDE_BY_SIDE = 2
"""Layers in hand at a time. Bounds memory: each can be a whole dense tensor."""


@contextlib.contextmanager
def torch_threads(count: int, restored: int) -> Iterator[None]:
    """Let operations of the calling thread use `count` threads, and set `restored` when done.

    What to restore is given by whoever started the work: a worker thread would find the number of another worker.
    """
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(restored)
