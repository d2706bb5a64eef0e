"""Rounded activations against compressed-tensors' own rounding."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch import nn

from sparseautomodel.float_inputs import StraightThrough, can_round, round_floats

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MX = {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
SCHEMES = {
    "FP8 token": {"num_bits": 8, "strategy": "token", "dynamic": True},
    "FP8 tensor": {"num_bits": 8, "strategy": "tensor", "dynamic": True},
    "FP8 tensor static": {"num_bits": 8, "strategy": "tensor"},
    "FP8 group": {"num_bits": 8, "strategy": "group", "group_size": 64, "dynamic": True},
    "NVFP4": {
        "num_bits": 4,
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": "local",
        "scale_dtype": torch.float8_e4m3fn,
        "zp_dtype": torch.float8_e4m3fn,
    },
    "MXFP4": {"num_bits": 4, **MX},
    "MXFP6": {"num_bits": 6, **MX},
    "MXFP8": {"num_bits": 8, **MX},
}


def args_of(name: str) -> QuantizationArgs:
    return QuantizationArgs(type="float", **SCHEMES[name])


def inputs(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """With outliers, zeros, halves between numbers, and a token of zeros."""
    values = torch.randn(tokens, 128) * torch.logspace(-3, 2, 128)[torch.randperm(128)]
    values[:, :8] = torch.tensor([0, 0.25, 0.75, 1.25, 2.5, 5, -0.25, -5])
    if tokens > 1:
        values[-1] = 0
    return values.to(dtype)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_rounds_as_compressed_tensors_does(name: str, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    args, module = args_of(name), nn.Module()
    assert can_round(args, dtype)
    module.quantization_status = QuantizationStatus.COMPRESSED
    scale = global_scale = None
    if not args.dynamic:
        scale = module.input_scale = torch.tensor([0.03], dtype=dtype)
    if name == "NVFP4":
        global_scale = module.input_global_scale = torch.tensor([37.5])
    values = inputs(tokens, dtype)
    before = values.clone()
    wanted = forward_quantize(module, values.unsqueeze(0).clone(), "input", args).squeeze(0)
    rounded = round_floats(values, args, scale, global_scale)
    assert rounded.dtype == dtype and torch.equal(rounded, wanted.to(dtype))
    assert torch.equal(values, before) and (tokens == 1 or not torch.equal(rounded, values))


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_every_bfloat16_rounds_to_the_nearest(bits: int) -> None:
    args = QuantizationArgs(type="float", num_bits=bits, strategy="tensor")
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    values = values[values.isfinite()].view(1, -1)
    module = nn.Module()
    module.quantization_status, module.input_scale = QuantizationStatus.COMPRESSED, torch.ones(1, dtype=torch.bfloat16)
    wanted = forward_quantize(module, values.unsqueeze(0).clone(), "input", args).squeeze(0)
    assert torch.equal(round_floats(values, args, module.input_scale), wanted)


def test_what_it_does_not_know() -> None:
    assert not can_round(QuantizationArgs(num_bits=8, strategy="token", dynamic=True), torch.bfloat16)
    assert not can_round(args_of("FP8 token"), torch.float64)
    with pytest.raises(ValueError, match="groups of 64 do not divide 96 features"):
        round_floats(torch.zeros(1, 96), args_of("FP8 group"))


def test_the_gradient_goes_straight_through() -> None:
    values = torch.randn(2, 64, requires_grad=True)
    rounded = round_floats(values, args_of("FP8 token"))
    output: torch.Tensor = StraightThrough.apply(values, rounded)
    assert torch.equal(output, rounded)
    (output * 3).sum().backward()
    assert torch.equal(values.grad, torch.full((2, 64), 3.0))
