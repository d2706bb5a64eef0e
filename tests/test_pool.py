"""`ModelPool`: who is on the device, who has to go, and one copy of what is at home."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparseautomodel import ModelPool, SparseAutoModelForCausalLM
from tests.rigs import LabelledSlots

ROOT = Path(__file__).resolve().parents[1]
IDS = torch.arange(3, 9)[None]


@pytest.fixture
def pool(tiny_llama: Path, tiny_qwen3: Path) -> ModelPool:
    pool = ModelPool(device="cpu", budget="100MB")
    pool.load(tiny_llama, "llama")
    pool.load(tiny_qwen3, "qwen")
    return pool


@pytest.mark.slow
def test_who_goes_against_a_plain_reference_on_the_fake_device() -> None:
    """In a process of its own, where a second device is registered."""
    _cases("who_goes")


def test_cases_on_the_fake_device() -> None:
    _cases("not who_goes")


def _cases(selected: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fake/pool_cases.py"]
    command += ["-k", selected]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_models_give_what_they_give_alone(pool: ModelPool, tiny_llama: Path, tiny_qwen3: Path) -> None:
    for name, folder in {"llama": tiny_llama, "qwen": tiny_qwen3}.items():
        alone = SparseAutoModelForCausalLM.from_pretrained(folder)
        with pool.lease(name) as model, torch.no_grad():
            assert torch.equal(model(IDS).logits, alone(IDS).logits)
    with pytest.raises(ValueError, match=r"'bert' is not in the pool, which has 'llama', 'qwen'. Write: pool.load\("):
        pool.unpin("bert")


@pytest.mark.parametrize("arguments", [{}, {"recipe": "w4a16"}, {"recipe": "w4a16", "execution": "compressed"}])
def test_two_models_of_one_folder_share_their_weights_on_the_processor(
    tiny_llama: Path, arguments: dict[str, str]
) -> None:
    pool = ModelPool(device="cpu", budget="100MB")
    pool.load(tiny_llama, "one", **arguments)
    once = pool.report().home_nbytes
    pool.load(tiny_llama, "two", **arguments)
    pool.load(tiny_llama, "other", dtype=torch.float32, **arguments)
    one, two, other = pool.report().models
    assert pool.report().home_nbytes == once + other.nbytes
    assert (one.shares_with, two.shares_with, other.shares_with) == (("two",), ("one",), ())
    with pool.lease("one") as first, pool.lease("two") as second, torch.no_grad():
        assert first is not second
        assert torch.equal(first(IDS).logits, second(IDS).logits)
        stored = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
        assert all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in stored)
        places = [{p.data_ptr() for p in model.parameters()} for model in (first, second)]
        assert places[0] == places[1]
        expected = first(IDS).logits
    pool.unload("one")
    with pool.lease("two") as second, torch.no_grad():
        assert torch.equal(second(IDS).logits, expected)
    assert pool.report().models[-1].shares_with == ()


def test_a_folder_that_was_written_anew_is_another_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama)
    model.save_pretrained(tmp_path)
    pool = ModelPool(device="cpu", budget="100MB")
    pool.load(tmp_path, "before")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path)
    pool.load(tmp_path, "after")
    assert all(row.shares_with == () for row in pool.report().models)
    with pool.lease("after") as after, torch.no_grad():
        assert torch.equal(after(IDS).logits, model(IDS).logits)


def test_unloading_gives_all_back(tiny_llama: Path) -> None:
    place = LabelledSlots()
    pool = ModelPool(device=place, budget="100MB")
    pool.load(tiny_llama)
    name = str(tiny_llama)
    with pool.lease(name) as model:
        expected = model(IDS).logits
        home = weakref.ref(model.get_parameter("lm_head.weight"))
    pool.unload(name)
    assert pool.report().models == () and pool.report().home_nbytes == pool.report().reserved_nbytes == 0
    assert not hasattr(model, "residency") and torch.equal(model(IDS).logits, expected)
    del model, expected
    gc.collect()
    assert home() is None


def test_errors(pool: ModelPool, tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match="'llama' is in the pool already"):
        pool.load(tiny_llama, "llama")
    with pytest.raises(ValueError, match="a pool has its models on cpu; leave it out"):
        pool.load(tiny_llama, "third", device_map="cpu")
    with pytest.raises(ValueError, match="device_budget='1GB' of 'third' must be within the pool's 100,000,000"):
        pool.load(tiny_llama, "third", device_budget="1GB")
    with pytest.raises(ValueError, match=r"device_budget=1000 is 1,000 bytes.*Give at least device_budget="):
        pool.load(tiny_llama, "third", device_budget=1000)
    with pytest.raises(ValueError, match="size 'none' is not a number of bytes"):
        ModelPool(device="cpu", budget="none")
    with pytest.raises(ValueError, match="budget=0 must be"):
        ModelPool(device="cpu", budget=0)
    pool.pin("qwen")
    with pytest.raises(ValueError, match=r"'llama' is not pinned\. Pinned are: 'qwen'"):
        pool.unpin("llama")
    with pytest.raises(ValueError, match=r"'qwen' has .*, pinned. Leave its leases, or unpin\('qwen'\)"):
        pool.unload("qwen")
    with pool.lease("llama"), pytest.raises(ValueError, match=r"'llama' has .*, leased 1 x"):
        pool.unload("llama")


def test_who_waits_is_told_who_holds_what(tiny_llama: Path, tiny_qwen3: Path) -> None:
    pool = ModelPool(device=LabelledSlots(), budget="100MB")
    pool.load(tiny_llama, "llama", device_budget="90MB")
    pool.load(tiny_qwen3, "qwen", device_budget="90MB")
    names = {row.name: row for row in pool.report().models}
    pool = ModelPool(device=LabelledSlots(), budget=90_000_000 + names["qwen"].least_nbytes - 1)
    pool.load(tiny_llama, "llama", device_budget="90MB")
    pool.load(tiny_qwen3, "qwen")
    with pool.lease("llama"), pytest.raises(TimeoutError) as error, pool.lease("qwen", timeout=0):
        pass
    found = str(error.value)
    assert re.search(r"no room for 'qwen' within 0 s: it needs at least [\d,]+ bytes, [\d,]+ without streaming", found)
    assert re.search(r"are not held\. There are: 'llama' has 90.0 MB, leased 1 x", found), found
    with pool.lease("qwen", timeout=0):  # the other is idle now
        assert {row.name: row.reserved_nbytes > 0 for row in pool.report().models} == {"llama": False, "qwen": True}


def test_a_model_is_not_called_without_a_lease_once_it_was_parked(tiny_llama: Path, tiny_qwen3: Path) -> None:
    pool = ModelPool(device="cpu", budget="100MB")
    pool.load(tiny_llama, "llama", device_budget="60MB")
    pool.load(tiny_qwen3, "qwen", device_budget="60MB")
    with pool.lease("llama") as llama:
        pass
    with pool.lease("qwen"), pytest.raises(RuntimeError, match=r"is not leased.*with pool.lease\(name\)"):
        llama(IDS)
    with pool.lease("llama") as llama:
        assert llama(IDS).logits.isfinite().all()


def test_threads_load_lease_and_unload(tiny_llama: Path, tiny_qwen3: Path) -> None:
    """Three models, of which two have room, and four threads; the answers are those of the models alone."""
    folders = {"llama": tiny_llama, "qwen": tiny_qwen3, "twin": tiny_llama}
    with torch.no_grad():
        models = {name: SparseAutoModelForCausalLM.from_pretrained(path) for name, path in folders.items()}
        expected = {name: model(IDS).logits for name, model in models.items()}
    pool = ModelPool(device=LabelledSlots(), budget="100MB")
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(12):
                name = list(folders)[(number + step) % 3]
                with pool.lease(name, timeout=60) as model, torch.no_grad():
                    assert torch.equal(model(IDS).logits, expected[name])
                mine = f"{number}-{step}"
                pool.load(tiny_llama, mine, device_budget="40MB")
                with pool.lease(mine, timeout=60) as model, torch.no_grad():
                    assert torch.equal(model(IDS).logits, expected["llama"])
                pool.unload(mine)
        except BaseException as error:
            failures.append(error)

    for name, path in folders.items():
        pool.load(path, name, device_budget="40MB")
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    report = pool.report()
    assert len(report.models) == 3 and report.reserved_nbytes <= report.budget
    assert not any(row.leases for row in report.models)
    assert {row.name for row in report.models} == set(folders)


def test_report_is_text_and_a_dict(pool: ModelPool) -> None:
    pool.pin("llama")
    report = pool.report()
    assert report.to_dict()["reserved_nbytes"] == report.reserved_nbytes == report.budget - report.free_nbytes
    lines = str(report).splitlines()
    assert lines[0].startswith("on cpu: ") and len(lines) == 3
    assert re.search(r"qwen +\S+ .B  parked", str(report)) and re.search(r"llama +.* has .*, pinned", str(report))


def test_the_example_of_the_documentation(tiny_llama: Path, tiny_qwen3: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").partition("## Several models")[2]
    (code,) = re.findall(r"```python\n(.*?)```", text.partition("\n## ")[0], flags=re.DOTALL)
    names: dict[str, object] = {"ids": IDS}
    code = code.replace('"llama-folder"', repr(str(tiny_llama))).replace('"qwen-folder"', repr(str(tiny_qwen3)))
    exec(compile(code, "docs/memory.md", "exec"), names)


def test_a_class_of_transformers_is_refused(tiny_llama: Path) -> None:
    pool = ModelPool(device="cpu", budget="100MB")
    with pytest.raises(ValueError, match=r"auto_class=.*AutoModelForCausalLM.* Give one of sparseautomodel"):
        pool.load(tiny_llama, auto_class=AutoModelForCausalLM)
