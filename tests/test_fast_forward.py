"""The forward of calibration: what it takes over, and what it leaves to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparseautomodel import pairs
from sparseautomodel.fast_forward import FastForward
from sparseautomodel.masks import prune_mask

NEEDS_C = pytest.mark.skipif(pairs.why_not() is not None, reason=str(pairs.why_not()))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"split": 0, "multiply": 0}

    def count(name: str) -> Any:
        real = getattr(pairs, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return real(*args)

        return call

    for name in counts:
        monkeypatch.setattr(pairs, name, count(name))
    return counts


def layer(sparse: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    made = nn.Linear(64, 32).to(dtype)
    if sparse:
        with torch.no_grad():
            made.weight.mul_(prune_mask(made.weight, None, (2, 4)))
    return made


@NEEDS_C
def test_sparse_weights_are_split_once_and_again_when_they_change(counted: dict[str, int]) -> None:
    sparse, inputs = layer(), torch.randn(2, 5, 64).bfloat16()
    fast = FastForward()
    with torch.no_grad():
        wanted = sparse(inputs)
        for _ in range(3):
            with fast:
                torch.testing.assert_close(sparse(inputs), wanted)
        assert counted == {"split": 1, "multiply": 3}
        sparse.weight.mul_(2)
        with fast:
            torch.testing.assert_close(sparse(inputs), (wanted - sparse.bias) * 2 + sparse.bias, rtol=0.05, atol=0.02)
            assert counted == {"split": 2, "multiply": 4}
            sparse.weight.add_(1)
            found = sparse(inputs)
        assert torch.equal(found, sparse(inputs)) and counted == {"split": 3, "multiply": 4}
        with fast:
            sparse.weight = nn.Parameter(layer().weight.detach())
            torch.testing.assert_close(sparse(inputs), functional.linear(inputs, sparse.weight, sparse.bias))
    assert counted["split"] == 4


@NEEDS_C
def test_weights_that_are_gone_are_let_go() -> None:
    fast = FastForward()
    with torch.no_grad(), fast:
        for _ in range(3):
            layer()(torch.randn(2, 64).bfloat16())
    assert len(fast._seen) == 0


@pytest.mark.parametrize("case", ["dense", "float32", "gradient", "no compiler", "keywords"])
def test_left_to_torch(case: str, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32 if case == "float32" else torch.bfloat16
    made, inputs = layer(case != "dense", dtype), torch.randn(3, 64, dtype=dtype, requires_grad=case == "gradient")
    if case == "no compiler":
        monkeypatch.setattr(pairs, "_functions", lambda: "no compiler")
    with FastForward():
        if case == "keywords":
            found = functional.linear(weight=layer(False).weight, input=inputs, bias=None)
            assert found.shape == (3, 32)
        else:
            assert torch.equal(made(inputs), functional.linear(inputs, made.weight, made.bias))
    assert counted["multiply"] == 0


def test_errors_of_torch_stay_those_of_torch() -> None:
    with FastForward(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(False)(torch.randn(3, 63).bfloat16())
