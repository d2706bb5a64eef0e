"""FP4 (E2M1) weights with a scale for each small group: NVFP4 (16, FP8 and one scale for all), MXFP4 (32, E8M0).

On CPUs the codes become halves by shifts, a tile at a time. The words of a row are laid out so that neighbours are of
different groups: scales are then multiplied by whole vectors, and inputs are permuted to match.
"""

from __future__ import annotations

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
    e8m0_to_half,
    multiply_few,
    multiply_many,
)
from sparseautomodel.kernels.base import Kernel, Tensors

_UP = 2.0**11
"""Halves are multiplied by it so that the largest scaled ones are near 1."""


class FP4Tiles(Kernel):
    name: ClassVar[str] = "fp4: tiles by shifts"
    rank: ClassVar[int] = 30
    between: ClassVar[tuple[int, int]] = (0, 8)

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        args = scheme.weights
        is_fp4 = args is not None and args.type == "float" and args.num_bits == 4
        return is_fp4 and storage.format_of(scheme) in ("nvfp4-pack-quantized", "mxfp4-pack-quantized")

    def refuses(self) -> str | None:
        if self.device.type != "cpu":
            return f"made for CPUs, not for {self.device.type}"
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"computes no {self.dtype}"
        return None

    def lay_out(self, stored: Tensors) -> dict[str, Tensor]:
        rows, groups, words = self._sizes
        packed = stored["weight_packed"].view(rows, groups, words, 2).transpose(1, 2)
        rest = {name: tensor for name, tensor in stored.items() if name != "weight_packed"}
        return rest | {"weight_words": packed.reshape(rows, -1)}

    def restore(self, tensors: Tensors) -> dict[str, Tensor]:
        rows, groups, words = self._sizes
        packed = tensors["weight_words"].view(rows, words, groups, 2).transpose(1, 2)
        rest = {name: tensor for name, tensor in super().restore(tensors).items() if name != "weight_words"}
        return rest | {"weight_packed": packed.reshape(rows, -1)}

    def dequantize(self, tensors: Tensors, rows: slice | None = None) -> Tensor:
        begin, end, _ = (rows or slice(None)).indices(self.shape[0])
        part = {name: tensors[name] for name in tensors if name == "weight_global_scale"}
        part |= {name: tensors[name][begin:end] for name in ("weight_words", "weight_scale")}
        run = FP4Tiles(self.scheme, (end - begin, self.shape[1]), self.dtype, self.device)
        return storage.decode(run.restore(part), self.scheme, dtype=self.dtype)

    def few(self, tensors: Tensors, flat: Tensor) -> Tensor:
        if self.dtype == torch.float32:  # halves have a third of its digits
            return self.many(tensors, flat, None)
        scales, factor, largest = self._half_scales(tensors)
        words = tensors["weight_words"].view(torch.int16)

        def fill(rows: slice, out: Tensor) -> None:
            e2m1_to_half(words[rows], out.view(len(out), 4, -1))
            out.view(len(out), -1, scales.shape[1]).mul_(scales[rows].unsqueeze(1))

        return multiply_few(self._permuted(flat), self.shape, fill, largest).mul_(factor).to(flat.dtype)

    def many(self, tensors: Tensors, flat: Tensor, bias: Tensor | None) -> Tensor:
        words = tensors["weight_words"].view(torch.int16)

        def fill(rows: slice, out: Tensor) -> None:
            halves = torch.empty(len(out), 4, words.shape[1], dtype=torch.float16, device=out.device)
            e2m1_to_half(words[rows], halves)
            scales = self._float_scales(tensors, rows).mul_(1 / E2M1_UNIT)
            out.copy_(halves.view(out.shape))
            out.view(len(out), -1, scales.shape[1]).mul_(scales.unsqueeze(1))
            if flat.dtype != torch.bfloat16:  # compressed-tensors dequantizes to bfloat16, whatever the model is in
                out.copy_(out.bfloat16())

        output = multiply_many(self._permuted(flat), self.shape, fill).to(flat.dtype)
        return output if bias is None else output.add_(bias)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows, groups of a row, words of four codes of a group."""
        size = self.scheme.weights.group_size
        return self.shape[0], self.shape[1] // size, size // 4

    def _permuted(self, flat: Tensor) -> Tensor:
        """The columns in the order in which tiles have them: by the place in the word, the word, the group."""
        _, groups, words = self._sizes
        return flat.view(len(flat), groups, words, 4).permute(0, 3, 2, 1).reshape(flat.shape)

    def _float_scales(self, tensors: Tensors, rows: slice) -> Tensor:
        """Scales `[rows, groups]` as they are, float32."""
        stored = tensors["weight_scale"][rows]
        if stored.dtype == torch.uint8:
            return e8m0_to_float(stored)
        halves = torch.empty_like(stored, dtype=torch.float16)
        e4m3_to_half(stored, halves)
        return halves.float().mul_(1 / E4M3_UNIT).div_(tensors["weight_global_scale"])

    def _half_scales(self, tensors: Tensors) -> tuple[Tensor, Tensor, float]:
        """Scales `[rows, groups]` as halves, by what the output is multiplied, and the largest scaled half."""
        stored = tensors["weight_scale"]
        if stored.dtype == torch.uint8:
            halves, factor = e8m0_to_half(stored)
            return halves.mul_(_UP), factor.view(-1) / (_UP * E2M1_UNIT), 6 * _UP * E2M1_UNIT
        halves = torch.empty_like(stored, dtype=torch.float16)
        e4m3_to_half(stored, halves)
        factor = 1 / (_UP * E2M1_UNIT * E4M3_UNIT * tensors["weight_global_scale"])
        return halves.mul_(_UP), factor, 6 * 448 * _UP * E2M1_UNIT * E4M3_UNIT
