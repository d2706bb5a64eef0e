"""What the user asks for, in any form, as one ordered list of modifiers.

    modifiers:
      - MagnitudePruningModifier:
          mask_structure: "2:4"
      - QuantizationModifier:
          scheme: W4A16

A mistake is a `RecipeError` before any model is opened: its place, the nearest valid name, the text to write.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparseautomodel import recipe_compat, recipe_text
from sparseautomodel.modifiers import MODIFIERS, Modifier, ModifierError
from sparseautomodel.recipe_text import Node, RecipeError

__all__ = ["Recipe", "RecipeError", "shipped"]

_LONGEST_PATH = 4096
_SUFFIXES = (".yaml", ".yml", ".json", ".md")
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """What is done to a checkpoint, in order. Two recipes are equal when their modifiers are.

    >>> Recipe.load("w4a16") == Recipe.load({"modifiers": [{"QuantizationModifier": {...}}]})
    """

    modifiers: tuple[Modifier, ...]
    source: str | None = field(default=None, compare=False, repr=False)
    """The text exactly as given, comments included (of a Markdown file, its front matter), or None."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modifiers", tuple(self.modifiers))
        if not self.modifiers:
            raise RecipeError(f"the recipe has no modifiers. Write for example:\n{recipe_text.EXAMPLE}")
        for modifier in self.modifiers:
            if not isinstance(modifier, Modifier):
                raise RecipeError(f"{modifier!r} is not a Modifier. Recipe.load reads text, dicts and lists")

    @classmethod
    def load(cls, form: Any) -> Recipe:
        """The recipe that `form` gives.

        `form` is the path of a `.yaml`, `.yml`, `.json` or `.md` file (of `.md` the front matter is read),
        YAML or JSON text, the name of a shipped recipe, a dict, a `Modifier`, a list of modifiers or dicts,
        or a `Recipe`. Documents of llm-compressor and SparseML are read as well; what has been renamed since
        warns. Raises `RecipeError` for everything else.
        """
        if isinstance(form, Recipe):
            return form
        if isinstance(form, Modifier):
            return cls((form,))
        if isinstance(form, os.PathLike):
            return cls._from_file(os.fsdecode(form))
        if isinstance(form, str):
            return cls._from_string(form)
        if isinstance(form, Mapping):
            return cls._from_tree(recipe_text.tree(form, "<dict>"))
        if isinstance(form, (list, tuple)):
            return cls._from_tree(recipe_text.tree(form, "<list>"))
        raise RecipeError(
            "a recipe is a path, YAML text, the name of a shipped recipe, a dict, a list of modifiers or a "
            f"Recipe, got {type(form).__name__}"
        )

    def to_yaml(self) -> str:
        """The recipe as YAML of this library's own form; it loads back to an equal recipe."""
        return recipe_text.dump(recipe_text.tree(self.to_dict(), "<recipe>").plain())

    def to_dict(self) -> dict[str, Any]:
        """`{"modifiers": [{class name: keys that differ from their defaults}, ...]}`."""
        return {"modifiers": [{type(modifier).__name__: modifier.to_dict()} for modifier in self.modifiers]}

    @classmethod
    def _from_string(cls, form: str) -> Recipe:
        line = form.strip()
        if "\n" in line or line.startswith(("{", "[")) or len(line) > _LONGEST_PATH:
            return cls._from_text(form, "<text>")
        if line in shipped():
            return cls._from_file(str(shipped()[line]))
        if line.lower().endswith(_SUFFIXES) or os.path.isfile(line):
            return cls._from_file(line)
        if not line or ": " in line or line.endswith(":") or line.startswith(("- ", "#", "!", "&", "%", "---")):
            return cls._from_text(form, "<text>")
        raise _not_found(line)

    @classmethod
    def _from_file(cls, path: str) -> Recipe:
        if not os.path.isfile(path):
            raise _not_found(path)
        if not path.lower().endswith(_SUFFIXES):
            raise RecipeError(f"{path}: a recipe file ends in {', '.join(_SUFFIXES)}")
        try:
            with open(path, "rb") as file:
                content = file.read(recipe_text.MAX_SIZE + 1)
            if len(content) > recipe_text.MAX_SIZE:
                raise RecipeError(f"{path}: longer than {recipe_text.MAX_SIZE} bytes. A recipe is a few lines")
            text = content.decode("utf-8-sig")
        except OSError as error:
            raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
        if not path.lower().endswith(".md"):
            return cls._from_text(text, path)
        matter = _FRONT_MATTER.match(text)
        if matter is None:
            raise RecipeError(f"{path}:1:1: no recipe between two lines of '---' at the top of the Markdown file")
        # The blank lines keep the line numbers of the file.
        recipe = cls._from_text("\n" * text.count("\n", 0, matter.start(1)) + matter[1], path)
        return dataclasses.replace(recipe, source=matter[1])

    @classmethod
    def _from_text(cls, text: str, name: str) -> Recipe:
        return dataclasses.replace(cls._from_tree(recipe_text.parse(text, name)), source=text)

    @classmethod
    def _from_tree(cls, document: Node) -> Recipe:
        modifiers = [_build(name, node) for name, node in recipe_compat.entries(document)]
        if not modifiers:
            raise RecipeError(
                f"{document.at}: nothing is left to do: no modifiers, or every stage has enabled: false. "
                f"Write for example:\n{recipe_text.EXAMPLE}"
            )
        return cls(tuple(modifiers))


def shipped() -> dict[str, Path]:
    """The recipes that come with the package: name to file."""
    files = {path.stem: path for path in _shipped_folder().glob("*.yaml")}
    return dict(sorted(files.items()))


def _shipped_folder() -> Path:
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def _build(name: str, node: Node) -> Modifier:
    if isinstance(node.value, Modifier):
        return node.value
    cls = MODIFIERS[name]
    keys = recipe_compat.current_keys(cls, node.value or {})
    known = cls.keys()
    for key, value in keys.items():
        if key not in known:
            raise recipe_text.unknown(f"key '{key}' of {name}", key, value, known)
    for item in dataclasses.fields(cls):
        if item.default is item.default_factory is dataclasses.MISSING and item.name not in keys:
            raise RecipeError(f"{node.key_at}: {name} needs '{item.name}'. Write:\n    {item.name}: ...")
    plain = {key: value.plain() for key, value in keys.items()}
    try:
        modifier = cls(**plain)
        _check_patterns(modifier)
        return modifier
    except ModifierError as error:
        raise RecipeError(f"{_place(node, keys, error.key)}: {name}: {error}") from error
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        # A modifier's own checks can trip over a value of a type that they do not expect.
        raise RecipeError(f"{node.key_at}: {name}: {error}") from error


def _check_patterns(modifier: Modifier) -> None:
    for key, patterns in (("targets", modifier.patterns()), ("ignore", modifier.ignore)):
        for pattern in patterns:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise ModifierError(key, f"{pattern!r} is no regular expression: {error}") from error


def _place(entry: Node, keys: dict[str, Node], key: str | None) -> str:
    """Where the value of `key` stands; of `config_groups.group_0.weights`, as far as the text goes."""
    place, level = entry.key_at, keys
    for part in (key or "").split("."):
        if part not in level:
            break
        place = level[part].at
        level = level[part].value if isinstance(level[part].value, dict) else {}
    return place


def _not_found(form: str) -> RecipeError:
    names = list(shipped())
    near = recipe_text.nearest(Path(form).stem, names)
    hint = f"Did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
    known = f"{hint}Shipped recipes: {', '.join(names)}."
    if not form.lower().endswith(_SUFFIXES) and "/" not in form and os.sep not in form:
        return RecipeError(
            f"there is no shipped recipe '{form}'. {known} A file is given by its path, ending in "
            f"{', '.join(_SUFFIXES)}"
        )
    tried = [os.path.abspath(form), str(_shipped_folder() / Path(form).name)]
    return RecipeError(f"no recipe file '{form}'. Looked for:\n    " + "\n    ".join(tried) + f"\n{known}")
