"""The forward of calibration on a CPU: what torch computes there in more time than it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from sparseautomodel import attention, pairs


class FastForward(TorchFunctionMode):
    """While it is entered, two operations of the calling thread take a faster way where they can.

    `scaled_dot_product_attention` is that of attention.py. Products with weights that have two zeros in every four are
    those of pairs.py: a weight is looked at when it is first seen, and when it has been changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: Any = WeakTensorKeyDictionary()
        """Weight -> its version, and its pairs, if it is of such."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and (weight := self._pairs(*args, **kwargs)) is not None:
            return _linear(weight, *args, **kwargs)
        if func is functional.scaled_dot_product_attention and attention.fits(*args, **kwargs):
            return attention.attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _pairs(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> pairs.Pairs | None:
        alike = all(one.dtype == torch.bfloat16 and one.is_cpu for one in (input, weight))
        plain = weight.ndim == 2 and not weight.is_inference() and not input.requires_grad
        if not (alike and plain) or pairs.why_not() is not None:
            return None
        version, found = self._seen.get(weight, (None, None))
        if version != weight._version:
            found = pairs.split(weight.detach())
            self._seen[weight] = weight._version, found
        return found


def _linear(pairs_of_weight: pairs.Pairs, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return pairs.multiply(input, pairs_of_weight, bias)
