"""Which blocks a model has, and which layers of a block read one input: found by running it, not by their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(eq=False)
class LayerSet:
    """Layers that read one input, and what is known of that input."""

    names: tuple[str, ...]
    """Module names, in the order in which the forward calls them."""
    expert: bool = False
    """Whether they are those of one of several experts, to which not all tokens come."""
    statistics: list[Any] = field(default_factory=list)
    """What `gather` made for the set; updated with inputs `[tokens, in_features]`."""
    inputs: list[Tensor] = field(default_factory=list)
    """The inputs themselves, of the forwards that wait: all have come when the set is solved, unless the walk is in
    parts. They may be changed in place."""
    num_tokens: int = 0
    solved: bool = False


def find_blocks(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """The blocks that hold `layers`: for each, the child of the outermost `ModuleList` on the way to it."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found: dict[str, None] = {}
    for layer in layers:
        outer = min((name for name in lists if layer.startswith(f"{name}.")), key=len, default=None)
        if outer is not None:
            found[f"{outer}.{layer.removeprefix(f'{outer}.').partition('.')[0]}"] = None
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return sorted(found, key=order.__getitem__)


def input_sets(block: nn.Module, run: Callable[[], Any], layers: Sequence[str]) -> list[tuple[str, ...]]:
    """The sets of `layers`, names relative to `block`, in the order in which `run`, a forward of it, calls them.

    Experts that the run does not reach get the sets of those that it does.
    """
    inputs: dict[str, Tensor] = {}  # held, so that no other tensor gets the address of one

    def hook(name: str) -> Any:
        def meet(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.setdefault(name, args[0])

        return block.get_submodule(name).register_forward_pre_hook(meet)

    hooks = [hook(name) for name in layers]
    try:
        run()
    finally:
        for one in hooks:
            one.remove()
    groups: dict[tuple[Any, ...], list[str]] = {}
    for layer, value in inputs.items():
        groups.setdefault((value.data_ptr(), tuple(value.shape), value.stride()), []).append(layer)
    return _with_unmet([tuple(names) for names in groups.values()], layers)


def is_expert(name: str) -> bool:
    """Whether a layer, by its name within the block, belongs to one of several experts."""
    return _number(name) is not None


def _with_unmet(met: list[tuple[str, ...]], wanted: Sequence[str]) -> list[tuple[str, ...]]:
    """Sets for all of `wanted`: experts that the probe did not reach get the sets of the experts that it did.

    Experts run in the order of their numbers, so their sets stand in that order too.
    """
    reached = {name for names in met for name in names}
    shapes = {tuple(_numberless(name) for name in names): names for names in met if _number(names[0]) is not None}
    expert_sets: dict[int, list[tuple[str, ...]]] = {}
    for name in wanted:
        number = _number(name)
        if number is None or expert_sets.get(number) or not shapes:
            continue
        named = {_numberless(other): other for other in wanted if _number(other) == number}
        expert_sets[number] = [
            tuple(named[part] for part in shape) for shape in shapes if all(p in named for p in shape)
        ]
    first = next((at for at, names in enumerate(met) if _number(names[0]) is not None), len(met))
    plain = [names for names in met if _number(names[0]) is None]
    ordered = [names for number in sorted(expert_sets) for names in expert_sets[number]]
    reached |= {name for names in ordered for name in names}
    return [*plain[:first], *ordered, *plain[first:], *((name,) for name in wanted if name not in reached)]


def _number(name: str) -> int | None:
    """The number of the expert in a layer's name."""
    parts = name.split(".")
    return next((int(part) for part in parts if part.isdigit()), None)


def _numberless(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
