"""Layers by kind and block: where each belongs, what stands for many, and what the tables say."""

from __future__ import annotations

import re
import statistics
from typing import Any
from xml.etree import ElementTree

import pytest

from sparseautomodel.charts import LogScale, percent
from sparseautomodel.layer_charts import (
    MOST_COLUMNS,
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


def report(rows: dict[str, dict[str, Any]], **others: Any) -> dict[str, Any]:
    """A report with these layers; `before`, `after`, ... of a row are what calibration measured."""
    measured = ("before", "after", "tokens", "fallback", "smoothed")
    return {
        "layers": [{"name": name, "scheme": "int4 group 64"} | row for name, row in rows.items()],
        "calibration": {
            "layers": [
                {"name": name} | {key: row[key] for key in measured if key in row}
                for name, row in rows.items()
                if "after" in row
            ]
        },
    } | others


def panels(content: dict[str, Any]) -> list[ElementTree.Element]:
    layers = read_layers(content)
    errors = read_errors(content, layers)
    shown = error_panels(errors, stacks_of(layers.values()))
    return [ElementTree.fromstring(svg) for svg in re.findall(r'<svg role="img".*?</svg>', shown)]


def charts_of(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r'<svg role="img".*?</svg>', text)]


@pytest.mark.parametrize(
    ("name", "stack", "kind", "block"),
    [
        ("model.layers.3.self_attn.q_proj", "model.layers", "self_attn.q_proj", 3),
        ("h.12.mlp.experts.7.up", "h", "mlp.experts.*.up", 12),
        ("encoder.block.0.layer.1.DenseReluDense.wi", "encoder.block", "layer.*.DenseReluDense.wi", 0),
        ("0.q", "", "q", 0),
        ("lm_head", "", "lm_head", None),
        ("visual.merger.mlp.0", "", "visual.merger.mlp.0", None),
    ],
)
def test_place_of_a_layer(name: str, stack: str, kind: str, block: int | None) -> None:
    layer = read_layers(report({name: {}}))[name]
    assert (layer.stack, layer.kind, layer.block) == (stack, kind, block)


def test_blocks_are_in_the_order_of_their_numbers() -> None:
    names = [f"m.{block}.{kind}" for block in (0, 1, 10, 11, 2) for kind in ("q", "k")]
    (stack,) = stacks_of(read_layers(report({name: {} for name in names})).values())
    assert stack.kinds == ("q", "k")
    assert stack.names == (0, 1, 2, 10, 11)
    assert stack.columns == {0: 0, 1: 1, 2: 2, 10: 3, 11: 4}


def test_very_many_blocks_share_columns() -> None:
    count = 3 * MOST_COLUMNS + 1
    (stack,) = stacks_of(read_layers(report({f"m.{block}.q": {} for block in range(count)})).values())
    assert len(stack.names) == MOST_COLUMNS
    assert [stack.columns[block] for block in range(count)] == sorted(stack.columns.values())
    assert all(stack.columns[block] == column for column, block in enumerate(stack.names))


def test_experts_of_a_block_are_one_mark() -> None:
    values = [0.001, 0.004, 0.03, 0.002]
    rows = {f"m.0.experts.{at}.up": {"before": 2 * value, "after": value} for at, value in enumerate(values)}
    content = report(rows | {"m.1.experts.0.up": {"before": 0.1, "after": 0.05, "fallback": "too few tokens"}})
    (chart,) = panels(content)
    first, second = chart.iter("g")
    median = statistics.median(values)
    assert first.findtext("title") == f"block 0, 4 results: {percent(median)}, plain {percent(2 * median)}"
    scale = LogScale.of([0.001, 0.1])
    line = next(line for line in first.iter("line") if line.get("class") == "spread")
    heights = [8 + 120 * (1 - scale.height(value)) for value in (min(values), max(values))]
    assert [float(line.attrib[key]) for key in ("y1", "y2")] == pytest.approx(heights, abs=0.06)
    assert second.findtext("title") == "m.1.experts.0.up: 5%, plain 10%"
    assert [circle.get("class") for circle in second.iter("circle")] == ["before", "alert"]


@pytest.mark.parametrize(("kept", "kind"), [(1, "after"), (2, "alert")])
def test_mark_of_several_is_red_if_half_fell_back(kept: int, kind: str) -> None:
    rows = {f"m.0.experts.{at}.up": {"after": 0.1, "fallback": "few" if at < kept else None} for at in range(4)}
    (chart,) = panels(report(rows))
    assert [circle.get("class") for circle in chart.iter("circle")] == [kind]
    assert f"{kept} of them plain results" in str(next(chart.iter("g")).findtext("title"))


def test_layers_without_a_figure_are_not_drawn_but_their_fallback_is_said() -> None:
    content = report({"m.0.up": {"before": None, "after": None, "fallback": "saw no tokens"}})
    errors = read_errors(content, read_layers(content))
    assert panels(content) == []
    assert "<td>saw no tokens</td>" in worst_tables(errors)


def test_several_methods_on_one_layer_are_all_counted() -> None:
    content = report({"m.0.up": {"after": 0.1}})
    content["calibration"]["layers"].append({"name": "m.0.up", "before": None, "after": 0.3, "fallback": None})
    (chart,) = panels(content)
    assert next(chart.iter("g")).findtext("title") == "block 0, 2 results: 20%"


def test_worst_layers_come_first() -> None:
    rows = {f"m.{block}.q": {"before": 0.9, "after": block / 100, "tokens": 1000 * block} for block in range(1, 30)}
    content = report(rows, structures={"m.29.q": "2:4"})
    shown = worst_tables(read_errors(content, read_layers(content))).replace("<wbr>", "")
    lines = re.findall(r"<tr><td>(.*?)</td></tr>", shown)
    cells = [re.split(r'</td><td(?: class="number")?>', line) for line in lines]
    assert [cell[0] for cell in cells] == [f"m.{block}.q" for block in range(29, 17, -1)]
    assert cells[0] == ["m.29.q", "29%", "90%", "int4 group 64, 2:4", "29,000", ""]


def test_reasons_are_counted_and_only_the_commonest_are_listed() -> None:
    rows = {f"m.{at}.q": {"after": 0.1, "fallback": "common" if at < 50 else f"rare {at}"} for at in range(100)}
    content = report(rows)
    shown = worst_tables(read_errors(content, read_layers(content)))
    counts = dict(re.findall(r'<td>([^<]*)</td><td class="number">(\d+)</td>', shown.partition("<h3>")[2]))
    assert counts["common"] == "50" and counts["39 other reasons"] == "39"
    assert len(counts) == 13


def test_map_of_schemes() -> None:
    rows: dict[str, dict[str, Any]] = {f"m.{block}.{kind}": {} for block in range(4) for kind in ("q", "up")}
    rows["m.0.up"] = {"scheme": "int8 channel"}
    rows["m.2.q"] = {"scheme": None, "dtype": "bfloat16"}
    rows["lm_head"] = {"scheme": "fp8 <channel>"}
    layers = read_layers(report(rows, structures={"m.2.q": "2:4"})).values()
    shown = scheme_map(layers, stacks_of(layers))
    (chart,) = charts_of(shown)
    titles = [box.findtext("title") for box in chart.iter("rect")]
    assert titles == [
        *("0 to 1: int4 group 64", "2: bfloat16, 2:4", "3: int4 group 64"),
        *("0: int8 channel", "1 to 3: int4 group 64"),
    ]
    colors = {str(box.findtext("title")).partition(": ")[2]: box.get("class") for box in chart.iter("rect")}
    legend = dict(re.findall(r'<i class="(hue\d)"></i>(.*?): \d', shown))
    assert {color: name for name, color in colors.items()}.items() <= legend.items()
    assert "<td>lm_head</td><td>fp8 &lt;channel&gt;</td>" in shown


def test_experts_with_different_schemes_are_told_apart_in_words() -> None:
    rows = {f"m.0.experts.{at}.up": {"scheme": "int8" if at else "fp8"} for at in range(3)}
    layers = read_layers(report(rows)).values()
    (chart,) = charts_of(scheme_map(layers, stacks_of(layers)))
    assert [box.findtext("title") for box in chart.iter("rect")] == ["0: 2 x int8; 1 x fp8"]


def test_map_of_zeros() -> None:
    rows = {"m.0.q": {"sparsity": 0.5}, "m.1.q": {"sparsity": 0.9}, "m.0.up": {"sparsity": None}}
    layers = read_layers(report(rows)).values()
    shown = sparsity_map(layers, stacks_of(layers))
    (chart,) = charts_of(shown)
    drawn = [(box.get("class"), box.findtext("title")) for box in chart.iter("rect")]
    assert drawn == [("shade5", "0: 50%"), ("shade9", "1: 90%")]
    assert "50% to 90% in 2 layers" in shown
    assert "sets no zeros" in sparsity_map([], [])


def test_kinds_without_end_are_cut_short_and_counted() -> None:
    content = report({f"m.0.layer_{at}": {"after": 0.1, "sparsity": 0.5} for at in range(300)})
    layers = read_layers(content)
    stacks = stacks_of(layers.values())
    shown = error_panels(read_errors(content, layers), stacks)
    assert len(charts_of(shown)) == 40 and "260 kinds more" in shown
    assert "260 kinds more" in scheme_map(layers.values(), stacks)


def test_reading_what_may_not_be_there() -> None:
    assert [number_of(value) for value in (1, 0.5, None, True, "1", float("nan"), float("inf"), 10**400)] == [
        *(1.0, 0.5, None, None, None, None, None, None),
    ]
    assert mapping_of({"a": {"b": 1}}, "a") == {"b": 1} and mapping_of({"a": [1]}, "a") == mapping_of({}, "a") == {}
    assert rows_of({"a": [{"b": 1}, 2]}, "a") == [{"b": 1}] and rows_of({"a": 3}, "a") == []


def test_table_sets_numbers_to_the_right_and_escapes() -> None:
    shown = ElementTree.fromstring(table(("a", "b"), [("<i>", "1"), ("x", "2")], (1,)))
    assert [(cell.text, cell.get("class")) for cell in shown.iter("td")] == [
        *(("<i>", None), ("1", "number"), ("x", None), ("2", "number")),
    ]
