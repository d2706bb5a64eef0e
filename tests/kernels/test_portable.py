"""The portable kernel: any scheme and device, never more than a tile dense."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sparseautomodel.kernels import base
from sparseautomodel.kernels.portable import Portable
from tests.test_compressed_layers import compress, linear, reference_weight


@pytest.mark.parametrize("name", ["W4A16_ASYM", "FP8_BLOCK", "NVFP4A16", "W3"])
def test_a_tile_at_a_time_equals_all_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = compress(linear(96, 200), name)
    kernel = Portable(module.quantization_scheme, (200, 96), torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(base, "TILE_ELEMENTS", 1)
    assert [rows.start for rows in kernel.tiles()] == [0, 64, 128, 192]
    seen = []
    whole = Portable.dequantize

    def seeing(self: Portable, tensors: base.Tensors, rows: slice | None = None) -> torch.Tensor:
        seen.append(rows)
        return whole(self, tensors, rows)

    monkeypatch.setattr(Portable, "dequantize", seeing)
    flat, bias = torch.randn(3, 96, dtype=torch.bfloat16), torch.randn(200, dtype=torch.bfloat16)
    output = kernel.many(module._parameters, flat, bias)
    assert seen == list(kernel.tiles())
    torch.testing.assert_close(output, F.linear(flat, reference_weight(module).to(torch.bfloat16), bias))
