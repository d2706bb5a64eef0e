"""Documents of llm-compressor and SparseML in all their layouts, and the keys that they still write."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseautomodel.modifiers import MODIFIERS, Modifier
from sparseautomodel.modifiers.constant import ConstantPruningModifier
from sparseautomodel.modifiers.magnitude import MagnitudePruningModifier
from sparseautomodel.modifiers.quantization import QuantizationModifier
from sparseautomodel.recipe import Recipe, RecipeError


@dataclass(frozen=True, kw_only=True)
class SolverProbeModifier(Modifier):
    dampening_frac: float = 0.01
    mask_structure: str = "unstructured"


PROBES = {"SolverProbeModifier": MODIFIERS.pop("SolverProbeModifier")}


@pytest.fixture(autouse=True, scope="module")
def probes() -> Iterator[None]:
    """The modifier of this file is in the table while its tests run, and only then."""
    MODIFIERS.update(PROBES)
    yield
    for name in PROBES:
        del MODIFIERS[name]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """What is not retired is read without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def error_of(form: Any) -> str:
    with pytest.raises(RecipeError) as error:
        Recipe.load(form)
    return str(error.value)


FIRST = MagnitudePruningModifier(mask_structure="2:4", ignore=("lm_head",))
SECOND = ConstantPruningModifier()
LAYOUTS = {
    "stages and groups as mappings": """
sparsity_stage:
  run_type: oneshot
  sparsity_modifiers:
    MagnitudePruningModifier:
      mask_structure: 2:4
      ignore: [lm_head]
quant_stage:
  quant_modifiers:
    ConstantPruningModifier: {}
""",
    "one stage, two modifiers of a group": """
default_stage:
  default_modifiers:
    MagnitudePruningModifier: {mask_structure: '2:4', ignore: [lm_head]}
    ConstantPruningModifier: {}
""",
    "groups as lists": """
default_stage:
  default_modifiers:
    - MagnitudePruningModifier:
        mask_structure: "2:4"
        ignore: lm_head
    - ConstantPruningModifier
""",
    "stages as lists": """
default_stage:
  - a_modifiers: {MagnitudePruningModifier: {mask_structure: 2:4, ignore: lm_head}}
  - b_modifiers: {ConstantPruningModifier: {}}
""",
    "un-staged groups": """
a_modifiers:
  MagnitudePruningModifier: {mask_structure: 2:4, ignore: lm_head}
b_modifiers:
  - ConstantPruningModifier:
""",
    "stages: as a mapping": """
stages:
  first:
    run_type: oneshot
    modifiers:
      MagnitudePruningModifier: {mask_structure: 2:4, ignore: lm_head}
  second:
    - group: x
      enabled: true
      args: {}
      exclude_default: false
      b_modifiers: [ConstantPruningModifier]
""",
    "stages: as a list": """
stages:
  - name: first
    modifiers: [MagnitudePruningModifier: {mask_structure: 2:4, ignore: lm_head}]
  - second_stage:
      modifiers: {ConstantPruningModifier: {}}
""",
    "modifiers: as a mapping": """
modifiers:
  MagnitudePruningModifier: {mask_structure: 2:4, ignore: lm_head}
  ConstantPruningModifier:
""",
    "modifiers: with groups": """
modifiers:
  - a_modifiers: [MagnitudePruningModifier: {mask_structure: 2:4, ignore: lm_head}]
  - b_modifiers: {ConstantPruningModifier: {}}
""",
    "class names at the top": """
version: 1.1.0
args: {}
MagnitudePruningModifier:
  mask_structure: 2:4
  ignore: [lm_head]
ConstantPruningModifier: {}
""",
    "merged by llm-compressor's save": """
default_stage_0:
  default_modifiers: {MagnitudePruningModifier: {mask_structure: 2:4, ignore: lm_head}}
default_stage_1:
  default_modifiers: {ConstantPruningModifier: {}}
""",
    "a disabled stage": """
first_stage:
  enabled: true
  a_modifiers: {MagnitudePruningModifier: {mask_structure: 2:4, ignore: lm_head}}
finetuning_stage:
  run_type: train
  enabled: false
  b_modifiers: {OutputDistillationModifier: {targets: [x]}}
last_stage:
  c_modifiers: {ConstantPruningModifier: {}}
""",
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_gives_the_same_ordered_recipe(layout: str) -> None:
    assert Recipe.load(layout) == Recipe((FIRST, SECOND))


KEYS = st.fixed_dictionaries({"targets": st.lists(st.sampled_from(["Linear", "re:.*q_proj$", "a.b"]), min_size=1)})
GROUP = st.lists(KEYS, min_size=1, max_size=3)


@settings(max_examples=40)
@given(stages=st.lists(st.lists(GROUP, min_size=1, max_size=2), min_size=1, max_size=3), as_list=st.booleans())
def test_order_is_that_of_the_text(stages: list[list[list[dict[str, Any]]]], as_list: bool) -> None:
    def body(groups: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return {f"{i}_modifiers": [{"SolverProbeModifier": keys} for keys in group] for i, group in enumerate(groups)}

    flat = [SolverProbeModifier(**keys) for groups in stages for group in groups for keys in group]
    document: Any = {f"{i}_stage": body(groups) for i, groups in enumerate(stages)}
    assert Recipe.load(document).modifiers == tuple(flat)
    assert Recipe.load({"stages": [*document.values()] if as_list else document}).modifiers == tuple(flat)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a_stage:\n  enabled: false\n  m_modifiers: [ConstantPruningModifier]\n",
            "1:1: nothing is left to do",
        ),
        ("a_stage:\n  enabled: 'no'\n", "2:12: enabled is true or false, got 'no'"),
        (
            "a_stage:\n  run_type: train\n  m_modifiers: [ConstantPruningModifier]\n",
            "2:13: run_type is train",
        ),
        ("a_stage:\n  args: {x: 3}\n", "2:3: 'args' holds variables"),
        ("args: {x: 3}\n", "1:1: 'args' holds variables"),
        (
            "a_stage:\n  m_modifers: [ConstantPruningModifier]\n",
            "2:3: unknown key of a stage 'm_modifers'. Did you mean 'mod",
        ),
        ("a_stage:\n  m_modifiers:\n    Foo: {}\n", "3:5: unknown modifier 'Foo'. Allowed: "),
        ("a_stage:\n  m_modifiers:\n    GPTModifier: {}\n", "3:5: unknown modifier 'GPTModifier'"),
        ("a_stage:\n  m_modifiers: {}\n", "2:16: no list of modifiers but {}"),
        ("a_stage: 3\n", "1:10: a stage is a mapping with `modifiers:`, got 3"),
        ("a_stage:\n", "1:9: a stage is a mapping"),
        ("stages: 3\n", "1:9: a stage is a mapping"),
        ("stages: [3]\n", "1:10: a stage is a mapping"),
        (
            "a_stage:\n  m_modifiers:\n    SolverProbeModifier:\n      dampng_frac: 1\n",
            "4:7: unknown key 'dampng_frac'",
        ),
        (
            "a_stage:\n  m_modifiers:\n    SolverProbeModifier:\n    dampening_frac: 1\n",
            "4:5: 'dampening_frac' stands beside",
        ),
        (
            "modifiers:\n- SolverProbeModifier: {dampening_frac: eval(x)}\n",
            "2:41: 'eval(x)' is an expression",
        ),
        ("modifiers:\n- SolverProbeModifier: {targets: ['a${x}']}\n", "2:35: 'a${x}' is an expression"),
    ],
)
def test_mistakes_keep_their_place(text: str, message: str) -> None:
    assert error_of(text).startswith(f"<text>:{message}")


def test_a_regex_is_no_expression() -> None:
    recipe = Recipe.load("modifiers:\n- SolverProbeModifier: {targets: ['re:.*eval(uator)?$']}\n")
    assert recipe.modifiers == (SolverProbeModifier(targets=("re:.*eval(uator)?$",)),)


# Retired keys

RETIRED = """
obcq_stage:
  obcq_modifiers:
    SolverProbeModifier:
      percdamp: 1e-3
      mask_structure: "0:0"
      sequential_update: true
      quantize: false
      targets: ['re:.*q_proj.weight', 're:.*\\.mlp\\.weight$', Linear]
      start: 0.0
      end: -1
      update: null
      index: null
      group: obcq
      requires_calibration_data: true
      offload_hessians: false
      owl_m: null
"""


def test_retired_keys_that_changed_nothing_or_are_renamed_warn() -> None:
    with pytest.warns(UserWarning) as caught:
        recipe = Recipe.load(RETIRED)
    assert recipe.modifiers == (
        SolverProbeModifier(
            dampening_frac=1e-3, mask_structure="0:0", targets=("re:.*q_proj", r"re:.*\.mlp$", "Linear")
        ),
    )
    messages = [str(warning.message) for warning in caught]
    assert messages[0] == "<text>:5:7: 'percdamp' of SolverProbeModifier is now called 'dampening_frac'"
    for part in (
        "<text>:7:7: 'sequential_update' of SolverProbeModifier was left out",
        "<text>:8:7: 'quantize' of SolverProbeModifier was left out, false has no effect",
        "<text>:9:17: 're:.*q_proj.weight' does not name layers and was read as 're:.*q_proj'",
        "<text>:10:7: 'start'",
        "<text>:11:7: 'end'",
        "<text>:12:7: 'update'",
        "<text>:13:7: 'index'",
        "<text>:14:7: 'group'",
        "<text>:15:7: 'requires_calibration_data'",
        "<text>:16:7: 'offload_hessians'",
        "<text>:17:7: 'owl_m'",
    ):
        assert sum(message.startswith(part) for message in messages) == 1, part
    assert len(messages) == 13


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "quantize: true",
            "'quantize' of SolverProbeModifier is no longer a key: write a quantizing modifier of its own",
        ),
        ("start: 2", "'start' of SolverProbeModifier is no longer a key: every modifier is applied once"),
        ("end: 10.5", "'end' of"),
        ("sparsity_profile: owl", "'sparsity_profile' of"),
        (
            "scheme_overrides: {Linear: {}}",
            "'scheme_overrides' of SolverProbeModifier is no longer a key: write config_groups",
        ),
        (
            "num_calibration_steps: 64",
            "give oneshot(num_samples=...) instead. Remove:\n    num_calibration_steps: 64",
        ),
        (
            "percdamp: 0.1\n    dampening_frac: 0.1",
            "'percdamp' of SolverProbeModifier is the old name of 'dampening_frac'",
        ),
        ("never_was: 1", "unknown key 'never_was' of SolverProbeModifier"),
    ],
)
def test_retired_keys_that_changed_the_result_are_errors(key: str, message: str) -> None:
    """sparseml#2357: users go on setting a key that is gone."""
    error = error_of(f"modifiers:\n- SolverProbeModifier:\n    {key}\n")
    assert error.startswith("<text>:3:5: ")
    assert message in error


def test_a_key_that_a_modifier_has_is_never_retired() -> None:
    keys = {"init_sparsity": 0.0, "final_sparsity": 0.5}
    assert Recipe.load({"MagnitudePruningModifier": keys}) == Recipe((MagnitudePruningModifier(sparsity=0.5),))


@pytest.mark.parametrize("everything", ["__ALL__", "__ALL_PRUNABLE__"])
def test_the_old_words_for_everything(everything: str) -> None:
    with pytest.warns(UserWarning, match="was read as 'Linear'"):
        assert Recipe.load({"ConstantPruningModifier": {"targets": everything}}) == Recipe((ConstantPruningModifier(),))


def test_what_llm_compressor_writes_next_to_a_pruned_model() -> None:
    text = """
default_stage:
  default_modifiers:
    MagnitudePruningModifier:
      requires_calibration_data: false
      targets: ['re:.*q_proj.weight']
      init_sparsity: 0.0
      final_sparsity: 0.5
      update_scheduler: cubic
      scheduler_args: {}
      mask_structure: unstructured
      leave_enabled: false
      apply_globally: false
"""
    with pytest.warns(UserWarning):
        assert Recipe.load(text) == Recipe((MagnitudePruningModifier(sparsity=0.5, targets=("re:.*q_proj",)),))


GROUP_TEXT = """
default_stage:
  default_modifiers:
    QuantizationModifier:
      config_groups:
        g:
          targets: [Linear]
          weights: {num_bits: 4, type: int, symmetric: true, group_size: 128, strategy: group,
                    block_structure: null, dynamic: false, actorder: null, scale_dtype: null,
                    zp_dtype: null, observer: memoryless_minmax, observer_kwargs: {}}
          input_activations: null
          output_activations: null
          format: null
      targets: [Linear]
      ignore: []
"""


def test_what_llm_compressor_writes_next_to_a_quantized_model() -> None:
    """Its file but for the enum, which it writes as a Python object."""
    (modifier,) = Recipe.load(GROUP_TEXT).modifiers
    assert isinstance(modifier, QuantizationModifier)
    assert modifier.config_groups is not None
    assert modifier.config_groups["g"]["weights"]["group_size"] == 128
    text = "bypass_divisibility_checks: false\n      requires_calibration_data: false"
    with pytest.warns(UserWarning, match="was left out"):
        assert Recipe.load(f"{GROUP_TEXT}      {text}\n") == Recipe((modifier,))
    assert "is refused" in error_of(GROUP_TEXT.replace("type: int", "type: !!python/object/apply:a.B [int]"))
    assert "write group_size: auto" in error_of(f"{GROUP_TEXT}      {text.replace('false', 'true')}\n")


# Nothing but RecipeError

# fmt: off
WORDS = [
    "modifiers", "stages", "a_stage", "b_modifiers", "enabled", "run_type", "args", "name", "start", "group",
    "quantize", "targets", "ignore", "sparsity", "mask_structure", "apply_globally", "percdamp", "scheme",
    "config_groups", "weights", "num_bits", "group_size", "strategy", "observer", "final_sparsity",
]
CLASSES = [
    "SolverProbeModifier", "MagnitudePruningModifier", "ConstantPruningModifier", "QuantizationModifier",
]
GUESSES = ["Linear", "2:4", "W4A16", "group", "int", "oneshot", "mse", "auto", "${x}", *CLASSES]
# fmt: on
LIKELY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 256) | st.floats(-1, 2) | st.sampled_from(GUESSES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS + CLASSES), inner, max_size=4),
    max_leaves=10,
)
KEYED = st.dictionaries(st.sampled_from(CLASSES), st.dictionaries(st.sampled_from(WORDS), LIKELY, max_size=5))


@given(LIKELY, st.lists(KEYED, max_size=3))
def test_any_structure_is_read_or_refused(document: Any, modifiers: list[dict[str, Any]]) -> None:
    for form in (json.dumps(document), document, [document], {"modifiers": modifiers}):
        with warnings.catch_warnings(), contextlib.suppress(RecipeError):
            warnings.simplefilter("ignore")
            recipe = Recipe.load(form)
            assert Recipe.load(recipe.to_yaml()) == recipe
