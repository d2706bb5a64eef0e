"""Scales of a quantized cache: the largest keys and values of each layer, seen where the model hands them over."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn
from transformers import Cache

from sparseautomodel.checkpoint import LazyTensor, Reads, StoredTensor
from sparseautomodel.layers import attention_modules
from sparseautomodel.modifiers import Layer
from sparseautomodel.quantization_config import CACHE_SCALES
from sparseautomodel.scales import find_input_scales


class ObservedCache(Cache):
    """A cache that remembers the largest magnitudes of the keys and values of each layer, and nothing else.

    A forward with it runs as one without a cache: it holds no tokens, and gives back what it is given.

    >>> observed = ObservedCache()
    >>> model(**batch, **observed.argument(model))  # doctest: +SKIP
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.recording = True
        """False where a forward is run for something else, and counts in nothing."""
        self._largest: dict[int, tuple[Tensor, Tensor]] = {}

    def argument(self, model: nn.Module) -> dict[str, Any]:
        """This cache under the name that the forward of `model` has for it; empty where it takes none."""
        names = inspect.signature(model.forward).parameters
        name = next((name for name in ("cache", "past_key_values") if name in names), None)
        return {} if name is None else {name: self}

    def largest(self) -> dict[int, tuple[Tensor, Tensor]]:
        """`layer_idx` -> the largest magnitudes of its keys and of its values, each `[]` in their dtype."""
        return dict(self._largest)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.recording and key_states.numel():
            found = key_states.detach().abs().amax(), value_states.detach().abs().amax()
            known = self._largest.get(layer_idx)
            self._largest[layer_idx] = (
                found if known is None else (torch.maximum(known[0], found[0]), torch.maximum(known[1], found[1]))
            )
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return recurrent_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return indexer_key_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


def kv_scales(
    observed: ObservedCache, model: nn.Module, scheme: QuantizationArgs, layers: Sequence[Layer]
) -> dict[str, LazyTensor]:
    """The tensors that the scheme of a cache is stored as: `<attention module>.k_scale` and `.v_scale`, each `[1]`.

    As llm-compressor stores them, in the dtype of the keys: what maps the largest magnitude over all tokens to the
    largest number of the scheme. Servers read them under these names.

    Args:
        observed: after all forwards.
        layers: the layers of the model; their names give those of the attention modules in the checkpoint.

    Raises:
        ValueError: no layer was seen, keys or values are not finite, or an attention module cannot be told.
    """
    if not observed.largest():
        raise ValueError(
            f"{type(model).__name__} has put nothing in its cache on the calibration data, so there are no scales for "
            "it: leave kv_cache_scheme out"
        )
    modules = attention_modules(model, layers)
    result: dict[str, LazyTensor] = {}
    for index, found in sorted(observed.largest().items()):
        names = [name for name, (_, number) in modules.items() if number == index]
        if len(names) != 1:
            listed = ", ".join(names) or "none"
            raise ValueError(f"layer {index} of the cache must belong to one attention module, found {listed}")
        for part, value in zip(CACHE_SCALES, found, strict=True):
            largest = float(value)
            if not math.isfinite(largest):
                raise ValueError(f"the {part[0]} states of {names[0]} are not finite on the calibration data")
            scale, _, _ = find_input_scales(-largest, largest, scheme, value.dtype)
            assert scale is not None
            full = f"{names[0]}.{part}"
            result[full] = StoredTensor(full, (1,), scale.dtype, "memory", scale, Reads())
    return result
