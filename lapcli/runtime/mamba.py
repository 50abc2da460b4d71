"""Mamba-2 layers and the models around them: the steps of Mamba-2, Bamba, Falcon-H1, Granite, Nemotron-H and Zamba2."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.runtime.layers import (
    GatedMlp,
    Head,
    LibraryModule,
    Norm,
    Part,
    Rows,
    Sum,
    fused,
    laid_by_tap,
    linear,
    split_linear,
)
from lapcli.runtime.library_models import Builder, mlp, norm
from lapcli.runtime.pools import RecurrentPool, RecurrentShape
from lapkernels.ssd_step import ConvState, ssd_step
from lapkernels.thin_linear import thin_linear

if TYPE_CHECKING:
    from lapcli.runtime.plans import Plan, Room


class SsdHeads(NamedTuple):
    """How the output of a packed projection `[z, x, B, C, dt, padding]` divides."""

    heads: int
    groups: int
    value_width: int
    state_width: int

    @property
    def inner(self) -> int:
        """Channels of z, and of x."""
        return self.heads * self.value_width

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Rows of z, x, B, C and dt."""
        shared = self.groups * self.state_width
        return self.inner, self.inner, shared, shared, self.heads


class SsdMixer:
    """A Mamba-2 layer: one product for everything that reads the input, one fused step, one product.

    Args:
        pool: where the states lie.
        module: the library's mixer.
        heads: of the layer.
        impl: which `ssd_step`.
    """

    def __init__(self, pool: RecurrentPool, module: Any, heads: SsdHeads, impl: str):
        self.pool, self.heads, self.impl, self.output = pool, heads, impl, module.out_proj
        self.weight, self.bias = fused((module.in_proj,))
        self.sizes = [*heads.sizes, len(self.weight) - sum(heads.sizes)]
        bias = module.conv1d.bias
        taps = laid_by_tap(module.conv1d.weight.squeeze(1))
        self.convolution = ConvState(taps, None if bias is None else bias.detach(), pool.inputs)
        self.A_log, self.D, self.dt_bias = (getattr(module, name).detach() for name in ("A_log", "D", "dt_bias"))
        low, high = module.time_step_limit
        # The library clamps steps in a pass over many tokens and not in one over one; a pass is what is meant.
        self.limit = None if low <= 0 and high == float("inf") else (float(low), float(high))
        has_norm = not isinstance(module.norm, nn.Identity)
        self.norm_weight = module.norm.weight.detach() if has_norm else None
        self.norm_eps = module.norm.variance_epsilon if has_norm else 1e-6
        self.norm_groups = _norm_groups(module.norm, heads.inner)
        self.gate_first = not getattr(module.norm, "norm_before_gate", False)
        # Falcon-H1's multipliers of the input and of each part of the projection.
        self.before: float = getattr(module, "ssm_in_multiplier", 1.0)
        parts = getattr(module, "mup_vector", None)
        self.after = None if parts is None else F.pad(parts.flatten(), (0, self.sizes[-1])).to(self.weight.dtype)

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Take one token of each row in, write its state, read it."""
        return linear(self._mixed(hidden, rows), self.output.weight, self.output.bias, rows)

    def split(self, hidden: Tensor, rows: Rows, scale: float) -> Tensor:
        """The same, the sum of the last product left to what reads it."""
        return split_linear(self._mixed(hidden, rows), self.output, rows, scale)

    def _mixed(self, hidden: Tensor, rows: Rows) -> Tensor:
        hidden = hidden if self.before == 1.0 else hidden * self.before
        return self._step(linear(hidden, self.weight, self.bias, rows), rows)

    def direct(self, x: Tensor, norm: Norm, scale: float, rows: Rows) -> Tensor:
        """The same with norm and sum. (Where the input has a factor, the mixer is within a `Sum`, which has none.)"""
        mixed = self._step(thin_linear(x, self.weight, self.bias, norm=norm.normed, ready=True), rows)
        return thin_linear(mixed, self.output.weight, self.output.bias, residual=x, scale=scale, ready=True)

    def _step(self, projected: Tensor, rows: Rows) -> Tensor:
        """From all projections to what the output projection reads."""
        heads = self.heads
        projected = projected if self.after is None else projected * self.after
        z, x, B, C, dt, _ = projected.unsqueeze(1).split(self.sizes, dim=-1)
        values, shared = (heads.heads, heads.value_width), (heads.groups, heads.state_width)
        mixed = ssd_step(
            x.unflatten(-1, values),
            B.unflatten(-1, shared),
            C.unflatten(-1, shared),
            self.pool.state,
            dt=dt,
            A_log=self.A_log,
            D=self.D,
            dt_bias=self.dt_bias,
            dt_limit=self.limit,
            conv=self.convolution,
            position=rows.positions,
            slots=rows.slots,
            gate=z.unflatten(-1, values),
            norm_weight=self.norm_weight,
            norm_groups=self.norm_groups,
            norm_eps=self.norm_eps,
            gate_first=self.gate_first,
            impl=self.impl,
        )
        return mixed.flatten(2).squeeze(1)


def _norm_groups(module: Any, width: int) -> int:
    """Groups of channels that a library's norm takes apart: transformers 5.17 has one, 5.24 those of B and C."""
    if hasattr(module, "group_size"):
        return width // module.group_size
    return getattr(module, "n_groups", 1)


def mamba_mixer(build: Builder, module: Any) -> SsdMixer:
    """A Mamba-2 mixer of any of the families."""
    heads = SsdHeads(module.num_heads, module.n_groups, module.head_dim, module.ssm_state_size)
    pool = build.recurrent_pool(
        module.layer_idx,
        RecurrentShape(
            (heads.heads, heads.value_width, heads.state_width),
            heads.inner + 2 * heads.groups * heads.state_width,
            module.conv_kernel_size - 1,
            turned=True,
        ),
    )
    return SsdMixer(pool, module, heads, build.room.impl)


def mamba2_plan(model: Any, room: "Room") -> "Plan":
    """Mamba-2 alone, Codestral-Mamba among them."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    sublayers = [Sublayer(mamba_mixer(build, block.mixer), norm(block.norm)) for block in build.base.layers]
    wide = torch.promote_types(build.dtype, torch.float32) if build.config.residual_in_fp32 else None
    return build.plan(
        build.base.embeddings, sublayers, norm(build.base.norm_f), Head(model.lm_head, widened=True), wide
    )


def bamba_plan(model: Any, room: "Room") -> "Plan":
    """Bamba."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    sublayers: list[Sublayer] = []
    for index, block in enumerate(build.base.layers):
        recurrent = hasattr(block, "mamba")
        mixer = mamba_mixer(build, block.mamba) if recurrent else build.attention_part(block.self_attn, index)
        sublayers += [
            Sublayer(mixer, norm(block.input_layernorm)),
            Sublayer(mlp(block.feed_forward, build.config), norm(block.pre_ff_layernorm)),
        ]
    return build.plan(build.base.embed_tokens, sublayers, norm(build.base.final_layernorm), Head(model.lm_head))


def granite_plan(model: Any, room: "Room") -> "Plan":
    """Granite's hybrids: multipliers of embeddings, residuals and logits, experts beside a shared MLP."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    scale = float(build.config.residual_multiplier)
    sublayers: list[Sublayer] = []
    for index, block in enumerate(build.base.layers):
        recurrent = block.mamba is not None
        mixer = mamba_mixer(build, block.mamba) if recurrent else build.attention_part(block.self_attn, index)
        feed: Part = LibraryModule(block.shared_mlp)
        if block.has_experts:
            feed = Sum((1.0, LibraryModule(block.block_sparse_moe), 1.0), (1.0, feed, 1.0))
        sublayers += [
            Sublayer(mixer, norm(block.input_layernorm), scale=scale),
            Sublayer(feed, norm(block.post_attention_layernorm), scale=scale),
        ]
    return build.plan(
        _times(build.base.embed_tokens, float(build.base.embedding_multiplier)),
        sublayers,
        norm(build.base.norm),
        Head(model.lm_head, 1 / float(build.config.logits_scaling)),
    )


def _times(module: nn.Module, factor: float) -> Any:
    """A module whose output is multiplied."""
    return module if factor == 1.0 else lambda x: module(x) * factor


def falcon_plan(model: Any, room: "Room") -> "Plan":
    """Falcon-H1: both mixers of a block read the same input."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    sublayers: list[Sublayer] = []
    for index, block in enumerate(build.base.layers):
        mixer = Sum(
            (1.0, mamba_mixer(build, block.mamba), float(block.ssm_out_multiplier)),
            (
                float(block.attention_in_multiplier),
                build.attention_part(block.self_attn, index),
                float(block.attn_out_multiplier),
            ),
        )
        sublayers += [
            Sublayer(mixer, norm(block.input_layernorm)),
            Sublayer(_falcon_mlp(block.feed_forward), norm(block.pre_ff_layernorm)),
        ]
    return build.plan(
        _times(build.base.embed_tokens, float(build.base.embedding_multiplier)),
        sublayers,
        norm(build.base.final_layernorm),
        Head(model.lm_head, float(build.base.lm_head_multiplier)),
    )


def _falcon_mlp(module: Any) -> Part:
    """Fused where its multipliers do nothing."""
    plain = module.gate_multiplier == 1 and module.down_multiplier == 1 and module.config.hidden_act == "silu"
    return GatedMlp(module.gate_proj, module.up_proj, module.down_proj) if plain else LibraryModule(module)


def nemotron_plan(model: Any, room: "Room") -> "Plan":
    """Nemotron-H: one part a block, be it a mixer, an MLP or experts."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    sublayers: list[Sublayer] = []
    for index, block in enumerate(build.base.layers):
        if block.block_type == "linear_attention":
            part: Part = mamba_mixer(build, block.mixer)
        elif block.block_type == "full_attention":
            part = build.attention_part(block.mixer, index)
        else:
            part = LibraryModule(block.mixer)
        sublayers.append(Sublayer(part, norm(block.norm)))
    return build.plan(build.base.embeddings, sublayers, norm(build.base.norm_f), Head(model.lm_head, widened=True))


class Zamba2Block:
    """What a block of Zamba2 adds to the stream: a mixer that also reads what a shared transformer block makes of it.

    Args:
        mixer: of the block.
        before: the mixer's norm.
        shared: the transformer block, which reads stream and embedding side by side.
        attention: its attention module on pools.
        linear: from the transformer block to the mixer.
        layer: the block's number.
    """

    def __init__(self, mixer: Part, before: Norm, shared: Any, attention: Part, linear: nn.Linear, layer: int):
        self.mixer, self.before, self.shared, self.attention = mixer, before, shared, attention
        self.linear, self.layer = linear, layer

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """`[B, D]`, the stream itself, to what is added to it."""
        both = torch.cat((hidden, rows.kept["embedding"]), dim=-1)
        attended = self.attention(self.shared.input_layernorm(both), rows)
        normed = self.shared.pre_ff_layernorm(attended.unsqueeze(1))
        fed = self.linear(self.shared.feed_forward(normed, self.layer).squeeze(1))
        return self.mixer(self.before(hidden + fed, hidden.dtype), rows)


def zamba2_plan(model: Any, room: "Room") -> "Plan":
    """Zamba2: Mamba-2 layers, some of which come after one of few shared transformer blocks."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    sublayers: list[Sublayer] = []
    for index, block in enumerate(build.base.layers):
        inner = block.mamba_decoder if hasattr(block, "mamba_decoder") else block
        mixer, before = mamba_mixer(build, inner.mamba), norm(inner.input_layernorm)
        if inner is block:
            sublayers.append(Sublayer(mixer, before))
            continue
        shared = block.shared_transformer
        attention = build.attention_part(shared.self_attn, index, layer_idx=index)
        sublayers.append(Sublayer(Zamba2Block(mixer, before, shared, attention, block.linear, index), None))
    return build.plan(build.base.embed_tokens, sublayers, norm(build.base.final_layernorm), Head(model.lm_head))
