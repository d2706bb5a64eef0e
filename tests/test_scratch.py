"""Memory that is used again: one for each role, in each thread."""

from __future__ import annotations

import torch

from sparseautomodel.scratch import scratch


def test_scratch_is_one_memory_a_role_and_grows() -> None:
    first = scratch("a test", 4, dtype=torch.float32)
    again = scratch("a test", 2, 2, dtype=torch.int32)
    assert first.data_ptr() == again.data_ptr() and again.shape == (2, 2)
    assert scratch("a test", 100, dtype=torch.float32).data_ptr() != first.data_ptr()
    with torch.inference_mode():
        scratch("a test", 100, dtype=torch.float32).fill_(1)
    scratch("a test", 100, dtype=torch.float32).fill_(2)
