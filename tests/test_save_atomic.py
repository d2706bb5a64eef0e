"""Output appears under its name only when it is complete, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseautomodel import save as module
from sparseautomodel.checkpoint import LazyTensor, open_checkpoint
from sparseautomodel.save import appear_when_complete, write_tensors

ROOT = Path(__file__).resolve().parents[1]


class Plain(LazyTensor):
    """A tensor of zeros that is made when it is sliced."""

    def __init__(self, size: int) -> None:
        super().__init__("zeros", (size,), torch.float32)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.zeros(self.shape)[index]


@pytest.mark.parametrize("place", ["out", "a/b/out", "out[1]*", "out.v2"])
def test_output_appears_when_complete(tmp_path: Path, place: str) -> None:
    output = tmp_path / place
    with appear_when_complete(output, 10) as folder:
        assert folder.parent == output.parent and not output.exists()
        (folder / "file").write_text("x")
    assert (output / "file").read_text() == "x"
    assert _names(output.parent) == [output.name]


def test_output_has_the_rights_of_any_folder(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    with appear_when_complete(tmp_path / "out", 0) as folder:
        write_tensors({"t": Plain(1)}, folder, 10)
        (folder / "text").write_text("")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "out/model.safetensors").stat().st_mode == (tmp_path / "out/text").stat().st_mode


def test_relative_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with appear_when_complete("out", 10):
        monkeypatch.chdir("/")
    assert (tmp_path / "out").is_dir()


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with appear_when_complete(tmp_path / "out", 10) as folder:
        (folder / "file").write_text("x")
    assert _names(tmp_path) == ["out"] and _names(tmp_path / "out") == ["file"]


def test_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "empty").mkdir()
    for link, target in (("new", tmp_path / "disk" / "inside"), ("old", tmp_path / "empty")):
        (tmp_path / link).symlink_to(target)
        with appear_when_complete(tmp_path / link, 10) as folder:
            assert folder.parent == target.parent
            (folder / "file").write_text("x")
        assert (tmp_path / link).is_symlink() and _names(target) == ["file"]


@pytest.mark.parametrize("kind", ["file", "folder", "link", "link to a file"])
def test_output_that_exists_is_refused_before_any_work(tmp_path: Path, kind: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    output = tmp_path / "out"
    if kind == "file":
        output.write_text("mine")
    elif kind == "folder":
        output = tmp_path / "full"
    else:
        output.symlink_to(tmp_path / "full" / ("mine" if kind == "link to a file" else ""))
    with pytest.raises(FileExistsError, match="exists already"), appear_when_complete(output, 10):
        pytest.fail("the work was begun")
    assert (tmp_path / "full" / "mine").read_text() == "mine"


def test_output_that_came_up_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), appear_when_complete(tmp_path / "out", 10) as folder:
        (folder / "file").write_text("late")
        with appear_when_complete(tmp_path / "out", 10) as other:
            assert other != folder and folder.exists()
            (other / "file").write_text("first")
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert _names(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), appear_when_complete(tmp_path / "out", 10) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
        raise error
    assert _names(tmp_path) == []


def test_leftovers_of_killed_runs_go_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    for name in (".out.partial-1", ".out.partial-abc", ".out2.partial-1", ".other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    with appear_when_complete(tmp_path / "out2", 0) as running:
        assert _names(tmp_path) == sorted([".out.partial-1", ".out.partial-abc", ".other", running.name])
        with appear_when_complete(tmp_path / "out", 0):
            pass
        assert _names(tmp_path) == sorted([".other", running.name, "out"])
    assert _names(tmp_path) == [".other", "out", "out2"]


def test_cleanup_that_fails_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F16: a complete checkpoint is not lost to trouble with what lies beside it."""
    (tmp_path / ".out.partial-1").mkdir()
    opened = os.open

    def refuse(path: Any, *given: Any) -> int:
        if str(path).endswith("partial-1"):
            raise PermissionError(errno.EACCES, "not yours")
        return opened(path, *given)

    monkeypatch.setattr(module.os, "open", refuse)
    with appear_when_complete(tmp_path / "out", 0):
        pass
    assert (tmp_path / "out").is_dir()


WRITER = """
import os, sys, time
import torch
from sparseautomodel.save import appear_when_complete, write_tensors
from sparseautomodel.checkpoint import LazyTensor

class Slow(LazyTensor):
    def __init__(self):
        super().__init__("slow", (1000,), torch.float32)
    def __getitem__(self, index):
        print("working", flush=True)
        time.sleep(0.05)
        return torch.zeros(1000)

with appear_when_complete(sys.argv[1], 4000) as folder:
    write_tensors({f"t{n}": Slow() for n in range(int(sys.argv[2]))}, folder, 9000)
"""


def test_killed_run_leaves_nothing_under_its_name_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    with _writer(tmp_path / "out", 10_000) as process:
        for _ in range(8):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    (leftover,) = _names(tmp_path)
    assert leftover.startswith(".out.partial-") and len(_names(tmp_path / leftover)) >= 2
    with appear_when_complete(tmp_path / "out", 0) as folder:
        assert _names(tmp_path) == [folder.name] != [leftover]
    assert _names(tmp_path) == ["out"]


@pytest.mark.slow
def test_two_processes_side_by_side(tmp_path: Path) -> None:
    with _writer(tmp_path / "one", 8) as one, _writer(tmp_path / "two", 8) as two:
        assert one.wait(60) == two.wait(60) == 0
    assert _names(tmp_path) == ["one", "two"]
    assert len(open_checkpoint(tmp_path / "one")) == len(open_checkpoint(tmp_path / "two")) == 8


# Places that cannot be written to


def test_read_only_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot write to /sys"), appear_when_complete("/sys/out", 0):
        pytest.fail("the work was begun")


def test_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in ("file/out", "file/deep/out"):
        with pytest.raises(OSError, match=r"cannot write to .*file"), appear_when_complete(tmp_path / place, 0):
            pytest.fail("the work was begun")
    assert _names(tmp_path) == ["file"]


def test_mount_point_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(module.os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    with pytest.raises(OSError, match="is a mount point"), appear_when_complete(tmp_path / "out", 0):
        pytest.fail("the work was begun")


def test_too_little_room_is_said_before_the_work(tmp_path: Path) -> None:
    message = r"No space left on device: .*out takes 1,000,000,000\.0 MB, [\d,.]+ MB are free in .*Nothing was kept"
    with pytest.raises(OSError, match=message), appear_when_complete(tmp_path / "out", 10**15):
        pytest.fail("the work was begun")
    assert _names(tmp_path) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_disk_that_fills_up_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, call, full)
    message, output = r"out takes 1\.0 MB.*free in .*Nothing was kept", tmp_path / "out"
    with pytest.raises(OSError, match=message) as caught, appear_when_complete(output, 10**6) as folder:
        write_tensors({"t": Plain(9)}, folder, 100)
    assert caught.value.errno == errno.ENOSPC
    assert _names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_small_disk(small_disk: Path) -> None:
    tensors = {f"t{n}": Plain(100_000) for n in range(4)}
    output = small_disk / "out"
    with (
        pytest.raises(OSError, match=r"takes 0\.5 MB.*free in"),
        appear_when_complete(output, 500_000) as folder,
    ):
        write_tensors(tensors, folder, 10**9)  # takes more than was said
    assert _names(small_disk) == []
    with pytest.raises(OSError, match="mount point"), appear_when_complete(small_disk, 0):
        pytest.fail("the work was begun")


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def _writer(output: Path, tensors: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(output), str(tensors)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
