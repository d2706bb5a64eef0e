"""The scale of each row, group or block of a weight: from its extremes, or searched for the least error.

The arithmetic is that of compressed-tensors (`calculate_qparams`) in the dtype of the weight, so results equal those
of llm-compressor's round-to-nearest bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    maxgrow: float = 0.0
    """Ranges up to 1 + maxgrow times the size are tried too."""

    def factors(self) -> list[float]:
        """Every factor to try, 1 first."""
        down = max(1, int(self.maxshrink * self.grid))
        up = int(self.maxgrow * self.grid)
        return [1 - step / self.grid for step in (*range(down), *range(-1, -up - 1, -1))]


def find_scales(
    values: Tensor,
    args: QuantizationArgs,
    *,
    global_scale: Tensor | None = None,
    search: ErrorSearch | None = None,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scales of `values` `[rows, columns]`, and zero points where `args` is asymmetric.

    Shapes are those of compressed-tensors: `[1]` for a tensor, `[rows, 1]` for channels, `[rows, groups]`, and
    `[row blocks, column blocks]` with the last ones partial. Scales have the dtype of `values`; with `global_scale`
    (NVFP4) they are relative to it, float32, and numbers of FP8. Every scale is above 0. Without `search` the largest
    weight becomes the largest number. `importance` `[columns]` says how much the errors of each column count in it.
    """
    lowest, highest = _extremes(values, args)
    if search is not None:
        factor = _best_factor(values, args, (lowest, highest), global_scale, search, importance)
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


def find_input_scales(
    low: float, high: float, args: QuantizationArgs, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Scale, zero point and global scale, each `[1]` or None, of activations of `dtype` from `low` to `high`.

    Static activations have a scale of `dtype`, and a zero point where `args` is asymmetric. Those of NVFP4, whose
    groups get scales while the model runs, have a float32 global scale alone. All are finite, scales above 0.
    """
    ends = torch.tensor([[low, high]], dtype=dtype)
    if args.strategy == "tensor_group":
        return None, None, find_global_scale([ends])
    scale, zero_point = calculate_qparams(ends[:, 0], ends[:, 1], args)
    if not scale.isfinite().all():  # high - low overflows float16, the scale does not
        scale, zero_point = calculate_qparams(ends[:, 0].float(), ends[:, 1].float(), args)
        scale = scale.to(dtype)
    if args.symmetric:
        return scale, None, None
    return scale, zero_point.masked_fill((ends[:, 0] >= 0) & (ends[:, 1] <= 0), 0), None


@dataclass(frozen=True)
class Grid:
    """The numbers that weights of a matrix can become: `scale * (q - zero_point)`, with q a number of the scheme."""

    args: QuantizationArgs
    scale: Tensor
    """`[rows, groups]` float32."""
    zero_point: Tensor | None
    """The same; None where the scheme is symmetric."""
    width: int
    """Columns in a group."""

    @classmethod
    def of(
        cls,
        args: QuantizationArgs,
        shape: tuple[int, ...],
        scale: Tensor,
        zero_point: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Grid:
        """The grid of a `[rows, columns]` matrix with the scales that `find_scales` gives."""
        rows, width = shape
        if args.strategy == "block":
            width = args.block_structure[1]
        elif args.strategy in ("group", "tensor_group"):
            width = args.group_size

        def spread(found: Tensor) -> Tensor:
            if args.strategy == "tensor":
                return found.float().view(1, 1).expand(rows, 1)
            height = args.block_structure[0] if args.strategy == "block" else 1
            return found.float().repeat_interleave(height, 0)[:rows]

        real = scale if global_scale is None else scale / global_scale
        return cls(args, spread(real), None if zero_point is None else spread(zero_point), width)

    @classmethod
    def stack(cls, grids: Sequence[Grid]) -> Grid:
        """The grid of matrices on top of each other, all of one scheme."""
        zeros = [grid.zero_point for grid in grids if grid.zero_point is not None]
        scale = torch.cat([grid.scale for grid in grids])
        return cls(grids[0].args, scale, torch.cat(zeros) if zeros else None, grids[0].width)

    def __getitem__(self, rows: slice) -> Grid:
        """The grid of some of the rows."""
        return Grid(self.args, self.scale[rows], None if self.zero_point is None else self.zero_point[rows], self.width)

    def nearest(self, values: Tensor) -> Tensor:
        """`values` `[rows, columns]`, each as the nearest number that it can become, float32."""
        scale = self.scale.repeat_interleave(self.width, 1)[:, : values.shape[1]]
        numbers = values / scale
        if self.zero_point is None:
            return rounding(self.args)(numbers).mul_(scale)
        zero_point = self.zero_point.repeat_interleave(self.width, 1)[:, : values.shape[1]]
        return rounding(self.args)(numbers.add_(zero_point)).sub_(zero_point).mul_(scale)


def rounding(args: QuantizationArgs) -> Callable[[Tensor], Tensor]:
    """A function that rounds float32 multiples of a scale, in place, to the nearest numbers of the scheme."""
    lowest, highest = (float(end) for end in calculate_range(args, torch.device("cpu")))
    if args.type == "float":
        return lambda numbers: _round_to_float(numbers.clamp_(lowest, highest), args.num_bits)
    return lambda numbers: numbers.round_().clamp_(lowest, highest)


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
    importance: Tensor | None,
) -> Tensor:
    """The factor for each range of `ends`, in its shape, that leaves the least error.

    Errors are those of the weights as they will be stored and read. Each scale is searched for itself, and factor 1
    is tried first and wins a tie, so no error is above that of the whole range.
    """
    groups = _grouped(values, args)
    counts = None if importance is None else _grouped(importance.float().expand(_height(values, args), -1), args)
    factors = torch.tensor(search.factors(), device=values.device)
    best = torch.zeros(len(groups), dtype=torch.int64, device=values.device)
    step = max(1, _SEARCH_CHUNK // groups.shape[1])
    for first in range(0, len(groups), step):
        part = slice(first, first + step)
        lowest, highest = (_shrunk(end.flatten()[part], factors.unsqueeze(1)) for end in ends)
        scale, zero_point = calculate_qparams(lowest, highest, args, global_scale)
        scale = (scale if global_scale is None else scale / global_scale).unsqueeze(-1)
        zero_point = zero_point.to(values.dtype).unsqueeze(-1)
        errors = torch.zeros(scale.shape[:2], device=values.device)
        mine = None if counts is None else counts[torch.arange(first, first + lowest.shape[1]) % len(counts)]
        for start in range(0, groups.shape[1], _SEARCH_CHUNK):
            piece = groups[part, start : start + _SEARCH_CHUNK]
            exact = piece.float()
            for index, total in enumerate(errors):
                error = _power(_stored(piece, args, scale[index], zero_point[index]).sub_(exact), search.norm)
                total += (error if mine is None else error.mul_(mine[:, start : start + _SEARCH_CHUNK])).sum(1)
        best[part] = errors.nan_to_num_(nan=torch.inf).argmin(0)
    return factors[best].view(ends[0].shape)


def _power(errors: Tensor, norm: float) -> Tensor:
    """The magnitudes of `errors` to the power `norm`, in place."""
    if norm == 2:
        return errors.square_()
    # Powers by way of logarithms take two thirds of the time of pow; those of 0 would take twice as much.
    return errors.abs_().clamp_(min=1e-15).log2_().mul_(norm).exp2_()


def _shrunk(ends: Tensor, factor: Tensor) -> Tensor:
    return (ends.float() * factor).to(ends.dtype)


def _stored(values: Tensor, args: QuantizationArgs, scale: Tensor, zero_point: Tensor) -> Tensor:
    """`values` as they are read back, rounded wherever compressed-tensors rounds them, as float32."""
    numbers = values / scale
    if not args.symmetric:
        numbers += zero_point
    rounded = rounding(args)(numbers.float())
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


def _height(values: Tensor, args: QuantizationArgs) -> int:
    """How many rows a scale is for."""
    if args.strategy == "tensor":
        return len(values)
    return args.block_structure[0] if args.strategy == "block" else 1


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
