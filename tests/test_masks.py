from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparseautomodel import masks
from sparseautomodel.masks import (
    global_threshold,
    parse_structure,
    prune_mask,
    satisfies,
    sparsity,
    threshold_mask,
    violations,
    zero_outside,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Allocations(TorchDispatchMode):
    """The bytes of every storage that operations make, without those of `known`."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.known = known.untyped_storage()
        self.sizes: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # else an address could come twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() != self.known.data_ptr():
                    self.alive.append(tensor)
                    self.sizes[storage.data_ptr()] = storage.nbytes()
        return result


def plain_structured(scores: torch.Tensor, n: int, m: int) -> list[list[bool]]:
    """N of every M by a stable sort of each group, one number at a time."""
    kept = []
    for row in scores.double().abs().tolist():
        kept.append([])
        for start in range(0, len(row), m):
            group = row[start : start + m]
            best = sorted(range(m), key=lambda place: -_nan_last(group[place]))[:n]
            kept[-1] += [place in best for place in range(m)]
    return kept


def plain_unstructured(scores: torch.Tensor, share: float) -> list[list[bool]]:
    """The matrix in one stable sort, largest first: the tail is pruned."""
    rows, cols = scores.shape
    flat = scores.double().abs().flatten().tolist()
    best = sorted(range(len(flat)), key=lambda place: -_nan_last(flat[place]))
    pruned = set(best[len(flat) - round(share * len(flat)) :])
    return [[row * cols + col not in pruned for col in range(cols)] for row in range(rows)]


@st.composite
def matrices(draw: st.DrawFn, multiple: int = 1) -> torch.Tensor:
    """Few different values, so that ties are the rule; zeros of both signs, subnormals, infinity and NaN."""
    rows = draw(st.integers(0, 5))
    cols = draw(st.integers(0, 5)) * multiple
    values = (0.0, -0.0, 1.0, -1.0, 1.5, -2.0, 1e-7, -1e-41, 1e-41, 3e4, -math.inf, math.inf, math.nan)
    entries = draw(st.lists(st.sampled_from(values), min_size=rows * cols, max_size=rows * cols))
    matrix = torch.tensor(entries, dtype=torch.float64).reshape(rows, cols)
    return matrix.to(draw(st.sampled_from(DTYPES)))


@st.composite
def structures(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    m = draw(st.integers(1, 16))
    return draw(matrices(multiple=m)), draw(st.integers(1, m)), m


@given(structures())
def test_structured_mask_is_that_of_a_stable_sort_of_each_group(case: tuple[torch.Tensor, int, int]) -> None:
    scores, n, m = case
    before = scores.clone()
    mask = prune_mask(scores, None, (n, m))
    assert mask.dtype == torch.bool and mask.shape == scores.shape
    assert mask.tolist() == plain_structured(scores, n, m)
    assert (mask.reshape(-1, m).sum(1) == n).all()
    assert torch.equal(_bits(scores), _bits(before))


@given(matrices(), st.floats(0, 1))
def test_unstructured_mask_is_that_of_a_stable_sort_of_the_matrix(scores: torch.Tensor, share: float) -> None:
    mask = prune_mask(scores, share)
    assert mask.tolist() == plain_unstructured(scores, share)
    assert int((~mask).sum()) == round(share * scores.numel())


@given(matrices(), st.floats(0, 1))
def test_mask_of_each_row_is_that_of_a_stable_sort_of_the_row(scores: torch.Tensor, share: float) -> None:
    mask = prune_mask(scores, share, per_row=True)
    assert mask.dtype == torch.bool and mask.shape == scores.shape
    assert mask.tolist() == [plain_unstructured(row[None], share)[0] for row in scores]
    assert ((~mask).sum(1) == round(share * scores.shape[1])).all()


@given(structures())
def test_pruned_values_satisfy_the_structure_and_zeros_stay(case: tuple[torch.Tensor, int, int]) -> None:
    values, n, m = case
    before = values.clone()
    keep = prune_mask(values, None, (n, m))
    zero_outside(values, keep)
    assert satisfies(values, n, m)
    assert not values[before == 0].any()
    assert torch.equal(_bits(values)[keep], _bits(before)[keep])
    assert not _bits(values)[~keep].any(), "a pruned value is +0.0, bit for bit"


@given(structures())
def test_violations_count_groups_with_too_many_nonzeros(case: tuple[torch.Tensor, int, int]) -> None:
    values, n, m = case
    groups = values.tolist()
    expected = sum(
        sum(value != 0 for value in row[start : start + m]) > n for row in groups for start in range(0, len(row), m)
    )
    assert violations(values, n, m) == expected
    assert satisfies(values, n, m) == (expected == 0)


@given(matrices())
def test_sparsity_is_the_share_of_exact_zeros(values: torch.Tensor) -> None:
    entries = values.flatten().tolist()
    assert sparsity(values) == (entries.count(0.0) / len(entries) if entries else 0.0)


@given(st.lists(matrices(), max_size=4), st.floats(0, 1))
def test_global_threshold_is_that_of_all_values_sorted(tensors: list[torch.Tensor], share: float) -> None:
    tensors = [tensor.nan_to_num(nan=0.5, posinf=math.inf, neginf=-math.inf) for tensor in tensors]
    flat = sorted(abs(value) for tensor in tensors for value in tensor.float().flatten().tolist())
    rank = round(share * len(flat))
    threshold = global_threshold(lambda: iter(tensors), share)
    assert threshold == (flat[rank - 1] if rank else 0.0)
    pruned = sum(int((~threshold_mask(tensor, threshold)).sum()) for tensor in tensors)
    assert pruned == sum(value <= threshold for value in flat) >= rank


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("structure", [(2, 4), (1, 4), (4, 8), (5, 7), (8, 16)])
def test_structured_mask_over_several_blocks_of_rows(
    dtype: torch.dtype, structure: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    n, m = structure
    scores = torch.randn(37, 6 * m).to(dtype)
    whole = prune_mask(scores, None, structure)
    best = scores.abs().reshape(-1, m).sort(dim=1, descending=True, stable=True).indices[:, :n]
    expected = torch.zeros(37 * 6, m, dtype=torch.bool).scatter_(1, best, True).reshape(scores.shape)
    assert torch.equal(whole, expected)
    _small_blocks(monkeypatch)
    assert torch.equal(prune_mask(scores, None, structure), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.013, 0.5, 0.77])
def test_unstructured_mask_over_several_blocks_of_rows(
    dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = torch.randn(61, 32).to(dtype)
    scores[::3] = scores[0]  # ties far apart
    order = scores.abs().flatten().sort(descending=True, stable=True).indices
    expected = torch.ones(scores.numel(), dtype=torch.bool)
    expected[order[scores.numel() - round(share * scores.numel()) :]] = False
    expected = expected.reshape(scores.shape)
    assert torch.equal(prune_mask(scores, share), expected)
    _small_blocks(monkeypatch)
    assert torch.equal(prune_mask(scores, share), expected)


def test_n_is_the_number_kept() -> None:
    """1:4 and 3:4 are what a reading of N as the number pruned would swap; for 2:4 it makes no difference."""
    scores = torch.tensor([[4.0, -3.0, 2.0, 1.0]])
    assert prune_mask(scores, None, (1, 4)).tolist() == [[True, False, False, False]]
    assert prune_mask(scores, None, (3, 4)).tolist() == [[True, True, True, False]]


def test_of_equal_scores_the_lower_column_is_kept() -> None:
    ones = torch.ones(2, 8, dtype=torch.bfloat16)
    assert prune_mask(ones, None, (2, 4)).tolist() == [[True, True, False, False] * 2] * 2
    assert prune_mask(ones, 0.75).tolist() == [[True] * 4 + [False] * 4, [False] * 8]


def test_a_transposed_view_is_pruned_along_its_own_columns() -> None:
    stored = torch.randn(8, 12)
    values = stored.t()
    keep = prune_mask(values, None, (2, 4))
    assert torch.equal(keep, prune_mask(values.contiguous(), None, (2, 4)))
    assert torch.equal(prune_mask(values, 0.3), prune_mask(values.contiguous(), 0.3))
    zero_outside(values, keep)
    assert satisfies(values, 2, 4) and sparsity(stored) == 0.5
    assert violations(values, 1, 4) == 24


def test_a_threshold_keeps_nan_and_prunes_ties() -> None:
    scores = torch.tensor([[math.nan, -1.0, 1.0, 1.0078125, -math.inf, 0.0]]).bfloat16()
    assert threshold_mask(scores, 1.0).tolist() == [[True, False, False, True, True, False]]
    between = 1.0039  # not a bfloat16: rounded to one it would be 1.0 or 1.0078125
    assert threshold_mask(scores, between).tolist() == [[True, False, False, True, True, False]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("share", "structure"), [(None, (2, 4)), (0.5, None)])
def test_beyond_the_mask_only_blocks_of_rows_are_allocated(
    dtype: torch.dtype, share: float | None, structure: tuple[int, int] | None
) -> None:
    scores = torch.randn(2048, 1024).to(dtype)
    with Allocations(scores) as allocations:
        mask = prune_mask(scores, share, structure)
        zero_outside(scores, mask)
    largest = sorted(allocations.sizes.values())
    assert largest[-1] == mask.numel()
    assert largest[-2] <= scores.nbytes // 4


def test_global_threshold_reads_bfloat16_once_and_others_twice() -> None:
    tensors = [torch.randn(64, 16).bfloat16(), torch.randn(8, 16).bfloat16()]
    reads = []

    def read() -> Iterator[torch.Tensor]:
        reads.append(len(tensors))
        yield from tensors

    global_threshold(read, 0.5)
    assert reads == [2]
    tensors.append(torch.randn(4, 16).half())
    global_threshold(read, 0.5)
    assert reads == [2, 3, 3]


@settings(max_examples=50)
@given(st.integers(1, 15), st.integers(2, 16))
def test_structure_is_read_as_kept_of_every(n: int, m: int) -> None:
    if n < m:
        assert parse_structure(f"{n}:{m}") == parse_structure(f" {n} : {m} ") == (n, m)
    else:
        with pytest.raises(ValueError, match=f'Write "{m}:{n}"' if n > m else "prune nothing"):
            parse_structure(f"{n}:{m}")


@pytest.mark.parametrize("text", ["unstructured", "0:0"])
def test_no_structure(text: str) -> None:
    assert parse_structure(text) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2of4", 'Write "2:4"'),
        ("block4", "'block4' is no structure"),
        ("", 'Write "2:4"'),
        ("2:4:8", 'Write "2:4"'),
        ("-2:4", 'Write "2:4"'),
        ("4:2", 'Write "2:4"'),
        ("0:4", "everything"),
        ("4:4", "nothing"),
        ("16:32", 'Write "8:16"'),
        (124, 'Write "2:4"'),  # what PyYAML makes of 2:4 without quotes
        (248, 'Write "4:8"'),
        (None, 'Write "2:4" or "unstructured"'),
        (True, 'Write "2:4" or "unstructured"'),
    ],
)
def test_a_wrong_structure_is_told_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_structure(text)


@pytest.mark.parametrize(
    "check", [lambda values: prune_mask(values, None, (2, 4)), lambda values: violations(values, 2, 4)]
)
def test_columns_that_the_group_does_not_divide_are_named(check: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"multiple of 4 columns, the matrix is \[3, 6\]"):
        check(torch.ones(3, 6))


@pytest.mark.parametrize("structure", [(0, 4), (5, 4), (8, 32)])
def test_a_structure_out_of_range_is_refused(structure: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="N <= M <= 16"):
        prune_mask(torch.ones(2, 32), None, structure)


@pytest.mark.parametrize("share", [None, -0.1, 1.1, math.nan])
def test_a_sparsity_out_of_range_is_refused(share: float | None) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        prune_mask(torch.ones(2, 4), share)


def test_a_dtype_without_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot rank values of torch\.int32.*bfloat16"):
        prune_mask(torch.ones(2, 4, dtype=torch.int32), 0.5)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else min(value, 1e300)  # above infinity, which no finite value reaches


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_row_blocks", lambda matrix: matrix.split(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("structure", [(1, 2), (2, 4), (1, 4), (4, 4), (3, 8), (4, 8), (5, 16), (8, 16)])
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (1001, 64)])
def test_compiled_masks_are_those_of_torch(
    shape: tuple[int, int], structure: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties, zeros of both signs and NaN included."""
    scores = (torch.randn(shape) * 3).round().to(dtype)
    scores[:, 3], scores[0, 5], scores[0, 6] = -0.0, math.nan, math.inf
    found, broken = prune_mask(scores, None, structure), violations(scores, *structure)
    monkeypatch.setattr(masks, "_functions", lambda: "not in this test")
    assert torch.equal(found, prune_mask(scores, None, structure))
    assert broken == violations(scores, *structure)
    assert violations(torch.where(found, scores, torch.zeros((), dtype=dtype)), *structure) == 0
