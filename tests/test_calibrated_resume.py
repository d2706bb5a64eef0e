"""A calibrated run that is killed at any moment and resumed gives, byte for byte, what an uninterrupted one gives."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from sparseautomodel import oneshot, verify
from sparseautomodel.calibrated import scratch_of
from tests.conftest import SIZES

pytestmark = pytest.mark.filterwarnings("ignore")

RECIPE: dict[str, Any] = {
    "modifiers": [
        {"SparseGPTModifier": {"mask_structure": "2:4"}},
        {"GPTQModifier": {"scheme": "W4A16_ASYM", "group_size": 32, "targets": ["Linear", "lm_head"]}},
    ]
}
"""With a layer outside the blocks, which is solved last."""
UNLIKE = ("seconds", "peak_nbytes", "reads", "output", "timings", "memory")
"""What the report says of the run itself, not of the result."""

MOMENTS = 10


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"num_hidden_layers": 4}))
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture(scope="module")
def start() -> Callable[..., Any]:
    """Starts a run in a process that has everything imported already: kills then hit the run, not the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sparseautomodel", "transformers.models.llama.modeling_llama", __name__])

    def begin(source: Path, output: Path, kill_at: int | None = None, events: Path | None = None) -> Any:
        process = context.Process(target=compress, args=(str(source), str(output), kill_at, events))
        process.start()
        return process

    return begin


@pytest.fixture(scope="module")
def whole(source: Path, start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    process = start(source, folder / "out", events=folder / "events.json")
    process.join()
    assert process.exitcode == 0
    return folder / "out"


def compress(source: str, output: str, kill_at: int | None, events: Path | None) -> None:
    """In the other process: compress, and end with a kill at the given change of the disk."""
    torch.set_num_threads(1)
    seen: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not (writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")):
            return
        if os.path.dirname(output) not in str(args[0]):
            return
        seen.append(f"{event} {os.path.relpath(str(args[0]), os.path.dirname(output))}")
        if len(seen) - 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    oneshot(source, RECIPE, data=rows(), output=output, batch_size=2, max_shard_size="40KB", resume=True)
    if events is not None:
        events.write_text(json.dumps(seen))


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 250, (length,), generator=generator)} for length in (32, 32, 16, 32)]


def same(one: Path, other: Path) -> None:
    names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in (one, other)]
    assert names[0] == names[1]
    for name in names[0]:
        if name == "compression_report.json":
            assert content(one / name) == content(other / name)
        else:
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


def content(report: Path) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if key not in UNLIKE}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return plain(json.loads(report.read_text()))


def finish(source: Path, output: Path, whole: Path, start: Callable[..., Any]) -> None:
    """Resume what was killed, unless it was complete already, and compare."""
    if not output.exists():
        process = start(source, output)
        process.join()
        assert process.exitcode == 0
    same(output, whole)


@pytest.mark.slow
def test_killed_at_ten_random_moments(source: Path, whole: Path, start: Callable[..., Any], tmp_path: Path) -> None:
    """kill -9 anywhere between the start and the end of the run."""
    began = time.perf_counter()
    process = start(source, tmp_path / "timed")
    process.join()
    duration = time.perf_counter() - began
    chance = random.Random(0)
    killed = 0
    for number in range(MOMENTS):
        output = tmp_path / str(number) / "out"
        output.parent.mkdir()
        process = start(source, output)
        time.sleep(chance.uniform(0.05, 0.95) * duration)
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        finish(source, output, whole, start)
        assert not scratch_of(output).exists()
    assert killed


@pytest.mark.slow
def test_killed_at_changes_of_the_disk(source: Path, whole: Path, start: Callable[..., Any], tmp_path: Path) -> None:
    """Between two blocks, while shards are written, before the result gets its name, and after."""
    events = json.loads((whole.parent / "events.json").read_text())
    shards = [at for at, event in enumerate(events) if ".safetensors" in event and ".blocks" not in event]
    moved = [(at, event) for at, event in enumerate(events) if event.startswith("os.rename") and "finger" not in event]
    blocks = [at for at, event in moved if ".blocks" in event]
    names = [at for at, event in moved if ".blocks" not in event]
    assert len(blocks) == 5 and len(shards) > 2 and names
    for kill_at in sorted({0, blocks[2], blocks[-1] + 1, shards[0], shards[-1], names[-1], names[-1] + 1}):
        output = tmp_path / str(kill_at) / "out"
        output.parent.mkdir()
        process = start(source, output, kill_at)
        process.join()
        assert process.exitcode == -signal.SIGKILL, events[kill_at]
        finish(source, output, whole, start)


@pytest.mark.slow
def test_killed_again_and_again(source: Path, whole: Path, start: Callable[..., Any], tmp_path: Path) -> None:
    """Each run comes a little further than the one before."""
    output = tmp_path / "out"
    for kill_at in (4, 8):
        process = start(source, output, kill_at)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    finish(source, output, whole, start)


@pytest.mark.parametrize("changed", ["model", "data", "recipe", "versions"])
def test_what_has_changed_is_named(
    changed: str, tiny_llama: Path, tied_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with other inputs is not resumed, and its blocks stay where they are."""

    def stop(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("stopped")

    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("sparseautomodel.oneshot"), "write_tensors", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            oneshot(tiny_llama, RECIPE, data=rows(), output=output)
    blocks = sorted(scratch_of(output).iterdir())
    if changed == "versions":
        calibrated = importlib.import_module("sparseautomodel.calibrated")
        monkeypatch.setattr(calibrated, "versions", lambda: {"torch": "0"})
    source = tied_llama if changed == "model" else tiny_llama
    recipe = {"modifiers": RECIPE["modifiers"][:1]} if changed == "recipe" else RECIPE
    data = rows()[:-1] if changed == "data" else rows()
    with pytest.raises(ValueError, match=rf"with another {changed}: it cannot be resumed"):
        oneshot(source, recipe, data=data, output=output, resume=True)
    assert sorted(scratch_of(output).iterdir()) == blocks and not output.exists()
    monkeypatch.undo()
    oneshot(tiny_llama, RECIPE, data=rows(), output=output, resume=True)
    assert verify(output).ok and not scratch_of(output).exists()


def test_what_was_killed_in_its_first_word_starts_anew(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of blocks is there, and the file that says what it is of is cut off."""
    write = Path.write_text

    def half(self: Path, text: str, *args: Any, **options: Any) -> int:
        if not self.name.startswith("fingerprint"):
            return write(self, text, *args, **options)
        write(self, text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(KeyboardInterrupt):
            oneshot(tiny_llama, RECIPE, data=rows(), output=tmp_path / "out")
    oneshot(tiny_llama, RECIPE, data=rows(), output=tmp_path / "out", resume=True)
    assert verify(tmp_path / "out").ok and not scratch_of(tmp_path / "out").exists()


def stopped_run(model: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of finished blocks of a run that ended before it wrote the result."""

    def stop(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("sparseautomodel.oneshot"), "write_tensors", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            oneshot(model, RECIPE, data=rows(), output=output)
    return sorted(scratch_of(output).glob("*.safetensors"))


@pytest.mark.parametrize("damage", ["cut", "without errors"])
def test_a_damaged_block_is_named_and_solved_again_when_deleted(
    damage: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = stopped_run(tiny_llama, tmp_path / "out", monkeypatch)[0]
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        save_file(load_file(file), file)
    with pytest.raises(ValueError, match=rf"{file.name}.* is damaged. Delete it: resume=True"):
        oneshot(tiny_llama, RECIPE, data=rows(), output=tmp_path / "out", resume=True)
    file.unlink()
    oneshot(tiny_llama, RECIPE, data=rows(), output=tmp_path / "out", resume=True)
    assert verify(tmp_path / "out").ok and not scratch_of(tmp_path / "out").exists()


@pytest.mark.parametrize("resume", [True, False])
def test_what_is_not_of_a_run_stays_in_the_folder(
    resume: bool, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_run(tiny_llama, tmp_path / "out", monkeypatch)
    foreign = scratch_of(tmp_path / "out") / "notes.txt"
    foreign.write_text("mine")
    oneshot(tiny_llama, RECIPE, data=rows(), output=tmp_path / "out", resume=resume)
    assert list(scratch_of(tmp_path / "out").iterdir()) == [foreign] and foreign.read_text() == "mine"
