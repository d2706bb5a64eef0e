"""Blocks of columns against the loops of the papers in plain float64 code, one row and one column at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel import column_blocks
from sparseautomodel.column_blocks import prune_block, round_block

pytestmark = pytest.mark.skipif(isinstance(column_blocks._functions(), str), reason=str(column_blocks._functions()))


def upper(columns: int) -> torch.Tensor:
    return torch.randn(columns, columns).mul_(0.1).triu(1) + torch.diag(torch.rand(columns) + 0.5)


def parts(columns: int) -> slice:
    first = columns // 3
    return slice(first, min(columns, first + max(1, columns // 2)))


@given(rows=st.integers(1, 40), columns=st.integers(1, 60), asymmetric=st.booleans(), pruned=st.booleans())
def test_rounding(rows: int, columns: int, asymmetric: bool, pruned: bool) -> None:
    torch.manual_seed(rows)
    values, factor, part = torch.randn(rows, columns), upper(columns), parts(columns)
    groups = torch.randint(0, 3, (columns,))
    scale = torch.rand(rows, 3) * 0.3 + 0.1
    zero = torch.randint(-3, 4, (rows, 3)).float() if asymmetric else None
    kept = torch.rand(rows, columns) > 0.4 if pruned else None
    left = values.clone()
    errors = round_block(left, part, factor, scale, zero, groups, kept, (-8.0, 7.0))
    wanted, owed = values.double().clone(), torch.zeros(rows, part.stop - part.start, dtype=torch.float64)
    for row in range(rows):
        for column in range(part.start, part.stop):
            number = wanted[row, column] if kept is None or kept[row, column] else torch.zeros(())
            step = scale[row, groups[column]].double()
            offset = 0.0 if zero is None else zero[row, groups[column]].double()
            done = ((number / step + offset).round().clamp(-8, 7) - offset) * step
            error = (number - done) / factor[column, column].double()
            wanted[row, column], owed[row, column - part.start] = done, error
            wanted[row, column + 1 : part.stop] -= error * factor[column, column + 1 : part.stop].double()
    same = (left - wanted).abs() < 1e-3
    assert same.double().mean() > 0.97, "a number that lies between two codes may become the other"
    if same.all():
        torch.testing.assert_close(errors.double(), owed, rtol=1e-3, atol=1e-4)
    outside = [column for column in range(columns) if not part.start <= column < part.stop]
    assert torch.equal(left[:, outside], values[:, outside])


@given(
    rows=st.integers(1, 40),
    runs=st.integers(1, 8),
    structure=st.sampled_from([None, (2, 4), (1, 3), (4, 8), (0, 2), (3, 3)]),
)
def test_pruning(rows: int, runs: int, structure: tuple[int, int] | None) -> None:
    torch.manual_seed(rows)
    most, of = structure or (1, 1)
    columns = runs * of * 2
    part = slice(columns // 2 // of * of, columns)
    values, factor = torch.randn(rows, columns).mul_(torch.rand(rows, columns) > 0.2), upper(columns)
    alive, given_keep = values != 0, torch.rand(rows, columns) > 0.5
    keep = given_keep & alive if structure is None else torch.empty_like(alive)
    left = values.clone()
    errors = prune_block(left, part, factor, alive, keep, structure)
    wanted, owed = values.double().clone(), torch.zeros(rows, part.stop - part.start, dtype=torch.float64)
    masks = given_keep & alive
    for row in range(rows):
        for column in range(part.start, part.stop):
            if structure is not None and column % of == 0:
                group = range(column, column + of)
                scores = {one: abs(float(wanted[row, one] / factor[one, one])) * bool(alive[row, one]) for one in group}
                chosen = sorted(group, key=lambda one: (-scores[one], one))[:most]
                for one in group:
                    masks[row, one] = one in chosen and bool(alive[row, one])
            stays = bool(masks[row, column])
            gone = bool(alive[row, column]) and not stays
            error = wanted[row, column] / factor[column, column].double() if gone else torch.zeros(())
            owed[row, column - part.start] = error
            if not stays:
                wanted[row, column] = 0
            wanted[row, column + 1 : part.stop] -= error * factor[column, column + 1 : part.stop].double()
    assert torch.equal(keep[:, part], masks[:, part])
    torch.testing.assert_close(left.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(errors.double(), owed, rtol=1e-4, atol=1e-4)


def test_of_equal_weights_the_first_are_kept() -> None:
    left = torch.ones(3, 8)
    alive, keep = left != 0, torch.empty(3, 8, dtype=torch.bool)
    prune_block(left, slice(0, 8), torch.eye(8), alive, keep, (2, 4))
    assert torch.equal(keep, torch.tensor([True, True, False, False] * 2).expand(3, 8))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_neighbours_change_nothing(threads: int) -> None:
    values, factor = torch.randn(100, 64), upper(64)
    scale, groups = torch.rand(100, 1) + 0.1, torch.zeros(64, dtype=torch.int64)

    def rounded(rows: slice) -> torch.Tensor:
        left = values[rows].clone()
        round_block(left, slice(0, 64), factor, scale[rows], None, groups, None, (-8.0, 7.0))
        return left

    whole = rounded(slice(0, 100))
    torch.set_num_threads(threads)
    try:
        assert torch.equal(rounded(slice(0, 100)), whole)
        assert torch.equal(rounded(slice(37, 58)), whole[37:58])
    finally:
        torch.set_num_threads(1)


def test_what_is_no_number_stays_none() -> None:
    left = torch.ones(2, 4)
    left[0, 1] = float("nan")
    round_block(left, slice(0, 4), torch.eye(4), torch.ones(2, 1), None, torch.zeros(4).long(), None, (-8.0, 7.0))
    assert left[0, 1].isnan() and torch.equal(left[1], torch.ones(4))


def test_only_for_processors_and_float32() -> None:
    assert column_blocks.are_compiled(torch.ones(1, 1))
    assert not column_blocks.are_compiled(torch.ones(1, 1, device="meta"))
    assert not column_blocks.are_compiled(torch.ones(1, 1, dtype=torch.float64))
