"""Statistics and their algebra against plain float64 arithmetic, and the bits of a sum however its tokens are cut."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseautomodel import statistics
from sparseautomodel.statistics import (
    ColumnNorm,
    Hessian,
    LayerError,
    NotPositiveDefinite,
    inverse_factor,
    output_errors,
    row_runs,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ARITHMETICS = ("float32", "int8")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (7, 5), (300, 61), (2500, 64)])
def test_the_hessian_is_the_sum_of_products(dtype: torch.dtype, tokens: int, columns: int) -> None:
    inputs = _inputs(tokens, columns).to(dtype)
    hessian, expected = _gathered(inputs), inputs.double().t() @ inputs.double()
    assert hessian.value.dtype == torch.float32 and hessian.tokens == tokens
    assert torch.equal(hessian.value, hessian.value.t())
    assert _distance(hessian.value, expected) < 1e-5
    assert torch.equal(hessian.diagonal, hessian.value.diagonal())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_products_are_close_and_positive_semi_definite(dtype: torch.dtype) -> None:
    inputs = _inputs(3000, 48)
    inputs[:, 5], inputs[:, 6], inputs[:, 7] = inputs[:, 4] * 1e-3, 0, inputs[:, 4] * 1e3
    inputs = inputs.to(dtype)
    hessian = _gathered(inputs, "int8").value
    expected = inputs.double().t() @ inputs.double()
    scale = expected.diagonal().sqrt().clamp(min=1e-9)
    assert ((hessian - expected) / scale / scale[:, None]).abs().max() < 0.01
    assert not hessian[6].any() and torch.equal(hessian, hessian.t())
    one_token = _gathered(inputs[:1].repeat(40, 1), "int8").value.double()
    for matrix in (hessian.double(), one_token):
        ends = torch.linalg.eigvalsh(matrix)
        assert ends[0] > -1e-6 * ends[-1]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(ARITHMETICS),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3000), max_size=5),
    st.integers(0, 2**32 - 1),
)
def test_the_cut_of_the_tokens_does_not_change_one_bit(
    arithmetic: str, dtype: torch.dtype, cuts: list[int], seed: int
) -> None:
    inputs = torch.randn(5000, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    ends = [0, *sorted(cuts), 5000]
    parts = [inputs[first:last] for first, last in pairwise(ends)]
    whole, cut = (Hessian(6, arithmetic=arithmetic) for _ in range(2))
    whole.update(inputs)
    norms, cut_norms = ColumnNorm(6), ColumnNorm(6)
    norms.update(inputs)
    for part in parts:
        cut.update(part)
        cut_norms.update(part)
    assert whole.tokens == cut.tokens == cut_norms.tokens == 5000
    assert torch.equal(whole.value, cut.value)
    assert torch.allclose(norms.value, cut_norms.value, rtol=1e-6)


def test_updates_of_single_tokens_and_of_several_dtypes() -> None:
    inputs = _inputs(90, 8)
    mixed, norms = Hessian(8), ColumnNorm(8)
    for number, token in enumerate(inputs.split(1)):
        mixed.update(token.to(DTYPES[number % 3]))
        norms.update(token)
    assert _distance(mixed.value, inputs.double().t() @ inputs.double()) < 1e-2
    assert torch.allclose(norms.value, inputs.square().sum(0), rtol=1e-6)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(
    "factors", [torch.tensor([2.0, 0.5, 1.0, 4.0]).repeat(3), torch.linspace(0.1, 1.1, 12)], ids=["2", "x"]
)
def test_dividing_is_as_dividing_the_inputs(arithmetic: str, factors: torch.Tensor) -> None:
    inputs = _inputs(2300, 12)
    divided, norms = Hessian(12, arithmetic=arithmetic), ColumnNorm(12)
    for statistic in (divided, norms):
        statistic.update(inputs[:2100])
        statistic.divide(factors)
        assert statistic.tokens == 2100
        statistic.update(inputs[2100:] / factors)
    expected = _gathered(inputs / factors, arithmetic).value
    # Rounded to int8 in two runs instead of one.
    assert _distance(divided.value, expected) < (1e-5 if arithmetic == "float32" else 1e-2)
    assert torch.equal(divided.value, divided.value.t())
    assert torch.allclose(norms.value, (inputs / factors).square().sum(0), rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_a_divided_hessian_is_that_of_divided_inputs(columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(40, columns, generator=generator)
    factors = torch.empty(columns).uniform_(-6, 6, generator=generator).exp2_()
    hessian = _gathered(inputs)
    hessian.divide(factors)
    scaled = inputs.double() / factors
    noise = (scaled.abs().t() @ scaled.abs()) * 1e-5
    assert ((hessian.value - scaled.t() @ scaled).abs() <= noise).all()
    assert torch.equal(hessian.value, hessian.value.t())


def test_a_statistic_that_nothing_came_to_is_zero() -> None:
    for statistic in (Hessian(4), ColumnNorm(4), Hessian(4, device="cpu", arithmetic="int8")):
        statistic.update(torch.empty(0, 4))
        assert statistic.tokens == 0 and not statistic.value.any() and not statistic.diagonal.any()
        statistic.divide(torch.full((4,), 2.0))
        assert not statistic.value.any()


def test_what_is_no_row_of_inputs_is_refused() -> None:
    for statistic in (Hessian(4), ColumnNorm(4)):
        for wrong in (torch.zeros(3, 5), torch.zeros(4), torch.zeros(2, 3, 4), torch.zeros(3, 4, dtype=torch.int64)):
            with pytest.raises(ValueError, match=r"must be \[tokens, 4\] of a float dtype"):
                statistic.update(wrong)
    with pytest.raises(ValueError, match="Allowed: float32, int8"):
        Hessian(4, arithmetic="bfloat16")


@pytest.mark.parametrize("size", [1, 5, 64, 128, 257, 1030])
def test_the_factor_is_that_of_the_damped_inverse(size: int) -> None:
    inputs = _inputs(2 * size, size)
    hessian = _gathered(inputs).value
    before = hessian.clone()
    order = torch.randperm(size)
    for places in (None, order):
        factor = inverse_factor(hessian, 0.01, places)
        ordered = hessian.double() if places is None else hessian.double()[places][:, places]
        damped = ordered + 0.01 * ordered.diagonal().mean() * torch.eye(size)
        expected = torch.linalg.cholesky(torch.linalg.inv(damped)).mT
        assert factor.dtype == torch.float32
        assert torch.equal(factor, factor.triu())
        assert _distance(factor, expected) < 1e-4
    assert torch.equal(hessian, before)


def test_the_factor_takes_the_memory_of_one_matrix() -> None:
    size = 2048
    hessian = torch.eye(size).addmm_(ones := torch.ones(size, 1), ones.t())
    with torch.profiler.profile(profile_memory=True) as profile:
        factor = inverse_factor(hessian, 0.01, torch.arange(size).flip(0))
    held, most = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert held >= factor.nbytes, "what is measured is what torch allocates"
    assert most < 1.3 * hessian.nbytes


def test_dead_columns_stand_alone() -> None:
    inputs = _inputs(100, 12)
    inputs[:, [0, 5, 11]] = 0
    factor = inverse_factor(_gathered(inputs).value, 0.0)
    alone = factor[[0, 5, 11]] - torch.diag(factor.diagonal())[[0, 5, 11]]
    assert factor.isfinite().all() and not alone.any()
    assert not (factor[:, [5, 11]] - torch.diag(factor.diagonal())[:, [5, 11]]).any()
    live = [column for column in range(12) if column not in (0, 5, 11)]
    assert _distance(factor[live][:, live], inverse_factor(_gathered(inputs[:, live]).value, 0.0)) < 1e-5


@pytest.mark.parametrize("dampening", [0.0, 0.01])
def test_one_repeated_token_is_dampened_until_it_has_a_factor(dampening: float) -> None:
    hessian = _gathered(torch.randn(1, 40).repeat(500, 1)).value
    factor = inverse_factor(hessian, dampening)
    assert factor.isfinite().all() and (factor.diagonal() > 0).all()


def test_dampening_rises_tenfold_to_the_mean_and_no_further() -> None:
    matrix = torch.eye(8)
    for lowest, used in ((-0.05, 0.1), (-0.5, 1.0)):
        matrix[0, 0] = lowest
        mean = float(matrix.diagonal().mean())
        expected = (matrix.diagonal() + used * mean).rsqrt()
        assert torch.allclose(inverse_factor(matrix, 0.01).diagonal(), expected, rtol=1e-5)
    matrix[0, 0] = -1.0
    with pytest.raises(NotPositiveDefinite, match="even with the mean of its diagonal"):
        inverse_factor(matrix, 0.01)
    for value in (math.nan, math.inf):
        matrix[0, 0] = value
        with pytest.raises(NotPositiveDefinite, match="not finite"):
            inverse_factor(matrix, 0.01)
    assert torch.equal(inverse_factor(torch.zeros(3, 3), 0.01), torch.eye(3))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 4), (9, 61)])
def test_output_errors_are_those_of_the_outputs(rows: int, columns: int) -> None:
    inputs, change = _inputs(200, columns), torch.randn(rows, columns)
    expected = (inputs.double() @ change.double().t()).square().sum(0)
    assert torch.allclose(output_errors(change, _gathered(inputs).value).double(), expected, rtol=1e-5)


def test_a_layer_error_is_relative_and_says_when_to_fall_back() -> None:
    assert LayerError.of("a", (200.0, 10.0, 4.0)) == LayerError("a", 0.05, 0.02)
    worse = LayerError.of("a", (200.0, 10.0, 11.0))
    assert worse == LayerError("a", 0.05, 0.05, "the solution was worse than the plain method")
    for solved in (math.nan, math.inf):
        assert LayerError.of("a", (200.0, 10.0, solved)) == LayerError("a", 0.05, 0.05, "the solution was not finite")
    assert LayerError.of("a", (200.0, 10.0, 4.0), "because").after == 0.05
    nothing = LayerError.of("a", (0.0, 0.0, 0.0))
    assert math.isnan(nothing.before) and math.isnan(nothing.after) and nothing.fallback is None
    broken = LayerError.of("a", (math.nan, math.nan, math.nan))
    assert math.isnan(broken.before) and broken.fallback == "the solution was not finite"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20000), min_size=1, max_size=6), st.sampled_from([64, 5000, 2**24]))
def test_runs_hold_every_row_once_and_are_bounded(rows: list[int], columns: int) -> None:
    rows = [min(count, 40) for count in rows] if columns > 5000 else rows
    runs = list(row_runs(rows, columns))
    parts = [part for run in runs for part in run]
    for number, count in enumerate(rows):
        mine = [part for at, part in parts if at == number]
        assert [part.start for part in mine] == [0, *(part.stop for part in mine[:-1])] and mine[-1].stop == count
    sizes = [sum(part.stop - part.start for _, part in run) for run in runs]
    most = max(1, min(statistics._RUN_ROWS, statistics._RUN_ELEMENTS // columns))
    assert [number for number, _ in parts] == sorted(number for number, _ in parts)
    assert all(size == most for size in sizes[:-1]) and 0 < sizes[-1] <= most


def _inputs(tokens: int, columns: int) -> torch.Tensor:
    """Correlated, with columns of different size."""
    mixing = torch.randn(columns, columns) + 2 * torch.eye(columns)
    return torch.randn(tokens, columns) @ mixing * torch.linspace(0.1, 3, columns)


def _gathered(inputs: torch.Tensor, arithmetic: str = "float32") -> Hessian:
    hessian = Hessian(inputs.shape[1], arithmetic=arithmetic)
    hessian.update(inputs)
    return hessian


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
