"""Dense layers with two zeros in every four weights, run by the sparse tensor cores of NVIDIA GPUs on request.

Such layers are plain Linears in a loaded model, and stay so unless `run_sparse` is called: torch calls its
semi-structured tensors a prototype, and their weights get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import to_sparse_semi_structured

from sparseautomodel.masks import satisfies

_DTYPES = (torch.float16, torch.bfloat16)


def run_sparse(model: nn.Module) -> dict[str, str]:
    """Have each Linear of `model` whose weights are 2:4 sparse multiply as such: half the weights, 9/16 of the bytes.

    The layers are replaced in place. Their `state_dict` has the dense weight as before, bit for bit; moved elsewhere
    they are dense again. The weights get no gradient any more.

    Returns:
        Name of each Linear of torch's own class -> "" where it runs sparse now, else why it does not.

    >>> model = SparseAutoModelForCausalLM.from_pretrained("sparse-folder", device_map="cuda")  # doctest: +SKIP
    >>> run_sparse(model)["model.layers.0.mlp.up_proj"]  # doctest: +SKIP
    ''
    """
    reasons = {}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            reasons[name] = _refusal(module.weight)
            if not reasons[name]:
                module.__class__ = Sparse24Linear
                module._compress()  # type: ignore[operator]
    return reasons


class Sparse24Linear(nn.Linear):
    """A Linear whose weight is a semi-structured sparse tensor of torch."""

    def _compress(self) -> None:
        sparse = to_sparse_semi_structured(self.weight.detach())
        self._parameters["weight"] = nn.Parameter(sparse, requires_grad=False)

    def _densify(self) -> None:
        self._parameters["weight"] = nn.Parameter(self.weight.detach().to_dense(), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._densify()
        super()._apply(fn, recurse)
        if _refusal(self.weight):
            self.__class__ = nn.Linear  # type: ignore[assignment]
        else:
            self._compress()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.detach().to_dense()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._densify()
        super()._load_from_state_dict(*args, **kwargs)
        if _refusal(self.weight):
            self.__class__ = nn.Linear  # type: ignore[assignment]
        else:
            self._compress()


def _refusal(weight: Tensor) -> str:
    """Why a dense weight cannot be multiplied as a 2:4 sparse one here; empty where it can."""
    if reason := _refusal_of_device(weight.device):
        return reason
    if weight.dtype not in _DTYPES:
        return f"needs float16 or bfloat16, the weight is {weight.dtype}"
    rows, columns = weight.shape
    if rows % 32 or columns % 64:
        return f"needs multiples of 32 x 64, the weight has {rows} x {columns}"
    if not satisfies(weight, 2, 4):
        return "has more than two weights in four that are not zero"
    return ""


def _refusal_of_device(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, the weight is on {'ROCm' if device.type == 'cuda' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    return ""
