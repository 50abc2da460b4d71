"""Look at attention modules while a model runs: what enters and leaves them, and what they attend by."""

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lapcli.families.remote.lapcli_dual_state import decoder_of


@dataclass
class Seen:
    """What one attention module had in the forward passes of a model, in their order.

    Attributes:
        inputs: `[B, T, D]` of each.
        outputs: `[B, T, D]`, after the output projection.
        heads: `[B, T, HQ V]`, before it.
    """

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)


def attention_of(model: Any, layer: int) -> Any:
    """The attention module of a layer, converted or not."""
    return decoder_of(model).layers[layer].self_attn


def output_projection(attention: Any) -> Any:
    """The linear module that an attention module ends with."""
    return attention.o_proj if hasattr(attention, "o_proj") else attention.dense


@contextmanager
def watched(model: Any, layer: int) -> Generator[Seen]:
    """Keep what enters and leaves a layer's attention, with its history, for the time of the context."""
    seen, attention = Seen(), attention_of(model, layer)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.inputs.append(args[0] if args else kwargs["hidden_states"])

    def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        seen.outputs.append(output[0] if isinstance(output, tuple) else output)

    def projected(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.heads.append(args[0])

    handles = [
        attention.register_forward_pre_hook(before, with_kwargs=True),
        attention.register_forward_hook(after, with_kwargs=True),
        output_projection(attention).register_forward_pre_hook(projected),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def attending_by(model: Any, layers: Sequence[int], name: str, function: Callable[..., Any]) -> Generator[None]:
    """Let layers attend by another function, which finds itself under a name of ours, for the time of the context.

    Args:
        model: of transformers.
        layers: whose attention looks a function up by name.
        name: to register it by.
        function: as transformers calls it; it may call the one that it stands for.
    """
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    modules = [attention_of(model, layer) for layer in layers]
    before = [module.config for module in modules]
    try:
        for module in modules:
            module.config = copy.copy(module.config)
            module.config._attn_implementation = name
        yield
    finally:
        for module, config in zip(modules, before, strict=True):
            module.config = config
