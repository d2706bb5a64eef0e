"""Which layers read one input, found without names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparseautomodel.sets import input_sets


class Block(nn.Module):
    """Names say nothing here, and the layers are called in another order than they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.zulu, self.alpha, self.mike, self.idle = (nn.Linear(4, 4) for _ in range(4))
        self.experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mike(x) * self.zulu(x)
        z = y + 1  # equal shape, another tensor
        chosen = z[:1]
        expert = self.experts[1]
        return self.alpha(z) + expert["down"](expert["up"](chosen))


def test_sets_are_those_of_one_input_in_the_order_of_the_calls() -> None:
    block, names = Block(), ["zulu", "alpha", "mike"]
    assert input_sets(block, lambda: block(torch.randn(2, 4)), names) == [("mike", "zulu"), ("alpha",)]
    assert not any(module._forward_pre_hooks for module in block.modules())


def test_experts_that_were_not_reached_get_the_sets_of_those_that_were() -> None:
    block = Block()
    names = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    assert input_sets(block, lambda: block(torch.randn(2, 4)), names) == [
        ("mike", "zulu"),
        ("alpha",),
        *[(f"experts.{number}.{part}",) for number in range(3) for part in ("up", "down")],
        ("idle",),
    ]


def test_hooks_are_gone_after_an_error() -> None:
    block = Block()
    with pytest.raises(RuntimeError):
        input_sets(block, lambda: block(torch.randn(2, 5)), ["mike"])
    assert not any(module._forward_pre_hooks for module in block.modules())
