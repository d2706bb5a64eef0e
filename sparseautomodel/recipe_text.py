"""YAML, JSON or Python values as a tree in which every value knows where it stands; and values as YAML.

YAML is read from its events, so nothing is built from a tag; size, depth and alias expansion are bounded.
Words are read as in YAML 1.2: `2:4`, `1:30:00` and `2024-01-01` are text, `1e-2` is a number. What YAML 1.1
and 1.2 read differently (`yes`, `010`, `1_000`) is refused.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import yaml

from sparseautomodel.modifiers import MODIFIERS, Modifier

MAX_SIZE = 1 << 20
"""Longest text, in characters (bytes in a file)."""
MAX_DEPTH = 32
MAX_NODES = 100_000
"""Most values in one recipe, counted after aliases are expanded."""
EXAMPLE = "    modifiers:\n      - QuantizationModifier:\n          scheme: W4A16"

_CORE = "tag:yaml.org,2002:"
_KINDS = {yaml.ScalarEvent: "str", yaml.SequenceStartEvent: "seq", yaml.MappingStartEvent: "map"}
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_OLD_BOOL = re.compile(r"yes|Yes|YES|on|On|ON|no|No|NO|off|Off|OFF")
_OLD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|0[box][0-9a-fA-F_]+|[1-9][0-9]*_[0-9_]*(\.[0-9_]*)?)")
_JSON_STRING_OR_TAB = re.compile(r'"(?:[^"\\]|\\.)*"?|\t', re.DOTALL)
_RAW_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029\ufffe\uffff]")


class RecipeError(ValueError):
    """What is wrong with a recipe, where (`file:line:column`, or the path of a key), and what to write."""


@dataclass(frozen=True)
class Node:
    """One value of a recipe and its place."""

    value: Any
    """`dict[str, Node]`, `list[Node]`, `str`, `int`, `float`, `bool`, `None`, or a `Modifier`."""
    at: str
    """`w4a16.yaml:3:7`, or `<dict>.modifiers[0].QuantizationModifier.group_size` for Python values."""
    key_at: str = ""
    """Place of the key that leads to this value."""
    height: int = 1

    def plain(self) -> Any:
        """The value without places, as YAML has it."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        if isinstance(self.value, Modifier):
            raise RecipeError(f"{self.at}: a {type(self.value).__name__} cannot be the value of a key")
        return self.value


def parse(text: str, name: str) -> Node:
    """The tree of one YAML or JSON document; `name` begins every place. Raises RecipeError only."""
    if len(text) > MAX_SIZE:
        raise RecipeError(f"{name}: longer than {MAX_SIZE} characters. A recipe is a few lines of YAML")
    if text.lstrip()[:1] in ("{", "["):
        text = _JSON_STRING_OR_TAB.sub(_as_yaml, text)
    return _Reader(text, name).document()


def tree(value: Any, at: str) -> Node:
    """The same for Python values: mappings, lists, tuples, scalars, modifiers. `at` begins every place."""
    count = 0

    def node(value: Any, at: str, depth: int) -> Node:
        nonlocal count
        count += 1
        _check_bounds(count, depth, at)
        value = value.value if isinstance(value, Enum) else value
        if isinstance(value, Mapping):
            items = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    raise RecipeError(f"{at}: keys are text, got {key!r}")
                place = f"{at}.{_checked(key, at)}"
                items[str(key)] = replace(node(item, place, depth + 1), key_at=place)
            return Node(items, at)
        if isinstance(value, (list, tuple)):
            return Node([node(item, f"{at}[{i}]", depth + 1) for i, item in enumerate(value)], at)
        return Node(_checked(value, at), at)

    return node(value, at, 1)


def dump(value: Any) -> str:
    """Plain values as YAML that this module, PyYAML and YAML 1.2 parsers read alike."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def shown(node: Node) -> str:
    """The value on one short line of YAML, for the corrected text in a message; `...` if it is long."""
    if isinstance(node.value, Modifier):
        return type(node.value).__name__
    value = node.plain()
    if len(str(value)) > 60:
        return "..."
    line = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6)
    return line.removesuffix("...\n").strip()


def unknown(what: str, key: str, node: Node, options: Sequence[str]) -> RecipeError:
    """The error for a key that is none of `options`: the nearest of them, and the line to write instead."""
    near = nearest(key, options)
    hint = ""
    if near:
        value = "" if node.value is None else f" {shown(node)}"
        hint = f" Did you mean {' or '.join(map(repr, near))}? Write:\n    {near[0]}:{value}\n"
    return RecipeError(f"{node.key_at}: unknown {what}.{hint or ' '}Allowed: {', '.join(options)}")


def nearest(name: str, options: Sequence[str]) -> list[str]:
    """Up to three of `options` that are spelled like `name`, the nearest first, whatever the case."""
    spelled = {option.lower(): option for option in options}
    return [spelled[low] for low in difflib.get_close_matches(name.lower(), spelled, n=3, cutoff=0.6)]


class _Reader:
    """Composes the tree from YAML events, one at a time: a hostile text is left where it breaks a bound."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.count = 0
        self.anchors: dict[str, tuple[Node, int]] = {}
        try:
            self.loader = yaml.SafeLoader(text)
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            column = error.position - text.rfind("\n", 0, error.position)
            character = text[error.position]
            raise RecipeError(f"{name}:{line}:{column}: the character {character!r} is not allowed") from error

    def document(self) -> Node:
        self._next()
        if isinstance(self._next(), yaml.StreamEndEvent):
            raise RecipeError(f"{self.name}:1:1: the recipe is empty. Write for example:\n{EXAMPLE}")
        root = self._node(self._next(), 1)
        self._next()
        following = self._next()
        if not isinstance(following, yaml.StreamEndEvent):
            raise RecipeError(f"{self._at(following)}: a second document begins. A recipe is one document")
        return root

    def _next(self) -> Any:
        try:
            return self.loader.get_event()
        except yaml.MarkedYAMLError as error:
            what = ", ".join(part for part in (error.context, error.problem) if part)
            raise RecipeError(f"{self._place(error.problem_mark)}: not valid YAML: {what}") from error
        except (ValueError, OverflowError) as error:
            # PyYAML lets `chr` and `int` fail on "\U99999999" and on a directive with thousands of digits.
            raise RecipeError(f"{self._place(self.loader.get_mark())}: not valid YAML: {error}") from error

    def _node(self, event: Any, depth: int) -> Node:
        at = self._at(event)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise RecipeError(f"{at}: '*{event.anchor}' stands before '&{event.anchor}' is complete")
            node, size = self.anchors[event.anchor]
            self.count += size
            _check_bounds(self.count, depth + node.height - 1, at)
            return node
        before = self.count
        self.count += 1
        _check_bounds(self.count, depth, at)
        self._refuse_tag(event, at)
        if isinstance(event, yaml.ScalarEvent):
            node = Node(self._scalar(event, at), at)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._sequence(at, depth)
        else:
            node = self._mapping(at, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (node, self.count - before)
        return node

    def _sequence(self, at: str, depth: int) -> Node:
        items = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return Node(items, at, height=1 + max((item.height for item in items), default=0))

    def _mapping(self, at: str, depth: int) -> Node:
        items: dict[str, Node] = {}
        merged: list[Node] = []
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key_at = self._at(event)
            if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.style is None:
                merged.append(self._node(self._next(), depth + 1))
                continue
            key = self._node(event, depth + 1).value
            if not isinstance(key, str):
                raise RecipeError(f"{key_at}: keys are text, got {_kind(key)}. Put it in quotes")
            if key in items:
                hint = "To use a modifier twice, make `modifiers:` a list" if key in MODIFIERS else "Keep one"
                first = items[key].key_at
                raise RecipeError(f"{key_at}: the key '{key}' is given twice, first at {first}. {hint}")
            items[key] = replace(self._node(self._next(), depth + 1), key_at=key_at)
        for node in merged:
            for part in node.value if isinstance(node.value, list) else [node]:
                if not isinstance(part.value, dict):
                    raise RecipeError(f"{part.at}: '<<' takes a mapping, got {_kind(part.value)}")
                for key, item in part.value.items():
                    items.setdefault(key, item)
        return Node(items, at, height=1 + max((item.height for item in items.values()), default=0))

    def _scalar(self, event: yaml.ScalarEvent, at: str) -> Any:
        text = event.value
        if event.style is None and event.tag is None:
            return _word(text, at)
        # JSON writes characters beyond U+FFFF as two escapes.
        return _checked(text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass"), at)

    def _refuse_tag(self, event: Any, at: str) -> None:
        if event.tag in (None, "!", _CORE + _KINDS[type(event)]):
            return
        tag = event.tag.replace(_CORE, "!!")
        if tag.startswith("!") and tag.endswith("Modifier"):
            raise RecipeError(
                f"{at}: the tag '{tag}' belongs to a training recipe of SparseML. Training recipes are not "
                f"read: this library compresses in one shot. Write for example:\n{EXAMPLE}"
            )
        raise RecipeError(
            f"{at}: the tag '{tag}' is refused: nothing is built or run from a recipe. Write the plain "
            "value, for example:\n    type: int"
        )

    def _at(self, event: Any) -> str:
        return self._place(event.start_mark)

    def _place(self, mark: Any) -> str:
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}"


class _Dumper(yaml.SafeDumper):
    """Block style with lists of words on one line, indented lists, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_list(dumper: _Dumper, data: list[Any]) -> yaml.Node:
    nested = any(isinstance(item, (list, dict)) for item in data)
    return dumper.represent_sequence(f"{_CORE}seq", data, flow_style=dumper.default_flow_style or not nested)


def _represent_str(dumper: _Dumper, data: str) -> yaml.Node:
    # Left to itself PyYAML folds U+0085 and the like into spaces.
    return dumper.represent_scalar(f"{_CORE}str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_str)
# Quotes what only YAML 1.2 takes for a number; PyYAML itself quotes what 1.1 does.
_Dumper.add_implicit_resolver("!", re.compile(f"({_FLOAT.pattern}|{_OLD_NUMBER.pattern})$"), list("+-.0123456789"))


def _check_bounds(count: int, depth: int, at: str) -> None:
    if depth > MAX_DEPTH:
        raise RecipeError(f"{at}: nested deeper than {MAX_DEPTH} levels")
    if count > MAX_NODES:
        raise RecipeError(f"{at}: more than {MAX_NODES} values once aliases are expanded")


def _as_yaml(json: re.Match[str]) -> str:
    """JSON is YAML but for tabs between its parts and some characters that YAML wants escaped in strings."""
    if json[0] == "\t":
        return " "
    return _RAW_IN_JSON.sub(lambda character: f"\\u{ord(character[0]):04x}", json[0])


def _word(text: str, at: str) -> Any:
    """What an unquoted word stands for."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _OLD_BOOL.fullmatch(text):
        meant = "true" if text.lower() in ("yes", "on") else "false"
        raise RecipeError(
            f"{at}: {text} is a truth value in YAML 1.1 and a word in YAML 1.2. Write {meant}, or '{text}'"
        )
    if _OLD_NUMBER.fullmatch(text):
        raise RecipeError(
            f"{at}: YAML 1.1 and 1.2 read {text} differently. Write a plain decimal, or '{text}' for the word"
        )
    if _NOT_FINITE.fullmatch(text):
        raise RecipeError(f"{at}: {text} is not a finite number")
    if _INT.fullmatch(text):
        # What is cut off belongs to a number that is too large anyway; `int` fails on thousands of digits.
        return _checked(int(text[:24]), at)
    return _checked(float(text) if _FLOAT.fullmatch(text) else text, at)


def _checked(value: Any, at: str) -> Any:
    """A scalar that YAML can hold and that equals itself, without subclasses; a modifier as it is."""
    if value is None or isinstance(value, (bool, Modifier)):
        return value
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise RecipeError(f"{at}: half of a surrogate pair is not text: {value!r}")
        return str(value)
    if isinstance(value, int):
        if abs(value) >= 1 << 63:
            raise RecipeError(f"{at}: the number has more than 63 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecipeError(f"{at}: {value} is not a finite number")
        return float(value)
    raise RecipeError(f"{at}: {type(value).__name__} is not a value of a recipe. Use text, numbers, lists and mappings")


def _kind(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
