"""C files of this package, compiled by the compiler that is there: once a machine, and kept.

`CC` names another compiler than gcc; `SPARSEAUTOMODEL_COMPILE=0` has nothing compiled or loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from sparseautomodel.cache_folder import cache_folder

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
"""-fopenmp asks for libgomp by the name under which torch has loaded its own: one set of threads serves both."""

_SECONDS = 120
"""After which a compiler is taken to hang; it needs four."""


@functools.cache
def compiled(source: Path, needs: frozenset[str]) -> ctypes.CDLL | str:
    """The functions of a C file, or why there are none, for people.

    Compiled at most once a machine: the result lies in the cache folder, named after all that it depends on. Where that
    cannot be written to, it is compiled for this process alone.

    Args:
        source: the C file.
        needs: flags of the processor, as Linux names them, without which the file is of no use.
    """
    if os.environ.get("SPARSEAUTOMODEL_COMPILE") == "0":
        return "SPARSEAUTOMODEL_COMPILE=0"
    if sys.platform != "linux":
        return f"compiled on Linux alone, not on {sys.platform}"
    lacking = sorted(needs - processor_flags())
    if lacking:
        return f"this processor has no {', '.join(lacking)}"
    command = shlex.split(os.environ.get("CC", "gcc"))
    if not command or shutil.which(command[0]) is None:
        return f"no compiler: {' '.join(command) or 'CC'} is not there"
    text = source.read_bytes()
    machine = (platform.machine(), *sorted(processor_flags()), *command, *FLAGS)
    name = f"{source.stem}-{hashlib.sha256(' '.join(machine).encode() + text).hexdigest()[:16]}.so"
    try:
        place = cache_folder()
        place.mkdir(parents=True, exist_ok=True)
        found = _loaded(place / name)
        return found or _made(source, command, place, name)
    except OSError:
        pass
    try:
        with tempfile.TemporaryDirectory() as own:  # what is loaded stays when its file is gone
            return _made(source, command, Path(own), name)
    except OSError as error:
        return f"{command[0]} cannot be run, or there is no folder for what it makes: {error}"


def is_followed(tensor: Tensor) -> bool:
    """Whether something follows operations of torch that a call into C would be hidden from, or `tensor` is none."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


@functools.cache
def processor_flags() -> frozenset[str]:
    """What the processor can do, in the words of Linux; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _made(source: Path, command: list[str], place: Path, name: str) -> ctypes.CDLL | str:
    """Raises OSError where `place` cannot be written to."""
    with tempfile.TemporaryDirectory(dir=place) as own:  # others may be making the same at the same time
        part = Path(own) / name
        try:
            done = subprocess.run(
                [*command, *FLAGS, str(source), "-o", str(part)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"{command[0]} took longer than {_SECONDS} s"
        if done.returncode or not part.exists():
            said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            return f"{command[0]} failed: {said}"
        part.replace(place / name)
    return _loaded(place / name) or f"what {command[0]} made cannot be loaded"


def _loaded(path: Path) -> ctypes.CDLL | None:
    """None where it is not there, or is not whole."""
    try:
        return ctypes.CDLL(str(path)) if _is_whole(path) else None
    except OSError:
        return None


def _is_whole(path: Path) -> bool:
    """Whether a library goes on to its table of sections, which is its last part: loading less may end the process."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return False
    if head[4] != 2:  # not of 64 bits: its header is another
        return True
    order = "<" if head[5] == 1 else ">"
    (start,), (size, count) = struct.unpack_from(f"{order}Q", head, 40), struct.unpack_from(f"{order}HH", head, 58)
    return path.stat().st_size >= start + size * count
