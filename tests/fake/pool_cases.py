"""Several models under one budget on the fake device. Run in a process of its own by tests/test_pool.py."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseautomodel import ModelPool
from tests.fake.accelerator import FakeAccelerator
from tests.fake.device import DEVICE, meter

ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDTHS = {"a": 32, "b": 48, "c": 64, "d": 32}
IDS = torch.arange(3, 9)[None]

Folders, Answers, Needs = dict[str, Path], dict[str, torch.Tensor], dict[str, tuple[int, int]]

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Llamas of four blocks; `d` is `a` again."""
    found: dict[str, Path] = {}
    for name, width in WIDTHS.items():
        torch.manual_seed(width)
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4, "vocab_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
        folder = found["a"] if name == "d" else tmp_path_factory.mktemp(name)
        if name != "d":
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **ENDS)).save_pretrained(folder)
        found[name] = folder
    return found


@pytest.fixture(scope="module")
def expected(folders: Folders) -> Answers:
    with torch.no_grad():
        load = transformers.LlamaForCausalLM.from_pretrained
        return {name: load(folder)(IDS, use_cache=False).logits for name, folder in folders.items()}


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """A test leaves nothing on the device, and no limit."""
    gc.collect()
    before = meter.live
    yield
    meter.capacity = meter.fail_at = None
    gc.collect()
    assert meter.live == before, "something was left on the device"


def full(folders: Folders, budget: int | str = "1GB", **given: Any) -> ModelPool:
    """A pool of all models."""
    pool = ModelPool(device=FakeAccelerator(), budget=budget)
    for name, folder in folders.items():
        pool.load(folder, name, **given)
    return pool


@pytest.fixture(scope="module")
def needs(folders: Folders) -> Needs:
    """What each needs at least, and without streaming."""
    pool = full(folders)
    found = {name: entry.residency for name, entry in pool._entries.items()}
    return {name: (residency.least_nbytes, residency.whole_nbytes) for name, residency in found.items()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS.to(DEVICE), use_cache=False).logits
    return found.cpu()


@dataclass
class Plain:
    """What a pool should do, as plainly as it can be said."""

    budget: int
    needs: Needs
    loaded: set[str] = field(default_factory=set)
    share: dict[str, int] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    """Least recently used first."""

    def touch(self, name: str) -> None:
        self.order = [one for one in self.order if one != name] + [name]

    def busy(self, name: str) -> bool:
        return self.leases.get(name, 0) > 0 or name in self.pinned

    def hold(self, name: str) -> bool:
        least, whole = self.needs[name]
        if not (self.busy(name) and self.share.get(name)):
            shares = {one: size for one, size in self.share.items() if one != name}
            for one in [one for one in self.order if one in shares and not self.busy(one)]:
                if self.budget - sum(shares.values()) < min(whole, self.budget):
                    del shares[one]
            mine = min(self.budget - sum(shares.values()), whole)
            if mine < least:
                return False
            self.share = shares | {name: mine}
        self.touch(name)
        return True


OPERATIONS = st.tuples(
    st.sampled_from(["lease", "lease", "lease", "release", "release", "pin", "unpin", "unload", "load"]),
    st.sampled_from(list(WIDTHS)),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(OPERATIONS, max_size=20), st.sampled_from([0.3, 0.45, 0.6, 0.8]))
def test_who_goes_is_who_was_used_longest_ago(
    folders: Folders, needs: Needs, operations: list[tuple[str, str]], share: float
) -> None:
    gc.collect()
    before, sizes = meter.live, needs
    budget = max(int(share * sum(whole for _, whole in sizes.values())), *(least for least, _ in sizes.values()))
    pool, plain = full(folders, budget), Plain(budget, sizes, set(WIDTHS))
    open_leases: dict[str, list[contextlib.AbstractContextManager[Any]]] = {name: [] for name in WIDTHS}
    meter.capacity = before + budget
    for kind, name in operations:
        if name not in plain.loaded:
            if kind == "load":
                pool.load(folders[name], name)
                plain.loaded.add(name)
            else:
                with pytest.raises(ValueError, match="is not in the pool"):
                    pool.pin(name, timeout=0)
        elif kind in ("lease", "pin"):
            granted, lease = plain.hold(name), pool.lease(name, timeout=0)
            with contextlib.nullcontext() if granted else pytest.raises(TimeoutError, match="no room for"):
                if kind == "pin":
                    pool.pin(name, timeout=0)
                else:
                    lease.__enter__()
            if granted and kind == "pin":
                plain.pinned.add(name)
            elif granted:
                open_leases[name].append(lease)
                plain.leases[name] = plain.leases.get(name, 0) + 1
        elif kind == "release" and open_leases[name]:
            open_leases[name].pop().__exit__(None, None, None)
            plain.leases[name] -= 1
            plain.touch(name)
        elif kind == "unpin":
            with contextlib.nullcontext() if name in plain.pinned else pytest.raises(ValueError, match="not pinned"):
                pool.unpin(name)
            plain.pinned.discard(name)
        elif kind == "unload":
            with pytest.raises(ValueError, match=r"has .*") if plain.busy(name) else contextlib.nullcontext():
                pool.unload(name)
            if not plain.busy(name):
                plain.loaded.discard(name)
                plain.share.pop(name, None)
                plain.order = [one for one in plain.order if one != name]
        report = pool.report()
        found = {row.name: (row.reserved_nbytes, row.leases, row.pinned) for row in report.models}
        assert found == {
            one: (plain.share.get(one, 0), plain.leases.get(one, 0), one in plain.pinned) for one in plain.loaded
        }
        assert report.live_nbytes == meter.live - before <= report.reserved_nbytes <= budget
        assert all(row.live_nbytes <= row.reserved_nbytes for row in report.models)
        homes = {folders[row.name]: row.nbytes for row in report.models}
        assert report.home_nbytes == sum(homes.values())
    meter.capacity = None
    for several in open_leases.values():
        for lease in several:
            lease.__exit__(None, None, None)


def test_answers_are_right_and_the_capacity_holds(folders: Folders, needs: Needs, expected: Answers) -> None:
    """Room for two of four, each with what its calls need."""
    before, sizes = meter.live, needs
    budget = sizes["c"][1] + sizes["b"][1]
    pool = full(folders, budget)
    meter.capacity, meter.peak = before + budget, before
    for name in "abcdcbadccab":
        with pool.lease(name, timeout=0) as model:
            torch.testing.assert_close(logits(model), expected[name])
        gc.collect()
        assert meter.live - before == pool.report().live_nbytes
    assert 0 < meter.peak - before <= budget


def test_a_model_streams_beside_another_that_is_leased(folders: Folders, needs: Needs, expected: Answers) -> None:
    sizes = needs
    pool = full(folders, sizes["c"][1] + sizes["b"][0] + 10_000)
    with pool.lease("c") as first:
        with pool.lease("b", timeout=0) as second:
            states = {unit.state for unit in second.residency.report().units}
            assert "streamed" in states and not first.residency.report().streamed_nbytes
            torch.testing.assert_close(logits(second), expected["b"])
        torch.testing.assert_close(logits(first), expected["c"])
    with pool.lease("b") as second:  # the other is idle now, and goes
        assert not second.residency.report().streamed_nbytes
    rows = {row.name: row for row in pool.report().models}
    assert rows["c"].reserved_nbytes == rows["c"].live_nbytes == 0


def test_failure_at_every_allocation_leaves_the_pool_right(folders: Folders, needs: Needs, expected: Answers) -> None:
    before, sizes = meter.live, needs
    pool = full(folders, sizes["c"][1] + 1000)
    failed = 0
    for number in range(1, 200):
        with pool.lease("b", timeout=0):
            pass
        gc.collect()
        meter.fail_at = number
        try:
            with pool.lease("c", timeout=0):
                done = meter.fail_at > 0
        except torch.OutOfMemoryError:
            done = False
            failed += 1
        meter.fail_at = None
        gc.collect()
        report = pool.report()
        rows = {row.name: row for row in report.models}
        assert meter.live - before == report.live_nbytes, number
        assert rows["c"].leases == 0 and rows["b"].reserved_nbytes == 0
        assert (rows["c"].reserved_nbytes > 0) == done == (rows["c"].live_nbytes > 0)
        for name in "cb":
            with pool.lease(name, timeout=0) as model:
                torch.testing.assert_close(logits(model), expected[name])
        pool.load(folders["c"], "spare")  # the pool goes on
        pool.unload("spare")
        if done:
            break
    assert done and failed > 3


def test_pins_stay_and_failed_pins_do_not(folders: Folders, needs: Needs) -> None:
    sizes = needs
    pool = full(folders, sizes["b"][1] + sizes["a"][0] + 1000)
    meter.fail_at = 2
    with pytest.raises(torch.OutOfMemoryError):
        pool.pin("b")
    meter.fail_at = None
    assert not any(row.pinned for row in pool.report().models)
    pool.pin("b")
    for name in "adad":
        with pool.lease(name):
            pass
    rows = {row.name: row for row in pool.report().models}
    assert rows["b"].pinned and rows["b"].live_nbytes > 0
    assert (rows["a"].live_nbytes, rows["d"].live_nbytes > 0) == (0, True)
    with pytest.raises(TimeoutError, match=r"'b' has .*, pinned"), pool.lease("c", timeout=0.01):
        pass
    pool.unpin("b")
    with pool.lease("c", timeout=0):
        pass


def test_two_models_of_one_folder_share_their_weights(folders: Folders, needs: Needs, expected: Answers) -> None:
    """Also while the first is on the device; what is unloaded leaves the other's weights where they are."""
    pool = ModelPool(device=FakeAccelerator(), budget="1GB")
    pool.load(folders["a"], "a")
    once = pool.report().home_nbytes
    with pool.lease("a") as first:
        pool.load(folders["d"], "d")
        pool.load(folders["d"], "again", dtype=torch.bfloat16)
        report = pool.report()
        rows = {row.name: row for row in report.models}
        assert (rows["a"].shares_with, rows["d"].shares_with, rows["again"].shares_with) == (("d",), ("a",), ())
        assert report.home_nbytes == once + rows["again"].nbytes
        with pool.lease("d") as second:
            assert first is not second
            torch.testing.assert_close(logits(first), expected["a"])
            torch.testing.assert_close(logits(second), expected["a"])
            second.residency.park()
            homes = [set(model.residency.homes) for model in (first, second)]
            assert homes[0] == homes[1]
            assert {one.untyped_storage().data_ptr() for one in second.parameters()} == {
                value.home.untyped_storage().data_ptr()
                for unit in first.residency._units
                for value in unit.values
                if isinstance(value.home, torch.nn.Parameter)
            }
    pool.unload("a")
    with pool.lease("d") as second:
        torch.testing.assert_close(logits(second), expected["a"])


def test_threads_wait_for_each_other(folders: Folders, needs: Needs, expected: Answers) -> None:
    """Room for about two of four: five threads, some of which want two at once in the order of the names."""
    before, sizes = meter.live, needs
    budget = sizes["c"][1] + sizes["b"][0]
    pool = full(folders, budget)
    wrong: list[Any] = []

    def work(names: str) -> None:
        try:
            for name in names:
                with pool.lease(name, timeout=60) as model:
                    torch.testing.assert_close(logits(model), expected[name])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(names,)) for names in ("abcd" * 3, "dcba" * 3, "cccc", "bdac" * 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    report = pool.report()
    assert not wrong
    assert report.live_nbytes == meter.live - before <= report.reserved_nbytes <= budget
    assert not any(row.leases for row in report.models)


def test_who_waits_is_woken(folders: Folders, needs: Needs) -> None:
    sizes = needs
    pool = full(folders, sizes["c"][1])
    entered, may_go, got = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with pool.lease("c"):
            entered.set()
            may_go.wait(60)

    def want() -> None:
        with pool.lease("b", timeout=None):
            got.set()

    threads = [threading.Thread(target=hold), threading.Thread(target=want)]
    threads[0].start()
    entered.wait(60)
    threads[1].start()
    assert not got.wait(0.05)
    may_go.set()
    assert got.wait(60)
    for thread in threads:
        thread.join()


def test_memory_of_others_is_not_learned_as_that_of_a_call(folders: Folders) -> None:
    least = full(folders)._entries["a"].residency.least_nbytes
    pool = ModelPool(device=FakeAccelerator(), budget="1GB")
    pool.load(folders["a"], "a", device_budget=least)
    pool.load(folders["c"], "c")
    with pool.lease("a") as model:
        assert model.residency.report().streamed_nbytes  # so that its calls are watched

        def bring(*_: Any) -> None:
            with pool.lease("c"):
                pass

        model.model.layers[1].register_forward_hook(bring)
        with torch.no_grad():
            model(IDS[:, :1].to(DEVICE), use_cache=False)
        assert pool._entries["c"].residency.live_nbytes
    row = next(row for row in pool.report().models if row.name == "a")
    assert row.least_nbytes <= least


def test_what_another_model_brings_is_not_taken_from_the_room_of_this(folders: Folders, needs: Needs) -> None:
    """Two leases at once, for which there is room."""
    pool = full(folders, needs["a"][1] + needs["c"][1])
    entry = pool._entries["c"]
    entry.share, entry.moving = needs["c"][1], True
    on_its_way = torch.empty(needs["c"][1] // 2, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(TimeoutError, match="'c' was still on its way"), pool.lease("c", timeout=0):
        pass
    with pool.lease("a", timeout=0) as model:
        assert not model.residency.report().streamed_nbytes
    del on_its_way
    entry.share, entry.moving = 0, False
