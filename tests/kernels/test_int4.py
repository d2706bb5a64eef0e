"""The int4 kernel: its layout against torch's own conversion, its products against the dequantized weight."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel.kernels import base, int4
from sparseautomodel.kernels.int4 import Int4
from tests.test_compressed_layers import compress, linear, reference_weight, scheme_of

BF16 = torch.bfloat16
CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.skipif(not int4._is_interleaved(), reason="this processor has another layout"),
    pytest.mark.usefixtures("without_registers"),
]


def laid_out(
    name: str, columns: int, rows: int, dtype: torch.dtype = BF16
) -> tuple[Int4, dict[str, torch.Tensor], torch.Tensor]:
    module = compress(linear(columns, rows, dtype=dtype), name, dtype)
    kernel = Int4(module.quantization_scheme, (rows, columns), dtype, CPU)
    assert kernel.refuses() is None
    return (
        kernel,
        kernel.lay_out({part: module._parameters[part].detach() for part in module.parts}),
        reference_weight(module),
    )


@pytest.mark.parametrize("rows", [64, 192, 320])
def test_layout_is_that_of_torch(rows: int) -> None:
    _, tensors, weight = laid_out("W4A16_64", 128, rows)
    scale = tensors["weight_scales_and_zeros"][:, :rows, 0].t().repeat_interleave(64, 1)
    codes = (weight.float() / scale.float()).round().to(torch.int32) + 8
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    assert torch.equal(tensors["weight_int4"].view(-1), theirs.view(-1))


@pytest.mark.parametrize("name", ["W4A16_32", "W4A16_ASYM_32", "W4A16_128", "W4A16_ASYM_128"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("columns", "rows"), [(256, 100), (1152, 4304), (4352, 65)])
def test_many_tokens_see_exactly_the_dequantized_weight(
    name: str, dtype: torch.dtype, columns: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4, "_TILE", 2 * columns * int4.BLOCK)
    kernel, tensors, weight = laid_out(name, columns, rows, dtype)
    assert torch.equal(kernel.dequantize(tensors), weight)
    assert torch.equal(kernel.dequantize(tensors, slice(64, min(190, rows))), weight[64:190])
    flat, bias = torch.randn(5, columns, dtype=dtype), torch.randn(rows, dtype=dtype)
    wanted = (flat.double() @ weight.double().t() + bias.double()).to(dtype)
    torch.testing.assert_close(kernel.many(tensors, flat, bias), wanted, atol=0.05, rtol=0.02)


@pytest.mark.parametrize(
    "args",
    [
        {"num_bits": 4, "strategy": "channel"},
        {"num_bits": 4, "strategy": "channel", "symmetric": False},
        {"num_bits": 4, "strategy": "group", "group_size": 512},
        {"num_bits": 4, "strategy": "group", "group_size": 512, "symmetric": False},
    ],
    ids=str,
)
def test_wide_groups_are_cut_into_those_of_the_operation(args: dict[str, object]) -> None:
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    kernel = Int4(scheme, (128, 1024), BF16, CPU)
    assert kernel.refuses() is None and kernel._group == 256
    groups = 1024 // args["group_size"] if "group_size" in args else 1  # type: ignore[operator]
    stored = {
        "weight_packed": torch.randint(-(2**31), 2**31, (128, 128)).to(torch.int32),
        "weight_scale": (torch.rand(128, groups) + 0.5).to(BF16),
        "weight_shape": torch.tensor([128, 1024]),
    }
    if not args.get("symmetric", True):
        stored["weight_zero_point"] = torch.randint(-(2**31), 2**31, (16, groups)).to(torch.int32)
    tensors = kernel.lay_out(stored)
    restored = kernel.restore(tensors)
    assert restored.keys() == stored.keys()
    assert all(torch.equal(restored[part], stored[part]) for part in stored)
    weight = base.storage.decode(stored, scheme)
    assert torch.equal(kernel.dequantize(tensors), weight)
    flat = torch.randn(3, 1024, dtype=BF16)
    product = flat.double() @ weight.double().t()
    assert (kernel.few(tensors, flat).double() - product).norm() / product.norm() < 0.01


@given(tokens=st.integers(1, 40), rows=st.integers(64, 200), columns=st.sampled_from([32, 96, 160]))
def test_a_few_tokens_are_as_near_as_bfloat16_is(tokens: int, rows: int, columns: int) -> None:
    torch.manual_seed(tokens)
    kernel, tensors, weight = laid_out("W4A16_32", columns, rows)
    flat = torch.randn(tokens, columns, dtype=BF16)
    exact = flat.double() @ weight.double().t()
    allowed = 2**-8 * (flat.double().abs() @ weight.double().abs().t() + exact.abs())  # each factor, and the sum
    assert ((kernel.few(tensors, flat).double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "device", "reason"),
    [
        ("W4A16_32", (48, 64), BF16, "cpu", "fewer than 64"),
        ("W4A16", (64, 48), BF16, "cpu", "groups of 16"),
        ("W4A16_32", (64, 64), torch.float64, "cpu", "float64"),
        ("W4A16_32", (64, 64), BF16, "meta", "not on meta"),
    ],
)
def test_what_it_cannot_run_is_said(
    name: str, shape: tuple[int, int], dtype: torch.dtype, device: str, reason: str
) -> None:
    said = Int4(scheme_of(name), shape, dtype, torch.device(device)).refuses()
    assert said is not None and reason in said
