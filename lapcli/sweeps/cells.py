"""From a recipe with axes to cells: each one chain, with a name that does not depend on which other cells there are."""

import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapcli.errors import RecipeError
from lapcli.recipe import (
    CalibrationSettings,
    Recipe,
    RecoverySettings,
    SelectionSettings,
    SweepSettings,
    validate,
)

_RANDOM = "rand"
"""The one selector whose channels depend on the selection's seed."""


@dataclass(frozen=True)
class Cell:
    """One chain of a sweep.

    Attributes:
        name: of its directory under `cells`.
        calibration: the text.
        selection: the method and its budget.
        recovery: what heals the slice; `None`: nothing does.
        axes: where it lies in the grid: method, ratio or keep, score_from, data, samples, seq_len, seed, recovery (the
            name of its settings, where they have one).
    """

    name: str
    calibration: CalibrationSettings
    selection: SelectionSettings
    recovery: RecoverySettings | None
    axes: dict[str, Any]

    @property
    def calibration_name(self) -> str:
        """The calibration that it shares with all cells of the same text, amount and seed."""
        return calibration_name(self.calibration)

    @property
    def slice_key(self) -> tuple[Any, ...]:
        """Equal for cells that keep the same channels, and so share a slice."""
        return (self.calibration_name, *self.selection.document().items())

    def settings(self) -> dict[str, Any]:
        """What the cell's results depend on, JSON-able."""
        return {
            "calibration": self.calibration.document(),
            "selection": self.selection.document(),
            "recovery": self.recovery.document() if self.recovery else None,
        }


def calibration_name(settings: CalibrationSettings) -> str:
    """A name for a calibration: its text, amount and seed."""
    return f"{_slug(settings.data)}-{settings.samples}x{settings.seq_len}-s{settings.seed}"


def expand(recipe: Recipe, where: str) -> list[Cell]:
    """The cells of a sweep, those of one method and ratio together; of equal ones only the first.

    Args:
        recipe: with a `sweep`, or without for a single cell.
        where: what an error names as the place.

    Raises:
        RecipeError: a cell's settings are not valid, or there is no ratio.
    """
    axes = recipe.sweep or SweepSettings()
    base = recipe.selection
    budgets: list[dict[str, Any]]
    if axes.keep is not None:
        budgets = [{"ratio": None, "keep": keep} for keep in axes.keep]
    elif axes.ratio is not None:
        budgets = [{"ratio": ratio, "keep": None} for ratio in axes.ratio]
    else:
        budgets = [{"ratio": base.ratio, "keep": base.keep}]
    if any((budget["ratio"] is None) == (budget["keep"] is None) for budget in budgets):
        raise RecipeError(f"{where}: give either ratio or keep, in `selection` or in `sweep`")
    recoveries = _recoveries(recipe, axes, where)
    grid = itertools.product(
        axes.method or [base.method],
        budgets,
        axes.score_from or [base.score_from],
        axes.data or [recipe.calibration.data],
        axes.samples or [recipe.calibration.samples],
        axes.seed or [None],
        recoveries.items(),
    )
    cells: dict[str, Cell] = {}
    for method, budget, score_from, data, samples, seed, (variant, recovery) in grid:

        def seeded(stage: str, own: int, seed: int | None = seed) -> int:
            return seed if seed is not None and stage in axes.seed_of else own

        calibration = validate(
            CalibrationSettings,
            {
                **recipe.calibration.model_dump(),
                "data": data,
                "samples": samples,
                "seed": seeded("calibration", recipe.calibration.seed),
            },
            f"{where}: calibration",
        )
        selection = validate(
            SelectionSettings,
            {
                **base.model_dump(),
                **budget,
                "method": method,
                "score_from": score_from,
                # Of the others a seed would make selections that differ in nothing but their name.
                "seed": seeded("selection", base.seed) if method == _RANDOM else base.seed,
            },
            f"{where}: selection",
        )
        if recovery is not None:
            healing = {**recovery.model_dump(exclude_unset=True), "seed": seeded("recovery", recovery.seed)}
            recovery = validate(RecoverySettings, healing, f"{where}: recovery")
        told = recipe.calibration.seed if seed is None else seed
        place = {
            "method": method,
            **{name: value for name, value in budget.items() if value is not None},
            "score_from": score_from,
            "data": data,
            "samples": samples,
            "seq_len": calibration.seq_len,
            "seed": told,
            **({"recovery": variant} if variant else {}),
        }
        cell = Cell(_name(place, variant), calibration, selection, recovery, place)
        # With a seed for some stages only, several seeds may give one and the same cell.
        if all(cell.settings() != other.settings() for other in cells.values()):
            cells[cell.name] = cell
    return list(cells.values())


def _recoveries(recipe: Recipe, axes: SweepSettings, where: str) -> dict[str, RecoverySettings | None]:
    """By name, the settings of the recoveries; one without a name where they do not vary."""
    if recipe.recovery is not None and recipe.recovery.control:
        raise RecipeError(
            f"{where}: recovery.control trains the unpruned model, which is in no cell",
            "run `lapcli recover --control` in a run of its own",
        )
    if axes.recoveries is None:
        return {"": recipe.recovery}
    if recipe.recovery is None:
        raise RecipeError(f"{where}: sweep.recoveries are changes to `recovery`, which is not there")
    found: dict[str, RecoverySettings | None] = {}
    for name, changes in axes.recoveries.items():
        if not re.fullmatch(r"[A-Za-z0-9._]+", name):
            raise RecipeError(f"{where}: sweep.recoveries: {name!r} is no name", "use letters, digits, dots and _")
        values = recipe.recovery.model_dump(exclude_unset=True)
        # A budget in the one unit takes the place of one in the other.
        for unit, other in (("steps", "samples"), ("samples", "steps")):
            if unit in changes:
                values.pop(other, None)
        found[name] = validate(RecoverySettings, {**values, **changes}, f"{where}: sweep.recoveries.{name}")
    return found


def _name(place: dict[str, Any], variant: str) -> str:
    budget = place["ratio"] if "ratio" in place else f"k{place['keep']}"
    parts = [place["method"], budget]
    if place["score_from"] != "both":
        parts.append(f"from-{place['score_from']}")
    parts += [_slug(place["data"]), f"{place['samples']}x{place['seq_len']}", f"s{place['seed']}"]
    return "-".join(str(part).replace("/", "_") for part in [*parts, *([variant] if variant else [])])


def _slug(source: str) -> str:
    """A text source as part of a file's name; a digest tells apart what reads alike."""
    if re.fullmatch(r"[A-Za-z0-9_.]+", source):
        return source
    stem = re.sub(r"[^A-Za-z0-9_.]+", "_", Path(source).name).strip("._")[:40]
    return f"{stem}.{hashlib.sha256(source.encode()).hexdigest()[:6]}"
