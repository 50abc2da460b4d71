"""The settings that the numbers depend on: one frozen model a stage, defaults in one place, unknown keys refused.

Settings of the machine (device, dtype, threads, verbosity) are in `lapcli.machine`; they are not hashed into an
artifact's lineage. This module imports neither torch nor transformers, so that a recipe can be checked at once.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lapcli.errors import RecipeError

ScoreFrom = Literal["both", "key", "query"]
Optimizer = Literal["adamw", "muon"]
SEEDS = 2**32
"""How many seeds there are: as many as the pickiest of the generators behind them takes."""
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Model = TypeVar("Model", bound=BaseModel)


class Contradiction(ValueError):
    """What a validator raises of several settings that do not go together.

    Args:
        complaint: what is wrong with them.
        fields: their names, as they are written in a recipe.
    """

    def __init__(self, complaint: str, *fields: str):
        super().__init__(complaint)
        self.fields = fields


class SettingsError(RecipeError):
    """Settings whose values do not fit.

    Args:
        where: the place: a file, "the command line".
        fields: the settings, by their path in it.
        complaint: what is wrong with them, and what was found.
    """

    def __init__(self, where: str, fields: Sequence[str], complaint: str):
        super().__init__(": ".join([where, *([", ".join(fields)] if fields else []), complaint]))
        self.fields = tuple(fields)
        self.complaint = complaint


class Settings(BaseModel):
    """Settings of one stage: frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def document(self) -> dict[str, Any]:
        """The settings as they are stored and hashed."""
        return self.model_dump(mode="json")


class CalibrationSettings(Settings):
    """What is measured, on which text."""

    data: str = Field(description="text source: builtin, recall, a file or folder, a hub set, or a:0.9,b:0.1")
    samples: int = Field(gt=0, description="token sequences")
    seq_len: int = Field(gt=1, description="tokens of each sequence")
    seed: Seed = Field(default=0, description="of the choice of text, and of the rows")
    rows: int | None = Field(default=None, gt=0, description="keys and queries drawn (all of them when absent)")
    normalized: bool = Field(default=False, description="L2-normalise q and k before they are summed")
    exact: bool = Field(default=False, description="keep triangles of a streamed QR beside the Gram matrices")

    @field_validator("rows")
    @classmethod
    def _rows_there_are(cls, rows: int | None, info: ValidationInfo) -> int | None:
        tokens = info.data.get("samples", 0) * info.data.get("seq_len", 0)
        if rows is not None and rows > tokens > 0:
            raise ValueError(f"more than the {tokens} tokens of samples x seq_len that they are drawn from")
        return rows


class SelectionSettings(Settings):
    """Which channels are kept."""

    method: str = Field(default="drrqr", description="a selector; `lapcli list selectors`")
    ratio: str | None = Field(default=None, description="removed fraction of K, as the decimal that was typed")
    keep: int | None = Field(default=None, gt=0, description="kept width K', instead of a ratio")
    score_from: ScoreFrom = Field(default="both", description="keys, queries or both decide")
    align: int | None = Field(default=None, gt=0, description="K' is a multiple of it; by K when absent")
    f: float = Field(default=1.5, ge=1.0, description="tolerance of the strong rank-revealing QR")
    seed: Seed = Field(default=0, description="of the random selector")

    @field_validator("ratio", mode="before")
    @classmethod
    def _as_typed(cls, value: object) -> object:
        """Take YAML's number back to the decimal that was typed: its shortest form is that."""
        return repr(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class Optimisation(Settings):
    """How a model is trained, but for how long. Defaults: arXiv 2602.04852, App. A."""

    batch: int = Field(default=16, gt=0, description="sequences of a step, over all devices and parts")
    lr: float = Field(default=1e-4, gt=0, description="largest learning rate")
    lr_min: float = Field(default=1e-5, ge=0, description="last learning rate")
    warmup: float = Field(default=0.05, ge=0, le=1, description="share of the steps in which the rate rises")
    weight_decay: float = Field(default=0.0, ge=0, description="of AdamW")
    clip: float = Field(default=1.0, gt=0, description="largest norm of a step's gradient")
    kl_weight: float = Field(default=1.0, ge=0, description="w in cross entropy + w T^2 KL; 0: no teacher")
    temperature: float = Field(default=2.0, gt=0, description="T in it")
    validation: int = Field(default=64, ge=0, description="sequences held out")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="of LoRA's first values, of the order of text, and of recall"
    )

    @model_validator(mode="after")
    def _rates_in_order(self) -> Self:
        if self.lr_min > self.lr:
            raise Contradiction(f"lr_min {self.lr_min:g} is above lr {self.lr:g}", "lr_min", "lr")
        return self


class TrainingSettings(Optimisation):
    """How the model is trained: what its numbers depend on, beside model, teacher, adapters and stream."""

    steps: int = Field(default=2000, gt=0, description="optimiser steps")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="of AdamW: how long gradients are remembered")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="of AdamW: how long their squares are")
    eps: float = Field(default=1e-8, gt=0, description="of AdamW: added to the root of the squares")
    optimizer: Optimizer = Field(default="adamw", description="adamw; muon: of a whole model's hidden matrices")

    def document(self) -> dict[str, Any]:
        """The settings as they are stored and hashed: the optimiser where it is not AdamW."""
        found = super().document()
        # What was trained before there was a choice is still what these settings ask for.
        if self.optimizer == "adamw":
            del found["optimizer"]
        return found


class RecoverySettings(Optimisation):
    """What heals a pruned model: the text, its amount, what is trained, and how."""

    data: str = Field(description="text source: builtin, recall, a file or folder, a hub set, or a:0.9,b:0.1")
    seq_len: int = Field(gt=1, description="tokens of each sequence")
    samples: int | None = Field(default=None, gt=0, description="sequences of all steps together")
    steps: int | None = Field(default=None, gt=0, description="optimiser steps, instead of samples")
    rank: int | None = Field(
        default=None, gt=0, description="of the LoRA matrices; default: 32, or what the narrowest projection takes"
    )
    alpha: int | None = Field(
        default=None, gt=0, description="LoRA's product counts alpha / rank times; default: 64, or twice a lower rank"
    )
    targets: list[str] | None = Field(default=None, description="modules that get LoRA instead of those of q, k, v")
    full: bool = Field(default=False, description="train the mixers whole, without LoRA")
    control: bool = Field(default=False, description="train the unpruned model instead, by the same budget")
    add_query_feedback: bool = Field(
        default=False, description="make the Gated DeltaNet a Q-Delta first, and train its feedback in full"
    )
    lambda_init: float | None = Field(
        default=None, gt=0, lt=1, description="what that feedback begins at; by default 0, with a gain that is trained"
    )

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if (self.samples is None) == (self.steps is None):
            raise Contradiction("give either samples or steps", "samples", "steps")
        return self

    @model_validator(mode="after")
    def _feedback_that_begins(self) -> Self:
        if self.lambda_init is not None and not self.add_query_feedback:
            raise Contradiction(
                "lambda_init is about add_query_feedback, which is not there: give both or neither",
                "lambda_init", "add_query_feedback",
            )  # fmt: skip
        return self

    def document(self) -> dict[str, Any]:
        """The settings as they are stored and hashed: query feedback where it is added, not where there is none."""
        found = super().document()
        # What was recovered before there was such a setting is still what these settings ask for.
        for name in ("add_query_feedback", "lambda_init"):
            if not found[name]:
                del found[name]
        return found

    def adapters(self) -> dict[str, Any]:
        """What is trained, as `lapcli.training.adapters.plan_adapters` takes it."""
        return {name: getattr(self, name) for name in ("full", "targets", "rank", "alpha")}

    def training(self) -> TrainingSettings:
        """How the model is trained: a budget in samples is rounded up to whole steps."""
        shared = {name: getattr(self, name) for name in Optimisation.model_fields}
        steps = self.steps if self.samples is None else -(-self.samples // self.batch)
        return TrainingSettings.model_validate({**shared, "steps": steps})

    @property
    def tokens(self) -> int:
        """Of all steps together."""
        return self.training().steps * self.batch * self.seq_len


class EvaluationRequest(Settings):
    """What a recipe evaluates at its end."""

    tasks: list[str] = Field(description="task names; `lapcli list tasks`")
    limit: int | None = Field(default=None, gt=0, description="items of each task")


class SweepSettings(Settings):
    """What varies between the cells of a sweep; an axis that is left out keeps what the recipe's own sections say."""

    method: list[str] | None = Field(default=None, min_length=1, description="selectors")
    ratio: list[str] | None = Field(default=None, min_length=1, description="removed fractions, as they were typed")
    keep: list[PositiveInt] | None = Field(default=None, min_length=1, description="kept widths K', instead of ratios")
    score_from: list[ScoreFrom] | None = Field(default=None, min_length=1, description="keys, queries or both decide")
    data: list[str] | None = Field(default=None, min_length=1, description="calibration texts")
    samples: list[PositiveInt] | None = Field(
        default=None, min_length=1, description="token sequences of a calibration"
    )
    seed: list[Seed] | None = Field(default=None, min_length=1, description="seeds of what `seed_of` says")
    seed_of: list[Literal["calibration", "selection", "recovery"]] = Field(
        default=["calibration", "selection", "recovery"], min_length=1, description="stages that the seeds are for"
    )
    recoveries: dict[str, dict[str, Any]] | None = Field(
        default=None, min_length=1, description="by a name each: settings that differ from those of `recovery`"
    )

    @field_validator("ratio", mode="before")
    @classmethod
    def _as_typed(cls, values: object) -> object:
        if not isinstance(values, list):
            return values
        many = cast(list[object], values)
        return [repr(each) if isinstance(each, int | float) and not isinstance(each, bool) else each for each in many]

    @field_validator("method", "ratio", "keep", "score_from", "data", "samples", "seed", "seed_of")
    @classmethod
    def _each_once(cls, values: list[Any] | None) -> list[Any] | None:
        twice = next((value for number, value in enumerate(values or []) if value in (values or [])[:number]), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is there twice")
        return values

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.ratio is not None and self.keep is not None:
            raise Contradiction("give either ratio or keep", "ratio", "keep")
        return self


class Recipe(Settings):
    """A chain: a model, its calibration, the selection, its recovery, and what is evaluated at the end.

    With a `sweep`, many: each cell is a chain that differs from the others in what that says.
    """

    model: str = Field(default="demo:gdn", description="a directory, a hub id, or demo:NAME")
    calibration: CalibrationSettings
    selection: SelectionSettings
    recovery: RecoverySettings | None = None
    evaluation: EvaluationRequest | None = None
    sweep: SweepSettings | None = None


def default_calibration(is_demo: bool) -> dict[str, Any]:
    """The default text and its amount: small for a shipped model, the paper's (arXiv 2602.04852, App. A) otherwise."""
    if is_demo:
        return {"data": "builtin", "samples": 64, "seq_len": 1024}
    return {"data": "fineweb", "samples": 128, "seq_len": 2048}


def default_recovery(is_demo: bool) -> dict[str, Any]:
    """The default text and its amount: minutes on a laptop for a shipped model, the paper's (App. A) otherwise."""
    if is_demo:
        return {"data": "builtin", "seq_len": 512, "samples": 512, "batch": 8, "lr": 2e-3, "lr_min": 2e-4}
    return {"data": "fineweb", "seq_len": 2048, "samples": 32000}


def _keys(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _owner(model: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """The settings that lie at such a place among others."""
    for part in path:
        annotation = _keys(model).get(str(part))
        kinds = (annotation, *getattr(annotation, "__args__", ()))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return model


def _explain(error: ValidationError, model: type[BaseModel], where: str) -> RecipeError:
    # A misspelled key often makes another one missing; the misspelling is what to say.
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        known = list(_keys(_owner(model, path[:-1])))
        near = difflib.get_close_matches(path[-1], known, n=1)
        meant = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        return RecipeError(f"{where}: there is no setting {'.'.join(path)!r}", meant)
    complaint, found = first["msg"].removeprefix("Value error, "), first.get("input")
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, Contradiction):
        # The input is all the settings among which these are.
        given = cast(dict[str, Any], found) if isinstance(found, dict) else {}
        said = ", ".join(f"{name} {given[name]!r}" for name in raised.fields if name in given)
        fields = [".".join([*path, name]) for name in raised.fields]
        return SettingsError(where, fields, f"{complaint} (found {said or 'neither'})")
    return SettingsError(where, [".".join(path)] if path else [], f"{complaint} (found {found!r})")


def validate(model: type[Model], values: dict[str, Any], where: str) -> Model:
    """Build settings from plain values.

    Args:
        model: the settings class.
        values: as read from YAML or the command line.
        where: what an error names as the place (a file, "the command line").

    Raises:
        RecipeError: a key is unknown (the nearest is named) or a value does not fit.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _explain(error, model, where) from error


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file.

    Raises:
        RecipeError: it is missing, no YAML, or not a valid recipe; or it is one of `lapcli train` or `convert`.
    """
    settings = read_settings(path)
    refuse_other_recipe(path, settings, "chain", "sweep")
    return validate(Recipe, settings, str(path))


_COMMANDS = {
    "training": "lapcli train {}",
    "conversion": "lapcli convert --recipe {} --output DIR",
    "sweep": "lapcli sweep {}",
    "chain": "lapcli run {}",
}
"""What runs a recipe, by what it is of."""
_OF = {"training": "training", "conversion": "a conversion", "sweep": "a sweep", "chain": "a chain"}


def kind_of_recipe(settings: dict[str, Any]) -> str | None:
    """What a recipe file is of: `training`, `conversion`, `sweep` or `chain`; `None` where its settings say none."""
    if "distillation" in settings:
        return "conversion"
    if isinstance(settings.get("model"), dict) or "from" in settings:
        return "training"
    if "sweep" in settings:
        return "sweep"
    return "chain" if {"calibration", "selection", "recovery"} & settings.keys() else None


def refuse_other_recipe(path: Path, settings: dict[str, Any], *wanted: str) -> None:
    """Refuse a recipe that another command runs.

    Args:
        path: of the file.
        settings: that it holds.
        wanted: kinds that are taken, the one that is looked for first.

    Raises:
        RecipeError: naming the command.
    """
    kind = kind_of_recipe(settings)
    if kind is not None and kind not in wanted:
        raise RecipeError(f"{path} is a recipe of {_OF[kind]}, not of {_OF[wanted[0]]}", _COMMANDS[kind].format(path))


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a recipe file, of whatever kind, as YAML has them.

    Raises:
        RecipeError: it is missing, or no YAML with settings.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise RecipeError(f"there is no recipe {path}", "`lapcli list recipes` shows those that ship") from error
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds no settings")
    return cast(dict[str, Any], values)
