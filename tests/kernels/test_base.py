"""The contract of kernels: over every kernel of the folder, for each scheme it covers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sparseautomodel.kernels import KERNELS, Kernel
from tests.test_compressed_layers import LARGE_GROUPS, SCHEMES, compress, linear, reference_weight, scheme_of

BF16 = torch.bfloat16
NAMES = [*SCHEMES, *LARGE_GROUPS, "W8A8", "FP8", "FP8_DYNAMIC", "MXFP8A16", "MXFP6A16"]
SIZES = [(64, 128), (128, 64), (48, 31), (576, 192)]


CASES = [
    pytest.param(kind, name, size, id=f"{kind.__name__}-{name}-{size[0]}x{size[1]}")
    for kind in KERNELS
    for name in NAMES
    for size in SIZES
    if kind.covers(scheme_of(name)) and size[0] % (scheme_of(name).weights.group_size or 1) == 0
]


def test_every_kernel_has_cases() -> None:
    assert {case.values[0] for case in CASES} == set(KERNELS)


@pytest.mark.parametrize(("kind", "name", "size"), CASES)
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16], ids=str)
def test_kernel_gives_the_dequantized_product(
    kind: type[Kernel], name: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    columns, rows = size
    module = compress(linear(columns, rows, dtype=dtype), name, dtype)
    kernel = kind(module.quantization_scheme, (rows, columns), dtype, torch.device("cpu"))
    if kernel.refuses():
        pytest.skip(kernel.refuses())
    stored = {part: module._parameters[part].detach() for part in module.parts}
    before = {part: value.clone() for part, value in stored.items()}
    rest = {part: value for part, value in module._parameters.items() if part not in module.parts and value is not None}
    laid_out = kernel.lay_out(stored)
    assert all(part.startswith("weight") for part in laid_out)
    tensors = rest | laid_out
    restored = kernel.restore(tensors)
    for part, value in before.items():
        assert restored[part].dtype == value.dtype and restored[part].shape == value.shape
        assert torch.equal(restored[part].view(torch.uint8), value.view(torch.uint8)), f"{part} comes back otherwise"
    held = sum(tensor.nbytes for tensor in laid_out.values())
    padded = -(-rows // 64) * 64 / rows
    allowed = padded * (sum(value.nbytes for value in before.values()) + before["weight_scale"].nbytes) + 64
    assert held <= allowed, "no second copy of the weight, only its scales may be held with zeros beside them"
    wanted = reference_weight(module)
    torch.testing.assert_close(kernel.dequantize(tensors), wanted.to(dtype))
    for tokens in (1, 2, 7, 16, 65):
        flat = torch.randn(tokens, columns, dtype=dtype)
        product = F.linear(flat.double(), wanted.double())
        scale = product.abs().max().item()
        near = {BF16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype] * scale
        if kind.rounds_inputs:
            continue  # compared with the integers in its own test
        many = kernel.many(tensors, flat, None)
        assert many.dtype == dtype and (many.double() - product).abs().max() <= near
        if kind.between[1]:
            few = kernel.few(tensors, flat)
            assert few.dtype == dtype and few.shape == many.shape and (few.double() - product).abs().max() <= near


def test_portable_covers_everything_last() -> None:
    assert KERNELS[-1].__name__ == "Portable" and all(KERNELS[-1].covers(s) for s in [None])  # type: ignore[arg-type]
