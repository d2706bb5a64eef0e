"""What all modifiers share: which layers a pattern reaches, the keys a recipe may give, the table of names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sparseautomodel.modifiers import MODIFIERS, Layer, Modifier, ModifierError, Weight


def layer(name: str, role: str = "block", kinds: tuple[str, ...] = ("Linear",), module: str | None = None) -> Layer:
    return Layer(name, module or name, kinds, (8, 16), torch.float32, role=role)


@pytest.mark.parametrize(
    ("pattern", "reached"),
    [
        ("Linear", {"model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj"}),
        ("model.layers.0.mlp.up_proj", {"model.layers.0.mlp.up_proj"}),
        ("up_proj", set()),
        (r"re:.*layers\.0\.", {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate"}),
        ("re:layers", set()),  # matches from the start of the full name, as in compressed-tensors
        ("lm_head", {"lm_head"}),
        ("re:.*(head|gate)$", {"lm_head", "model.layers.0.mlp.gate"}),
        ("Embedding", set()),
    ],
)
def test_patterns_reach_full_names_and_classes_only_in_blocks(pattern: str, reached: set[str]) -> None:
    layers = [
        layer("model.layers.0.mlp.up_proj"),
        layer("model.layers.10.mlp.up_proj"),
        layer("model.layers.0.mlp.gate", "router"),
        layer("lm_head", "head"),
        layer("model.embed_tokens", "embedding", ("Embedding",)),
    ]
    assert {one.name for one in layers if one.targeted_by(pattern)} == reached


def test_ignore_reaches_every_role_by_class_too() -> None:
    class_ignored = Modifier(targets=("re:.*",), ignore=("Linear",))
    assert not class_ignored.selects(layer("lm_head", "head"))
    assert class_ignored.selects(layer("model.embed_tokens", "embedding", ("Embedding",)))


def test_both_spellings_of_a_renamed_layer_match() -> None:
    one = layer("visual.blocks.0.fc1", module="model.visual.blocks.0.fc1")
    assert one.named_by("visual.blocks.0.fc1") and one.named_by("model.visual.blocks.0.fc1")


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"targets": []}, "targets"),
        ({"targets": [1]}, "targets"),
        ({"ignore": {"a": 1}}, "ignore"),
        ({"targets": 3}, "targets"),
    ],
)
def test_names_that_are_no_list_of_text_are_errors(keys: dict[str, Any], key: str) -> None:
    with pytest.raises(ModifierError, match=key) as caught:
        Modifier(**keys)
    assert caught.value.key == key


def test_one_name_is_a_list_of_one() -> None:
    assert Modifier(targets="Linear", ignore="lm_head") == Modifier(targets=["Linear"], ignore=("lm_head",))


def test_to_dict_gives_what_differs_from_the_defaults_as_plain_values() -> None:
    assert Modifier().to_dict() == {}
    assert Modifier(ignore=("lm_head",)).to_dict() == {"ignore": ["lm_head"]}


def test_a_subclass_is_entered_by_its_name_and_twice_is_an_error() -> None:
    try:

        @dataclass(frozen=True, kw_only=True)
        class SomethingNewModifier(Modifier):
            strength: float = 1.0

        assert MODIFIERS["SomethingNewModifier"] is SomethingNewModifier
        assert SomethingNewModifier.keys() == ("targets", "ignore", "strength")
        with pytest.raises(TypeError, match="SomethingNewModifier"):
            type("SomethingNewModifier", (Modifier,), {})
    finally:
        MODIFIERS.pop("SomethingNewModifier", None)


def test_a_modifier_without_a_data_free_form_says_so() -> None:
    with pytest.raises(NotImplementedError, match=re.escape("Modifier has no data-free form")):
        Modifier().apply(Weight(layer("a"), torch.ones(8, 16)))


def test_prune_zeroes_and_keeps_what_was_pruned_before() -> None:
    weight = Weight(layer("a"), torch.ones(2, 4))
    weight.prune(torch.tensor([[True, False, True, True]] * 2))
    weight.prune(torch.tensor([[True, True, False, True]] * 2))
    assert weight.values.tolist() == [[1.0, 0.0, 0.0, 1.0]] * 2
    assert weight.keep is not None and weight.keep.tolist() == [[True, False, False, True]] * 2
