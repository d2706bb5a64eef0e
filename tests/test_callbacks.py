"""A walk can be watched by an object that does nothing: each callback has a default."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from sparseautomodel.callbacks import Callbacks
from sparseautomodel.sets import find_blocks
from sparseautomodel.walk import walk


def test_defaults_change_nothing(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers = [f"model.layers.{number}.mlp.down_proj" for number in (0, 1)]
    blocks = find_blocks(model, layers)
    rows = [{"input_ids": torch.arange(1, 9)[None]}] * 2
    inside = {block: [f"{block}.mlp.down_proj"] for block in blocks}
    walk(model, rows, blocks, inside, Callbacks(), witnesses=rows, outside=["lm_head"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not Callbacks().restore(blocks[0])
