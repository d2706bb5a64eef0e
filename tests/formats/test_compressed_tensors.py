"""Every scheme against compressed-tensors' own compressors, byte for byte, with scales from plain code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sparseautomodel.formats.compressed_tensors import PACKED_ROWS, decode, encode, format_of, layout, nbytes
from sparseautomodel.scales import ErrorSearch, find_global_scale, find_scales

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GRIDS = (
    {"strategy": "channel"},
    {"strategy": "group", "group_size": 32},
    {"strategy": "tensor"},
    {"strategy": "block", "block_structure": [32, 48]},
)


def _scheme(**weights: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


SCHEMES = {
    name: preset_name_to_scheme(name, ["Linear"])
    for name, preset in PRESET_SCHEMES.items()
    if preset and not (preset.get("input_activations") and preset["input_activations"].dynamic is not True)
}
SCHEMES |= {
    f"int{bits}-{'sym' if symmetric else 'asym'}-{grid['strategy']}": _scheme(
        num_bits=bits, symmetric=symmetric, **grid
    )
    for bits in range(2, 9)
    for symmetric in (True, False)
    for grid in GRIDS
}
SCHEMES |= {f"fp8-{grid['strategy']}": _scheme(num_bits=8, type="float", **grid) for grid in GRIDS}
FEW = {
    name: SCHEMES[name]
    for name in (
        *(
            "W4A16",
            "W4A16_ASYM",
            "W8A16",
            "W8A8",
            "FP8_DYNAMIC",
            "FP8_BLOCK",
            "NVFP4A16",
            "MXFP4A16",
            "MXFP6A16",
            "MXFP8",
        ),
        *("int2-asym-channel", "int3-asym-group", "int5-sym-tensor", "int7-asym-block", "int8-asym-tensor"),
        *("fp8-tensor", "fp8-block", "fp8-group"),
    )
}
"""One or two of each way to store."""
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
few_schemes = pytest.mark.parametrize("scheme", FEW.values(), ids=FEW)


@every_scheme
def test_bytes_are_those_of_compressed_tensors(scheme: QuantizationScheme) -> None:
    compressor = BaseCompressor.get_value_from_registry(format_of(scheme))
    compared = 0
    for shape in ((33, 64), (40, 384), (48, 576), (96, 256), (5, 65)):
        for dtype in DTYPES if shape[1] < 300 else DTYPES[:1]:
            if not _fits(scheme, shape):
                continue
            weight = _weight(shape, dtype)
            scale, zero_point, global_scale = _plain_scales(weight, scheme.weights)
            given = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero_point}
            given |= {} if global_scale is None else {"weight_global_scale": global_scale}
            expected = compressor.compress(given, scheme)
            out = _encoded(weight, scheme, scale, zero_point, global_scale)
            assert {name: (tuple(part.shape), part.dtype) for name, part in expected.items()} == layout(
                scheme, shape, dtype
            )
            for name, part in expected.items():
                assert torch.equal(_bytes(out[name]), _bytes(part)), (name, shape, dtype)
            dense = compressor.decompress(expected, scheme)["weight"]
            assert decode(out, scheme).dtype == dense.dtype
            assert torch.equal(_bytes(decode(out, scheme)), _bytes(dense)), (shape, dtype)
            compared += 1
    assert compared


@few_schemes
def test_runs_of_rows_give_the_whole(scheme: QuantizationScheme) -> None:
    args, shape = scheme.weights, (200, 256)
    weight = _weight(shape, torch.bfloat16)
    scale, zero_point, global_scale = _plain_scales(weight, args)
    whole = _encoded(weight, scheme, scale, zero_point, global_scale)
    parts = _empty(scheme, shape, torch.bfloat16)
    height = args.block_structure[0] if args.strategy == "block" else 1
    step = math.lcm(PACKED_ROWS, height)
    for start in range(0, shape[0], step):
        run = slice(0, 1) if args.strategy == "tensor" else slice(start // height, -(-(start + step) // height))
        encode(
            weight[start : start + step],
            scheme,
            parts,
            scale=scale[run],
            zero_point=None if args.symmetric else zero_point[run],
            global_scale=global_scale,
            start=start,
        )
    for name, part in whole.items():
        assert torch.equal(_bytes(parts[name]), _bytes(part)), name
    dense = decode(whole, scheme)
    for rows in (slice(0, 32), slice(32, 200), slice(64, 97), slice(192, None), slice(96, 96)):
        assert torch.equal(decode(whole, scheme, rows), dense[rows]), rows


@few_schemes
def test_numbers_out_of_range_are_clamped_as_compressed_tensors_does(scheme: QuantizationScheme) -> None:
    weight = _weight((32, 256), torch.bfloat16)
    scale, zero_point, global_scale = _plain_scales(weight, scheme.weights)
    scale = scale / 4
    given = {"weight": weight, "weight_scale": scale.bfloat16(), "weight_zero_point": zero_point}
    given |= {} if global_scale is None else {"weight_global_scale": global_scale}
    expected = BaseCompressor.get_value_from_registry(format_of(scheme)).compress(given, scheme)
    out = _encoded(weight, scheme, scale, zero_point, global_scale)
    assert all(torch.equal(_bytes(out[name]), _bytes(part)) for name, part in expected.items())


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(SCHEMES)),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
    st.floats(-3, 3),
    st.booleans(),
)
def test_zeros_stay_zeros(name: str, dtype: torch.dtype, seed: int, shift: float, search: bool) -> None:
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(seed)
    weight = (torch.randn(64, 256, generator=generator) + shift) * 10.0 ** int(
        torch.randint(-4, 2, (1,), generator=generator)
    )
    weight = (weight * (torch.rand(weight.shape, generator=generator) > 0.5)).to(dtype)
    weight[7], weight[:, 32:64] = 0, -0.0
    dense = decode(_quantized(weight, scheme, ErrorSearch() if search else None), scheme)
    assert not dense[weight == 0].any()


@few_schemes
def test_a_weight_of_zeros_has_a_scale_and_comes_back_as_zeros(scheme: QuantizationScheme) -> None:
    out = _quantized(torch.zeros(64, 256, dtype=torch.bfloat16), scheme)
    assert out["weight_scale"].float().isfinite().all()
    if out["weight_scale"].dtype != torch.uint8:  # there 0 is the exponent -127
        assert (out["weight_scale"].float() > 0).all()
    assert not decode(out, scheme).any()


@few_schemes
def test_what_is_not_finite_neither_fails_nor_spreads_beyond_its_scale(scheme: QuantizationScheme) -> None:
    weight = _weight((64, 256), torch.bfloat16)
    clean = decode(_quantized(weight, scheme), scheme)
    weight[40, 200], weight[41, 201] = torch.nan, torch.inf
    dense = decode(_quantized(weight, scheme, ErrorSearch()), scheme)
    assert dense.shape == weight.shape
    if scheme.weights.strategy in ("channel", "group"):
        dense = decode(_quantized(weight, scheme), scheme)
        assert torch.equal(dense[:40], clean[:40]) and torch.equal(dense[42:], clean[42:])


def test_rows_of_any_stride_are_taken_and_left_as_they_are() -> None:
    scheme = SCHEMES["W4A16"]
    weight = _weight((64, 256), torch.bfloat16)
    expected = _quantized(weight, scheme)
    turned = weight.t().contiguous().t()
    before = turned.clone()
    out = _quantized(turned, scheme)
    assert torch.equal(out["weight_packed"], expected["weight_packed"])
    assert torch.equal(turned, before)


def test_a_single_column_or_row_of_groups() -> None:
    for name in ("int4-asym-channel", "int3-asym-group", "W4A16"):
        for shape in ((1, 128), (40, 128)):
            scheme, weight = SCHEMES[name], _weight(shape, torch.bfloat16)
            dense = decode(_quantized(weight, scheme), scheme)
            assert (dense - weight).abs().max() < 0.3 * weight.abs().max()


def test_a_dtype_converts_what_compressed_tensors_computes() -> None:
    out = _quantized(_weight((32, 64), torch.float32), SCHEMES["NVFP4A16"])
    assert decode(out, SCHEMES["NVFP4A16"]).dtype == torch.bfloat16
    assert torch.equal(decode(out, SCHEMES["NVFP4A16"], dtype=torch.float32), decode(out, SCHEMES["NVFP4A16"]).float())


def test_gradients_are_not_recorded() -> None:
    weight = _weight((32, 128), torch.float32).requires_grad_()
    scale, _ = find_scales(weight.detach(), SCHEMES["W4A16"].weights)
    out = _empty(SCHEMES["W4A16"], (32, 128), torch.float32)
    encode(weight, SCHEMES["W4A16"], out, scale=scale.requires_grad_())
    assert not any(part.requires_grad for part in out.values())


def test_tables_are_made_outside_of_a_meta_context() -> None:
    weight = _weight((32, 128), torch.bfloat16)
    scale, _ = find_scales(weight, SCHEMES["fp8-channel"].weights)
    with torch.device("meta"):
        out = {
            name: torch.empty(shape, dtype=dtype, device="cpu")
            for name, (shape, dtype) in layout(SCHEMES["fp8-channel"], (32, 128), torch.bfloat16).items()
        }
        encode(weight, SCHEMES["fp8-channel"], out, scale=scale)
        assert decode(out, SCHEMES["fp8-channel"]).device.type == "cpu"


@few_schemes
def test_nbytes_are_those_of_the_tensors(scheme: QuantizationScheme) -> None:
    out = _empty(scheme, (96, 256), torch.float16)
    assert nbytes(scheme, (96, 256), torch.float16) == sum(part.nbytes for part in out.values())


def test_formats_are_those_that_compressed_tensors_infers() -> None:
    expected = {
        "W4A16": "pack-quantized",
        "W8A8": "int-quantized",
        "FP8_DYNAMIC": "float-quantized",
        "fp8-channel": "naive-quantized",
        "NVFP4A16": "nvfp4-pack-quantized",
        "MXFP8": "mxfp8-quantized",
    }
    assert {name: format_of(SCHEMES[name]) for name in expected} == expected


def test_what_cannot_be_stored_is_said() -> None:
    with pytest.raises(ValueError, match="576 is not a multiple of group_size 128"):
        layout(SCHEMES["W4A16"], (64, 576), torch.bfloat16)
    with pytest.raises(ValueError, match="does not quantize weights"):
        format_of(QuantizationScheme(targets=["Linear"]))
    with pytest.raises(ValueError, match="'pack-quantized' cannot hold"):
        format_of(SCHEMES["FP8_DYNAMIC"].model_copy(update={"format": "pack-quantized"}))
    out = _quantized(_weight((64, 256), torch.bfloat16), SCHEMES["W4A16"])
    with pytest.raises(ValueError, match="cannot start at 8"):
        decode(out, SCHEMES["W4A16"], slice(8, 32))
    with pytest.raises(ValueError, match="cannot start at 16"):
        encode(torch.zeros(8, 256), SCHEMES["W4A16"], out, scale=torch.ones(8, 2), start=16)
    with pytest.raises(ValueError, match="cannot start at 32"):
        encode(torch.zeros(8, 256), SCHEMES["FP8_BLOCK"], out, scale=torch.ones(1, 2), start=32)


def _weight(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Of usual size, with zeros, negative zeros, and rows of one sign."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.02
    weight[:, :32], weight[4:5] = 0, 0
    weight[1:2, 40:50] = -0.0
    weight[2:3].abs_()
    weight[3:4].abs_().neg_()
    return weight.to(dtype)


def _fits(scheme: QuantizationScheme, shape: tuple[int, int]) -> bool:
    size = scheme.weights.group_size
    return not size or size < 0 or shape[1] % size == 0


def _plain_scales(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, ...]:
    """Scales, zero points and global scale as llm-compressor finds them: extremes, then `calculate_qparams`."""
    if args.strategy == "tensor":
        groups = weight.reshape(1, -1)
    elif args.strategy == "channel":
        groups = weight.unsqueeze(1)
    elif args.strategy == "block":
        height, width = args.block_structure
        padded = F.pad(weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % height))
        groups = padded.view(padded.shape[0] // height, height, -1, width).transpose(1, 2).flatten(2)
    else:
        groups = weight.unflatten(1, (-1, args.group_size))
    lowest, highest = groups.amin(-1), groups.amax(-1)
    global_scale = None
    if args.strategy == "tensor_group":
        largest = weight.abs().max().float().reshape(1)
        global_scale = generate_gparam(-largest, largest)
    return *calculate_qparams(lowest, highest, args, global_scale), global_scale


def _empty(scheme: QuantizationScheme, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.empty(size, dtype=kind) for name, (size, kind) in layout(scheme, shape, dtype).items()}


def _encoded(
    weight: torch.Tensor,
    scheme: QuantizationScheme,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    global_scale: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    out = _empty(scheme, tuple(weight.shape), weight.dtype)
    zero_point = None if scheme.weights.symmetric else zero_point
    encode(weight, scheme, out, scale=scale, zero_point=zero_point, global_scale=global_scale)
    return out


def _quantized(
    weight: torch.Tensor, scheme: QuantizationScheme, search: ErrorSearch | None = None
) -> dict[str, torch.Tensor]:
    args = scheme.weights
    global_scale = find_global_scale([weight]) if args.strategy == "tensor_group" else None
    scale, zero_point = find_scales(weight, args, global_scale=global_scale, search=search)
    return _encoded(weight, scheme, scale, zero_point, global_scale)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
