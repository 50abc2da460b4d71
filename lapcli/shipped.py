"""The recipes that ship with lapcli, by name: `FAMILY/GOAL`, from a source tree and from an installed wheel."""

import difflib
import itertools
from pathlib import Path
from typing import NamedTuple

from lapcli.errors import RecipeError


class ShippedRecipe(NamedTuple):
    """A recipe that ships.

    Attributes:
        name: its path among the recipes, without the suffix.
        path: the file.
        summary: the first sentence of its header.
    """

    name: str
    path: Path
    summary: str


def recipes_folder() -> Path:
    """Where the recipes lie: beside the code in a wheel, at the top of a source tree."""
    package = Path(__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> list[ShippedRecipe]:
    """The recipes that ship, in the order of their names."""
    root = recipes_folder()
    return [
        ShippedRecipe(path.relative_to(root).with_suffix("").as_posix(), path, _summary(path))
        for path in sorted(root.rglob("*.yaml"))
        # Those of servers are for the programs that start them.
        if path.parent.name != "serve"
    ]


def find_recipe(name: Path) -> Path:
    """The file of a recipe: the one that `name` leads to, or else the shipped one of that name.

    Raises:
        RecipeError: there is none, but one that ships has nearly that name.
    """
    if not name.exists():
        shipped = {recipe.name: recipe.path for recipe in shipped_recipes()}
        if found := shipped.get(name.as_posix()):
            return found
        near = difflib.get_close_matches(name.with_suffix("").as_posix(), shipped, n=1, cutoff=0.75)
        if near:
            raise RecipeError(
                f"there is no recipe {name}", f"did you mean {near[0]}? `lapcli list recipes` shows those that ship"
            )
    return name


def _summary(path: Path) -> str:
    header = itertools.takewhile(
        lambda line: line.startswith("#") and line.strip() != "#", path.read_text().splitlines()
    )
    return " ".join(line.removeprefix("#").strip() for line in header)
