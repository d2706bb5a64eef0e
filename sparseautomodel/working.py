"""How much memory a call needs besides the weights: estimated from its shape at first, then learned from calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SAFE = (1, 512)
"""The shape of a call for which there must be room besides all weights, or else calls are watched."""

_TILE = 1 << 22
"""Weights that a compressed layer dequantizes at a time; in all of its steps 4 bytes each."""
_GGUF_TILE = 64 << 20
"""The same of the layers of transformers that hold blocks of GGUF (`DEQUANT_CHUNK_ELEMS` there)."""
_TABLES = 1 << 20
"""Of small tables that are made once."""


class WorkingMemory:
    """The working memory of one model's calls."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if config is not None else None
        self._hidden = int(getattr(text, "hidden_size", 0) or 0)
        self._inner = int(getattr(text, "intermediate_size", 0) or 4 * self._hidden)
        self._vocabulary = int(getattr(text, "vocab_size", 0) or 0)
        dtypes = [value.dtype for value in model.parameters() if value.is_floating_point()]
        self._itemsize = max((dtype.itemsize for dtype in dtypes), default=4)
        self._scratch = _scratch(model)
        self._learned: dict[tuple[int, ...], int] = {}

    def of(self, shape: tuple[int, ...], logits: int | None = None) -> int:
        """Bytes that a call with inputs of this shape is expected to need.

        Args:
            logits: positions whose logits are computed; None: all.
        """
        if shape in self._learned:
            return self._learned[shape]
        rows = shape[0] if shape else 1
        tokens = rows * (shape[1] if len(shape) > 1 else 1)
        seen = min(tokens, rows * logits) if logits else tokens
        states = tokens * (8 * self._hidden + 3 * self._inner) * self._itemsize
        return states + seen * self._vocabulary * (self._itemsize + 4) + self._scratch

    def learn(self, shape: tuple[int, ...], nbytes: int) -> None:
        """A call with inputs of this shape has needed so much."""
        known = self._learned.get(shape, 0)
        self._learned[shape] = max(known, nbytes)
        if len(self._learned) > 256:  # shapes of prompts that do not come again
            del self._learned[next(iter(self._learned))]


def shape_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows and columns of the first tensor that a call is given."""
    values = [*args, *kwargs.values()]
    first = next((value for value in values if isinstance(value, Tensor)), None)
    return tuple(first.shape[:2]) if first is not None else ()


def _scratch(model: nn.Module) -> int:
    """What a layer that is stored compressed needs to be dequantized, a tile at a time."""
    most = {"quantization_scheme": _TILE, "ggml_type": _GGUF_TILE}
    sizes = [
        min(tile, getattr(layer, "in_features", 0) * getattr(layer, "out_features", 0))
        for layer in model.modules()
        for mark, tile in most.items()
        if getattr(layer, mark, None) is not None
    ]
    return 4 * max(sizes) + _TABLES if _TILE and sizes else 0


def out_of_memory(device: torch.device, budget: int, reason: str) -> torch.OutOfMemoryError:
    """The error that a call ends with which finds no memory, also with as few weights as possible on the device."""
    return torch.OutOfMemoryError(
        f"a call did not fit in device_budget={budget} on {device}, also with the fewest weights there. All weights "
        "are where they were, and the model can be called again: with fewer or shorter rows, or after "
        f"model.residency.set_budget(more). {reason}"
    )
