"""Memory that is used again and again for values that do not outlive a call."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


def scratch(role: str, *shape: int, dtype: torch.dtype) -> Tensor:
    """Memory of the CPU for values that are dead before the next call with the same `role` in this thread.

    The same memory each time: asked from the system anew for each tile, it costs as much as the work done in it, since
    the system clears every page. Holds no more than a tile, so its size does not grow with the model.
    """
    count = math.prod(shape)
    if torch.compiler.is_compiling():
        return torch.empty(shape, dtype=dtype, device="cpu")
    held = _held.__dict__.get(role)
    if held is None or held.nbytes < count * dtype.itemsize:
        with torch.inference_mode(False):  # usable in both modes
            held = _held.__dict__[role] = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device="cpu")
    return held[: count * dtype.itemsize].view(dtype).view(shape)


_held = threading.local()
