"""8-bit integer weights against the dequantized product in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparseautomodel.compressed_layers import CompressedLinear, compressed
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.kernels import base
from sparseautomodel.kernels.int8_weights import Int8Weights
from tests.kernels.test_base import BF16
from tests.kernels.test_int8 import CHANNEL, DYNAMIC, decompressed, random_layer, random_tensor, scheme_of

GROUP = {"num_bits": 8, "strategy": "group", "group_size": 16}
WEIGHTS = {
    "channel": CHANNEL,
    "tensor": {"num_bits": 8, "strategy": "tensor"},
    "group": GROUP,
    "channel-asymmetric": CHANNEL | {"symmetric": False},
    "tensor-asymmetric": {"num_bits": 8, "strategy": "tensor", "symmetric": False},
    "group-asymmetric": GROUP | {"symmetric": False},
}
NEAR = {BF16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
"""Of the lengths of the token and of the weight's row, which no product exceeds."""

pytestmark = pytest.mark.usefixtures("without_registers")


def assert_near(found: torch.Tensor, layer: CompressedLinear, flat: torch.Tensor) -> None:
    """A random layer's zero points are far from the middle and its inputs have a mean: the hardest case for sums."""
    weight = decompressed(layer).double()
    wanted = flat.double() @ weight.t()
    near = NEAR[flat.dtype] * flat.double().norm(dim=1, keepdim=True) * weight.norm(dim=1) + 0.01 * NEAR[flat.dtype]
    if layer.bias is not None:
        wanted += layer.bias.detach().double()
    assert found.dtype == flat.dtype and found.shape == wanted.shape
    assert ((found.double() - wanted).abs() <= near).all()


@pytest.mark.parametrize("form", ["pack-quantized", "naive-quantized"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@torch.no_grad()
def test_few_and_many_give_the_dequantized_product(form: str, weights: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = random_layer(scheme_of(WEIGHTS[weights], None, form), (96, 64), dtype, bias=True)
    assert type(layer.kernel) is Int8Weights
    own: Any = layer._parameters
    for tokens in (1, 2, 3, 7, 16, 65):
        flat = (torch.randn(tokens, 64) + 0.5).to(dtype)
        assert_near(layer.kernel.few(own, flat).add_(layer.bias), layer, flat)
        assert_near(layer.kernel.many(own, flat, layer.bias), layer, flat)
        assert_near(layer(flat), layer, flat)
    assert torch.equal(layer.weight, decompressed(layer))


@pytest.mark.parametrize(("columns", "rows"), [(48, 31), (576, 192), (4304, 16), (16, 4304), (16, 1)])
@pytest.mark.parametrize("weights", WEIGHTS)
@torch.no_grad()
def test_odd_sizes(columns: int, rows: int, weights: str) -> None:
    layer = random_layer(scheme_of(WEIGHTS[weights], None), (rows, columns))
    assert type(layer.kernel) is Int8Weights
    for tokens in (1, 3, 40):
        flat = torch.randn(tokens, columns, dtype=BF16)
        assert_near(layer(flat), layer, flat)


@pytest.mark.parametrize("weights", ["channel", "group-asymmetric"])
@torch.no_grad()
def test_tiles_add_up_to_the_whole(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(scheme_of(WEIGHTS[weights], None), (200, 48), bias=True)
    monkeypatch.setattr(base, "TILE_ELEMENTS", 1)
    assert len(list(layer.kernel.tiles())) == 4
    flat = torch.randn(50, 48, dtype=BF16)
    assert_near(layer(flat), layer, flat)


@torch.no_grad()
def test_half_precision_sums_do_not_overflow() -> None:
    layer = random_layer(scheme_of(CHANNEL, None), (32, 4304), torch.float16)
    flat = torch.full((40, 4304), 30.0, dtype=torch.float16) * torch.randn(4304).sign().half()
    assert (flat.float() @ layer.stored()["weight_packed"].view(torch.uint8).float().sub(128).t()).abs().max() > 65504
    assert layer(flat).isfinite().all()


@pytest.mark.parametrize("weights", WEIGHTS)
@torch.no_grad()
def test_no_token_and_inputs_that_are_not_contiguous(weights: str) -> None:
    layer = random_layer(scheme_of(WEIGHTS[weights], None), (24, 48), bias=True)
    assert layer(torch.empty(0, 3, 48, dtype=BF16)).shape == (0, 3, 24)
    strided, wide = torch.randn(6, 96, dtype=BF16)[::2, ::2], torch.randn(3, 48, 5, dtype=BF16).transpose(1, 2)
    for input in (strided, wide, torch.randn(1, 48, dtype=BF16).expand(4, 48), torch.randn(48, 6, dtype=BF16).t()):
        assert torch.equal(layer(input), layer(input.contiguous()))


@pytest.mark.parametrize("form", ["pack-quantized", "naive-quantized"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rows", [96, 31])
def test_what_is_saved_is_what_was_loaded(form: str, weights: str, rows: int) -> None:
    scheme, shape = scheme_of(WEIGHTS[weights], None, form), (rows, 48)
    parts = storage.layout(scheme, shape, BF16)
    layer: Any = compressed(nn.Linear(48, rows).to(BF16), scheme, parts, BF16)
    stored = {name: random_tensor(name, shape, size, kind) for name, (size, kind) in parts.items()}
    layer.load_state_dict(stored, strict=False)
    layer.settle()
    assert type(layer.kernel) is Int8Weights
    saved = layer.state_dict()
    assert set(saved) == {"bias", *parts}
    for name, value in stored.items():
        assert saved[name].is_contiguous() and saved[name].dtype == value.dtype
        assert torch.equal(saved[name], value), name


@torch.no_grad()
def test_it_runs_integer_schemes_whose_activations_are_rounded_by_the_group() -> None:
    inputs = {"num_bits": 8, "strategy": "group", "group_size": 16, "dynamic": True}
    layer = random_layer(scheme_of(GROUP, inputs), (24, 48))
    assert type(layer.kernel) is Int8Weights
    assert type(random_layer(scheme_of(GROUP, DYNAMIC), (24, 48)).kernel) is Int8Weights


def test_widths_that_the_operation_reads_beyond_are_refused() -> None:
    layer = random_layer(scheme_of(CHANNEL, None), (24, 44))
    assert type(layer.kernel) is not Int8Weights and "16 columns at a time" in " ".join(layer.passed_over)
    narrow = scheme_of(GROUP | {"group_size": 8}, None)
    assert "16 columns at a time" in " ".join(random_layer(narrow, (24, 48)).passed_over)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("weights", WEIGHTS)
@torch.no_grad()
def test_cuda_gives_the_dequantized_product(weights: str) -> None:
    layer = random_layer(scheme_of(WEIGHTS[weights], None), (96, 64))
    wanted = {tokens: layer(torch.full((tokens, 64), 0.5, dtype=BF16)) for tokens in (1, 5, 40)}
    layer.to("cuda")
    for tokens, value in wanted.items():
        found = layer(torch.full((tokens, 64), 0.5, dtype=BF16, device="cuda")).cpu()
        torch.testing.assert_close(found, value, rtol=2e-2, atol=2e-2)
