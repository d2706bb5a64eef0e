"""Which parts of a model a range of its blocks needs: found by running it on the meta device, not by its family."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForTextEncoding, PreTrainedConfig, PreTrainedModel

from sparseautomodel.architecture import SEPARATE_PARTS, Architecture, auto_class_for
from sparseautomodel.forwards import first_tensor
from sparseautomodel.sets import find_blocks

BEFORE, BESIDE, AFTER = "before", "beside", "after"


@dataclass(frozen=True)
class HandedOn:
    """A module that the first block alone has, and whose result the others are given: the position bias of T5."""

    path: str
    """Its name within a block."""
    flags: Mapping[str, tuple[bool, bool]]
    """Switches of the module above it: what the first block has them at, and what the others have."""


@dataclass(frozen=True)
class Stack:
    """The blocks of a model that run one after another, and the parameters around them."""

    name: str
    """Of the list of blocks."""
    count: int
    edges: Mapping[str, str]
    """Parameter outside the blocks -> where it is needed: `before` the first block, `after` the last, `beside` all."""
    ties: tuple[frozenset[str], ...]
    """Parameters that share their storage."""
    handed_on: tuple[HandedOn, ...]
    parameters: Mapping[int, frozenset[str]]
    """Number of a block -> its parameters and persistent buffers."""

    def block(self, number: int) -> str:
        return f"{self.name}.{number}"

    def check(self, blocks: range) -> None:
        """Raise ValueError unless `blocks` is a run of blocks that there are."""
        given = f"blocks={blocks!r}"
        if not isinstance(blocks, range) or blocks.step != 1 or not len(blocks):
            raise ValueError(f"{given} is no run of blocks. Write range(0, {self.count}) or a part of it")
        if blocks.start < 0 or blocks.stop > self.count:
            raise ValueError(
                f"{given}: the model has blocks 0 to {self.count - 1}. Write a part of range({self.count})"
            )

    def wanted(self, blocks: range) -> dict[str, str]:
        """Parameters of a stage of these blocks -> the unit they belong to: `before`, `beside`, `after`, or the name of
        a block."""
        found = {name: self.block(number) for number in blocks for name in self.parameters[number]}
        for name, where in self.edges.items():
            needed = where == BESIDE or (where == BEFORE and blocks.start == 0)
            if needed or (where == AFTER and blocks.stop == self.count):
                found[name] = where
        if blocks.start > 0:
            prefixes = tuple(f"{self.block(0)}.{handed.path}." for handed in self.handed_on)
            found |= {name: BESIDE for name in self.parameters[0] if prefixes and name.startswith(prefixes)}
        return found


def stack_class(config: PreTrainedConfig) -> Any:
    """The `AutoModelFor*` class whose model has one stack of blocks; of T5 and its like that is the encoder alone."""
    if getattr(config, "is_encoder_decoder", False):
        if type(config) in AutoModelForTextEncoding._model_mapping:
            return AutoModelForTextEncoding
        raise ValueError(
            f"{type(config).__name__} is of an encoder and a decoder, which are no single stack of blocks: only "
            "models of one stack, and the encoders that AutoModelForTextEncoding has, can be loaded in part"
        )
    return auto_class_for(config)


def find_stack(architecture: Architecture) -> Stack:
    """The stack of blocks that a forward of tokens goes through.

    Raises:
        ValueError: the model has no list of as many blocks as its config says (shared blocks, say).
    """
    model = architecture.skeleton
    matrices = [
        name
        for name, module in model.named_modules()
        if any(p.ndim > 1 for p in module._parameters.values() if p is not None)
    ]
    lists: dict[str, list[str]] = {}
    for block in find_blocks(model, matrices):
        lists.setdefault(block.rpartition(".")[0], []).append(block)
    count = architecture.config.get_text_config().num_hidden_layers
    lists = {
        name: blocks
        for name, blocks in lists.items()
        if len(blocks) == count == len(list(model.get_submodule(name).children()))
    }
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of {count} blocks, as its config says: it cannot be loaded in part"
        )
    name, before, beside = _run(model, lists) or (_longest(model, lists), None, frozenset[str]())
    inside = {f"{name}.{number}" for number in range(count)}
    parameters = {number: _names_under(model, f"{name}.{number}") for number in range(count)}
    outside = [one for one in model.state_dict() if not _is_under(one, inside)]
    ties = _tie_groups(architecture.ties)
    edges = _edges(model, outside, name, before, beside, ties)
    handed = tuple(_handed_on(model.get_submodule(f"{name}.0"), model.get_submodule(f"{name}.1"))) if count > 1 else ()
    return Stack(name, count, edges, ties, handed, parameters)


class _Reached(Exception):
    """The forward has come to a block, and need not go on."""


def _run(model: PreTrainedModel, lists: Mapping[str, list[str]]) -> tuple[str, frozenset[str], frozenset[str]] | None:
    """The list that a forward comes to first, the modules that it called on the way there, and the parameters that the
    block is given results of beside its hidden states. None where the model does not run on the meta device."""
    called: set[str] = set()
    found: list[tuple[str, frozenset[str]]] = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks = {block: name for name, several in lists.items() for block in several}

    def reach(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = first_tensor((args, kwargs))
            side = [value for value in _tensors((args, kwargs)) if value is not hidden]
            found.append((name, frozenset(names[key] for key in _leaves(side) if key in names)))
            raise _Reached

        return hook

    hooks = []
    for name, module in model.named_modules():
        if name in blocks:
            hooks.append(module.register_forward_pre_hook(reach(blocks[name]), with_kwargs=True))
        elif not _is_under(name, blocks):
            hooks.append(module.register_forward_pre_hook(lambda module, args, name=name: called.add(name)))
    try:
        with torch.enable_grad(), torch.device("meta"):
            model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    except _Reached:
        pass
    except Exception:  # whatever code of a model raises without values: the order of its modules has to do
        found.clear()
    finally:
        for one in hooks:
            one.remove()
    return (found[0][0], frozenset(called), found[0][1]) if found else None


def _edges(
    model: PreTrainedModel,
    outside: Iterable[str],
    stack: str,
    before: frozenset[str] | None,
    beside: frozenset[str],
    ties: Iterable[frozenset[str]],
) -> dict[str, str]:
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    edges = {}
    for name in outside:
        owner = name.rpartition(".")[0]
        if name in beside:
            edges[name] = BESIDE
        elif any(pattern.search(name) for _, pattern in SEPARATE_PARTS) and getattr(model.config, "sub_configs", None):
            edges[name] = BEFORE
        elif before is not None:
            edges[name] = BEFORE if owner in before else AFTER
        elif order[owner] < order[stack]:
            edges[name] = BEFORE
        else:  # what it does is not known: the head is after the blocks, and what is in the base may be for them all
            edges[name] = BESIDE if name.startswith(f"{model.base_model_prefix}.") else AFTER
    for group in ties:  # an embedding under another name
        if any(edges.get(name) == BEFORE for name in group):
            alias = [name for name in group if edges.get(name) == AFTER]
            edges |= {name: BEFORE for name in alias if model.get_submodule(name.rpartition(".")[0]) is not head}
    return edges


def _handed_on(first: nn.Module, other: nn.Module, path: str = "") -> Iterator[HandedOn]:
    if type(first) is not type(other):
        return
    for name, child in first.named_children():
        twin = other._modules.get(name)
        if twin is not None:
            yield from _handed_on(child, twin, f"{path}{name}.")
        elif any(True for _ in child.parameters()):
            flags = {
                key: (value, vars(other)[key])
                for key, value in vars(first).items()
                if isinstance(value, bool) and vars(other).get(key, value) is not value
            }
            yield HandedOn(f"{path}{name}", flags)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (one for part in value.values() for one in _tensors(part))
    elif isinstance(value, (tuple, list)):
        yield from (one for part in value for one in _tensors(part))


def _leaves(tensors: Iterable[Tensor]) -> set[int]:
    """Ids of the parameters that these were computed from."""
    found, seen = {id(tensor) for tensor in tensors if tensor.is_leaf}, set()
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        found |= {id(node.variable)} if hasattr(node, "variable") else set()
        nodes += [after for after, _ in node.next_functions if after is not None]
    return found


def _tie_groups(ties: Mapping[str, str]) -> tuple[frozenset[str], ...]:
    groups: dict[str, set[str]] = {}
    for target, source in ties.items():
        groups.setdefault(source, {source}).add(target)
    return tuple(frozenset(group) for group in groups.values())


def _longest(model: nn.Module, lists: Mapping[str, list[str]]) -> str:
    """The list with the most parameters."""
    return max(lists, key=lambda name: sum(one.numel() for one in model.get_submodule(name).parameters()))


def _names_under(model: nn.Module, path: str) -> frozenset[str]:
    return frozenset(f"{path}.{name}" for name in model.get_submodule(path).state_dict())


def _is_under(name: str, paths: Iterable[str]) -> bool:
    """Whether `name` is one of `paths` or within one."""
    parts, paths = name.split("."), paths if isinstance(paths, (set, dict, frozenset)) else set(paths)
    return any(".".join(parts[:length]) in paths for length in range(1, len(parts) + 1))


def number_of(name: str, stack: Stack) -> int | None:
    """The number of the block that a parameter belongs to."""
    match = re.match(rf"{re.escape(stack.name)}\.(\d+)\.", name)
    return int(match[1]) if match else None
