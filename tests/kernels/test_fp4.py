"""FP4 kernels against compressed-tensors' own decompression."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch import nn
from torch.nn import functional as F

from sparseautomodel.compressed_layers import compressed
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.kernels.fp4 import FP4Tiles
from tests.test_compressed_layers import reference_weight

BF16 = torch.bfloat16
NEAR = {BF16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-5}

pytestmark = pytest.mark.usefixtures("without_registers")


def layer(name: str, rows: int, columns: int, dtype: torch.dtype, spread: int = 8) -> Any:
    """A compressed Linear of random codes and scales; exponents of MXFP4 differ by less than `spread`."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    parts = storage.layout(scheme, (rows, columns), dtype)
    module = compressed(nn.Linear(columns, rows, bias=False).to(dtype), scheme, parts, dtype)
    stored = {"weight_packed": torch.randint(0, 256, (rows, columns // 2), dtype=torch.int32).to(torch.uint8)}
    shape, kind = parts["weight_scale"]
    if kind == torch.uint8:
        stored["weight_scale"] = torch.randint(122 - spread, 122, shape, dtype=torch.int32).to(torch.uint8)
    else:
        stored["weight_scale"] = (torch.rand(shape) * 448).to(kind)
        stored["weight_global_scale"] = torch.tensor([1234.5])
    if "input_global_scale" in parts:
        stored["input_global_scale"] = torch.tensor([300.0])
    for part, value in stored.items():
        module._parameters[part] = nn.Parameter(value, requires_grad=False)
    return module


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16"])
@pytest.mark.parametrize("size", [(64, 96), (31, 576), (200, 4320), (1, 64)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_weight_and_product_are_those_of_the_stored_codes(name: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = layer(name, *size, dtype)
    wanted = reference_weight(module).to(dtype)
    before = {part: value.clone() for part, value in module.state_dict().items()}
    held = sum(value.nbytes for value in module.parameters())
    module.settle()
    assert module.kernel.name == FP4Tiles.name
    assert sum(value.nbytes for value in module.parameters()) == held
    assert torch.equal(module.weight, wanted), "bit for bit"
    for rows in module.kernel.tiles():
        assert torch.equal(module.kernel.dequantize(module._parameters, rows), wanted[rows])
    for tokens in (0, 1, 2, 3, 17):
        flat = torch.randn(tokens, size[1], dtype=dtype)
        product = F.linear(flat.double(), wanted.double())
        for output in (
            module.kernel.many(module._parameters, flat, None),
            *([module.kernel.few(module._parameters, flat)] if tokens else []),
        ):
            assert output.dtype == dtype and output.shape == (tokens, size[0])
            assert tokens == 0 or (output.double() - product).abs().max() <= NEAR[dtype] * product.abs().max()
    for part, value in module.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[part].view(torch.uint8)), f"{part} changed"


def test_scales_of_a_row_that_are_far_apart() -> None:
    torch.manual_seed(0)
    module = layer("MXFP4A16", 48, 256, BF16, spread=100)
    wanted = reference_weight(module)
    module.settle()
    for tokens in (1, 12):
        flat = torch.randn(tokens, 256, dtype=BF16)
        product = F.linear(flat.double(), wanted.double())
        assert ((module(flat).double() - product).abs() <= 2e-2 * product.abs().amax(0)).all(), "row by row"


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_inputs_are_rounded(name: str, tokens: int) -> None:
    torch.manual_seed(0)
    module = layer(name, 96, 128, BF16)
    module.settle()
    values = torch.randn(1, tokens, 128, dtype=BF16)
    rounded = forward_quantize(module, values, "input", module.quantization_scheme.input_activations)
    wanted = F.linear(rounded.double(), module.weight.double())
    assert not torch.equal(rounded, values)
    assert (module(values).double() - wanted).abs().max() <= 2e-2 * wanted.abs().max()


def test_other_devices_and_dtypes_are_left_to_the_portable_one() -> None:
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    assert "not for cuda" in str(FP4Tiles(scheme, (96, 64), BF16, torch.device("cuda")).refuses())
    assert "float64" in str(FP4Tiles(scheme, (96, 64), torch.float64, torch.device("cpu")).refuses())
