"""Weights in the layouts of compressed-tensors: which tensors a layer is stored as, dense to stored, and back.

Bit for bit what compressed-tensors 0.20 writes and reads, in runs of rows that stay in the CPU's cache. A layer has the
tensors `weight_packed` (or `weight`), `weight_scale` and, where the scheme needs them, `weight_zero_point`,
`weight_shape` and `weight_global_scale`; and for activations whose scales are found beforehand `input_scale`,
`input_zero_point` or `input_global_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from sparseautomodel.formats.base import as_dtype, float_codes, int_codes, numbers_of, pack, unpack, words

PACKED_ROWS = 32
"""Runs of rows start at multiples of this: zero points are packed along rows, and so many end at a word."""

_CHUNK = 2**19
"""Weights worked on at once: with their copies they stay near the cores, and calls of torch stay few."""

_MICROSCALED = ("mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")
"""Formats whose scale is a power of two, stored as its exponent (E8M0)."""


def format_of(scheme: QuantizationScheme) -> str:
    """Name of the format that the scheme is stored in, such as `pack-quantized`: the scheme's own or the inferred one.

    Raises ValueError where compressed-tensors has no format for the weights.
    """
    if scheme.weights is None:
        raise ValueError(f"the scheme of {scheme.targets} does not quantize weights: there is nothing to store")
    name = str(scheme.format or infer_module_format(torch.nn.Linear, scheme).value)
    if not BaseCompressor.get_value_from_registry(name).can_compress(torch.nn.Linear, scheme):
        raise ValueError(f"format {name!r} cannot hold the weights of the scheme of {scheme.targets}")
    return name


def layout(
    scheme: QuantizationScheme, shape: tuple[int, int], dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor that a `[out_features, in_features]` matrix of `dtype` is stored as.

    The names are local, such as `weight_packed`. Raises ValueError for a width that the groups do not divide.
    """
    name, args = format_of(scheme), scheme.weights
    rows, columns = shape
    if args.group_size and args.group_size > 0 and columns % args.group_size:
        raise ValueError(f"in_features {columns} is not a multiple of group_size {args.group_size}")
    grid = _grid_shape(args, shape)
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if name == "pack-quantized":
        tensors["weight_packed"] = (rows, words(columns, args.num_bits)), torch.int32
    elif _is_packed(name):
        tensors["weight_packed"] = (rows, columns * args.num_bits // 8), torch.uint8
    else:
        tensors["weight"] = shape, args.pytorch_dtype()
    scale_dtype = torch.uint8 if name in _MICROSCALED else dtype
    tensors["weight_scale"] = grid, torch.float8_e4m3fn if name == "nvfp4-pack-quantized" else scale_dtype
    if not args.symmetric and name == "pack-quantized" and args.strategy in ("group", "channel"):
        tensors["weight_zero_point"] = (words(rows, args.num_bits), grid[1]), torch.int32
    elif not args.symmetric:
        tensors["weight_zero_point"] = grid, args.zp_dtype
    if name == "pack-quantized":
        tensors["weight_shape"] = (2,), torch.int64
    if args.strategy == "tensor_group":
        tensors["weight_global_scale"] = (1,), torch.float32
    return tensors | _input_layout(scheme.input_activations, dtype)


def spans(scheme: QuantizationScheme) -> dict[str, tuple[Fraction | None, Fraction | None]]:
    """How many rows and columns of the matrix one index of each stored tensor stands for, where these follow it.

    A tensor whose dimension does not follow the matrix (`weight_shape`, the scale of a whole row) has None there.
    """
    name, args = format_of(scheme), scheme.weights
    one, bits = Fraction(1), args.num_bits
    if args.strategy == "tensor":
        grid: tuple[Fraction | None, Fraction | None] = (None, None)
    elif args.strategy == "channel":
        grid = one, None
    elif args.strategy == "block":
        grid = Fraction(args.block_structure[0]), Fraction(args.block_structure[1])
    else:
        grid = one, Fraction(args.group_size)
    zeros = grid
    if name == "pack-quantized":
        weight = one, Fraction(32, bits)
        zeros = (Fraction(32, bits), grid[1]) if args.strategy in ("group", "channel") else grid
    else:
        weight = one, Fraction(8, bits) if _is_packed(name) else one
    found = {_weight_name(name): weight, "weight_scale": grid, "weight_zero_point": zeros}
    stored = layout(scheme, (1, args.group_size if args.group_size and args.group_size > 0 else 1), torch.bfloat16)
    return {part: found.get(part, (None, None)) for part in stored}


def nbytes(scheme: QuantizationScheme, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Bytes that a matrix takes once stored, all its tensors together."""
    return sum(math.prod(size) * kind.itemsize for size, kind in layout(scheme, shape, dtype).values())


@torch.no_grad()
def encode(
    values: Tensor,
    scheme: QuantizationScheme,
    out: Mapping[str, Tensor],
    *,
    scale: Tensor,
    zero_point: Tensor | None = None,
    global_scale: Tensor | None = None,
    start: int = 0,
) -> None:
    """Round `values`, the rows from `start` on, to the scheme's numbers and write them into `out`.

    `out` holds the tensors of the whole matrix, made after `layout()`. `scale` and `zero_point` are those of these
    rows: `[rows, 1]`, `[rows, groups]`, `[row blocks, column blocks]` or `[1]`, scales as real numbers whatever form
    the file has for them. `start` is a multiple of `PACKED_ROWS` and of the rows of a block. `values` stays as it is.
    """
    name, args = format_of(scheme), scheme.weights
    rows, columns = values.shape
    if start % PACKED_ROWS or (args.strategy == "block" and start % args.block_structure[0]):
        raise ValueError(f"rows cannot start at {start}: it must be a multiple of {PACKED_ROWS} and of whole blocks")
    _store_parameters(out, args, scale, zero_point, start)
    if "weight_shape" in out:
        out["weight_shape"].copy_(torch.tensor([len(out["weight_packed"]), columns], device="cpu"))
    if global_scale is not None:
        out["weight_global_scale"].copy_(global_scale)
        scale = scale / global_scale
    stored = out[_weight_name(name)].view(torch.uint8)[start : start + rows]
    for chunk in _chunks(slice(0, rows), columns):
        step = _spread(scale, args, chunk, columns)
        numbers = values[chunk].reshape(-1, step.shape[1], columns // step.shape[1]) / step
        if zero_point is not None:
            numbers += _spread(zero_point, args, chunk, columns).to(values.dtype)
        numbers = numbers.view(-1, columns)
        is_float = args.type == "float"
        codes = float_codes(numbers, args.num_bits) if is_float else int_codes(numbers, args.num_bits)
        if _is_packed(name):
            stored[chunk] = pack(codes, args.num_bits)[:, : stored.shape[1]]
        else:
            stored[chunk] = codes if is_float else codes.sub_(2 ** (args.num_bits - 1))  # wraps: two's complement


@torch.no_grad()
def decode(
    tensors: Mapping[str, Tensor],
    scheme: QuantizationScheme,
    rows: slice | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Dense values `[rows, in_features]` of stored `tensors`: all, or a run of `rows` from a multiple of `PACKED_ROWS`.

    The dtype is that of the scale, bfloat16 where the file's scale is no plain float (NVFP4, MX), unless `dtype` is
    given; the values are always those that compressed-tensors computes, then converted.
    """
    name, args = format_of(scheme), scheme.weights
    stored = tensors[_weight_name(name)]
    begin, end, _ = (rows or slice(None)).indices(stored.shape[0])
    if begin % PACKED_ROWS:
        raise ValueError(f"rows cannot start at {begin}: it must be a multiple of {PACKED_ROWS}")
    columns = _width(tensors, name, args)
    plain = name not in _MICROSCALED and name != "nvfp4-pack-quantized"
    kind = tensors["weight_scale"].dtype if plain else torch.bfloat16
    dense = torch.empty(max(0, end - begin), columns, dtype=dtype or kind, device=stored.device)
    for chunk in _chunks(slice(begin, end), columns):
        scale = _spread(tensors["weight_scale"], args, chunk, columns)
        if name in _MICROSCALED:
            scale = decompress_mx_scale(scale)
        elif "weight_global_scale" in tensors:
            scale = scale.to(torch.bfloat16) / tensors["weight_global_scale"]
        values = _unscaled(stored[chunk], args, columns).to(scale.dtype)
        values = values.view(-1, scale.shape[1], columns // scale.shape[1])
        if not args.symmetric:
            values -= _zero_points(tensors, args, chunk, columns).to(scale.dtype)
        place = dense[chunk.start - begin : chunk.stop - begin].view(values.shape)
        if dense.dtype == kind:
            torch.mul(values, scale, out=place)
        else:
            place.copy_(values.mul_(scale).to(kind))
    return dense


def _input_layout(args: QuantizationArgs | None, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What is stored of a layer's inputs."""
    if args is None or args.dynamic is True:
        return {}
    if args.strategy == "tensor_group":
        return {"input_global_scale": ((1,), torch.float32)}
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"input_scale": ((1,), dtype)}
    return tensors if args.symmetric else tensors | {"input_zero_point": ((1,), args.zp_dtype)}


def _is_packed(name: str) -> bool:
    return name.endswith("pack-quantized")


def _weight_name(name: str) -> str:
    return "weight_packed" if _is_packed(name) else "weight"


def _grid_shape(args: QuantizationArgs, shape: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a matrix."""
    rows, columns = shape
    if args.strategy == "tensor":
        return (1,)
    if args.strategy == "channel":
        return rows, 1
    if args.strategy == "block":
        height, width = args.block_structure
        return -(-rows // height), -(-columns // width)
    return rows, columns // args.group_size


def _width(tensors: Mapping[str, Tensor], name: str, args: QuantizationArgs) -> int:
    """in_features of a stored matrix."""
    if args.strategy in ("group", "tensor_group"):
        return tensors["weight_scale"].shape[1] * args.group_size
    if name == "pack-quantized":
        return int(tensors["weight_shape"][1])
    return tensors["weight"].shape[1]


def _chunks(rows: slice, columns: int) -> list[slice]:
    """`rows` cut into runs of a multiple of `PACKED_ROWS`, about `_CHUNK` weights each."""
    step = max(1, _CHUNK // max(1, columns) // PACKED_ROWS) * PACKED_ROWS
    return [slice(first, min(first + step, rows.stop)) for first in range(rows.start, rows.stop, step)]


def _spread(grid: Tensor, args: QuantizationArgs, rows: slice, columns: int) -> Tensor:
    """The part of `grid` (scales or zero points) for `rows`, to broadcast over `[rows, groups, group width]`."""
    if args.strategy == "tensor":
        return grid.view(1, 1, 1)
    if args.strategy != "block":
        return grid[rows].unsqueeze(-1)
    height, width = args.block_structure
    first = rows.start // height
    part = grid[first : -(-rows.stop // height)].repeat_interleave(height, 0)
    part = part[rows.start - first * height : rows.stop - first * height]
    if columns % width == 0:
        return part.unsqueeze(-1)
    return part.repeat_interleave(width, 1)[:, :columns].unsqueeze(1)


def _store_parameters(
    out: Mapping[str, Tensor], args: QuantizationArgs, scale: Tensor, zero_point: Tensor | None, start: int
) -> None:
    """Write the scales and zero points of a run of rows from `start` on."""
    if args.strategy == "tensor":
        first = 0
    elif args.strategy == "block":
        first = start // args.block_structure[0]
    else:
        first = start
    part = slice(first, first + len(scale))
    if out["weight_scale"].dtype == torch.uint8:
        scale = compress_mx_scale(scale, torch.uint8)
    out["weight_scale"][part] = scale.to(out["weight_scale"].dtype)
    if zero_point is None:
        return
    if out["weight_zero_point"].dtype == torch.int32:
        codes = zero_point.view(torch.uint8).add(2 ** (args.num_bits - 1)).t()
        packed = pack(codes, args.num_bits)[:, : 4 * words(len(zero_point), args.num_bits)]
        zero_point = as_dtype(packed, torch.int32).t()
        first = start * args.num_bits // 32
    out["weight_zero_point"][first : first + len(zero_point)] = zero_point


def _zero_points(tensors: Mapping[str, Tensor], args: QuantizationArgs, rows: slice, columns: int) -> Tensor:
    """The stored zero points for `rows`, to broadcast as `_spread` does."""
    stored, bits = tensors["weight_zero_point"], args.num_bits
    if stored.dtype == torch.int32:
        count = rows.stop - rows.start
        packed = stored[rows.start * bits // 32 : words(rows.stop, bits)].t()
        codes = unpack(as_dtype(packed, torch.uint8), bits, count).t()
        stored, rows = codes.sub(2 ** (bits - 1)).view(torch.int8), slice(0, count)
    return _spread(stored, args, rows, columns)


def _unscaled(stored: Tensor, args: QuantizationArgs, columns: int) -> Tensor:
    """The numbers that stored rows stand for, before zero point and scale: bfloat16, which holds them exactly."""
    bits = args.num_bits
    if stored.dtype == torch.int8:
        return stored.to(torch.bfloat16)
    packed = as_dtype(stored, torch.uint8)
    if bits == 4 or stored.dtype == torch.float8_e4m3fn:
        return numbers_of(packed, args.type, bits)[:, :columns]
    codes = unpack(packed, bits, columns)
    if args.type == "float":
        return numbers_of(codes, args.type, bits)
    return codes.sub_(2 ** (bits - 1)).view(torch.int8).to(torch.bfloat16)
