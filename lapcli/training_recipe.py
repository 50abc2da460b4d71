"""The settings of `lapcli train`: the model, its text, and how it is trained.

Like `lapcli.recipe` this imports neither torch nor transformers, so that a recipe can be checked at once.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from lapcli.recipe import (
    Contradiction,
    Optimizer,
    Settings,
    TrainingSettings,
    read_settings,
    refuse_other_recipe,
    validate,
)

Documents = Literal["apart", "joined"]
Start = Literal["stock", "spread"]
Stored = Literal["bfloat16", "float32"]

DEFAULT_TOKENIZER = "demo:gdn"


class PretrainingSettings(Settings):
    """What is trained, on which text, for how long, and how.

    The optimiser's defaults are what is usual for such models: AdamW with betas 0.9 and 0.95, a weight decay of 0.1,
    gradients clipped at 1, a cosine down to a tenth.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    model: dict[str, Any] | None = Field(
        default=None, description="config of a fresh model: its model_type, and what is not as that type has it"
    )
    base: str | None = Field(
        default=None, alias="from", description="a model to train on from, instead: a directory, a hub id, demo:NAME"
    )
    tokenizer: str | None = Field(
        default=None, description="a directory, a hub id or demo:NAME; default demo:gdn, or that of `from`"
    )
    data: str = Field(description="text source: builtin, recall, a file or folder, a hub set, or a:0.9,b:0.1")
    documents: Documents = Field(
        default="apart", description="apart: none sees another's state; joined: rows run on from one to the next"
    )
    seq_len: int = Field(gt=1, description="tokens of each sequence")
    batch_tokens: int = Field(gt=1, description="tokens of a step, over all devices and parts")
    tokens: int | None = Field(default=None, gt=0, description="of all steps together, rounded up to whole steps")
    steps: int | None = Field(default=None, gt=0, description="optimiser steps, instead of tokens")
    lr: float = Field(default=1e-3, gt=0, description="largest learning rate")
    lr_min: float | None = Field(default=None, ge=0, description="last learning rate; a tenth of lr when absent")
    warmup: float = Field(default=0.05, ge=0, le=1, description="share of the steps in which the rate rises")
    warmup_steps: int | None = Field(default=None, ge=1, description="steps in which it rises, instead of a share")
    optimizer: Optimizer = Field(
        default="adamw", description="adamw; or muon: Muon of the hidden matrices, AdamW of all else"
    )
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices, filters and embeddings")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="of AdamW: how long gradients are remembered")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="of AdamW: how long their squares are")
    eps: float = Field(default=1e-8, gt=0, description="of AdamW: added to the root of the squares")
    clip: float = Field(default=1.0, gt=0, description="largest norm of a step's gradient")
    validation: int = Field(default=64, ge=0, description="sequences held out")
    start: Start = Field(
        default="stock", description="a fresh model's weights: stock as fla draws them; spread: see docs/train.md"
    )
    stored: Stored = Field(default="bfloat16", description="dtype of the weights that are written")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="of the first weights, of the order of text, and of recall"
    )

    @field_validator("seq_len", "batch_tokens", "tokens", "steps", "lr", "validation", "seed", mode="before")
    @classmethod
    def _no_switch(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("a number is wanted")
        return value

    @field_validator("model")
    @classmethod
    def _names_its_type(cls, model: dict[str, Any] | None) -> dict[str, Any] | None:
        if model is not None and not isinstance(model.get("model_type"), str):
            raise ValueError("it should name its model_type")
        return model

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.model is None) == (self.base is None):
            raise Contradiction(
                "give either model (a config, to begin anew) or from (a model to train on from)", "model", "from"
            )
        if (self.tokens is None) == (self.steps is None):
            raise Contradiction("give either tokens or steps", "tokens", "steps")
        if self.batch_tokens % self.seq_len:
            raise Contradiction(
                f"batch_tokens {self.batch_tokens} is no multiple of seq_len {self.seq_len}", "batch_tokens", "seq_len"
            )
        if self.lr_min is not None and self.lr_min > self.lr:
            raise Contradiction(f"lr_min {self.lr_min:g} is above lr {self.lr:g}", "lr_min", "lr")
        if self.warmup_steps is not None and "warmup" in self.model_fields_set:
            raise Contradiction("give either warmup or warmup_steps", "warmup", "warmup_steps")
        if self.base is not None and self.start != "stock":
            raise Contradiction(
                f"start {self.start} is for a fresh model, and from names one that has its weights", "start", "from"
            )
        return self

    def document(self) -> dict[str, Any]:
        """The settings as they are stored and hashed: two ways to ask for one training are one request."""
        training = self.training()
        found = super().document()
        # What was trained before there was a choice is still what these settings ask for.
        if self.optimizer == "adamw":
            del found["optimizer"]
        return {
            **found,
            "tokenizer": self.tokenizer_name,
            "tokens": None,
            "steps": training.steps,
            "lr_min": training.lr_min,
            "warmup": training.warmup,
            "warmup_steps": None,
        }

    @property
    def tokenizer_name(self) -> str:
        """The model or folder whose tokenizer is used."""
        return self.tokenizer or self.base or DEFAULT_TOKENIZER

    @property
    def seen(self) -> int:
        """Tokens of all steps together."""
        return self.training().steps * self.batch_tokens

    def training(self) -> TrainingSettings:
        """How the engine trains: plain cross entropy, in whole steps."""
        steps = self.steps if self.tokens is None else -(-self.tokens // self.batch_tokens)
        assert steps is not None, "one of the two was given"
        shared = ("lr", "optimizer", "weight_decay", "beta1", "beta2", "eps", "clip", "validation", "seed")
        return TrainingSettings(
            **{name: getattr(self, name) for name in shared},
            batch=self.batch_tokens // self.seq_len,
            steps=steps,
            lr_min=self.lr / 10 if self.lr_min is None else self.lr_min,
            warmup=self.warmup if self.warmup_steps is None else min(1.0, self.warmup_steps / steps),
            kl_weight=0.0,
        )


def read_training_recipe(path: Path, **given: Any) -> PretrainingSettings:
    """Read a recipe of `lapcli train`.

    Args:
        path: the file.
        given: settings that go before the file's own, by the names of the fields. `model` and `base`, `tokens` and
            `steps`, `warmup` and `warmup_steps` take each other's place.

    Raises:
        RecipeError: it is missing, no YAML, not a valid recipe; or it is one of another command.
    """
    settings = read_settings(path)
    refuse_other_recipe(path, settings, "training")
    for pair in (("model", "from"), ("tokens", "steps"), ("warmup", "warmup_steps")):
        if any(_KEYS.get(name, name) in given for name in pair):
            for name in pair:
                settings.pop(name, None)
    if given.get("base") is not None:
        # What is said of a fresh model's start, and of its tokenizer, is not said of this one.
        settings.pop("start", None)
        settings.pop("tokenizer", None)
    return validate(PretrainingSettings, settings | given, str(path))


_KEYS = {"from": "base"}
