"""One HTML page about a compressed model, from its `compression_report.json`: no network, no scripts."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from sparseautomodel.charts import STYLE, LogScale, Mark, bars, dots, percent
from sparseautomodel.layer_charts import (
    MOST_COLUMNS,
    Layer,
    Measured,
    error_panels,
    mapping_of,
    number_of,
    read_errors,
    read_layers,
    rows_of,
    scheme_map,
    sparsity_map,
    stacks_of,
    table,
    worst_tables,
)
from sparseautomodel.plan import size_text
from sparseautomodel.verify import REPORT_NAME

PAGE_NAME = "compression_report.html"

_NEEDED = ("source", "layers", "nbytes_before", "nbytes_after")
_MOST_BARS = 16
_MOST_TEXTS = 100


def write_report(folder: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write the page about the compressed model in `folder`, and return where it is.

    Args:
        output: the file, `compression_report.html` in the folder by default. One that is there is replaced as a whole.

    Raises:
        ValueError: the folder has no `compression_report.json`, or one that is damaged or of another program; or
            `output` is a folder, or in none.

    >>> write_report("compressed-folder").name  # doctest: +SKIP
    'compression_report.html'
    """
    page = render(_read(Path(folder)))
    target = Path(folder) / PAGE_NAME if output is None else Path(output)
    if target.is_dir():
        raise ValueError(f"output={str(target)!r} is a folder. Name a file: {str(target / PAGE_NAME)!r}")
    if not target.parent.is_dir():
        raise ValueError(f"output={str(target)!r}: there is no folder {str(target.parent)!r}. Make it first")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def render(report: Mapping[str, Any]) -> str:
    """The page, as text, from what `Report.to_dict()` gives. Whatever older reports lack is left out or said.

    Raises:
        ValueError: `report` lacks what every report has.
    """
    missing = [key for key in _NEEDED if key not in report]
    if missing:
        raise ValueError(f"this is no report of a compression: it has no {', '.join(missing)}. oneshot writes one")
    layers = read_layers(report)
    errors = read_errors(report, layers)
    stacks = stacks_of([*(error.layer for error in errors), *layers.values()])
    title = f"{Path(str(report['source'])).name}, compressed"
    sections = [
        _heading(report, title),
        _headline(report),
        _verdict(report, layers, errors),
        _texts("Warnings", report.get("warnings")),
        _block_errors(report),
        error_panels(errors, stacks),
        worst_tables(errors),
        scheme_map(layers.values(), stacks),
        sparsity_map(layers.values(), stacks),
        _bytes(report, list(layers.values())),
        _time_and_memory(report),
        _recipe(report),
        _texts("Notes", report.get("notes")),
    ]
    content = "\n".join(filter(None, sections))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body><main>
{content}
</main></body>
</html>
"""


def _read(folder: Path) -> dict[str, Any]:
    path = folder / REPORT_NAME
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} has no {REPORT_NAME}: the page is made from what oneshot writes beside its result. "
            "Make one: oneshot(model, recipe, output=folder), then write_report(folder)"
        )
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} is damaged: {error}. Run oneshot again") from error
    if not isinstance(report, dict):
        raise ValueError(f"{path} holds a {type(report).__name__}, not a report. Run oneshot again")
    return report


def _heading(report: Mapping[str, Any], title: str) -> str:
    output = report.get("output")
    made = f"{report['source']} to {output}" if output else str(report["source"])
    return f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(made)}</p>'


def _headline(report: Mapping[str, Any]) -> str:
    before, after = number_of(report["nbytes_before"]) or 0.0, number_of(report["nbytes_after"]) or 0.0
    parameters = number_of(report.get("parameters"))
    bits = f"{8 * after / parameters:.1f} bits a parameter" if parameters else ""
    seconds, peak = number_of(report.get("seconds")), number_of(report.get("peak_nbytes"))
    figures = [
        ("Size", size_text(after), f"from {size_text(before)}"),
        ("Smaller by", f"{before / after:.2f} times" if after else "-", bits),
        _quality(mapping_of(mapping_of(report, "calibration"), "verdict")),
        ("Time", "-" if seconds is None else _duration(seconds), f"peak memory {size_text(peak)}" if peak else ""),
    ]
    rows = (
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}<div class="sub">{escape(text)}</div></dd></div>'
        for name, value, text in figures
    )
    return f'<dl class="figures">{"".join(rows)}</dl>'


def _quality(verdict: Mapping[str, Any]) -> tuple[str, str, str]:
    """The figure for the headline: its name, value and what it compares with."""
    kind, source, result = verdict.get("kind"), number_of(verdict.get("source")), number_of(verdict.get("result"))
    divergence = number_of(verdict.get("divergence"))
    if kind == "perplexity":
        change = (
            f"from {source:.2f}" + (f", {result / source - 1:+.1%}" if result is not None else "") if source else ""
        )
        return "Perplexity", "not finite" if result is None else f"{result:.2f}", change
    if divergence is None:
        return "Quality", "-", "not measured"
    if kind == "logits":
        return "Divergence", f"{divergence:.3g} nats", "mean over the logits"
    return "Error", percent(divergence), "of the hidden states"


def _verdict(report: Mapping[str, Any], layers: Mapping[str, Layer], errors: Sequence[Measured]) -> str:
    verdict = mapping_of(mapping_of(report, "calibration"), "verdict")
    if verdict:
        kind, head = ("good", "Passed") if verdict.get("passed") is True else ("bad", "Not passed: far from the source")
        lines = [_verdict_in_words(verdict) or str(verdict.get("text") or "")]
    else:
        kind, head, target = "", "No verdict", report.get("output") or "FOLDER"
        why = "Layers were measured, the whole model was not." if errors else "No error was measured in this run."
        lines = [f"{why} To compare on your text: sparseautomodel eval {target} TEXTFILE, and the same of the source."]
    changed, parameters = number_of(report.get("parameters_changed")), number_of(report.get("parameters"))
    share = f", {changed / parameters:.1%} of the parameters" if changed is not None and parameters else ""
    lines.append(f"{len(layers):,} layers changed{share}. {_errors_in_words(errors)}")
    text = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    return f'<div class="verdict {kind}"><strong>{head}</strong>{text}</div>'


def _verdict_in_words(verdict: Mapping[str, Any]) -> str:
    source, result = number_of(verdict.get("source")), number_of(verdict.get("result"))
    unseen = "of the calibration data" if verdict.get("seen") is True else "that calibration did not see"
    hidden = verdict.get("kind") == "hidden states"
    far = "The hidden states differ by {:.2%}, as relative squared error." if hidden else "Mean divergence {:.3g} nats."
    parts = [
        ""
        if source is None or result is None
        else f"Perplexity {source:.2f} of the source, {result:.2f} of the result.",
        _worded(verdict.get("agreement"), "The same token is likeliest at {:.1%} of the positions."),
        _worded(verdict.get("divergence"), far),
    ]
    where = _worded(verdict.get("tokens"), "Measured on {:,.0f} tokens " + unseen + ".")
    return " ".join(filter(None, [*parts, where])) if any(parts) else ""


def _errors_in_words(errors: Sequence[Measured]) -> str:
    known = [error for error in errors if not math.isnan(error.after)]
    if not known:
        return ""
    text = f"Median error of a layer {percent(statistics.median(error.after for error in known))}"
    before = [error.before for error in known if error.before is not None]
    text += f", of the plain method {percent(statistics.median(before))}. " if before else ". "
    fallbacks = sum(error.fallback is not None for error in errors)
    return text + (
        f"{fallbacks:,} results of the plain method were kept." if fallbacks else "No layer fell back to it."
    )


def _block_errors(report: Mapping[str, Any]) -> str:
    rows = [
        row for row in rows_of(mapping_of(report, "calibration"), "blocks") if number_of(row.get("error")) is not None
    ]
    if not rows:
        return ""
    values = [number_of(row["error"]) or 0.0 for row in rows]
    count = min(len(rows), MOST_COLUMNS)
    marks = []
    for column in range(count):
        of_column = [at for at in range(len(rows)) if at * count // len(rows) == column]
        worst = max(of_column, key=values.__getitem__)
        marks.append(Mark(column, values[worst], f"{rows[worst].get('name')}: {percent(values[worst])}"))
    worst = max(range(len(rows)), key=values.__getitem__)
    names = [rows[column * len(rows) // count].get("name") for column in range(count)]
    numbers = [str(name).rpartition(".")[2] for name in names]
    largest = f"the largest is {rows[worst].get('name')}, {percent(values[worst])}"
    words = f"The last block ends at {percent(values[-1])}; {largest}."
    caption = (
        "Squared difference of a block's output from the dense model's, relative to the dense output, on rows that "
        "calibration did not see. Errors of earlier blocks are in it. Logarithmic. "
    )
    chart = dots("Error of each block", words, marks, numbers, LogScale.of(values), 160)
    return f'<h2>Error of each block</h2><p class="soft">{escape(caption + words)}</p>{chart}'


def _bytes(report: Mapping[str, Any], layers: Sequence[Layer]) -> str:
    """Where the bytes are: changed layers by kind, and the rest."""
    sizes: dict[str, list[float]] = {}
    several = len({layer.stack for layer in layers if layer.block is not None}) > 1
    for layer in layers:
        name = f"{layer.stack}.*.{layer.kind}" if several and layer.block is not None else layer.kind
        group = sizes.setdefault(name, [0, 0.0, 0.0])
        for at, value in enumerate((1, layer.before, layer.after)):
            group[at] += value
    largest = sorted(sizes.items(), key=lambda item: -item[1][1])
    rows = [(f"{name} ({count:,.0f})", before, after) for name, (count, before, after) in largest[:_MOST_BARS]]
    if more := [group for _, group in largest[_MOST_BARS:]]:
        count, before, after = (sum(values) for values in zip(*more, strict=True))
        rows.append((f"other changed layers ({count:,.0f})", before, after))
    totals = [number_of(report[key]) or 0.0 for key in ("nbytes_before", "nbytes_after")]
    changed = [sum(group[at] for group in sizes.values()) for at in (1, 2)]
    rest = [total - part for total, part in zip(totals, changed, strict=True)]
    if min(rest) > 0:
        rows.append(("everything else", rest[0], rest[1]))
    drawn = [(name, f"{size_text(before)} to {size_text(after)}", (before, after)) for name, before, after in rows]
    caption = (
        "Bytes of the weights by kind of layer, with the number of layers. Gray: before. Colored: after. "
        "Everything else is embeddings, norms, biases and layers that were left as they were."
    )
    return f'<h2>Where the bytes are</h2><p class="soft">{caption}</p>{bars(caption, drawn)}'


def _time_and_memory(report: Mapping[str, Any]) -> str:
    calibration = mapping_of(report, "calibration")
    steps = {str(step): number_of(value) for step, value in mapping_of(calibration, "seconds").items()}
    times = [(step, _duration(value), (value,)) for step, value in steps.items() if value is not None]
    blocks = [value for row in rows_of(calibration, "blocks") if (value := number_of(row.get("seconds"))) is not None]
    seconds = number_of(report.get("seconds"))
    lines = [] if seconds is None else [f"{_duration(seconds)} in all."]
    if blocks:
        median, slowest = map(_duration, (statistics.median(blocks), max(blocks)))
        lines.append(f"{len(blocks):,} blocks, the median {median}, the slowest {slowest}.")
    reads = mapping_of(report, "reads")
    if (nbytes := number_of(reads.get("nbytes"))) is not None:
        lines.append(f"Read from the source: {size_text(nbytes)}.")
    peaks = (("whole run, peak", report), ("calibration, peak", calibration))
    sizes = [("source", report["nbytes_before"]), ("result", report["nbytes_after"])]
    known = [
        (name, number_of(value)) for name, value in [*sizes, *((name, of.get("peak_nbytes")) for name, of in peaks)]
    ]
    memory = [(name, size_text(value), (value,)) for name, value in known if value]
    parts = [f'<h2>Time and memory</h2><p class="soft">{escape(" ".join(filter(None, lines)))}</p><div class="panels">']
    if times:
        parts.append(f"<div><h3>Time by step</h3>{bars('Seconds of each step', times)}</div>")
    if memory:
        chart = bars("Resident memory of the process beside the sizes of the weights", memory)
        parts.append(f"<div><h3>Memory beside the weights</h3>{chart}</div>")
    return "".join([*parts, "</div>"])


def _recipe(report: Mapping[str, Any]) -> str:
    """What it takes to run it again: recipe, data and versions."""
    text = yaml.safe_dump(dict(mapping_of(report, "recipe")), sort_keys=False, allow_unicode=True)
    calibration = mapping_of(report, "calibration")
    named = {"num_samples": "rows of data", "num_tokens": "tokens of data", "fingerprint": "hash of the data"}
    values = [(name, calibration[key]) for key, name in named.items() if key in calibration]
    values += list(mapping_of(report, "versions").items())
    rows = [(str(name), f"{value:,}" if isinstance(value, int) else str(value)) for name, value in values]
    facts = f"<h3>Data and versions</h3>{table(('what', 'value'), rows)}" if rows else ""
    return f"<h2>Recipe</h2><pre>{escape(text)}</pre>{facts}"


def _texts(title: str, value: Any) -> str:
    texts = [str(text) for text in value] if isinstance(value, (list, tuple)) else []
    if not texts:
        return ""
    more = [f"and {len(texts) - _MOST_TEXTS:,} more"] if len(texts) > _MOST_TEXTS else []
    items = "".join(f"<li>{escape(text)}</li>" for text in [*texts[:_MOST_TEXTS], *more])
    return f"<h2>{title}</h2><ul>{items}</ul>"


def _worded(value: Any, form: str) -> str:
    """The number put into the text, or nothing where there is none."""
    known = number_of(value)
    return "" if known is None else form.format(known)


def _duration(seconds: float) -> str:
    """
    >>> [_duration(seconds) for seconds in (0.62, 75, 7300)]
    ['0.6 s', '1 min 15 s', '2 h 1 min']
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
