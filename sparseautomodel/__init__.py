"""sparseautomodel: Hugging Face models compressed by a recipe, loaded with one call, every weight read once."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import transformers

_HOMES = {
    "Recipe": "recipe",
    "plan": "plan",
    "oneshot": "oneshot",
    "verify": "verify",
    "SparseAutoModel": "auto",
} | {f"Sparse{name}": "auto" for name in dir(transformers) if name.startswith("AutoModelFor")}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import on first use: torch and compressed-tensors are not loaded for `import sparseautomodel`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *globals()]


class _Package(types.ModuleType):
    """Importing the file `plan.py` would make `sparseautomodel.plan` that file; the name belongs to the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
