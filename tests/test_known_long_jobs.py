"""What users of other tools missed in long one-shot jobs, or lost with them; the label of the entry is in the
docstring."""

from __future__ import annotations

import errno
import importlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseautomodel import oneshot, plan, verify
from sparseautomodel.calibrated import scratch_of
from sparseautomodel.checkpoint import StoredTensor, open_checkpoint
from sparseautomodel.modifiers import MODIFIERS, Weight
from sparseautomodel.statistics import LayerError

pytestmark = pytest.mark.filterwarnings("ignore")

GPTQ: dict[str, Any] = {"modifiers": [{"GPTQModifier": {"scheme": "W4A16", "group_size": 32}}]}


@pytest.fixture
def rows() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(1, 250, (24,))} for _ in range(6)]


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the layers that GPTQ has solved, in order."""
    names: list[str] = []
    gptq = MODIFIERS["GPTQModifier"]
    solve = gptq.solve

    def recorded(self: Any, weights: Sequence[Weight], statistic: Any) -> list[LayerError]:
        names.extend(weight.layer.name for weight in weights)
        return solve(self, weights, statistic)

    monkeypatch.setattr(gptq, "solve", recorded)
    return names


def test_a_plan_says_what_a_calibrated_run_would_do_and_reads_no_weight(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2: sizes and warnings before committing to hours."""

    def refuse(self: Any, index: Any) -> None:
        raise AssertionError(f"{self.name} was read")

    monkeypatch.setattr(StoredTensor, "__getitem__", refuse)
    found = plan(tiny_llama, GPTQ)
    assert not found.errors and found.nbytes_after < found.nbytes_before and len(found.layers) == 14


def test_progress_moves_with_every_block(
    tiny_llama: Path, tmp_path: Path, rows: Any, solved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H3: hours without a sign. The bar knows how many blocks there are, and moves as each is done."""
    seen: list[tuple[int, int]] = []

    class Bar:
        def __init__(self, total: int, **options: Any) -> None:
            self.total, self.done = total, 0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: Any) -> None: ...

        def update(self, number: int = 1) -> None:
            self.done += number
            seen.append((self.done, len(solved)))
            assert self.done <= self.total == 2

    monkeypatch.setattr(importlib.import_module("sparseautomodel.calibrated"), "tqdm", Bar)
    oneshot(tiny_llama, GPTQ, data=rows, output=tmp_path / "out")
    assert seen == [(1, 7), (2, 14)]


def test_error_of_each_block_and_of_the_whole_is_in_the_report(tiny_llama: Path, tmp_path: Path, rows: Any) -> None:
    """H4: local errors do not say what became of the outputs."""
    report = oneshot(tiny_llama, GPTQ, data=rows, num_samples=4, output=tmp_path / "out")
    written = json.loads((tmp_path / "out" / "compression_report.json").read_text())["calibration"]
    assert [block["name"] for block in written["blocks"]] == ["model.layers.0", "model.layers.1"]
    assert all(0 < block["error"] < 0.5 for block in written["blocks"])
    assert written["verdict"] == json.loads(json.dumps(report.calibration["verdict"]))
    verdict = written["verdict"]
    assert verdict["tokens"] > 0 and not verdict["seen"] and math.isfinite(verdict["divergence"])
    rounded = {"modifiers": [{"GPTQModifier": {"scheme": "W8A16", "group_size": 32}}]}
    better = oneshot(tiny_llama, rounded, data=rows, num_samples=4, output=tmp_path / "better").calibration
    assert better["verdict"]["divergence"] < verdict["divergence"] / 4
    assert better["blocks"][1]["error"] < written["blocks"][1]["error"] / 4


@pytest.mark.parametrize("error", [MemoryError("out of memory"), RuntimeError("out of memory"), KeyboardInterrupt()])
def test_what_was_done_before_an_error_is_kept(
    error: BaseException, tiny_llama: Path, tmp_path: Path, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours lost to an error in the last block: blocks that were finished are not solved again."""
    modifier, names = MODIFIERS["GPTQModifier"], list[str]()
    solve = modifier.solve

    def failing(self: Any, weights: Sequence[Weight], statistic: Any) -> list[LayerError]:
        if "layers.1.mlp.down" in weights[0].layer.name:
            raise error
        return solve(self, weights, statistic)

    def recorded(self: Any, weights: Sequence[Weight], statistic: Any) -> list[LayerError]:
        names.extend(weight.layer.name for weight in weights)
        return solve(self, weights, statistic)

    with monkeypatch.context() as patch:
        patch.setattr(modifier, "solve", failing)
        with pytest.raises(type(error)):
            oneshot(tiny_llama, GPTQ, data=rows, output=tmp_path / "out")
    assert not (tmp_path / "out").exists() and scratch_of(tmp_path / "out").is_dir()
    with monkeypatch.context() as patch:
        patch.setattr(modifier, "solve", recorded)
        oneshot(tiny_llama, GPTQ, data=rows, output=tmp_path / "out", resume=True)
    equal_to_undisturbed(tiny_llama, tmp_path, rows)
    assert not any(".layers.0." in name for name in names) and len(names) == 7


@pytest.mark.parametrize("place", ["sparseautomodel.solving.save_file", "sparseautomodel.oneshot.write_tensors"])
def test_full_disk_is_said_and_nothing_that_was_written_is_lost(
    place: str, tiny_llama: Path, tmp_path: Path, rows: Any, solved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block, or the result, does not fit on the disk: with room made, the run goes on from there."""
    module, _, name = place.rpartition(".")
    owner = importlib.import_module(module)
    write: Callable[..., Any] = getattr(owner, name)
    calls: list[Any] = []

    def full(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2 or name == "write_tensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(OSError, match="No space left"):
            oneshot(tiny_llama, GPTQ, data=rows, output=tmp_path / "out")
    finished = {path.name for path in scratch_of(tmp_path / "out").glob("*.safetensors")}
    assert not (tmp_path / "out").exists() and "model.layers.0.safetensors" in finished
    solved.clear()
    oneshot(tiny_llama, GPTQ, data=rows, output=tmp_path / "out", resume=True)
    assert len(solved) == (7 if name == "save_file" else 0)
    equal_to_undisturbed(tiny_llama, tmp_path, rows)


def equal_to_undisturbed(source: Path, folder: Path, rows: Any) -> None:
    verify(folder / "out").raise_for_problems()
    oneshot(source, GPTQ, data=rows, output=folder / "undisturbed")
    one, other = open_checkpoint(folder / "out"), open_checkpoint(folder / "undisturbed")
    assert one.keys() == other.keys() and all(torch.equal(one[name][...], other[name][...]) for name in one)
    assert not scratch_of(folder / "out").exists()
