"""`lapcli list`: what there is to choose from."""

from typing import Annotated

import typer

from lapcli.cli import options
from lapcli.errors import UsageError

_WHAT = ("families", "selectors", "tasks", "recipes", "models")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("list", help="Show the known families, selectors, tasks, recipes or shipped models.")(run)


def run(
    what: Annotated[str, typer.Argument(help=" | ".join(_WHAT))],
    as_json: options.Json = False,
) -> None:
    """Print one table, or JSON."""
    tables = {
        "families": _families,
        "selectors": _selectors,
        "tasks": _tasks,
        "recipes": _recipes,
        "models": _models,
    }
    if what not in tables:
        raise UsageError(f"there is no list of {what!r}; there is: {', '.join(_WHAT)}")
    columns, rows = tables[what]()
    from lapcli.cli import display

    if as_json:
        display.emit([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        display.table(None, columns, rows, text_columns=len(columns))


def _families() -> tuple[list[str], list[list[str]]]:
    from lapcli.families.registry import FAMILIES

    return ["family", "model types", "tested against"], [
        [family.name, ", ".join(family.model_types), family.tested] for family in FAMILIES.values()
    ]


def _selectors() -> tuple[list[str], list[list[str]]]:
    from lapcli.selectors.registry import SELECTORS

    return ["selector", "keeps the channels", "source"], [
        [selector.name, selector.summary, selector.source] for selector in SELECTORS.values()
    ]


def _tasks() -> tuple[list[str], list[list[str]]]:
    from lapcli.evaluation.tasks import TASKS

    return ["task", "what it measures", "metrics"], [
        [task.name, task.summary, ", ".join(task.metrics)] for task in TASKS.values()
    ]


def _recipes() -> tuple[list[str], list[list[str]]]:
    from lapcli.shipped import shipped_recipes

    return ["recipe", "file", "what it does"], [
        [recipe.name, str(recipe.path), recipe.summary] for recipe in shipped_recipes()
    ]


def _models() -> tuple[list[str], list[list[str]]]:
    from lapcli.cli.display import size
    from lapcli.families.source import demo_models, resolve_model

    return ["model", "type", "weights", "directory"], [
        [name, str(source.config.get("model_type")), size(sum(header.path.stat().st_size for header in source.headers)),
         str(path)]
        for name, path in demo_models().items()
        for source in [resolve_model(name)]
    ]  # fmt: skip
