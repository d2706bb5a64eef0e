"""What the commands have in common: what they take for wrong usage, and what goes where."""

from __future__ import annotations

import io
import json
import shutil
import sys
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel import console, recipe

SIZE = namedtuple("SIZE", "columns lines")
HEADERS = ("layer", "count", "stored as", "size")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Answer:
    def to_dict(self) -> dict[str, int]:
        return {"answer": 42}

    def __str__(self) -> str:
        return "the answer is 42"


def _in_terminal(columns: int, rows: list[tuple[str, ...]]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal())
        patch.setattr(shutil, "get_terminal_size", lambda *_: SIZE(columns, 40))
        console.print_table(HEADERS, rows)
        return sys.stdout.getvalue().splitlines()


def test_table_is_one_line_a_row_where_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name, scheme = "model.layers.*.block_sparse_moe.experts.*.w1", "float8 channel, input float8 token dynamic " * 9
    console.print_table(HEADERS, [(name, "8", scheme, "131.1 kB"), ("lm_head", "1", "bfloat16", "2 B")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["layer", name, "lm_head"]
    assert lines[0].index("stored as") == lines[1].index(scheme) == lines[2].index("bfloat16")
    assert lines[1].endswith(" 131.1 kB") and lines[2].endswith("      2 B")  # numbers end in one column
    assert not any(line != line.rstrip() for line in lines)


def test_table_leaves_out_empty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(HEADERS, [("a", "1", "", "2 B"), ("b", "1", "", "")])
    assert capsys.readouterr().out.split("\n")[0].split() == ["layer", "count", "size"]
    console.print_table(HEADERS, [])
    assert capsys.readouterr().out.split() == ["layer", "count", "stored", "as", "size"]


def test_table_folds_names_at_dots() -> None:
    rows = [("model.layers.*.block_sparse_moe.experts.*.w1", "8", "bfloat16", "131.1 kB")]
    lines = _in_terminal(50, rows)
    assert lines[1].split() == ["model.layers.*.", "8", "bfloat16", "131.1", "kB"]
    assert [line.strip() for line in lines[2:]] == ["block_sparse_moe.", "experts.*.w1"]


@given(
    st.lists(
        st.tuples(
            st.lists(st.text("abcxyz_*0", min_size=1, max_size=18), min_size=1, max_size=6).map(".".join),
            st.integers(0, 99999).map(str),
            st.lists(st.sampled_from(["float8", "channel,", "input", "[128,", "128]"]), max_size=12).map(" ".join),
            st.sampled_from(["12.3 MB", "131.1 kB", "", "1.00 GB"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(54, 140),
)
def test_table_fits_the_terminal_and_loses_nothing(rows: list[tuple[str, ...]], columns: int) -> None:
    lines = _in_terminal(columns, rows)
    assert max(map(len, lines)) <= columns
    wanted = "".join("".join(row) for row in rows)
    shown = "".join(lines)
    for character in set(wanted) - set("".join(HEADERS)) - {" "}:
        assert shown.count(character) == wanted.count(character)


def test_result_is_text_or_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_result(Answer(), as_json=False)
    assert capsys.readouterr().out == "the answer is 42\n"
    console.print_result(Answer(), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"answer": 42}
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json({"perplexity": float("nan")})


@pytest.mark.parametrize("kind", [ValueError, FileExistsError, recipe.RecipeError])
def test_errors_of_the_user_are_a_message_and_status_1(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, console.working(as_json=False, traceback=False):
        raise kind("bad value")
    assert caught.value.exit_code == 1
    assert capsys.readouterr() == ("", "error: bad value\n")
    with pytest.raises(kind), console.working(as_json=False, traceback=True):
        raise kind("bad value")


@pytest.mark.parametrize("error", [KeyError("ours"), RuntimeError("ours"), BrokenPipeError()])
def test_other_errors_pass_through(error: Exception) -> None:
    with pytest.raises(type(error)), console.working(as_json=False, traceback=False):
        raise error


def test_warnings_come_once_without_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    before = warnings.showwarning
    with console.working(as_json=False, traceback=False):
        for text in ("first", "second", "first"):
            warnings.warn(text, stacklevel=1)
            warnings.warn_explicit(text, UserWarning, "elsewhere.py", 7)
    assert capsys.readouterr() == ("", "warning: first\nwarning: second\n")
    assert warnings.showwarning is before


def test_with_json_what_the_work_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with console.working(as_json=True, traceback=False):
        print("remote code says hello")
    console.print_json([])
    assert capsys.readouterr() == ("[]\n", "remote code says hello\n")


def test_wrong_usage_takes_the_kinds_named() -> None:
    with (
        pytest.raises(typer.BadParameter, match="no such device") as caught,
        console.wrong_usage("--device", RuntimeError),
    ):
        raise RuntimeError("no such device")
    assert caught.value.param_hint == "--device"
    with pytest.raises(ValueError, match="other"), console.wrong_usage("--device", RuntimeError):
        raise ValueError("other")


def test_source_is_a_folder_or_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "model.safetensors").touch()
    assert console.checked_source(str(tmp_path)) == {}
    given = console.checked_source(str(tmp_path), "inner", "main")
    assert given == {"subfolder": "inner", "revision": "main"}
    for path, subfolder, text in (
        (tmp_path / "absent", None, f"no folder {tmp_path / 'absent'}"),
        ("no-such-model-anywhere", None, "no folder no-such-model-anywhere. Taken for a hub id"),
        (tmp_path / "model.safetensors", None, "is a file"),
        (tmp_path, "outer", "has no folder outer"),
    ):
        with pytest.raises(typer.BadParameter) as caught:
            console.checked_source(str(path), subfolder)
        assert text in str(caught.value)


def test_device_that_is_not_there_is_wrong_usage() -> None:
    console.check_device(None)
    console.check_device("cpu")
    for device in ("no-such-device", "xpu:77"):
        with pytest.raises(typer.BadParameter):
            console.check_device(device)


def test_recipe_that_is_absent_is_wrong_usage_and_a_wrong_one_an_error(tmp_path: Path) -> None:
    assert console.load_recipe("2of4") == recipe.Recipe.load("2of4")
    assert console.load_recipe("modifiers: [{ConstantPruningModifier: {}}]").modifiers
    for absent in ("2of5", "absent.yaml", str(tmp_path / "absent.yaml"), ""):
        with pytest.raises(typer.BadParameter):
            console.load_recipe(absent)
    (tmp_path / "wrong.yaml").write_text("modifiers:\n  - NoSuchModifier: {}\n")
    for wrong in (str(tmp_path / "wrong.yaml"), "modifiers: [{NoSuchModifier: {}}]"):
        with pytest.raises(recipe.RecipeError, match="NoSuchModifier"):
            console.load_recipe(wrong)


def test_shipped_is_what_the_recipes_module_ships() -> None:
    assert console.shipped() == recipe.shipped()
    assert console.shipped()


def test_summary_is_the_first_sentence_of_the_comment() -> None:
    text = "# 4.5 bits a weight, in\n# two lines: short.\n# More.\nmodifiers:\n  # inner comment.\n"
    assert console.summary(text) == "4.5 bits a weight, in two lines: short"
    assert console.summary("modifiers: []\n") == ""
    assert all(console.summary(file.read_text()) for file in console.shipped().values())
