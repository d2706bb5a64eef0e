"""Fused experts of a mixture as one layer for each expert's projection, which can be compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class CompressedExperts(nn.Module):
    """The experts of a mixture, each projection a layer under the name it has in the files, compressed or dense.

    Stands in for a fused experts module of transformers 5 (`forward(hidden_states, top_k_index, top_k_weights)`), whose
    attributes and gate it takes over. `layers` are named `0.gate_proj`; `inner` are the projections whose outputs, side
    by side, the activation takes, `outer` the one after it.
    """

    _is_hf_initialized = True

    def __init__(self, fused: Any, layers: Mapping[str, nn.Module], inner: Sequence[str], outer: str) -> None:
        super().__init__()
        self.num_experts: int
        self.act_fn: Any
        for name, value in [*vars(fused).items(), *fused.named_children()]:
            if not name.startswith("_") and name != "forward":
                setattr(self, name, value)
        gated = getattr(fused, "has_gate", True)
        self._gate: Any = getattr(type(fused), "_apply_gate", None) if gated else None
        self._inner, self._outer = tuple(inner), outer
        for name, layer in layers.items():
            expert, _, projection = name.partition(".")
            if expert not in self._modules:
                self.add_module(expert, nn.Module())
            self.get_submodule(expert).add_module(projection, layer)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        for number in torch.unique(top_k_index).tolist():
            if number >= self.num_experts:
                continue  # the index that expert parallelism gives to experts of other ranks
            token, position = torch.where(top_k_index == number)
            expert = self.get_submodule(str(number))
            states = hidden_states[token]
            inner = [expert.get_submodule(name)(states) for name in self._inner]
            states = expert.get_submodule(self._outer)(self._activate(inner))
            states = states * top_k_weights[token, position, None]
            result.index_add_(0, token, states.to(result.dtype))
        return result

    def _activate(self, inner: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._gate is not None:
            return self._gate(self, torch.cat(list(inner), dim=-1))
        return self.act_fn(inner[0]) * inner[1] if len(inner) > 1 else self.act_fn(inner[0])
