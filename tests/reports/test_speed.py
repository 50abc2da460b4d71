"""What `lapcli bench` measured, in a report: in the columns where it is of the report's models, and only there."""

import json

import pytest

from lapcli.artifacts import RunDirectory
from lapcli.benchmarks.speed.configs import subject
from lapcli.benchmarks.speed.results import Cell, Results, Row
from lapcli.errors import ArtifactError
from lapcli.families.source import resolve_model
from lapcli.reports.collect import collect
from lapcli.reports.document import Items, Listing, Paragraph, Table
from lapcli.reports.sections import compose
from lapcli.reports.speed import read_benches
from lapcli.stages.reporting import report
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.slices import random_kept, sliced_by

MACHINE = {"device": "a chip", "date": "2026-11-30", "versions": {"torch": "9.9"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return resolve_model(str(tiny_gated_deltanet(tmp_path_factory.mktemp("base") / "tiny")))


@pytest.fixture
def run(base, tmp_path):
    found = RunDirectory(tmp_path / "run")
    found.note(base.describe(), "prune", {})
    sliced_by(base, random_kept(base, 16), found.path)
    return found


def row(one, what, *, batch=8, seconds=None, way="lapcli", **others):
    cell = Cell(what, one.name, one.ratio, way, batch, 64, one.key_heads, one.value_heads, one.key_width, 8)
    return Row(cell, "measured", seconds=seconds, **others)


def measured(path, config, *, name="mine", quick=False, device="a chip", more=()):
    whole, half = subject(name, config, 0), subject(name, config, "0.5")
    assert half.key_width == 16
    results = Results(
        "lapcli bench decode", {**MACHINE, "device": device}, path=path, quick=quick,
        subjects=[whole.to_json(), half.to_json()],
    )  # fmt: skip
    for one, seconds, peak, fit in ((whole, 3e-3, 2**21, 10), (half, 2e-3, 2**20, 17)):
        results.add(row(one, "decode", seconds=seconds))
        results.add(row(one, "decode", seconds=9.0, way="pytorch"))
        results.add(row(one, "prefill mixer", seconds=1.0, peak_bytes=peak))
        results.add(row(one, "memory", batch=fit, seconds=1.0, more={"fit": fit, "memory": 2.0**30}))
    # The other batch was measured of one of the two alone.
    results.add(row(whole, "decode", batch=1, seconds=1.0))
    for each in more:
        results.add(each)


def section(found):
    return next(each for each in compose(found).sections if each.title == "State, memory and speed")


def columns(found):
    (table,) = [b for b in section(found).blocks if isinstance(b, Table) and b.caption == "What a smaller state gains"]
    return dict(zip(table.columns, table.rows[0], strict=True))


def test_figures_of_the_runs_models_stand_in_its_columns(run, base):
    measured(run.path / "any-name.json", base.config)
    found = collect(run.path)
    gained = columns(found)
    assert gained["speed of the whole model"] == "1.50x (a step, batch 8, 64 tokens)"
    assert gained["peak memory of the mixer"] == "2 MiB \N{RIGHTWARDS ARROW} 1 MiB (batch 8, 64 tokens)"
    assert gained["sequences that fit"] == "10 \N{RIGHTWARDS ARROW} 17 in 1 GiB"
    blocks = section(found).blocks
    assert [b.lines for b in blocks if isinstance(b, Listing)] == [("lapcli bench decode",)]
    said = " ".join(b.text for b in blocks if isinstance(b, Paragraph))
    assert "any-name.json: measured on a chip, 2026-11-30, with random weights, torch 9.9." in said
    assert "in no column" not in said


def test_figures_of_other_models_and_toys_stand_below_alone(run, base, tmp_path):
    measured(tmp_path / "other.json", {**base.config, "hidden_size": 4096}, name="stranger")
    measured(tmp_path / "toys.json", base.config, quick=True)
    found = collect(run.path, [tmp_path / "other.json", tmp_path / "toys.json"])
    gained = columns(found)
    assert {gained[name] for name in list(gained)[2:]} == {"not measured"}
    said = [b.text for b in section(found).blocks if isinstance(b, Paragraph)]
    assert "Of other models or widths than this report's: stranger" in said[0]
    assert "says nothing of speed" in said[1]
    titles = [b.caption for b in section(found).blocks if isinstance(b, Table)]
    assert titles.count("One decode step of the whole model") == 2


def test_a_slice_measured_by_its_own_config_is_the_same_model(run, base):
    """As `--config RUN/sliced` does, whatever it is called and whatever transformers wrote into its config."""
    sliced = resolve_model(str(run.sliced))
    alone = subject("sliced", {**sliced.config, "transformers_version": "0", "dtype": "float64"}, 0)
    whole = subject("base", base.config, 0)
    results = Results("lapcli bench", MACHINE, path=run.path / "b.json", subjects=[whole.to_json(), alone.to_json()])
    results.add(row(whole, "decode", seconds=4.0))
    results.add(row(alone, "decode", seconds=1.0))
    assert columns(collect(run.path))["speed of the whole model"] == "4.00x (a step, batch 8, 64 tokens)"


def test_two_machines_are_told_apart(run, base):
    measured(run.path / "a.json", base.config)
    measured(run.path / "b.json", base.config, device="another chip")
    speed = columns(collect(run.path))["speed of the whole model"]
    assert speed == "1.50x (a step, batch 8, 64 tokens, a chip); 1.50x (a step, batch 8, 64 tokens, another chip)"


def test_failures_are_noted_and_text_from_files_does_nothing(run, base):
    evil = "<script>alert(1)</script>"
    bad = Row(row(subject(evil, base.config, 0), "decode").cell, "failed", evil)
    measured(run.path / "b.json", base.config, more=[bad])
    assert any(evil in item for b in section(collect(run.path)).blocks if isinstance(b, Items) for item in b.items)
    made = report(run.path, run.path)
    assert "<script" not in made.html.read_text()
    assert made.problems == ()


def test_what_is_no_result(run, tmp_path):
    """Found ones are said and left out, named ones are refused; other JSON of the run is none of its business."""
    (run.path / "evaluation.previous.json").write_text("{}")
    (run.path / "newer.json").write_text('{"kind": "speed", "schema": 99}')
    (run.path / "torn.json").write_text('{"kind": "speed", "schema": 1, "rows": [{"what"')
    (run.path / "holes.json").write_text('{"kind": "speed", "schema": 1, "rows": [{}, 3]}')
    problems = collect(run.path).problems
    assert [any(name in said for said in problems) for name in ("newer", "torn", "holes", "previous")] == [1, 1, 1, 0]
    for path in (run.path / "torn.json", run.path / "run.json", tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(ArtifactError):
            collect(run.path, [path])


def test_a_file_that_is_found_and_named_counts_once(run, base):
    measured(run.path / "b.json", base.config)
    found, problems = read_benches([run.path], [run.path / ".." / "run" / "b.json"])
    assert (len(found), problems) == (1, [])


def test_results_of_before_subjects_were_noted_are_shown(run, base):
    measured(run.path / "b.json", base.config)
    document = json.loads((run.path / "b.json").read_text())
    del document["subjects"], document["quick"]
    (run.path / "b.json").write_text(json.dumps(document))
    found = collect(run.path)
    assert columns(found)["speed of the whole model"] == "not measured"
    said = [b.text for b in section(found).blocks if isinstance(b, Paragraph)]
    assert "mine; their figures are in no column" in said[0]
