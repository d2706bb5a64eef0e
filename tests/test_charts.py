"""Charts, read back: what a mark shows, found from the labels of the axis, is the value that was given."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel.charts import HUES, SHADES, STYLE, LogScale, Mark, bars, cells, dots, percent

SHARES = st.floats(1e-4, 10.0)


def value_at(chart: ElementTree.Element, y: float) -> float:
    """The value at a height, from the two ends of the axis alone."""
    texts = [text for text in chart.iter("text") if text.get("class") == "end"]
    (top, high), *_, (bottom, low) = sorted((float(text.attrib["y"]) - 4, _share(text.text)) for text in texts)
    return math.exp(math.log(low) + (bottom - y) / (bottom - top) * math.log(high / low))


def _share(text: str | None) -> float:
    return float(str(text).removesuffix("%")) / 100


@given(st.lists(st.tuples(SHARES, SHARES), min_size=1, max_size=12))
def test_dots_are_where_the_axis_says(pairs: list[tuple[float, float]]) -> None:
    marks = [Mark(column, after, f"layer {column}", before) for column, (before, after) in enumerate(pairs)]
    scale = LogScale.of(value for pair in pairs for value in pair)
    chart = ElementTree.fromstring(dots("t", "d", marks, range(len(pairs)), scale))
    groups = list(chart.iter("g"))
    assert len(groups) == len(pairs)
    for column, (group, (before, after)) in enumerate(zip(groups, pairs, strict=True)):
        assert group.findtext("title") == f"layer {column}"
        circles = {circle.get("class"): circle for circle in group.iter("circle")}
        assert value_at(chart, float(circles["after"].attrib["cy"])) == pytest.approx(after, rel=0.02)
        assert value_at(chart, float(circles["before"].attrib["cy"])) == pytest.approx(before, rel=0.02)
        assert _share(circles["after"].get("cx")) == pytest.approx((column + 0.5) / len(pairs), abs=1e-4)


def test_spread_and_alert() -> None:
    mark = Mark(0, 0.02, "experts", spread=(0.01, 0.05), alert=True)
    chart = ElementTree.fromstring(dots("t", "d", [mark], ["0"], LogScale.of([0.01, 0.05])))
    line = next(line for line in chart.iter("line") if line.get("class") == "spread")
    ends = sorted(value_at(chart, float(line.attrib[key])) for key in ("y1", "y2"))
    assert ends == pytest.approx([0.01, 0.05], rel=0.02)
    assert [circle.get("class") for circle in chart.iter("circle")] == ["alert"]


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([], -1, 0), ([0.0], -1, 0), ([1.0], -1, 0), ([0.002, 0.3], -3, 0), ([1e-12, 0.5], -6, 0), ([0.02, 3.0], -2, 1)],
)
def test_axis_covers_whole_decades(values: list[float], low: int, high: int) -> None:
    assert LogScale.of(values) == LogScale(low, high)


def test_what_is_below_the_axis_is_at_its_bottom() -> None:
    scale = LogScale(-3, 0)
    assert [scale.height(value) for value in (0.0, 1e-9, 1e-3, 1.0, 5.0)] == pytest.approx([0, 0, 0, 1, 1])


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8))
def test_bars_are_as_long_as_their_values(values: list[float]) -> None:
    chart = ElementTree.fromstring(bars("d", [(f"row {value}", "", (value,)) for value in values]))
    widths = [_share(box.get("width")) for box in chart.iter("rect")]
    assert widths == pytest.approx([value / (max(values) or 1.0) for value in values], abs=1e-5)


def test_bars_before_and_after() -> None:
    chart = ElementTree.fromstring(bars("d", [("q", "4 to 1", (4.0, 1.0)), ("k", "2", (2.0,))]))
    assert [(box.get("class"), box.get("width")) for box in chart.iter("rect")] == [
        ("old", "100.000%"),
        ("new", "25.000%"),
        ("new", "50.000%"),
    ]
    assert [span.text for span in chart.iter("span")] == ["q", "4 to 1", "k", "2"]


@given(st.lists(st.lists(st.sampled_from(["hue0", "hue1", ""]), min_size=9, max_size=9), min_size=1, max_size=4))
def test_each_cell_of_a_map_has_its_color(table: list[list[str]]) -> None:
    rows = [
        (f"r{at}", [(column, kind, kind) for column, kind in enumerate(row) if kind]) for at, row in enumerate(table)
    ]
    chart = ElementTree.fromstring(cells("t", "d", rows, range(9)))
    assert [span.text for span in chart.iter("span")] == [name for name, _ in rows]
    drawn = [["" for _ in range(9)] for _ in table]
    for box in chart.iter("rect"):
        row = int(float(box.attrib["y"]) // 20)
        first = round(9 * _share(box.get("x")))
        for column in range(first, first + round(9 * _share(box.get("width")))):
            assert not drawn[row][column]
            drawn[row][column] = box.attrib["class"]
    assert drawn == table


def test_neighbors_that_are_alike_are_one_cell() -> None:
    rows = [("q", [(0, "hue0", "int4"), (1, "hue0", "int4"), (2, "hue1", "int8")])]
    chart = ElementTree.fromstring(cells("t", "d", rows, [4, 5, 7]))
    titles = [box.findtext("title") for box in chart.iter("rect")]
    assert titles == ["4 to 5: int4", "7: int8"]


@pytest.mark.parametrize("count", [1, 7, 30, 126, 1000, 20_000])
def test_few_columns_are_named(count: int) -> None:
    chart = ElementTree.fromstring(cells("t", "d", [("q", [(0, "hue0", "x")])], range(count)))
    named = [int(str(text.text)) for text in chart.iter("text")]
    assert 1 <= len(named) <= 7 and named == sorted(set(named)) and named[0] == 0


def test_texts_are_escaped_and_charts_have_words() -> None:
    bad = "<script>&\"'"
    charts: Sequence[str] = [
        dots(bad, bad, [Mark(0, 0.1, bad)], [bad], LogScale.of([0.1])),
        bars(bad, [(bad, bad, (1.0,))]),
        cells(bad, bad, [(bad, [(0, "hue0", bad)])], [bad]),
    ]
    for chart in charts:
        assert "<script" not in chart
        drawn = [svg for svg in ElementTree.fromstring(chart).iter("svg") if svg.get("role") == "img"]
        assert [svg.findtext("desc") for svg in drawn] == [bad]
        assert all(bad in str(svg.findtext("title")) for svg in drawn)


def test_every_class_of_a_chart_has_a_style() -> None:
    chart = dots(
        "t", "d", [Mark(0, 0.1, "x", 0.2, (0.1, 0.2)), Mark(1, 0.1, "x", alert=True)], "01", LogScale.of([0.1])
    )
    chart += bars("d", [("x", "", (1.0, 2.0))]) + cells("t", "d", [("q", [(0, "hue0", "x")])], "01")
    names = set(re.findall(r'class="([^"]+)"', chart)) | {f"hue{at}" for at in range(HUES)}
    for name in names | {f"shade{at}" for at in range(SHADES + 1)}:
        assert re.search(rf"\.{name}\b", STYLE), name


def test_percent_keeps_two_digits() -> None:
    assert [percent(share) for share in (0.0, 0.000123, 0.0123, 0.5, 1.0, 1.234)] == [
        *("0%", "0.012%", "1.2%", "50%", "100%", "123%"),
    ]
