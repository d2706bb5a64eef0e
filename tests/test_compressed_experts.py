"""Experts as a mixture of layers, against each token going through each of its experts in plain code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparseautomodel.compressed_experts import CompressedExperts
from tests.test_compressed_layers import compress, linear

BF16 = torch.bfloat16


def experts(count: int, gate: Any = None, **attributes: Any) -> nn.Module:
    """A fused experts module of transformers 5, as far as a stand-in looks at it."""
    body = {"_apply_gate": gate} if gate else {}
    fused = type("Experts", (nn.Module,), body)()
    for name, value in {"num_experts": count, "act_fn": nn.SiLU(), **attributes}.items():
        setattr(fused, name, value)
    return fused


def mixture(
    layers: dict[str, nn.Module], states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, inner: Any
) -> torch.Tensor:
    """Slow and plain: each token through each of its experts."""
    result = torch.zeros_like(states)
    for token in range(len(states)):
        for position, number in enumerate(index[token].tolist()):
            outputs = {name.partition(".")[2]: layer for name, layer in layers.items() if name.startswith(f"{number}.")}
            result[token] += outputs["down"](inner(outputs, states[token])) * weights[token, position]
    return result


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_experts_are_a_mixture_of_their_layers(tokens: int) -> None:
    sizes = {"gate": (48, 32), "up": (48, 32), "down": (32, 48)}
    layers = {f"{i}.{name}": compress(linear(*size), "W4A16") for i in range(4) for name, size in sizes.items()}
    layers["3.gate"], layers["3.up"], layers["3.down"] = linear(48, 32), linear(48, 32), linear(32, 48)  # left dense
    module = CompressedExperts(experts(4), layers, ["gate", "up"], "down")
    states, weights = torch.randn(tokens, 48, dtype=BF16), torch.rand(tokens, 2, dtype=BF16)
    index = (
        torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]) if tokens else torch.zeros(0, 2, dtype=torch.int64)
    )
    wanted = mixture(layers, states, index, weights, lambda own, x: F.silu(own["gate"](x)) * own["up"](x))
    torch.testing.assert_close(module(states, index, weights), wanted, atol=2e-2, rtol=2e-2)
    assert set(module.state_dict()) == {
        f"{name}.{part}" for name, layer in layers.items() for part in layer.state_dict()
    }


def test_experts_use_the_gate_and_the_attributes_of_the_module_they_stand_in_for() -> None:
    def clamped(self: Any, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

    sizes = {"gate": (48, 32), "up": (48, 32), "down": (32, 48)}
    layers = {f"{i}.{name}": compress(linear(*size), "W4A16") for i in range(2) for name, size in sizes.items()}
    module = CompressedExperts(experts(2, clamped, limit=0.1, has_gate=True), layers, ["gate", "up"], "down")
    states, index, weights = torch.randn(5, 48, dtype=BF16), torch.tensor([[0, 1]] * 5), torch.ones(5, 2, dtype=BF16)

    def inner(own: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        return F.silu(own["gate"](x).clamp(max=0.1)) * own["up"](x).clamp(-0.1, 0.1)

    torch.testing.assert_close(
        module(states, index, weights), mixture(layers, states, index, weights, inner), atol=2e-2, rtol=2e-2
    )


def test_experts_without_a_gate_and_experts_of_other_ranks() -> None:
    layers = {f"{i}.{name}": compress(linear(48, 48), "W4A16") for i in range(2) for name in ("up", "down")}
    fused = experts(2, lambda self, both: both.chunk(2, dim=-1)[0], has_gate=False)
    module = CompressedExperts(fused, layers, ["up"], "down")
    states, weights = torch.randn(3, 48, dtype=BF16), torch.ones(3, 1, dtype=BF16)
    elsewhere = torch.tensor([[0], [2], [1]])  # 2: what expert parallelism writes for an expert of another rank
    output = module(states, elsewhere, weights)
    wanted = mixture(layers, states[[0, 2]], elsewhere[[0, 2]], weights[[0, 2]], lambda own, x: F.silu(own["up"](x)))
    torch.testing.assert_close(output[[0, 2]], wanted, atol=2e-2, rtol=2e-2)
    assert torch.equal(output[1], torch.zeros(48, dtype=BF16))
    other = copy.deepcopy(module)
    assert torch.equal(other(states, elsewhere, weights), output)
