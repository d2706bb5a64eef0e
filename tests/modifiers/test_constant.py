from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel.modifiers import Layer, ModifierError, Weight
from sparseautomodel.modifiers.constant import ConstantPruningModifier


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e-7, float("nan")]), min_size=12, max_size=12))
def test_the_mask_is_what_is_not_zero_and_no_value_changes(entries: list[float]) -> None:
    values = torch.tensor(entries).reshape(3, 4)
    weight = _weight(values)
    ConstantPruningModifier().apply(weight)
    assert weight.keep.flatten().tolist() == [entry != 0 for entry in entries]
    assert torch.equal(weight.values.nan_to_num(nan=7.0), values.nan_to_num(nan=7.0))


def test_what_was_pruned_before_stays_pruned() -> None:
    weight = _weight(torch.ones(2, 4))
    weight.keep = torch.tensor([[True, False, True, False]] * 2)
    weight.values[0, 0] = 0
    ConstantPruningModifier().apply(weight)
    assert weight.keep.tolist() == [[False, False, True, False], [True, False, True, False]]


def test_rows_stand_alone_and_the_sparsity_is_not_known_beforehand() -> None:
    layer = _weight(torch.ones(2, 4)).layer
    assert ConstantPruningModifier().rows(layer) == 1
    assert ConstantPruningModifier().sparsity_of(layer) is None


def test_keys() -> None:
    assert ConstantPruningModifier.keys() == ("targets", "ignore")
    assert ConstantPruningModifier(ignore="lm_head").to_dict() == {"ignore": ["lm_head"]}
    with pytest.raises(ModifierError, match="targets is empty"):
        ConstantPruningModifier(targets=())


def _weight(values: torch.Tensor) -> Weight:
    layer = Layer("lin", "lin", ("Linear",), (values.shape[0], values.shape[1]), values.dtype)
    return Weight(layer, values.clone())
