"""Runs a function of a test in several gloo processes, which start as copies of the test's own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 300
"""Seconds after which ranks that wait for each other are ended."""


def in_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(rank, *args)` returns on each of `count` ranks. Fails with the traceback of one that fails."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_run, args=(rank, count, store, pipes[rank][1], function, args), daemon=True)
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        try:
            results = [
                receive.recv() if receive.poll(PATIENCE) else ("late", rank) for rank, (receive, _) in enumerate(pipes)
            ]
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    for kind, value in results:
        assert kind == "done", value
    return [value for _, value in results]


def _run(rank: int, count: int, store: str, send: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # how slow the comparison is
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        send.send(("done", function(rank, *args)))
    except BaseException:
        send.send(("failed", f"rank {rank}: {traceback.format_exc()}"))
    os._exit(0)  # what the copied process would do at its end is the original's to do
