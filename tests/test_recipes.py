"""The recipes that ship: each can be read, asks for what there is and says so; the paper's tables all have a row."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lapcli.analysis.settings import AnalysisSettings
from lapcli.artifacts import read_artifact
from lapcli.cli.app import main
from lapcli.data import parse_mixture
from lapcli.data.hub import find_hub_set
from lapcli.errors import RecipeError
from lapcli.evaluation.tasks import TASKS, parse_tasks
from lapcli.families.source import resolve_model
from lapcli.linearising.recipe import read_conversion
from lapcli.linearising.settings import layers_of
from lapcli.machine import Machine
from lapcli.recipe import read_recipe
from lapcli.reporting import SilentReporter
from lapcli.shipped import find_recipe
from lapcli.stages.analysis import AnalysisInputs, analyse
from lapcli.stages.evaluation import models_of
from lapcli.stages.selection import budget_for
from lapcli.sweeps.cells import expand
from lapcli.sweeps.record import SweepDirectory
from lapcli.sweeps.work import Job, do
from lapcli.testing.dual_state import tiny_source
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.training.adapters import ALPHA, RANK
from lapcli.training_recipe import read_training_recipe

ROOT = Path(__file__).resolve().parents[1]
ALL = {
    path.relative_to(ROOT / "recipes").with_suffix("").as_posix(): path
    for path in sorted((ROOT / "recipes").rglob("*.yaml"))
    if path.parent.name != "serve"
}
CONVERSIONS = {name: path for name, path in ALL.items() if name.split("/")[1].startswith("dsla")}
# Those of training are chains of nothing: tests/stages/test_pretraining.py.
RECIPES = {name: path for name, path in ALL.items() if not name.startswith("train/") and name not in CONVERSIONS}
PAGE = (ROOT / "docs" / "recipes.md").read_text()
# What K is in the models of the paper, and in the one that ships.
KEY_WIDTHS = {"paper": (128, 256), "gated_deltanet": (64,), "demo": (64,)}


def header(path):
    """The comment at the top, unwrapped, by what each part is called; the first part is called nothing."""
    lines = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    parts = re.split(r"\b(Run|Needs|Gives|Costs):", " ".join(lines))
    return {"": parts[0].strip(), **dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))}


@pytest.mark.parametrize("name", RECIPES)
def test_it_asks_for_what_there_is(name):
    recipe = read_recipe(RECIPES[name])
    cells = expand(recipe, name)
    for cell in cells:
        for key_width in KEY_WIDTHS[name.split("/")[0]]:
            assert budget_for(key_width, cell.selection).width.width < key_width
        for data in (cell.calibration.data, *([cell.recovery.data] if cell.recovery else [])):
            for part in parse_mixture(data):
                assert part.name in ("builtin", "recall") or find_hub_set(part.name), part
    for task in parse_tasks(recipe.evaluation.tasks) if recipe.evaluation else ():
        assert task.name in TASKS or task.name == "ruler"
    said = header(RECIPES[name])
    assert all(said[part] for part in ("", "Run", "Needs", "Gives", "Costs"))
    if "cells" in said["Gives"] and "/cells/" not in said["Gives"]:
        assert f"each of {len(cells)} cells" in said["Gives"]


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("paper/")])
def test_a_recipe_of_the_paper_keeps_to_its_settings(name):
    recipe, said = read_recipe(RECIPES[name]), header(RECIPES[name])
    assert said["Costs"].startswith("estimate, not measured")
    assert "arXiv 2602.04852" in said[""]
    assert recipe.selection.align == 1
    assert not recipe.model.startswith("demo:")
    assert recipe.calibration.seq_len == 2048
    if recipe.recovery:
        assert (recipe.recovery.samples, recipe.recovery.batch, recipe.recovery.lr) == (32000, 16, 1e-4)
        # Rank and alpha are left to the defaults, which are the paper's for projections that are wide enough.
        assert (recipe.recovery.rank, recipe.recovery.alpha, recipe.recovery.warmup) == (None, None, 0.05)
        assert (RANK, ALPHA) == (32, 64)


def test_every_table_and_figure_has_its_row_and_every_recipe_its_place():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    for kind, count in (("Table", 24), ("Figure", 8)):
        for number in range(1, count + 1):
            assert sum(bool(re.search(rf"\b{kind} {number}\b", row.split("|")[1])) for row in rows) == 1, (kind, number)
    named = set(re.findall(r"`((?:paper|demo)/[^`]+)`", PAGE))
    assert named <= RECIPES.keys()
    assert {name for name in RECIPES if name.startswith(("paper/", "demo/"))} == named
    for name in named:
        # The numbers in a header are those of its rows.
        tables = set(re.findall(r"\bTables? (\d+)", header(RECIPES[name])[""]))
        mine = " ".join(row.split("|")[1] for row in rows if f"`{name}`" in row)
        assert tables <= set(re.findall(r"\d+", mine)), name


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("demo/")])
def test_a_small_one_can_begin(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = "run" if read_recipe(RECIPES[name]).sweep is None else "sweep"
    monkeypatch.setattr(sys, "argv", ["lapcli", command, name, "--dry-run", "--json", "--device", "cpu"])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capsys.readouterr()
    assert not exit_.value.code, err
    assert json.loads(out)["dry_run"] is True


SMALL = {
    "calibration": {"samples": 4, "seq_len": 64},
    "recovery": {"steps": 1, "samples": None, "seq_len": 32, "batch": 2, "validation": 1},
    "sweep": {"samples": [4]},
}
"""Amounts under which a recipe of any size is done in a second; nothing else of it is changed."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return resolve_model(str(tiny_gated_deltanet(tmp_path_factory.mktemp("tiny") / "model")))


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("demo/")])
def test_a_small_one_runs(name, tiny, tmp_path, monkeypatch, quick_reload):
    """To its end: its last cell, with a tiny model and tiny amounts."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    recipe = read_recipe(RECIPES[name])
    for part, amounts in SMALL.items():
        values = getattr(recipe, part)
        fewer = {key: value for key, value in amounts.items() if part != "sweep" or getattr(values, key, None)}
        if values is not None:
            recipe = recipe.model_copy(update={part: values.model_copy(update=fewer)})
    cell, tasks = expand(recipe, name)[-1], tuple(recipe.evaluation.tasks) if recipe.evaluation else ()
    sweep = SweepDirectory(tmp_path / "sweep")
    common = {"sweep": str(sweep.path), "model": tiny.describe(), "machine": {"device": "cpu"}}
    text = cell.calibration.document()
    do(Job("calibrate", cell.calibration_name, settings=text, saliency=True, **common), SilentReporter())
    job = Job("cell", cell.name, settings=cell.settings(), calibration=cell.calibration_name, **common)
    found = do(replace(job, tasks=tasks, limit=1), SilentReporter())
    assert found["kept_width"] == budget_for(found["key_width"], cell.selection).width.width
    assert {row["task"] for row in found.get("rows", ())} == set(tasks)
    assert ("recovery" in found) == (recipe.recovery is not None)
    run = sweep.cell(cell.name)
    labels = ["base", "sliced", *(["recovered"] if recipe.recovery else [])]
    assert [label for label, _source in models_of(run, tiny)] == labels
    if "lapcli analyze" in header(RECIPES[name])["Run"]:
        looked = AnalysisSettings(data="builtin", samples=2, seq_len=32, stride=16, skip=0)
        inputs = AnalysisInputs(models_of(run, tiny), read_artifact(run.selection, "selection"))
        analysis, _worked, _written = analyse(inputs, looked, run.analysis, machine=Machine(device="cpu"))
        assert list(analysis.labels) == labels


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_asks_for_what_there_is(name):
    recipe, said = read_conversion(CONVERSIONS[name]), header(CONVERSIONS[name])
    assert all(said[part] for part in ("", "Run", "Needs", "Gives", "Costs"))
    assert "arXiv 2506.09316" in said[""]
    for part in (recipe.sensitivity, recipe.distillation):
        assert part.data == "builtin" or find_hub_set(part.data)
    for task in parse_tasks(recipe.tasks) if recipe.tasks else ():
        assert task.name in TASKS
    assert f"--recipe {name} " in said["Run"]
    assert f"`{name}`" in (ROOT / "docs" / "dsla.md").read_text()
    with pytest.raises(RecipeError, match="of a conversion, not of a chain"):
        read_recipe(CONVERSIONS[name])


@pytest.mark.parametrize("name", [name for name in CONVERSIONS if name.startswith("paper/")])
def test_a_conversion_of_the_paper_keeps_to_its_settings(name):
    recipe, said = read_conversion(CONVERSIONS[name]), header(CONVERSIONS[name])
    distillation, layer = recipe.distillation, recipe.layer
    assert (distillation.lr, distillation.lr_min, distillation.warmup) == (1e-4, 5e-5, 0.05)
    assert (distillation.weight_decay, distillation.align) == (0.01, "mse")
    assert (recipe.order, layer.states, layer.start, layer.window) == ("entropy", 2, "graded", None)
    assert said["Costs"].startswith("estimate, not measured")
    (layers,) = {int(count) for count in re.findall(r"-of-(\d+)", said["Run"])}
    tokens = layers_of(recipe.fraction, layers) * distillation.tokens
    if stated := re.search(r"([\d.]+) B tokens in all", said[""]):
        assert tokens == pytest.approx(float(stated[1]) * 1e9, rel=0.01)


def test_a_small_conversion_runs(tmp_path, monkeypatch, capsys):
    """With a tiny teacher; options go before the recipe."""
    teacher = tiny_source("llama", tmp_path / "teacher").path
    job = [
        "lapcli",
        "convert",
        str(teacher),
        "--recipe",
        "demo/dsla",
        "--output",
        str(tmp_path / "out"),
        "--steps",
        "2",
    ]
    job += ["--seq-len", "32", "--batch-size", "2", "--samples", "2", "--validation", "2", "--device", "cpu", "--json"]
    for further in (["--dry-run"], ["--limit", "1", "--task", "builtin"]):
        monkeypatch.setattr(sys, "argv", [*job, *further])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        assert not exit_.value.code, err
        found = json.loads(out)
    assert len(found["order"]) == 1
    made = json.loads((tmp_path / "out" / "conversion.json").read_text())["settings"]["distillation"]
    assert (made["steps"], made["seq_len"], made["lr"], made["lr_min"]) == (2, 32, 3e-3, 3e-4)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("demo/dsla", "lapcli convert --recipe {} --output DIR"),
        ("train/small-gdn", "lapcli train {}"),
        ("demo/recovery", "lapcli sweep {}"),
        ("gated_deltanet/demo-half", "lapcli run {}"),
    ],
)
def test_every_command_names_at_once_the_one_that_a_recipe_is_for(name, right):
    path = find_recipe(Path(name))
    said = right.format(path)
    readers = {"train": read_training_recipe, "convert": read_conversion, "run": read_recipe}
    refusing = 0
    for command, read in readers.items():
        if command in right or (command == "run" and "sweep" in right):
            read(path)
            continue
        with pytest.raises(RecipeError, match="is a recipe of ") as raised:
            read(path)
        assert raised.value.hint == said
        refusing += 1
    assert refusing == 2
