"""Models of which only some parameters are there: what is not wanted is taken out before the weights are loaded, and
the blocks that remain are numbered anew, so that the model's own forward, masks and cache are right for them."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from sparseautomodel.stack import HandedOn, Stack

INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number")
"""What modules call the number of the block that they are part of; it is where they find their keys in a cache."""


_OF_NO_LAYER = re.compile("architectures|token|keys_to_ignore")
"""Names of lists in a config that have no entry a block, however long they are."""


class Absent(nn.Module):
    """Stands where a module was taken out: what it is given comes out as it was, and an embedding adds nothing."""

    def __init__(self, old: nn.Module | None = None) -> None:
        super().__init__()
        self._embeds = isinstance(old, nn.Embedding)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        passed = [value for value in values if value.is_floating_point() and not self._embeds]
        return passed[0] if passed else torch.zeros(1, device=values[0].device if values else None)


def hollow_class(model_class: type[PreTrainedModel], stack: Stack, wanted: Collection[str]) -> type[PreTrainedModel]:
    """A class of the same name whose models are built with nothing but the `wanted` parameters."""

    def build(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        take_out(self, stack, frozenset(wanted))

    made = {"__init__": build, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), made)


def take_out(model: PreTrainedModel, stack: Stack, wanted: frozenset[str]) -> None:
    """Put an `Absent` in the place of every module without a wanted parameter. Blocks keep their numbers."""
    blocks: Any = model.get_submodule(stack.name)
    for number in range(len(blocks)):
        mine = stack.parameters[number] & wanted
        if mine != stack.parameters[number]:
            blocks[number] = _with_handed_on(blocks[number], stack, mine, stack.block(number))
    _take_out(model, "", wanted, stack.name)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            ties = getattr(module, "all_tied_weights_keys", None) or {}
            own = module.state_dict()
            module.all_tied_weights_keys = {a: b for a, b in ties.items() if a in own and b in own}
            if not module._non_persistent_buffers_set:
                module._is_hf_initialized = True  # some reach for weights of modules that are not there


def assemble(
    model: PreTrainedModel,
    stack: Stack,
    blocks: range,
    wanted: Collection[str],
    old: tuple[PreTrainedModel, range] | None = None,
) -> None:
    """Make a model that was loaded hollow one of these blocks alone: what it lacks is taken over from `old`, a model of
    other blocks, and all are numbered from 0 on."""
    fresh: Any = model.get_submodule(stack.name)
    handed = {one.path: fresh[0].get_submodule(one.path) for one in stack.handed_on if _has(fresh[0], one.path)}
    numbers = {number: number for number in blocks}
    made = {number: fresh[number] for number in blocks}
    if old is not None:
        theirs: Any = old[0].get_submodule(stack.name)
        for one in stack.handed_on:
            handed.setdefault(one.path, theirs[0].get_submodule(one.path))
        for place, number in enumerate(old[1]):
            if number in made:
                made[number], numbers[number] = theirs[place], place
        _take_over(model, old[0], stack, wanted)
    parent, _, name = stack.name.rpartition(".")
    model.get_submodule(parent)._modules[name] = nn.ModuleList(made.values()).train(model.training)
    for new, number in enumerate(blocks):
        _number(made[number], numbers[number], new)
        for one in stack.handed_on:
            _hand_on(made[number], one, handed[one.path] if new == 0 else None)
    cut_configs(model, stack, blocks)


def cut_configs(model: PreTrainedModel, stack: Stack, blocks: range) -> None:
    """Make the configs those of a model that has these blocks alone: every list with an entry a block is cut."""
    path, modules = "", [model, *model.get_submodule(stack.name).modules()]
    for part in stack.name.split("."):
        path = f"{path}.{part}".lstrip(".")
        modules.append(model.get_submodule(path))
    found: dict[int, Any] = {}
    for module in modules:
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            found |= {id(one): one for one in (config, config.get_text_config())}
    for config in found.values():
        if getattr(config, "num_hidden_layers", None) == stack.count:
            cut_config(config, blocks)


def cut_config(config: PreTrainedConfig, blocks: range) -> None:
    count = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == count and not _OF_NO_LAYER.search(name):
            vars(config)[name] = copy.copy(value[blocks.start : blocks.stop])
    config.num_hidden_layers = len(blocks)


def _take_over(model: nn.Module, old: nn.Module, stack: Stack, wanted: Collection[str], path: str = "") -> None:
    """Put the modules of `old` that are wanted in the place of those that are absent in `model`."""
    for name, child in list(model.named_children()):
        here, twin = f"{path}{name}", old._modules.get(name)
        if here == stack.name or twin is None or isinstance(twin, Absent):
            continue
        if not isinstance(child, Absent):
            _take_over(child, twin, stack, wanted, f"{here}.")
        elif any(f"{here}.{one}" in wanted for one in twin.state_dict()):
            model._modules[name] = twin


def _number(block: nn.Module, old: int, new: int) -> None:
    for module in block.modules():
        for name in INDEX_NAMES:
            value = vars(module).get(name)
            if type(value) is int and value == old:
                setattr(module, name, new)


def _hand_on(block: nn.Module, handed: HandedOn, module: nn.Module | None) -> None:
    """Give a block the module that only a first block has, or take it away."""
    parent, _, name = handed.path.rpartition(".")
    above = block.get_submodule(parent)
    if module is None:
        above._modules.pop(name, None)
    else:
        above._modules[name] = module
    for flag, (first, other) in handed.flags.items():
        setattr(above, flag, other if module is None else first)


def _has(module: nn.Module, path: str) -> bool:
    return path in dict(module.named_modules())


def _with_handed_on(block: nn.Module, stack: Stack, wanted: frozenset[str], name: str) -> nn.Module:
    """An `Absent` in the place of a block, with those of its modules that another first block takes over."""
    hollow = Absent()
    for handed in stack.handed_on:
        if not any(one.startswith(f"{name}.{handed.path}.") for one in wanted):
            continue
        above, parts = hollow, handed.path.split(".")
        for part in parts[:-1]:
            above._modules.setdefault(part, Absent())
            above = above._modules[part]  # type: ignore[assignment]
        above._modules[parts[-1]] = block.get_submodule(handed.path)
    return hollow


def _take_out(module: nn.Module, path: str, wanted: frozenset[str], stack: str) -> None:
    for name in [name for name in module._parameters if f"{path}{name}" not in wanted]:
        if module._parameters[name] is not None:
            module._parameters[name] = None
    for name, child in module.named_children():
        here = f"{path}{name}"
        if here == stack or isinstance(child, Absent):
            continue
        own = [f"{here}.{one}" for one in child.state_dict()]
        if own and wanted.isdisjoint(own) and not stack.startswith(f"{here}."):
            module._modules[name] = Absent(child)
        else:
            _take_out(child, f"{here}.", wanted, stack)
