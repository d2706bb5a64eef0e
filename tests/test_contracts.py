"""Whose method initializes a module, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparseautomodel.contracts import Part, parts
from tests.conftest import SIZES


def _with(*names: str) -> nn.Module:
    """A module whose methods of initialization note that they ran."""
    ran: list[str] = []
    body: dict[str, Any] = {name: (lambda self, name=name: ran.append(name)) for name in names}
    module = type("Module", (nn.Module,), body)()
    module.ran = ran
    return module


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("_reset_parameters",), ["_reset_parameters"]),
        (("_reset_parameters", "reset_parameters"), ["reset_parameters"]),
        (("_reset_parameters", "reset_parameters", "init_weights"), ["init_weights"]),
        ((), []),
    ],
)
def test_order_of_the_methods(names: tuple[str, ...], expected: list[str]) -> None:
    module = _with(*names)
    part = Part("", module)
    assert part.is_covered is bool(expected)
    part.initialize()
    assert module.ran == expected


def test_method_that_needs_arguments_does_not_count() -> None:
    class Needing(nn.Module):
        def init_weights(self, std: float) -> None: ...

        def reset_parameters(self, gain: float = 1.0) -> None: ...

    part = Part("", Needing())
    assert part.method is not None
    assert part.method.__name__ == "reset_parameters"


def test_children_first_and_each_once() -> None:
    shared = nn.Linear(1, 1)
    module = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    assert [part.name for part in parts(module)] == ["a.0", "a", ""]


def test_rule_of_a_model_comes_after_the_module_s_own_method() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = _with("reset_parameters")

        def _init_weights(self, module: nn.Module) -> None:
            self.child.ran.append(type(module).__name__)

    model = Model()
    for part in parts(model):
        part.initialize()
    assert model.child.ran == ["reset_parameters", "Module", "Model"]


def test_model_of_transformers_owns_what_is_in_it() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    outer = nn.ModuleDict({"model": model, "extra": nn.Linear(1, 1)})
    owners = {part.name: part.owner for part in parts(outer)}
    assert owners["extra"] is None
    assert owners["model.lm_head"] is model
    assert owners["model.model.norm"] is model.model
    assert next(part for part in parts(model) if part.module is model).method is None
