"""Wanda against a plain sort of each row or group, and what must not break it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseautomodel.masks import prune_mask, satisfies, sparsity
from sparseautomodel.modifiers import Layer, Weight
from sparseautomodel.modifiers.wanda import WandaPruningModifier
from sparseautomodel.statistics import ColumnNorm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("structure", ["2:4", "1:4", "4:8", "3:5"])
def test_the_best_of_every_group_are_kept(structure: str, dtype: torch.dtype) -> None:
    n, m = map(int, structure.split(":"))
    modifier, inputs = WandaPruningModifier(mask_structure=structure), _inputs()
    weights = [_weight(dtype=dtype, seed=seed) for seed in range(2)]
    before = [weight.values.clone() for weight in weights]
    errors = modifier.solve(weights, _gathered(inputs))
    for weight, old, error in zip(weights, before, errors, strict=True):
        scores = old.double().abs() * inputs.double().square().sum(0).sqrt()
        best = scores.view(-1, m).argsort(dim=1, descending=True, stable=True)[:, :n]
        keep = torch.zeros(scores.numel() // m, m, dtype=torch.bool).scatter_(1, best, True).view(scores.shape)
        assert torch.equal(weight.keep, keep)
        assert torch.equal(weight.values, old * keep) and weight.values.dtype == dtype
        assert satisfies(weight.values, n, m)
        assert sparsity(weight.values) == modifier.sparsity_of(weight.layer)
        _check_error(error, old, prune_mask(old, None, (n, m)), keep, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.93, 1.0])
def test_the_same_share_of_every_row_goes(share: float, dtype: torch.dtype) -> None:
    modifier, weight, inputs = WandaPruningModifier(sparsity=share), _weight((7, 61), dtype=dtype), _inputs(columns=61)
    old = weight.values.clone()
    (error,) = modifier.solve([weight], _gathered(inputs))
    scores = old.double().abs() * inputs.double().square().sum(0).sqrt()
    keep = torch.ones(7, 61, dtype=torch.bool)
    keep.scatter_(1, scores.argsort(dim=1)[:, : round(share * 61)], False)
    assert torch.equal(weight.keep, keep) and torch.equal(weight.values, old * keep)
    assert sparsity(weight.values) == modifier.sparsity_of(weight.layer)
    _check_error(error, old, prune_mask(old, share, per_row=True), keep, inputs)


@pytest.mark.parametrize("keys", [{"mask_structure": "2:4"}, {"sparsity": 0.5}], ids=str)
def test_zeros_come_first_and_stay(keys: dict[str, Any]) -> None:
    modifier, weight = WandaPruningModifier(**keys), _weight()
    weight.prune(torch.rand(weight.values.shape) < 0.8)
    weight.values[5] = 0
    before = weight.values == 0
    modifier.solve([weight], _gathered(_inputs()))
    assert not weight.values[before].any()
    assert modifier.sparsity_of(weight.layer) <= sparsity(weight.values) < 0.56
    rows = (weight.values == 0).sum(1)[[0, 1, 2, 3, 4, 6]]
    assert (rows < 0.6 * weight.values.shape[1]).all()


@pytest.mark.parametrize(("case", "reason"), [("inf", "not finite"), ("nan", "not finite"), ("none", "no calibration")])
def test_without_a_usable_statistic_the_smallest_weights_go(case: str, reason: str) -> None:
    inputs = _inputs(0 if case == "none" else 30)
    if case != "none":
        inputs[3, 3] = float(case)
    for keys in ({"mask_structure": "2:4"}, {"sparsity": 0.3}):
        modifier, weight = WandaPruningModifier(**keys), _weight()
        expected = weight.values * prune_mask(weight.values, modifier.sparsity, modifier.structure, per_row=True)
        (error,) = modifier.solve([weight], _gathered(inputs))
        assert reason in error.fallback and math.isnan(error.before) and math.isnan(error.after)
        assert torch.equal(weight.values, expected)


def test_outliers_of_half_precision_are_finite() -> None:
    inputs = _inputs()
    inputs[7] = 6e4
    weight = _weight(dtype=torch.float16)
    (error,) = WandaPruningModifier(mask_structure="2:4").solve([weight], _gathered(inputs.half()))
    assert error.fallback is None and 0 < error.after <= error.before < 1


def _check_error(error: Any, old: Tensor, smallest: Tensor, keep: Tensor, inputs: Tensor) -> None:
    """Squared weights times squared norms, which is what the output loses where inputs are independent."""
    cost = old.double().square() * inputs.double().square().sum(0)
    for mask, said in ((smallest, error.before), (keep, error.after)):
        assert said == pytest.approx(float((cost * ~mask).sum() / cost.sum()), rel=1e-4)
    assert error.fallback is None and error.after <= error.before


def _weight(shape: Sequence[int] = (32, 240), dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Weight:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return Weight(Layer("layer", "layer", ("Linear",), (shape[0], shape[1]), dtype), values)


def _inputs(tokens: int = 100, columns: int = 240) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 3, columns)


def _gathered(inputs: Tensor) -> ColumnNorm:
    norms = ColumnNorm(inputs.shape[1])
    norms.update(inputs)
    return norms
