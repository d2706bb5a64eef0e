"""Weights of 4 or 8 bits, integers or small floats, on CPUs with AVX512: products that expand them in registers.

Laid out as they are stored, for any number of tokens. The functions are compiled by the machine's own compiler.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from sparseautomodel import registers
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.kernels.base import Kernel, Tensors


class Registers(Kernel):
    name: ClassVar[str] = "registers: expanded in the product, AVX512"
    rank: ClassVar[int] = 25

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        return scheme.weights is not None and _kind(scheme) is not None

    def refuses(self) -> str | None:
        if self.device.type != "cpu":
            return f"made for CPUs, not for {self.device.type}"
        if self.dtype != torch.bfloat16:
            return f"computes in bfloat16, not in {self.dtype}"
        if self._layout is None:
            return "groups are as wide as a power of two, from 16 columns on for 4 bits and from 32 for 8"
        return registers.why_not()

    def lay_out(self, stored: Tensors) -> dict[str, Tensor]:
        return {name: tensor.contiguous() for name, tensor in stored.items()}

    def many(self, tensors: Tensors, flat: Tensor, bias: Tensor | None) -> Tensor:
        if flat.dtype != torch.bfloat16:
            return super().many(tensors, flat, bias)
        output = registers.multiply(
            flat,
            tensors["weight_packed"] if "weight_packed" in tensors else tensors["weight"],
            tensors["weight_scale"],
            tensors.get("weight_zero_point"),
            tensors.get("weight_global_scale"),
            *self._layout,
        )
        return output if bias is None else output.add_(bias)

    @functools.cached_property
    def _layout(self) -> Any:
        """Kind of the codes, shape, and the rows and columns that a scale stands for, as `registers.multiply` has them.

        None for groups that it cannot have.
        """
        args, kind = self.scheme.weights, str(_kind(self.scheme))
        height, width = {
            "tensor": (None, None),
            "channel": (1, None),
            "block": args.block_structure,
        }.get(args.strategy, (1, args.group_size))
        shifts = registers.row_shift(height), registers.column_shift(width, kind)
        return None if None in shifts else (kind, self.shape, shifts)


def _kind(scheme: QuantizationScheme) -> str | None:
    """What `registers.multiply` calls codes that are stored so; None where it does not know them."""
    args, name = scheme.weights, storage.format_of(scheme)
    if args.strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
        return None
    if name == "pack-quantized":
        return {4: "int4", 8: "uint8"}.get(args.num_bits)
    if name in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return "fp4"
    if args.type == "float":
        return "fp8" if args.num_bits == 8 and args.pytorch_dtype() == torch.float8_e4m3fn else None
    return "int8" if args.pytorch_dtype() == torch.int8 else None
