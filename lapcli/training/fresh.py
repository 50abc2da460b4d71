"""A model whose numbers are all trained: made anew from a config, or loaded to be trained on.

Weights are drawn on the CPU, so that one seed means one model wherever it is trained. They are fp32, and stay so while
they are trained; what is in half precision is autocast's.
"""

import difflib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PretrainedConfig

from lapcli.errors import ModelError, RecipeError
from lapcli.families.loading import Weights, load_model, own_class
from lapcli.families.registry import FAMILIES
from lapcli.families.source import ModelSource
from lapcli.training.adapters import trained_parameters
from lapcli.training_recipe import Start

STEP = 0.01
"""The step size (after its softplus) at which the decays of a `spread` start have their half-lives."""
HALF_LIVES = (8.0, 2048.0)
"""Tokens: those of the first and of the last head of each layer there."""
_FILTER_GAIN = 5.0


@dataclass(frozen=True)
class WholePlan:
    """All parameters of a model, as what it trains (`lapcli.training.adapters.TrainingPlan`).

    Attributes:
        shapes: of each parameter by its name; one that is tied to another has one name.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: nn.Module) -> "WholePlan":
        """Of a model, with weights or without."""
        return cls({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})

    @property
    def trained(self) -> int:
        """How many numbers that is."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def names(self) -> set[str]:
        """The names of the parameters."""
        return set(self.shapes)

    def undecayed(self) -> frozenset[str]:
        """Gains, biases and what sets time constants: vectors, for which 0 is no resting place."""
        return frozenset(name for name, shape in self.shapes.items() if len(shape) < 2)


def trainable_types() -> list[str]:
    """The model types that can be trained: those that lapcli has classes of its own for."""
    known = (name for family in FAMILIES.values() for name in family.model_types)
    return sorted(name for name in known if own_class(name) is not None)


def class_of(model_type: Any) -> Any:
    """Lapcli's class of a model type.

    Raises:
        RecipeError: there is none; the nearest is named.
    """
    found = own_class(model_type) if model_type in trainable_types() else None
    if found is None:
        near = difflib.get_close_matches(str(model_type), trainable_types(), n=1)
        raise RecipeError(
            f"model_type {model_type!r} cannot be trained here; these can: {', '.join(trainable_types())}",
            f"did you mean {near[0]!r}?" if near else None,
        )
    return found


def fresh_config(asked: Mapping[str, Any], tokenizer: Any, seq_len: int) -> Any:
    """The config of a fresh model.

    Args:
        asked: `model_type`, and fields that are not to be as that type has them. Vocabulary, special ids and the
            longest sequence follow tokenizer and training where they are not among them.
        tokenizer: a `PreTrainedTokenizerBase`.
        seq_len: tokens of the sequences that it is trained on.

    Raises:
        ModelError: fields whose values make no model.
        RecipeError: the type cannot be trained here, it has no such field, a field has a value of another kind, or the
            vocabulary is too small.
    """
    made = class_of(asked.get("model_type"))
    known = _fields(made.config_class)
    fields = {name: value for name, value in asked.items() if name != "model_type"}
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise RecipeError(
                f"model: a {asked['model_type']} has no field {name!r}",
                f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}",
            )
        wanted = _what_is_wanted(name, fields[name], known[name])
        if wanted is not None:
            raise RecipeError(f"model: {name} is {fields[name]!r}; {wanted} is wanted")
    follows: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": seq_len,
    }
    fields = {**{name: value for name, value in follows.items() if name in known}, **fields}
    if fields["vocab_size"] < len(tokenizer):
        raise RecipeError(
            f"model: vocab_size {fields['vocab_size']} is less than the {len(tokenizer)} tokens of the tokenizer",
            "leave vocab_size out, which takes the tokenizer's",
        )
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if fields[name] is not None and not 0 <= fields[name] < fields["vocab_size"]:
            raise RecipeError(
                f"model: {name} is {fields[name]}, which is no token of a vocabulary of {fields['vocab_size']}",
                f"leave {name} out, which takes the tokenizer's",
            )
    if fields.get("use_l2warp"):
        raise RecipeError("model: use_l2warp is a penalty in fla's loss, which is not in lapcli's", "leave it out")
    try:
        return made.config_class(**fields, architectures=[made.__name__])
    except (TypeError, ValueError) as error:
        raise ModelError(f"these fields make no {asked['model_type']}: {error}") from error


_MAY_BE_ANY = ("lamb_bias", "lamb_fixed")
"""Numbers that need not be above 0; which ones a feedback may have, the model says."""


def _what_is_wanted(name: str, value: Any, annotation: Any) -> str | None:
    """What a field's value should be where it is something else, as far as its type tells; `None` where it fits."""
    kinds = get_args(annotation) or (annotation,)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    whole, positive = number and isinstance(value, int), number and value > 0
    if Any in kinds or (value is None and NoneType in kinds):
        return None
    if bool in kinds:
        return None if isinstance(value, bool) else "true or false"
    if str in kinds:
        return None if isinstance(value, str) else "a text"
    if name.endswith("_token_id"):
        return None if whole else "the number of a token"
    if float not in kinds:
        return None if whole and positive else "a whole number above 0"
    if name in _MAY_BE_ANY:
        return None if number else "a number"
    return None if positive else "a number above 0"


def _fields(config_class: type) -> dict[str, Any]:
    """The fields of a config and of those that it extends, with their types; not those of all of transformers'."""
    mine = config_class.__mro__[: config_class.__mro__.index(PretrainedConfig)]
    found: dict[str, Any] = {}
    for each in mine:
        for name, parameter in inspect.signature(each.__init__).parameters.items():
            found.setdefault(name, parameter.annotation)
    return {name: kind for name, kind in found.items() if name not in ("self", "args", "kwargs")}


def bare(config: Any) -> Any:
    """A model of a config, of tensors without contents (on the meta device).

    Raises:
        ModelError: the config's fields do not go together.
    """
    with torch.device("meta"):
        return class_of(config.model_type)(config)


def fresh_model(config: Any, seed: int, start: Start = "stock") -> Any:
    """A model at its start: fp32, on the CPU, the same for one seed wherever it will be trained.

    Args:
        config: of `fresh_config`.
        seed: of its weights; the generators of random numbers are left as they were.
        start: `stock`, as fla draws them, or `spread` (`spread_out`).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = class_of(config.model_type)(config)
    if start == "spread":
        spread_out(model)
    return model


@torch.no_grad()
def spread_out(model: Any) -> None:
    """Change a fresh model so that a small one learns to recall sooner; in place.

    What writes to the residual stream is scaled down by the square root of its number of writers. The decays of a
    layer's heads begin at half-lives spread evenly (in logarithm) over `HALF_LIVES`, so that each layer has a head that
    remembers from the first step. Short convolutions begin near the identity. A model without decays or convolutions
    has the rest of it.
    """
    layers = model.model.layers
    for block in layers:
        for projection in (block.attn.o_proj, block.mlp.down_proj):
            projection.weight.div_(math.sqrt(2 * len(layers)))
        rate, bias = getattr(block.attn, "A_log", None), getattr(block.attn, "dt_bias", None)
        if isinstance(rate, Tensor) and isinstance(bias, Tensor):
            low, high = (math.log(half_life) for half_life in HALF_LIVES)
            rate.copy_((math.log(2) / (torch.linspace(low, high, rate.numel()).exp() * STEP)).log())
            # The inverse of softplus.
            bias.fill_(STEP + math.log(-math.expm1(-STEP)))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            if (convolution := getattr(block.attn, name, None)) is not None:
                # The last tap meets the current token.
                convolution.weight.mul_(_FILTER_GAIN)
                convolution.weight[..., -1].add_(1.0)


def to_train_on(source: ModelSource, device: torch.device, weights: Weights) -> Any:
    """A model to be trained on, in fp32.

    Raises:
        LapcliError: see `lapcli.families.loading.load_model`.
    """
    class_of(source.config.get("model_type"))
    return load_model(source, device=device, dtype=torch.float32, weights=weights)


def train_whole(model: Any) -> None:
    """Let all of a model be trained."""
    model.requires_grad_(True)
    wrong = {name: value.dtype for name, value in trained_parameters(model).items() if value.dtype != torch.float32}
    assert not wrong, f"trained values are fp32, but {wrong}"
