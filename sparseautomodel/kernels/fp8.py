"""FP8 (E4M3) weights: one scale for the tensor, a row, a block or a group, MXFP8 among them; any activations.

On CPUs the codes become halves by shifts, a tile at a time, and are not scaled where the output can be: for one scale a
row or a tensor. On NVIDIA GPUs of compute capability 8.9 and later `torch._scaled_mm` multiplies FP8 by FP8.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from sparseautomodel.half_tiles import (
    E4M3_UNIT,
    e4m3_to_half,
    e8m0_to_float,
    e8m0_to_half,
    multiply_few,
    multiply_many,
)
from sparseautomodel.kernels.base import Kernel, Tensors

_LARGEST = 448 * E4M3_UNIT


class FP8Tiles(Kernel):
    name: ClassVar[str] = "fp8: tiles by shifts"
    rank: ClassVar[int] = 30
    between: ClassVar[tuple[int, int]] = (0, 8)

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        return _is_fp8(scheme.weights) and scheme.weights.strategy in ("tensor", "channel", "block", "group")

    def refuses(self) -> str | None:
        if self.device.type != "cpu":
            return f"made for CPUs, not for {self.device.type}"
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{self.dtype} is computed by the portable one"
        return None

    def few(self, tensors: Tensors, flat: Tensor) -> Tensor:
        if self.dtype == torch.float32:  # halves have a third of its digits
            return self.many(tensors, flat, None)
        codes = tensors["weight"]
        grid, factor = self._relative_scales(tensors)

        def fill(rows: slice, out: Tensor) -> None:
            e4m3_to_half(codes[rows], out)
            if grid is not None:
                out.view(len(out), grid.shape[1], -1).mul_(grid[rows].unsqueeze(-1))

        largest = _LARGEST if grid is None else 2 * _LARGEST
        return multiply_few(flat, self.shape, fill, largest).mul_(factor.view(-1)).to(flat.dtype)

    def many(self, tensors: Tensors, flat: Tensor, bias: Tensor | None) -> Tensor:
        codes, scale, dtype = tensors["weight"], tensors["weight_scale"], flat.dtype
        on_output = self.scheme.weights.strategy in ("tensor", "channel")

        def fill(rows: slice, out: Tensor) -> None:
            halves = torch.empty_like(out, dtype=torch.float16)
            e4m3_to_half(codes[rows], halves)
            out.copy_(halves)
            if not on_output:
                grid = self._scales(scale, rows).mul_(1 / E4M3_UNIT)
                out.view(len(out), grid.shape[1], -1).mul_(grid.unsqueeze(-1))

        output = multiply_many(flat, self.shape, fill)
        if on_output:
            output.mul_(scale.float().view(-1) / E4M3_UNIT)
        output = output.to(dtype)
        return output if bias is None else output.add_(bias)

    def _relative_scales(self, tensors: Tensors) -> tuple[Tensor | None, Tensor]:
        """Scales `[rows, groups]` as halves below 2, and what rows of the output are multiplied by for it.

        Without groups there are none of the first, and all is done to the output.
        """
        scale = tensors["weight_scale"]
        if self.scheme.weights.strategy in ("tensor", "channel"):
            return None, scale.float() / E4M3_UNIT
        if scale.dtype == torch.uint8:
            grid, largest = e8m0_to_half(scale)
            return grid, largest / E4M3_UNIT
        grid = self._scales(scale, slice(0, self.shape[0]))
        largest = grid.amax(1, keepdim=True).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
        largest = torch.where(largest == 0, 2.0**-126, largest)  # rows of scales that are 0 or subnormal
        return grid.div_(largest).half(), largest / E4M3_UNIT

    def _scales(self, scale: Tensor, rows: slice) -> Tensor:
        """A new `[rows, groups]`, float32, that divides the columns evenly."""
        args, columns = self.scheme.weights, self.shape[1]
        if args.strategy != "block":
            part = scale[rows]
            return e8m0_to_float(part) if part.dtype == torch.uint8 else part.to(torch.float32, copy=True)
        height, width = args.block_structure
        numbers = torch.arange(rows.start, rows.stop, device=scale.device) // height
        grid = scale.float().index_select(0, numbers)
        return grid if columns % width == 0 else grid.repeat_interleave(width, 1)[:, :columns].contiguous()


class FP8ScaledMM(Kernel):
    name: ClassVar[str] = "fp8: torch._scaled_mm"
    rank: ClassVar[int] = 20
    rounds_inputs: ClassVar[bool] = True

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        inputs = scheme.input_activations
        weights_fit = _is_fp8(scheme.weights) and scheme.weights.strategy in ("tensor", "channel")
        return weights_fit and _is_fp8(inputs) and inputs.strategy in ("token", "tensor") and inputs.symmetric

    def refuses(self) -> str | None:
        if self.device.type != "cuda":
            return f"needs an NVIDIA GPU, this is {self.device.type}"
        if torch.version.hip is not None:
            return "not tried on ROCm"
        major, minor = torch.cuda.get_device_capability(self.device)
        if (major, minor) < (8, 9):
            return f"needs compute capability 8.9, this GPU has {major}.{minor}"
        if self.dtype not in (torch.bfloat16, torch.float16):
            return f"gives bfloat16, and the layer is in {self.dtype}"
        if self.shape[0] % 16 or self.shape[1] % 16:
            return f"needs sizes that are multiples of 16, the layer has {self.shape[0]} x {self.shape[1]}"
        return None

    def many(self, tensors: Tensors, flat: Tensor, bias: Tensor | None) -> Tensor:
        inputs, weights = self.scheme.input_activations, tensors["weight"]
        if inputs.dynamic:
            over = (-1,) if inputs.strategy == "token" else (0, 1)
            step = flat.abs().amax(over, keepdim=True) / 448  # in the dtype of the input, as compressed-tensors does
            step = torch.where(step == 0, torch.finfo(step.dtype).eps, step)
        else:
            step = tensors["input_scale"].to(flat.dtype).view(1, 1)
        codes = (flat / step).clamp_(-448, 448).to(weights.dtype)
        of_rows = step.float().expand(len(flat), 1).contiguous()
        of_columns = tensors["weight_scale"].float().view(1, -1).expand(1, self.shape[0]).contiguous()
        if len(flat) == 0:
            return flat.new_empty(0, self.shape[0])
        output = torch._scaled_mm(codes, weights.t(), scale_a=of_rows, scale_b=of_columns, out_dtype=torch.bfloat16)
        output = output.to(flat.dtype)
        return output if bias is None else output.add_(bias)


def _is_fp8(args: QuantizationArgs | None) -> bool:
    return args is not None and args.type == "float" and args.num_bits == 8 and args.symmetric
