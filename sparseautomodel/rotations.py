"""Rotated checkpoints (`transform_config`): what is multiplied onto activations while the model runs.

Rotations of weights are in the stored weights already. Those of activations are modules of compressed-tensors under the
names that they have in the files, each run by a hook on the layer that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.transform import (
    TransformArgs,
    TransformBase,
    TransformConfig,
    TransformLocation,
    TransformScheme,
)
from compressed_tensors.transform.factory.hadamard import HadamardTransform
from compressed_tensors.transform.factory.matrix_multiply import RandomMatrixTransform
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from compressed_tensors.transform.utils.matrix import get_transform_size
from compressed_tensors.utils import match_named_modules
from pydantic import ValidationError
from torch import Tensor, nn

ATTENTION = ("q_attn", "k_cache")
"""Locations of queries and keys. Both are rotated alike, which the scores of attention do not see: only the rounding of
keys in a cache does."""


def rotations_of(entry: Mapping[str, Any] | None) -> TransformConfig | None:
    """The `transform_config` of a compressed-tensors entry of config.json; None where it has none.

    Raises ValueError where compressed-tensors does not accept it; its reason is quoted.
    """
    given = (entry or {}).get("transform_config")
    if not given or not given.get("config_groups"):
        return None
    try:
        return TransformConfig.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"transform_config is not one that compressed-tensors accepts: {error}") from error


def rotation_tensors(names: Iterable[str], config: TransformConfig | None) -> list[str]:
    """Of these tensors, those that hold the matrices of `config`."""
    groups = {} if config is None else config.config_groups
    modules = {f"{group}_{args.location}" for group, scheme in groups.items() for args in scheme.apply}
    return [name for name in names if name.endswith((".weight", ".perm")) and name.split(".")[-2] in modules]


def rotate(model: nn.Module, config: TransformConfig, values: Mapping[str, Tensor]) -> None:
    """Have `model`, whose weights are loaded, rotate activations as `config` says, by the matrices in `values`.

    Raises:
        ValueError: a layer lacks its matrix, a matrix has no layer, or queries and keys are not rotated alike.
    """
    held = {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()}
    used: set[str] = set()
    first: dict[int, str] = {}
    for spot in list(_spots(model, config)):
        transform = spot.transform(held, used).to(next(spot.module.parameters()).device)
        spot.module.register_module(spot.name, transform)
        # The file has a matrix that several layers share under the name of the first one.
        shared = {part: f"{spot.path}.{part}" for part, value in transform.named_parameters(recurse=False)}
        ties = {part: first.setdefault(id(getattr(transform, part)), path) for part, path in shared.items()}
        transform._tied_weights_keys = {part: path for part, path in ties.items() if path != shared[part]}
        if spot.args.location == TransformLocation.INPUT:
            spot.module.register_forward_pre_hook(_Before(spot.name), prepend=True)
        elif spot.args.location == TransformLocation.OUTPUT:
            spot.module.register_forward_hook(_After(spot.name))
    lost = [name for name in values if name not in used]
    if lost:
        raise ValueError(f"transform_config: {', '.join(lost)} belong to no layer that it names")
    _check_attention(model)


@torch.no_grad()
def fold(model: nn.Module, config: TransformConfig, values: Mapping[str, Tensor]) -> None:
    """Multiply the rotations of activations into the dense weights of `model`: it is a plain model then.

    Raises ValueError for a rotation of something else than the inputs or outputs of a Linear.
    """
    rotate(model, config, values)
    for spot in list(_spots(model, config)):
        transform: Any = spot.module.get_submodule(spot.name)
        delattr(spot.module, spot.name)
        if spot.args.location in ATTENTION:
            continue
        module = spot.module
        if not isinstance(module, nn.Linear):
            raise ValueError(f"transform_config: {spot.path} cannot be multiplied into a {type(module).__name__}")
        size = len(transform.weight)
        matrix = transform(torch.eye(size, dtype=torch.float64, device=module.weight.device))
        weight = module.weight.double()
        if spot.args.location == TransformLocation.INPUT:
            rotated = (weight.unflatten(1, (-1, size)) @ matrix.t()).flatten(1)
        else:
            rotated = (matrix.t() @ weight.unflatten(0, (-1, size))).flatten(0, 1)
            if module.bias is not None:
                module.bias.copy_((module.bias.double().view(-1, size) @ matrix).flatten())
        module.weight.copy_(rotated)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "name", None) == spot.name]:
                del hooks[key]


@dataclass(frozen=True)
class _Before:
    """Rotates what a module is given."""

    name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (module.get_submodule(self.name)(args[0]), *args[1:])


@dataclass(frozen=True)
class _After:
    """Rotates what a module gives back."""

    name: str

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return module.get_submodule(self.name)(output)


@dataclass(frozen=True)
class _Spot:
    """One place where activations are rotated."""

    module: nn.Module
    path: str
    """Full name of the module that rotates."""
    scheme: TransformScheme
    args: TransformArgs

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def transform(self, values: dict[str, nn.Parameter], used: set[str]) -> TransformBase:
        """The module that rotates; a matrix that needs no file is put among the `values`."""
        size = get_transform_size(self.module, self.args.location, self.scheme.head_dim)
        weight = self._value("weight", size, values, used)
        if weight is None and self.scheme.type == "hadamard" and not self.scheme.randomize:
            data = deterministic_hadamard_matrix(size, self.scheme.precision, torch.device("cpu"))
            weight = values[f"{self.path}.weight"] = nn.Parameter(data, requires_grad=False)
        perm = self._value("perm", size, values, used) if self.scheme.randomize else None
        if weight is None or (self.scheme.randomize and perm is None):
            raise ValueError(f"transform_config: no tensor of the checkpoint fills {self.path}, {size} x {size}")
        if self.scheme.type == "random-matrix":
            return RandomMatrixTransform(weight, self.scheme, self.args, type(self.module))
        return HadamardTransform(weight, perm, self.scheme, self.args, type(self.module))

    def _value(self, part: str, size: int, values: Mapping[str, nn.Parameter], used: set[str]) -> nn.Parameter | None:
        """Its own tensor, or what it shares with others of its group, size and (if not orthogonal) direction."""
        names = [f"{self.path}.{part}"] if f"{self.path}.{part}" in values else list(values)
        group = self.name.removesuffix(f"_{self.args.location}")
        directed = self.scheme.type == "random-matrix"
        locations = [args.location for args in self.scheme.apply if not directed or args.inverse == self.args.inverse]
        for name in names:
            *_, owner, last = name.split(".")
            if owner in {f"{group}_{one}" for one in locations} and last == part and len(values[name]) == size:
                used.add(name)
                return values[name]
        return None


def _spots(model: nn.Module, config: TransformConfig) -> Iterator[_Spot]:
    for group, scheme in config.config_groups.items():
        for args in scheme.apply:
            if args.is_online():
                for name, module in match_named_modules(model, args.targets, args.ignore):
                    yield _Spot(module, f"{name}.{group}_{args.location}", scheme, args)


def _check_attention(model: nn.Module) -> None:
    """Scores are those of queries and keys that are not rotated only if both are rotated alike."""
    for name, module in model.named_modules():
        found = {
            child.args.location: child
            for child in module.children()
            if isinstance(child, TransformBase) and child.args.location in ATTENTION
        }
        if found:
            products = [child(torch.eye(len(child.weight), dtype=child.weight.dtype)) for child in found.values()]
            whole = products[0] @ products[-1].t()
            if len(found) != 2 or not torch.allclose(whole, torch.eye(len(whole), dtype=whole.dtype), atol=1e-3):
                raise ValueError(f"transform_config: {name} must rotate queries (q_attn) and keys (k_cache) alike")
