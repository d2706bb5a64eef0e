"""A block alone, and what its hidden states are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseautomodel.forwards import first_tensor, run_block


class Block(nn.Module):
    def forward(self, hidden: Tensor, scale: float = 1.0, **kwargs: Any) -> Any:
        return hidden * scale, "more"


def test_a_block_alone_runs_without_its_hooks() -> None:
    block, hidden = Block(), torch.randn(3, 5, 8)
    block.register_forward_pre_hook(lambda module, args: pytest.fail("a hook has run"))
    assert torch.equal(run_block(block, (hidden,), {"scale": 2.0, "cache": None}), hidden * 2)


def test_hidden_states_are_the_first_float_tensor() -> None:
    hidden = torch.randn(2, 3)
    ids = torch.arange(4)
    assert first_tensor(((ids, hidden), {"mask": torch.ones(1)})) is hidden
    assert first_tensor(((), {"ids": ids, "hidden_states": hidden})) is hidden
    assert first_tensor([{"a": [ids]}, hidden]) is hidden
    with pytest.raises(ValueError, match="no float tensor"):
        first_tensor((ids, None, "text"))
