"""Run layers of 8-bit integer weights and activations as a product of integers, which is exact, then scaled.

Activations are rounded here, to the very codes of compressed-tensors, but never dequantized: sums are those of integers
up to the scales, which are applied in float32.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from sparseautomodel import registers
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.formats.base import as_dtype
from sparseautomodel.kernels.base import TILE_ELEMENTS, Kernel, Tensors
from sparseautomodel.scratch import scratch

TOKENS = 512
"""Multiplied at once: what a call holds besides its output, sums and rounded inputs, is for so many."""

ONE_BY_ONE = 4
"""Up to so many tokens are multiplied one by one on a CPU, where torch._int_mm is good at one and at many."""

SUMS = 2**19
"""At once on a CPU: 2 MB, which stays in the cache with what is made of it."""

CUDA_TOKENS = 32
"""torch._int_mm takes no fewer than 17 on CUDA: fewer are padded to so many."""

CUDA_MULTIPLE = 8
"""Of widths, in and out, that torch._int_mm takes on CUDA."""

MOST_COLUMNS = 2**15
"""in_features up to which no sum leaves 32 bits: 255 * 255 * 2**15 < 2**31."""


class Int8(Kernel):
    name: ClassVar[str] = "int8 x int8: torch._int_mm"
    rank: ClassVar[int] = 20
    rounds_inputs: ClassVar[bool] = True

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        inputs = scheme.input_activations
        return _is_int8(scheme.weights) and inputs is not None and inputs.type == "int" and inputs.num_bits <= 8

    def refuses(self) -> str | None:
        weights, inputs = self.scheme.weights, self.scheme.input_activations
        rows, columns = self.shape
        if weights.strategy not in ("channel", "tensor"):
            return f"sums of integers need one weight scale a row, and this one has {weights.strategy} scales"
        if inputs.strategy not in ("token", "tensor") or inputs.dynamic not in (True, False) or inputs.scale_dtype:
            return f"it rounds inputs by the token or the tensor, and the scheme has {inputs.strategy} scales"
        if columns > MOST_COLUMNS:
            return f"sums over {columns} columns may leave 32 bits: at most {MOST_COLUMNS}"
        if columns % 4 and storage.format_of(self.scheme) == "pack-quantized":
            return f"rows of {columns} bytes end inside a 32-bit word"
        if self.device.type == "cpu":
            return None
        if self.device.type != "cuda" or torch.version.hip:
            return f"torch has no integer product for {'ROCm' if torch.version.hip else self.device.type}"
        if rows % CUDA_MULTIPLE or columns % CUDA_MULTIPLE:
            return f"torch._int_mm takes multiples of {CUDA_MULTIPLE} on CUDA, not {columns} x {rows}"
        return None

    def lay_out(self, stored: Tensors) -> dict[str, Tensor]:
        """The codes as int8 `weight`, and what zero points need: those of the weight, its sums over each row."""
        tensors = dict(stored)
        if "weight_packed" in tensors:
            tensors["weight"] = _signed(tensors.pop("weight_packed"))
        weight = tensors["weight"]
        if "weight_zero_point" in tensors:
            tensors["weight_zeros"] = _zeros(tensors["weight_zero_point"], len(weight))
        if not self.scheme.input_activations.symmetric:
            sums = self._products(torch.ones_like(weight[:1]), weight)[0].clone()
            if "weight_zeros" in tensors:
                sums -= weight.shape[1] * tensors["weight_zeros"].int()
            tensors["weight_sums"] = sums
        return tensors

    def restore(self, tensors: Tensors) -> dict[str, Tensor]:
        stored = super().restore(tensors)
        if "weight_shape" in stored:  # pack-quantized: four codes with an offset of 128 a word
            stored["weight_packed"] = stored.pop("weight").view(torch.uint8).bitwise_xor(128).view(torch.int32)
        return {name: tensor for name, tensor in stored.items() if name not in ("weight_zeros", "weight_sums")}

    def many(self, tensors: Tensors, flat: Tensor, bias: Tensor | None) -> Tensor:
        args = self.scheme.input_activations
        if self._is_plain and registers.multiplies_int8(flat, tensors["weight_scale"]):
            given = None if args.dynamic else tensors["input_scale"]
            own_bias = None if bias is None else bias.to(flat.dtype)
            return registers.multiply_int8(
                flat, tensors["weight"], tensors["weight_scale"], own_bias, args.num_bits, given
            )
        scale, zero_point = _ranges(flat, args) if args.dynamic else _calibrated(tensors, args)
        by_row = tensors["weight_scale"].view(-1).float()
        if len(flat) <= TOKENS:
            return self._run(tensors, flat, scale, zero_point, by_row, bias)
        output = flat.new_empty(len(flat), self.shape[0])
        for first in range(0, len(flat), TOKENS):
            some = slice(first, first + TOKENS)
            own_scale = scale[some] if len(scale) > 1 else scale
            own_zero = zero_point[some] if zero_point is not None and len(zero_point) > 1 else zero_point
            output[some] = self._run(tensors, flat[some], own_scale, own_zero, by_row, bias)
        return output

    def dequantize(self, tensors: Tensors, rows: slice | None = None) -> Tensor:
        unpacked = self.scheme.model_copy(update={"format": "naive-quantized"})
        return storage.decode(tensors, unpacked, rows, dtype=self.dtype)

    @functools.cached_property
    def _is_plain(self) -> bool:
        """Whether there are no zero points, and inputs have one scale for all or are rounded a token at a time."""
        inputs = self.scheme.input_activations
        symmetric = self.scheme.weights.symmetric and inputs.symmetric
        return symmetric and (inputs.dynamic is False or inputs.strategy == "token")

    def _run(
        self,
        tensors: Tensors,
        flat: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        by_row: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        tokens, rows = len(flat), self.shape[0]
        codes = _codes(flat, scale, zero_point, self.scheme.input_activations)
        step = _step(tokens, self.shape) if flat.device.type == "cpu" else max(rows, 1)
        if step >= rows:
            scaled = torch.mul(self._sums(tensors, codes, zero_point, slice(None)), scale.float()).mul_(by_row)
            return (scaled if bias is None else scaled.add_(bias)).to(flat.dtype)
        output, by_row = flat.new_empty(tokens, rows), by_row.expand(rows)
        for start in range(0, rows, step):
            run = slice(start, min(start + step, rows))
            sums = self._sums(tensors, codes, zero_point, run)
            scaled = scratch("scaled", *sums.shape, dtype=torch.float32).copy_(sums).mul_(scale.float())
            scaled.mul_(by_row[run])
            output[:, run] = scaled if bias is None else scaled.add_(bias[run])
        return output

    def _sums(self, tensors: Tensors, codes: Tensor, zero_point: Tensor | None, rows: slice) -> Tensor:
        """The product of inputs and a run of rows of the weight, less their zero points, in units of both scales."""
        sums = self._products(codes, tensors["weight"][rows])
        if "weight_zeros" in tensors:
            zeros = tensors["weight_zeros"].expand(self.shape[0])[rows].int()
            sums.addcmul_(codes.sum(1, keepdim=True, dtype=torch.int32), zeros, value=-1)
        if zero_point is not None:
            sums.addcmul_(zero_point.int(), tensors["weight_sums"][rows], value=-1)
        return sums

    def _products(self, codes: Tensor, weight: Tensor) -> Tensor:
        """`codes [tokens, in_features]` times the weight's, both int8: int32 `[tokens, out_features]`."""
        tokens = len(codes)
        if tokens == 0:
            return codes.new_empty(0, len(weight), dtype=torch.int32)
        if codes.device.type == "cuda":
            short = max(0, CUDA_TOKENS - tokens)
            padded = torch.nn.functional.pad(codes, (0, 0, 0, short)) if short else codes
            return torch._int_mm(padded, weight.t())[:tokens]
        sums = scratch("sums", tokens, len(weight), dtype=torch.int32)
        if tokens == 1 or tokens > ONE_BY_ONE:
            return torch._int_mm(codes, weight.t(), out=sums)
        for token in range(tokens):
            torch._int_mm(codes[token : token + 1], weight.t(), out=sums[token : token + 1])
        return sums


def _step(tokens: int, shape: tuple[int, int]) -> int:
    """Rows at once on a CPU: their sums, or for few tokens their weights, are read again while in the cache."""
    rows, columns = shape
    if tokens <= 1:
        return max(rows, 1)
    return max(64, (TILE_ELEMENTS // max(columns, 1) if tokens <= ONE_BY_ONE else SUMS // tokens) // 64 * 64)


def _is_int8(args: QuantizationArgs | None) -> bool:
    return args is not None and args.type == "int" and args.num_bits == 8


def _signed(packed: Tensor) -> Tensor:
    """Words of four codes each, the numbers plus 128, as the int8 numbers."""
    return as_dtype(packed, torch.uint8).bitwise_xor(128).view(torch.int8)


def _zeros(stored: Tensor, rows: int) -> Tensor:
    """Zero points as int8 `[rows]` or `[1]`; they are packed along rows where they are int32."""
    if stored.dtype != torch.int32:
        return stored.view(-1)
    return _signed(stored.t())[0, :rows].contiguous()


def _ranges(flat: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point, `[tokens, 1]` or `[1]`, as compressed-tensors finds them for these inputs.

    Its way for symmetric ones is three times as many operations, which cost as much as a token's product.
    """
    over: Any = {"dim": -1, "keepdim": True} if args.strategy == "token" else {}
    if flat.numel() == 0:
        return flat.new_ones(len(flat), 1), None if args.symmetric else flat.new_zeros(len(flat), 1)
    if not args.symmetric:
        lowest, highest = flat.amin(**over), flat.amax(**over)
        return calculate_qparams(lowest, highest, args)
    largest = torch.abs(flat, out=_room("numbers", flat, flat.dtype)).amax(**over)
    # A tensor, because CUDA multiplies by the reciprocal of a number.
    scale = largest / largest.new_full((), (2**args.num_bits - 1) / 2)
    scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)
    return scale if scale.ndim else scale.view(1), None


def _calibrated(tensors: Tensors, args: QuantizationArgs) -> tuple[Tensor, Tensor | None]:
    return tensors["input_scale"], None if args.symmetric else tensors["input_zero_point"]


def _codes(flat: Tensor, scale: Tensor, zero_point: Tensor | None, args: QuantizationArgs) -> Tensor:
    """`flat` as the int8 numbers that compressed-tensors rounds it to."""
    numbers = torch.div(flat, scale, out=_room("numbers", flat, flat.dtype))
    if zero_point is not None:
        numbers += zero_point.to(flat.dtype)
    half = 2 ** (args.num_bits - 1)
    return _room("codes", flat, torch.int8).copy_(numbers.round_().clamp_(-half, half - 1))


def _room(role: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory of the shape and on the device of `like` for what is dead after the call."""
    if like.device.type == "cpu":
        return scratch(role, *like.shape, dtype=dtype)
    return torch.empty(like.shape, dtype=dtype, device=like.device)
