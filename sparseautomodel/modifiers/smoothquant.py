"""SmoothQuant: what is hard to round in the inputs of a layer is moved into its weights, channel by channel.

Xiao, Lin, Seznec, Wu, Demouth, Han: SmoothQuant, 2022, https://arxiv.org/abs/2211.10438, equation 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from sparseautomodel.modifiers.base import Layer, ModifierError, Weight
from sparseautomodel.modifiers.smoothing_keys import SmoothingKeys
from sparseautomodel.ranges import InputRange
from sparseautomodel.statistics import LayerError

_LEAST, _MOST = 1e-5, 1e5


@dataclass(frozen=True, kw_only=True)
class SmoothQuantModifier(SmoothingKeys):
    """Divide the inputs of layers so that no channel is much larger than the others. Nothing is rounded by this alone.

    Another modifier has to quantize the layers, for example with the scheme W8A8. As in the paper only what a norm
    makes is smoothed, unless `mappings` say otherwise.

    >>> SmoothQuantModifier(smoothing_strength=0.8)
    """

    smoothing_strength: float = 0.5
    """How much of the inputs' range goes into the weights: 0 none, 1 all of it."""

    only_norms: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.smoothing_strength) not in (int, float) or not 0 <= self.smoothing_strength <= 1:
            raise ModifierError(
                "smoothing_strength", f"it is a number from 0 to 1, got {self.smoothing_strength!r}. Write 0.5"
            )

    def statistic(self, layer: Layer) -> InputRange:
        return InputRange(layer.shape[1])

    @torch.no_grad()
    def smooth(
        self,
        weights: Sequence[Weight],
        statistic: InputRange,
        schemes: Sequence[QuantizationScheme | None],
        allowed: Callable[[Tensor], Tensor],
    ) -> Tensor | None:
        """`max|X_j|^a / max|W_j|^(1 - a)` for channel j, over all layers; 1 for channels without input or weights.

        None where none of the layers will be quantized, and where inputs or weights are not finite.
        """
        inputs = statistic.largest
        largest = torch.stack([weight.values.float().abs().amax(0) for weight in weights]).amax(0)
        inputs = inputs.to(largest.device)
        if all(scheme is None for scheme in schemes) or not bool((inputs + largest).isfinite().all()):
            return None
        factors = inputs.pow(self.smoothing_strength) / largest.pow(1 - self.smoothing_strength)
        factors = torch.where((inputs > 0) & (largest > 0), factors, 1.0)
        return allowed(factors.clamp(_LEAST, _MOST))

    def solve(self, weights: Sequence[Weight], statistic: InputRange) -> list[LayerError]:
        """Nothing: all was done before."""
        return []
