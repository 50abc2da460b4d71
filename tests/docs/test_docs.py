"""The documents say what the program does: generated pages are fresh, names are known, links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from lapcli.cli.app import app
from lapcli.evaluation.tasks import TASKS
from lapcli.families.registry import FAMILIES
from lapcli.families.source import demo_models
from lapcli.linearising.recipe import read_conversion
from lapcli.pipeline import STAGES
from lapcli.recipe import read_recipe
from lapcli.selectors.registry import SELECTORS
from lapcli.training_recipe import read_training_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "kernels").rglob("*.md")])


def test_the_command_line_reference_is_fresh():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "cli_reference.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_command_and_option_has_help():
    for name, command in typer.main.get_command(app).commands.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, (name, parameter.name)


def test_every_command_that_computes_can_be_told_to_be_fast():
    """Case 22: whatever runs a model on a device says so, and fails where that is not a fast one."""
    options = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in typer.main.get_command(app).commands.items()
    }
    computing = {name for name, some in options.items() if "--device" in some}
    assert computing >= {"calibrate", "eval", "recover", "generate", "serve", "convert", "train", "bench", "doctor"}
    assert {name for name, some in options.items() if "--require-fast" in some} == computing


def test_each_stage_has_a_page_a_module_and_a_command():
    commands = typer.main.get_command(app).commands
    for stage in STAGES:
        assert (ROOT / "docs" / "stages" / f"{stage.noun}.md").is_file()
        assert (ROOT / "lapcli" / "stages" / f"{stage.noun}.py").is_file()
        assert commands[stage.verb].help == stage.summary


def test_what_can_be_named_is_documented():
    selection, evaluation = (
        (ROOT / "docs" / "stages" / f"{name}.md").read_text() for name in ("selection", "evaluation")
    )
    assert all(f"`{name}`" in selection for name in SELECTORS)
    assert all(f"`{name}`" in evaluation for name in TASKS)
    families = "\n".join(page.read_text() for page in PAGES)
    assert all(name in families for name in FAMILIES)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_ci_runs_the_test_command_of_the_readme():
    commands = [
        line.strip() for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("    python3.11")
    ]
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_is_valid_and_says_how_to_run_it(path):
    if path.parent.name == "serve":
        assert f"Run: serve run {path.relative_to(ROOT)}" in path.read_text()
        return
    if path.parent.name == "train":
        read_training_recipe(path)
        command = "train"
    elif path.stem.startswith("dsla"):
        read_conversion(path)
        command = "convert --recipe" if path.stem != "dsla-states" else "convert MODEL --recipe"
    else:
        command = "run" if read_recipe(path).sweep is None else "sweep"
    assert f"lapcli {command} {path.relative_to(ROOT / 'recipes').with_suffix('')}" in path.read_text()


@pytest.mark.parametrize("name", list(demo_models()))
def test_a_model_that_ships_keeps_to_its_size_and_names_its_data(name):
    folder = demo_models()[name]
    assert folder == ROOT / "lapcli" / "demo" / name.removeprefix("demo:")
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 14_000_000
    card = (folder / "README.md").read_text()
    assert all(word in card for word in (name, "Gutenberg", "CC BY-SA 4.0", "held-out", "training_log.json"))


def test_the_table_of_models_that_ship_is_fresh():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "shipped_models.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_page_recipe_or_help_names_a_model_that_does_not_ship():
    texts = [page.read_text() for page in PAGES if page.name != "CHANGELOG.md"]
    texts += [path.read_text() for path in (ROOT / "recipes").rglob("*.yaml")]
    texts += [path.read_text() for path in (ROOT / "lapcli" / "cli").rglob("*.py")]
    named = {found for text in texts for found in re.findall(r"demo:[a-z][a-z0-9-]*", text)}
    assert named <= set(demo_models())
