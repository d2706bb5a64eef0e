"""Products of 8-bit integers against a plain sum of integers in 64 bits, scaled afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sparseautomodel.compressed_layers import CompressedLinear, compressed
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.kernels import int8 as module
from sparseautomodel.kernels.int8 import Int8
from tests.kernels.test_base import BF16

DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
INPUTS = {
    "dynamic": DYNAMIC,
    "dynamic-asymmetric": DYNAMIC | {"symmetric": False},
    "static": STATIC,
    "static-asymmetric": STATIC | {"symmetric": False},
    "dynamic-tensor": {"num_bits": 8, "strategy": "tensor", "dynamic": True},
    "dynamic-6-bit": DYNAMIC | {"num_bits": 6},
}
CHANNEL = {"num_bits": 8, "strategy": "channel"}
WEIGHTS = {
    "channel": CHANNEL,
    "channel-asymmetric": CHANNEL | {"symmetric": False},
    "tensor": {"num_bits": 8, "strategy": "tensor"},
    "tensor-asymmetric": {"num_bits": 8, "strategy": "tensor", "symmetric": False},
}


@pytest.fixture(params=["registers", "torch"], autouse=True)
def way(request: pytest.FixtureRequest) -> None:
    """The products of registers.c for a few tokens, and those of torch, which machines without them have."""
    if request.param == "torch":
        request.getfixturevalue("without_registers")


def scheme_of(weights: dict, inputs: dict | None, format: str | None = None) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=format)


def random_layer(
    scheme: QuantizationScheme, shape: tuple[int, int], dtype: torch.dtype = BF16, bias: bool = False
) -> CompressedLinear:
    """A layer of random stored tensors, every bit of them where they are integers, that runs on its kernel."""
    rows, columns = shape
    parts = storage.layout(scheme, shape, dtype)
    layer: Any = compressed(nn.Linear(columns, rows, bias=bias).to(dtype), scheme, parts, dtype)
    for name, (size, kind) in parts.items():
        layer._parameters[name] = nn.Parameter(random_tensor(name, shape, size, kind), requires_grad=False)
    layer.settle()
    return layer


def random_tensor(name: str, shape: tuple[int, int], size: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    if name == "weight_shape":
        return torch.tensor(shape)
    if kind.is_floating_point:
        return (torch.rand(size) * 0.02 + 0.001).to(kind)
    return torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max + 1, size, dtype=kind)


def stored_copy(layer: CompressedLinear) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in layer.stored().items()}


def integers(layer: CompressedLinear) -> torch.Tensor:
    """The weight's numbers less its zero points, int64, as compressed-tensors reads them: with a scale of one."""
    state, scheme = stored_copy(layer), layer.quantization_scheme
    state["weight_scale"] = torch.ones_like(state["weight_scale"], dtype=torch.float32)
    compressor = BaseCompressor.get_value_from_registry(storage.format_of(scheme))
    return compressor.decompress(state, scheme)["weight"].long()


def rounded(layer: CompressedLinear, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and zero point of inputs, by compressed-tensors alone."""
    args, tokens = layer.quantization_scheme.input_activations, flat.unsqueeze(0)
    if args.dynamic:
        scale, zero_point = compute_dynamic_scales_and_zp(tokens, args, layer)
    else:
        scale = layer._parameters["input_scale"]
        zero_point = layer._parameters.get("input_zero_point", torch.zeros(1))
    codes = quantize(tokens, scale, zero_point, args)[0]
    flat_scale, flat_zero = (value[0] if value.ndim == 3 else value for value in (scale, zero_point))
    return codes.long(), flat_scale, flat_zero.long()


def reference(layer: CompressedLinear, flat: torch.Tensor) -> torch.Tensor:
    """Sums of integers in 64 bits, then scaled and rounded once, in the order that is the kernel's."""
    codes, scale, zero_point = rounded(layer, flat)
    sums = (codes - zero_point) @ integers(layer).t()
    assert sums.abs().max() < 2**31
    by_row = layer.stored()["weight_scale"].view(-1).float()
    output = sums.to(torch.int32).float() * scale.float() * by_row
    return (output if layer.bias is None else output + layer.bias.detach()).to(flat.dtype)


def inputs_of(tokens: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-2, 2, max(tokens, 1))[:tokens].unsqueeze(1)
    return (torch.randn(tokens, columns, generator=generator) * spread + 0.3 * spread).to(dtype)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@torch.no_grad()
def test_result_is_the_scaled_sum_of_integers(weights: str, inputs: str, dtype: torch.dtype) -> None:
    layer = random_layer(scheme_of(WEIGHTS[weights], INPUTS[inputs]), (96, 64), dtype, bias=True)
    assert type(layer.kernel) is Int8 and not layer.passed_over
    for tokens in (1, 2, 4, 5, 16, 33):
        flat = inputs_of(tokens, 64, dtype, tokens)
        assert torch.equal(layer(flat), reference(layer, flat)), f"{tokens} tokens"


@pytest.mark.parametrize(("columns", "rows"), [(48, 31), (576, 192), (4304, 16), (16, 4304), (31, 5), (1, 1)])
@pytest.mark.parametrize("inputs", ["dynamic", "static-asymmetric"])
@torch.no_grad()
def test_odd_sizes(columns: int, rows: int, inputs: str) -> None:
    layer = random_layer(scheme_of(CHANNEL, INPUTS[inputs]), (rows, columns))
    assert type(layer.kernel) is Int8
    for tokens in (1, 3, 17):
        flat = inputs_of(tokens, columns, BF16)
        assert torch.equal(layer(flat), reference(layer, flat))


@pytest.mark.parametrize("inputs", INPUTS)
@torch.no_grad()
def test_more_tokens_than_are_multiplied_at_once(inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS", 7)
    layer, flat = random_layer(scheme_of(CHANNEL, INPUTS[inputs]), (24, 40)), inputs_of(30, 40, BF16)
    assert torch.equal(layer(flat), reference(layer, flat))


@pytest.mark.parametrize("inputs", INPUTS)
@torch.no_grad()
def test_no_token(inputs: str) -> None:
    layer = random_layer(scheme_of(CHANNEL, INPUTS[inputs]), (24, 40), bias=True)
    for shape in ((0, 40), (0, 3, 40), (2, 0, 40)):
        assert layer(torch.empty(shape, dtype=BF16)).shape == (*shape[:-1], 24)


@torch.no_grad()
def test_inputs_that_are_not_contiguous_or_of_another_shape() -> None:
    layer = random_layer(scheme_of(CHANNEL, DYNAMIC), (24, 48))
    strided, wide = torch.randn(6, 96, dtype=BF16)[::2, ::2], torch.randn(3, 48, 5, dtype=BF16).transpose(1, 2)
    turned, spread = torch.randn(48, 6, dtype=BF16).t(), torch.randn(1, 48, dtype=BF16).expand(4, 48)
    for input in (strided, wide, turned, turned[:3], spread, torch.randn(48, dtype=BF16)):
        wanted = reference(layer, input.reshape(-1, 48)).view(*input.shape[:-1], 24)
        assert torch.equal(layer(input), wanted)


@torch.no_grad()
def test_tokens_of_zeros_and_of_tiny_numbers() -> None:
    layer = random_layer(scheme_of(CHANNEL, DYNAMIC), (24, 48), torch.float16)
    flat = torch.zeros(4, 48, dtype=torch.float16)
    flat[1] = torch.linspace(-3e-6, 3e-6, 48)
    flat[2, 0] = 6e-8
    assert torch.equal(layer(flat), reference(layer, flat))
    flat[3, 0] = float("nan")
    assert layer(flat)[3].isnan().all() and not layer(flat)[:3].isnan().any()


@given(
    st.lists(st.floats(-3e4, 3e4, width=16), min_size=8, max_size=8),
    st.sampled_from([BF16, torch.float16, torch.float32]),
    st.sampled_from(sorted(INPUTS)),
)
def test_codes_are_those_of_compressed_tensors(values: list[float], dtype: torch.dtype, inputs: str) -> None:
    torch.manual_seed(0)
    layer = random_layer(scheme_of(CHANNEL, INPUTS[inputs]), (4, 8), dtype)
    flat = torch.tensor([values], dtype=dtype)
    args = layer.quantization_scheme.input_activations
    own: Any = layer._parameters
    scale, zero_point = module._ranges(flat, args) if args.dynamic else module._calibrated(own, args)
    codes, wanted_scale, wanted_zero = rounded(layer, flat)
    assert torch.equal(module._codes(flat, scale, zero_point, args).long(), codes)
    assert torch.equal(scale.flatten(), wanted_scale.flatten())
    if zero_point is not None:
        assert torch.equal(zero_point.flatten().long(), wanted_zero.flatten())


@torch.no_grad()
def test_largest_sums_do_not_leave_their_32_bits() -> None:
    layer = random_layer(
        scheme_of(CHANNEL | {"symmetric": False}, INPUTS["static-asymmetric"]), (4, module.MOST_COLUMNS)
    )
    stored: Any = stored_copy(layer)
    stored["weight"].fill_(127)
    stored["weight_zero_point"].fill_(-128)
    own: Any = {"input_scale": torch.ones(1, dtype=BF16), "input_zero_point": torch.full((1,), -128, dtype=torch.int8)}
    layer.load_state_dict(stored | own)
    flat = torch.full((2, module.MOST_COLUMNS), 1000.0, dtype=BF16)
    assert torch.equal(layer(flat), reference(layer, flat)) and (layer(flat) > 0).all()


@pytest.mark.parametrize(
    ("weights", "inputs", "shape", "reason"),
    [
        ({"num_bits": 8, "strategy": "group", "group_size": 16}, DYNAMIC, (24, 48), "one weight scale a row"),
        (CHANNEL, {"num_bits": 8, "strategy": "group", "group_size": 16, "dynamic": True}, (24, 48), "by the token"),
        (CHANNEL, DYNAMIC, (2, module.MOST_COLUMNS + 16), "may leave 32 bits"),
    ],
)
@torch.no_grad()
def test_what_it_refuses_still_runs(weights: dict, inputs: dict, shape: tuple[int, int], reason: str) -> None:
    layer = random_layer(scheme_of(weights, inputs), shape)
    assert type(layer.kernel) is not Int8 and reason in " ".join(layer.passed_over)
    assert layer(torch.randn(3, shape[1], dtype=BF16)).isfinite().all()


def test_packed_rows_that_end_inside_a_word_are_refused() -> None:
    layer = random_layer(scheme_of(CHANNEL, DYNAMIC, "pack-quantized"), (8, 6))
    assert "end inside a 32-bit word" in " ".join(layer.passed_over)


@pytest.mark.parametrize("form", ["int-quantized", "pack-quantized", "naive-quantized"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rows", [96, 31])
@torch.no_grad()
def test_what_is_saved_is_what_was_loaded(form: str, weights: str, rows: int) -> None:
    scheme = scheme_of(WEIGHTS[weights], INPUTS["dynamic-asymmetric"], form)
    parts = storage.layout(scheme, (rows, 48), BF16)
    layer: Any = compressed(nn.Linear(48, rows).to(BF16), scheme, parts, BF16)
    drawn = {name: random_tensor(name, (rows, 48), size, kind) for name, (size, kind) in parts.items()}
    layer.load_state_dict(drawn, strict=False)
    layer.settle()
    assert type(layer.kernel) is Int8
    saved = layer.state_dict()
    assert set(saved) == {"bias", *parts}
    for name, value in drawn.items():
        assert saved[name].is_contiguous() and saved[name].dtype == value.dtype
        assert torch.equal(saved[name], value), name
    flat = inputs_of(3, 48, BF16)
    assert torch.equal(layer(flat), reference(layer, flat))
    assert torch.equal(layer.weight, decompressed(layer))


def decompressed(layer: CompressedLinear) -> torch.Tensor:
    compressor = BaseCompressor.get_value_from_registry(storage.format_of(layer.quantization_scheme))
    return compressor.decompress(stored_copy(layer), layer.quantization_scheme)["weight"]


def test_gradient_reaches_the_input() -> None:
    layer = random_layer(scheme_of(CHANNEL, DYNAMIC), (24, 48), torch.float32)
    flat = torch.randn(3, 48, requires_grad=True)
    layer(flat).sum().backward()
    torch.testing.assert_close(flat.grad, torch.ones(3, 24) @ layer.weight)


@torch.no_grad()
def test_another_dtype_is_rounded_in_that_dtype() -> None:
    layer = random_layer(scheme_of(CHANNEL, DYNAMIC), (24, 48)).to(torch.float32)
    assert type(layer.kernel) is Int8
    flat = torch.randn(3, 48)
    assert torch.equal(layer(flat), reference(layer, flat))
    near = F.linear(flat, layer.weight)
    assert (layer(flat) - near).abs().max() <= 0.02 * near.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inputs", INPUTS)
@torch.no_grad()
def test_cuda_gives_the_same_sums(inputs: str) -> None:
    layer = random_layer(scheme_of(CHANNEL, INPUTS[inputs]), (96, 64))
    wanted = {tokens: layer(inputs_of(tokens, 64, BF16)) for tokens in (1, 5, 16, 17, 40)}
    layer.to("cuda")
    assert type(layer.kernel) is Int8
    for tokens, value in wanted.items():
        assert torch.equal(layer(inputs_of(tokens, 64, BF16).cuda()).cpu(), value)
