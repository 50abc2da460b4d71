"""The models that are measured: configs alone, with random weights, whole and pruned."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from lapcli.errors import ModelError, UsageError
from lapcli.families.registry import family_for
from lapcli.selectors.budget import kept_width

CONFIGS: dict[str, dict[str, Any]] = {
    "gdn": {
        "model_type": "gated_deltanet",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_heads": 6,
        "head_dim": 256,
        "expand_v": 2.0,
        "vocab_size": 32000,
    },
    "qwen3.5-like": {
        "model_type": "gated_deltanet",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_heads": 16,
        "num_v_heads": 32,
        "head_dim": 128,
        "expand_v": 1.0,
        "vocab_size": 32000,
    },
    "delta-net": {
        "model_type": "delta_net",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_heads": 16,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "vocab_size": 32000,
    },
    "toy": {
        "model_type": "gated_deltanet",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "head_dim": 32,
        "expand_v": 2.0,
        "intermediate_size": 128,
        "vocab_size": 259,
        "initializer_range": 0.1,
    },
}
"""By name: the 1.5 B Gated DeltaNet of most figures, one with the heads of a Qwen3.5 layer, a DeltaNet, and a toy."""


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        name: of its base.
        ratio: removed fraction of the key width, as asked for.
        config: the document of its `config.json`.
        key_heads: of a stateful layer.
        value_heads: likewise.
        key_width: K, after pruning.
        value_width: V.
        layers: stateful layers.
    """

    name: str
    ratio: float
    config: dict[str, Any]
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    layers: int

    def to_json(self) -> dict[str, Any]:
        """What a reader of results needs to know of it."""
        return {"model": self.name, "ratio": self.ratio, "key_width": self.key_width, "config": self.config}

    def state_bytes(self, itemsize: int = 4) -> int:
        """Of one sequence, over all layers."""
        return sum(layer.state_bytes(itemsize=itemsize) for layer in family_for(self.config).layers(self.config))

    def convolution_bytes(self, itemsize: int = 2) -> int:
        """Likewise, the inputs that short convolutions keep."""
        return sum(layer.convolution_bytes(itemsize=itemsize) for layer in family_for(self.config).layers(self.config))

    @property
    def label(self) -> str:
        """For a table."""
        return f"{self.name}, K {self.key_width}"


def read_config(name: str) -> tuple[str, dict[str, Any]]:
    """A config by its name here, of a shipped model, or of a file or a model's directory, with what it is called.

    Raises:
        ModelError: there is none, or it is no config.
    """
    if name in CONFIGS:
        return name, dict(CONFIGS[name])
    if name.startswith("demo:"):
        from lapcli.families.source import resolve_model

        return name, dict(resolve_model(name).config)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        from lapcli.families.source import demo_models

        raise ModelError(
            f"there is no config {name!r}: neither one of {', '.join(CONFIGS)}, nor a shipped model "
            f"({', '.join(demo_models())}), nor a file, nor a model's directory",
            "name one of them, or a config.json",
        )
    try:
        document = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is no JSON document: {error}") from error
    if not isinstance(document, dict) or "model_type" not in document:
        raise ModelError(f"{path} has no model_type, so it is no model's config")
    return path.parent.name if path.name == "config.json" else path.stem, document


def subject(name: str, config: Mapping[str, Any], ratio: str | float) -> Subject:
    """A config as it is (ratio 0), or as slicing leaves it.

    Args:
        name: what it is called.
        config: of the base.
        ratio: removed fraction of the key width, 0 for none; the kept width is aligned as `prune` aligns it.

    Raises:
        FamilyError: the family is not known.
        ModelError: the model has no layer with a state, or such layers of several key widths.
        UsageError: the ratio is none.
    """
    family = family_for(config)
    layers = family.layers(config)
    if not layers:
        raise ModelError(f"{name} has no layer with a state")
    widths = sorted({layer.key_width for layer in layers})
    if len(widths) > 1:
        raise ModelError(
            f"{name} has layers of the key widths {', '.join(map(str, widths))}; one is measured at a time"
        )
    try:
        removed = Decimal(str(ratio))
    except ArithmeticError as error:
        raise UsageError(f"--ratio {ratio!r} is no number", "for example 0,0.5,0.75") from error
    document = dict(config)
    if removed != 0:
        document = family.sliced_config(config, kept_width(widths[0], removed).width)
        layers = family.layers(document)
    first = layers[0]
    return Subject(
        name, float(removed), document, first.heads, first.value_heads, first.key_width, first.value_width, len(layers)
    )


def recurrence_flop(subject: Subject, chunk: int = 64) -> float:
    """Floating-point operations of a token's recurrences, over all layers, as the chunked form multiplies.

    The count by multiplications is derived in `lapcli.benchmarks.recovery`.
    """
    key, value, shared = subject.key_width, subject.value_width, subject.key_heads / subject.value_heads
    products = 2 * chunk * key * shared + chunk**2 / 2 + chunk * (2 * value + key) + 3 * key * value
    return 2 * subject.layers * subject.value_heads * products


def rows_that_fit(memory: float, fixed: float, each: float) -> int:
    """How many rows of `each` bytes fit beside `fixed` ones; never less than none."""
    return max(0, math.floor((memory - fixed) / each))
