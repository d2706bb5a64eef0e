"""The reference for `materialize`: a constructor run with values, each tensor drawn by the name that it will have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from sparseautomodel.random_values import Drawing


def eager(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The constructor run with values, each parameter drawn by its name: the names are known from a first run."""
    with _Creation({}, None) as first, torch.random.fork_rng():
        module = make()
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = {first.made[one.untyped_storage()._cdata]: name for name, one in reversed(held.items())}
    drawing = Drawing({}, seed)
    with drawing, _Creation(names, drawing):
        return make()


def tensors(module: nn.Module) -> dict[str, Tensor]:
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for path, one in module.named_modules():
        found |= {f"{path}.{key}": value for key, value in vars(one).items() if isinstance(value, Tensor)}
    return found


class _Creation(TorchDispatchMode):
    """Numbers each storage that is made, and names those that are known by their number."""

    def __init__(self, names: dict[int, str], drawing: Drawing | None) -> None:
        super().__init__()
        self.names, self.drawing, self.made = names, drawing, {}
        self.alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_flatten(result)[0]:
            if isinstance(value, Tensor) and value.numel():
                place = value.untyped_storage()._cdata
                if place not in self.made:
                    self.made[place] = len(self.made)
                    self.alive.append(value)
                    if self.drawing is not None and (name := self.names.get(self.made[place])):
                        self.drawing.name(name, value)
        return result
