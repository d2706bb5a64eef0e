"""The layout rules of the project. A failure names the file and the rule; in words: CONTRIBUTING.md."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

import sparseautomodel
from sparseautomodel.modifiers import MODIFIERS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sparseautomodel"

# From the top: a module imports from the rows below its own, never from its own row or above.
ROWS = (
    ("__init__", "__main__"),
    ("console",),
    ("execution", "pool"),
    ("auto", "oneshot", "inspection", "report_page", "blocks"),
    ("budgeted",),
    ("residency",),
    ("calibrated", "stage"),
    ("solving",),
    ("verify", "report", "calibration", "walk", "layer_charts", "witness", "residency_report"),
    ("plan",),
    ("arguments", "checks", "kv_cache", "from_scratch", "block_cache", "hollow", "slots", "forecast"),
    ("recipe", "layers", "smoother", "quantizer", "completeness", "save", "initialize", "sources", "stack", "devices"),
    (
        "recipe_compat",
        "architecture",
        "quantization_config",
        "transform",
        "consumers",
        "distributed",
        "initial_checks",
        "empty_tensors",
        "ranged",
        "units",
        "mapped",
    ),
    ("compressed_layers", "compressed_experts", "sparse24"),
    (
        "recipe_text",
        "callbacks",
        "forwards",
        "pieces",
        "shards",
        "buffers",
        "kernels",
        "quantized_cache",
        "rotations",
        "construction",
        "contracts",
        "fast_forward",
    ),
    ("modifiers", "formats", "checkpoint", "recorded"),
    ("columns", "float_inputs", "half_tiles", "random_values"),
    ("codecs", "placed", "placement", "working", "philox", "registers", "column_blocks", "attention", "pairs"),
    (
        "charts",
        "crossover",
        "masks",
        "ranges",
        "rows",
        "scales",
        "sets",
        "smoothing",
        "spill",
        "statistics",
        "threads",
        "numbers",
        "writes",
        "frames",
        "safetensors_file",
        "read_only",
        "hooks",
    ),
    ("squares",),
    ("compiler",),
    ("allocator", "cache_folder", "scratch"),
)
ROW = {part: number for number, row in enumerate(ROWS) for part in row}
FOLDERS = ("formats", "kernels", "modifiers")

PUBLIC = {
    "SparseAutoModel",
    *(f"Sparse{name}" for name in dir(transformers) if name.startswith("AutoModelFor")),
    *("ModelPool", "Recipe", "load_blocks", "init_module", "materialize", "oneshot", "plan", "verify"),
}

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [
    *MODULES,
    *(path for folder in ("tests", "integrations", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")),
]
NAMED = [path for path in MODULES if path.name != "__init__.py"]


def _label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=_label)
def test_imports_point_down(path: Path) -> None:
    part = _part(path)
    assert part in ROW, f"{part} has no row: add it to ROWS in tests/test_layout.py and to the design"
    for line, target in _own_imports(path):
        other = target.split(".")[1] if "." in target else "__init__"
        if part == other:
            continue
        assert ROW[other] > ROW[part], f"{_label(path)}:{line} imports {target}, which is not below it"


@pytest.mark.parametrize("path", MODULES, ids=_label)
def test_imports_are_absolute(path: Path) -> None:
    relative = [node.lineno for node in _nodes(path, ast.ImportFrom) if node.level]
    assert not relative, f"{_label(path)} has relative imports on lines {relative}"


@pytest.mark.parametrize("path", [path for path in NAMED if path.parent.name in FOLDERS], ids=_label)
def test_files_of_a_folder_stand_alone(path: Path) -> None:
    """A modifier, format or kernel imports none of its like, only their `base` and the keys that several modifiers have
    (`scheme_keys`, `sparsity_keys`); a kernel may decode a format."""
    shared = ("base", *(one.stem for one in path.parent.glob("*_keys.py")))
    allowed = {f"sparseautomodel.{path.parent.name}.{name}" for name in shared}
    if path.parent.name == "kernels":
        allowed.add("sparseautomodel.formats")
    for line, target in _own_imports(path):
        inside = any(target.startswith(f"sparseautomodel.{folder}") for folder in FOLDERS)
        known = any(target == name or target.startswith(f"{name}.") for name in allowed)
        assert known or not inside, f"{_label(path)}:{line} imports {target}: only {sorted(allowed)} here"


def test_contributing_shows_the_same_table() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Layout")[2].partition("\n## ")[0]
    shown = [line.replace("/", "").split() for line in text.splitlines() if line.startswith("    ")]
    assert tuple(map(tuple, shown)) == ROWS


def test_folders_are_one_deep_and_known() -> None:
    folders = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*/") if path.name != "__pycache__"}
    assert folders - {Path()} == {Path(name) for name in FOLDERS}


@pytest.mark.parametrize("path", SOURCES, ids=_label)
def test_file_has_a_domain_name_and_a_readable_length(path: Path) -> None:
    assert path.stem not in ("utils", "helpers", "common"), f"{_label(path)}: name it after what it holds"
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"{_label(path)} has {lines} lines: it asks to be two files"


@pytest.mark.parametrize(
    "path",
    [path for path in NAMED if path.parent.name == "modifiers" and path.stem != "base" and "_keys" not in path.stem],
    ids=_label,
)
def test_modifier_file_defines_a_registered_modifier(path: Path) -> None:
    module = f"sparseautomodel.modifiers.{path.stem}"
    defined = [cls.__name__ for cls in MODIFIERS.values() if cls.__module__ == module]
    assert defined, f"{_label(path)} defines no Modifier"


def test_registered_modifiers_come_from_files_of_the_folder() -> None:
    shipped = {name: cls for name, cls in MODIFIERS.items() if cls.__module__.startswith("sparseautomodel.")}
    assert shipped
    for name, cls in shipped.items():
        assert getattr(importlib.import_module(cls.__module__), name) is cls
        assert cls.__module__.startswith("sparseautomodel.modifiers.")


@pytest.mark.parametrize("path", NAMED, ids=_label)
def test_module_has_its_test_file(path: Path) -> None:
    mirror = ROOT / "tests" / path.relative_to(PACKAGE).with_name(f"test_{path.stem.strip('_')}.py")
    assert mirror.is_file(), f"{_label(path)} has no {_label(mirror)}"


def test_public_names_are_those_of_the_design() -> None:
    assert set(sparseautomodel.__all__) == PUBLIC
    assert len(sparseautomodel.__all__) == len(set(sparseautomodel.__all__))
    for name in sparseautomodel.__all__:
        assert getattr(sparseautomodel, name) is not None


def test_integrations_import_public_names_only() -> None:
    for path in (ROOT / "integrations").rglob("*.py"):
        for line, target in _own_imports(path, names=True):
            public = target == "sparseautomodel" or target.removeprefix("sparseautomodel.") in PUBLIC
            assert public, f"{_label(path)}:{line} imports {target}, which is not public"


def _part(path: Path) -> str:
    """The part of the package that a file belongs to: its folder, or its own name at the top."""
    return path.parent.name if path.parent != PACKAGE else path.stem


def _own_imports(path: Path, names: bool = False) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each module of this package that a file imports, inside functions too.

    `names` gives the imported names (`sparseautomodel.plan`) even where they are not modules.
    """
    for node in _nodes(path, (ast.Import, ast.ImportFrom)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        for target in targets:
            if target.split(".")[0] == "sparseautomodel":
                yield node.lineno, target if names else _module(target)


def _module(target: str) -> str:
    """`target` without the trailing names that are not modules."""
    while target != "sparseautomodel":
        path = ROOT / target.replace(".", "/")
        if path.is_dir() or path.with_suffix(".py").is_file():
            return target
        target = target.rpartition(".")[0]
    return target


def _nodes(path: Path, kind: type | tuple[type, ...]) -> Iterator:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return (node for node in ast.walk(tree) if isinstance(node, kind))
