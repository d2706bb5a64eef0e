"""Runs that fail, are interrupted or killed: no output, no trace, and the next run succeeds."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from sparseautomodel import oneshot, verify
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.verify import VerificationError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROOT = Path(__file__).resolve().parents[1]
INITIALIZERS = {name: getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_")}


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """No replaced function of torch, no thread, no other number of threads."""
    threads, count = set(threading.enumerate()), torch.get_num_threads()
    yield
    assert torch.get_num_threads() == count
    assert {name: getattr(nn.init, name) for name in INITIALIZERS} == INITIALIZERS
    assert nn.Module.register_parameter.__module__ == "torch.nn.modules.module"
    assert not [thread for thread in set(threading.enumerate()) - threads if "ThreadPoolExecutor" in thread.name]


@pytest.fixture
def failing_layer(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, BaseException], None]:
    """Makes the n-th layer fail."""
    encode = storage.encode

    def install(number: int, error: BaseException) -> None:
        calls: list[int] = []

        def fail(*args: Any, **kwargs: Any) -> None:
            calls.append(1)
            if len(calls) == number:
                raise error
            encode(*args, **kwargs)

        monkeypatch.setattr(storage, "encode", fail)

    return install


def test_failing_layer_is_named_and_nothing_is_left(
    tiny_llama: Path, tmp_path: Path, failing_layer: Callable[[int, BaseException], None]
) -> None:
    failing_layer(9, ValueError("no such thing"))
    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.\S+ \(shape \[.*QuantizationModifier.*no such thing"):
        oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_three_runs_in_one_process_the_second_failing(
    tiny_llama: Path, tied_llama: Path, tmp_path: Path, failing_layer: Callable[[int, BaseException], None]
) -> None:
    oneshot(tiny_llama, "w4a16", output=tmp_path / "one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "encode", _raise)
        with pytest.raises(RuntimeError, match="no such thing"):
            oneshot(tied_llama, "w8a16", output=tmp_path / "two")
    oneshot(tiny_llama, "w4a16", output=tmp_path / "three")
    assert sorted(os.listdir(tmp_path)) == ["one", "three"]
    one, three = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "three"))
    assert one.keys() == three.keys() and all(torch.equal(values, three[name]) for name, values in one.items())


@pytest.mark.parametrize("number", [1, 7, 14])
def test_interrupt_leaves_nothing(
    tiny_llama: Path, tmp_path: Path, failing_layer: Callable[[int, BaseException], None], number: int
) -> None:
    failing_layer(number, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_result_that_does_not_verify_is_not_kept(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = storage.encode

    def spoil(values: torch.Tensor, scheme: Any, out: dict[str, torch.Tensor], **kwargs: Any) -> None:
        encode(values, scheme, out, **kwargs)
        out["weight_scale"][0, 0] = float("nan")

    monkeypatch.setattr(storage, "encode", spoil)
    with pytest.raises(VerificationError, match=r"was not kept:\n- model\.layers\.0.*weight_scale is not finite"):
        oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_failing_live_run_leaves_no_output(
    tiny_llama: Path, tmp_path: Path, failing_layer: Callable[[int, BaseException], None]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    failing_layer(3, ValueError("no such thing"))
    with pytest.raises(RuntimeError, match="no such thing"):
        oneshot(model, "w4a16", output=tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_wrong_recipes_and_damaged_sources_touch_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    for source, recipe in ((tiny_llama, "no-such-recipe"), (tiny_llama, "fp8-block: 1"), (tmp_path, "w4a16")):
        with pytest.raises((ValueError, OSError)):
            oneshot(source, recipe, output=tmp_path / "deep" / "out")
    (indivisible,) = [[{"QuantizationModifier": {"scheme": "W4A16", "group_size": 48}}]]
    with pytest.raises(ValueError, match="group size 48 does not divide"):
        oneshot(tiny_llama, indivisible, output=tmp_path / "deep" / "out")
    assert os.listdir(tmp_path) == []


def test_threads_work_side_by_side(tiny_llama: Path, tied_llama: Path, tmp_path: Path) -> None:
    """Runs and checks in several threads neither mix nor leave torch changed."""
    jobs = [(tiny_llama, "w4a16"), (tied_llama, "w8a8-dynamic"), (tiny_llama, "2of4-w4a16"), (tied_llama, "2of4")]
    failures: list[BaseException] = []

    def run(number: int, source: Path, recipe: str) -> None:
        try:
            for round in range(2):
                output = tmp_path / f"{number}-{round}"
                oneshot(source, recipe, output=output)
                verify(output, against=source).raise_for_problems()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=run, args=(number, *job)) for number, job in enumerate(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    for number, (source, recipe) in enumerate(jobs):
        oneshot(source, recipe, output=tmp_path / f"{number}-alone")
        alone, beside = (load_file(tmp_path / f"{number}-{name}" / "model.safetensors") for name in ("alone", 1))
        assert all(torch.equal(values, beside[name]) for name, values in alone.items())


# One process stays up and forks a run for each step it is given: imports take longer than a run.
RUNNER = """
import os, pathlib, shutil, signal, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from sparseautomodel import oneshot

steps = 0

def watched(function):
    def call(*args, **kwargs):
        count()
        result = function(*args, **kwargs)
        count()
        return result
    return call

def count():
    global steps
    steps += 1
    if steps == fatal:
        os.kill(os.getpid(), signal.SIGKILL)

for holder, name in ((os, "pwrite"), (os, "fsync"), (os, "replace"), (os, "posix_fallocate"),
                     (shutil, "copyfile"), (pathlib.Path, "write_text"), (pathlib.Path, "mkdir")):
    setattr(holder, name, watched(getattr(holder, name)))
source, recipe, output = sys.argv[1:]
print("ready", flush=True)
for line in sys.stdin:
    fatal = int(line)
    child = os.fork()
    if not child:
        oneshot(source, recipe, output=output)
        print(steps, flush=True)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_step_there_is_all_or_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    output = tmp_path / "out"
    command = [sys.executable, "-c", RUNNER, str(tiny_llama), "w4a16", str(output)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes) as runner:

        def run(fatal: int) -> list[int]:
            print(fatal, file=runner.stdin, flush=True)
            answers = [int(runner.stdout.readline())]
            return answers if fatal else [*answers, int(runner.stdout.readline())]

        assert runner.stdout.readline() == "ready\n"
        steps, status = run(fatal=0)
        assert status == 0 and steps > 100
        output.rename(tmp_path / "whole")
        for fatal in {*random.Random(0).sample(range(1, steps), 12), 1, 2, 3, steps - 1}:
            assert run(fatal) == [signal.SIGKILL]
            assert not output.exists()
            assert len(os.listdir(tmp_path)) <= 2  # the whole one, and at most what this run has left
        assert run(fatal=steps) == [signal.SIGKILL]  # after the rename
        _assert_whole(output, tmp_path / "whole")
        shutil.rmtree(output)
        assert run(fatal=0) == [steps, 0]
        runner.stdin.close()
    _assert_whole(output, tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]
    assert {path.name: path.read_bytes() for path in tiny_llama.iterdir()} == before


def _raise(*args: Any, **kwargs: Any) -> None:
    raise ValueError("no such thing")


def _assert_whole(output: Path, whole: Path) -> None:
    assert sorted(os.listdir(output)) == sorted(os.listdir(whole))
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert json.loads((output / "config.json").read_text()) == json.loads((whole / "config.json").read_text())


@pytest.mark.parametrize("seed", [-1, "7", 1.0, True, None, 2**64])
def test_a_seed_that_is_none_is_refused(tiny_llama: Path, tmp_path: Path, seed: Any) -> None:
    with pytest.raises(ValueError, match=r"oneshot\(seed=.*rite"):
        oneshot(tiny_llama, "w4a16", output=tmp_path / "out", seed=seed)
    assert not (tmp_path / "out").exists()
