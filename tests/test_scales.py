"""Scales against compressed-tensors' arithmetic on plain extremes, and the search against what it must not exceed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, round_to_quantized_type_args
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseautomodel.formats.compressed_tensors import decode, encode, layout
from sparseautomodel.scales import (
    ErrorSearch,
    Grid,
    _round_to_float,
    _row_extremes,
    find_global_scale,
    find_input_scales,
    find_scales,
    rounding,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GRIDS: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": {"strategy": "group", "group_size": 32},
    "block": {"strategy": "block", "block_structure": [32, 48]},
}
ARGS = {
    f"int{bits}-{'sym' if symmetric else 'asym'}-{name}": QuantizationArgs(num_bits=bits, symmetric=symmetric, **grid)
    for bits in (3, 4, 8)
    for symmetric in (True, False)
    for name, grid in GRIDS.items()
}
ARGS |= {f"fp8-{name}": QuantizationArgs(num_bits=8, type="float", **grid) for name, grid in GRIDS.items()}
ARGS |= {name: PRESET_SCHEMES[name]["weights"] for name in ("NVFP4A16", "MXFP4A16", "MXFP6A16", "MXFP8A16")}
every = pytest.mark.parametrize("args", ARGS.values(), ids=ARGS)


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_are_those_of_plain_extremes(args: QuantizationArgs, dtype: torch.dtype) -> None:
    weight = _weight((72, 192), dtype)
    global_scale = find_global_scale([weight]) if args.strategy == "tensor_group" else None
    scale, zero_point = find_scales(weight, args, global_scale=global_scale)
    rows, columns = _place_of_each_scale(args, weight.shape)
    found = []
    for row in rows:
        for column in columns:
            part = weight[row, column]
            found.append(calculate_qparams(part.min().reshape(1), part.max().reshape(1), args, global_scale))
    assert torch.equal(scale.flatten(), torch.cat([one for one, _ in found]))
    assert scale.shape == ((1,) if args.strategy == "tensor" else (len(rows), len(columns)))
    assert scale.dtype == (dtype if global_scale is None else torch.float32)
    assert bool((scale > 0).all())
    if args.symmetric:
        assert zero_point is None
    else:
        assert zero_point.dtype == torch.int8 and zero_point.shape == scale.shape
        empty = torch.tensor([not weight[row, column].any() for row in rows for column in columns])
        expected = torch.cat([zero for _, zero in found]).masked_fill(empty, 0)
        assert torch.equal(zero_point.flatten(), expected)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 9), st.integers(1, 40), st.integers(1, 16), st.integers(0, 2**32 - 1))
def test_extremes_are_those_of_amin_and_amax(
    dtype: torch.dtype, rows: int, columns: int, width: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (rows, columns * dtype.itemsize // 2), generator=generator).to(torch.int16)
    values = bits.view(dtype)  # any float: subnormal, huge, negative zero
    values = values.nan_to_num(nan=0.0)
    padded = torch.nn.functional.pad(values, (0, -columns % width)).unflatten(1, (-1, width))
    lowest, highest = _row_extremes(values, width, symmetric=False)
    assert torch.equal(lowest, padded.amin(-1)) and torch.equal(highest, padded.amax(-1))
    lowest, highest = _row_extremes(values, width, symmetric=True)
    assert torch.equal(highest, padded.abs().amax(-1)) and torch.equal(lowest, -highest)


@every
def test_what_is_not_finite_shows_in_its_scale(args: QuantizationArgs) -> None:
    if args.scale_dtype is not None:
        pytest.skip("a scale of FP8 or E8M0 has no infinity")
    for value in (torch.nan, torch.inf):
        weight = _weight((64, 192), torch.bfloat16)
        weight[40, 100] = value
        assert not find_scales(weight, args)[0].isfinite().all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ARGS)), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1), st.sampled_from((1.0, 3.0)))
def test_the_search_never_stores_a_larger_error(name: str, dtype: torch.dtype, seed: int, tail: float) -> None:
    args, generator = ARGS[name], torch.Generator().manual_seed(seed)
    weight = torch.randn(64, 192, generator=generator) * 0.02
    weight = (weight.abs() ** tail * weight.sign()).to(dtype)
    plain, searched = (_errors(weight, args, search) for search in (None, ErrorSearch()))
    assert bool((searched <= plain * (1 + 1e-5)).all())


def test_the_search_lowers_the_error_of_four_bits() -> None:
    weight = torch.randn(256, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain, searched = (_errors(weight, ARGS["int4-sym-group"], search).sum() for search in (None, ErrorSearch()))
    assert searched < 0.95 * plain


def test_the_search_finds_the_best_of_its_grid() -> None:
    args, search = ARGS["int4-asym-group"], ErrorSearch(maxshrink=0.5, grid=20.0, norm=2.0)
    weight = torch.randn(1, 32, generator=torch.Generator().manual_seed(0)) ** 3
    errors = []
    for step in range(10):
        factor = 1 - step / 20
        scale, zero_point = calculate_qparams(weight.min() * factor, weight.max() * factor, args)
        number = (weight / scale + zero_point).round().clamp(-8, 7)
        errors.append((((number - zero_point) * scale - weight) ** 2).sum())
    best = torch.stack(errors).argmin()
    assert best > 0
    factor = 1 - int(best) / 20
    expected, _ = calculate_qparams(weight.min() * factor, weight.max() * factor, args)
    assert torch.allclose(find_scales(weight, args, search=search)[0].flatten(), expected)


@pytest.mark.parametrize("name", ["int4-asym-group", "int8-sym-tensor", "int3-sym-block", "fp8-channel", "NVFP4A16"])
def test_errors_count_as_much_as_their_columns_are_important(name: str) -> None:
    args, search = ARGS[name], ErrorSearch(maxshrink=0.5, grid=20.0, norm=2.0, maxgrow=0.1)
    assert search.factors() == pytest.approx([1 - step / 20 for step in range(10)] + [1.05, 1.1])
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 192, generator=generator) ** 3
    importance = torch.rand(192, generator=generator) ** 4
    found = {}
    for label, counts in (("plain", None), ("weighted", importance)):
        errors = _errors(weight, args, search, 2.0, counts, importance)
        found[label] = errors
    assert bool((found["weighted"] <= found["plain"] * (1 + 1e-5)).all())
    assert found["weighted"].sum() < found["plain"].sum()
    equal = torch.full((192,), 3.0)
    scales = [
        find_scales(weight, args, search=search, global_scale=_shared(weight, args), importance=counts)[0]
        for counts in (None, equal)
    ]
    assert torch.equal(*scales)


def test_what_is_important_is_not_clipped() -> None:
    weight = torch.tensor([[7.0, 1.2, -1.3, 1.1] * 8])
    importance = torch.tensor([1e6, 1.0, 1.0, 1.0]).repeat(8)
    args, search = ARGS["int4-sym-group"], ErrorSearch(maxshrink=0.8, grid=40.0, norm=2.0, maxgrow=0.1)
    scale = find_scales(weight, args, search=search, importance=importance)[0]
    assert abs(float((7 / scale).round().clamp(-8, 7) * scale) - 7) < 0.05
    for counts in (torch.zeros(32), torch.full((32,), torch.nan)):
        assert torch.equal(find_scales(weight, args, search=search, importance=counts)[0], find_scales(weight, args)[0])


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_grid_has_the_numbers_that_are_stored(args: QuantizationArgs, dtype: torch.dtype) -> None:
    weight = _weight((72, 192), dtype)
    global_scale = _shared(weight, args)
    scale, zero_point = find_scales(weight, args, global_scale=global_scale)
    grid = Grid.of(args, weight.shape, scale, zero_point, global_scale)
    nearest = grid.nearest(weight.float())
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    out = {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in layout(scheme, (72, 192), dtype).items()}
    encode(nearest, scheme, out, scale=scale, zero_point=zero_point, global_scale=global_scale)
    read_as = torch.bfloat16 if global_scale is not None else dtype
    assert torch.equal(decode(out, scheme, dtype=dtype), nearest.to(read_as).to(dtype))
    assert torch.equal(grid.nearest(nearest), nearest)
    halves = Grid.stack([grid[40:], grid[:40]])
    assert torch.equal(
        halves.nearest(torch.cat([weight[40:], weight[:40]]).float()), torch.cat([nearest[40:], nearest[:40]])
    )


@every
def test_rounding_saturates(args: QuantizationArgs) -> None:
    lowest, highest = calculate_range(args, torch.device("cpu"))
    numbers = torch.cat([torch.linspace(float(lowest), float(highest), 999), torch.tensor([-1e9, 1e9])])
    expected = round_to_quantized_type_args(numbers.clamp(lowest, highest), args, lowest, highest)
    assert torch.equal(rounding(args)(numbers), expected)


@pytest.mark.parametrize("search", [None, ErrorSearch()], ids=["minmax", "mse"])
@pytest.mark.parametrize("name", [name for name in ARGS if name.endswith(("channel", "group")) or name[:2] == "MX"])
def test_rows_do_not_depend_on_each_other(name: str, search: ErrorSearch | None) -> None:
    weight = _weight((96, 192), torch.bfloat16)
    whole = find_scales(weight, ARGS[name], search=search)
    parts = [find_scales(part, ARGS[name], search=search) for part in weight.split([1, 31, 64])]
    for one, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert one is None or torch.equal(one, torch.cat(pieces))


def test_pieces_of_one_large_scale_are_added_up() -> None:
    args = ARGS["int4-sym-tensor"]
    weight = torch.randn(64, 4100, generator=torch.Generator().manual_seed(0))  # more than is searched at once
    factors = [1 - step / 100 for step in range(20)]
    errors = []
    for factor in factors:
        scale = weight.abs().max() * factor / 7.5
        errors.append((((weight / scale).round().clamp(-8, 7) * scale - weight).abs() ** 2.4).sum())
    expected = weight.abs().max() * factors[int(torch.stack(errors).argmin())] / 7.5
    assert torch.allclose(find_scales(weight, args, search=ErrorSearch())[0], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_global_scale_is_that_of_the_largest_weight_of_all(dtype: torch.dtype) -> None:
    weights = [_weight((8, 32), dtype), _weight((16, 32), dtype) * 30, _weight((8, 32), dtype)]
    largest = max(weight.abs().max() for weight in weights).reshape(1)
    expected = generate_gparam(-largest, largest)
    assert torch.equal(find_global_scale(weights), expected)
    assert expected.shape == (1,) and expected.dtype == torch.float32


def test_the_global_scale_of_small_float16_weights_is_not_lost() -> None:
    weight = torch.full((8, 32), 0.01, dtype=torch.float16)
    assert float(find_global_scale([weight])) == pytest.approx(6 * 448 / 0.01, rel=1e-3)
    assert float(find_global_scale([weight * 0])) == 1.0


@pytest.mark.parametrize("bits", (4, 6, 8))
def test_floats_are_rounded_as_compressed_tensors_rounds_them(bits: int) -> None:
    args = QuantizationArgs(num_bits=bits, type="float")
    lowest, highest = calculate_range(args, torch.device("cpu"))
    numbers = torch.linspace(float(lowest), float(highest), 2**16)
    numbers = torch.cat([numbers, numbers / 256, numbers / 65536, numbers.trunc(), torch.zeros(1)])
    expected = round_to_quantized_type_args(numbers, args, lowest, highest)
    assert torch.equal(_round_to_float(numbers.clone(), bits), expected)


def _weight(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """With rows and groups of zeros, of one sign, and of negative zeros."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.02
    weight[:, :32], weight[4] = 0, 0
    weight[1], weight[2], weight[3] = -0.0, weight[2].abs(), -weight[3].abs()
    return weight.to(dtype)


def _place_of_each_scale(args: QuantizationArgs, shape: tuple[int, ...]) -> tuple[list[slice], list[slice]]:
    height, width = {
        "tensor": shape,
        "channel": (1, shape[1]),
        "block": args.block_structure,
    }.get(args.strategy, (1, args.group_size))
    return (
        [slice(first, first + height) for first in range(0, shape[0], height)],
        [slice(first, first + width) for first in range(0, shape[1], width)],
    )


def _shared(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor | None:
    return find_global_scale([weight]) if args.strategy == "tensor_group" else None


def _errors(
    weight: torch.Tensor,
    args: QuantizationArgs,
    search: ErrorSearch | None,
    norm: float = 2.4,
    importance: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of errors to the power `norm` for each scale, of what is stored and read back; each column times `counts`."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    global_scale = _shared(weight, args)
    scale, zero_point = find_scales(weight, args, global_scale=global_scale, search=search, importance=importance)
    parts = layout(scheme, tuple(weight.shape), weight.dtype)
    out = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in parts.items()}
    encode(weight, scheme, out, scale=scale, zero_point=zero_point, global_scale=global_scale)
    error = (decode(out, scheme).double() - weight.double()).abs() ** norm * (1 if counts is None else counts)
    rows, columns = _place_of_each_scale(args, tuple(weight.shape))
    return torch.stack([error[row, column].sum() for row in rows for column in columns])


INPUTS = {
    "float8": QuantizationArgs(num_bits=8, type="float", strategy="tensor"),
    "int8": QuantizationArgs(num_bits=8, strategy="tensor"),
    "int8 asymmetric": QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False),
    "NVFP4": PRESET_SCHEMES["NVFP4"]["input_activations"],
}
FOUND = [
    ("float8", -3.859375, 3.5625, 0.00860595703125, None, None),
    ("float8", -4.40625, 7.0, 0.015625, None, None),
    ("int8", -3.59375, 3.609375, 0.0283203125, None, None),
    ("int8", -1.921875, 2.375, 0.0186767578125, None, None),
    ("int8 asymmetric", -4.40625, 7.0, 0.044677734375, -30, None),
    ("int8 asymmetric", -3.859375, 3.5625, 0.0291748046875, 4, None),
    ("NVFP4", -3.859375, 3.5625, None, None, 700.0),
    ("NVFP4", -3.96875, 4.03125, None, None, 668.0),
]
"""Extremes of bfloat16 activations, and the scales that llm-compressor 0.14.0.1 (`static_minmax`) stores for them."""


@pytest.mark.parametrize(("name", "low", "high", *"szg"), FOUND)
def test_scales_of_inputs_are_those_of_llm_compressor(
    name: str, low: float, high: float, s: float | None, z: int | None, g: float | None
) -> None:
    found = find_input_scales(low, high, INPUTS[name], torch.bfloat16)
    assert [None if one is None else one.item() for one in found] == [s, z, g]
    dtypes = (torch.bfloat16, torch.int8, torch.float32)
    assert all(
        one is None or (one.shape == (1,) and one.dtype == dtype) for one, dtype in zip(found, dtypes, strict=True)
    )


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(low=st.floats(-6e4, 6e4, width=16), high=st.floats(-6e4, 6e4, width=16))
def test_scales_of_inputs_are_finite_and_above_zero(name: str, dtype: torch.dtype, low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    scale, zero_point, global_scale = find_input_scales(low, high, INPUTS[name], dtype)
    for one in (scale, global_scale):
        assert one is None or (bool(one.isfinite()) and bool(one > 0))
    if scale is None:
        return
    ends = torch.tensor([low, high], dtype=dtype)
    expected, point = calculate_qparams(ends[0], ends[1], INPUTS[name])
    if expected.isfinite():
        assert torch.equal(scale, expected)
        assert zero_point is None or low == high == 0 or torch.equal(zero_point, point)
