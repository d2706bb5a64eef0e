"""The tensors of a module that wait for values."""

from __future__ import annotations

import torch
from torch import nn

from sparseautomodel import init_module
from sparseautomodel.empty_tensors import allocate, empty_tensors, origin
from sparseautomodel.numbers import poisoned


def test_each_is_there_once_with_all_its_names() -> None:
    module = nn.Module()
    module.one, module.two = nn.Linear(2, 3, bias=False, device="meta"), nn.Linear(2, 3, bias=False, device="meta")
    module.two.weight = module.one.weight
    module.register_buffer("table", torch.empty(4, device="meta"))
    module.plain, module.full = torch.empty(1, device="meta"), torch.zeros(1)
    found = {one.name: (one.names, one.is_parameter) for one in empty_tensors(module)}
    assert found == {
        "one.weight": (["one.weight", "two.weight"], True),
        "table": (["table"], False),
        "plain": (["plain"], False),
    }


def test_memory_is_poisoned_and_objects_stay() -> None:
    module = nn.Linear(2, 3, device="meta")
    weight = module.weight
    allocate(empty_tensors(module), torch.device("cpu"))
    assert module.weight is weight
    assert weight.device.type == "cpu"
    assert poisoned(weight) == 6


def test_origin_is_what_the_constructor_made() -> None:
    with init_module(empty_weights=True):
        module = nn.Linear(2, 3)
    made = module.weight.untyped_storage()._cdata
    module.to(torch.bfloat16)
    assert module.weight.untyped_storage()._cdata != made
    assert origin(module, "weight", module.weight).untyped_storage()._cdata == made
    assert origin(nn.Linear(2, 3, device="meta"), "weight", module.weight).dtype == torch.bfloat16
