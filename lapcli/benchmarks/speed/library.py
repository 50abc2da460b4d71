"""The libraries' own models, with the weights of ours: what a user has without lapcli's runtime."""

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lapcli.families.taps import CACHES
from lapcli.runtime.prefill import cache_argument

SHORT = 64
"""Tokens of a piece that fla runs a step at a time, by kernels that need no search."""


def why_no_fla(model_type: str, device: torch.device) -> str | None:
    """Why fla's own class of a model cannot run here, or `None`."""
    if model_type not in ("gated_deltanet", "delta_net"):
        return "fla has no Q-Delta" if model_type == "qdelta" else f"{model_type} is a model of transformers"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    if device.type != "cuda":
        return "fla needs a GPU"
    return None


def fla_model(ours: Any) -> Any:
    """Fla's model with the config and the weights of one of lapcli's own.

    Args:
        ours: a `GatedDeltaNetForCausalLM` or `DeltaNetForCausalLM` of lapcli.
    """
    with warnings.catch_warnings():
        # About drivers and versions, at every import.
        warnings.simplefilter("ignore")
        if ours.config.model_type == "gated_deltanet":
            from fla.models import GatedDeltaNetConfig as Config
            from fla.models import GatedDeltaNetForCausalLM as Model
        else:
            from fla.models import DeltaNetConfig as Config
            from fla.models import DeltaNetForCausalLM as Model
        document = {name: value for name, value in ours.config.to_dict().items() if name != "model_type"}
        with torch.device("meta"):
            model: Any = Model(Config(**document))
    # The very tensors: the weights of a model are there once.
    model.load_state_dict(ours.state_dict(), assign=True, strict=True)
    # Buffers that no checkpoint holds would still lie nowhere.
    lost = [name for name, value in model.named_buffers() if value.is_meta]
    assert not lost, lost
    return model.eval().requires_grad_(False)


class LibraryDecode:
    """Decodes by a library's own forward pass and cache.

    Args:
        model: any language model that returns a cache and takes it back.
        piece: tokens of a prompt at once.
        graph: whether the step is to be captured; then every step starts from the state after the prompt, since the
            library writes new states beside the old ones and a graph would have to copy them back. That is the least a
            graph of this model can take.
    """

    def __init__(self, model: Any, *, piece: int | None = None, graph: bool = False):
        self.model, self.piece, self.graph = model, piece, graph
        self.argument = cache_argument(model.forward)
        self.held: Any = None

    @torch.no_grad()
    def start(self, prompts: Tensor) -> Tensor:
        """Run prompts `[B, P]` and return the last logits `[B, vocabulary]`."""
        self.held, logits = None, None
        for part in prompts.split(self.piece or prompts.shape[1], dim=1):
            logits = self._forward(part)
        assert logits is not None
        return logits

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Take one token of each row in, and return logits."""
        return self._forward(tokens.unsqueeze(1))

    def call(self, tokens: Tensor) -> Callable[[], Tensor]:
        """A step that can be repeated: each row's likeliest token, fed back where the state goes on too."""
        following = tokens.clone().unsqueeze(1)
        before = [(state, dict(state)) for state in cache_states(self.held)] if self.graph else []

        @torch.no_grad()
        def run() -> Tensor:
            for state, first in before:
                state.update(first)
            chosen = self._forward(following).argmax(-1, keepdim=True)
            if not self.graph:
                following.copy_(chosen)
            return chosen

        return run

    def _forward(self, tokens: Tensor) -> Tensor:
        found = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{self.argument: self.held})
        self.held = next((found[name] for name in CACHES if found.get(name) is not None), self.held)
        return found.logits[:, -1]


def cache_states(cache: Any) -> list[dict[str, Any]]:
    """The dictionaries that fla's cache keeps a layer's tensors in."""
    states = [layer.state for layer in cache.layers] if getattr(cache, "layers", None) else list(cache.states)
    return [state for state in states if isinstance(state, dict)]


def generate_seconds(model: Any, prompt: Tensor, few: int, many: int, clock: Callable[[], float]) -> float:
    """Seconds a token of a library's `generate`, greedily: what more tokens take more time.

    Args:
        model: the library's.
        prompt: `[B, P]`.
        few: new tokens of the first run.
        many: new tokens of the second.
        clock: the time, with the device waited for.
    """
    took: list[float] = []
    options: Mapping[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for count in (few, few, many):
        begun = clock()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count, **options
            )
        took.append(clock() - begun)
        assert found.shape[1] == prompt.shape[1] + count, "the library ended a row early"
    # The first run warms up.
    return (took[2] - took[1]) / (many - few)
