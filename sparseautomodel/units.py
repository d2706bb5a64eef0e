"""The units in which weights come and go: blocks, single experts, and what lies outside the blocks.

Every parameter and buffer of a model belongs to exactly one unit, however many places it is seen in, so that tied
weights are moved and counted once.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sparseautomodel.codecs import Value, value_of
from sparseautomodel.placement import FIXED

ALIGNMENT = 256
"""Bytes to which each tensor of a unit is aligned where the unit is one run of memory."""

SMALL = 64
"""A unit of less than the largest one's size over this (a norm, rope's frequencies) is not worth a copy a forward."""

BLOCK, EXPERT, LAYER = "block", "expert", "layer"
_EXPERTS = re.compile(r"(^|\.)experts\.(\d+)(\.|$)")


@dataclass(eq=False)
class Unit:
    """Values that are brought and dropped together, and the modules that need them while they run."""

    name: str
    kind: str
    """BLOCK, EXPERT, LAYER (outside the blocks), or FIXED."""
    values: tuple[Value, ...]
    carriers: tuple[nn.Module, ...]
    gathered: tuple[nn.Module, ...] = ()
    """Embeddings, which read some rows of it and not the whole."""
    users: int = field(default=0, repr=False)
    """Carriers that are running."""

    @property
    def nbytes(self) -> int:
        """Of its tensors in one run of memory."""
        return sum(_aligned(part.nbytes) for value in self.values for part in value.parts)

    @property
    def level(self) -> int:
        """0, or 1 for what is entered while a unit of level 0 is in use."""
        return int(self.kind == EXPERT)

    @property
    def streamable(self) -> bool:
        """Whether it comes as a whole when it is not resident: an embedding that is nothing else comes by rows."""
        return bool(self.carriers)

    def parts(self) -> list[torch.Tensor]:
        """The plain dense tensors that it consists of, where they are at home."""
        return [part for value in self.values for part in value.parts]

    def cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """`memory`, `nbytes` of uint8, as tensors of the dtypes and shapes of `parts()`."""
        views, offset = [], 0
        for part in self.parts():
            piece = memory[offset : offset + part.nbytes]
            views.append(piece.view(part.dtype).view(part.shape) if part.numel() else torch.empty_like(part))
            offset += _aligned(part.nbytes)
        return views

    def lies_in(self, memory: torch.Tensor) -> bool:
        """Whether its tensors are in `memory` already, as `take_home` would put them there."""
        if memory.nbytes < self.nbytes or not self.nbytes:
            return False
        views = zip(self.cut(memory), self.parts(), strict=True)
        return all(view.data_ptr() == part.data_ptr() for view, part in views if part.numel())

    def take_home(self, memory: torch.Tensor) -> None:
        """Let its tensors live in `memory` from now on; those of the model stay the same objects."""
        views = self.cut(memory)
        for view, part in zip(views, self.parts(), strict=True):
            view.copy_(part)
        for value in self.values:
            mine, views = views[: len(value.parts)], views[len(value.parts) :]
            value.rebase(mine)

    def build(self, views: Sequence[torch.Tensor]) -> list[Any]:
        """What modules are to hold, for `show`, made of the tensors that stand for `parts()`."""
        built, rest = [], list(views)
        for value in self.values:
            built.append(value.build(rest[: len(value.parts)]))
            rest = rest[len(value.parts) :]
        return built

    def show(self, built: Sequence[Any]) -> None:
        """Put built values in the modules' places."""
        for value, mine in zip(self.values, built, strict=True):
            value.show(mine)

    def hide(self, built: Sequence[Any]) -> None:
        """Put the values of home back; what a module has set itself meanwhile stays."""
        for value, mine in zip(self.values, built, strict=True):
            value.hide(mine)


def find_units(model: nn.Module, known: Container[int] = ()) -> list[Unit]:
    """All units of a model, in the order of its modules.

    Args:
        known: identities of parameters and buffers to leave out.
    """
    blocks = block_names(model)
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    carriers: dict[int, dict[str, str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        for store in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, store).items():
                if tensor is None or id(tensor) in known:
                    continue
                kind, names = _carriers(model, path, blocks)
                tensors[id(tensor)] = tensor
                places.setdefault(id(tensor), []).append((module, store, key))
                carriers.setdefault(id(tensor), {}).update(dict.fromkeys(names, kind))
    groups: dict[tuple[str, ...], list[int]] = {}
    for key, found in carriers.items():
        groups.setdefault(tuple(sorted(found)), []).append(key)
    units = [
        _unit(model, names, carriers[keys[0]], [value_of(tensors[key], places[key]) for key in keys])
        for names, keys in groups.items()
    ]
    largest = max((unit.nbytes for unit in units), default=0)
    for unit in units:
        if unit.nbytes * SMALL <= largest:
            unit.kind = FIXED
    order = {module: number for number, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: min(order[module] for module in unit.carriers or unit.gathered))


def block_names(model: nn.Module) -> list[str]:
    """The modules that are moved as a whole: those that the model class says not to split, else the elements of its
    module lists."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    named = [name for name, module in model.named_modules() if type(module).__name__ in classes]
    if not named:
        named = [
            f"{path}.{key}".removeprefix(".")
            for path, module in model.named_modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
            for key in module._modules
        ]
    return list(_outermost(named))


def _outermost(names: Sequence[str]) -> Iterator[str]:
    known = set(names)
    for name in names:
        parts = name.split(".")
        if not any(".".join(parts[:count]) in known for count in range(1, len(parts))):
            yield name


def _carriers(model: nn.Module, path: str, blocks: Sequence[str]) -> tuple[str, list[str]]:
    """The kind of unit that the values of a module belong to, and the names of the modules that need it to run."""
    block = next((name for name in blocks if path == name or path.startswith(f"{name}.")), None)
    if block is None:
        return LAYER, [path]
    match = _EXPERTS.search(path.removeprefix(block))
    if match is None:
        return BLOCK, [block]
    expert = block + path.removeprefix(block)[: match.end(2)]
    module = model.get_submodule(expert)
    if type(module).forward is not nn.Module.forward:
        return EXPERT, [expert]
    layers = [name for name, layer in module.named_modules(prefix=expert) if layer._parameters or layer._buffers]
    return EXPERT, layers


def _unit(model: nn.Module, names: Sequence[str], kinds: dict[str, str], values: Sequence[Value]) -> Unit:
    modules = [model.get_submodule(name) for name in names]
    kind = next(iter(kinds.values())) if len(set(kinds.values())) == 1 else FIXED
    if kind == LAYER and any(list(module.children()) for module in modules):
        kind = FIXED  # it is needed while everything inside runs
    rows = [module for module in modules if kind == LAYER and _reads_rows(module)]
    label = names[0] if kind != EXPERT else _common(names)
    return Unit(
        label or type(model).__name__,
        kind,
        tuple(values),
        tuple(module for module in modules if module not in rows),
        tuple(rows),
    )


def _reads_rows(module: nn.Module) -> bool:
    """Whether a module is an embedding that does nothing but look rows up by its argument."""
    is_plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return is_plain and module.max_norm is None and list(module._parameters) == ["weight"]


def _common(names: Sequence[str]) -> str:
    match = _EXPERTS.search(names[0])
    return names[0][: match.end(2)] if match else names[0]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
