"""The steps of Transformers built like Llama, and of those that lapcli gave dual states: one product before each mixer.

Queries, keys, values (and gates of states) are rows of one matrix; norms and rotary embedding are done to all heads at
once. So a block of Llama is a norm, a product, the rotation, attention over a pool, a product, a norm and the MLP.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.families.remote.lapcli_dual_state import FLOOR, NORMALISER, DualStateAttention
from lapcli.families.remote.lapcli_dual_state_cache import DualStateCacheLayer
from lapcli.runtime.either import Either
from lapcli.runtime.layers import (
    ROTATION,
    GatedMlp,
    Head,
    LayerNorm,
    LibraryModule,
    Norm,
    Part,
    Rows,
    Sum,
    fused,
    linear,
    split_linear,
)
from lapcli.runtime.library_models import Builder, mlp, norm
from lapcli.runtime.pages import AttentionPool
from lapcli.runtime.pools import PagedStates, RecurrentPool, RecurrentShape
from lapcli.runtime.prefill import LibraryPrefiller
from lapkernels.attend_step import attend_step
from lapkernels.attend_step import select_impl as select_attention
from lapkernels.dual_state_step import dual_state_step
from lapkernels.dual_state_step import select_impl as select_states
from lapkernels.thin_linear import thin_linear

if TYPE_CHECKING:
    from lapcli.runtime.configurations import Convertible
    from lapcli.runtime.offload import Offload
    from lapcli.runtime.plans import Plan, Room


class Rotation(Protocol):
    """Where a step's rows stand, as cosines and sines."""

    def __call__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """`[B, 1, turning channels]` each."""
        ...


class Turn:
    """The rotary embedding of all heads at once, in three operations; channels that do not turn stay.

    Args:
        rotation: of each row's position.
        turning: channels of a head that turn, its first ones.
        width: of a head.
        device: where.
    """

    def __init__(self, rotation: Rotation, turning: int, width: int, device: torch.device):
        self.rotation, self.rest, self.half = rotation, width - turning, turning // 2
        # Each channel and the one that it turns with.
        first, second = torch.arange(turning, device=device).chunk(2)
        self.partner = torch.cat((second, first, torch.arange(turning, width, device=device)))

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """`[B, heads, width]` to the same."""
        cosines, sines = self.table(rows)
        return torch.addcmul(x * cosines, x.index_select(-1, self.partner), sines)

    def table(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a step's rows, the latter signed, `[B, 1, width]` each; made once a step."""
        if ROTATION not in rows.kept:
            cosines, sines = self.rotation(rows)
            signed = torch.cat((-sines[..., : self.half], sines[..., self.half :]), -1)
            rows.kept[ROTATION] = F.pad(cosines, (0, self.rest), value=1.0), F.pad(signed, (0, self.rest))
        return rows.kept[ROTATION]


class Mixer:
    """What attention and states have in common: all projections of the input as one product, and the output's.

    Args:
        module: the library's attention module, converted or not.
        turn: the rotary embedding; `None` for a layer without one.
        further: linear layers of the same input, whose biases are left to the subclass.
        ready: weight and bias of all of them, where they lie below each other already.
    """

    def __init__(
        self,
        module: Any,
        turn: Turn | None,
        further: Sequence[nn.Linear] = (),
        ready: tuple[Tensor, Tensor | None] | None = None,
    ):
        self.turn, self.scale = turn, module.scaling
        self.query_heads = module.config.num_attention_heads
        self.heads, self.width = self.query_heads // module.num_key_value_groups, module.head_dim
        self.output: nn.Linear = output_projection(module)
        self.weight, self.bias = ready or fused([*input_projections(module), *further], own_bias=further)
        sizes = [(self.query_heads + self.heads) * self.width, self.heads * self.width]
        sizes += [linear.out_features for linear in further]
        self.sizes = [*sizes, len(self.weight) - sum(sizes)]
        self.norms = _head_norms(module)

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Take one token of each row in."""
        mixed = self._step(linear(hidden, self.weight, self.bias, rows), rows)
        return linear(mixed, self.output.weight, self.output.bias, rows)

    def split(self, hidden: Tensor, rows: Rows, scale: float) -> Tensor:
        """The same, the sum of the last product left to what reads it."""
        mixed = self._step(linear(hidden, self.weight, self.bias, rows), rows)
        return split_linear(mixed, self.output, rows, scale)

    def direct(self, x: Tensor, norm: Norm, scale: float, rows: Rows) -> Tensor:
        """The same with norm and sum."""
        mixed = self._step(thin_linear(x, self.weight, self.bias, norm=norm.normed, ready=True), rows)
        return thin_linear(mixed, self.output.weight, self.output.bias, residual=x, scale=scale, ready=True)

    def _step(self, projected: Tensor, rows: Rows) -> Tensor:
        """From all projections to what the output projection reads."""
        both, values, *further, _ = projected.split(self.sizes, dim=-1)
        both = both.unflatten(-1, (-1, self.width))
        if self.norms is not None:
            parts = both.split([self.query_heads, self.heads], dim=1)
            both = torch.cat([each(part, part.dtype) for each, part in zip(self.norms, parts, strict=True)], dim=1)
        if self.turn is not None:
            both = self.turn(both, rows)
        queries, keys = both.split([self.query_heads, self.heads], dim=1)
        return self.mix(queries, keys, values.unflatten(-1, (-1, self.width)), further, rows).flatten(1)

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, further: Sequence[Tensor], rows: Rows) -> Tensor:
        """From `[B, HQ, K]`, `[B, H, K]`, `[B, H, V]` and what the further layers give to `[B, HQ, V]`."""
        raise NotImplementedError


class AttentionMixer(Mixer):
    """Softmax attention over a pool.

    Args:
        module: the library's attention module.
        turn: its rotary embedding.
        pool: of its keys and values.
        impl: which `attend_step`.
        ready: as for `Mixer`.
    """

    def __init__(
        self,
        module: Any,
        turn: Turn | None,
        pool: AttentionPool,
        impl: str,
        ready: tuple[Tensor, Tensor | None] | None = None,
    ):
        super().__init__(module, turn, ready=ready)
        self.pool, self.impl, self.window = pool, impl, _window(module)

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, further: Sequence[Tensor], rows: Rows) -> Tensor:
        """Keep the token's key and value, and attend to all that the row has."""
        return attend_step(
            queries,
            keys,
            values,
            self.pool.keys,
            self.pool.values,
            pages=self.pool.pages,
            position=rows.positions,
            slots=rows.slots,
            scale=self.scale,
            window=self.window,
            longest=rows.longest,
            impl=self.impl,
        )


class OffloadedAttention(AttentionMixer):
    """The same with projections that come to the device when they are needed.

    Args:
        offload: that brings them.
        module: the library's attention module.
        turn: its rotary embedding.
        pool: of its keys and values.
        impl: which `attend_step`.
    """

    def __init__(self, offload: "Offload", module: Any, turn: Turn | None, pool: AttentionPool, impl: str):
        place = offload.place(module.layer_idx)
        super().__init__(module, turn, pool, impl, (place.weight, place.bias))
        self.offload, self.layer = offload, module.layer_idx

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Take one token of each row in."""
        assert rows.mix is not None
        with self.offload.at_hand(self.layer, rows.mix.least):
            return super().__call__(hidden, rows)

    def split(self, hidden: Tensor, rows: Rows, scale: float) -> Tensor:
        """The same, the sum of the last product left to what reads it."""
        assert rows.mix is not None
        with self.offload.at_hand(self.layer, rows.mix.least):
            return super().split(hidden, rows, scale)

    def direct(self, x: Tensor, norm: Norm, scale: float, rows: Rows) -> Tensor:
        """The same with norm and sum."""
        assert rows.mix is not None
        with self.offload.at_hand(self.layer, rows.mix.least):
            return super().direct(x, norm, scale, rows)


class DualStateMixer(Mixer):
    """Gated states in the place of attention.

    Args:
        module: a converted attention module.
        turn: its rotary embedding.
        pool: of its states, `[slots, states, H, K, V]`, or in pages.
        impl: which `dual_state_step`.
    """

    def __init__(self, module: DualStateAttention, turn: Turn | None, pool: RecurrentPool, impl: str):
        settings = module.settings
        wide = (module.wide_q_proj, module.wide_k_proj) if settings.width > 1 else ()
        super().__init__(module, turn, (module.forget_proj, *wide))
        self.pool, self.impl = pool, impl
        self.mixture = module.mixture.detach().contiguous()
        self.gate_shape = (settings.states, self.heads, module.state_width)
        # In fp32, as the layer itself adds it: half precision has few steps where gates begin.
        self.gate_bias = _widened(module.forget_proj.bias.detach())
        self.channels: tuple[Tensor, Tensor] | None = None
        if settings.key_width is not None:
            left: Any = module.key_channels
            chosen = left.view(self.heads, -1)
            self.channels = chosen.repeat_interleave(module.num_key_value_groups, 0), chosen

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, further: Sequence[Tensor], rows: Rows) -> Tensor:
        """Write the token into the row's states and read them."""
        gate, *wide = further
        if self.channels is not None:
            queries, keys = (
                x.gather(-1, channels.expand(len(x), -1, -1))
                for x, channels in zip((queries, keys), self.channels, strict=True)
            )
        if wide:
            queries, keys = (
                torch.cat((x, own.unflatten(-1, (x.shape[1], -1))), -1)
                for x, own in zip((queries, keys), wide, strict=True)
            )
        return dual_state_step(
            queries.unsqueeze(1),
            keys.unsqueeze(1),
            values.unsqueeze(1),
            self.pool.state,
            gate=(gate + self.gate_bias).unflatten(-1, self.gate_shape).unsqueeze(1),
            mixture=self.mixture,
            normaliser=NORMALISER,
            floor=FLOOR,
            scale=self.scale,
            position=rows.positions,
            slots=rows.blocks[self.pool.number] if isinstance(self.pool, PagedStates) else rows.slots,
            impl=self.impl,
        ).squeeze(1)


class DualStatePrefiller(LibraryPrefiller):
    """For models of which some layers, or all, keep gated states in the library's cache."""

    def store_state(self, cache: Any, layer: int, row: int, slot: int, position: int) -> None:
        """Put one row's states of a layer into a slot."""
        state = cache.layers[layer].recurrent[row]
        self.recurrent[layer].write(slot, position, state, state.new_empty(0, 0))

    def restore_state(self, cache: Any, layer: int, slot: int, position: int) -> None:
        """Let a cache of one row hold what lies in a slot."""
        state, _ = self.recurrent[layer].read(slot, position)
        held = DualStateCacheLayer()
        held.recurrent, held.seen = _widened(state.unsqueeze(0)), position
        cache.layers[layer] = held


class ConfiguredPrefiller(DualStatePrefiller):
    """For one configuration of a model that comes in several.

    Args:
        convertible: the model.
        converted: layers that are states in this configuration.
        recurrent: the pool of each layer that has states in any.
        attention: the pool of each layer that has keys and values in any.
    """

    def __init__(
        self,
        convertible: "Convertible",
        converted: int,
        recurrent: dict[int, RecurrentPool],
        attention: dict[int, AttentionPool],
    ):
        states = convertible.order[:converted]
        super().__init__(
            convertible.model,
            {layer: pool for layer, pool in recurrent.items() if layer in states},
            {layer: pool for layer, pool in attention.items() if layer not in states},
        )
        self.convertible, self.converted = convertible, converted

    def forward(self, tokens: Tensor, cache: Any, seen: int) -> Tensor:
        """Run tokens on from a cache."""
        self.convertible.configure(self.converted)
        return super().forward(tokens, cache, seen)

    def forward_together(self, prompts: Sequence[Sequence[int]], cache: Any) -> Tensor:
        """Run prompts of any lengths in one pass."""
        self.convertible.configure(self.converted)
        return super().forward_together(prompts, cache)


def why_not_llama(model: Any) -> str | None:
    """Why a model of one of these types cannot run as fused steps, or `None`."""
    for index, block in enumerate(getattr(model, model.base_model_prefix).layers):
        module = block.self_attn
        if isinstance(module, DualStateAttention):
            if module.settings.window is not None:
                return "its converted layers attend to a window with sinks, a control"
        elif "Dual" in type(module).__name__:
            return f"layer {index} is converted by other code than lapcli's ({type(module).__name__})"
        linears = [*input_projections(module), output_projection(module)]
        other = next((linear for linear in linears if not isinstance(linear, nn.Linear)), None)
        if other is not None:
            return f"a projection of layer {index} is a {type(other).__name__}, no plain linear layer"
    return None


def input_projections(module: Any) -> list[Any]:
    """An attention module's projections of its input, in the order of q, k and v."""
    if hasattr(module, "qkv_proj"):
        return [module.qkv_proj]
    return [module.q_proj, module.k_proj, module.v_proj]


def output_projection(module: Any) -> Any:
    """An attention module's last layer."""
    return module.o_proj if hasattr(module, "o_proj") else module.dense


def _head_norms(module: Any) -> tuple[Norm, Norm] | None:
    """Norms of queries and keys, head by head."""
    if hasattr(module, "q_norm"):
        return norm(module.q_norm), norm(module.k_norm)
    if getattr(module, "qk_layernorm", False):
        return LayerNorm(module.q_layernorm), LayerNorm(module.k_layernorm)
    return None


def _window(module: Any) -> int | None:
    """Tokens that a layer sees at most. Mistral and Phi-3 say it in the config, others in the layer."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    return getattr(module.config, "sliding_window", None) if module.config.model_type in _WINDOW_IN_CONFIG else None


_WINDOW_IN_CONFIG = ("mistral", "phi3", "lapcli_dual_state_mistral", "lapcli_dual_state_phi3")


def _mixers(build: Builder) -> list[Mixer | Either]:
    """What mixes the tokens of each block, and its pools."""
    modules = [block.self_attn for block in build.base.layers]
    convertible = build.room.convertible
    attention = {} if convertible is None else convertible.attention
    states_only = all(isinstance(module, DualStateAttention) for module in modules) and not attention
    turn = _turn(build, modules[0].head_dim, limited=not states_only)
    found: list[Mixer | Either] = []
    for index, module in enumerate(modules):
        own_turn = turn if getattr(module, "use_rope", True) else None
        mixer = _mixer(build, module, own_turn)
        if index in attention:
            assert convertible is not None
            prepare = None if own_turn is None else own_turn.table
            other = _mixer(build, attention[index], own_turn, convertible.offload)
            mixer = Either(other, mixer, convertible.order.index(index), build.device, prepare)
        found.append(mixer)
    return found


def _mixer(build: Builder, module: Any, turn: Turn | None, offload: "Offload | None" = None) -> Mixer:
    """The mixer of a module, and its pool."""
    index, impl = module.layer_idx, build.room.impl
    if isinstance(module, DualStateAttention):
        shape = (module.settings.states, module.key_heads, module.state_width, module.head_dim)
        return DualStateMixer(module, turn, build.recurrent_pool(index, RecurrentShape(shape, 0, 0)), impl)
    library: Any = module
    heads, width = library.config.num_attention_heads // library.num_key_value_groups, library.head_dim
    pool = build.attention[index] = AttentionPool(heads, width, width)
    if offload is not None:
        return OffloadedAttention(offload, module, turn, pool, impl)
    return AttentionMixer(module, turn, pool, impl)


def _turn(build: Builder, width: int, *, limited: bool) -> Turn | None:
    """The model's rotary embedding: a table where attention layers bound the length, else computed in each step."""
    module: Any = getattr(build.base, "rotary_emb", None)
    if module is None:
        return None
    if limited:
        table = build.rotary()
        assert table is not None
        return Turn(table, table.cosines.shape[-1], width, build.device)
    hidden = torch.zeros(1, 1, build.config.hidden_size, dtype=build.dtype, device=build.device)

    def rotation(rows: Rows) -> tuple[Tensor, Tensor]:
        return module(hidden, position_ids=rows.positions.unsqueeze(1))

    with torch.no_grad():
        turning = module(hidden, position_ids=torch.zeros(1, 1, dtype=torch.int64, device=build.device))[0].shape[-1]
    return Turn(rotation, turning, width, build.device)


def _finished(build: Builder, sublayers: Any, final: Norm) -> "Plan":
    """The plan, with what stores the states of converted layers and what chooses the kernels of its steps."""
    plan = build.plan(build.base.embed_tokens, sublayers, final, Head(build.model.lm_head))
    plan.kernels = tuple(
        select for pools, select in ((build.recurrent, select_states), (build.attention, select_attention)) if pools
    )
    if build.recurrent:
        plan.prefiller = DualStatePrefiller(build.model, build.recurrent, build.attention)
    if (convertible := build.room.convertible) is not None:
        plan.prefillers = {
            number: ConfiguredPrefiller(convertible, number, build.recurrent, build.attention)
            for number in convertible.numbers
        }
    return plan


def llama_plan(model: Any, room: "Room") -> "Plan":
    """Llama, Mistral, Qwen2, Qwen3, SmolLM3 and Phi-3: mixer and MLP one after the other."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    sublayers: list[Sublayer] = []
    for block, mixer in zip(build.base.layers, _mixers(build), strict=True):
        sublayers += [
            Sublayer(mixer, norm(block.input_layernorm)),
            Sublayer(_mlp(block.mlp, build.config), norm(block.post_attention_layernorm)),
        ]
    return _finished(build, sublayers, norm(build.base.norm))


def phi_plan(model: Any, room: "Room") -> "Plan":
    """Phi: mixer and MLP of a block read the same input."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    sublayers = [
        Sublayer(Sum((1.0, mixer, 1.0), (1.0, LibraryModule(block.mlp), 1.0)), LayerNorm(block.input_layernorm))
        for block, mixer in zip(build.base.layers, _mixers(build), strict=True)
    ]
    return _finished(build, sublayers, LayerNorm(build.base.final_layernorm))


def _mlp(module: Any, config: Any) -> Part:
    """An MLP; Phi-3 has gate and up in one projection."""
    packed = getattr(module, "gate_up_proj", None)
    if isinstance(packed, nn.Linear) and isinstance(module.down_proj, nn.Linear) and config.hidden_act == "silu":
        return GatedMlp(packed, None, module.down_proj)
    return mlp(module, config)


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


_LIKE_LLAMA: dict[str, Callable[[Any, "Room"], "Plan"]] = {
    "llama": llama_plan,
    "mistral": llama_plan,
    "qwen2": llama_plan,
    "qwen3": llama_plan,
    "smollm3": llama_plan,
    "phi3": llama_plan,
    "phi": phi_plan,
}
TRANSFORMERS = _LIKE_LLAMA | {f"lapcli_dual_state_{name}": plan for name, plan in _LIKE_LLAMA.items()}
"""Plans of Transformers by `model_type`, converted ones too."""
