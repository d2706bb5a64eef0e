from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sparseautomodel.working import WorkingMemory, out_of_memory, shape_of
from tests.conftest import SIZES


def test_grows_with_the_call_until_it_is_learned() -> None:
    working = WorkingMemory(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
    assert 0 < working.of((1, 1)) < working.of((1, 8)) < working.of((4, 8))
    assert working.of((4, 8), logits=1) < working.of((4, 8))
    working.learn((4, 8), 77)
    working.learn((4, 8), 66)
    assert working.of((4, 8)) == 77


def test_shape_is_that_of_the_first_tensor() -> None:
    assert shape_of((), {"use_cache": True, "input_ids": torch.zeros(2, 5)}) == (2, 5)
    assert shape_of((torch.zeros(2, 5, 7),), {}) == (2, 5) and shape_of((), {}) == ()


def test_error_says_what_to_do() -> None:
    text = str(out_of_memory(torch.device("cpu"), 100, "the device said so"))
    assert "device_budget=100" in text and "set_budget(more)" in text and text.endswith("the device said so")
