from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from sparseautomodel.hooks import Rows, WatchedParameters, around, drop_dead


def test_both_are_called_also_where_the_module_fails() -> None:
    calls: list[str] = []
    module: Any = nn.Identity()
    around(module, lambda *_: calls.append("before"), lambda *_: calls.append("after"))
    module(torch.zeros(1))
    module.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        module(torch.zeros(1))
    assert calls == ["before", "after"] * 2
    copy.deepcopy(module)._forward_hooks.clear()
    assert len(calls) == 4


def test_reading_is_seen_and_listing_is_not() -> None:
    layer, read = nn.Linear(2, 3), []
    layer._parameters = WatchedParameters(dict(layer._parameters), lambda value: read.append(value) or value)
    assert len(list(layer.parameters())) == 2 and len(layer.state_dict()) == 2 and not read
    weight = layer.weight
    assert len(read) == 1 and read[0] is weight
    assert type(copy.deepcopy(layer)._parameters) is dict


@pytest.mark.parametrize("ids", [torch.tensor([[5, 2, 5], [0, 9, 2]]), torch.tensor([7])])
def test_rows_of_an_embedding(ids: torch.Tensor) -> None:
    table, counted = nn.Embedding(10, 4, padding_idx=9), []
    expected, weight = table(ids), table.weight
    rows = Rows(table, torch.device("cpu"), counted.append)
    args, kwargs = rows.enter((ids,), {})
    assert len(table.weight) == len(ids.unique())
    assert torch.equal(table(*args, **kwargs), expected)
    rows.leave()
    rows.enter((ids,), {})
    rows.enter((torch.tensor([1]),), {})  # of another thread, before the first has left
    rows.leave()
    rows.leave()
    del counted[1:]
    assert table.weight is weight and table.padding_idx == 9 and counted == [len(ids.unique()) * 16]


def test_rows_of_a_table_that_was_replaced() -> None:
    table = nn.Embedding(10, 4)
    rows = Rows(table, torch.device("cpu"), lambda _: None)
    for _ in range(2):
        table.weight = weight = nn.Parameter(torch.rand(10, 4))
        args, _ = rows.enter((torch.tensor([3]),), {})
        assert torch.equal(table(*args), weight[3:4])
        rows.leave()
        assert table.weight is weight


def test_a_copy_can_be_rid_of_hooks_that_do_nothing() -> None:
    module, calls = nn.Sequential(nn.Identity()), []
    around(module[0], lambda *_: calls.append(1), lambda *_: calls.append(2))
    module[0].register_forward_hook(lambda *_: calls.append(3))
    twin = copy.deepcopy(module)
    drop_dead(twin)
    twin(torch.zeros(1))
    assert calls == [3] and not twin[0]._forward_pre_hooks and len(twin[0]._forward_hooks) == 1
    drop_dead(module)
    module(torch.zeros(1))
    assert calls == [3, 1, 2, 3]
