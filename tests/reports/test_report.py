"""Reports: their numbers are the evaluations', nothing in them runs or is fetched, and they parse."""

import json
import math
import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from html.parser import HTMLParser

import pytest
import torch

from lapcli.artifacts import Lineage, RunDirectory, write_artifact
from lapcli.errors import ArtifactError
from lapcli.evaluation.estimates import accuracy, mean
from lapcli.evaluation.results import Evaluation, ModelScores, Score
from lapcli.evaluation.table import format_value
from lapcli.reports.charts import draw
from lapcli.reports.collect import collect
from lapcli.reports.document import Chart, Document, Items, Listing, Paragraph, Point, Section, Series, Table
from lapcli.reports.html import html
from lapcli.reports.markdown import markdown
from lapcli.reports.pooling import pool, pool_intervals
from lapcli.reports.sections import compose
from lapcli.stages.evaluation_file import write_evaluation
from lapcli.stages.reporting import report
from lapcli.sweeps.record import SweepDirectory, SweepRecord
from lapcli.testing import browser

EVIL = "<script>alert(1)</script>|`x`\x1b[31m\"'&"
VOID = {"meta", "img", "br", "link", "input"}
SVG = "{http://www.w3.org/2000/svg}"


class Strict(HTMLParser):
    """Sees that every tag is closed in order, and keeps what was there."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.cells, self.text = [], [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def parsed(text):
    parser = Strict()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(parser.tags)
    assert not [name for name, _value in parser.attributes if name.startswith("on")]
    places = [value for name, value in parser.attributes if name in ("src", "href")]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in places)
    ids = [value for name, value in parser.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in places if value.startswith("#")} <= set(ids)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert parser.tags.count("h1") == 1
    return parser


def scores(perplexity, hits, notes=()):
    return (
        Score("builtin", "token_perplexity", False, mean([perplexity - 1, perplexity + 1]), {}, notes=notes),
        Score("niah", "exact_match", True, accuracy([True] * hits + [False] * (4 - hits)), {}, length=512),
        Score("niah", "exact_match", True, accuracy([True] * (hits // 2) + [False] * (4 - hits // 2)), {}, length=1024),
    )


def model(label, *given, **options):
    return ModelScores(label, label, None, label * 4, "float32", "auto", 9, scores(*given, **options))


BASE = model("base", 10.0, 4)


def evaluation(*models):
    return Evaluation((BASE, *models), {"lapcli": "0", "device": "cpu"})


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.note({"name": f"/no/such/{EVIL}", "revision": None, "digest": "d" * 64}, "prune", {})
    write_evaluation(evaluation(model("sliced", 14.0, 2, notes=(EVIL,))), directory.evaluation)
    directory.recovery.mkdir()
    lines = [{"step": 0, "validation": {"cross_entropy": 3.0, "kl": 1.0, "loss": 7.0}}]
    lines += [{"step": step, "tokens": 100 * step, "cross_entropy": 3.0 - step / 10, "kl": 1.0} for step in (1, 2)]
    lines.append({"step": 2, "validation": {"cross_entropy": 2.5, "kl": 0.5, "loss": 4.5}})
    (directory.recovery / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


@pytest.fixture
def sweep(tmp_path):
    """Two methods, two ratios, two seeds, made up; one cell failed."""
    directory = SweepDirectory(tmp_path / "sweep")
    record = SweepRecord({"name": "demo", "revision": None, "digest": "d" * 64}, {"tasks": ["builtin"], "limit": None})
    record.sessions.append({"command": ["lapcli", "sweep", EVIL], "begun": "then", "ended": "later", "versions": {}})
    for ratio, kept in (("0.5", 16), ("0.75", 8)):
        for number, method in enumerate(("drrqr", "l1")):
            for seed in (0, 1):
                name = f"{method}-{ratio}-s{seed}"
                axes = {"method": method, "ratio": ratio, "score_from": "both", "data": "builtin", "samples": 8}
                entry = {
                    "axes": {**axes, "seq_len": 64, "seed": seed}, "state": "done", "key_width": 32, "kept_width": kept,
                    "settings": {"calibration": None, "selection": None, "recovery": None},
                    "state_bytes": {"before": 4096, "after": 4096 * kept // 32},
                }  # fmt: skip
                if (method, ratio, seed) == ("l1", "0.75", 1):
                    entry |= {"state": "failed", "failure": {"message": f"out of {EVIL}"}}
                else:
                    perplexity = 12.0 + 10 * number + 2 * seed + (8 if kept == 8 else 0)
                    write_evaluation(evaluation(model("sliced", perplexity, 2)), directory.cell(name).evaluation)
                record.cells[name] = entry
    record.write(directory)
    write_evaluation(evaluation(), directory.base.evaluation)
    return directory


def test_a_run_has_the_numbers_of_its_evaluation(run, tmp_path):
    made = report(run.path, tmp_path / "out")
    page = parsed(made.html.read_text())
    rows = json.loads(run.evaluation.read_text())["rows"]
    for row in rows:
        for value in row["values"].values():
            assert page.cells.count(format_value(value["value"], value["stderr"])) >= 2
    # 14 - 10, taken item by item: both items moved by as much.
    table = next(block for block in blocks(run.path) if isinstance(block, Table) and block.caption == "All scores")
    assert table.rows[0][-1].startswith("+4.0")
    assert "not measured" not in page.text.split("Commands")[0].split("State, memory")[0]
    # What is not there is said: the base model is gone, and with it the sizes.
    assert made.problems
    assert "not in this report" in page.text
    assert made.whole == made.chains == 1


def test_what_files_say_is_shown_and_does_nothing(run, sweep, tmp_path):
    for source in (run, sweep):
        made = report(source.path, tmp_path / "out", overwrite=False)
        page = parsed(made.html.read_text())
        assert "<script>alert(1)</script>|`x`\ufffd[31m\"'&" in page.text
        text = made.markdown.read_text()
        assert "<script" not in re.sub(r"(?m)^    .*$", "", text)
        assert "\x1b" not in text
        for line in text.splitlines():
            if line.startswith("| ") and "script" in line:
                assert "\\|" in line


def blocks(path):
    return [block for section in compose(collect(path)).sections for block in section.blocks]


def test_a_sweep_pools_seeds_and_says_what_failed(sweep):
    found = blocks(sweep.path)
    table = next(block for block in found if isinstance(block, Table) and block.caption.startswith("Selectors at"))
    first = {(row[0], row[1]): row[2:6] for row in table.rows}
    # Two items one apart from their mean: each seed has a standard error of 1; two seeds 2 apart add 2 / 2.
    assert first["drrqr", "0.5"] == ("16 of 32", "2 KiB", "2", "13.0 ± 1.4")
    assert first["l1", "0.5"][-1] == "23.0 ± 1.4"
    # One of two seeds is there.
    assert first["l1", "0.75"][-1] == "30.0 ± 1.0"
    assert first["unpruned", "0"] == ("", "4 KiB", "", "10.0 ± 1.0")
    chart = next(block for block in found if isinstance(block, Chart))
    assert [(line.name, [(point.x, point.y) for point in line.points]) for line in chart.series] == [
        ("unpruned", [(4096, 10.0)]),
        ("drrqr", [(1024, 21.0), (2048, 13.0)]),
        ("l1", [(1024, 30.0), (2048, 23.0)]),
    ]
    gains = next(block for block in found if isinstance(block, Table) and block.caption.startswith("What a smaller"))
    assert gains.rows[0] == ("16 of 32", "1,024 → 512 (50.0% fewer)", "not measured", "not measured")
    lengths = next(block for block in found if isinstance(block, Table) and "by length" in block.caption)
    assert lengths.columns[2:] == ("512 tokens", "1024 tokens")
    assert lengths.rows[0][2:] == ("1.00 ± 0.10", "0.50 ± 0.22")
    seeds = next(block for block in found if isinstance(block, Table) and block.caption.startswith("Text, amount"))
    assert [row[4:6] for row in seeds.rows[:3]] == [
        ("0", "12.0 ± 1.0"), ("1", "14.0 ± 1.0"), ("mean of 2", "13.0 ± 1.4"),
    ]  # fmt: skip
    failed = next(block for block in found if isinstance(block, Items))
    assert failed.items[0].startswith("l1-0.75-s1: out of ")


@pytest.mark.parametrize(
    ("given", "value", "error"),
    [
        ([(3.0, 0.5)], 3.0, 0.5),
        # (0.09 + 0.16) / 2 + 2 / 2
        ([(10.0, 0.3), (12.0, 0.4)], 11.0, math.sqrt(1.125)),
        ([(1.0, 0.2), (1.0, 0.2), (1.0, 0.2)], 1.0, 0.2),
        ([(1.0, None), (3.0, 0.1)], 2.0, None),
        ([(math.inf, 0.1), (3.0, 0.1)], math.inf, 0.1),
    ],
    ids=["one", "two", "alike", "one without", "infinite"],
)
def test_pooling(given, value, error):
    found = pool(given)
    assert found.value == value
    assert found.stderr == (None if error is None else pytest.approx(error))


def look_into(run, utilisation, samples=2):
    """Write an analysis of base and slice, of one head of widths 8 and 4, whose utilisation falls off as 1 / tokens."""
    tensors = {"positions": torch.arange(1, 41) * 10}
    for label, width in (("base", 8), ("sliced", 4)):
        rank = width * utilisation[label] / tensors["positions"].float()
        states = {
            "effective_rank": rank,
            "kappa": 100 + 0 * rank,
            "key_kappa": 1 + 0 * rank,
            "key_margin": 2 + 0 * rank,
        }
        for name, value in states.items():
            tensors[f"{label}.layers.0.{name}"] = value.view(1, -1, 1).expand(samples, -1, -1)
        tensors[f"{label}.layers.0.spectrum"] = torch.ones(1, width).double()
    sizes = {"index": 0, "heads": 1, "value_heads": 1, "value_width": 8}
    record = {
        "models": {"base": [{**sizes, "key_width": 8}], "sliced": [{**sizes, "key_width": 4}]},
        "floored": {"base": 0, "sliced": 0},
        "output_error": {"sliced": [{"own": 0.1, "base": 0.1}]},
    }
    model = {"name": "demo", "revision": None, "digest": "d" * 64}
    lineage = Lineage("analysis", model, "any", {"samples": samples, "models": ["base", "sliced"]}, record=record)
    run.path.mkdir(parents=True, exist_ok=True)
    write_artifact(run.path / "analysis" / "analysis.safetensors", lineage, tensors)


def test_cells_that_were_looked_into_share_a_chart(sweep):
    def charts():
        found = [block for block in blocks(sweep.path) if isinstance(block, Chart)]
        return [chart for chart in found if chart.title == "Rank utilisation of the states"]

    assert charts() == []
    look_into(sweep.cell("drrqr-0.5-s0"), {"base": 2.0, "sliced": 3.0})
    look_into(sweep.cell("l1-0.5-s0"), {"base": 2.0, "sliced": 5.0})
    look_into(sweep.cell("l1-0.5-s1"), {"base": 2.0, "sliced": 7.0}, samples=3)
    (chart,) = charts()
    # The last one looked at other text, so it is no line; two cells are of one method, so cells go by their names.
    assert [line.name for line in chart.series] == ["unpruned", "drrqr-0.5-s0", "l1-0.5-s0"]
    for line, numerator in zip(chart.series, (2.0, 3.0, 5.0), strict=True):
        assert line.points[-1].x == 400
        assert len(line.points) <= 16
        assert [point.y for point in line.points] == pytest.approx([numerator / point.x for point in line.points])


def test_a_chart_puts_points_where_they_belong():
    line = Series("a", (Point(0, 1.0), Point(1, 10.0, 5.0), Point(2, 100.0), Point(3, math.nan), Point(4, -1.0)))
    chart = Chart("title", "a description", "x", "y", (line, Series(EVIL, (Point(2, 3.0),))), log_y=True)
    root = ElementTree.fromstring(draw(chart, "f1"))
    circles = root.findall(f".//{SVG}circle")
    # NaN, and what has no logarithm, are left out; the legend has one more.
    xs, ys = ([float(circle.get(name)) for circle in circles[:3]] for name in ("cx", "cy"))
    assert xs[2] - xs[1] == pytest.approx(xs[1] - xs[0], abs=0.1)
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.1)
    assert ys[0] > ys[2]
    assert len(circles) == 4
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles[:3] == ["title", "a: 1.000", "a: 10.0 ± 5.0"]
    assert any(title.startswith("<script>") for title in titles)
    assert root.get("aria-labelledby") == "f1-title f1-desc"


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log"])
@pytest.mark.parametrize("values", [[], [math.inf], [0.0], [5.0], [3.0, 3.0], [1e-9, 1e9]], ids=str)
def test_awkward_charts_are_drawn_all_the_same(values, log):
    points = tuple(Point(number, value) for number, value in enumerate(values))
    text = draw(Chart("t", "d", "x", "y", (Series("s", points),), log_y=log), "f1")
    ElementTree.fromstring(text)
    assert "nan" not in text
    assert "inf" not in text.replace("infinite", "")


def test_an_error_bar_reaches_as_far_as_the_error():
    line = Series("a", (Point(0, 10.0, 5.0), Point(1, 10.0), Point(2, 15.0), Point(3, 5.0)))
    root = ElementTree.fromstring(draw(Chart("title", "a description", "x", "y", (line,)), "f1"))
    ys = [float(circle.get("cy")) for circle in root.findall(f".//{SVG}circle")]
    (bar,) = (
        path.get("d") for path in root.iter(f"{SVG}path") if "h8" in path.get("d", "") and "z" not in path.get("d")
    )
    top, bottom = re.match(r"M[\d.]+ ([\d.]+)V([\d.]+)M", bar).groups()
    assert [float(top), float(bottom)] == pytest.approx([ys[2], ys[3]], abs=0.11)


LAID_OUT = """(() => {
  const sizes = [...document.querySelectorAll("body *")]
    .filter(e => !e.closest("svg") && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
    .map(e => parseFloat(getComputedStyle(e).fontSize));
  const drawn = [...document.querySelectorAll("svg text")]
    .map(e => [e.getScreenCTM(), parseFloat(getComputedStyle(e).fontSize)])
    .map(([place, size]) => Math.hypot(place.a, place.b) * size);
  const pictures = [...document.querySelectorAll("img")].map(e => e.clientWidth / e.naturalWidth * 150 / 96);
  const prose = [...document.querySelectorAll("h1, h2, p, li, figcaption, caption span")];
  return {
    width: document.documentElement.scrollWidth,
    text: Math.min(...sizes), drawn: Math.min(...drawn), pictures: Math.min(1, ...pictures),
    beyond: prose.filter(e => e.getBoundingClientRect().right > innerWidth).map(e => e.textContent),
  };
})()"""


def drawing(width):
    """A white PNG, a quarter as high as wide."""
    rows = zlib.compress((b"\0" + b"\xff" * width) * (width // 4))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, width // 4, 8, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


@pytest.mark.skipif(browser.installed() is None, reason="no Chromium here")
def test_a_browser_shows_and_prints_it_without_complaint(run, sweep, tmp_path):
    look_into(run, {"base": 2.0, "sliced": 3.0})
    for name, width in (("spectra", 1650), ("utilisation", 750)):
        (run.path / "analysis" / f"{name}.png").write_bytes(drawing(width))
    with browser.Browser() as page:
        for source in (run, sweep):
            made = report(source.path, tmp_path / source.path.name / "out")
            for width in (1280, 390):
                page.open(made.html, width)
                found = page.evaluate(LAID_OUT)
                assert found["width"] <= width
                assert found["beyond"] == []
                assert found["text"] >= 13
                assert found["drawn"] >= 9
                # Of the size that they were drawn for, whose text is 9 pt.
                assert found["pictures"] >= 0.74
            printed = page.pdf()
            assert printed.startswith(b"%PDF-")
            assert len(re.findall(rb"/Type\s*/Page\b", printed)) > 1
        assert page.complaints == []
        assert {address.partition(":")[0] for address in page.asked_for} == {"file", "data"}


def test_bars_of_shares_stay_within_0_and_1(run, tmp_path):
    charts = [block for block in blocks(run.path) if isinstance(block, Chart) and "exact" in block.title]
    points = {(line.name, point.x): point for chart in charts for line in chart.series for point in line.points}
    whole = points["unpruned", 512]
    # Wilson's interval of 4 of 4, by hand: 1 - z² / (n + z²).
    assert whole.bar == pytest.approx((1 - 1.96**2 / (4 + 1.96**2), 1.0), abs=1e-4)
    assert all(0 <= end <= 1 for point in points.values() for end in point.bar)
    assert any("95 % intervals" in chart.description for chart in charts)
    text = report(run.path, tmp_path / "out").markdown.read_text()
    assert "| unpruned | 512 | 1.00 ± 0.10 (0.51 to 1.00) |" in text


def test_intervals_of_seeds():
    assert pool_intervals([0.9], [(0.7, 0.97)]) == (0.7, 0.97)
    # Both alike: what a measurement owes to its items does not average out.
    assert pool_intervals([0.9, 0.9], [(0.7, 0.97)] * 2) == pytest.approx((0.7, 0.97))
    low, high = pool_intervals([1.0, 0.6], [(0.8, 1.0), (0.4, 0.8)])
    # 0.2² below both; the variance 0.08 over 2, times 1.96².
    assert low == pytest.approx(0.8 - math.sqrt(0.04 + 1.96**2 * 0.04), abs=1e-4)
    assert high == 1.0


def test_numbers_of_a_figure_are_those_of_tables():
    points = (Point(1024, 1.0, 0.0), Point(2e6, 4618.5, 6770.0), Point(0.5, 2.0, 0.25))
    chart = Chart("t", "d", "x", "y", (Series("s", points),))
    text = markdown(Document("T", "lead", [Section("S", [chart])]))
    assert [line for line in text.splitlines() if line.startswith("| s")] == [
        "| s | 1,024 | 1.000 |", "| s | 2,000,000 | 4618 ± 6770 |", "| s | 0.5 | 2.00 ± 0.25 |",
    ]  # fmt: skip


def test_an_evaluation_without_a_run_is_reported(tmp_path):
    directory = RunDirectory(tmp_path / "alone")
    write_evaluation(Evaluation((model("model", 14.0, 2),), {"lapcli": "0", "device": "cpu"}), directory.evaluation)
    made = report(directory.path, tmp_path / "out")
    text = made.markdown.read_text()
    assert text.startswith("# Evaluation: model")
    assert "14.0 ± 1.0" in text
    assert f"    lapcli eval builtin niah --niah-lengths 512,1024 --model model --run {directory.path}\n" in text
    write_evaluation(evaluation(model("sliced", 14.0, 2)), directory.evaluation)
    text = report(directory.path, tmp_path / "out").markdown.read_text()
    assert f"--model sliced --baseline base --run {directory.path}\n" in text
    directory.evaluation.write_text("{")
    with pytest.raises(ArtifactError, match="evaluation"):
        report(directory.path, tmp_path / "out")


def test_golden():
    table = Table("Cap*tion", ("name", "n"), (("a|b", "1"), ("<c>", "2")), note="a note")
    document = Document("T", "lead", [Section("S", [Paragraph("x < y"), table, Listing(("lapcli a", "b"))])])
    assert markdown(document) == "\n".join(
        [
            "# T", "", "lead", "", "## S", "", "x &lt; y", "", "**Cap\\*tion**", "", "| name | n |", "| --- | ---: |",
            "| a\\|b | 1 |", "| &lt;c&gt; | 2 |", "", "a note", "", "    lapcli a", "    b", "",
        ]
    )  # fmt: skip
    page = parsed(html(document))
    assert page.cells == ["name", "n", "a|b", "1", "<c>", "2"]
    assert "<p>x &lt; y</p>" in html(document)


def test_what_is_no_report_is_not_replaced(run, tmp_path):
    with pytest.raises(ArtifactError, match="neither a run nor a sweep"):
        report(tmp_path / "nothing", tmp_path / "out")
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.md").write_text("mine")
    with pytest.raises(ArtifactError, match="lapcli did not write it"):
        report(run.path, out)
    assert not (out / "report.html").exists()
    report(run.path, out, overwrite=True)
    before = (out / "report.html").read_text()
    report(run.path, out)
    assert (out / "report.html").read_text() == before


def test_a_damaged_part_is_said_and_the_rest_is_there(run, tmp_path):
    run.calibration.write_bytes(b"none")
    text = report(run.path, tmp_path / "out").markdown.read_text()
    assert "truncated or no safetensors file" in text
    assert "14.0 ± 1.0" in text
