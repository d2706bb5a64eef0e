"""FP8 kernels against compressed-tensors' own decompression, for every strategy, odd sizes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch import nn
from torch.nn import functional as F

from sparseautomodel.compressed_layers import compressed
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.kernels.fp8 import FP8ScaledMM, FP8Tiles
from tests.test_compressed_layers import reference_weight

BF16 = torch.bfloat16
NEAR = {BF16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
FLOAT8 = {"num_bits": 8, "type": "float"}
STRATEGIES: dict[str, Any] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "block": {"strategy": "block", "block_structure": [128, 128]},
    "small block": {"strategy": "block", "block_structure": [32, 48]},
    "group": {"strategy": "group", "group_size": 16},
    "mxfp8": None,
}

pytestmark = pytest.mark.usefixtures("without_registers")


def scheme_of(name: str, inputs: dict[str, Any] | None = None) -> QuantizationScheme:
    if STRATEGIES[name] is None:
        scheme = preset_name_to_scheme("MXFP8A16", ["Linear"])
        return scheme.model_copy(update={"input_activations": inputs})
    return QuantizationScheme(targets=["Linear"], weights=FLOAT8 | STRATEGIES[name], input_activations=inputs)


def layer(scheme: QuantizationScheme, rows: int, columns: int, dtype: torch.dtype, bias: bool = False) -> Any:
    """A compressed Linear of random codes, subnormal ones and zeros among them, and scales far apart."""
    parts = storage.layout(scheme, (rows, columns), dtype)
    module = compressed(nn.Linear(columns, rows, bias=bias).to(dtype), scheme, parts, dtype)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.int32).to(torch.uint8)
    codes[(codes & 127) == 127] = 0  # not a number
    stored = {"weight": codes.view(torch.float8_e4m3fn)}
    shape, kind = parts["weight_scale"]
    if kind == torch.uint8:
        stored["weight_scale"] = torch.randint(110, 122, shape, dtype=torch.int32).to(torch.uint8)
    else:
        stored["weight_scale"] = (torch.rand(shape) * 2.0 ** torch.randint(-12, -7, shape)).to(dtype)
    if "input_scale" in parts:
        stored["input_scale"] = torch.tensor([0.02], dtype=dtype)
    for name, value in stored.items():
        module._parameters[name] = nn.Parameter(value, requires_grad=False)
    return module


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("size", [(64, 48), (31, 576), (200, 4304), (1, 96)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_weight_and_product_are_those_of_the_stored_codes(name: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, columns = size
    scheme = scheme_of(name)
    if columns % (scheme.weights.group_size or 1):
        pytest.skip("the group does not divide the width")
    module = layer(scheme, rows, columns, dtype)
    wanted = reference_weight(module).to(dtype)
    before = {part: value.clone() for part, value in module.state_dict().items()}
    module.settle()
    assert module.kernel.name == FP8Tiles.name
    assert torch.equal(module.weight, wanted), "bit for bit"
    for tokens in (0, 1, 2, 3, 17):
        flat = torch.randn(tokens, columns, dtype=dtype)
        product = F.linear(flat.double(), wanted.double())
        for output in (
            module.kernel.many(module._parameters, flat, None),
            *([module.kernel.few(module._parameters, flat)] if tokens else []),
        ):
            assert output.dtype == dtype and output.shape == (tokens, rows)
            assert tokens == 0 or (output.double() - product).abs().max() <= NEAR[dtype] * product.abs().max()
    for part, value in module.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[part].view(torch.uint8)), f"{part} changed"


def test_it_holds_what_is_stored_and_no_more() -> None:
    module = layer(scheme_of("channel"), 64, 128, BF16)
    held = sum(value.nbytes for value in module.parameters())
    module.settle()
    assert sum(value.nbytes for value in module.parameters()) == held


@pytest.mark.parametrize("name", ["channel", "block"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_inputs_are_rounded_and_the_gradient_reaches_them(name: str, tokens: int) -> None:
    torch.manual_seed(0)
    inputs = FLOAT8 | {"strategy": "token", "dynamic": True}
    module = layer(scheme_of(name, inputs), 96, 128, BF16, bias=True)
    module.settle()
    values = torch.randn(1, tokens, 128, dtype=BF16, requires_grad=True)
    rounded = forward_quantize(module, values.detach(), "input", module.quantization_scheme.input_activations)
    wanted = F.linear(rounded.double(), module.weight.double(), module.bias.double())
    output = module(values)
    assert (output.double() - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    output.sum().backward()
    torch.testing.assert_close(values.grad, module.weight.sum(0).expand(1, tokens, -1), rtol=2e-2, atol=2e-2)


def scaled_mm(weights: str, inputs: str, dynamic: bool, dtype: torch.dtype = BF16, **keys: Any) -> Any:
    scheme = scheme_of(weights, FLOAT8 | {"strategy": inputs, "dynamic": dynamic})
    return layer(scheme, 96, 64, dtype, **keys)


@pytest.mark.parametrize("weights", ["tensor", "channel"])
@pytest.mark.parametrize(("inputs", "dynamic"), [("token", True), ("tensor", True), ("tensor", False)])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_scaled_mm_equals_the_rounded_product(weights: str, inputs: str, dynamic: bool) -> None:
    module = scaled_mm(weights, inputs, dynamic, bias=True).cuda()
    module.settle()
    if module.kernel.name != FP8ScaledMM.name:
        pytest.skip("; ".join(module.passed_over))
    for tokens in (0, 1, 7, 64):
        values = torch.randn(1, tokens, 64, dtype=BF16, device="cuda")
        rounded = forward_quantize(module, values, "input", module.quantization_scheme.input_activations)
        wanted = F.linear(rounded.double(), module.weight.double(), module.bias.double())
        torch.testing.assert_close(module(values).double(), wanted, rtol=2e-2, atol=2e-2 * 1)


@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "shape", "wanted"),
    [
        ((8, 9), None, BF16, (96, 64), None),
        ((8, 0), None, BF16, (96, 64), "needs compute capability 8.9, this GPU has 8.0"),
        ((9, 4), "6.3", BF16, (96, 64), "not tried on ROCm"),
        ((9, 0), None, torch.float32, (96, 64), "gives bfloat16, and the layer is in torch.float32"),
        ((9, 0), None, BF16, (96, 40), "needs sizes that are multiples of 16, the layer has 96 x 40"),
    ],
)
def test_scaled_mm_says_why_not(
    capability: tuple[int, int],
    hip: str | None,
    dtype: torch.dtype,
    shape: tuple[int, int],
    wanted: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    scheme = scheme_of("channel", QuantizationArgs(**FLOAT8, strategy="token", dynamic=True))
    assert FP8ScaledMM.covers(scheme)
    assert FP8ScaledMM(scheme, shape, dtype, torch.device("cuda")).refuses() == wanted


@pytest.mark.parametrize("device", ["cpu", "xpu", "mps"])
def test_scaled_mm_is_for_nvidia_gpus(device: str) -> None:
    scheme = scheme_of("tensor", QuantizationArgs(**FLOAT8, strategy="tensor", dynamic=True))
    reason = FP8ScaledMM(scheme, (96, 64), BF16, torch.device(device)).refuses()
    assert reason == f"needs an NVIDIA GPU, this is {device}"


def test_scaled_mm_leaves_weight_only_and_blocks_to_others() -> None:
    assert not FP8ScaledMM.covers(scheme_of("channel")) and not FP8ScaledMM.covers(scheme_of("block"))
    assert FP8Tiles(scheme_of("channel"), (96, 64), torch.float64, torch.device("cpu")).refuses()
    assert "not for cuda" in str(FP8Tiles(scheme_of("channel"), (96, 64), BF16, torch.device("cuda")).refuses())


@pytest.mark.parametrize("name", ["group", "block"])
@pytest.mark.parametrize("tiny", [0.0, 1e-41])
def test_a_row_whose_scales_are_all_zero_or_subnormal_gives_zeros(name: str, tiny: float) -> None:
    module = layer(scheme_of(name), 256, 256, torch.float32)
    module.weight_scale.data[0] = tiny
    tensors = {part: value for part, value in module._parameters.items() if value is not None}
    kernel = FP8Tiles(module.quantization_scheme, (256, 256), BF16, torch.device("cpu"))
    flat = torch.randn(2, 256, dtype=BF16)
    few, many = kernel.few(tensors, flat), kernel.many(tensors, flat, None)
    assert few.isfinite().all() and few[:, 0].abs().max() < 1e-30
    torch.testing.assert_close(few, many, atol=few.abs().max().item() * 0.02, rtol=0.02)
