from __future__ import annotations

import pytest
import torch
from torch import nn

from sparseautomodel.slots import Ring, Traffic, carried
from sparseautomodel.units import Unit, find_units
from tests.rigs import LabelledSlots


@pytest.fixture
def units() -> list[Unit]:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    return find_units(model)


def _ring(device: LabelledSlots, units: list[Unit], slots: int, ahead: bool = True) -> tuple[Ring, dict[Unit, Traffic]]:
    traffic = {unit: Traffic() for unit in units}
    for unit in units:
        device.adopt(unit)
    ring = Ring(device, traffic, units, ahead)
    for _ in range(slots):
        ring.add(units[0].nbytes)
    return ring, traffic


def test_each_unit_is_brought_once_a_pass_and_before_it_runs(units: list[Unit]) -> None:
    device = LabelledSlots()
    ring, traffic = _ring(device, units, 2)
    for _ in range(3):
        for number, unit in enumerate(units):
            built = ring.enter(unit)
            assert torch.equal(built[0], unit.parts()[0])
            assert units[(number + 1) % 4] in carried([ring])  # it comes while this one runs
            ring.leave(unit)
    assert [one.copies for one in traffic.values()] == [4, 4, 3, 3]


def test_a_wrong_guess_costs_a_copy_and_nothing_else(units: list[Unit]) -> None:
    ring, _ = _ring(LabelledSlots(), units, 2)
    for number in (0, 2, 1, 3, 3, 0):
        built = ring.enter(units[number])
        assert torch.equal(built[0], units[number].parts()[0])
        ring.leave(units[number])


def test_units_in_use_are_not_given_up(units: list[Unit]) -> None:
    ring, _ = _ring(LabelledSlots(), units, 1, ahead=False)
    outer = ring.enter(units[0])
    inner = ring.enter(units[1])
    assert torch.equal(outer[0], units[0].parts()[0]) and torch.equal(inner[0], units[1].parts()[0])
    assert len(ring.slots) == 2


def test_what_ran_stays_until_its_slot_is_needed(units: list[Unit]) -> None:
    ring, traffic = _ring(LabelledSlots(), units, 2, ahead=False)
    for number in (0, 1, 0, 1, 2, 1):
        ring.enter(units[number])
        ring.leave(units[number])
    assert [one.copies for one in traffic.values()] == [1, 1, 1, 0]
