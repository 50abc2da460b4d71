"""Recipes of conversions to dual-state attention. Imports neither torch nor transformers."""

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from lapcli.errors import RecipeError, UsageError
from lapcli.linearising.settings import (
    DistillationSettings,
    LayerSettings,
    LinearisingSettings,
    SensitivitySettings,
    check_order,
    layers_of,
)
from lapcli.recipe import Settings, kind_of_recipe, read_settings, refuse_other_recipe, validate


class ConversionRecipe(Settings):
    """A Transformer, how many of its layers become states, and how."""

    model: str = Field(description="the teacher: a directory, a hub id, or demo:NAME")
    fraction: str = Field(default="0.25", description="of its layers, above 0 and at most 1, or 100%")
    layer: LayerSettings = Field(default_factory=LayerSettings)
    order: str = Field(default="loss", description="loss, entropy, outlier, task:NAME, or first")
    sensitivity: SensitivitySettings
    distillation: DistillationSettings
    tasks: list[str] = Field(default_factory=list, description="on which each new prefix is measured")
    limit: int | None = Field(default=None, gt=0, description="items of each task")

    @field_validator("fraction", mode="before")
    @classmethod
    def _as_it_was_typed(cls, fraction: Any) -> Any:
        if isinstance(fraction, bool) or not isinstance(fraction, int | float | str):
            return fraction
        try:
            # So many layers that nothing rounds to none.
            layers_of(str(fraction), 10**6)
        except UsageError as error:
            raise ValueError(error.message) from error
        return str(fraction)

    @field_validator("order")
    @classmethod
    def _an_order_that_there_is(cls, order: str) -> str:
        check_order(order)
        return order

    def settings(self) -> LinearisingSettings:
        """Of the conversion."""
        return LinearisingSettings(
            layer=self.layer, order=self.order, sensitivity=self.sensitivity, distillation=self.distillation
        )


def read_conversion(path: Path) -> ConversionRecipe:
    """Read a recipe file.

    Raises:
        RecipeError: it is missing, no YAML, or no valid recipe of a conversion.
    """
    settings = read_settings(path)
    refuse_other_recipe(path, settings, "conversion")
    if kind_of_recipe(settings) is None:
        raise RecipeError(
            f"{path} is no recipe of a conversion: it has no `distillation`",
            "`lapcli list recipes` shows those that ship",
        )
    return validate(ConversionRecipe, settings, str(path))
