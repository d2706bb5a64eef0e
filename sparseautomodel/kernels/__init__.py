"""One file a scheme family: kernels that run a layer from its compressed tensors. A new file here is a new kernel."""

import importlib
import pkgutil

from sparseautomodel.kernels.base import KERNELS, Kernel, Tensors

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = ["KERNELS", "Kernel", "Tensors"]
