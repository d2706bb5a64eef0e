"""The page: its figures are those of the JSON file, it stands alone, and any report gives a sound one."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel import oneshot
from sparseautomodel.charts import LogScale, percent
from sparseautomodel.plan import size_text
from sparseautomodel.report_page import PAGE_NAME, render, write_report
from sparseautomodel.verify import REPORT_NAME

pytestmark = pytest.mark.filterwarnings("ignore")

VOID = {"meta", "wbr"}
MINIMAL: dict[str, Any] = {"source": "org/model", "layers": [], "nbytes_before": 4000, "nbytes_after": 1000}
KEYS = (
    "output",
    "recipe",
    "layers",
    "parameters",
    "structures",
    "reads",
    "seconds",
    "peak_nbytes",
    "notes",
    "versions",
)
CALIBRATION_KEYS = ("num_tokens", "layers", "blocks", "verdict", "seconds", "peak_nbytes")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(min_codepoint=32, max_codepoint=1000, exclude_categories=["Cc"]), max_size=5)
    | st.just("m.0.q"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "error", "before", "after", "scheme", "sparsity", "fallback", "tokens", "kind", "result"]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


class Page(HTMLParser):
    """The text of a page, by section; raises where tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.sections: dict[str, str] = {"": ""}
        self._heading: str | None = None
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "h2":
            self._heading = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "h2" and self._heading is not None:
            self.sections[self._heading] = ""
            self._heading = None

    def handle_data(self, data: str) -> None:
        if self._heading is not None:
            self._heading += data
        elif "style" not in self.open:
            self.sections[list(self.sections)[-1]] += data + " "


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("plain") / "out"
    oneshot(tiny_llama, "2of4-w4a16", output=output)
    return output


@pytest.fixture(scope="module")
def calibrated(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("calibrated") / "out"
    rows = [{"input_ids": torch.arange(1, 25) * step % 250} for step in range(1, 13)]
    recipe = {"modifiers": [{"GPTQModifier": {"scheme": "W4A16", "group_size": 32}}]}
    oneshot(tiny_llama, recipe, data=rows, output=output, batch_size=4)
    return output


def content_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / REPORT_NAME).read_text())


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL)]


def test_page_of_a_plain_run(plain: Path) -> None:
    path = write_report(plain)
    assert path == plain / PAGE_NAME
    content, page = content_of(plain), path.read_text(encoding="utf-8")
    sections = Page(page).sections
    for figure in (content["nbytes_before"], content["nbytes_after"], content["peak_nbytes"]):
        assert size_text(figure) in sections[""]
    assert f"{content['nbytes_before'] / content['nbytes_after']:.2f} times" in sections[""]
    assert "not measured" in sections[""] and "No verdict" in sections[""]
    assert "Error of each layer" not in sections and "Worst layers" not in sections
    assert f"50% in {len(content['layers'])} layers" in sections["Sparsity of each layer"]
    assert "mask_structure: '2:4'" in sections["Recipe"] and content["versions"]["torch"] in sections["Recipe"]
    assert all(note in sections["Notes"] for note in content["notes"])
    assert list(plain.glob(f"*{PAGE_NAME}*")) == [path]


def test_bars_of_bytes_add_up(plain: Path) -> None:
    content = content_of(plain)
    section = render(content).partition("<h2>Where the bytes are</h2>")[2].partition("<h2>")[0]
    widths = [[float(box.attrib["width"].rstrip("%")) for box in svg.iter("rect")] for svg in svgs(section)]
    before, after = (sum(column) for column in zip(*widths, strict=True))
    assert after / before == pytest.approx(content["nbytes_after"] / content["nbytes_before"], rel=1e-3)


def test_marks_of_a_calibrated_run_are_the_errors_in_the_file(calibrated: Path) -> None:
    content = content_of(calibrated)
    page = render(content)
    rows = content["calibration"]["layers"]
    scale = LogScale.of(value for row in rows for value in (row["before"] or 0, row["after"]))
    section = page.partition("<h2>Error of each layer</h2>")[2].partition("<h2>")[0]
    drawn = {
        str(group.findtext("title")).partition(":")[0]: {
            circle.attrib["class"]: float(circle.attrib["cy"]) for circle in group.iter("circle")
        }
        for svg in svgs(section)
        for group in svg.iter("g")
    }
    assert drawn.keys() == {row["name"] for row in rows} and len(rows) == 14
    for row in rows:
        kind = "after" if row["fallback"] is None else "alert"
        assert drawn[row["name"]][kind] == pytest.approx(8 + 120 * (1 - scale.height(row["after"])), abs=0.06)
        assert drawn[row["name"]]["before"] == pytest.approx(8 + 120 * (1 - scale.height(row["before"])), abs=0.06)
    worst = max(rows, key=lambda row: row["after"])
    assert re.search(rf"{worst['name']}\W.*{percent(worst['after'])}", page.replace("<wbr>", ""))
    Page(page)


def test_blocks_and_steps() -> None:
    blocks = [{"name": f"m.{at}", "error": 0.001 * 2**at, "tokens": 96, "seconds": 1.0 + at} for at in range(5)]
    content = MINIMAL | {"calibration": {"blocks": blocks, "seconds": {"walk": 75.0, "write": 1.5}, "peak_nbytes": 5e8}}
    page = render(content)
    (chart,) = [svg for svg in svgs(page) if svg.findtext("title") == "Error of each block"]
    scale = LogScale.of(row["error"] for row in blocks)
    heights = [float(circle.attrib["cy"]) for circle in chart.iter("circle")]
    assert heights == pytest.approx([8 + 160 * (1 - scale.height(row["error"])) for row in blocks], abs=0.06)
    sections = Page(page).sections
    assert "The last block ends at 1.6%; the largest is m.4, 1.6%." in sections["Error of each block"]
    times = sections["Time and memory"]
    assert "5 blocks, the median 3.0 s, the slowest 5.0 s" in times
    assert "1 min 15 s" in times and "1.5 s" in times and "500.0 MB" in times


@pytest.mark.parametrize(
    ("verdict", "headline", "words"),
    [
        (
            {
                "kind": "perplexity",
                "source": 20.0,
                "result": 21.0,
                "divergence": 0.05,
                "agreement": 0.9,
                "passed": True,
            },
            ("Perplexity", "21.00", "from 20.00, +5.0%"),
            ("Passed", "likeliest at 90.0% of the positions", "divergence 0.05 nats", "did not see"),
        ),
        (
            {
                "kind": "perplexity",
                "source": 20.0,
                "result": None,
                "divergence": None,
                "passed": False,
                "text": "WARNING",
            },
            ("Perplexity", "not finite", "from 20.00"),
            ("Not passed", "WARNING"),
        ),
        (
            {
                "kind": "hidden states",
                "source": None,
                "result": None,
                "divergence": 0.012,
                "passed": True,
                "seen": True,
            },
            ("Error", "1.2%", "of the hidden states"),
            ("Passed", "hidden states differ by 1.20%", "of the calibration data"),
        ),
        (
            {"kind": "logits", "source": None, "result": None, "divergence": 0.8, "agreement": 0.2, "passed": False},
            ("Divergence", "0.8 nats", "mean over the logits"),
            ("Not passed", "20.0%"),
        ),
    ],
)
def test_verdicts(verdict: dict[str, Any], headline: tuple[str, ...], words: tuple[str, ...]) -> None:
    text = Page(render(MINIMAL | {"calibration": {"verdict": verdict | {"tokens": 4096}}})).sections[""]
    figures, _, said = text.partition("assed")
    assert re.search(r" \s*".join(map(re.escape, headline)), figures)
    for word in words:
        assert word in text
    assert "No verdict" not in said


def test_page_needs_no_network_and_runs_nothing(calibrated: Path) -> None:
    page = render(content_of(calibrated))
    assert not Page(page).tags & {"script", "link", "img", "iframe", "object", "base", "form"}
    assert not re.search(r"\b(src|href)\s*=|url\(|@import|https?://", page)
    assert "default-src 'none'" in page and "width=device-width" in page and "prefers-color-scheme:dark" in page


def test_what_comes_from_files_is_escaped() -> None:
    bad = "m.0.<script>alert(1)</script>&\"'"
    row = {"name": bad, "scheme": bad, "dtype": bad, "nbytes_before": 4, "nbytes_after": 1, "sparsity": 0.5}
    measured = {"name": bad, "before": 0.2, "after": 0.2, "fallback": bad}
    page = render(
        {
            **{"source": bad, "output": bad, "recipe": {bad: bad}, "layers": [row, row | {"name": f"<b>{bad}"}]},
            **{"nbytes_before": 4, "nbytes_after": 1, "versions": {bad: bad}, "notes": [bad], "warnings": [bad]},
            "structures": {bad: bad},
            "calibration": {
                **{"layers": [measured], "blocks": [{"name": bad, "error": 0.1, "seconds": 1}], "seconds": {bad: 1.0}},
                **{"verdict": {"kind": bad, "text": bad, "passed": False}, "fingerprint": bad, "num_tokens": bad},
            },
        }
    )
    assert "script" not in Page(page).tags and "b" not in Page(page).tags
    assert "<script" not in page and page.count("&lt;script&gt;") > 15


def test_report_without_what_newer_ones_have() -> None:
    sections = Page(render(MINIMAL)).sections
    assert "4.00 times" in sections[""] and "No verdict" in sections[""]


@given(
    st.fixed_dictionaries({}, optional={key: JSON for key in KEYS}),
    st.fixed_dictionaries({}, optional={key: JSON for key in CALIBRATION_KEYS}),
)
def test_any_json_gives_a_sound_page(others: dict[str, Any], calibration: dict[str, Any]) -> None:
    page = render(MINIMAL | others | {"calibration": calibration})
    Page(page)
    assert svgs(page)


def test_page_of_many_experts_stays_small() -> None:
    names = [
        f"model.layers.{block}.mlp.experts.{expert}.{kind}_proj"
        for block in range(32)
        for expert in range(112)
        for kind in ("gate", "up", "down")
    ]
    assert len(names) > 10_000
    rows = [{"name": name, "scheme": "int4", "nbytes_before": 4, "nbytes_after": 1, "sparsity": 0.5} for name in names]
    errors = [
        {"name": name, "before": 0.02, "after": 0.001 * (1 + at % 7), "fallback": None if at % 9 else f"{at} tokens"}
        for at, name in enumerate(names)
    ]
    page = render(MINIMAL | {"layers": rows, "calibration": {"layers": errors}})
    assert len(page) < 300_000
    assert len(re.findall('<circle class="(?:after|alert)"', page)) == 32 * 3
    Page(page)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no compression_report.json.*oneshot"),
        ("{", "is damaged"),
        ("[1]", "holds a list"),
        ('{"layers": []}', "it has no source, nbytes_before, nbytes_after"),
    ],
)
def test_folder_without_a_report(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / REPORT_NAME).write_text(text)
    with pytest.raises(ValueError, match=said):
        write_report(tmp_path)
    assert not (tmp_path / PAGE_NAME).exists()


def test_output_elsewhere(tmp_path: Path) -> None:
    (tmp_path / REPORT_NAME).write_text(json.dumps(MINIMAL | {"notes": ["\ud800"]}))
    assert write_report(tmp_path, tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(ValueError, match="is a folder"):
        write_report(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        write_report(tmp_path, tmp_path / "absent" / "page.html")


def test_page_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / REPORT_NAME).write_text(json.dumps(MINIMAL))
    (tmp_path / PAGE_NAME).write_text("an older page")

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            write_report(tmp_path)
    assert (tmp_path / PAGE_NAME).read_text() == "an older page"
    assert sorted(path.name for path in tmp_path.iterdir()) == [PAGE_NAME, REPORT_NAME]
    assert "org/model" in write_report(tmp_path).read_text()
