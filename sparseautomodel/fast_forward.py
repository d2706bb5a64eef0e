"""The forward of calibration on a CPU: what torch computes there in more time than it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from sparseautomodel import pairs
from sparseautomodel.attention import attend


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
        kwargs, found = kwargs or {}, None
        if func is functional.linear:
            found = self._linear(*args, **kwargs)
        elif func is functional.scaled_dot_product_attention:
            found = attend(*args, **kwargs)
        return func(*args, **kwargs) if found is None else found

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """`functional.linear`, or None where torch's own is to be taken."""
        alike = all(one.dtype == torch.bfloat16 and one.is_cpu for one in (input, weight))
        recorded = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        if not alike or recorded or weight.ndim != 2 or weight.is_inference() or pairs.why_not() is not None:
            return None
        version, split = self._seen.get(weight, (None, None))
        if version != weight._version:
            split = pairs.split(weight.detach())
            self._seen[weight] = weight._version, split
        return None if split is None else pairs.multiply(input, split, bias)
