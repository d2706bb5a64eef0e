"""One file an algorithm. A new file in this folder is a new modifier; nothing else has to be edited."""

import importlib
import pkgutil

from sparseautomodel.modifiers.base import MODIFIERS, Layer, Modifier, ModifierError, Weight

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = ["MODIFIERS", "Layer", "Modifier", "ModifierError", "Weight"]
