"""SparseGPT against the paper in slow float64, exact counts of zeros, and what must not break it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseautomodel import statistics
from sparseautomodel.masks import prune_mask, satisfies, sparsity
from sparseautomodel.modifiers import Layer, ModifierError, Weight, sparsegpt
from sparseautomodel.modifiers.gptq import GPTQModifier
from sparseautomodel.modifiers.sparsegpt import SparseGPTModifier, round_kept, solve_kept
from sparseautomodel.scales import Grid
from sparseautomodel.statistics import Hessian, inverse_factor, output_errors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STRUCTURES = ("2:4", "1:4", "4:8", "3:5", "8:16")
COLUMNS = 240
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "NVFP4A16")


pytestmark = pytest.mark.usefixtures("compiled_or_not")


@pytest.mark.parametrize("zeros", [0.0, 0.3], ids=["dense", "sparse"])
@pytest.mark.parametrize("block_size", [128, 33])
@pytest.mark.parametrize("structure", [None, (2, 4), (1, 4), (3, 5), (4, 8)], ids=str)
def test_masks_and_values_are_those_of_the_paper(
    structure: tuple[int, int] | None, block_size: int, zeros: float
) -> None:
    values, hessian = _values((24, COLUMNS)).float(), _gathered(_inputs()).value
    values[torch.rand(values.shape) < zeros] = 0
    factor = inverse_factor(hessian, 0.01)
    found, keep = sparsegpt.sparsegpt(values, factor, 0.4, structure, block_size)
    expected, mask = _paper(values.double(), hessian.double(), 0.4, structure, block_size)
    assert torch.equal(keep, mask)
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-6)
    assert not found[values == 0].any() and not found[~keep].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_exactly_n_of_every_m_are_kept(structure: str, dtype: torch.dtype) -> None:
    modifier = SparseGPTModifier(mask_structure=structure)
    weights = [_weight((rows, COLUMNS), dtype=dtype, seed=rows) for rows in (32, 1, 7)]
    before = [weight.values.clone() for weight in weights]
    errors = modifier.solve(weights, _gathered(_inputs()))
    n, m = map(int, structure.split(":"))
    for weight, old, error in zip(weights, before, errors, strict=True):
        assert weight.values.dtype == dtype and satisfies(weight.values, n, m)
        assert torch.equal(weight.keep, weight.values != 0)
        assert (weight.keep.reshape(-1, m).sum(1) == n).all()
        assert sparsity(weight.values) == modifier.sparsity_of(weight.layer)
        assert not torch.equal(weight.values[weight.keep], old[weight.keep]), "kept weights are moved"
        assert error.fallback is None and error.after < 0.8 * error.before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "share"), [(7, 61, 0.5), (3, 5, 0.3), (40, 300, 0.9), (8, 40, 1.0)])
def test_unstructured_prunes_the_exact_share_of_each_layer(
    rows: int, columns: int, share: float, dtype: torch.dtype
) -> None:
    modifier = SparseGPTModifier(sparsity=share)
    weights = [_weight((rows, columns), dtype=dtype), _weight((2 * rows, columns), dtype=dtype)]
    errors = modifier.solve(weights, _gathered(_inputs(columns=columns)))
    for weight, error in zip(weights, errors, strict=True):
        assert int((~weight.keep).sum()) == round(share * weight.values.numel())
        assert not weight.values[~weight.keep].any()
        assert sparsity(weight.values) >= modifier.sparsity_of(weight.layer)
        assert error.after <= error.before


def test_errors_are_those_of_the_outputs_before_and_after() -> None:
    for keys in ({"mask_structure": "2:4"}, {"sparsity": 0.6}):
        modifier, weight, inputs = SparseGPTModifier(**keys), _weight(dtype=torch.float32), _inputs()
        exact = weight.values.double()
        smallest = exact * prune_mask(exact, modifier.sparsity, modifier.structure)
        (error,) = modifier.solve([weight], _gathered(inputs))
        output = inputs.double() @ exact.t()
        for found, said in ((smallest, error.before), (weight.values.double(), error.after)):
            lost = (inputs.double() @ found.t() - output).square().sum() / output.square().sum()
            assert said == pytest.approx(float(lost), rel=1e-3)


@pytest.mark.parametrize("structure", [(2, 4), None], ids=str)
def test_solving_again_is_better_than_the_paper(structure: tuple[int, int] | None) -> None:
    keys = {"sparsity": 0.5} if structure is None else {"mask_structure": "2:4"}
    weight, hessian = _weight((64, COLUMNS), dtype=torch.float32), _gathered(_inputs())
    exact, factor = weight.values.clone(), inverse_factor(hessian.value, 0.01)
    paper, _ = sparsegpt.sparsegpt(exact, factor, 0.5, structure)
    SparseGPTModifier(**keys).solve([weight], hessian)
    again, before = (output_errors(found - exact, hessian.value) for found in (weight.values, paper))
    assert again.sum() < 0.9 * before.sum()
    if structure is not None:
        assert (again <= before * (1 + 1e-5)).all(), "a row that does not gain keeps the solution of the paper"


def test_kept_weights_are_those_of_least_squares() -> None:
    exact, inputs = _values((6, 40), torch.float32).double(), _inputs(columns=40)
    keep = torch.rand(6, 40) < 0.5
    hessian = inputs.double().t() @ inputs.double()
    added = 0.01 * float(hessian.diagonal().mean())
    found, slope = solve_kept(exact.float(), exact.float() * keep, keep, hessian.float(), added, 200)
    damped = hessian + added * torch.eye(40)
    expected = (exact - found) @ damped
    assert torch.allclose(slope.double()[~keep], expected[~keep], rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    for row in range(6):
        mine = keep[row].nonzero().flatten()
        solution = torch.linalg.solve(damped[mine][:, mine], damped[mine] @ exact[row])
        assert torch.allclose(found[row, mine].double(), solution, rtol=1e-3, atol=1e-5)
        assert not found[row, ~keep[row]].any()


@pytest.mark.parametrize("keys", [{"mask_structure": "2:4"}, {"sparsity": 0.5}], ids=str)
def test_what_was_zero_stays_zero_and_counts_as_pruned(keys: dict[str, Any]) -> None:
    modifier, weight = SparseGPTModifier(**keys), _weight()
    weight.prune(torch.rand(weight.values.shape) < 0.8)
    weight.values[5, 4:40] = 0
    before = weight.values == 0
    modifier.solve([weight], _gathered(_inputs()))
    assert not weight.values[before].any() and not weight.keep[before].any()
    assert sparsity(weight.values) >= modifier.sparsity_of(weight.layer)
    assert sparsity(weight.values) < 0.6
    if modifier.structure is not None:
        assert satisfies(weight.values, 2, 4)


def test_layers_of_one_input_are_solved_together_as_they_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hessian = _gathered(_inputs())
    for keys in ({"mask_structure": "2:4"}, {"sparsity": 0.5}):
        modifier = SparseGPTModifier(**keys)
        alone = [_weight((rows, COLUMNS), seed=rows) for rows in (9, 40, 3)]
        expected = [modifier.solve([weight], hessian)[0] for weight in alone]
        for most in (4096, 8):  # rows at once
            with monkeypatch.context() as patch:
                patch.setattr(statistics, "_RUN_ROWS", most)
                together = [_weight((rows, COLUMNS), seed=rows) for rows in (9, 40, 3)]
                errors = modifier.solve(together, hessian)
            for number, weight in enumerate(together):
                assert torch.equal(weight.keep, alone[number].keep)
                assert torch.allclose(weight.values.float(), alone[number].values.float(), rtol=0.02, atol=1e-3)
                assert errors[number].name == weight.layer.name
                assert errors[number].after == pytest.approx(expected[number].after, rel=1e-3)


@pytest.mark.parametrize("keys", [{"mask_structure": "2:4"}, {"sparsity": 0.5}], ids=str)
@pytest.mark.parametrize("dampening", [0.0, 0.01])
def test_dead_columns_and_one_repeated_token_are_solved(keys: dict[str, Any], dampening: float) -> None:
    dead = _inputs()
    dead[:, [0, 1, 2, 3, 100, 239]] = 0
    for inputs in (dead, _inputs(1).repeat(50, 1)):
        weight = _weight()
        (error,) = SparseGPTModifier(**keys, dampening_frac=dampening).solve([weight], _gathered(inputs))
        assert weight.values.isfinite().all() and error.fallback is None and error.after <= error.before
        assert sparsity(weight.values) == 0.5


@pytest.mark.parametrize(("case", "reason"), [("inf", "not finite"), ("nan", "not finite"), ("none", "no calibration")])
def test_without_a_usable_statistic_the_smallest_weights_go(case: str, reason: str) -> None:
    inputs = _inputs(0 if case == "none" else 30)
    if case != "none":
        inputs[3, 3] = float(case)
    for keys in ({"mask_structure": "2:4"}, {"sparsity": 0.3}):
        modifier, weight = SparseGPTModifier(**keys), _weight()
        expected = weight.values * prune_mask(weight.values, modifier.sparsity, modifier.structure)
        (error,) = modifier.solve([weight], _gathered(inputs, "int8"))
        assert reason in error.fallback and math.isnan(error.before) and math.isnan(error.after)
        assert torch.equal(weight.values, expected) and torch.equal(weight.keep, expected != 0)


def test_a_layer_that_is_worse_falls_back_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = SparseGPTModifier._solved_again

    def spoiled(self: SparseGPTModifier, *args: Any) -> tuple[Tensor, Tensor]:
        result, keep = solve(self, *args)
        result[20:40] += keep[20:40]
        result[40:] = math.nan
        return result, keep

    modifier, hessian = SparseGPTModifier(mask_structure="2:4"), _gathered(_inputs())
    good, weights = ([_weight((20, COLUMNS), seed=number) for number in range(3)] for _ in range(2))
    expected = modifier.solve(good, hessian)
    monkeypatch.setattr(SparseGPTModifier, "_solved_again", spoiled)
    errors = modifier.solve(weights, hessian)
    assert errors[0] == expected[0] and torch.equal(weights[0].values, good[0].values)
    for number, reason in ((1, "worse than the plain method"), (2, "not finite")):
        exact = _values((20, COLUMNS), seed=number)
        assert reason in errors[number].fallback and errors[number].after == errors[number].before
        assert torch.equal(weights[number].values, exact * prune_mask(exact, None, (2, 4)))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_pruned_layers_are_rounded_as_in_slow_float64(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsegpt, "_PART_STEPS", 100)
    hessian, exact = _gathered(_inputs(columns=48)).value, _values((40, 48), torch.float32)
    keep = prune_mask(exact, None, (2, 4))
    order, weight = hessian.diagonal().argsort(descending=True), _weight((40, 48), torch.float32)
    weight.prune(keep)
    modifier = _joint("W4A16" if symmetric else "W4A16_ASYM", group_size=16)
    modifier.set_scales(weight)
    grid = Grid.of(modifier.weights_of(weight.layer), (40, 48), weight.scale, weight.zero_point)
    added = 0.01 * float(hessian.diagonal().mean())
    factor = inverse_factor(hessian, 0.01, order)
    found = round_kept(exact, weight.values, keep, grid, hessian, added, factor, order, 7)
    expected = _rounded(exact.double(), weight.values.double(), keep, grid, hessian.double(), order)
    # A number within float32's precision of halfway goes either way, and takes the rest of its row along.
    assert int((~torch.isclose(found.double(), expected, rtol=1e-4, atol=1e-7)).any(1).sum()) <= 2
    swept = sparsegpt.round_columns(weight.values, grid, factor, order, 128, keep)
    errors = [output_errors(one - exact, hessian).sum() for one in (found, swept, grid.nearest(weight.values))]
    assert errors[0] < errors[1] < errors[2]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(SCHEMES),
    st.sampled_from([*STRUCTURES[:3], "unstructured"]),
    st.sampled_from(DTYPES),
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from(["minmax", "mse"]),
    st.integers(0, 1000),
)
def test_joint_work_keeps_zeros_exact_and_values_on_the_grid(
    scheme: str, structure: str, dtype: torch.dtype, rows: int, groups: int, observer: str, seed: int
) -> None:
    columns = 32 * groups
    keys = {"sparsity": 0.4} if structure == "unstructured" else {"mask_structure": structure}
    size = {"group_size": 32} if scheme.startswith("W4") else {}
    modifier = SparseGPTModifier(scheme=scheme, observer=observer, **keys, **size)
    weight = _weight((rows, columns), dtype, seed)
    weight.values[:, 3:9] = 0
    exact = weight.values.float()
    (error,) = modifier.solve([weight], _gathered(_inputs(200, columns)))
    args = modifier.weights_of(weight.layer)
    grid = Grid.of(args, (rows, columns), weight.scale, weight.zero_point, weight.global_scale)
    assert weight.values.dtype == torch.float32 and weight.scale.dtype in (dtype, torch.float32)
    assert torch.equal(grid.nearest(weight.values), weight.values), "each is a number of the scheme"
    assert not weight.values[exact == 0].any() and not weight.values[~weight.keep].any()
    assert sparsity(weight.values) >= modifier.sparsity_of(weight.layer)
    if modifier.structure is not None:
        assert satisfies(weight.values, *modifier.structure)
    assert error.after <= error.before


def test_joint_work_is_better_than_one_after_the_other() -> None:
    hessian, exact = _gathered(_inputs()), _values((64, COLUMNS)).float()
    joint, two = _weight((64, COLUMNS)), _weight((64, COLUMNS))
    keys = {"scheme": "W4A16", "group_size": 48, "observer": "mse"}
    (error,) = SparseGPTModifier(mask_structure="2:4", **keys).solve([joint], hessian)
    SparseGPTModifier(mask_structure="2:4").solve([two], hessian)
    GPTQModifier(**keys).solve([two], hessian)
    lost = [float(output_errors(one.values - exact, hessian.value).sum()) for one in (joint, two)]
    assert lost[0] < 0.99 * lost[1]
    output = float(output_errors(exact, hessian.value).sum())
    assert error.after == pytest.approx(lost[0] / output, rel=1e-4) and error.fallback is None


@pytest.mark.parametrize("case", ["none", "nan", "worse"])
def test_joint_work_falls_back_to_the_smallest_and_to_nearest(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, modifier, weight = _inputs(0 if case == "none" else 300), _joint("W4A16_ASYM", group_size=48), _weight()
    if case == "nan":
        inputs[3, 3] = math.nan
    if case == "worse":
        monkeypatch.setattr(sparsegpt, "round_kept", lambda exact, values, *_: -values)
    exact = _values()
    (error,) = modifier.solve([weight], _gathered(inputs))
    assert error.fallback and weight.values.isfinite().all()
    grid = Grid.of(modifier.weights_of(weight.layer), exact.shape, weight.scale, weight.zero_point)
    keep = prune_mask(exact, None, (2, 4))
    assert torch.equal(weight.keep, keep) and torch.equal(weight.values, grid.nearest((exact * keep).float()))


def test_without_a_scheme_the_number_format_stays_and_with_one_targets_are_the_same() -> None:
    plain, joint, layer = SparseGPTModifier(mask_structure="2:4"), _joint("W4A16"), _weight().layer
    assert plain.patterns() == joint.patterns() == ("Linear",) and plain.selects(layer) and joint.selects(layer)
    assert plain.scheme_of(layer) is None and plain.resolve([layer]) == plain
    assert plain.rows(layer) == joint.rows(_weight((4, 256)).layer) == 1
    assert joint.scheme_of(layer).weights.num_bits == 4
    assert _joint("W4A16", group_size="auto").resolve([_weight((4, 192)).layer]).group_size == 64
    assert joint.sparsity_of(layer) == plain.sparsity_of(layer) == 0.5
    assert plain.to_dict() == {"mask_structure": "2:4"}


def test_columns_that_the_structure_does_not_divide_are_refused() -> None:
    weight = _weight((3, 42))
    with pytest.raises(ValueError, match=r"2:4 needs a multiple of 4 columns, the matrix is \[3, 42\]"):
        SparseGPTModifier(mask_structure="2:4").solve([weight], _gathered(_inputs(columns=42)))


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"block_size": 0}, "block_size", "Write 128"),
        ({"dampening_frac": 2}, "dampening_frac", "from 0 to 1"),
        ({"mask_structure": "unstructured"}, "sparsity", "no sparsity"),
        ({"observer": "mse"}, "scheme", "Write scheme: W4A16"),
        ({"scheme": "W4B16"}, "scheme", "there is no scheme"),
    ],
)
def test_a_wrong_key_is_said_with_what_is_allowed(keys: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ModifierError, match=message) as error:
        SparseGPTModifier(**{"mask_structure": "2:4", **keys})
    assert error.value.key == key


def _paper(
    values: Tensor, hessian: Tensor, share: float, structure: tuple[int, int] | None, block_size: int
) -> tuple[Tensor, Tensor]:
    """Algorithm 1, with the inverse itself, one column at a time, and zeros that count as pruned."""
    left, zero = values.clone(), values == 0
    inverse = torch.linalg.inv(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian)))
    diagonal = _conditional(inverse)
    keep, (rows, columns) = torch.ones_like(zero), values.shape
    width = structure[1] if structure else 1
    block_size = block_size // width * width
    for column in range(columns):
        scores = (left.square() / diagonal.square()).masked_fill(zero, 0)
        if structure is None and column % block_size == 0:
            last = min(columns, column + block_size)
            pruned = round(share * last * rows) - round(share * column * rows)
            lowest = scores[:, column:last].flatten().argsort(stable=True)[:pruned]
            part = torch.ones(rows * (last - column), dtype=torch.bool)
            part[lowest] = False
            keep[:, column:last] = part.view(rows, -1)
        elif structure is not None and column % width == 0:
            group = slice(column, column + width)
            best = scores[:, group].argsort(dim=1, descending=True, stable=True)[:, : structure[0]]
            keep[:, group] = torch.zeros(rows, width, dtype=torch.bool).scatter_(1, best, True)
        keep[:, column] &= ~zero[:, column]
        gone = torch.where(keep[:, column] | zero[:, column], 0, left[:, column]) / inverse[column, column]
        left[:, column] *= keep[:, column]
        left[:, column + 1 :] -= gone[:, None] * inverse[column, column + 1 :]
        inverse = inverse - inverse[:, [column]] * inverse[[column]] / inverse[column, column]
    return left, keep


def _rounded(exact: Tensor, values: Tensor, keep: Tensor, grid: Grid, hessian: Tensor, order: Tensor) -> Tensor:
    """Columns rounded one at a time, in three parts, with the inverse itself, and least squares of the rest between."""
    left, damped = values.clone(), hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.linalg.inv(damped)
    free = keep.clone()
    for part in order.chunk(3):
        for place, column in enumerate(part.tolist()):
            left[:, column] *= keep[:, column]
            before, rest = left[:, column].clone(), part[place + 1 :]
            left[:, column] = grid.nearest(left.float())[:, column].double()
            error = (before - left[:, column]) / inverse[column, column]
            left[:, rest] -= error[:, None] * inverse[column, rest]
            inverse = inverse - inverse[:, [column]] * inverse[[column]] / inverse[column, column]
        free[:, part] = False
        for row, target in enumerate(exact):
            mine = free[row].nonzero().flatten()
            left[row, mine] = 0
            slope = damped[mine] @ (target - left[row])
            left[row, mine] = torch.linalg.solve(damped[mine][:, mine], slope)
    return left


def _joint(scheme: str, **keys: Any) -> SparseGPTModifier:
    return SparseGPTModifier(mask_structure="2:4", scheme=scheme, **keys)


def _conditional(inverse: Tensor) -> Tensor:
    """The diagonal of U: the root of what the inverse has for each column once the columns before it are gone."""
    found = []
    for column in range(len(inverse)):
        found.append(inverse[column, column])
        inverse = inverse - inverse[:, [column]] * inverse[[column]] / inverse[column, column]
    return torch.stack(found).sqrt()


def _values(shape: Sequence[int] = (32, COLUMNS), dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.004).to(dtype)


def _weight(shape: Sequence[int] = (32, COLUMNS), dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Weight:
    name = f"layer.{seed}"
    return Weight(Layer(name, name, ("Linear",), (shape[0], shape[1]), dtype), _values(shape, dtype, seed))


def _inputs(tokens: int = 600, columns: int = COLUMNS) -> Tensor:
    """Correlated, with columns of different size."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(columns, columns, generator=generator) / 8 + torch.eye(columns)
    return torch.randn(tokens, columns, generator=generator) @ mixing * torch.linspace(0.2, 3, columns).flip(0)


def _gathered(inputs: Tensor, arithmetic: str = "float32") -> Hessian:
    hessian = Hessian(inputs.shape[1], arithmetic=arithmetic)
    hessian.update(inputs)
    return hessian
