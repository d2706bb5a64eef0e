"""The recipe language: every form gives one object, every mistake gives its place and the text to write."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel.modifiers import MODIFIERS, Modifier, ModifierError
from sparseautomodel.recipe import Recipe, RecipeError, shipped
from sparseautomodel.recipe_text import MAX_SIZE


@dataclass(frozen=True, kw_only=True)
class ProbeModifier(Modifier):
    strength: float = 0.5
    label: str | None = None
    fast: bool = False
    groups: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.strength <= 1:
            raise ModifierError("strength", f"strength must be from 0 to 1, got {self.strength}")
        if self.groups and "bad" in self.groups.get("inner", {}):
            raise ModifierError("groups.inner.bad", "bad is not allowed")


@dataclass(frozen=True, kw_only=True)
class NeedyProbeModifier(Modifier):
    amount: float


PROBES = {name: MODIFIERS.pop(name) for name in ("ProbeModifier", "NeedyProbeModifier")}


@pytest.fixture(autouse=True, scope="module")
def probes() -> Iterator[None]:
    """The modifiers of this file are in the table while its tests run, and only then."""
    MODIFIERS.update(PROBES)
    yield
    for name in PROBES:
        del MODIFIERS[name]


def error_of(form: Any) -> str:
    with pytest.raises(RecipeError) as error:
        Recipe.load(form)
    return str(error.value)


def lines(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


# One recipe, every form

TEXT = st.text(max_size=8).filter(lambda text: "${" not in text and "eval" not in text) | st.sampled_from(
    ["2:4", "yes", "1e-2", "010", "2024-01-01", "~", "", "<<", "re:.*\\d$", "\x85\u2028", "\U0001f600"]
)
NUMBERS = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.lists(TEXT.filter(lambda text: not text.endswith(".weight")), max_size=3)
WEIGHTS = {"num_bits": st.integers(2, 8), "strategy": st.just("group"), "group_size": st.sampled_from([32, "auto"])}
GROUP = {
    "targets": st.just(["Linear"]),
    "weights": st.fixed_dictionaries(WEIGHTS, optional={"symmetric": st.booleans()}),
}
OBSERVERS = {"observer": st.sampled_from(["minmax", "mse"]), "skip_indivisible": st.booleans()}
SIZES = {"group_size": st.sampled_from(["auto", -1, 32])} | OBSERVERS
PROBE = {
    "targets": NAMES.filter(len),
    "ignore": NAMES,
    "strength": st.floats(0, 1) | st.integers(0, 1),
    "label": st.none() | TEXT,
    "fast": st.booleans(),
    "groups": st.none() | st.dictionaries(TEXT, VALUES, max_size=3),
}


def entry(name: str, required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(required, optional=optional))


ENTRIES = st.lists(
    entry("ProbeModifier", {}, PROBE)
    | entry("NeedyProbeModifier", {"amount": st.booleans() | NUMBERS | TEXT}, {})
    | entry("ConstantPruningModifier", {}, {"ignore": NAMES})
    | entry("MagnitudePruningModifier", {"sparsity": st.floats(0.01, 1)}, {"apply_globally": st.booleans()})
    | entry("QuantizationModifier", {"scheme": st.sampled_from(["W4A16", "w8a16"])}, SIZES)
    | entry("QuantizationModifier", {"scheme": st.sampled_from(["W8A8", "FP8_DYNAMIC"])}, OBSERVERS)
    | entry("QuantizationModifier", {"config_groups": st.fixed_dictionaries({"a": st.fixed_dictionaries(GROUP)})}, {}),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@given(entries=ENTRIES)
def test_every_form_gives_one_equal_recipe(entries: list[tuple[str, dict[str, Any]]], folder: Path) -> None:
    objects = [MODIFIERS[name](**keys) for name, keys in entries]
    native = {"modifiers": [{name: keys} for name, keys in entries]}
    expected = Recipe(tuple(objects))
    (folder / "r.yaml").write_text(expected.to_yaml(), encoding="utf-8")
    (folder / "r.json").write_text(json.dumps(native), encoding="utf-8")
    (folder / "r.md").write_text(f"---\n{expected.to_yaml()}---\n# A card\n---\n", encoding="utf-8")
    staged = {
        f"s{i}_stage": {"run_type": "oneshot", f"g{i}_modifiers": {name: keys}}
        for i, (name, keys) in enumerate(entries)
    }
    forms = {
        "Recipe": expected,
        "objects": objects,
        "dict": native,
        "list of dicts": native["modifiers"],
        "mixed list": [objects[0], *native["modifiers"][1:]],
        "own YAML": expected.to_yaml(),
        "own dict": expected.to_dict(),
        "JSON": json.dumps(native),
        "JSON with tabs and raw characters": json.dumps(native, indent="\t", ensure_ascii=False),
        "staged": staged,
        "staged JSON": json.dumps(staged),
        "YAML file": str(folder / "r.yaml"),
        "JSON path": folder / "r.json",
        "Markdown": folder / "r.md",
    }
    for form, value in forms.items():
        assert Recipe.load(value) == expected, form


def test_one_modifier_and_an_entry_without_keys() -> None:
    expected = Recipe((ProbeModifier(),))
    for form in (
        ProbeModifier(),
        ["ProbeModifier"],
        {"modifiers": ["ProbeModifier"]},
        "modifiers: [ProbeModifier]",
        "modifiers:\n- ProbeModifier:",
        "modifiers:\n- ProbeModifier: {}",
        "- ProbeModifier",
    ):
        assert Recipe.load(form) == expected
    assert expected.to_yaml() == "modifiers:\n  - ProbeModifier: {}\n"


def test_to_yaml_is_the_native_form() -> None:
    recipe = Recipe((ProbeModifier(targets=["re:.*q_proj$", "Linear"], label="2:4"), NeedyProbeModifier(amount=1e-5)))
    assert recipe.to_yaml() == lines(
        r"""
        modifiers:
          - ProbeModifier:
              targets: ['re:.*q_proj$', Linear]
              label: '2:4'
          - NeedyProbeModifier:
              amount: 1.0e-05
        """
    )


def test_source_is_the_text_as_given(tmp_path: Path) -> None:
    text = "# why\r\nmodifiers: [ProbeModifier]  # all\r\n"
    (tmp_path / "a.yaml").write_bytes(text.encode())
    (tmp_path / "a.md").write_text("\n---\n# why\nmodifiers: [ProbeModifier]\n---\nbody: [\n")
    assert Recipe.load(text).source == text
    assert Recipe.load(tmp_path / "a.yaml").source == text
    assert Recipe.load(tmp_path / "a.md").source == "# why\nmodifiers: [ProbeModifier]\n"
    assert Recipe.load(ProbeModifier()).source is None
    assert Recipe.load(text) == Recipe.load(ProbeModifier())


def test_metadata_is_free_text_and_does_not_count() -> None:
    plain = Recipe.load("modifiers: [ProbeModifier]")
    assert Recipe.load("name: x\nversion: 1.0\ndescription: |\n  a\n  b: c\nmodifiers: [ProbeModifier]\n") == plain
    assert "'name' is free text" in error_of("name: [a]\nmodifiers: [ProbeModifier]\n")


# Mistakes


@pytest.mark.parametrize(
    ("text", "place", "parts"),
    [
        ("", "1:1", ["the recipe is empty", "modifiers:\n"]),
        ("# only this\n", "1:1", ["the recipe is empty"]),
        ("3", None, ["no shipped recipe '3'"]),
        ("{}", "1:1", ["nothing is left to do"]),
        ("name: x\n", "1:1", ["nothing is left to do"]),
        ("[]", "1:1", ["no list of modifiers but []"]),
        ("modifiers:\n", "1:11", ["no list of modifiers but null"]),
        ("modifiers: 3\n", "1:12", ["no list of modifiers but 3"]),
        ("modifiers: [3]\n", "1:13", ["an entry is `- ClassName: {keys}`, got 3"]),
        (
            "modifiers:\n  - ProbeModifier: [a]\n",
            "2:20",
            ["the keys of ProbeModifier are a mapping, got [a]"],
        ),
        (
            "modifers:\n  - ProbeModifier\n",
            "1:1",
            ["unknown top-level key 'modifers'", "    modifiers: [ProbeModifier]"],
        ),
        ("steps: 3\n", "1:1", ["unknown top-level key 'steps'", "variables are not supported"]),
        (
            "modifiers:\n  - ProbModifier:\n",
            "2:5",
            ["unknown modifier 'ProbModifier'", "    ProbeModifier:\n", "Allowed: "],
        ),
        ("modifiers: [probemodifier]\n", "1:13", ["Did you mean 'ProbeModifier'"]),
        ("modifiers: [os.system]\n", "1:13", ["unknown modifier 'os.system'"]),
        ("ProbeModifer:\n  label: a\n", "1:1", ["unknown top-level key", "    ProbeModifier: {label: a}"]),
        (
            "modifiers:\n  - ProbeModifier:\n      strenght: 0.25\n",
            "3:7",
            [
                "unknown key 'strenght' of ProbeModifier. Did you mean 'strength'? Write:\n",
                "    strength: 0.25\n",
                "Allowed: targets",
            ],
        ),
        (
            "modifiers:\n- ProbeModifier: {qqq: 1}\n",
            "2:19",
            ["unknown key 'qqq' of ProbeModifier. Allowed: targets, ignore"],
        ),
        (
            "modifiers:\n- ProbeModifier:\n  label: a\n",
            "3:3",
            ["'label' stands beside ProbeModifier", "  label: a"],
        ),
        ("ProbeModifier:\nlabel: a\n", "2:1", ["'label' stands beside ProbeModifier"]),
        (
            "modifiers:\n- ProbeModifier:\n    strength: 1.5\n",
            "3:15",
            ["strength must be from 0 to 1, got 1.5"],
        ),
        ("modifiers:\n- ProbeModifier:\n    strength: a\n", "2:3", ["ProbeModifier: '<=' not supported"]),
        (
            "modifiers:\n- ProbeModifier:\n    targets: 3\n",
            "3:14",
            ["targets must be a list of names, got 3"],
        ),
        (
            "modifiers:\n- ProbeModifier:\n    groups:\n      inner: {bad: 7}\n",
            "4:20",
            ["bad is not allowed"],
        ),
        (
            "modifiers: [NeedyProbeModifier]\n",
            "1:13",
            ["NeedyProbeModifier needs 'amount'. Write:\n    amount: "],
        ),
        ("m_modifiers:\n  ProbeModifier: {}\n  ProbeModifier: {}\n", "3:3", ["make `modifiers:` a list"]),
        ("modifiers: [ProbeModifier\n", "2:1", ["not valid YAML", "expected ',' or ']'"]),
    ],
)
def test_mistakes_give_place_and_correction(text: str, place: str | None, parts: list[str]) -> None:
    error = error_of(text)
    if place is not None:
        assert error.startswith(f"<text>:{place}: "), error
    for part in parts:
        assert part in error


def test_the_place_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n\nmodifiers:\n  - ProbeModifier:\n      fst: true\n"
    Path("a.yaml").write_text(text)
    Path("b.md").write_text(f"---{text}---\n# Card\n")
    assert error_of("a.yaml").startswith(
        "a.yaml:5:7: unknown key 'fst' of ProbeModifier. Did you mean 'fast'? Write:\n    fast: true"
    )
    assert error_of(Path("a.yaml")).startswith("a.yaml:5:7: ")
    assert error_of("b.md").startswith("b.md:5:7: ")
    assert error_of({"modifiers": [{"ProbeModifier": {"fst": 1}}]}).startswith(
        "<dict>.modifiers[0].ProbeModifier.fst: unknown"
    )
    assert error_of([{"ProbeModifier": {"fst": 1}}]).startswith("<list>[0].ProbeModifier.fst: unknown")


def test_a_missing_file_lists_the_places_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sparseml#1530: a relative path from another folder."""
    monkeypatch.chdir(tmp_path)
    for form in ("w4a16.yaml", "sub/w4a16.json", Path("w4a16.yml"), "sub/w4a16", "./w4a16.md"):
        error = error_of(form)
        assert str(tmp_path / form) in error
        assert f"{shipped()['w4a16'].parent / Path(form).name}" in error
        assert "Did you mean 'w4a16'" in error
    Path("w4a16.yaml").write_text("modifiers: [ProbeModifier]")
    assert Recipe.load("w4a16.yaml") == Recipe((ProbeModifier(),))
    Path("folder.yaml").mkdir()
    assert "no recipe file" in error_of("folder.yaml")


def test_a_bare_word_is_the_name_of_a_shipped_recipe() -> None:
    assert Recipe.load("2of4") == Recipe.load(shipped()["2of4"]) == Recipe.load(str(shipped()["2of4"]))
    error = error_of("W4A61")
    assert error.startswith("there is no shipped recipe 'W4A61'. Did you mean 'w4a16'")
    assert ", ".join(shipped()) in error
    assert list(shipped()) == sorted(shipped())
    assert "no shipped recipe 'W4A16'. Did you mean 'w4a16'" in error_of("W4A16")


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_load_and_round_trip(name: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.source == shipped()[name].read_text(encoding="utf-8")
    assert Recipe.load(recipe.to_yaml()) == recipe


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    for name, content, message in [
        ("a.txt", b"modifiers: [ProbeModifier]", "a recipe file ends in .yaml, .yml, .json, .md"),
        ("b.yaml", b"\xff\xfea\x00", "is not UTF-8 text"),
        ("c.yaml", "é".encode() * MAX_SIZE, "longer than"),
        ("d.md", b"# Card\n", "no recipe between two lines of '---'"),
        ("e.md", b"---\nmodifiers: [ProbeModifier]\n", "no recipe between two lines of '---'"),
        ("f.yaml", b"", "the recipe is empty"),
    ]:
        (tmp_path / name).write_bytes(content)
        error = error_of(tmp_path / name)
        assert error.startswith(str(tmp_path / name))
        assert message in error
    (tmp_path / "g.yaml").write_bytes(b"\xef\xbb\xbfmodifiers: [ProbeModifier]")
    assert Recipe.load(tmp_path / "g.yaml") == Recipe((ProbeModifier(),))


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "a.yaml").touch()
    monkeypatch.setattr("sparseautomodel.recipe.open", fail, raising=False)
    assert error_of(tmp_path / "a.yaml") == f"{tmp_path / 'a.yaml'}: cannot be read: Permission denied"


def test_other_values_are_refused() -> None:
    for form in (None, 3, b"modifiers: []", {1}, iter([])):
        assert error_of(form).startswith("a recipe is a path, YAML text")
    for modifiers in ((), ("ProbeModifier",)):
        with pytest.raises(RecipeError):
            Recipe(modifiers)
    assert "no list of modifiers" in error_of([])


# Nothing but RecipeError


def load_or_refuse(form: Any) -> None:
    with warnings.catch_warnings(), contextlib.suppress(RecipeError):
        warnings.simplefilter("ignore")
        recipe = Recipe.load(form)
        assert Recipe.load(recipe.to_yaml()) == recipe


SEED_TEXTS = [
    "modifiers:\n  - ProbeModifier: &a\n      targets: [a, 're:b$']\n      groups: {x: 1e-2, y: ~}\n"
    "  - ProbeModifier: *a\n",
    'a_stage:\n  run_type: oneshot\n  b_modifiers:\n    ProbeModifier: {label: "\\u00e9", <<: {fast: true}}\n',
    '{"modifiers": [{"MagnitudePruningModifier": {"sparsity": 0.5, "targets": "Linear"}}, "ProbeModifier"]}',
    "%YAML 1.1\n---\nstages:\n- modifiers: [ProbeModifier]\n  enabled: true\nname: !!str |\n  x\n...\n",
]
YAML_MARKS = st.text(alphabet="ab:-[]{},&*!|>%@`'\"#?~0129.e_ \n\t\\<=", max_size=8)


@given(st.sampled_from(SEED_TEXTS), st.integers(0, 150), st.integers(0, 20), YAML_MARKS | st.text(max_size=3))
def test_any_text_is_read_or_refused(text: str, start: int, length: int, new: str) -> None:
    load_or_refuse(new)
    load_or_refuse(new + "\n")
    load_or_refuse(text[:start] + new + text[start + length :])


@pytest.mark.parametrize("key", ["targets", "ignore"])
def test_a_pattern_that_is_no_regular_expression(key: str) -> None:
    text = f'modifiers:\n- MagnitudePruningModifier:\n    mask_structure: "2:4"\n    {key}: ["re:(*"]\n'
    assert re.match(r"<text>:4:\d+: MagnitudePruningModifier: 're:\(\*' is no regular expression", error_of(text))
