"""Weights of 4 bits on a CPU with AVX512: torch's int4 product for a few tokens, expanded tiles for many.

torch's operation takes the codes in blocks of 64 rows: 32 bytes a column, the rows 0..31 of the block in the low halves
and 32..63 in the high ones; and for each group of columns a scale and a zero, `weight = (code - 8) * scale + zero`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from torch.nn import functional as F

from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.formats.base import as_dtype
from sparseautomodel.kernels.base import Kernel, Tensors
from sparseautomodel.scratch import scratch

BLOCK = 64
"""Rows of the weight that lie together."""

_GROUPS = (256, 128, 64, 32)
"""Widths of a group that the operation knows; wider ones are cut into these."""

_CHUNK = 16
"""Blocks laid out at once, so that they stay in the cache."""

_KEPT = ("weight_scale", "weight_zero_point", "weight_shape")
"""Stored tensors that are not part of the layout, where there are any."""

_TILE = 1 << 21
"""Weights expanded at once: 4 MB of bfloat16."""

_NARROWEST = 8
"""Blocks at once whatever their width: products of fewer columns are slower."""


class Int4(Kernel):
    name: ClassVar[str] = "int4: torch._weight_int4pack_mm_for_cpu"
    rank: ClassVar[int] = 28
    between: ClassVar[tuple[int, int]] = (32, 128)

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        weights = scheme.weights
        known = weights.num_bits == 4 and weights.type == "int" and weights.strategy in ("group", "channel", "tensor")
        return known and storage.format_of(scheme) == "pack-quantized"

    def refuses(self) -> str | None:
        if self.device.type != "cpu":
            return f"not on {self.device.type}"
        if not _is_interleaved():
            return "this processor (no AVX512) has another layout"
        if self.scheme.weights.actorder == "group":
            return "columns in the order of activations (act_order with g_idx)"
        if not self._group:
            width = self.scheme.weights.group_size or self.shape[1]
            return f"groups of {width} columns are no multiple of {_GROUPS[-1]}"
        if self.shape[0] < BLOCK:
            return f"out_features {self.shape[0]} are fewer than {BLOCK}"
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"no {self.dtype} in the operation"
        return None

    def lay_out(self, stored: Tensors) -> dict[str, Tensor]:
        rows, columns = self.shape
        blocks = -(-rows // BLOCK)
        packed = as_dtype(stored["weight_packed"], torch.uint8)
        if rows % BLOCK:
            packed = F.pad(packed, (0, 0, 0, blocks * BLOCK - rows), value=0x88)  # the code of 0
        laid_out = torch.empty(blocks, columns // 2, 2, BLOCK // 2, dtype=torch.uint8)
        for start in range(0, blocks, _CHUNK):
            part = packed[start * BLOCK : (start + _CHUNK) * BLOCK].view(-1, 2, BLOCK // 2, columns // 2)
            low, high = part[:, 0].transpose(1, 2), part[:, 1].transpose(1, 2)
            place = laid_out[start : start + _CHUNK]
            place[:, :, 0] = (low & 0x0F).bitwise_or_(high << 4)
            place[:, :, 1] = (low >> 4).bitwise_or_(high & 0xF0)
        scales = torch.zeros(columns // self._group, blocks * BLOCK, 2, dtype=self.dtype)
        scale = self._spread(stored["weight_scale"])
        scales[:, :rows, 0] = scale
        if "weight_zero_point" in stored:
            zero_point = self._zero_points(stored, slice(0, rows))
            scales[:, :rows, 1] = (zero_point * -scale.float()).to(self.dtype)
        moved = ("weight_packed", "weight_scale") if scale.dtype == self.dtype else ("weight_packed",)
        tensors = {name: tensor for name, tensor in stored.items() if name not in moved}
        return tensors | {"weight_int4": laid_out.view(-1, columns // 2), "weight_scales_and_zeros": scales}

    def restore(self, tensors: Tensors) -> dict[str, Tensor]:
        rows, columns = self.shape
        laid_out = tensors["weight_int4"].view(-1, columns // 2, 2, BLOCK // 2)
        packed = torch.empty(len(laid_out) * BLOCK, columns // 2, dtype=torch.uint8)
        for start in range(0, len(laid_out), _CHUNK):
            even, odd = laid_out[start : start + _CHUNK].unbind(2)
            place = packed[start * BLOCK : (start + _CHUNK) * BLOCK].view(-1, 2, BLOCK // 2, columns // 2)
            place[:, 0] = (even & 0x0F).bitwise_or_(odd << 4).transpose(1, 2)
            place[:, 1] = (even >> 4).bitwise_or_(odd & 0xF0).transpose(1, 2)
        stored = {name: tensors[name] for name in _KEPT if name in tensors}
        stored["weight_packed"] = packed[:rows].view(torch.int32)
        if "weight_scale" not in stored:
            stored["weight_scale"] = self._gathered(tensors["weight_scales_and_zeros"][:, :rows, 0])
        return stored

    def few(self, tensors: Tensors, flat: Tensor) -> Tensor:
        scales = tensors["weight_scales_and_zeros"]
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(
            flat.contiguous(), tensors["weight_int4"], self._group, scales
        )
        return product if scales.shape[1] == self.shape[0] else product[:, : self.shape[0]]

    def many(self, tensors: Tensors, flat: Tensor, bias: Tensor | None) -> Tensor:
        tokens, rows = len(flat), self.shape[0]
        output = flat.new_empty(tokens, len(tensors["weight_int4"]))
        places = output.view(tokens, len(tensors["weight_int4"]) // BLOCK, 2, BLOCK // 2)
        for blocks in self._runs(tensors):
            for half, expanded in enumerate(self._expanded(tensors, blocks)):
                places[:, blocks, half] = (flat @ expanded.to(flat.dtype)).unflatten(1, (-1, BLOCK // 2))
        output = output[:, :rows]
        return output if bias is None else output.add_(bias)

    def dequantize(self, tensors: Tensors, rows: slice | None = None) -> Tensor:
        begin, end, _ = (rows or slice(None)).indices(self.shape[0])
        dense = torch.empty(-(-(end - begin) // BLOCK) * BLOCK, self.shape[1], dtype=self.dtype)
        first = begin // BLOCK
        for blocks in self._runs(tensors, first, first + len(dense) // BLOCK):
            expanded = self._expanded(tensors, blocks).view(2, self.shape[1], -1, BLOCK // 2)
            place = dense[(blocks.start - first) * BLOCK : (blocks.stop - first) * BLOCK]
            place.view(-1, 2, BLOCK // 2, self.shape[1]).copy_(expanded.permute(2, 0, 3, 1))
        return dense[: end - begin]

    @functools.cached_property
    def _group(self) -> int:
        """Columns to a scale in the operation, 0 where it cannot have them."""
        width = self.scheme.weights.group_size if self.scheme.weights.strategy == "group" else self.shape[1]
        return next((size for size in _GROUPS if width and width % size == 0), 0)

    def _runs(self, tensors: Tensors, first: int = 0, last: int | None = None) -> Iterator[slice]:
        """Blocks `first` to `last` in runs of about `_TILE` weights."""
        last = len(tensors["weight_int4"]) // BLOCK if last is None else last
        step = max(_NARROWEST, _TILE // (BLOCK * self.shape[1]))
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))

    def _expanded(self, tensors: Tensors, blocks: slice) -> Tensor:
        """The weights of a run of blocks `[2, in_features, rows / 2]`: first their lower halves side by side."""
        columns = self.shape[1]
        blockwise = tensors["weight_int4"].view(-1, columns, BLOCK // 2)[blocks]
        # One wide product a half, not many narrow ones.
        codes = scratch("codes", columns, len(blockwise), BLOCK // 2, dtype=torch.uint8).copy_(
            blockwise.transpose(0, 1)
        )
        halves = scratch("halves", 2, *codes.shape, dtype=torch.uint8)
        torch.bitwise_and(codes, 15, out=halves[0])
        torch.bitwise_right_shift(codes, 4, out=halves[1])
        numbers = scratch("numbers", *halves.shape, dtype=self.dtype).copy_(halves.view(torch.int8).sub_(8))
        numbers = numbers.view(2, -1, self._group, len(blockwise) * BLOCK // 2)
        if "weight_zero_point" in tensors:
            rows = slice(blocks.start * BLOCK, min(blocks.stop * BLOCK, self.shape[0]))
            zero_point = self._zero_points(tensors, rows).to(self.dtype)
            numbers -= _in_halves(F.pad(zero_point, (0, len(blockwise) * BLOCK - (rows.stop - rows.start))))
        scale = tensors["weight_scales_and_zeros"][:, blocks.start * BLOCK : blocks.stop * BLOCK, 0]
        return numbers.mul_(_in_halves(scale)).view(2, columns, -1)

    def _zero_points(self, tensors: Tensors, rows: slice) -> Tensor:
        args = self.scheme.weights
        if args.strategy == "tensor":
            return tensors["weight_zero_point"].view(1, 1)
        return self._spread(storage.zero_points(tensors, args, rows))

    def _spread(self, grid: Tensor) -> Tensor:
        """Scales or zero points as they are stored, for each group of the operation: `[groups, rows]`."""
        args = self.scheme.weights
        if args.strategy == "group":
            return grid.t().repeat_interleave(args.group_size // self._group, 0)
        return grid.reshape(-1, 1).t().expand(self.shape[1] // self._group, -1)

    def _gathered(self, spread: Tensor) -> Tensor:
        """What `_spread` was given."""
        args = self.scheme.weights
        if args.strategy == "group":
            return spread[:: args.group_size // self._group].t().contiguous()
        return spread[0, :1].clone() if args.strategy == "tensor" else spread[0].unsqueeze(1).contiguous()


def _in_halves(rows: Tensor) -> Tensor:
    """`[groups, rows]` as the weights are expanded: `[2, groups, 1, rows / 2]`."""
    return rows.view(len(rows), -1, 2, BLOCK // 2).permute(2, 0, 1, 3).reshape(2, len(rows), 1, -1)


@functools.cache
def _is_interleaved() -> bool:
    """Whether torch's operation has the layout of this file on this processor: tried, since it depends on it."""
    codes = torch.randint(0, 16, (2 * BLOCK, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    low, high = codes.view(2, 2, BLOCK // 2, 64).unbind(1)
    mine = (low | high << 4).transpose(1, 2).to(torch.uint8)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return theirs.dtype == torch.uint8 and torch.equal(theirs.view(-1), mine.reshape(-1))
