from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel.placement import FIXED, place, spread


@dataclass(eq=False)
class One:
    nbytes: int
    kind: str = "block"
    level: int = 0
    streamable: bool = True


UNITS = st.lists(
    st.builds(
        One,
        nbytes=st.integers(1, 1000),
        kind=st.sampled_from(["block", "block", "layer", FIXED]),
        level=st.sampled_from([0, 0, 1]),
        streamable=st.sampled_from([True, True, False]),
    ),
    max_size=12,
)


@given(UNITS, st.integers(0, 8000))
def test_is_within_the_budget_and_each_unit_finds_a_slot(units: list[One], nbytes: int) -> None:
    found = place(units, nbytes)
    assert found.nbytes <= max(nbytes, place(units, -1).nbytes)
    assert sorted(map(id, [*found.resident, *found.streamed])) == sorted(map(id, units))
    assert all(unit in found.resident for unit in units if unit.kind == FIXED)
    for unit in found.streamed:
        assert not unit.streamable or max(found.slots[unit.level]) >= unit.nbytes


@given(UNITS)
def test_everything_stays_where_there_is_room(units: list[One]) -> None:
    found = place(units, sum(unit.nbytes for unit in units))
    assert found.streamed == () and found.slots == ((), ())


def test_streamed_ones_lie_at_even_distances() -> None:
    assert spread(range(8), 4) == [1, 3, 5, 7]
    assert spread(range(9), 6) == [1, 2, 4, 5, 7, 8]
    units = [One(10) for _ in range(8)]
    found = place(units, 60)
    assert [unit in found.resident for unit in units] == [False, True] * 4 and found.slots == ((10, 10), ())
