"""FP4 (E2M1) weights with a scale for each small group: NVFP4 (16, FP8 and one scale for all), MXFP4 (32, E8M0).

On CPUs two bytes become four bfloat16 by a look-up in a table, a tile at a time. Scales are powers of two and added to
exponents (MXFP4), or are multiplied by whole vectors (NVFP4): its words are laid out so that neighbours in a row are of
different groups, and inputs are permuted to match. Scaled like this, all its numbers are exact in bfloat16.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.half_tiles import (
    E2M1_UNIT,
    E4M3_UNIT,
    e2m1_to_half,
    e4m3_to_half,
    e8m0_to_float,
    multiply_few,
    multiply_many,
)
from sparseautomodel.kernels.base import Kernel, Tensors

_UP = 2.0**11
"""Halves are multiplied by it so that the largest scaled ones are near 1."""

_SPREAD = 60
"""By how many powers of two scales of a row may differ. Smaller ones count as if they were of that size."""


class MXFP4Tiles(Kernel):
    """A number 0 is 2**-63 times the scale of its group here, which no sum of floats feels."""

    name: ClassVar[str] = "mxfp4: tiles by a table"
    rank: ClassVar[int] = 30

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        return _is_fp4(scheme, "mxfp4-pack-quantized")

    def refuses(self) -> str | None:
        return _refusal(self)

    def many(self, tensors: Tensors, flat: Tensor, bias: Tensor | None) -> Tensor:
        words = tensors["weight_packed"].view(torch.uint16)
        exponents = tensors["weight_scale"]
        table = _number_table(-_SPREAD - 4, flat.device)
        largest = exponents.amax(1, keepdim=True)

        def fill(rows: slice, out: Tensor) -> None:
            _look_up(table, words[rows], out)
            raised = exponents[rows].to(torch.int16).sub_(largest[rows].to(torch.int16) - _SPREAD).clamp_(min=0)
            bits = out.view(torch.int16).view(*raised.shape, -1)
            bits.add_(raised.bitwise_left_shift_(7).unsqueeze(-1))

        output = multiply_many(flat, self.shape, fill, torch.bfloat16)
        output = output.mul_(e8m0_to_float(largest).mul_(2.0**4).view(-1)).to(flat.dtype)
        return output if bias is None else output.add_(bias)


class NVFP4Tiles(Kernel):
    name: ClassVar[str] = "nvfp4: tiles by a table, by shifts for a few tokens"
    rank: ClassVar[int] = 30
    between: ClassVar[tuple[int, int]] = (0, 8)

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        return _is_fp4(scheme, "nvfp4-pack-quantized")

    def refuses(self) -> str | None:
        if self.dtype == torch.float32:
            return "has more digits than the weights that compressed-tensors rounds to bfloat16: torch.float32"
        return _refusal(self)

    def lay_out(self, stored: Tensors) -> dict[str, Tensor]:
        rows, groups, words = self._sizes
        packed = stored["weight_packed"].view(rows, groups, words, 2).transpose(1, 2)
        return dict(stored) | {"weight_packed": packed.reshape(rows, -1)}

    def restore(self, tensors: Tensors) -> dict[str, Tensor]:
        rows, groups, words = self._sizes
        packed = tensors["weight_packed"].view(rows, words, groups, 2).transpose(1, 2)
        return super().restore(tensors) | {"weight_packed": packed.reshape(rows, -1)}

    def dequantize(self, tensors: Tensors, rows: slice | None = None) -> Tensor:
        begin, end, _ = (rows or slice(None)).indices(self.shape[0])
        part = {name: tensors[name][begin:end] for name in ("weight_packed", "weight_scale")}
        part["weight_global_scale"] = tensors["weight_global_scale"]
        run = NVFP4Tiles(self.scheme, (end - begin, self.shape[1]), self.dtype, self.device)
        return storage.decode(run.restore(part), self.scheme, dtype=self.dtype)

    def few(self, tensors: Tensors, flat: Tensor) -> Tensor:
        words = tensors["weight_packed"].view(torch.int16)
        scales = torch.empty_like(tensors["weight_scale"], dtype=torch.float16)
        e4m3_to_half(tensors["weight_scale"], scales)
        scales.mul_(_UP)
        unit = _UP * E2M1_UNIT * E4M3_UNIT

        def fill(rows: slice, out: Tensor) -> None:
            e2m1_to_half(words[rows], out.view(len(out), 4, -1))
            out.view(len(out), -1, scales.shape[1]).mul_(scales[rows].unsqueeze(1))

        _, groups, size = self._sizes
        permuted = flat.view(len(flat), groups, size, 4).permute(0, 3, 2, 1).reshape(flat.shape)
        output = multiply_few(permuted, self.shape, fill, 6 * 448 * unit)
        return output.mul_(1 / (unit * tensors["weight_global_scale"])).to(flat.dtype)

    def many(self, tensors: Tensors, flat: Tensor, bias: Tensor | None) -> Tensor:
        words, scales = tensors["weight_packed"].view(torch.uint16), tensors["weight_scale"].view(torch.uint8)
        table, scale_table = _number_table(0, flat.device), _scale_table(flat.device)

        def fill(rows: slice, out: Tensor) -> None:
            _look_up(table, words[rows], out)
            fours = scale_table.index_select(0, scales[rows].to(torch.int32).flatten()).view(torch.bfloat16)
            fours = fours.view(len(out), 1, -1)
            out.view(len(out), -1, fours.shape[2]).mul_(fours)

        _, groups, size = self._sizes
        permuted = flat.view(len(flat), groups, size, 4).transpose(1, 2).reshape(flat.shape)
        output = multiply_many(permuted, self.shape, fill, torch.bfloat16)
        output = output.mul_(1 / tensors["weight_global_scale"]).to(flat.dtype)
        return output if bias is None else output.add_(bias)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows, groups of a row, words of four codes of a group."""
        size = self.scheme.weights.group_size
        return self.shape[0], self.shape[1] // size, size // 4


def _is_fp4(scheme: QuantizationScheme, name: str) -> bool:
    args = scheme.weights
    return args is not None and args.type == "float" and args.num_bits == 4 and storage.format_of(scheme) == name


def _refusal(kernel: Kernel) -> str | None:
    if kernel.device.type != "cpu":
        return f"made for CPUs, not for {kernel.device.type}"
    if kernel.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computes no {kernel.dtype}"
    return None


def _look_up(table: Tensor, words: Tensor, out: Tensor) -> None:
    """Write the four bfloat16 that `table` has for each of `words` (uint16) into `out`."""
    torch.index_select(table, 0, words.to(torch.int32).flatten(), out=out.view(torch.int64).view(-1))


@functools.cache
def _number_table(exponent: int, device: torch.device) -> Tensor:
    """For each two bytes the four numbers that they hold in bfloat16, times a power of two, seen as one integer."""
    word = torch.arange(2**16, dtype=torch.int32, device="cpu")
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16, device="cpu") * 2.0**exponent
    numbers = torch.cat([magnitudes, -magnitudes])
    fours = torch.stack([numbers[(word >> shift & 15).long()] for shift in (0, 4, 8, 12)], 1)
    return fours.view(torch.int64).flatten().to(device)


@functools.cache
def _scale_table(device: torch.device) -> Tensor:
    """Four times the same for each byte: the E4M3 number that it is, in bfloat16, seen as one integer."""
    byte = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
    numbers = byte.view(torch.float8_e4m3fn).to(torch.bfloat16)
    return numbers.unsqueeze(1).repeat(1, 4).view(torch.int64).flatten().to(device)
