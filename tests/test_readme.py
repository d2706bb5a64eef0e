"""README.md says what is true: its Python and its commands run, its links and tests exist."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparseautomodel.__main__ import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def beside_a_model(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder where the README's model path holds the tiny Llama."""
    shutil.copytree(tiny_llama, tmp_path / ".cache" / "smollm2")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_python_blocks_run_in_order(beside_a_model: None) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_commands_run_in_order(beside_a_model: None) -> None:
    (block,) = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "sparseautomodel"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"


def test_recipe_table_lists_every_shipped_recipe() -> None:
    table = README.partition("## Shipped recipes")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


def test_links_point_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link).is_file()]
    assert not missing


def test_each_promise_names_a_test_that_exists() -> None:
    table = README.partition("## What it promises")[2].partition("\n## ")[0]
    promised = re.findall(r"^\| .+ \| `([^`]+)::([^`]+)` \|$", table, flags=re.MULTILINE)
    assert len(promised) == table.count("\n| ") - 2
    for file, name in promised:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, flags=re.MULTILINE), f"tests/{file} has no {name}"
