"""How the modules of a model are given their initial values: whose method does it, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sparseautomodel.frames import contract_method, required_arguments


@dataclass(frozen=True)
class Part:
    """A module of a model, and what initializes it."""

    name: str
    module: nn.Module
    owner: PreTrainedModel | None = None
    """The innermost model of transformers that it is in, or is: its `_init_weights` initializes the module."""
    rule: Callable[[nn.Module], Any] | None = None
    """`_init_weights` of another model that it is in, which takes one module after another."""

    @property
    def method(self) -> Callable[[], Any] | None:
        """The module's own method; None where it has none that needs no arguments."""
        if isinstance(self.module, PreTrainedModel):
            return None
        return contract_method(self.module)

    @property
    def is_covered(self) -> bool:
        return self.owner is not None or self.rule is not None or self.method is not None

    def initialize(self) -> None:
        """Run what gives the module its values. What a model does to a module comes after the module's own method, as
        it does where a constructor ends with `self.apply(self._init_weights)`."""
        if self.owner is not None:
            self.owner._init_weights(self.module)
            return
        if self.method is not None:
            self.method()
        if self.rule is not None:
            self.rule(self.module)


def parts(module: nn.Module) -> list[Part]:
    """Every module once, children first: a module may change what its children did."""
    return list(_parts(Part("", module), set()))


def _parts(part: Part, seen: set[int]) -> Iterator[Part]:
    module, owner, rule = part.module, part.owner, part.rule
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, PreTrainedModel):
        owner, rule = module, None
    elif owner is None and callable(found := getattr(module, "_init_weights", None)) and required_arguments(found) == 1:
        rule = found
    for name, child in module.named_children():
        yield from _parts(Part(f"{part.name}.{name}".removeprefix("."), child, owner, rule), seen)
    yield Part(part.name, module, owner, rule)
