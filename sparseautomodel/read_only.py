"""A tensor that refuses to be written to: what `.weight` of a compressed layer reads as."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WRITTEN = (
    "the weight of a compressed layer is computed each time it is read: what is written to it would be lost. To change "
    "or merge weights, load the model with execution='dense'; do it before run_sparse"
)


class ReadOnly(Tensor):
    """Values that are a copy. Any operation takes them and gives plain tensors; those in place raise ValueError.

    Adapters are merged by `layer.weight.data += ...`, which would change a copy that is thrown away.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = kwargs.get("out", args[0] if _writes(func) and args else None)
        if isinstance(written, cls):
            raise ValueError(WRITTEN)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            shares = func in _SHARING and isinstance(result, Tensor)
            return result.as_subclass(cls) if shares else result


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return getattr(func, "__self__", None) is Tensor.data
    in_place = name.endswith("_") and not name.startswith("_") and name != "requires_grad_"
    return in_place or name == "__setitem__"  # += is add_


_SHARING = {
    *(Tensor.data.__get__, Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
    *(Tensor.detach, Tensor.view, Tensor.t, Tensor.transpose, Tensor.narrow, Tensor.select, Tensor.flatten),
    *(Tensor.reshape, Tensor.unsqueeze, Tensor.squeeze, Tensor.diagonal, Tensor.expand, Tensor.__getitem__),
}
"""What may give the same memory under another tensor: that is not written to either."""
