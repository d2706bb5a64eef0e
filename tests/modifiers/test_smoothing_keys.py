"""Which sets a modifier smooths and by way of what, as both llm-compressor modifiers spell it; what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sparseautomodel.modifiers import MODIFIERS, ModifierError
from sparseautomodel.modifiers.awq import AWQModifier
from sparseautomodel.modifiers.smoothing_keys import SmoothingKeys
from sparseautomodel.modifiers.smoothquant import SmoothQuantModifier
from sparseautomodel.recipe import Recipe, RecipeError

QKV = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"]
DOWN = ["model.layers.0.mlp.down_proj"]
NORM, UP = "model.layers.0.input_layernorm", "model.layers.0.mlp.up_proj"
LIST = [[["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"]]
DICT = [{"smooth_layer": "re:.*input_layernorm", "balance_layers": ["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"]}]


def test_the_keys_alone_are_no_modifier() -> None:
    assert SmoothingKeys.__name__ not in MODIFIERS


def test_without_a_table_all_that_holds_may_be_smoothed_and_by_smoothquant_what_a_norm_makes() -> None:
    for modifier, rows in ((AWQModifier(), True), (SmoothQuantModifier(), False)):
        assert modifier.moves(QKV, NORM, "weight") and modifier.moves(QKV, NORM, "one_plus_weight")
        assert modifier.moves(DOWN, UP, "rows") is rows


@pytest.mark.parametrize("cls", [AWQModifier, SmoothQuantModifier])
@pytest.mark.parametrize("table", [LIST, DICT, [(*map(tuple, LIST[0][:1]), LIST[0][1])], [[*LIST[0][:1], LIST[0][1:]]]])
def test_with_a_table_only_what_it_names_by_way_of_what_it_names(cls: Any, table: Any) -> None:
    modifier = cls(mappings=table)
    assert modifier.moves(QKV, NORM, "weight") and modifier.moves(QKV[:1], NORM, "weight")
    assert not modifier.moves(QKV, UP, "rows") and not modifier.moves(DOWN, UP, "rows")
    assert modifier == cls(mappings=LIST)
    assert modifier.to_dict() == {"mappings": LIST}


def test_a_table_may_name_a_linear_layer_for_smoothquant_too() -> None:
    assert SmoothQuantModifier(mappings=[["re:.*down_proj", "re:.*up_proj"]]).moves(DOWN, UP, "rows")


def test_hook_targets_of_llm_compressor_are_not_needed() -> None:
    assert AWQModifier(mappings=[DICT[0] | {"activation_hook_target": "mlp"}]) == AWQModifier(mappings=LIST)


def test_an_ignored_producer_is_left_alone() -> None:
    modifier = SmoothQuantModifier(ignore=["re:.*input_layernorm"])
    assert not modifier.moves(QKV, NORM, "weight")
    assert modifier.moves(QKV, "model.layers.0.post_attention_layernorm", "weight")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "mappings is a list"),
        ("re:.*q_proj", "mappings is a list"),
        (["re:.*q_proj"], "an entry is"),
        ([[["re:.*q_proj"]]], "an entry is"),
        ([[[], "re:.*norm"]], "an entry is"),
        ([[["re:.*q_proj"], ["a", "b"]]], "an entry is"),
        ([[[1], "re:.*norm"]], "an entry is"),
        ([{"smooth_layer": "re:.*norm"}], "an entry is"),
        ([DICT[0] | {"balance": []}], "unknown key 'balance'.*Allowed: smooth_layer, balance_layers"),
    ],
)
def test_other_tables_are_refused(table: Any, message: str) -> None:
    with pytest.raises(ModifierError, match=message) as error:
        AWQModifier(mappings=table)
    assert error.value.key == "mappings"


SMOOTHING = """
quant_stage:
  quant_modifiers:
    SmoothQuantModifier:
      smoothing_strength: 0.8
      mappings: [[["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"]]
      num_calibration_steps: null
      calibration_function: null
      algorithm: smoothquant
    AWQModifier:
      mappings:
        - smooth_layer: re:.*up_proj$
          balance_layers: ["re:.*down_proj$"]
          activation_hook_target: null
      offload_device: cpu
      duo_scaling: both
      n_grid: 10
"""


def test_smoothing_modifiers_as_llm_compressor_writes_them() -> None:
    with pytest.warns(UserWarning) as caught:
        recipe = Recipe.load(SMOOTHING)
    assert recipe.modifiers == (
        SmoothQuantModifier(
            smoothing_strength=0.8,
            mappings=[(["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm")],
        ),
        AWQModifier(mappings=[(["re:.*down_proj$"], "re:.*up_proj$")], duo_scaling="both", n_grid=10),
    )
    left_out = ("num_calibration_steps", "calibration_function", "algorithm", "offload_device")
    assert [any(f"'{key}'" in str(one.message) for one in caught) for key in left_out] == [True] * 4
    assert len(caught) == 4
    assert Recipe.load(recipe.to_yaml()) == recipe


def test_factors_of_another_algorithm_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"the factors are those of SmoothQuant\. Remove:\n +algorithm: log_equal"):
        Recipe.load("modifiers:\n- SmoothQuantModifier:\n    algorithm: log_equalization\n")
