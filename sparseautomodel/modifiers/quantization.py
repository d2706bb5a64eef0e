"""Round to nearest: weights become numbers of a few bits times a scale.

w = scale * (q - zero_point), with q an integer of `num_bits` or an FP8, FP6 or FP4 number. The scale of a row, a
group of a row, a block or the matrix maps its largest weight to the largest q (`observer: minmax`), or is searched
for the least error (`observer: mse`). Arithmetic is that of compressed-tensors, in the weight's own dtype.

Weights need no data. Activations whose scales are not dynamic do: these map the extremes over all calibration tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparseautomodel.modifiers.base import Weight
from sparseautomodel.modifiers.scheme_keys import SchemeKeys


@dataclass(frozen=True, kw_only=True)
class QuantizationModifier(SchemeKeys):
    """Round weights to the nearest number that a scheme of compressed-tensors can store.

    Data is needed only where a scheme has scales of activations that are found beforehand.

    >>> QuantizationModifier(scheme="W4A16", group_size="auto", observer="mse")
    >>> QuantizationModifier(scheme={"W8A8": ["Linear"], "W4A16": ["re:.*mlp.*"]})
    >>> six = {"targets": ["Linear"], "weights": {"num_bits": 6, "strategy": "channel"}}
    >>> QuantizationModifier(config_groups={"group_0": six})

    Where several groups match a layer, an exact name comes before a `re:` pattern, and that before a class name.
    """

    @torch.no_grad()
    def apply(self, weight: Weight) -> None:
        """Set `scale`, and `zero_point` where the scheme is asymmetric; `values` stay as they are.

        For NVFP4 `global_scale` is set if it is not yet; scales are then relative to it.
        """
        self.set_scales(weight)
