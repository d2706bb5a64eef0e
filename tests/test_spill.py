"""Waiting tensors: the same values and the same object, in a file above the budget, with nothing left behind."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from sparseautomodel.allocator import used_nbytes
from sparseautomodel.spill import Spill


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_views_of_a_spilled_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    spill = Spill(tmp_path, 0)
    tensor = torch.randn(64, 8, 256).to(dtype)
    before, same = tensor.clone(), tensor
    spill.wait(tensor)
    spill.rest()
    assert same is tensor and tensor.shape == (64, 8, 256) and tensor.dtype == dtype
    assert torch.equal(tensor, before) and torch.equal(tensor[3:5].flatten(), before[3:5].flatten())
    spill.rest()
    tensor.div_(2)  # what was changed after it came back stays changed, through the next wait too
    spill.wait(tensor)
    spill.rest()
    assert torch.equal(tensor, before / 2)
    assert not list(tmp_path.iterdir())


def test_tensors_above_the_budget_leave_memory(tmp_path: Path) -> None:
    spill, size = Spill(tmp_path, 8 << 20), 4 << 20
    before, tensors = used_nbytes(), []
    for number in range(12):
        tensors.append(torch.full((size // 4,), float(number)))
        spill.wait(tensors[-1])
    assert used_nbytes() - before < 3 * size  # two have room
    spill.rest()
    mapped = [tensor for tensor in tensors if spill.holds(tensor)]
    assert len(mapped) == 10
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
    spill.rest()
    assert used_nbytes() - before < 3 * size
    del tensors, mapped
    gc.collect()
    assert len(spill) == 0


def test_room_is_given_back_by_tensors_that_are_gone(tmp_path: Path) -> None:
    spill = Spill(tmp_path, 1 << 20)
    for _ in range(5):
        tensor = torch.ones(1 << 18)
        spill.wait(tensor)
        spill.wait(tensor)  # twice is once
        assert not spill.holds(tensor)
        del tensor


@pytest.mark.parametrize(("takes", "wanted"), [(1.0, [140, 250, 265, 266]), (0.001, [140, 250, 264, 265, 266])])
def test_memory_goes_back_once_it_has_grown_beyond_what_was_used(
    takes: float, wanted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 MB more than was needed; where that takes long, 48 after the first time, and 64 from the second on."""
    held, used, trimmed, now = [100 << 20], [90 << 20], [], [0.0]

    def give_back() -> None:
        now[0] += takes
        trimmed.append(held[0] >> 20)
        held[0] = (10 << 20) + used[0]

    monkeypatch.setattr("sparseautomodel.spill.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("sparseautomodel.spill._SLACK", 32 << 20)
    monkeypatch.setattr("sparseautomodel.spill.give_back", give_back)
    monkeypatch.setattr("sparseautomodel.spill.held_nbytes", lambda: held[0])
    monkeypatch.setattr("sparseautomodel.spill.used_nbytes", lambda: used[0])
    spill = Spill(tmp_path, 0)  # 10 MB are not the allocator's
    for megabytes, in_use in ((100, 90), (130, 90), (140, 90), (250, 190), (264, 50), (265, 50), (266, 50)):
        held[0], used[0] = megabytes << 20, in_use << 20
        spill.trim()
        now[0] += 1
    assert trimmed == wanted
    held[0], used[0] = 110 << 20, 100 << 20
    spill.trim_to(8 << 20)
    held[0] = 119 << 20
    spill.trim()
    assert trimmed == wanted
    spill.trim_to(8 << 20)
    assert trimmed == [*wanted, 119]


def test_what_cannot_be_moved_stays(tmp_path: Path) -> None:
    spill = Spill(tmp_path, 0)
    whole = torch.randn(512, 512)
    for tensor in (whole[:, ::2], whole[1:], whole.t(), torch.randn(4), torch.empty(512, 512, device="meta")):
        before = None if tensor.is_meta else tensor.clone()
        spill.wait(tensor)
        assert len(spill) == 0
        assert before is None or torch.equal(tensor, before)
