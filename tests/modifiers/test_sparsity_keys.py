"""What the keys of modifiers that prune mean, the same for each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparseautomodel.modifiers import MODIFIERS, Layer, ModifierError
from sparseautomodel.modifiers.sparsity_keys import SparsityKeys

NAMES = ("MagnitudePruningModifier", "SparseGPTModifier", "WandaPruningModifier")
LAYER = Layer("up_proj", "up_proj", ("Linear",), (6, 20), torch.bfloat16)
every = pytest.mark.parametrize("name", NAMES)


def test_the_keys_alone_are_no_modifier() -> None:
    assert SparsityKeys.__name__ not in MODIFIERS
    assert all(issubclass(MODIFIERS[name], SparsityKeys) for name in NAMES)


@every
def test_one_meaning_has_one_spelling(name: str) -> None:
    cls = MODIFIERS[name]
    for given in ({"sparsity": 0.5}, {"sparsity": 0.5, "mask_structure": "0:0"}):
        assert cls(**given) == cls(sparsity=0.5, mask_structure="unstructured")
        assert cls(**given).to_dict() == {"sparsity": 0.5}
    for given in ({"mask_structure": "2:4"}, {"mask_structure": " 2 : 4 ", "sparsity": 0.5}):
        assert cls(**given).structure == (2, 4)
        assert cls(**given).to_dict() == {"mask_structure": "2:4"}


@every
def test_the_plan_is_told_the_sparsity(name: str) -> None:
    assert MODIFIERS[name](mask_structure="1:4").sparsity_of(LAYER) == 0.75
    assert MODIFIERS[name](mask_structure="1:4").rows(LAYER) == 1
    assert MODIFIERS[name](sparsity=1).sparsity_of(LAYER) == 1
    each_row = name == "WandaPruningModifier"
    assert MODIFIERS[name](sparsity=0.33).sparsity_of(LAYER) == (7 / 20 if each_row else 40 / 120)
    assert MODIFIERS[name](sparsity=0.33).rows(LAYER) == (1 if each_row else 6)


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ({}, "sparsity", "no sparsity"),
        ({"sparsity": 0}, "sparsity", "above 0"),
        ({"sparsity": 50}, "sparsity", "Write sparsity: 0.5"),
        ({"sparsity": "half"}, "sparsity", "a share above 0"),
        ({"sparsity": True}, "sparsity", "a share above 0"),
        ({"mask_structure": "2:4", "sparsity": 0.75}, "sparsity", "contradicts 2:4, which implies 0.5"),
        ({"mask_structure": "block4", "sparsity": 0.5}, "mask_structure", "mask_structure: 'block4' is no"),
        ({"mask_structure": 124}, "mask_structure", 'Write "2:4"'),
    ],
)
@every
def test_a_wrong_value_names_its_key_and_what_to_write(name: str, given: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ModifierError, match=said) as error:
        MODIFIERS[name](**given)
    assert error.value.key == key
