"""sparseautomodel: Hugging Face models compressed by a recipe, loaded with one call, every weight read once."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_HOMES = {
    "ModelPool": "pool",
    "Recipe": "recipe",
    "load_blocks": "blocks",
    "plan": "plan",
    "oneshot": "oneshot",
    "verify": "verify",
    "init_module": "initialize",
    "materialize": "initialize",
}
"""Public name -> the file that has it. All `SparseAutoModel*`, one for each `AutoModel*`, are in `auto`."""


def __getattr__(name: str) -> Any:
    """Import on first use: neither transformers nor torch is loaded for `import sparseautomodel`."""
    if name == "__all__":
        return _names()
    home = "auto" if name.startswith("SparseAutoModel") else _HOMES.get(name)
    found = vars(importlib.import_module(f"{__name__}.{home}")) if home else {}
    if name not in found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found[name]


def __dir__() -> list[str]:
    return [*_names(), *globals()]


def _names() -> list[str]:
    import transformers

    return sorted(
        [
            *_HOMES,
            "SparseAutoModel",
            *(f"Sparse{name}" for name in dir(transformers) if name.startswith("AutoModelFor")),
        ]
    )


class _Package(types.ModuleType):
    """Importing the file `plan.py` would make `sparseautomodel.plan` that file; the name belongs to the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
