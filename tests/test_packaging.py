"""What a wheel holds: every package, the recipes, the shipped model."""

import shutil
import tomllib
from pathlib import Path

import pytest

import lapcli.shipped
from lapcli.errors import RecipeError
from lapcli.shipped import find_recipe, shipped_recipes

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed():
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    found = [
        ".".join(marker.parent.relative_to(root).parts)
        for root in (ROOT, ROOT / "kernels")
        for marker in [*root.glob("lap*/**/__init__.py")]
    ]
    assert listed == sorted([*found, "lapcli.recipes"])


def test_recipes_go_by_their_names():
    recipes = shipped_recipes()
    assert [ROOT / "recipes" / f"{recipe.name}.yaml" for recipe in recipes] == [recipe.path for recipe in recipes]
    assert find_recipe(Path(recipes[0].name)) == recipes[0].path
    assert find_recipe(Path("no/such")) == Path("no/such")
    for slip in ("demo/slectors", "demo/selectors.yaml"):
        with pytest.raises(RecipeError) as error:
            find_recipe(Path(slip))
        assert "did you mean demo/selectors?" in (error.value.hint or "")


def test_in_a_wheel_they_lie_beside_the_code(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "recipes", tmp_path / "lapcli" / "recipes")
    monkeypatch.setattr(lapcli.shipped, "__file__", str(tmp_path / "lapcli" / "shipped.py"))
    assert {recipe.path.parents[1] for recipe in shipped_recipes()} == {tmp_path / "lapcli" / "recipes"}


def test_a_file_here_comes_before_a_shipped_recipe_of_its_name(tmp_path, monkeypatch):
    name = shipped_recipes()[0].name
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir()
    Path(name).write_text("model: mine")
    assert find_recipe(Path(name)) == Path(name)
