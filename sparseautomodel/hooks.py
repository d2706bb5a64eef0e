"""Where a running model is met: modules that begin and end, rows of embeddings, weights that are read by others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Hook:
    """A function that is called for a module. In a deep copy of the module it does nothing."""

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function

    @property
    def is_dead(self) -> bool:
        return self._function is None

    @torch.compiler.disable  # bringing weights is no computation: what is compiled is the forward between two hooks
    def __call__(self, *args: Any) -> Any:
        return self._function(*args) if self._function is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(None)

    def __reduce__(self) -> Any:
        return Hook, (None,)


def drop_dead(model: nn.Module) -> None:
    """Take the hooks of a copied model away that do nothing any more."""
    for module in model.modules():
        for kind in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in kind.items() if isinstance(hook, Hook) and hook.is_dead]:
                del kind[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
                module._forward_hooks_always_called.pop(number, None)


def around(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> list[Any]:
    """Call `before(module, args, kwargs)` before forwards of a module, and `after(module, args, output)` after them,
    also where they fail."""
    return [
        module.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True),
        module.register_forward_hook(Hook(after), always_call=True),
    ]


class WatchedParameters(dict[str, Any]):
    """The `_parameters` of a module that others may read, or that is run without being called, and so without hooks."""

    def __init__(self, values: dict[str, Any], read: Callable[[Any], Any]) -> None:
        super().__init__(values)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        return self._read(super().__getitem__(key))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self.items()), memo)

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)


class Rows:
    """An embedding whose table stays at home: for each call the rows that it asks for are copied."""

    def __init__(self, module: nn.Embedding, device: torch.device, count: Callable[[int], None]) -> None:
        self._module, self._device, self._count = module, device, count
        self._home: tuple[Any, int | None] = None, None
        self._shown: Tensor | None = None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with numbers of rows that are there."""
        name = "input" if "input" in kwargs else None
        numbers: Tensor = kwargs["input"] if name else args[0]
        home: Any = self._module._parameters.get("weight")
        if home is self._shown:  # another thread is in the embedding, which is no call of the model
            home, padding = self._home
        else:
            padding = self._module.padding_idx
        wanted, places = torch.unique(numbers, return_inverse=True)
        rows = home.detach().index_select(0, wanted.reshape(-1).to(home.device))
        self._home, self._shown = (home, padding), nn.Parameter(rows.to(self._device), requires_grad=False)
        self._module._parameters["weight"] = self._shown
        self._module.padding_idx = None  # it only matters to gradients, and is the number of a row of the table
        self._count(rows.nbytes)
        return (args, kwargs | {name: places}) if name else ((places, *args[1:]), kwargs)

    def leave(self) -> None:
        if self._shown is not None and self._module._parameters.get("weight") is self._shown:
            self._module._parameters["weight"], self._module.padding_idx = self._home
        self._shown = None
