"""Dual-state linear attention (arXiv 2506.09316) in the place of a decoder's softmax attention.

A converted layer is the library's own attention module with all that it has: projections, biases, query and key norms,
rotary embedding. What changes is what happens between them and the output projection: instead of attending to a cache
that grows, the layer writes each key and value to a few states of constant size, which forget at different rates, and
reads a learned mixture of them. So it works for any decoder of transformers whose attention asks for an attention
function by name, and a converted checkpoint has the teacher's tensors under their names, and a few more.

Written by lapcli beside models that it converted. It needs torch and transformers; where lapkernels is installed, its
kernels run. Licence: Apache 2.0.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .lapcli_dual_state_cache import DualStateCacheLayer, WindowCacheLayer
from .lapcli_dual_state_portable import portable_dual_state
from .lapcli_dual_state_window import Window, attend_window, attend_window_by_ranks

try:
    from lapkernels.dual_state import dual_state as _operator
    from lapkernels.dual_state_step import dual_state_step as _step
except ImportError:
    _operator = _step = None

_NAME = "lapcli_dual_state"
_LAYOUT = "dual_state_layout"
_CACHES = ("cache", "past_key_values")
"""What the library calls a cache, by version."""

NORMALISER = 16.0
"""What a gate's logsigmoid is divided by."""
FLOOR = -50.0
"""The least log decay of one step."""
_PACKED_CACHE = "packed sequences cannot be kept in a cache; pass them as rows"
_OPEN = 1e4
"""A raw gate that lets nothing decay: its logsigmoid is zero in every dtype."""
_ANEW = -104.0
"""A log decay that leaves nothing of a state: its exponential is 0 in fp32 (below half the least number there is)."""
HISTORY_BIAS = 4.0
"""Where the history gate starts: a half-life of about 600 tokens; the recency gate starts at 0, about 16 tokens."""


@dataclass(frozen=True)
class DualStateSettings:
    """What all converted layers of a model have in common; `config.dual_state` holds it.

    Attributes:
        layers: which layers are converted, in the order in which they were.
        states: how many states share keys and values; 2 in the paper.
        start: how gates begin: `graded` from history to recency, or all at `random`.
        width: how many times the teacher's key width a state has; channels beyond it have projections of their own.
        key_width: key channels of a head that are left, where some were cut; `None` for all.
        window: instead of states, softmax attention to so many last tokens; `None` for states.
        sinks: the first tokens of a sequence that a window always sees.
    """

    layers: tuple[int, ...] = ()
    states: int = 2
    start: str = "graded"
    width: int = 1
    key_width: int | None = None
    window: int | None = None
    sinks: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        for name in ("states", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"dual_state has {name} = {getattr(self, name)}; 1 or more is wanted")
        if self.start not in ("graded", "random"):
            raise ValueError(f"dual_state has start = {self.start!r}; 'graded' or 'random' is wanted")
        if len(set(self.layers)) != len(self.layers) or min(self.layers, default=0) < 0:
            raise ValueError(f"dual_state has layers = {list(self.layers)}; each layer's number once is wanted")
        if self.window is not None and (self.window < 1 or self.sinks < 0):
            raise ValueError(
                f"dual_state has window = {self.window}, sinks = {self.sinks}; 1 or more and 0 or more is wanted"
            )

    @classmethod
    def of(cls, config: Any) -> "DualStateSettings":
        """From a model's config.

        Raises:
            ValueError: it has none, or one with fields or values that are not known.
        """
        found = getattr(config, "dual_state", None)
        if not isinstance(found, Mapping):
            raise ValueError(f"config.dual_state is {found!r}; the settings of the converted layers are wanted")
        unknown = set(found) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"config.dual_state has {sorted(unknown)[0]!r}, which this code does not know")
        return cls(**found)

    def as_config(self) -> dict[str, Any]:
        """What `config.dual_state` holds."""
        return {**asdict(self), "layers": list(self.layers)}


@dataclass
class Layout:
    """Which positions of a forward pass are tokens, and where packed sequences begin; alike for all layers.

    Attributes:
        is_token: bool `[B, T]`, or `None` where all are.
        bounds: of sequences in all rows laid one behind the other, from 0 to `B T`; `None` where each row is one.
        ranks: the same boundaries without a number that the host would have to know, so that a CUDA graph holds for
            whatever lies in it: int64 `[B, T]`, how many tokens of its sequence come before each, 0 where one begins.
            For whoever hands a layout to a decoder as `dual_state_layout`; without masks, bounds and caches.
        shared: what layers made of it that is alike for all of them.
    """

    is_token: Tensor | None = None
    bounds: tuple[int, ...] | None = None
    ranks: Tensor | None = None
    shared: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_packed(self) -> bool:
        """Whether rows may hold several sequences."""
        return self.bounds is not None or self.ranks is not None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Layout":
        """Read the arguments of a decoder's forward pass.

        Padding may lie anywhere. Packed sequences are told as the library's attention is told of them: by positions
        that do not follow one another, without a mask and without a cache; or by `cu_seqlens` (`cu_seq_lens_q`), for
        one row.

        Raises:
            ValueError: a mask of another kind, or boundaries that do not fit.
        """
        ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
        given = embeds if ids is None else ids
        if given is None:
            return cls()
        rows, time = given.shape[:2]
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        cached = any(arguments.get(name) is not None for name in _CACHES)
        bounds = next((arguments[name] for name in ("cu_seqlens", "cu_seq_lens_q") if name in arguments), None)
        if bounds is not None:
            whole = tuple(bounds.tolist())
            if rows != 1 or whole[0] != 0 or whole[-1] != time or any(b <= a for a, b in itertools.pairwise(whole)):
                raise ValueError(f"cu_seqlens should rise strictly from 0 to {time}, for one row; it is {list(whole)}")
            return cls(bounds=whole)
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < time:
                found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(
                    f"attention_mask is {found}; dual-state layers take [rows, {time} or more], 1 for a token and 0 "
                    "for padding"
                )
            return cls(is_token=mask[:, -time:].to(given.device).bool())
        if positions is None or cached or time == 1 or positions.ndim != 2:
            return cls()
        follows = positions.diff(dim=1) == 1
        if bool(follows.all()):
            return cls()
        begins = F.pad(~follows.cpu(), (1, 0), value=True).expand(rows, time).flatten()
        return cls(bounds=(*begins.nonzero().flatten().tolist(), rows * time))


@dataclass
class _Call:
    """What one forward pass of a layer knows beside keys and values."""

    hidden: Tensor
    layout: Layout
    held: DualStateCacheLayer | None


class Tap(nn.Module):
    """Hands on the read and write directions of a layer, for whoever hooks it to see or replace."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, T, HQ, K]` and `[B, T, H, K]`."""
        return q, k


class DualStateAttention(nn.Module):
    """Comes before a library's attention module among the bases of a class, and replaces what it attends by.

    `dual_state_class` makes such classes. New parameters: `forget_proj` (a weight and a bias, states x key heads x key
    channels), `mixture` (a logit a state), and beyond the teacher's key width `wide_q_proj` and `wide_k_proj`. The
    buffer `key_channels` says which of the teacher's key channels a head still has, after the rotary embedding.

    Per token, key head and state: `g = max(logsigmoid(W x + b) / 16, -50)`, one a key channel, from the layer's input
    x; `S = Diag(exp(g)) S + k v^T`; and for each query head `o = sum_a softmax(mixture)_a S_a^T (scale q)`, with the
    teacher's own scale.
    """

    # Made by the library's own class.
    config: Any
    layer_idx: int
    head_dim: int
    num_key_value_groups: int

    settings: DualStateSettings
    kernel: str
    """Which implementation of `lapkernels.dual_state` runs; `auto` unless asked for."""

    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)  # pyright: ignore[reportCallIssue]
        self.add_states(DualStateSettings.of(config))

    @torch.no_grad()
    def add_states(self, settings: DualStateSettings) -> None:
        """Give a library's attention module what it lacks; weights begin as `start_states` says."""
        self.settings, self.kernel = settings, "auto"
        # A config of its own: the attention function is looked up by a name that the other layers do not share.
        self.config = copy.copy(self.config)
        self.config._attn_implementation = _NAME
        if settings.window is not None:
            return
        like: Any = self.output_projection.weight
        options = {"device": like.device, "dtype": like.dtype}
        hidden, heads, width = like.shape[0], self.key_heads, self.state_width
        self.tap = Tap()
        self.forget_proj = nn.Linear(hidden, settings.states * heads * width, **options)
        self.mixture = nn.Parameter(torch.zeros(settings.states, **options))
        own = settings.key_width or self.head_dim
        channels = torch.arange(own, device=like.device).repeat(heads)
        self.register_buffer("key_channels", channels)
        further = (settings.width - 1) * self.head_dim
        if further:
            self.wide_q_proj = nn.Linear(
                hidden, self.key_heads * self.num_key_value_groups * further, bias=False, **options
            )
            self.wide_k_proj = nn.Linear(hidden, self.key_heads * further, bias=False, **options)
        self.start_states()

    @torch.no_grad()
    def start_states(self, generator: torch.Generator | None = None) -> None:
        """Set the new weights to where training begins.

        `graded`: the first state's gates are the same for all inputs and slow, the last one's are random and fast, and
        those between in equal steps of the bias; one state alone begins as the first. `random`: all as the last.
        The random weights of a gate make numbers of unit size of inputs of unit size.
        """
        if self.settings.window is not None:
            return
        states = self.settings.states
        weight, bias = (x.unflatten(0, (states, -1)) for x in (self.forget_proj.weight, self.forget_proj.bias))
        for state in range(states):
            graded = self.settings.start == "graded"
            slowness = 1.0 if states == 1 else 1 - state / (states - 1)
            slow = graded and slowness == 1
            std = weight.shape[-1] ** -0.5 * (0.01 if slow else 1.0)
            weight[state].copy_(_normal(weight[state], std, generator))
            bias[state].fill_(HISTORY_BIAS * slowness if graded else 0.0)
        self.mixture.zero_()
        if self.settings.width > 1:
            # The channels beyond the teacher's begin without a say: their keys are zero, and learn first.
            query = self.wide_q_proj
            query.weight.copy_(_normal(query.weight, query.in_features**-0.5, generator))
            self.wide_k_proj.weight.zero_()

    @property
    def key_heads(self) -> int:
        """H, heads of keys and values; each has states of its own."""
        return self.config.num_attention_heads // self.num_key_value_groups

    @property
    def state_width(self) -> int:
        """K, key channels of a state."""
        own = self.settings.key_width or self.head_dim
        return own + (self.settings.width - 1) * self.head_dim

    @property
    def output_projection(self) -> Any:
        """The linear module after the states, under the library's name."""
        return self.o_proj if hasattr(self, "o_proj") else self.dense

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the teacher's module does not have, by name."""
        names = ("forget_proj", "mixture", "wide_q_proj", "wide_k_proj")
        return {name: value for name, value in self.named_parameters() if name.split(".")[0] in names}

    def raw_gates(self, hidden: Tensor) -> Tensor:
        """Before the logsigmoid, `[B, T, states, H, K]` in fp32 (fp64 for fp64), from the layer's input `[B, T, D]`."""
        gate = _wide(F.linear(hidden, self.forget_proj.weight)) + _wide(self.forget_proj.bias)
        return gate.unflatten(-1, (self.settings.states, self.key_heads, -1))

    def log_decays(self, hidden: Tensor) -> Tensor:
        """What multiplies the states is the exponential of it; `[B, T, states, H, K]`, never positive."""
        return log_decays(self.raw_gates(hidden))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """From `[B, T, D]` to the same, as the library's module does; the mask that counts is in the layout."""
        held = None
        for name in _CACHES:
            cache_ = kwargs.pop(name, None)
            if cache_ is not None:
                held = _cache_layer(cache_, self.layer_idx, self.settings)
        layout = kwargs.pop(_LAYOUT, None) or Layout()
        call = _Call(hidden_states, layout, held)
        forward: Any = super().forward
        return forward(
            hidden_states, position_embeddings=position_embeddings, attention_mask=None, dual_state=call, **kwargs
        )

    def mix(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, call: _Call) -> Tensor:
        """What comes instead of attention.

        Args:
            q: `[B, HQ, T, d]`, after norms and rotary embedding.
            k: `[B, H, T, d]`.
            v: `[B, H, T, V]`.
            scaling: the read scale.
            call: all else.

        Returns:
            `[B, T, HQ, V]`.
        """
        if self.settings.window is not None:
            if call.held is not None and call.layout.is_packed:
                raise ValueError(_PACKED_CACHE)
            held = call.held if isinstance(call.held, WindowCacheLayer) else None
            window, layout = Window(self.settings.window, self.settings.sinks), call.layout
            if layout.ranks is not None:
                return attend_window_by_ranks(q, k, v, scaling, window, layout.ranks, layout.shared)
            return attend_window(q, k, v, scaling, window, layout.is_token, layout.bounds, held)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # Norms of queries and keys in a layer that is trained in fp32 give fp32, whatever the rest is in.
        q, k = (x.to(v.dtype) for x in self._directions(q, k, call.hidden))
        gate = self.raw_gates(call.hidden)
        token = call.layout.is_token
        if token is not None:
            # A pad writes nothing and lets nothing decay; what stands there leaves no trace, not even NaN.
            k, v, q = (x.where(token[:, :, None, None], 0.0) for x in (k, v, q))
            gate = gate.where(token[:, :, None, None, None], _OPEN)
        return self._run(q, k, v, gate, scaling, call)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scaling: float, call: _Call) -> Tensor:
        rows, time = q.shape[:2]
        held = call.held
        before = None if held is None or held.recurrent is None else held.recurrent.to(q.device)
        if before is not None and before.shape[0] != rows:
            raise ValueError(f"the cache holds {before.shape[0]} rows, and {rows} are to go on from it")
        if before is not None and time == 1 and _step is not None and not torch.is_grad_enabled():
            assert held is not None
            held.seen += 1
            held.recurrent = before
            return _step(
                q, k, v, before, gate=gate, mixture=self.mixture.contiguous(), normaliser=NORMALISER, floor=FLOOR,
                scale=scaling,
            )  # fmt: skip
        bounds, ranks = call.layout.bounds, call.layout.ranks
        if call.layout.is_packed and held is not None:
            raise ValueError(_PACKED_CACHE)
        if bounds is not None:
            q, k, v, gate = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, gate))
        decays = log_decays(gate)
        if ranks is not None:
            # The first token of a sequence leaves nothing of what came before it.
            decays = decays.masked_fill((ranks == 0)[:, :, None, None, None], _ANEW)
        shares = _wide(self.mixture).softmax(0)
        if _operator is None:
            output, state = portable_dual_state(q, k, v, decays, shares, scaling, before, bounds)
        else:
            output, state = _operator(
                q, k, v, decays, shares, scale=scaling, initial_state=before,
                output_final_state=held is not None, impl=self.kernel,
                cu_seqlens=None if bounds is None else torch.tensor(bounds),
            )  # fmt: skip
        if held is not None:
            assert state is not None
            # Steps write it in place, slot by slot.
            held.recurrent = state.contiguous()
            held.seen += time
        return output if bounds is None else output.squeeze(0).unflatten(0, (rows, time))

    def _directions(self, q: Tensor, k: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Read and write directions `[B, T, heads, K]`: the teacher's channels that are left, and the layer's own."""
        if self.settings.key_width is not None:
            channels: Any = self.key_channels
            chosen = channels.view(self.key_heads, -1)
            k = k.gather(-1, chosen.expand(*k.shape[:3], -1))
            q = q.gather(-1, chosen.repeat_interleave(self.num_key_value_groups, 0).expand(*q.shape[:3], -1))
        if self.settings.width > 1:
            q = torch.cat((q, self.wide_q_proj(hidden).unflatten(-1, (q.shape[2], -1))), -1)
            k = torch.cat((k, self.wide_k_proj(hidden).unflatten(-1, (k.shape[2], -1))), -1)
        return self.tap(q, k)


@cache
def dual_state_class(attention: type[nn.Module]) -> type[DualStateAttention]:
    """The class of an attention module that is converted."""
    return type(f"DualState{attention.__name__}", (DualStateAttention, attention), {"__module__": __name__})


def convert_layers(model: nn.Module, settings: DualStateSettings, layers: Sequence[int] | None = None) -> None:
    """Turn attention modules of a decoder into dual-state ones, in place; their own weights stay as they are.

    Args:
        model: a causal language model of transformers, or its decoder.
        settings: for the new layers.
        layers: which; `None` for those of the settings.

    Raises:
        ValueError: there is no such layer, it is converted already, or its attention is of a kind that is not known.
    """
    decoder = decoder_of(model)
    blocks: Any = decoder.layers
    for number in settings.layers if layers is None else layers:
        if not 0 <= number < len(blocks):
            raise ValueError(f"the model has layers 0 to {len(blocks) - 1}, and no layer {number}")
        attention = getattr(blocks[number], "self_attn", None)
        if isinstance(attention, DualStateAttention):
            raise ValueError(f"layer {number} is converted already")
        wanted = ("head_dim", "num_key_value_groups", "config", "layer_idx")
        if attention is None or not all(hasattr(attention, name) for name in wanted):
            raise ValueError(f"layer {number} has no attention of the kind that Llama has ({type(attention).__name__})")
        attention.__class__ = dual_state_class(type(attention))
        attention.add_states(settings)
    announce_layout(model)


def restore_layer(model: nn.Module, layer: int) -> None:
    """Turn a converted layer back into the library's attention, with the weights that it has now."""
    attention: Any = decoder_of(model).layers[layer].self_attn
    if not isinstance(attention, DualStateAttention):
        raise ValueError(f"layer {layer} is not converted")
    for name in ("tap", "forget_proj", "mixture", "key_channels", "wide_q_proj", "wide_k_proj"):
        if hasattr(attention, name):
            delattr(attention, name)
    del attention.settings, attention.kernel
    attention.config = decoder_of(model).config
    attention.__class__ = type(attention).__mro__[2]


def dual_state_layers(model: nn.Module) -> dict[int, DualStateAttention]:
    """The converted layers by number."""
    blocks: Any = decoder_of(model).layers
    found = {number: getattr(block, "self_attn", None) for number, block in enumerate(blocks)}
    return {number: layer for number, layer in found.items() if isinstance(layer, DualStateAttention)}


def decoder_of(model: nn.Module) -> Any:
    """The module that holds the layers."""
    base: Any = getattr(model, "base_model", model)
    if not hasattr(base, "layers"):
        raise ValueError(f"{type(model).__name__} has no decoder of the kind that Llama has")
    return base


def announce_layout(model: nn.Module) -> None:
    """Let a decoder tell its layers which positions are tokens, once a pass; without effect when it does so already."""
    decoder = decoder_of(model)
    if _tell_layout not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_tell_layout, with_kwargs=True)


def _tell_layout(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if _LAYOUT in kwargs:
        return None
    named = dict(zip(("input_ids", "attention_mask", "position_ids"), args, strict=False))
    layout = Layout.of({**named, **kwargs})
    kwargs.pop("cu_seqlens", None)
    return args, {**kwargs, _LAYOUT: layout}


def _cache_layer(cache_: Any, index: int, settings: DualStateSettings) -> DualStateCacheLayer:
    """The layer's place in the library's cache; a place for keys and values that is empty becomes one for states."""
    wanted = DualStateCacheLayer if settings.window is None else WindowCacheLayer
    layers = cache_.layers
    while len(layers) <= index:
        layers.append(cache_.layer_class_to_replicate())
    if not isinstance(layers[index], DualStateCacheLayer):
        if layers[index].get_seq_length():
            raise ValueError(
                f"the cache holds keys and values of layer {index}, which keeps states: pass its tokens again instead"
            )
        layers[index] = wanted()
    return layers[index]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float,
    dual_state: _Call, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function that the library's module finds under our name."""
    assert isinstance(module, DualStateAttention)
    return module.mix(query, key, value, scaling, dual_state), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)


def log_decays(gate: Tensor) -> Tensor:
    """`max(logsigmoid(gate) / 16, -50)`."""
    return (F.logsigmoid(gate) / NORMALISER).clamp(min=FLOOR)


def gate_similarity(decays: Tensor, is_token: Tensor | None = None) -> Tensor:
    """Mean cosine similarity of the gates of two states, over all pairs of states and all tokens; 0 for one state.

    Args:
        decays: log decays `[B, T, states, H, K]`; the gates are their exponentials.
        is_token: bool `[B, T]`; others do not count.
    """
    mean = token_similarity(decays)
    return mean.mean() if is_token is None else mean[is_token].mean()


def token_similarity(decays: Tensor) -> Tensor:
    """The same of every token, `[B, T]`, over all pairs of states."""
    gates = F.normalize(decays.exp().flatten(3), dim=-1)
    states = gates.shape[2]
    if states == 1:
        return decays.flatten(2).sum(-1) * 0.0
    pairs = (gates @ gates.mT).flatten(2).sum(-1) - states
    return pairs / (states * (states - 1))


def _normal(like: Tensor, std: float, generator: torch.Generator | None) -> Tensor:
    """Drawn on the CPU in fp32 where there is a generator, so that a seed means the same on every device."""
    if generator is None:
        return torch.randn_like(like) * std
    return (torch.randn(like.shape, generator=generator) * std).to(like)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
