"""The kernel that expands weights in registers, against compressed-tensors' own decompression."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme

from sparseautomodel import registers as products
from sparseautomodel.kernels.registers import Registers
from tests.kernels.test_base import BF16
from tests.kernels.test_int8 import random_layer
from tests.test_compressed_layers import compress, linear, reference_weight

pytestmark = pytest.mark.skipif(products.why_not() is not None, reason=str(products.why_not()))

INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
ASYMMETRIC = {"symmetric": False}
SCHEMES: dict[str, Any] = {
    "int4-group": {"weights": INT4},
    "int4-group-16": {"weights": INT4 | {"group_size": 16}},
    "int4-group-asymmetric": {"weights": INT4 | ASYMMETRIC},
    "int4-channel": {"weights": {"num_bits": 4, "strategy": "channel"}},
    "int4-channel-asymmetric": {"weights": {"num_bits": 4, "strategy": "channel"} | ASYMMETRIC},
    "int4-tensor": {"weights": {"num_bits": 4, "strategy": "tensor"}},
    "int4-tensor-asymmetric": {"weights": {"num_bits": 4, "strategy": "tensor"} | ASYMMETRIC},
    "int8-channel": {"weights": INT8},
    "int8-group": {"weights": INT8 | {"strategy": "group", "group_size": 32}},
    "int8-group-asymmetric": {"weights": INT8 | {"strategy": "group", "group_size": 32} | ASYMMETRIC},
    "int8-in-bytes": {"weights": INT8, "format": "naive-quantized"},
    "int8-in-bytes-asymmetric": {"weights": INT8 | ASYMMETRIC, "format": "naive-quantized"},
    "fp8-channel": {"weights": FP8},
    "fp8-tensor": {"weights": FP8 | {"strategy": "tensor"}},
    "fp8-block": {"weights": FP8 | {"strategy": "block", "block_structure": [32, 64]}},
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
    "mxfp8": "MXFP8A16",
}


def scheme_of(name: str) -> str | QuantizationScheme:
    known = SCHEMES[name]
    return known if isinstance(known, str) else QuantizationScheme(targets=["Linear"], **known)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("size", [(96, 64), (31, 576), (9, 160)], ids=str)
@torch.no_grad()
def test_it_runs_what_the_files_say_and_keeps_their_bytes(name: str, size: tuple[int, int]) -> None:
    rows, columns = size
    module = compress(linear(columns, rows, dtype=BF16), scheme_of(name), BF16)
    wanted = reference_weight(module).to(BF16)
    before = {part: value.clone() for part, value in module.state_dict().items()}
    held = sum(value.nbytes for value in module.parameters())
    module.settle()
    assert type(module.kernel) is Registers
    assert sum(value.nbytes for value in module.parameters()) == held
    assert torch.equal(module.weight, wanted)
    for tokens in (0, 1, 2, 3, 5, 8, 40):
        flat = torch.randn(tokens, columns, dtype=BF16)
        exact = flat.double() @ wanted.double().t()
        if module.bias is not None:
            exact += module.bias.detach().double()
        output = module(flat)
        assert output.shape == exact.shape and output.dtype == BF16
        sums = flat.double().abs() @ wanted.double().abs().t()
        assert ((output.double() - exact).abs() <= 2**-7 * exact.abs() + 2**-8 * sums / columns**0.5).all()
    for part, value in module.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[part].view(torch.uint8)), f"{part} changed"


@pytest.mark.parametrize("name", ["int4-group", "fp8-channel", "nvfp4"])
def test_gradients_reach_the_input(name: str) -> None:
    module = compress(linear(64, 96, dtype=BF16), scheme_of(name), BF16)
    module.settle()
    flat = torch.randn(5, 64, dtype=BF16, requires_grad=True)
    module(flat).sum().backward()
    wanted = module.weight.double().sum(0).expand(5, -1)
    assert flat.grad is not None
    torch.testing.assert_close(flat.grad.double(), wanted, atol=0.05, rtol=0.02)


def test_other_dtypes_of_inputs_are_multiplied_too() -> None:
    module = compress(linear(64, 96, dtype=BF16), scheme_of("int4-group"), BF16)
    module.settle()
    flat = torch.randn(5, 64)
    with torch.autocast("cpu", dtype=BF16):
        assert module(flat).dtype == BF16
    output = module.kernel.many(module._parameters, flat, None)
    torch.testing.assert_close(output, flat @ module.weight.float().t())


def test_copies_and_casts_are_settled_again() -> None:
    module = compress(linear(64, 96, dtype=BF16), scheme_of("int4-group"), BF16)
    module.settle()
    flat = torch.randn(2, 64, dtype=BF16)
    assert torch.equal(copy.deepcopy(module)(flat), module(flat))
    assert type(copy.deepcopy(module).float().kernel) is not Registers
    assert type(copy.deepcopy(module).float().bfloat16().kernel) is Registers


@pytest.mark.parametrize(
    ("weights", "dtype", "device", "reason"),
    [
        (INT4, BF16, "cuda", "made for CPUs, not for cuda"),
        (INT4, torch.float16, "cpu", "not in torch.float16"),
        (INT4 | {"group_size": 48}, BF16, "cpu", "a power of two"),
        (INT8 | {"strategy": "group", "group_size": 16}, BF16, "cpu", "from 32 for 8"),
        (FP8 | {"strategy": "block", "block_structure": [96, 64]}, BF16, "cpu", "a power of two"),
    ],
)
def test_what_it_cannot_run_is_said(weights: dict, dtype: torch.dtype, device: str, reason: str) -> None:
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    assert Registers.covers(scheme)
    said = Registers(scheme, (96, 96), dtype, torch.device(device)).refuses()
    assert said is not None and reason in said


def test_machines_without_it_have_the_next_kernel(without_registers: None) -> None:
    layer = random_layer(QuantizationScheme(targets=["Linear"], weights=FP8), (96, 64))
    assert type(layer.kernel) is not Registers
    assert any("not in this test" in reason for reason in layer.passed_over)
