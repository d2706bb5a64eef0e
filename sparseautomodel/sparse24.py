"""Dense layers with two zeros in every four weights, run as such on request: by pairs.py on CPUs, and by the sparse
tensor cores of NVIDIA GPUs.

Such layers are plain Linears in a loaded model, and stay so unless `run_sparse` is called: their weights get no
gradient any more, and torch calls its semi-structured tensors a prototype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.sparse import to_sparse_semi_structured

from sparseautomodel import pairs
from sparseautomodel.compiler import is_followed
from sparseautomodel.masks import satisfies
from sparseautomodel.read_only import ReadOnly


def run_sparse(model: nn.Module) -> dict[str, str]:
    """Have each Linear of `model` whose weights are 2:4 sparse multiply as such: half the weights, 9/16 of the bytes.

    The layers are replaced in place. Their `weight` and `state_dict` are the dense weight as before, value for value;
    moved elsewhere they are dense again, where they cannot run sparse. The weights get no gradient any more; inputs and
    biases do.

    Returns:
        Name of each Linear of torch's own class -> "" where it runs sparse now, else why it does not.

    >>> model = SparseAutoModelForCausalLM.from_pretrained("sparse-folder", dtype=torch.bfloat16)  # doctest: +SKIP
    >>> run_sparse(model)["model.layers.0.mlp.up_proj"]  # doctest: +SKIP
    ''
    """
    return {name: _settle(module) for name, module in list(model.named_modules()) if type(module) is nn.Linear}


class Sparse24Linear(nn.Linear):
    """A Linear of which half of the weight is stored, and computed."""

    def _compress(self) -> None:
        """From the dense weight."""
        raise NotImplementedError

    def _dense(self) -> Tensor:
        """The dense weight."""
        raise NotImplementedError

    def _densify(self) -> None:
        """Be a plain Linear."""
        weight = self._dense()
        self.__class__ = nn.Linear  # type: ignore[assignment]
        bias = self._parameters.pop("bias")
        self._parameters.pop("weight", None)
        self._parameters |= {"weight": nn.Parameter(weight, requires_grad=False), "bias": bias}  # in a Linear's order

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._densify()
        nn.Linear._apply(self, fn, recurse)
        _settle(self)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = weight = self._dense()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = weight

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._densify()
        nn.Linear._load_from_state_dict(self, *args, **kwargs)
        _settle(self)


class TensorCoreLinear(Sparse24Linear):
    """Its weight is a semi-structured sparse tensor of torch, on an NVIDIA GPU."""

    def _compress(self) -> None:
        sparse = to_sparse_semi_structured(self.weight.detach())
        self._parameters["weight"] = nn.Parameter(sparse, requires_grad=False)

    def _dense(self) -> Tensor:
        return self.weight.detach().to_dense()


class PairsLinear(Sparse24Linear):
    """Its weight is that of pairs.py, on a CPU; inputs that are not bfloat16 are multiplied by the dense one."""

    numbers: Tensor
    places: Tensor

    def _compress(self) -> None:
        split = pairs.split(self._parameters.pop("weight").detach())  # type: ignore[union-attr]
        assert split is not None
        self.register_buffer("numbers", split.numbers, persistent=False)
        self.register_buffer("places", split.places, persistent=False)

    def _densify(self) -> None:
        super()._densify()
        del self._buffers["numbers"], self._buffers["places"]

    @property
    def _pairs(self) -> pairs.Pairs:
        return pairs.Pairs(self.numbers, self.places, (self.out_features, self.in_features))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, made anew each time: it cannot be written to."""
        weight = self._dense()
        return weight if is_followed(weight) else weight.as_subclass(ReadOnly)

    def _dense(self) -> Tensor:
        return self._pairs.dense()

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.bfloat16:
            return functional.linear(input, self._dense(), self.bias)
        if torch.is_grad_enabled() and (input.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            product: Tensor = _Product.apply(input, self.bias, self)
            return product
        return pairs.multiply(input, self._pairs, self.bias)


class _Product(torch.autograd.Function):
    """The product of a `PairsLinear`, which gradients pass."""

    @staticmethod
    def forward(context: Any, input: Tensor, bias: Tensor | None, layer: PairsLinear) -> Tensor:
        context.layer = layer
        return pairs.multiply(input, layer._pairs, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_input, of_bias, _ = context.needs_input_grad
        return (
            gradient @ context.layer._dense() if of_input else None,
            gradient.flatten(0, -2).sum(0) if of_bias else None,
            None,
        )


def _settle(layer: nn.Linear) -> str:
    """Have a plain Linear run sparse if it can; else the reason."""
    kind = _kind(layer.weight.device)
    reason = kind if isinstance(kind, str) else _refusal(layer.weight, kind)
    if not reason:
        layer.__class__ = kind  # type: ignore[assignment]
        layer._compress()  # type: ignore[operator]
    return reason


def _refusal(weight: Tensor, kind: type[Sparse24Linear]) -> str:
    """Why a dense weight cannot be multiplied as a 2:4 sparse one by layers of this kind; empty where it can."""
    rows, columns = weight.shape
    dtypes = (torch.bfloat16,) if kind is PairsLinear else (torch.float16, torch.bfloat16)
    if weight.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"needs {names}, the weight is {weight.dtype}"
    if kind is TensorCoreLinear and (rows % 32 or columns % 64):
        return f"needs multiples of 32 x 64, the weight has {rows} x {columns}"
    if not satisfies(functional.pad(weight.detach(), (0, -columns % 4)) if columns % 4 else weight.detach(), 2, 4):
        return "has more than two weights in four that are not zero"
    return ""


def _kind(device: torch.device) -> type[Sparse24Linear] | str:
    """The class of layers that run sparse on a device, or why none does."""
    if device.type == "cpu":
        reason = pairs.why_not()
        return PairsLinear if reason is None else f"has no such products on this CPU: {reason}"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs a CPU or an NVIDIA GPU, the weight is on {'ROCm' if device.type == 'cuda' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    return TensorCoreLinear
