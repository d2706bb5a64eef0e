"""The two ends of the command line: what several commands take, and how results, warnings and errors are shown.

Nothing here imports torch at the top: commands that do not need it answer at once.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from sparseautomodel.plan import Plan
    from sparseautomodel.recipe import Recipe

Source = Annotated[str, typer.Argument(metavar="PATH", help="Folder or hub id of a checkpoint.")]
RecipeForm = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or a YAML, JSON or Markdown file.")
]
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", metavar="RECIPE", help="Compress by this recipe while loading.")
]
Subfolder = Annotated[str | None, typer.Option(metavar="NAME", help="Folder inside PATH that holds the model.")]
Revision = Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a hub repository.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Requantize = Annotated[
    bool, typer.Option("--requantize", help="Decode a checkpoint that is compressed already and do it anew.")
]
Execution = Annotated[
    Literal["auto", "compressed", "dense"],
    typer.Option(help="How compressed layers run: fastest, a layer dequantized at a time, or dequantized at load."),
]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="Such as cuda or cuda:1.  [default: cpu]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")]

_UNLIMITED = 10_000
_NUMBER = re.compile(r"[\d.,]*( [kMGT]?B)?")
_GAP = "  "


class Result(Protocol):
    """What functions of this library return: made for people as text, for programs as a dict."""

    def to_dict(self) -> dict[str, Any]: ...


@contextlib.contextmanager
def working(as_json: bool, traceback: bool) -> Iterator[None]:
    """Around the work of a command: what goes wrong through the user is a message and exit status 1.

    Warnings come once each, as `warning: ...` on stderr. With `as_json` whatever else the work prints goes to stderr,
    so that stdout holds the document alone. With `traceback` errors pass through.
    """
    said = set()

    def say(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in said:
            said.add(str(message))
            typer.echo(f"warning: {message}", err=True)

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.showwarning = say
            if as_json:
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            yield
    except (ValueError, OSError) as error:
        if traceback or isinstance(error, BrokenPipeError):  # the reader of a pipe has gone: typer ends quietly
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def wrong_usage(parameter: str, *kinds: type[Exception]) -> Iterator[None]:
    """Around the reading of one argument: an error of these `kinds` means wrong usage, exit status 2."""
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(str(error), param_hint=parameter) from error


def checked_source(
    path: str, subfolder: str | None = None, revision: str | None = None, parameter: str = "PATH"
) -> dict[str, Any]:
    """What was given of subfolder and revision. A path or hub id that leads to nothing is wrong usage."""
    hub = {key: value for key, value in (("subfolder", subfolder), ("revision", revision)) if value is not None}
    if os.path.isfile(path):
        raise typer.BadParameter(f"{path} is a file; name the folder it is in", param_hint=parameter)
    if os.path.exists(path):
        if not os.path.isdir(os.path.join(path, subfolder or "")):
            raise typer.BadParameter(f"{path} has no folder {subfolder}", param_hint="--subfolder")
        return hub
    from transformers.utils.hub import cached_file

    try:
        cached_file(path, "config.json", **hub)
    except (OSError, ValueError) as error:
        text = f"there is no folder {path}. Taken for a hub id: {error}"
        raise typer.BadParameter(text, param_hint=parameter) from error
    return hub


def check_device(device: str | None) -> None:
    """A device that torch does not know or does not have is wrong usage."""
    import torch

    with wrong_usage("--device", RuntimeError, AssertionError):
        torch.empty(1, device=device)


def load_recipe(form: str) -> Recipe:
    """The recipe; one that does not exist is wrong usage, one with a mistake in it is an error."""
    from sparseautomodel.recipe import Recipe, RecipeError

    if os.path.isfile(form) or form in shipped() or re.search(r"[\n{:]", form):
        return Recipe.load(form)
    with wrong_usage("RECIPE", RecipeError):
        return Recipe.load(form)


def load_tokenizer(path: str, hub: dict[str, Any]) -> Any:
    """The tokenizer of the folder or hub id."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, **hub)


def load_model(
    path: str, recipe: str | None, execution: str, device: str | None, requantize: bool, hub: dict[str, Any]
) -> Any:
    """The model, loaded as `from_pretrained` does; what the load did is said on stderr."""
    from sparseautomodel.auto import SparseAutoModelForCausalLM  # type: ignore[attr-defined]

    check_device(device)
    model = SparseAutoModelForCausalLM.from_pretrained(
        path,
        recipe=None if recipe is None else load_recipe(recipe),
        execution=execution,
        device_map=device,
        requantize=requantize,
        **hub,
    )
    if hasattr(model, "load_report"):
        typer.echo(str(model.load_report), err=True)
    return model


def shipped() -> dict[str, Path]:
    """`recipe.shipped`, without the seconds that importing `recipe` takes."""
    inside = Path(__file__).parent / "recipes"
    folder = inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def summary(text: str) -> str:
    """The first sentence of the comment at the top of a recipe."""
    comment = re.match(r"(#.*\n)*", text)
    words = re.sub(r"^# ?", "", comment[0] if comment else "", flags=re.MULTILINE).split()
    return re.split(r"(?<=\.) ", " ".join(words))[0].rstrip(".")


def print_result(result: Result, as_json: bool) -> None:
    """The result as one JSON document, or as its text."""
    if as_json:
        print_json(result.to_dict())
    else:
        typer.echo(str(result))


def print_rows(found: Any, each: bool, as_json: bool) -> None:
    """A heading, a table with a row for all layers that are alike or for `each`, and notes where there are any."""
    if as_json:
        print_json(found.to_dict())
        return
    typer.echo(found.heading())
    print_table(*found.table(each))
    if hasattr(found, "notes"):
        typer.echo("\n".join(found.notes()))


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def print_json(document: Any) -> None:
    """One JSON document, RFC 8259: no NaN, no infinity."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table that fits the terminal, or one line a row where stdout is none; empty columns are left out.

    Where it does not fit, the longest column of words is folded, then the names in the first column, at their dots.
    """
    kept = [column for column in range(len(headers)) if not rows or any(row[column] for row in rows)]
    table = [[line[column] for column in kept] for line in (headers, *rows)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED
    words = widths.index(max(widths[1:]), 1)
    for column, least in ((words, 20), (0, 20), (words, 10)):
        excess = sum(widths) + len(_GAP) * (len(widths) - 1) - limit
        widths[column] = max(min(widths[column], least), widths[column] - max(0, excess))
    grid = Table.grid(padding=(0, len(_GAP), 0, 0))
    for width, (_, *cells) in zip(widths, zip(*table, strict=True), strict=True):
        numbers = all(map(_NUMBER.fullmatch, cells))
        grid.add_column(width=width, justify="right" if numbers else "left", overflow="fold")
    for name, *others in table:
        grid.add_row(_folded(name, widths[0]), *others)
    text = io.StringIO()
    Console(file=text, width=_UNLIMITED, markup=False, highlight=False, emoji=False).print(grid)
    typer.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def print_plan(plan: Plan) -> None:
    """The text of the plan, with its table made to fit the terminal."""
    from sparseautomodel.inspection import kind_of
    from sparseautomodel.plan import size_text

    title, *lines = str(plan).splitlines()
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in plan.rows:
        key = (kind_of(row.name), row.shape, row.scheme or row.dtype, row.sparsity)
        groups.setdefault(key, []).append(row)
    table = []
    for (kind, shape, stored_as, zeros), rows in groups.items():
        sizes = (size_text(sum(getattr(row, key) for row in rows)) for key in ("nbytes_before", "nbytes_after"))
        share = "" if zeros is None else f"{zeros:.0%}"
        table.append((kind, str(len(rows)), f"{shape[0]} x {shape[1]}", stored_as, share, *sizes))
    typer.echo(title)
    headers = ("layer", "count", "shape", "stored as", "zeros", "before", "after")
    print_table(headers, table)
    typer.echo("\n".join(dropwhile(lambda line: line.startswith(" "), lines)))


def _folded(name: str, width: int) -> str:
    """A dotted name on as many lines as it needs."""
    if len(name) <= width:
        return name
    lines = textwrap.wrap(name.replace(".", ". "), width, subsequent_indent="  ")
    return "\n".join(lines).replace(". ", ".")
