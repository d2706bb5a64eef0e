"""AWQ: weights that large inputs meet are made larger before they are rounded, and the inputs smaller by the same.

Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan, Han: AWQ, 2023, https://arxiv.org/abs/2306.00978. In its words:

    s   factor of each input channel: inputs are divided by it, columns of the weights multiplied
    a   what is searched, from 0 to 1: s = (magnitude of the inputs)^a, over (magnitude of the weights)^(1 - a)
    Q   rounding to the nearest number of the scheme, scales from the largest weight
    H   X^T X of the inputs X [tokens, in] of all layers that read them

The paper runs the block for each a. Here the loss is that of the layers' own outputs, which H gives without a forward:
tr(D H D^T), D = Q(W s) / s - W. The magnitude of an input is the root of its mean square, where the paper has the mean.

Where GPTQ rounds afterwards it makes up for most of that loss. What is left can then be larger in a layer by itself,
and the model was better for it all the same: the squares in H are those of few very large tokens.

The paper's clipping of weights is `observer: mse` here: ranges that are shrunk for the least error, of each group for
itself, errors in a column counted by its inputs' squares. It applies where this modifier rounds too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor
from torch.nn import functional as F

from sparseautomodel.modifiers.base import Layer, ModifierError, Weight
from sparseautomodel.modifiers.scheme_keys import SchemeKeys
from sparseautomodel.modifiers.smoothing_keys import SmoothingKeys
from sparseautomodel.scales import ErrorSearch, Grid, find_global_scale, find_scales
from sparseautomodel.statistics import (
    Hessian,
    LayerError,
    output_errors,
    row_runs,
)

_SAMPLED_ROWS, _LEAST_ROWS, _PRODUCTS = 1024, 128, 2**29
"""About as many rows of all layers of a set are rounded for each a, every n-th of them: fewer where the loss of one,
which takes in_features^2 products, is dear."""

_RANGE = 1e4
"""No factor is further from the middle one than this."""


@dataclass(frozen=True, kw_only=True)
class AWQModifier(SmoothingKeys, SchemeKeys):
    """Divide the inputs of layers by factors with which their rounded weights change the outputs least.

    With a scheme it rounds the layers to nearest too. Without one it smooths alone, and another modifier quantizes.

    >>> AWQModifier(scheme="W4A16_ASYM", group_size="auto", observer="mse")
    """

    duo_scaling: bool | str = True
    """Whether factors follow the magnitude of the weights too, not of the inputs alone. `both`: half of them each."""
    n_grid: int = 20
    """How many a are tried, evenly from 0 to 1. Leaving all as it is is tried as well."""

    scheme_needed: ClassVar[bool] = False
    search: ClassVar[ErrorSearch] = ErrorSearch(maxshrink=0.5, grid=20.0, norm=2.0)

    def __post_init__(self, weight_observer: str | None) -> None:
        super().__post_init__(weight_observer)
        if self.duo_scaling not in (True, False, "both") or type(self.duo_scaling) not in (bool, str):
            raise ModifierError("duo_scaling", f"it is true, false or both, got {self.duo_scaling!r}. Write true")
        if type(self.n_grid) is not int or self.n_grid < 2:
            raise ModifierError("n_grid", f"n_grid is a number of steps from 2 up, got {self.n_grid!r}. Write 20")

    def statistic(self, layer: Layer) -> Hessian:
        return Hessian(layer.shape[1], arithmetic="int8")

    @torch.no_grad()
    def smooth(
        self,
        weights: Sequence[Weight],
        statistic: Hessian,
        schemes: Sequence[QuantizationScheme | None],
        allowed: Callable[[Tensor], Tensor],
    ) -> Tensor | None:
        """The factors of least loss; None where none is below that of no factors, or no layer will be quantized.

        All is computed in float32. Losses that are not finite never win, and inputs that are not give None.
        """
        stored = [
            (weight, scheme.weights)
            for weight, scheme in zip(weights, schemes, strict=True)
            if scheme is not None and scheme.weights is not None
        ]
        hessian = statistic.value
        if not stored or not statistic.tokens or not bool(hessian.diagonal().isfinite().all()):
            return None
        most = max(_LEAST_ROWS, min(_SAMPLED_ROWS, _PRODUCTS // len(hessian) ** 2))
        stride = max(1, sum(len(weight.values) for weight, _ in stored) // most)
        samples = [_Sample.of(weight.values, args, stride) for weight, args in stored]
        best, least = None, _loss(samples, hessian, torch.ones_like(hessian[0]))
        for factors in self._candidates(stored, hessian.diagonal()):
            factors = allowed(factors)
            loss = _loss(samples, hessian, factors)
            if math.isfinite(loss) and loss < least:
                best, least = factors, loss
        return best

    @torch.no_grad()
    def solve(self, weights: Sequence[Weight], statistic: Hessian) -> list[LayerError]:
        """Round to nearest, with scales whose errors count by the squares of the inputs; without a scheme nothing.

        Errors are those of what smoothing has left to round: `before` with scales from the largest weight.
        """
        if not self._groups:
            return []
        hessian = statistic.value
        reason = None if statistic.tokens else "no calibration token came to it"
        if not bool(hessian.diagonal().isfinite().all()):
            names = ", ".join(weight.layer.name for weight in weights)
            reason = f"the inputs of {names} are not finite, or their squares are not: give the model in bfloat16"
        self.share_global_scale(weights)
        return [self._solve(weight, hessian, reason) for weight in weights]

    def _solve(self, weight: Weight, hessian: Tensor, reason: str | None) -> LayerError:
        args, shape = self.weights_of(weight.layer), weight.values.shape
        plain = find_scales(weight.values, args, global_scale=weight.global_scale)
        self.set_scales(weight, None if reason else hessian.diagonal())
        assert weight.scale is not None
        grids = [
            Grid.of(args, shape, scale, zero_point, weight.global_scale)
            for scale, zero_point in (plain, (weight.scale, weight.zero_point))
        ]
        squares = torch.zeros(3, dtype=torch.float64)
        for ((_, rows),) in row_runs([shape[0]], shape[1]):
            values = weight.values[rows].float()
            changes = (values, *(grid[rows].nearest(values).sub_(values) for grid in grids))
            squares += torch.stack([output_errors(change, hessian).double().sum() for change in changes]).cpu()
        error = LayerError.of(weight.layer.name, squares.tolist(), reason)
        if error.fallback:
            weight.scale, weight.zero_point = plain
        weight.values = grids[0 if error.fallback else 1].nearest(weight.values.float())
        return error

    def _candidates(self, stored: Sequence[tuple[Weight, QuantizationArgs]], squares: Tensor) -> list[Tensor]:
        inputs = squares.float().sqrt()
        rows = sum(len(weight.values) for weight, _ in stored)
        size = torch.stack([_magnitude(weight.values, args) for weight, args in stored]).sum(0) / rows
        both = self.duo_scaling == "both"
        count = max(2, self.n_grid // 2) if both else self.n_grid
        found = []
        for duo in (False, True) if both else (self.duo_scaling,):
            for step in range(count):
                share = step / (count - 1)
                factors = inputs.pow(share)
                found.append(_normal(factors / size.pow(1 - share) if duo else factors))
        return found


@dataclass(frozen=True)
class _Sample:
    """Some rows of a layer, whose rounding stands for that of all."""

    args: QuantizationArgs
    values: Tensor
    """float32."""
    ends: Tensor
    """The lowest and the highest weight of each column, of all rows."""

    @classmethod
    def of(cls, values: Tensor, args: QuantizationArgs, stride: int) -> _Sample:
        height = args.block_structure[0] if args.strategy == "block" else 1
        ends = torch.stack(values.aminmax(dim=0)).float()
        blocks = torch.arange(len(values), device=values.device).split(height)
        return cls(args, values[torch.cat(blocks[::stride])].float() if height > 1 else values[::stride].float(), ends)

    def change(self, factors: Tensor, global_scale: Tensor | None) -> Tensor:
        """`Q(W s) / s - W`."""
        values = self.values * factors
        whole = self.ends * factors if self.args.strategy == "tensor" else values
        scale, zero_point = find_scales(whole, self.args, global_scale=global_scale)
        grid = Grid.of(self.args, values.shape, scale, zero_point, global_scale)
        return grid.nearest(values).div_(factors).sub_(self.values)


def _loss(samples: Sequence[_Sample], hessian: Tensor, factors: Tensor) -> float:
    """What rounding costs: tr(D H D^T)."""
    shared = [sample.ends * factors for sample in samples if sample.args.strategy == "tensor_group"]
    global_scale = find_global_scale(shared) if shared else None
    changes = [
        sample.change(factors, global_scale if sample.args.strategy == "tensor_group" else None) for sample in samples
    ]
    return float(output_errors(torch.cat(changes), hessian).double().sum())


def _magnitude(values: Tensor, args: QuantizationArgs) -> Tensor:
    """For each column the sum of its weights' magnitudes, each as a share of the largest weight of its row's group."""
    width = args.group_size if args.strategy in ("group", "tensor_group") else values.shape[1]
    total = torch.zeros(values.shape[1], device=values.device)
    for ((_, rows),) in row_runs([len(values)], values.shape[1]):
        groups = values[rows].float().abs()
        groups = F.pad(groups, (0, -groups.shape[1] % width)).unflatten(1, (-1, width))
        shares = groups / groups.amax(-1, keepdim=True).clamp(min=1e-12)
        total += shares.flatten(1).sum(0)[: len(total)]
    return total


def _normal(factors: Tensor) -> Tensor:
    """Factors around 1: smallest times largest is 1. Channels without input, or without weights, get the smallest."""
    usable = (factors > 0) & factors.isfinite()
    if not bool(usable.any()):
        return torch.ones_like(factors)
    lowest, highest = factors[usable].aminmax()
    middle = lowest.sqrt() * highest.sqrt()
    return torch.where(usable, factors, lowest).div(middle).clamp(1 / _RANGE, _RANGE)
