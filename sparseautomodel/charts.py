"""Charts as SVG text, and the style sheet of the page they are on.

Places are in percent and letters in pixels, so that one chart fits a phone and a desk. Every text that is put in is
escaped here. Colors are classes, which `STYLE` defines for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

HUES = 7
"""Colors that `cells` has for kinds of things: classes `hue0` to `hue6`."""
SHADES = 10
"""Steps of one color for a share: classes `shade0` to `shade10`."""

_MOST_DECADES = 6
_MOST_CUTS = 160
_TOP, _BOTTOM = 8, 20
_BAR = 10
_CELL = 20

_LIGHT = ("#2f6fb0", "#d98324", "#2a8a63", "#b8476b", "#7a5fb5", "#5f9ea8", "#8a7a2e")
_DARK = ("#6aa7e8", "#eba552", "#55bd90", "#e27f9d", "#ab93e6", "#86c5ce", "#c4b35c")
_PAGE = """
:root{color-scheme:light dark;--page:#fbfbf9;--box:#fff;--ink:#1d2126;--soft:#666d76;--line:#e2e3e0;
--good:#23744f;--bad:#b3352c}
@media (prefers-color-scheme:dark){:root{--page:#15181b;--box:#1d2125;--ink:#e7e9ea;--soft:#99a1aa;--line:#31373d;
--good:#62c297;--bad:#f0847a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:980px;margin:0 auto;padding:20px 16px 64px}
h1{font-size:1.5rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:44px 0 2px;padding-top:14px;border-top:1px solid var(--line)}
h3{font-size:.85rem;margin:16px 0 4px;font-weight:600;overflow-wrap:anywhere}
p{margin:4px 0 12px;max-width:70ch}
.soft,.sub,dt,th,caption{color:var(--soft)}
.soft{font-size:.875rem;overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:20px 24px;margin:24px 0 20px}
.figures dt{font-size:.8rem}
.figures dd{margin:0;font-size:1.9rem;line-height:1.2;font-weight:600;font-variant-numeric:tabular-nums}
.figures .sub{font-size:.875rem;font-weight:400;line-height:1.4}
.verdict{border-left:4px solid var(--soft);background:var(--box);padding:12px 16px;margin:0 0 12px}
.verdict p:last-child{margin-bottom:0}
.verdict strong{font-size:1.05rem}
.good{border-color:var(--good)}.good strong{color:var(--good)}
.bad{border-color:var(--bad)}.bad strong{color:var(--bad)}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(280px,100%),1fr));gap:4px 28px}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0;padding:0;list-style:none;font-size:.8rem}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px;vertical-align:-1px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;min-width:100%}
caption{text-align:left}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:500;white-space:nowrap}
td{overflow-wrap:break-word}td:not(.number){min-width:8em}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
pre{background:var(--box);border:1px solid var(--line);padding:12px;overflow-x:auto;font-size:.8rem}
ul{padding-left:20px;margin:6px 0}li{overflow-wrap:anywhere}
svg{display:block;overflow:visible}svg text{font-size:11px;fill:var(--soft)}
.bars svg{margin-bottom:8px}.label{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 12px;font-size:12px}
.label span{overflow-wrap:anywhere}.label span:last-child{color:var(--soft)}
svg .rule{stroke:var(--line);stroke-width:1}
.plot{display:flex}.plot>div{flex:1;min-width:0}.end{text-anchor:end}.middle{text-anchor:middle}
.plot .names{flex:0 1 auto;max-width:46%;margin-right:10px;font-size:12px;line-height:20px}
.names span{display:block;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.after{fill:var(--hue0)}.before{fill:none;stroke:var(--soft);stroke-width:1.2}.alert{fill:var(--bad)}
.gain{stroke:var(--soft);stroke-width:1;stroke-opacity:.5}.spread{stroke:var(--hue0);stroke-width:1.5}
.old{fill:var(--soft);fill-opacity:.4}.new{fill:var(--hue0)}.cut{stroke:var(--page);stroke-width:1}
"""
STYLE = _PAGE + "\n".join(
    [
        ":root{" + "".join(f"--hue{number}:{color};" for number, color in enumerate(_LIGHT)) + "}",
        "@media (prefers-color-scheme:dark){:root{"
        + "".join(f"--hue{number}:{color};" for number, color in enumerate(_DARK))
        + "}}",
        *(f".hue{number}{{fill:var(--hue{number});background:var(--hue{number})}}" for number in range(HUES)),
        *(f".shade{step}{{fill:var(--hue0);fill-opacity:{0.08 + 0.092 * step:.2f}}}" for step in range(SHADES + 1)),
    ]
)


@dataclass(frozen=True)
class Mark:
    """A value at a column of a chart of dots."""

    column: int
    value: float
    label: str
    """What is shown under the pointer."""
    before: float | None = None
    """The value that it had before, as an open dot."""
    spread: tuple[float, float] | None = None
    """The smallest and the largest value, where the mark stands for several."""
    alert: bool = False


@dataclass(frozen=True)
class LogScale:
    """A logarithmic axis over whole decades, from `10**low` at the bottom to `10**high` at the top."""

    low: int
    high: int

    @classmethod
    def of(cls, values: Iterable[float]) -> LogScale:
        """The axis that shows all positive values, but no more than six decades below the largest.

        >>> LogScale.of([0.002, 0.3])
        LogScale(low=-3, high=0)
        """
        exponents = [math.log10(value) for value in values if 0 < value < math.inf]
        high = math.ceil(max(exponents, default=0.0))
        low = math.floor(min(exponents, default=-1.0))
        return cls(max(min(low, high - 1), high - _MOST_DECADES), high)

    def height(self, value: float) -> float:
        """Where a value is, 0 at the bottom and 1 at the top. What is below the axis is at its bottom."""
        if value <= 0:
            return 0.0
        return min(1.0, max(0.0, (math.log10(value) - self.low) / (self.high - self.low)))

    def ticks(self) -> list[float]:
        return [10.0**exponent for exponent in range(self.low, self.high + 1)]


def percent(share: float) -> str:
    """A share with two or three digits that count.

    >>> [percent(share) for share in (0.00123, 0.5, 1.0)]
    ['0.12%', '50%', '100%']
    """
    value = 100 * share
    return f"{value:.0f}%" if value >= 10 else f"{value:.2g}%"


def dots(
    title: str, description: str, marks: Sequence[Mark], names: Sequence[object], scale: LogScale, height: int = 120
) -> str:
    """Values on a logarithmic axis of shares, one column for each of `names`."""
    total = height + _TOP + _BOTTOM

    def y(value: float) -> str:
        return f"{_TOP + height * (1 - scale.height(value)):.1f}"

    axis = "".join(
        f'<text class="end" x="42" y="{float(y(tick)) + 4:.1f}">{percent(tick)}</text>' for tick in scale.ticks()
    )
    parts = [f'<line class="rule" x1="0" x2="100%" y1="{y(tick)}" y2="{y(tick)}"/>' for tick in scale.ticks()]
    for mark in marks:
        x = _x(mark.column + 0.5, len(names))
        lines = ""
        if mark.spread is not None:
            low, high = map(y, mark.spread)
            lines += f'<line class="spread" x1="{x}" x2="{x}" y1="{low}" y2="{high}"/>'
        if mark.before is not None:
            lines += f'<line class="gain" x1="{x}" x2="{x}" y1="{y(mark.before)}" y2="{y(mark.value)}"/>'
            lines += f'<circle class="before" cx="{x}" cy="{y(mark.before)}" r="2"/>'
        kind = "alert" if mark.alert else "after"
        dot = f'<circle class="{kind}" cx="{x}" cy="{y(mark.value)}" r="3"/>'
        parts.append(f"<g><title>{escape(mark.label)}</title>{lines}{dot}</g>")
    parts.append(_column_names(names, total - 4))
    area = _svg(title, description, total, "".join(parts))
    return f'<div class="plot"><svg aria-hidden="true" width="48" height="{total}">{axis}</svg><div>{area}</div></div>'


def bars(description: str, rows: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    """Horizontal bars from zero: of each row the name, the figures in words, and one value, or one before and after."""
    largest = max((value for _, _, values in rows for value in values), default=0.0) or 1.0
    parts = []
    for name, figures, values in rows:
        drawn = ""
        for number, value in enumerate(values):
            kind = "new" if number == len(values) - 1 else "old"
            width = f"{100 * max(0.0, value) / largest:.3f}%"
            drawn += f'<rect class="{kind}" x="0" y="{number * _BAR}" width="{width}" height="{_BAR - 2}" rx="1"/>'
        parts.append(f'<div class="label"><span>{escape(name)}</span><span>{escape(figures)}</span></div>')
        parts.append(_svg(f"{name}: {figures}", description, len(values) * _BAR, drawn))
    return f'<div class="bars">{"".join(parts)}</div>'


def cells(
    title: str,
    description: str,
    rows: Sequence[tuple[str, Sequence[tuple[int, str, str]]]],
    names: Sequence[object],
) -> str:
    """A map: a line for each row, a column for each of `names`, and cells of (column, class, label).

    Neighbors that are alike are drawn as one, with thin cuts between columns, so that large maps stay small files.
    """
    parts = []
    for number, (_, found) in enumerate(rows):
        for first, last, kind, label in _runs(found, names):
            x, width = _x(first, len(names)), _x(last + 1 - first, len(names))
            box = f'x="{x}" y="{number * _CELL + 1}" width="{width}" height="{_CELL - 2}"'
            parts.append(f'<rect class="{kind}" {box}><title>{escape(label)}</title></rect>')
    total = len(rows) * _CELL
    if len(names) <= _MOST_CUTS:
        cuts = (_x(column, len(names)) for column in range(1, len(names)))
        parts += [f'<line class="cut" x1="{x}" x2="{x}" y1="0" y2="{total}"/>' for x in cuts]
    parts.append(_column_names(names, total + 14))
    labels = "".join(f'<span title="{escape(name)}">{escape(name)}</span>' for name, _ in rows)
    area = _svg(title, description, total + _BOTTOM, "".join(parts))
    return f'<div class="plot"><div class="names" aria-hidden="true">{labels}</div><div>{area}</div></div>'


def _runs(found: Sequence[tuple[int, str, str]], names: Sequence[object]) -> list[tuple[int, int, str, str]]:
    """Runs of like cells in neighboring columns, as first and last column, class, label."""
    runs: list[tuple[int, int, str, str]] = []
    for column, kind, label in sorted(found):
        if runs and runs[-1][1] == column - 1 and runs[-1][2:] == (kind, label):
            runs[-1] = (runs[-1][0], column, kind, label)
        else:
            runs.append((column, column, kind, label))
    return [
        (first, last, kind, f"{names[first]}{f' to {names[last]}' if last > first else ''}: {label}")
        for first, last, kind, label in runs
    ]


def _column_names(names: Sequence[object], y: int) -> str:
    """The names of about six columns, at round steps."""
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if len(names) <= 7 * step), len(names))
    return "".join(
        f'<text class="middle" x="{_x(column + 0.5, len(names))}" y="{y}">{escape(str(names[column]))}</text>'
        for column in range(0, len(names), step)
    )


def _svg(title: str, description: str, height: float, content: str) -> str:
    head = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    return f'<svg role="img" width="100%" height="{height:.0f}">{head}{content}</svg>'


def _x(column: float, columns: int) -> str:
    return f"{100 * column / max(1, columns):.3f}%"
