"""The scale of each row, group or block of a weight: from its extremes, or searched for the least error.

The arithmetic is that of compressed-tensors (`calculate_qparams`) in the dtype of the weight, so results equal those
of llm-compressor's round-to-nearest bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import FP4_E2M1_DATA, FP8_E4M3_DATA, QuantizationArgs
from compressed_tensors.quantization.quant_args import FP6_E2M3_DATA
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    calculate_range,
    generate_gparam,
    maybe_pad_tensor_for_block_quant,
)
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 2**19
"""Weights whose extremes are taken at once, so that they stay near the cores."""

_SEARCH_CHUNK = 2**17
"""Weights whose errors are taken at once."""


@dataclass(frozen=True)
class ErrorSearch:
    """Shrunken ranges that are tried for the least error, as llm-compressor's `mse` observer has them."""

    maxshrink: float = 0.20
    """The range of the weights is tried from once down to 1 - maxshrink times its size,"""
    grid: float = 100.0
    """in steps of 1 / grid."""
    norm: float = 2.4
    """What is least is the sum of errors to this power."""


def find_scales(
    values: Tensor,
    args: QuantizationArgs,
    *,
    global_scale: Tensor | None = None,
    search: ErrorSearch | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scales of `values` `[rows, columns]`, and zero points where `args` is asymmetric.

    Shapes are those of compressed-tensors: `[1]` for a tensor, `[rows, 1]` for channels, `[rows, groups]`, and
    `[row blocks, column blocks]` with the last ones partial. Scales have the dtype of `values`; with `global_scale`
    (NVFP4) they are relative to it, float32, and numbers of FP8. Every scale is above 0. Without `search` the largest
    weight becomes the largest number.
    """
    lowest, highest = _extremes(values, args)
    if search is not None:
        factor = _best_factor(values, args, (lowest, highest), global_scale, search)
        lowest, highest = _shrunk(lowest, factor), _shrunk(highest, factor)
    scale, zero_point = calculate_qparams(lowest, highest, args, global_scale)
    if args.symmetric:
        return scale, None
    # Where all weights are zero, 0 / 0 has made a zero point that is not defined.
    return scale, zero_point.masked_fill((lowest >= 0) & (highest <= 0), 0)


def find_global_scale(values: Sequence[Tensor]) -> Tensor:
    """The `[1]` float32 scale of NVFP4 for weights that share it: the largest becomes 6 (FP4) times 448 (FP8)."""
    largest = torch.stack([_largest(one) for one in values]).max().reshape(1)
    scale = generate_gparam(-largest, largest)
    if largest.dtype == torch.float16:  # 2688 / largest overflows below 0.041, which makes it 1.0: far too small
        precise = generate_gparam(-largest.float(), largest.float())
        scale = torch.where(precise > torch.finfo(torch.float16).max, precise, scale)
    return scale


def _extremes(values: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Lowest and highest weight for each scale, in the dtype of `values` and the shape of the scales.

    For symmetric schemes they are minus and plus the largest magnitude.
    """
    if args.strategy == "block":
        width = args.block_structure[1]
    else:
        width = args.group_size if args.strategy in ("group", "tensor_group") else values.shape[1]
    parts = [_row_extremes(rows, width, args.symmetric) for rows in _split(values)]
    lowest, highest = (torch.cat(part) for part in zip(*parts, strict=True))
    if args.strategy == "tensor":
        return lowest.amin().reshape(1), highest.amax().reshape(1)
    if args.strategy == "block":
        height = args.block_structure[0]
        missing = (0, 0, 0, -len(lowest) % height)  # zeros do no harm: every range includes 0
        lowest = F.pad(lowest, missing).unflatten(0, (-1, height)).amin(1)
        highest = F.pad(highest, missing).unflatten(0, (-1, height)).amax(1)
    return lowest, highest


def _largest(values: Tensor) -> Tensor:
    return torch.stack([_row_extremes(rows, rows.shape[1], True)[1].max() for rows in _split(values)]).max()


def _split(values: Tensor) -> tuple[Tensor, ...]:
    return values.split(max(1, _CHUNK // max(1, values.shape[1])))


def _row_extremes(rows: Tensor, width: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Lowest and highest of each `width` weights of a row."""
    missing = -rows.shape[1] % width
    groups = (F.pad(rows, (0, missing)) if missing else rows).unflatten(1, (-1, width))
    if groups.itemsize != 2:
        lowest, highest = groups.amin(-1), groups.amax(-1)
        largest = torch.maximum(-lowest, highest)
        return (-largest, largest) if symmetric else (lowest, highest)
    # The bits of positive floats are ordered as the floats are, and integers are compared several times faster.
    bits = groups.view(torch.int16)
    if symmetric:
        largest = (bits & 0x7FFF).amax(-1).view(groups.dtype)
        return -largest, largest
    order = bits ^ ((bits >> 15) & 0x7FFF)  # reverses the order of the negative ones; twice gives the bits back
    lowest, highest = (end ^ ((end >> 15) & 0x7FFF) for end in (order.amin(-1), order.amax(-1)))
    return lowest.view(groups.dtype), highest.view(groups.dtype)


def _best_factor(
    values: Tensor,
    args: QuantizationArgs,
    ends: tuple[Tensor, Tensor],
    global_scale: Tensor | None,
    search: ErrorSearch,
) -> Tensor:
    """The factor for each range of `ends`, in its shape, that leaves the least error.

    Errors are those of the weights as they will be stored and read. Each scale is searched for itself, and factor 1
    is tried first and wins a tie, so no error is above that of the whole range.
    """
    groups = _grouped(values, args)
    factors = 1 - torch.arange(max(1, int(search.maxshrink * search.grid)), device=values.device) / search.grid
    best = torch.zeros(len(groups), dtype=torch.int64, device=values.device)
    step = max(1, _SEARCH_CHUNK // groups.shape[1])
    for first in range(0, len(groups), step):
        part = slice(first, first + step)
        lowest, highest = (_shrunk(end.flatten()[part], factors.unsqueeze(1)) for end in ends)
        scale, zero_point = calculate_qparams(lowest, highest, args, global_scale)
        scale = (scale if global_scale is None else scale / global_scale).unsqueeze(-1)
        zero_point = zero_point.to(values.dtype).unsqueeze(-1)
        errors = torch.zeros(scale.shape[:2], device=values.device)
        for piece in groups[part].split(_SEARCH_CHUNK, 1):
            exact = piece.float()
            for index, total in enumerate(errors):
                error = _stored(piece, args, scale[index], zero_point[index]).sub_(exact)
                # Powers by way of logarithms take two thirds of the time of pow; those of 0 would take twice as much.
                total += error.abs_().clamp_(min=1e-15).log2_().mul_(search.norm).exp2_().sum(1)
        best[part] = errors.nan_to_num_(nan=torch.inf).argmin(0)
    return factors[best].view(ends[0].shape)


def _shrunk(ends: Tensor, factor: Tensor) -> Tensor:
    return (ends.float() * factor).to(ends.dtype)


def _stored(values: Tensor, args: QuantizationArgs, scale: Tensor, zero_point: Tensor) -> Tensor:
    """`values` as they are read back, rounded wherever compressed-tensors rounds them, as float32."""
    lowest, highest = (float(end) for end in calculate_range(args, torch.device("cpu")))
    numbers = values / scale
    if not args.symmetric:
        numbers += zero_point
    numbers = numbers.float().clamp_(lowest, highest)
    rounded = _round_to_float(numbers, args.num_bits) if args.type == "float" else numbers.round_()
    if not args.symmetric:
        rounded -= zero_point
    read_as = torch.bfloat16 if args.strategy == "tensor_group" else values.dtype  # NVFP4 is, whatever it came from
    return rounded.mul_(scale).to(read_as).float()


def _round_to_float(numbers: Tensor, num_bits: int) -> Tensor:
    """float32 `numbers` in range rounded to FP4, FP6 or FP8, in place: to multiples of the step at their exponent."""
    data = {4: FP4_E2M1_DATA, 6: FP6_E2M3_DATA, 8: FP8_E4M3_DATA}[num_bits]
    smallest = 127 + 2 - 2 ** (data.exponent - 1)
    exponent = numbers.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=smallest << 23)
    step = exponent.sub_(data.mantissa << 23).view(torch.float32)
    return numbers.div_(step).round_().mul_(step)


def _grouped(values: Tensor, args: QuantizationArgs) -> Tensor:
    """The weights of each scale as a row, in the order of the scales."""
    if args.strategy == "tensor":
        return values.reshape(1, -1)
    if args.strategy == "channel":
        return values
    if args.strategy != "block":
        return values.reshape(-1, args.group_size)
    height, width = args.block_structure
    padded = maybe_pad_tensor_for_block_quant(values, (height, width))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).reshape(-1, height * width)
