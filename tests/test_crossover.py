"""When one way to multiply becomes slower than the other: measured once, kept in the process and in a file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from sparseautomodel import crossover as module
from sparseautomodel.crossover import crossover

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEAUTOMODEL_CACHE", str(tmp_path))
    module._kept.cache_clear()
    return tmp_path


def sleeping(first: float, second: float) -> tuple[module.Way, module.Way]:
    """Ways that take `first` seconds a token, and `second` seconds a call."""
    return lambda count: time.sleep(first * count), lambda count: time.sleep(second)


def test_it_is_where_the_ways_take_equally_long() -> None:
    found = crossover("a", CPU, (4, 512), lambda: sleeping(0.0005, 0.010))
    assert 12 <= found <= 24, "20 tokens take as long as a call of the other"


@pytest.mark.parametrize(("first", "second", "wanted"), [(0.0, 0.002, 64), (0.002, 0.0, 8)])
def test_it_stays_in_its_bounds(first: float, second: float, wanted: int) -> None:
    found = crossover("a", CPU, (8, 65), lambda: sleeping(first, second))
    assert found == wanted


def test_bounds_that_meet_need_no_measurement() -> None:
    assert crossover("a", CPU, (8, 8), lambda: pytest.fail("measured")) == 8


def test_it_is_measured_once_a_machine_and_name(folder: Path) -> None:
    calls = []

    def ways() -> tuple[module.Way, module.Way]:
        calls.append(1)
        return sleeping(0.001, 0.0)

    for name in ("a", "a", "b"):
        crossover(name, CPU, (4, 12), ways)
    assert len(calls) == 2
    module._kept.cache_clear()  # as another process
    crossover("a", CPU, (4, 12), ways)
    assert len(calls) == 2
    kept = json.loads((folder / "crossover.json").read_text(encoding="utf-8"))
    assert len(kept) == 2 and all(torch.__version__ in key and "threads" in key for key in kept)
    assert [path.name for path in folder.iterdir()] == ["crossover.json"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": "x"}', "[" * 100_000])
def test_a_damaged_file_is_as_none(folder: Path, content: str) -> None:
    (folder / "crossover.json").write_text(content, encoding="utf-8")
    assert crossover("a", CPU, (4, 12), lambda: sleeping(0.001, 0.0)) == 4
    assert len(json.loads((folder / "crossover.json").read_text(encoding="utf-8"))) == 1


def test_a_folder_that_cannot_be_written_to_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = folder / "file"
    blocked.touch()
    monkeypatch.setenv("SPARSEAUTOMODEL_CACHE", str(blocked))
    assert crossover("a", CPU, (4, 12), lambda: sleeping(0.001, 0.0)) == 4


def test_a_user_without_a_home_measures_for_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory")

    monkeypatch.delenv("SPARSEAUTOMODEL_CACHE")
    monkeypatch.setattr(Path, "home", homeless)
    assert crossover("a", CPU, (4, 12), lambda: sleeping(0.001, 0.0)) == 4
