"""The tensors of a module that wait for values: what they are, where they came from, and their memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparseautomodel.construction import ATTRIBUTE
from sparseautomodel.numbers import poison
from sparseautomodel.writes import local


@dataclass
class EmptyTensor:
    """A tensor without values: the object, its names, and what it was built as."""

    tensor: Tensor
    owners: list[tuple[nn.Module, str]]
    """Modules that have it, and what they call it; where it is tied, the first is the one that initializes it."""
    is_parameter: bool
    meta: Tensor
    """The part of it that is here."""
    origin: Tensor
    """What the constructor made: the whole."""
    dtype: torch.dtype
    names: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def owner(self) -> nn.Module:
        return self.owners[0][0]


def empty_tensors(module: nn.Module) -> list[EmptyTensor]:
    """Every tensor of a module on the meta device once, with all its names, parameters first."""
    found: dict[int, EmptyTensor] = {}
    for kind in ("_parameters", "_buffers", "__dict__"):
        for path, one in module.named_modules(remove_duplicate=False):
            for key, value in getattr(one, kind).items():
                if isinstance(value, Tensor) and value.is_meta:
                    made = origin(one, key, value)
                    entry = EmptyTensor(value, [], kind == "_parameters", local(value).detach(), made, value.dtype)
                    entry = found.setdefault(id(value), entry)
                    entry.names.append(f"{path}.{key}".removeprefix("."))
                    if all((one, key) != place for place in entry.owners):
                        entry.owners.append((one, key))
    return list(found.values())


def origin(owner: nn.Module, key: str, value: Tensor) -> Tensor:
    """What the constructor made, where the module was cast or copied since."""
    built = vars(owner).get(ATTRIBUTE)
    noted = built.tensors.get(key) if built is not None else None
    known = built is not None and built.construction is not None and built.construction.record.knows(local(value))
    return noted if noted is not None and not known and noted.shape == value.shape else value.detach()


def allocate(tensors: list[EmptyTensor], device: torch.device) -> None:
    """Memory without values, poisoned, in the same objects. Two that shared their storage share it again."""
    places: dict[Any, Tensor] = {}
    for one in tensors:
        meta, sharded = one.meta, one.tensor
        place = meta.untyped_storage()._cdata, meta.storage_offset(), meta.shape, meta.stride(), meta.dtype
        if place not in places:
            where = sharded.device_mesh.device_type if isinstance(sharded, DTensor) else device
            places[place] = torch.empty_like(meta, device=where)
            poison(places[place])
        value: Tensor = places[place].detach()
        if isinstance(sharded, DTensor):
            mesh, shape, stride = sharded.device_mesh, sharded.shape, sharded.stride()
            value = DTensor.from_local(value, mesh, sharded.placements, run_check=False, shape=shape, stride=stride)
        if isinstance(one.tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=one.tensor.requires_grad)
        vars(value).update({key: kept for key, kept in vars(one.tensor).items() if key != "_is_hf_initialized"})
        try:
            torch.utils.swap_tensors(one.tensor, value)
        except RuntimeError:  # a view of it, or a weak reference to it, is kept somewhere
            for owner, key in one.owners:
                held: dict[str, Any] = next(
                    each for each in (owner._parameters, owner._buffers, vars(owner)) if key in each
                )
                held[key] = value
            one.tensor = value
