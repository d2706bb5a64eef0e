"""What a kernel is: it multiplies by the weight of one layer from tensors laid out for one kind of device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from torch.nn import functional as F

from sparseautomodel.formats import compressed_tensors as storage

TILE_ELEMENTS = 1 << 22
"""Weights dequantized at a time: 8 MB of bfloat16."""

KERNELS: list[type[Kernel]] = []
"""Every kernel of this folder, the one to be tried first in front."""

Tensors = Mapping[str, Tensor]
"""Local name -> tensor: those of one layer, as they are stored or as a kernel lays them out."""


@dataclass(frozen=True)
class Kernel:
    """How one layer is run. Holds no tensor: they stay parameters of the layer and are handed to each call.

    A subclass says which schemes it `covers` and which layers of those it `refuses`, lays the stored tensors out for
    itself and back, bit for bit, and multiplies: `few` tokens by an operation that reads the laid out weight, `many` by
    dequantizing a tile of rows at a time. The default is all portable: laid out as stored, tiles for any number.
    """

    scheme: QuantizationScheme
    shape: tuple[int, int]
    """out_features, in_features."""
    dtype: torch.dtype
    """Of the weight once dequantized, and of the activations that `few` takes."""
    device: torch.device

    name: ClassVar[str]
    """What reports say, with the operation of torch where there is one."""
    rank: ClassVar[int] = 50
    """Kernels of a lower rank are tried first."""
    rounds_inputs: ClassVar[bool] = False
    """Whether it rounds activations as the scheme says by itself; else the layer has them rounded before."""
    reads_order: ClassVar[bool] = False
    """Whether it runs layers whose groups are in the order of activations (`weight_g_idx`)."""
    between: ClassVar[tuple[int, int]] = (0, 0)
    """`few` is the faster one up to the first number of tokens, `many` from the second on; between them it is measured,
    once a device."""

    def __init_subclass__(cls) -> None:
        KERNELS.append(cls)
        KERNELS.sort(key=lambda kernel: kernel.rank)

    @classmethod
    def covers(cls, scheme: QuantizationScheme) -> bool:
        """Whether layers of the scheme are of this kernel's family."""
        raise NotImplementedError

    def refuses(self) -> str | None:
        """Why it cannot run this layer on this device, for people; None where it can."""
        return None

    def lay_out(self, stored: Tensors) -> dict[str, Tensor]:
        """The tensors that the calls take, in place of the `stored` ones of the weight."""
        return dict(stored)

    def restore(self, tensors: Tensors) -> dict[str, Tensor]:
        """The stored tensors of the weight, bit for bit as `lay_out` was given them."""
        return {name: tensor for name, tensor in tensors.items() if name.startswith("weight")}

    def few(self, tensors: Tensors, flat: Tensor) -> Tensor:
        """`flat [tokens, in_features]`, at least one token and in `dtype`, times the weight: `[tokens, out_features]`.

        A new tensor, which the caller may write to.
        """
        raise NotImplementedError

    def many(self, tensors: Tensors, flat: Tensor, bias: Tensor | None) -> Tensor:
        """`flat [tokens, in_features]` of any float dtype times the weight plus `bias`, in the dtype of `flat`."""
        tiles = [
            F.linear(flat, self.dequantize(tensors, rows).to(flat.dtype), None if bias is None else bias[rows])
            for rows in self.tiles()
        ]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-1)

    def dequantize(self, tensors: Tensors, rows: slice | None = None) -> Tensor:
        """The dense weight `[out_features, in_features]` in `dtype`, or a run of `rows` from a multiple of 64 on."""
        return storage.decode(self.restore(tensors), self.scheme, rows, dtype=self.dtype)

    def tiles(self) -> Iterator[slice]:
        """The rows of the weight in runs of `TILE_ELEMENTS`, from multiples of 64 on."""
        rows, columns = self.shape
        step = max(64, TILE_ELEMENTS // max(columns, 1) // 64 * 64)
        for start in range(0, max(rows, 1), step):
            yield slice(start, min(start + step, rows))


def choose(
    scheme: QuantizationScheme,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    own_forward: bool = False,
) -> tuple[Kernel, tuple[str, ...]]:
    """The fastest kernel for a layer `[out_features, in_features]`, and why others for its scheme are passed over.

    Needs no tensor. `own_forward` is for classes whose product is not that of a Linear, which only read the weight.
    """
    ordered = scheme.weights is not None and scheme.weights.actorder == "group"
    passed_over: list[str] = []
    for kind in KERNELS:
        if kind.covers(scheme) and not (own_forward and kind.rounds_inputs):
            kernel = kind(scheme, shape, dtype, device)
            reason = kernel.refuses()
            if ordered and not kind.reads_order:
                reason = "groups in the order of activations (weight_g_idx)"
            if reason is None:
                return kernel, tuple(passed_over)
            passed_over.append(f"{kind.name}: {reason}")
    raise ValueError(f"no kernel runs the scheme of {scheme.targets}: {'; '.join(passed_over)}")
