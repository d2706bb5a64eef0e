"""C files are compiled once a machine, or it is said why not."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sparseautomodel import compiler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="no compiler on this machine"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEAUTOMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("SPARSEAUTOMODEL_COMPILE", raising=False)
    path = tmp_path / "seven.c"
    path.write_text("int seven(void) { return 7; }\n")
    return path


def build(source: Path, *needs: str) -> ctypes.CDLL | str:
    """As another process would."""
    return compiler.compiled.__wrapped__(source, frozenset(needs))


def made(source: Path) -> list[Path]:
    return sorted((source.parent / "cache").glob("*"))


def assert_seven(found: ctypes.CDLL | str) -> None:
    assert not isinstance(found, str), found
    assert found.seven() == 7


def test_it_is_compiled_once(source: Path) -> None:
    assert_seven(build(source))
    (first,) = made(source)
    written = first.stat().st_mtime_ns
    assert_seven(build(source))
    assert made(source) == [first] and first.stat().st_mtime_ns == written


def test_another_text_is_another_file(source: Path) -> None:
    assert_seven(build(source))
    source.write_text("int seven(void) { return 3 + 4; }\n")
    assert_seven(build(source))
    assert len(made(source)) == 2


def test_a_damaged_file_is_made_again(source: Path) -> None:
    assert_seven(build(source))
    (first,) = made(source)
    first.unlink()  # it is loaded in this process: what it lies in must not change
    first.write_bytes(b"no library")
    assert_seven(build(source))


@pytest.mark.parametrize("kept", [0, 0.3, 0.9])
def test_part_of_a_file_is_not_loaded(source: Path, kept: float) -> None:
    """The loader of Linux would end the process."""
    assert_seven(build(source))
    (first,) = made(source)
    whole = first.read_bytes()
    first.unlink()
    first.write_bytes(whole[: int(kept * len(whole))])
    assert_seven(build(source))
    assert len(first.read_bytes()) == len(whole)


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null/cache"])
def test_a_folder_that_cannot_be_written_to_is_no_hindrance(
    source: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEAUTOMODEL_CACHE", folder)
    assert_seven(build(source))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SPARSEAUTOMODEL_COMPILE", "0", "SPARSEAUTOMODEL_COMPILE=0"),
        ("CC", "/nowhere/cc", "no compiler: /nowhere/cc is not there"),
        ("CC", "", "no compiler: CC is not there"),
        ("CC", "false", "false failed"),
        ("CC", "true", "true failed"),
    ],
)
def test_what_a_user_set(source: Path, name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    found = build(source)
    assert isinstance(found, str) and said in found
    assert made(source) == [], "nothing is left behind"


def test_a_compiler_that_the_system_cannot_run(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_file = source.with_name("cc")
    compiler_file.write_bytes(b"\0 no program")
    compiler_file.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler_file))
    assert "cannot be run" in str(build(source))


def test_no_folder_can_be_written_to(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    assert "No usable temporary directory" in str(build(source))


def test_a_compiler_with_options(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc -DNUMBER=7")
    source.write_text("int seven(void) { return NUMBER; }\n")
    assert_seven(build(source))


def test_what_the_compiler_says_is_passed_on(source: Path) -> None:
    source.write_text("int seven(void) { return eight; }\n")
    found = build(source)
    assert isinstance(found, str) and "gcc failed" in found and "eight" in found
    assert made(source) == []


def test_a_compiler_that_hangs(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **kwargs: object) -> None:
        raise subprocess.TimeoutExpired(command, 120)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "took longer" in str(build(source))


def test_processors_that_lack_something(source: Path) -> None:
    assert build(source, "avx2048", "warp") == "this processor has no avx2048, warp"
    assert made(source) == []


def test_other_systems(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "not on darwin" in str(build(source))
