"""Run layers of 8-bit integer weights on activations of full precision."""

from __future__ import annotations

from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from torch.nn import functional as F

from sparseautomodel.formats.base import as_dtype
from sparseautomodel.kernels.base import Kernel, Tensors

MULTIPLE = 16
"""Of columns: torch._weight_int8pack_mm on a CPU reads so many at a time, and past the end of others."""


_LAID_OUT = ("weight_packed", "weight", "weight_scale", "weight_zero_point")
_MADE = ("weight_codes", "weight_scales", "weight_zeros")
"""Stored tensors, and what they are laid out as. Other names, so that nobody takes the one for the other."""


class Int8Weights(Kernel):
    """The weight is int8 `[groups, out_features, group width]`, one group where the scale is that of a row or of all:
    the product of a few tokens is one of torch's a group."""

    name: ClassVar[str] = "int8 weights: torch._weight_int8pack_mm, tiles for many tokens"
    rank: ClassVar[int] = 30
    between: ClassVar[tuple[int, int]] = (4, 32)

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        args = scheme.weights
        return (
            args is not None
            and args.type == "int"
            and args.num_bits == 8
            and args.strategy in ("channel", "tensor", "group")
        )

    def refuses(self) -> str | None:
        width = self._width()
        if width % MULTIPLE:
            return f"torch._weight_int8pack_mm reads {MULTIPLE} columns at a time, and {width} is no multiple of that"
        if torch.version.hip or self.device.type not in ("cpu", "cuda"):
            return f"torch has no such operation for {'ROCm' if torch.version.hip else self.device.type}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_weight_int8pack_mm", self.device.type.upper()):
            return f"torch {torch.__version__} has no torch._weight_int8pack_mm for {self.device.type}"
        return None

    def lay_out(self, stored: Tensors) -> dict[str, Tensor]:
        """The codes as int8 in groups, scales `[groups, out_features]`, zero points as int8 with their padding."""
        tensors = {name: tensor for name, tensor in stored.items() if name not in _LAID_OUT}
        codes = _signed(stored["weight_packed"]) if "weight_packed" in stored else stored["weight"]
        tensors["weight_codes"] = codes.view(len(codes), -1, self._width()).transpose(0, 1).contiguous()
        tensors["weight_scales"] = _turned(stored["weight_scale"])
        if "weight_zero_point" in stored:
            zeros = _turned(stored["weight_zero_point"])
            tensors["weight_zeros"] = zeros if zeros.dtype == torch.int8 else _signed(zeros)
        return tensors

    def restore(self, tensors: Tensors) -> dict[str, Tensor]:
        stored = {name: tensor for name, tensor in super().restore(tensors).items() if name not in _MADE}
        codes = tensors["weight_codes"].transpose(0, 1).reshape(self.shape)
        is_packed = "weight_shape" in stored
        stored["weight_packed" if is_packed else "weight"] = _words(codes) if is_packed else codes
        stored["weight_scale"] = _turned(tensors["weight_scales"])
        if "weight_zeros" in tensors:
            zeros = tensors["weight_zeros"]
            stored["weight_zero_point"] = _turned(_words(zeros) if is_packed and zeros.ndim == 2 else zeros)
        return stored

    def few(self, tensors: Tensors, flat: Tensor) -> Tensor:
        if flat.dtype != torch.bfloat16 and flat.device.type == "cpu":  # for which torch goes a number at a time
            return self.many(tensors, flat, None)
        flat, weight, scale = flat.contiguous(), tensors["weight_codes"], tensors["weight_scales"].to(flat.dtype)
        groups, rows, width = weight.shape
        if scale.ndim == 1:
            scale = scale.expand(1, rows).contiguous()
        output = torch._weight_int8pack_mm(flat[:, :width], weight[0], scale[0])
        if groups == 1 and "weight_zeros" not in tensors:
            return output
        output = output.float()
        for group in range(1, groups):
            some = flat[:, group * width : (group + 1) * width]
            output += torch._weight_int8pack_mm(some, weight[group], scale[group])
        if "weight_zeros" in tensors:
            sums = flat.view(len(flat), groups, width).sum(-1, dtype=torch.float32)
            output -= sums @ (_zeros(tensors["weight_zeros"], rows) * scale.float())
        return output.to(flat.dtype)

    def many(self, tensors: Tensors, flat: Tensor, bias: Tensor | None) -> Tensor:
        by_output = len(tensors["weight_codes"]) == 1 and "weight_zeros" not in tensors
        if not by_output or flat.dtype == torch.float16:  # whose unscaled sums may be infinite
            return super().many(tensors, flat, bias)
        weight = tensors["weight_codes"][0]
        output = torch.cat([F.linear(flat, weight[rows].to(flat.dtype)) for rows in self.tiles()], dim=-1)
        output.mul_(tensors["weight_scales"].view(-1))
        return output if bias is None else output.add_(bias)

    def dequantize(self, tensors: Tensors, rows: slice | None = None) -> Tensor:
        scale, rows = tensors["weight_scales"], rows or slice(None)
        codes = tensors["weight_codes"][:, rows].transpose(0, 1)
        values = torch.empty(codes.shape, dtype=scale.dtype, device=scale.device).copy_(codes)
        if "weight_zeros" in tensors:
            values -= _over(_zeros(tensors["weight_zeros"], self.shape[0]), rows)
        return values.mul_(_over(scale, rows)).view(-1, self.shape[1]).to(self.dtype)

    def _width(self) -> int:
        args = self.scheme.weights
        return args.group_size if args.strategy == "group" else self.shape[1]


def _signed(words: Tensor) -> Tensor:
    """Words of four codes each, the numbers plus 128, as the int8 numbers."""
    return as_dtype(words, torch.uint8).bitwise_xor(128).view(torch.int8)


def _words(numbers: Tensor) -> Tensor:
    """`_signed` undone."""
    return as_dtype(numbers, torch.uint8).bitwise_xor(128).view(torch.int32)


def _turned(grid: Tensor) -> Tensor:
    return grid.t().clone(memory_format=torch.contiguous_format) if grid.ndim == 2 else grid


def _zeros(grid: Tensor, rows: int) -> Tensor:
    """Zero points `[groups, out_features]` or `[1]`, without padding."""
    return grid[:, :rows] if grid.ndim == 2 else grid


def _over(grid: Tensor, rows: slice) -> Tensor:
    """Scales or zero points of some rows, to broadcast over `[rows, groups, group width]`."""
    return grid[:, rows].t().unsqueeze(-1) if grid.ndim == 2 else grid
