"""Text as a tree with places: what words mean, what is refused, and that what is written is read back alike."""

from __future__ import annotations

import json
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel.modifiers.constant import ConstantPruningModifier
from sparseautomodel.recipe_text import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_SIZE,
    RecipeError,
    dump,
    nearest,
    parse,
    shown,
    tree,
)

# fmt: off
TRAPS = [
    "2:4", "0:0", "1:30:00", "2024-01-01", "yes", "no", "on", "~", "null", "1e-2", "1e5", "010", "1_000", "0x1F",
    "<<", "=", "!tag", "&a", "*a", ".nan", ".5", "5.", "+1", "", " ", "- a", "a: b", "# c", "re:.*\\d$", "1.5e3",
    "\x85", "\u2028", "\x7f", "\ufeff", "\U0001f600", "\t", "a\n", "\n a", "---", "...", "%a", "@", "`", "?", "|",
]
# fmt: on
TEXT = st.text(max_size=12) | st.sampled_from(TRAPS)
NUMBERS = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


def error_of(text: str) -> str:
    with pytest.raises(RecipeError) as error:
        parse(text, "f.yaml")
    return str(error.value)


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_what_is_written_is_read_back_here_and_by_stock_yaml(value: dict[str, Any]) -> None:
    text = dump(value)
    assert repr(parse(text, "f.yaml").plain()) == repr(value)
    assert repr(yaml.safe_load(text)) == repr(value)


@given(st.dictionaries(TEXT, VALUES, max_size=4), st.sampled_from([None, 1, "\t"]), st.booleans())
def test_json_is_read_as_json(value: dict[str, Any], indent: int | str | None, escaped: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escaped)
    assert repr(parse(text, "f.json").plain()) == repr(value)


@given(VALUES)
def test_python_values_give_the_same_tree(value: Any) -> None:
    assert repr(tree(value, "<dict>").plain()) == repr(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2:4", "2:4"),
        ("1:30:00", "1:30:00"),
        ("1:30.5", "1:30.5"),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01 10:00:00", "2024-01-01 10:00:00"),
        ("1e-2", 0.01),
        ("1E+5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("y", "y"),
        ("True", True),
        ("FALSE", False),
        ("~", None),
        ("Null", None),
        ("", None),
        ("'yes'", "yes"),
        ('"010"', "010"),
        ("!!str 12", "12"),
        ("! 12", "12"),
        ("12.5.1", "12.5.1"),
        ("1e", "1e"),
        ("=", "="),
        ('"\\ud83d\\ude00\\/"', "\U0001f600/"),
        ("!!seq [a]", ["a"]),
        ("!!map {a: b}", {"a": "b"}),
    ],
)
def test_words_are_read_as_in_yaml_1_2(text: str, value: Any) -> None:
    read = parse(f"x: {text}\n", "f.yaml").plain()["x"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yes", "Write true, or 'yes'"),
        ("On", "Write true, or 'On'"),
        ("no", "Write false, or 'no'"),
        ("Off", "Write false, or 'Off'"),
        ("010", "Write a plain decimal, or '010'"),
        ("1_000", "read 1_000 differently"),
        ("0x1F", "read 0x1F differently"),
        (".nan", ".nan is not a finite number"),
        ("-.inf", "-.inf is not a finite number"),
        ("1e999", "inf is not a finite number"),
        ("9" * 5000, "the number has more than 63 bits"),
        (str(1 << 63), "the number has more than 63 bits"),
        ('"\\ud800"', "half of a surrogate pair is not text"),
        ('"\\U99999999"', "not valid YAML"),
        ("!!python/name:os.system", "the tag '!!python/name:os.system' is refused"),
        ("!!python/object/apply:os.system [ls]", "the tag '!!python/object/apply:os.system' is refused"),
        ("!!python/module:os", "the tag '!!python/module:os' is refused"),
        ("!!binary aGk=", "the tag '!!binary' is refused"),
        ("!!int '3'", "the tag '!!int' is refused"),
        ("!!set {a}", "the tag '!!set' is refused"),
        ("!mine x", "the tag '!mine' is refused"),
        ("*nothing", "'*nothing' stands before '&nothing' is complete"),
        ("&a [*a]", "'*a' stands before '&a' is complete"),
        ("[1, 2", "not valid YAML: while parsing a flow sequence, expected ',' or ']'"),
        ("\x01", "the character '\\x01' is not allowed"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    error = error_of(f"x: {text}\n")
    assert error.startswith("f.yaml:")
    assert message in error


def test_no_object_is_built_from_a_tag(tmp_path: Path) -> None:
    """Code execution (transformers#46303). llm-compressor writes its enums as such tags: say what to write."""
    marker = tmp_path / "ran"
    for kind in ("object/apply:os.mkdir", "object/new:os.mkdir"):
        assert "is refused" in error_of(f"x: !!python/{kind} [{marker}]\n")
    assert not marker.exists()
    tag = "!!python/object/apply:compressed_tensors.quantization.quant_args.QuantizationType"
    error = error_of(f"groups:\n  type: {tag} [int]\n")
    assert error.startswith(f"f.yaml:2:9: the tag '{tag}' is refused")
    assert error.endswith("Write the plain value, for example:\n    type: int")


def test_places_are_those_of_keys_and_values() -> None:
    root = parse("a:\n  - b: {c: 1}\n    é: &x [2]\n  - *x\n", "f.yaml")
    first, second = root.value["a"].value
    assert (root.at, root.value["a"].key_at, root.value["a"].at) == ("f.yaml:1:1", "f.yaml:1:1", "f.yaml:2:3")
    c = first.value["b"].value["c"]
    assert (c.key_at, c.at) == ("f.yaml:2:9", "f.yaml:2:12")
    assert (first.value["é"].key_at, first.value["é"].at) == ("f.yaml:3:5", "f.yaml:3:8")
    assert second.at == "f.yaml:3:8"
    inner = tree({"a": [{"b": 1}]}, "<dict>").value["a"].value[0].value["b"]
    assert inner.at == inner.key_at == "<dict>.a[0].b"


def test_anchors_and_merges() -> None:
    text = "a: &t [x, y]\nb: &base {k: 1, l: *t}\nc: {<<: *base, k: 2}\nd: {<<: [{m: 1}, {m: 2, n: 3}]}\n"
    read = parse(text, "f.yaml").plain()
    assert read["c"] == {"k": 2, "l": ["x", "y"]}
    assert read["d"] == {"m": 1, "n": 3}
    assert parse('{"<<": 1}', "f.json").plain() == {"<<": 1}
    assert error_of("a: {<<: 3}\n").startswith("f.yaml:1:9: '<<' takes a mapping, got 3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml:1:1: the recipe is empty"),
        ("# only this\n", "f.yaml:1:1: the recipe is empty"),
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3:1: the key 'a' is given twice, first at f.yaml:1:1. Keep one"),
        ("x: {a: {b: 1, b: 1}}\n", "f.yaml:1:15: the key 'b' is given twice"),
        ('{"a": 1, "a": 1}', "f.yaml:1:10: the key 'a' is given twice"),
        (
            "ConstantPruningModifier:\nConstantPruningModifier:\n",
            "f.yaml:2:1: the key 'ConstantPruningModifier' is given twice, first at f.yaml:1:1. To use",
        ),
        ("---\na: 1\n---\nb: 2\n", "f.yaml:3:1: a second document begins"),
        ("3: 4\n", "f.yaml:1:1: keys are text, got 3"),
        ("~: 4\n", "f.yaml:1:1: keys are text, got None"),
        ("? [a]\n: 4\n", "f.yaml:1:3: keys are text, got a list"),
        ("? {a: b}\n: 4\n", "f.yaml:1:3: keys are text, got a mapping"),
        ("a:\n\t- b\n", "f.yaml:2:1: not valid YAML"),
        ("- !EpochRangeModifier\n  end: 0\n", "f.yaml:1:3: the tag '!EpochRangeModifier' belongs to a training"),
    ],
)
def test_mistakes_have_their_place(text: str, message: str) -> None:
    assert error_of(text).startswith(message)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in pairwise("abcdefghij")
)
MERGES = BOMB.replace("[", "{k: [").replace("]", "]}") + "z:\n  <<: [*f, *f]\n"
CHAIN = "l0: &l0 [x]\n" + "".join(f"l{i}: &l{i} [*l{i - 1}]\n" for i in range(1, 60))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(BOMB, f"more than {MAX_NODES} values once aliases are expanded", id="bomb"),
        pytest.param(MERGES, f"more than {MAX_NODES} values once aliases are expanded", id="merges"),
        pytest.param(CHAIN, f"nested deeper than {MAX_DEPTH} levels", id="chain"),
        pytest.param("[" * 100_000, f"nested deeper than {MAX_DEPTH} levels", id="brackets"),
        pytest.param('{"a":' * 100_000, f"nested deeper than {MAX_DEPTH} levels", id="braces"),
        pytest.param("- " * 100_000, f"nested deeper than {MAX_DEPTH} levels", id="dashes"),
        pytest.param("? " * 100_000, f"nested deeper than {MAX_DEPTH} levels", id="questions"),
        pytest.param("#" * (MAX_SIZE + 1), f"longer than {MAX_SIZE} characters", id="size"),
        pytest.param('["' + '\\"' * 400_000, "not valid YAML", id="quotes"),
        pytest.param("%YAML " + "1" * 10_000 + ".1\n---\na\n", "not valid YAML", id="directive"),
    ],
)
def test_hostile_text_is_bounded(text: str, message: str) -> None:
    assert message in error_of(text)


class Strategy(StrEnum):
    GROUP = "group"


def test_python_values_are_plain_and_bounded() -> None:
    read = tree({"a": (1, Strategy.GROUP), "b": ConstantPruningModifier()}, "<dict>")
    assert read.value["a"].plain() == [1, "group"]
    assert type(read.value["a"].plain()[1]) is str
    assert isinstance(read.value["b"].value, ConstantPruningModifier)
    endless: list[Any] = []
    endless.append(endless)
    for value, message in [
        (endless, f"nested deeper than {MAX_DEPTH} levels"),
        (["a"] * (MAX_NODES + 1), f"more than {MAX_NODES} values"),
        (float("nan"), "nan is not a finite number"),
        (object(), "object is not a value of a recipe"),
        (b"a", "bytes is not a value of a recipe"),
        ({1: 2}, "keys are text, got 1"),
        ("\ud800", "half of a surrogate pair is not text"),
        (1 << 70, "the number has more than 63 bits"),
    ]:
        with pytest.raises(RecipeError, match=message) as error:
            tree({"x": value}, "<dict>")
        assert str(error.value).startswith("<dict>.x")


def test_text_for_messages() -> None:
    assert shown(tree({"a": ["2:4", None, 1e-5]}, "")) == "{a: ['2:4', null, 1.0e-05]}"
    assert shown(tree(["x" * 80], "")) == "..."
    assert nearest("WEIGHT", ["height", "weights", "q"]) == ["weights", "height"]
    assert nearest("zzz", ["a"]) == []
