"""The built wheel carries what it should, and works without the repository around it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built without network, from a copy: a build leaves files beside its sources."""
    target = tmp_path_factory.mktemp("wheel")
    source = target / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    built = subprocess.run([*command, "-w", target, source], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = target.glob("sparseautomodel-*.whl")
    return found


def test_wheel_holds_the_package_and_the_recipes_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sparseautomodel"}
    recipes = sorted(Path(name).name for name in names if name.startswith("sparseautomodel/recipes/"))
    assert recipes == SHIPPED
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sparseautomodel").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {f"sparseautomodel/{name}" for name in ("py.typed", "attention.c", "columns.c", "registers.c")} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_shipped_recipe_loads_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    script = (
        "import sparseautomodel\n"
        "print(sparseautomodel.__file__)\n"
        "print(len(sparseautomodel.Recipe.load('w4a16').modifiers))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file, modifiers = done.stdout.split()
    assert Path(file).is_relative_to(site)
    assert int(modifiers) == 1
