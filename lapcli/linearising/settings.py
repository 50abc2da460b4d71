"""What the numbers of a conversion to dual-state attention depend on. Imports neither torch nor transformers."""

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lapcli.errors import UsageError
from lapcli.recipe import Contradiction, Optimisation, Settings, TrainingSettings

Rows = Literal["last", "all"]
Align = Literal["mse", "kl"]

MEASURES = ("entropy", "loss", "outlier")
"""What sensitivity can be, beside `task:NAME`."""


OPTIONS = {"align": "align-loss", "order": "sensitivity", "batch": "batch-size"}
"""Options of `lapcli convert` that are not called as the settings are."""


class LayerSettings(Settings):
    """What the converted layers are."""

    states: int = Field(default=2, gt=0, description="that share keys and values in each layer")
    start: Literal["graded", "random"] = Field(default="graded", description="gates from history to recency, or random")
    width: int = Field(default=1, gt=0, description="key channels of a state, in the teacher's")
    window: int | Literal["equal"] | None = Field(
        default=None, description="instead of states, attention to so many tokens; equal: of the states' memory"
    )
    sinks: int = Field(default=4, ge=0, description="tokens at the beginning that a window always sees")

    @field_validator("window")
    @classmethod
    def _holds_a_token(cls, window: int | str | None) -> int | str | None:
        if isinstance(window, int) and window < 1:
            raise ValueError("a window holds one token at least")
        return window

    def idle(self, name: str) -> bool:
        """Whether a setting has no say beside the others: sinks without a window, and of states beside one.

        How much memory states would take counts where a window is to take as much.
        """
        if name == "sinks":
            return self.window is None
        return (name == "start" and self.window is not None) or (
            name in ("states", "width") and isinstance(self.window, int)
        )


class SensitivitySettings(Settings):
    """On which text layers are compared, and how attention is looked at."""

    data: str = Field(description="text source: builtin, recall, a file or folder, a hub set, or a:0.9,b:0.1")
    samples: int = Field(gt=0, description="windows of text")
    seq_len: int = Field(gt=1, description="tokens of each")
    seed: int = Field(default=0, ge=0, description="of the choice of text, and of new layers")
    rows: Rows = Field(default="last", description="attention of the last token of a window, or of every token")


class DistillationSettings(Optimisation):
    """How each layer is trained. Defaults beside arXiv 2506.09316, App. B, where it says any."""

    data: str = Field(description="text source: builtin, recall, a file or folder, a hub set, or a:0.9,b:0.1")
    seq_len: int = Field(gt=1, description="tokens of each sequence")
    steps: int = Field(gt=0, description="optimiser steps of each layer")
    batch: int = Field(default=8, gt=0, description="sequences of a step")
    lr: float = Field(default=1e-3, gt=0, description="largest learning rate")
    lr_min: float = Field(default=1e-4, ge=0, description="last learning rate")
    weight_decay: float = Field(default=0.01, ge=0, description="of AdamW")
    temperature: float = Field(default=1.0, gt=0, description="of the final KL")
    validation: int = Field(default=16, gt=0, description="sequences held out, on which each prefix is measured")
    align: Align = Field(default="mse", description="mse over the teacher's variance, or kl of softmax over features")
    align_weight: float = Field(default=1.0, ge=0, description="of the alignment of the layer's output")
    penalty: float = Field(default=0.1, ge=0, description="of the cosine similarity of gates: lambda")
    fit: bool = Field(default=True, description="fit the size of each head's output before training")
    chained: bool = Field(default=True, description="train each layer with those before it in place")

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.align_weight and not self.kl_weight:
            raise Contradiction(
                "align_weight and kl_weight are both 0: nothing says what to learn", "align_weight", "kl_weight"
            )
        return self

    def training(self) -> TrainingSettings:
        """How the engine trains one layer."""
        shared = {name: getattr(self, name) for name in Optimisation.model_fields}
        return TrainingSettings.model_validate({**shared, "steps": self.steps})

    @property
    def tokens(self) -> int:
        """Of the training of one layer."""
        return self.steps * self.batch * self.seq_len


class LinearisingSettings(Settings):
    """A conversion: what layers become, in which order, and how they are trained."""

    layer: LayerSettings
    order: str = Field(default="loss", description="loss, entropy, outlier, task:NAME, or first")
    sensitivity: SensitivitySettings
    distillation: DistillationSettings

    @field_validator("order")
    @classmethod
    def _an_order_that_there_is(cls, order: str) -> str:
        check_order(order)
        return order


def check_order(order: str) -> None:
    """Refuse an order of layers that there is not.

    Raises:
        ValueError: naming those that there are.
    """
    known = order in (*MEASURES, "first") or (order.startswith("task:") and len(order) > len("task:"))
    if not known:
        raise ValueError(f"{order!r} is none of {', '.join(MEASURES)}, task:NAME, first")


def default_linearising(is_demo: bool) -> dict[str, dict[str, Any]]:
    """Text and amounts: minutes on a laptop for a shipped model, a million tokens a layer otherwise."""
    if is_demo:
        return {
            "sensitivity": {"data": "builtin", "samples": 16, "seq_len": 512},
            # A small model takes, and in so few steps needs, a larger rate.
            "distillation": {"data": "builtin", "seq_len": 512, "steps": 32, "batch": 4, "lr": 3e-3, "lr_min": 3e-4},
        }
    return {
        "sensitivity": {"data": "fineweb", "samples": 64, "seq_len": 2048},
        "distillation": {"data": "fineweb", "seq_len": 1024, "steps": 128},
    }


def layers_of(fraction: str, count: int) -> int:
    """How many of `count` layers a fraction is: the decimal as it was typed, rounded to the nearest, one at least.

    Args:
        fraction: above 0, at most 1, as `0.25` or `25%`.
        count: layers of the model.

    Raises:
        UsageError: it is no such number.
    """
    share = share_of_layers(fraction, "the fraction")
    if not share:
        raise UsageError(f"the fraction {fraction} is none of the layers: above 0, and at most 1 or 100%")
    return max(1, int((share * count).to_integral_value(ROUND_HALF_UP)))


def share_of_layers(text: str, what: str) -> Decimal:
    """A share of the layers, 0 to 1, as `0.25` or `25%`.

    Args:
        text: as it was typed.
        what: it is, for what is said when it is none.

    Raises:
        UsageError: it is no number, below none of the layers or beyond all of them.
    """
    word = text.strip()
    percent = word.endswith("%")
    try:
        share = Decimal(word[:-1]) / 100 if percent else Decimal(word)
    except InvalidOperation:
        share = Decimal("nan")
    if not share.is_finite() or share < 0:
        raise UsageError(f"{what} {text}: no number above 0 and at most 1, or 100%", "for example 0.25, or 25%")
    if share > 1:
        meant = f"did you mean {share / 100}, or {word}%?" if not percent and share <= 100 else None
        raise UsageError(f"{what} {text}: more than all of the layers, which are 1, or 100%", meant)
    return share
