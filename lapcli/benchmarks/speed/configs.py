"""The models that are measured: configs alone, with random weights, whole and pruned."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from lapcli.errors import ModelError, UsageError
from lapcli.families.base import StatefulLayer
from lapcli.families.dual_state import TEACHERS, converted_config
from lapcli.families.registry import family_for, find_family
from lapcli.families.remote.lapcli_dual_state import DualStateSettings
from lapcli.linearising.plan import Shape
from lapcli.linearising.settings import layers_of
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
    "smollm2-like": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 65536,
    },
    "llama-like": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
        "max_position_embeddings": 65536,
    },
    "toy-llama": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 259,
        "initializer_range": 0.1,
        "max_position_embeddings": 65536,
    },
}
"""By name: the 1.5 B Gated DeltaNet of most figures, one with the heads of a Qwen3.5 layer, a DeltaNet, and a toy;
Transformers of the shapes of SmolLM2-135M and of a 1.3 B Llama, and a toy."""
SHARES = ("0", "0.25", "0.5")
"""Of a Transformer's layers that are made states, where nobody says."""


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
        share: converted fraction of a Transformer's layers, as asked for; `None` for other models.
    """

    name: str
    ratio: float
    config: dict[str, Any]
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    layers: int
    share: float | None = None

    def to_json(self) -> dict[str, Any]:
        """What a reader of results needs to know of it."""
        shared = {} if self.share is None else {"share": self.share}
        return {
            "model": self.name, "ratio": self.ratio, "key_width": self.key_width, "config": self.config, **shared
        }  # fmt: skip

    def stateful(self) -> tuple[StatefulLayer, ...]:
        """The layers with a state; none of a Transformer as it is."""
        family = find_family(self.config)
        return () if family is None else family.layers(self.config)

    def attention_layers(self) -> int:
        """Of a Transformer, layers that keep keys and values."""
        return 0 if self.share is None else self.config["num_hidden_layers"] - self.layers

    def state_bytes(self, itemsize: int = 4) -> int:
        """Of one sequence, over all layers."""
        return sum(layer.state_bytes(itemsize=itemsize) for layer in self.stateful())

    def convolution_bytes(self, itemsize: int = 2) -> int:
        """Likewise, the inputs that short convolutions keep."""
        return sum(layer.convolution_bytes(itemsize=itemsize) for layer in self.stateful())

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


def is_transformer(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a Transformer whose layers can be made states, all of whose layers are attention yet."""
    return config.get("model_type") in TEACHERS


def converted_subject(name: str, config: Mapping[str, Any], share: str | float) -> Subject:
    """A Transformer with a share of its layers made states (two, as wide as its keys), evenly spread; 0 for none.

    Which layers those are does not change what a step or a prompt costs.

    Args:
        name: what the Transformer is called.
        config: of it.
        share: of its layers.

    Raises:
        UsageError: it is no number from 0 to 1.
    """
    count = config["num_hidden_layers"]
    number = 0 if str(share).strip() in ("0", "0.0") else layers_of(str(share).strip(), count)
    document = dict(config)
    if number:
        layers = [int((each + 0.5) * count / number) for each in range(number)]
        document = converted_config(config, DualStateSettings(layers=tuple(layers)).as_config())
    shape = Shape.of(config)
    called = name if not number else f"{name}, {100 * number / count:.3g} % states"
    states = document.get("dual_state", {}).get("states", 0)
    return Subject(
        called, 0.0, document, shape.heads, shape.heads * max(1, states), shape.head_width, shape.head_width, number,
        number / count,
    )  # fmt: skip


def attention_flop(subject: Subject, tokens: int) -> float:
    """Operations of a token's softmax attention in a Transformer's prompt: each sees half of the tokens."""
    readers = subject.config["num_attention_heads"] if subject.share is not None else 0
    return 2 * subject.attention_layers() * readers * (tokens / 2) * (subject.key_width + subject.value_width)


def recurrence_flop(subject: Subject, chunk: int = 64) -> float:
    """Floating-point operations of a token's recurrences, over all layers, as the chunked form multiplies.

    The count by multiplications is derived in `lapcli.benchmarks.recovery`. Of gated states: each key head writes
    `K V` a state, each query head reads as many, and has `K` a state and `V` for each of the half chunk before it.
    """
    if subject.share is not None:
        key, value, readers = subject.key_width, subject.value_width, subject.config["num_attention_heads"]
        states = subject.value_heads // subject.key_heads
        within = chunk / 2 * (states * key + value)
        return 2 * subject.layers * (subject.value_heads * key * value + readers * (states * key * value + within))
    key, value, shared = subject.key_width, subject.value_width, subject.key_heads / subject.value_heads
    products = 2 * chunk * key * shared + chunk**2 / 2 + chunk * (2 * value + key) + 3 * key * value
    return 2 * subject.layers * subject.value_heads * products


def rows_that_fit(memory: float, fixed: float, each: float) -> int:
    """How many rows of `each` bytes fit beside `fixed` ones; never less than none."""
    return max(0, math.floor((memory - fixed) / each))
