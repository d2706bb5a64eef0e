"""What a page says of layers: their errors, schemes and zeros, drawn by kind and block, and the worst of them in words.

A line for each kind of layer, a column for each block; the experts of a block are one mark, so that any model fits.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sparseautomodel.charts import HUES, SHADES, LogScale, Mark, cells, dots, percent
from sparseautomodel.completeness import few

MOST_COLUMNS = 200
"""Columns of a chart. Of more blocks, several share one."""

_MOST_KINDS = 40
_MOST_ROWS = 12


@dataclass(frozen=True)
class Layer:
    """A row of the report, and its place in the model: `model.layers.3.mlp.up` is in stack `model.layers`, block 3."""

    name: str
    stack: str
    kind: str
    block: int | None
    scheme: str
    sparsity: float | None
    before: float
    after: float


@dataclass(frozen=True)
class Measured:
    """What calibration measured at one layer; where several methods changed it in turn, there are several."""

    layer: Layer
    before: float | None
    after: float
    tokens: int | None
    fallback: str | None
    smoothed: bool


@dataclass(frozen=True)
class Stack:
    """Like blocks that follow one another: a line of a chart for each kind of layer, a column for each block."""

    name: str
    kinds: tuple[str, ...]
    columns: Mapping[int, int]
    """Block -> column. Of very many blocks several share one."""
    names: tuple[int, ...]
    """The first block of each column."""


def read_layers(report: Mapping[str, Any]) -> dict[str, Layer]:
    structures = mapping_of(report, "structures")
    found = {}
    for row in rows_of(report, "layers"):
        name = str(row.get("name"))
        stored = [str(row.get("scheme") or row.get("dtype") or "dense"), str(structures.get(name, ""))]
        sizes = (number_of(row.get(key)) or 0.0 for key in ("nbytes_before", "nbytes_after"))
        found[name] = Layer(
            name, *_place(name), ", ".join(filter(None, stored)), number_of(row.get("sparsity")), *sizes
        )
    return found


def read_errors(report: Mapping[str, Any], layers: Mapping[str, Layer]) -> list[Measured]:
    """What was measured. Layers without a figure, such as experts that saw no token, are among the fallbacks alone."""
    found = []
    for row in rows_of(mapping_of(report, "calibration"), "layers"):
        name = str(row.get("name"))
        layer = layers.get(name) or Layer(name, *_place(name), "", None, 0, 0)
        after, tokens = number_of(row.get("after")), number_of(row.get("tokens"))
        fallback = None if row.get("fallback") is None else str(row["fallback"])
        found.append(
            Measured(
                layer=layer,
                before=number_of(row.get("before")),
                after=math.nan if after is None else after,
                tokens=None if tokens is None else int(tokens),
                fallback=fallback,
                smoothed=row.get("smoothed") is True,
            )
        )
    return found


def _place(name: str) -> tuple[str, str, int | None]:
    """Stack, kind and block: `h.3.mlp.experts.7.up` is `h`, `mlp.experts.*.up`, 3. Outside blocks the kind is all."""
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    if at is None:
        return "", name, None
    return ".".join(parts[:at]), ".".join("*" if part.isdecimal() else part for part in parts[at + 1 :]), int(parts[at])


def stacks_of(layers: Iterable[Layer]) -> list[Stack]:
    kinds: dict[str, dict[str, None]] = {}
    blocks: dict[str, set[int]] = {}
    for layer in layers:
        if layer.block is not None:
            kinds.setdefault(layer.stack, {})[layer.kind] = None
            blocks.setdefault(layer.stack, set()).add(layer.block)
    found = []
    for name, of_stack in kinds.items():
        ordered = sorted(blocks[name])
        count = min(len(ordered), MOST_COLUMNS)
        columns = {block: rank * count // len(ordered) for rank, block in enumerate(ordered)}
        first = {column: block for block, column in reversed(columns.items())}
        found.append(Stack(name, tuple(of_stack), columns, tuple(first[column] for column in range(count))))
    return found


def error_panels(errors: Sequence[Measured], stacks: Sequence[Stack]) -> str:
    known = [error for error in errors if not math.isnan(error.after)]
    if not known:
        return ""
    scale = LogScale.of([value for error in known for value in (error.before or 0, error.after)])
    at: dict[tuple[str, str, int], list[Measured]] = {}
    columns = {stack.name: stack.columns for stack in stacks}
    for error in known:
        if error.layer.block is not None:
            column = columns[error.layer.stack][error.layer.block]
            at.setdefault((error.layer.stack, error.layer.kind, column), []).append(error)
    panels = []
    for stack in stacks:
        for kind in stack.kinds:
            found = {column: at[key] for column in range(len(stack.names)) if (key := (stack.name, kind, column)) in at}
            if found:
                name = f"{stack.name}.*.{kind}" if len(stacks) > 1 else kind
                marks = [_mark(column, group) for column, group in found.items()]
                chart = dots(f"Error of {name}", "A column for each block", marks, stack.names, scale)
                panels.append(f"<div><h3>{escape(name)}</h3>{chart}</div>")
    caption = (
        "Squared error of a layer's output, relative to the output, on the calibration data; a column for each block. "
        "Filled: the result. Open: the plain method, round to nearest or magnitude. Red: the plain result was kept. "
        "Several experts or steps in one place are drawn as their median, with a line from least to most, "
        "red if half are plain. "
        f"Logarithmic, one scale for all.{_left_out(len(panels))}"
    )
    shown = "".join(panels[:_MOST_KINDS])
    return f'<h2>Error of each layer</h2><p class="soft">{caption}</p><div class="panels">{shown}</div>'


def _mark(column: int, group: Sequence[Measured]) -> Mark:
    values = [error.after for error in group]
    value, first = statistics.median(values), group[0]
    before = [error.before for error in group if error.before is not None]
    plain = statistics.median(before) if before else None
    name = first.layer.name if len(group) == 1 else f"block {first.layer.block}, {len(group)} results"
    label = f"{name}: {percent(value)}" + (f", plain {percent(plain)}" if plain is not None else "")
    spread = (min(values), max(values)) if len(group) > 1 else None
    kept = sum(error.fallback is not None for error in group)
    label += f", {kept} of them plain results" if kept and len(group) > 1 else ""
    return Mark(column, value, label, plain, spread, kept > 0 and 2 * kept >= len(group))


def worst_tables(errors: Sequence[Measured]) -> str:
    """Tables: the layers with the largest errors, and why layers fell back."""
    if not errors:
        return ""
    known = sorted((error for error in errors if not math.isnan(error.after)), key=lambda error: -error.after)
    rows = [
        (
            error.layer.name,
            percent(error.after),
            "" if error.before is None else percent(error.before),
            error.layer.scheme,
            "" if error.tokens is None else f"{error.tokens:,}",
            "; ".join(filter(None, [error.fallback, "smoothed" if error.smoothed else None])),
        )
        for error in known[:_MOST_ROWS]
    ]
    parts = [
        "<h2>Worst layers</h2>",
        table(("layer", "error", "plain method", "stored as", "tokens", "note"), rows, (1, 2, 4)),
    ]
    groups: dict[str, list[str]] = {}
    for error in errors:
        if error.fallback is not None:
            groups.setdefault(error.fallback, []).append(error.layer.name)
    commonest = sorted(groups.items(), key=lambda item: -len(item[1]))
    fallbacks = [(reason, f"{len(names):,}", few(names)) for reason, names in commonest[:_MOST_ROWS]]
    if others := [name for _, names in commonest[_MOST_ROWS:] for name in names]:
        fallbacks.append((f"{len(commonest) - _MOST_ROWS:,} other reasons", f"{len(others):,}", few(others)))
    if fallbacks:
        parts += ["<h3>Where the plain result was kept</h3>", table(("why", "count", "layers"), fallbacks, (1,))]
    return "".join(parts)


def scheme_map(layers: Iterable[Layer], stacks: Sequence[Stack]) -> str:
    layers = list(layers)
    counts = Counter(layer.scheme for layer in layers)
    hues = {scheme: f"hue{min(at, HUES - 1)}" for at, (scheme, _) in enumerate(counts.most_common())}
    if not hues:
        return ""

    def cell(group: Sequence[Layer]) -> tuple[str, str]:
        """The commonest scheme's color, and all schemes in words."""
        found = Counter(layer.scheme for layer in group).most_common()
        return hues[found[0][0]], "; ".join(
            f"{count} x {scheme}" if len(found) > 1 else scheme for scheme, count in found
        )

    legend = "".join(
        f'<li><i class="{hues[scheme]}"></i>{escape(scheme)}: {count:,}</li>'
        for scheme, count in counts.most_common(24)
    )
    outside = [(layer.name, layer.scheme) for layer in layers if layer.block is None]
    rest = f"<h3>Outside the blocks</h3>{table(('layer', 'stored as'), outside[:_MOST_KINDS])}" if outside else ""
    caption = "How each layer is stored: a line for each kind of layer, a column for each block. Empty: left as it was."
    return (
        f'<h2>Scheme of each layer</h2><p class="soft">{caption}</p><ul class="legend">{legend}</ul>'
        f"{_maps('Scheme of each layer', layers, stacks, cell)}{rest}"
    )


def sparsity_map(layers: Iterable[Layer], stacks: Sequence[Stack]) -> str:
    known = [layer for layer in layers if layer.sparsity is not None]
    if not known:
        return '<h2>Sparsity of each layer</h2><p class="soft">The recipe sets no zeros.</p>'

    def cell(group: Sequence[Layer]) -> tuple[str, str]:
        share = statistics.fmean(layer.sparsity or 0.0 for layer in group)
        return f"shade{round(SHADES * min(1.0, max(0.0, share)))}", percent(share)

    shares = [layer.sparsity or 0.0 for layer in known]
    low, high = percent(min(shares)), percent(max(shares))
    between = low if low == high else f"{low} to {high}"
    caption = f"Share of values that are zero: {between} in {len(known):,} layers. A stronger color is more."
    title = "Sparsity of each layer"
    return f'<h2>{title}</h2><p class="soft">{caption}</p>{_maps(title, known, stacks, cell)}'


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table that scrolls on its own where it is wider than the page. The columns `numbers` are set to the right."""

    def line(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="number"' if column in numbers else "" for column in range(len(row)))
        texts = [escape(row[0]).replace(".", ".<wbr>"), *map(escape, row[1:])]  # long names may break at their dots
        return "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{line("th", headers)}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def mapping_of(report: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The dict under `key`, or an empty one."""
    value = report.get(key)
    return value if isinstance(value, Mapping) else {}


def rows_of(report: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The dicts in the list under `key`, or none."""
    value = report.get(key)
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, (list, tuple)) else []


def number_of(value: Any) -> float | None:
    """The number, if it is one that can be drawn: finite, and no integer beyond what a float holds."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300
    return float(value) if known else None


def _maps(
    title: str,
    layers: Iterable[Layer],
    stacks: Sequence[Stack],
    cell: Callable[[Sequence[Layer]], tuple[str, str]],
) -> str:
    """A map for each stack; `cell` gives the class and the words for the layers of one kind and column."""
    at: dict[tuple[str, str, int], list[Layer]] = {}
    columns = {stack.name: stack.columns for stack in stacks}
    for layer in layers:
        if layer.block is not None:
            at.setdefault((layer.stack, layer.kind, columns[layer.stack][layer.block]), []).append(layer)
    parts = []
    for stack in stacks:
        found: dict[str, list[tuple[int, str, str]]] = {}
        for (name, kind, column), group in at.items():
            if name == stack.name:
                found.setdefault(kind, []).append((column, *cell(group)))
        kinds = [kind for kind in stack.kinds if kind in found]
        if kinds:
            lines = [(kind, found[kind]) for kind in kinds[:_MOST_KINDS]]
            chart = cells(title, f"Blocks of {stack.name}", lines, stack.names)
            parts.append(f"<h3>{escape(stack.name)}{_left_out(len(kinds))}</h3>{chart}")
    return "".join(parts)


def _left_out(count: int) -> str:
    more = count - _MOST_KINDS
    return f" (and {more:,} kinds more, which are in the JSON file alone)" if more > 0 else ""
