"""A block alone on what it was called with, whole or for the first row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseautomodel.forwards import Forward, first_tensor, run_block, run_row


class Block(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor, rotary: Any = None, scale: float = 1.0, **kwargs: Any) -> Any:
        assert hidden.shape[0] in (1, 3) and mask.shape[0] == hidden.shape[0]
        cos, sin = rotary
        return (hidden * cos + sin + mask[..., None]) * scale, "more"


def test_first_row_is_the_first_of_all_rows() -> None:
    hidden, mask = torch.randn(3, 5, 8), torch.randn(3, 5)
    rotary = (torch.randn(1, 5, 8), torch.randn(3, 5, 8))  # one for all rows, and one for each
    kwargs = {"rotary": rotary, "scale": 2.0, "cache": None}
    block = Block()
    whole = run_block(block, Forward({}, args=(hidden, mask), kwargs=kwargs))
    assert whole.shape == (3, 5, 8)
    assert torch.equal(run_row(block, (hidden, mask), kwargs), whole[:1])


def test_hidden_states_are_the_first_float_tensor() -> None:
    hidden = torch.randn(2, 3)
    ids = torch.arange(4)
    assert first_tensor(((ids, hidden), {"mask": torch.ones(1)})) is hidden
    assert first_tensor(((), {"ids": ids, "hidden_states": hidden})) is hidden
    assert first_tensor([{"a": [ids]}, hidden]) is hidden
    with pytest.raises(ValueError, match="no float tensor"):
        first_tensor((ids, None, "text"))
