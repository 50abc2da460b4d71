"""What an engine takes for a while, by shapes: for where nothing can be measured, or before anything was.

Peaks of passes on the CPU were measured for every kind of layer (a test does so again), and the numbers that a token
takes are these multiples of the outputs of a layer's projections. What compiled kernels take is less, and was measured
on few models: a server on a GPU measures its own.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lapcli.runtime.pages import pages_of
from lapcli.runtime.plans import Plan
from lapcli.runtime.prefill import OwnPrefiller
from lapcli.runtime.sampling import BYTES_A_SCORE
from lapcli.serving.memory import Needs

if TYPE_CHECKING:
    from lapcli.runtime import Engine

_MLP, _STREAM = 1.5, 3.0
"""Of an MLP the outputs of gate and up, its activation and their product; beside it the stream, and a norm's parts."""
_ATTENTION = 2.25
"""Of attention, with what turns; masks, as truth values and as numbers, and heads' own keys and values come to it."""
_STATES, _DUAL_STATES = 7.25, 14.5
"""Of layers with states in PyTorch, in fp32: chunks, decays, products."""
_COMPILED, _COMPILED_DUAL, _CHUNK = 2.5, 5.0, 64
"""Of the same in kernels, in the model's dtype; and a state for so many tokens."""
_STEP = 3
"""Of a step's widest sublayer, in fp32."""
_WORKSPACES = 2 * 2**25
"""cuBLAS's, on a Hopper, for the stream that everything runs on and the one that everything is captured on."""
_MIXERS = ("attn", "attention", "mixer", "mamba")


class _Outputs(NamedTuple):
    """Numbers that the projections of one layer's parts give for a token."""

    mlp: int = 0
    attention: int = 0
    states: int = 0


def estimated(engine: "Engine", *, window: int, device: torch.device) -> Needs:
    """What an engine would take on a device, by the shapes of its model.

    Args:
        engine: of the model, of any number of rows; its tensors may have no contents.
        window: tokens of a row at most.
        device: where it would run.
    """
    compiled, captured = device.type == "cuda", device.type == "cuda" and isinstance(engine.plan, Plan)
    item, wide = engine.dtype.itemsize, max(4, engine.dtype.itemsize)
    config = engine.model.config.get_text_config(decoder=True)
    width = config.hidden_size
    outputs, state, several = _outputs(engine, config), _state_numbers(engine), engine.convertible is not None
    dual = _has_dual_states(engine)
    # Of a conversion nothing depends on which of its layers are left as attention.
    seen = window if engine.limited or several or not isinstance(engine.plan, Plan) else 0
    common = (_MLP * outputs.mlp + _STREAM * width) * item + seen
    attention = (_ATTENTION * outputs.attention + seen) * item + seen
    of_states = (_DUAL_STATES if dual else _STATES) * outputs.states * wide
    if compiled:
        of_states = ((_COMPILED_DUAL if dual else _COMPILED) * outputs.states + state / _CHUNK) * item
    plain = max(common, attention, 0 if several else of_states)
    widest = max(outputs.mlp, outputs.attention, outputs.states)
    # On a GPU they lie in one place for all graphs, too.
    logits = engine.vocabulary * item * (2 if captured else 1)
    own = isinstance(getattr(engine.plan, "prefiller", None), OwnPrefiller)
    return Needs(
        kept=_WORKSPACES if compiled else 0,
        pass_fixed=logits + 3 * engine.slot_bytes + 2 * seen * _repeated(config) * item,
        pass_token=round(plain),
        pass_states=round(of_states) if several else 0,
        step_row=_STEP * widest * wide + logits + table_bytes(engine, window),
        score=BYTES_A_SCORE,
        vocabulary=engine.vocabulary,
        pass_copies=2 if captured and own else 1,
        step_copies=2 if captured else 1,
    )


def table_bytes(engine: "Engine", window: int) -> int:
    """Of the table that says which pages are a row's."""
    layers = len(engine.pages.layers)
    if engine.convertible is not None:
        layers = engine.model.config.get_text_config(decoder=True).num_hidden_layers
    return 4 * layers * pages_of(window)


def _repeated(config: Any) -> int:
    """Numbers of a token's keys, or values, where a library writes them out for each head of queries."""
    heads = getattr(config, "num_attention_heads", None) or 0
    if heads == (getattr(config, "num_key_value_heads", None) or heads):
        return 0
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def _has_dual_states(engine: "Engine") -> bool:
    from lapcli.families.remote.lapcli_dual_state import DualStateAttention

    return engine.convertible is not None or any(
        isinstance(module, DualStateAttention) for module in engine.model.modules()
    )


def _state_numbers(engine: "Engine") -> int:
    """Of the largest state of a row."""
    return max((pool.state_numbers for pool in engine.plan.recurrent.values()), default=0)


def _outputs(engine: "Engine", config: Any) -> _Outputs:
    """The widest of each kind of layer."""
    blocks = getattr(getattr(engine.model, engine.model.base_model_prefix), "layers", None)
    if blocks is None:
        # Whatever it is built like, its layers are alike.
        return _Outputs(states=_projected(engine.model, config) // max(1, config.num_hidden_layers))
    found, convertible = _Outputs(), engine.convertible
    # Which of a convertible layer's modules is in its block depends on what ran last.
    either = {} if convertible is None else convertible.states
    for index, block in enumerate(blocks):
        for name, part in block.named_children():
            kind = _kind(engine, index, name)
            if kind == "mlp" or index not in either:
                found = _widest(found, kind, _projected(part, config))
    if convertible is not None:
        for kind, modules in (("attention", convertible.attention), ("states", convertible.states)):
            for module in modules.values():
                found = _widest(found, kind, _projected(module, config))
    return found


def _widest(found: _Outputs, kind: str, outputs: int) -> _Outputs:
    return found._replace(**{kind: max(getattr(found, kind), outputs)})


def _kind(engine: "Engine", layer: int, name: str) -> str:
    """What a part of a block is."""
    plan = engine.plan
    if not any(word in name for word in _MIXERS):
        return "mlp"
    if not isinstance(plan, Plan):
        # A library's own pass; what its states take is known least.
        return "states"
    if layer in plan.recurrent and not (layer in plan.attention and name == "self_attn"):
        return "states"
    return "attention" if layer in plan.attention else "mlp"


def _projected(part: nn.Module, config: Any) -> int:
    """Numbers that the linear layers of a part give for a token; of experts, those that a token has."""
    plain = sum(
        module.out_features
        for name, module in part.named_modules()
        if isinstance(module, nn.Linear) and "experts." not in name
    )
    routed = any(name.rpartition(".")[2] == "experts" for name, _ in part.named_modules())
    return plain + (_routed(config) if routed else 0)


def _routed(config: Any) -> int:
    """Numbers that the projections of a token's own experts give for it."""
    count = getattr(config, "num_experts_per_tok", 1) or 1
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", 0)
    return count * (2 * inner + config.hidden_size)
