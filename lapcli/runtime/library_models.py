"""The steps of transformers' hybrids, block by block, in the terms of `lapcli.runtime.plans`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lapcli.runtime.attention import Attention, Rotary, RowCache
from lapcli.runtime.layers import Decay, DeltaHeads, DeltaMixer, Gate, GatedMlp, Head, LibraryModule, Norm, Part, fused
from lapcli.runtime.pages import AttentionPool
from lapcli.runtime.pools import PagedStates, RecurrentPool, RecurrentShape
from lapcli.runtime.prefill import LibraryPrefiller

if TYPE_CHECKING:
    from lapcli.runtime.plans import Plan, Room, Sublayer


def text_config(model: Any) -> Any:
    """The config of the language model's part."""
    return model.config.get_text_config(decoder=True)


class Builder:
    """What building a plan of a stock model collects on the way.

    Args:
        model: a language model of transformers.
        room: what its pools are made for.
    """

    def __init__(self, model: Any, room: "Room"):
        self.model, self.room = model, room
        self.base = getattr(model, model.base_model_prefix)
        self.config = text_config(model)
        self.device, self.dtype = model.device, model.dtype
        self.recurrent: dict[int, RecurrentPool] = {}
        self.attention: dict[int, AttentionPool] = {}
        self.cache = RowCache(self.attention, room.impl)
        self._rotary: Rotary | None = None

    def recurrent_pool(self, layer: int, shape: RecurrentShape) -> RecurrentPool:
        """Make the pool of a layer with a state; of a model in several configurations its states lie in pages."""
        if self.room.convertible is not None:
            pool: RecurrentPool = PagedStates(shape, self.room.state_dtype)
        else:
            pool = RecurrentPool(
                shape, self.room.rows, state_dtype=self.room.state_dtype, input_dtype=self.dtype, device=self.device
            )
        self.recurrent[layer] = pool
        return pool

    def attention_part(self, module: Any, layer: int, *, rotary: bool = True, **arguments: Any) -> Attention:
        """An attention module, and its layer's pool.

        Args:
            module: with `k_proj` and `v_proj`.
            layer: its number.
            rotary: whether it takes the model's rotary embedding, if there is one.
            arguments: further ones of its forward pass.
        """
        width = module.head_dim
        self.attention[layer] = AttentionPool(module.k_proj.out_features // width, width, width)
        return Attention(module, self.cache, self.rotary() if rotary else None, **arguments)

    def latent_attention_part(self, module: Any, layer: int) -> Attention:
        """A multi-head latent attention module, whose pool holds one latent and one shared key a token."""
        self.attention[layer] = AttentionPool(1, module.kv_lora_rank, module.qk_rope_head_dim, latent=True)
        return Attention(module, self.cache, self.rotary())

    def rotary(self) -> Rotary | None:
        """The model's rotary embedding, if it has one."""
        module = getattr(self.base, "rotary_emb", None)
        if module is None:
            return None
        if self._rotary is None:
            hidden = torch.zeros(1, self.config.hidden_size, dtype=self.dtype, device=self.device)
            self._rotary = Rotary(module, self.room.length, hidden)
        return self._rotary

    def plan(
        self,
        embed: Callable[[Tensor], Tensor],
        sublayers: "list[Sublayer]",
        final: Norm,
        head: Head,
        residual_dtype: torch.dtype | None = None,
    ) -> "Plan":
        """The plan of all that was collected."""
        from lapcli.runtime.plans import Plan

        return Plan(
            embed,
            sublayers,
            final,
            head,
            LibraryPrefiller(self.model, self.recurrent, self.attention),
            self.recurrent,
            self.attention,
            residual_dtype,
        )


def norm(module: Any, *, centred: bool = False) -> Norm:
    """A library's RMS norm; `centred` where its weight is what is added to 1."""
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return Norm(module.weight, eps, centred=centred)


def mlp(module: Any, config: Any) -> Part:
    """An MLP: fused where it is a gated one with SiLU, else the library's own."""
    names = ("gate_proj", "up_proj", "down_proj")
    linears = [getattr(module, name, None) for name in names]
    plain = config.hidden_act in ("silu", "swish") and not any(name.endswith("multiplier") for name in vars(module))
    gate, up, down = linears
    if plain and isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear):
        return GatedMlp(gate, up, down)
    return LibraryModule(module)


def gated_delta_mixer(build: Builder, module: Any) -> DeltaMixer:
    """A Gated DeltaNet mixer, in whichever layout its projections come.

    `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` (Qwen3.5), separate ones (OLMo-Hybrid), or `in_proj_qkvz` and
    `in_proj_ba`, interleaved per key head (Qwen3-Next).
    """
    heads = DeltaHeads(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
    if hasattr(module, "in_proj_qkvz"):
        weight = lay_flat(module, heads)
    else:
        packed = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        apart = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
        weight, _ = fused([getattr(module, name) for name in (packed if hasattr(module, packed[0]) else apart)])
    out_norm = module.norm if hasattr(module, "norm") else module.o_norm
    pool = build.recurrent_pool(
        module.layer_idx,
        RecurrentShape(
            (heads.value_heads, heads.key_width, heads.value_width), sum(heads.sizes), module.conv_kernel_size - 1
        ),
    )
    return DeltaMixer(
        pool,
        heads,
        weight,
        module.out_proj if hasattr(module, "out_proj") else module.o_proj,
        taps=module.conv1d.weight.detach().squeeze(1),
        norm_weight=out_norm.weight.detach(),
        norm_eps=norm(out_norm).eps,
        gate=Gate(out_norm.activation),
        decay=Decay(module.A_log.detach(), module.dt_bias.detach()),
        strength=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
        impl=build.room.impl,
    )


def kimi_mixer(build: Builder, module: Any) -> DeltaMixer:
    """A KDA mixer, whose decay is of each key channel.

    Kimi Linear has the decay's and the gate's projections in two factors; Bailing's are whole, and its decay may have a
    lower bound. Slices of lapcli's have keys narrower than values.
    """
    forget, out_norm = module.forget_gate, module.o_norm
    count = module.num_heads
    heads = DeltaHeads(count, count, module.q_proj.out_features // count, module.v_proj.out_features // count)
    factored_decay, factored_gate = hasattr(forget, "f_a_proj"), hasattr(module, "g_a_proj")
    weight, _ = fused(
        [
            module.q_proj,
            module.k_proj,
            module.v_proj,
            module.g_a_proj if factored_gate else module.g_proj,
            module.b_proj,
            forget.f_a_proj if factored_decay else forget.f_proj,
        ]
    )
    decay = Decay(
        forget.A_log.detach().flatten(),
        forget.dt_bias.detach().unflatten(0, (count, heads.key_width)),
        forget.lower_bound if getattr(forget, "safe_gate", False) else None,
        forget.f_b_proj.weight.detach() if factored_decay else None,
    )
    pool = build.recurrent_pool(
        module.layer_idx,
        RecurrentShape((count, heads.key_width, heads.value_width), sum(heads.sizes), module.conv_kernel_size - 1),
    )
    return DeltaMixer(
        pool,
        heads,
        weight,
        module.o_proj,
        taps=module.conv1d.weight.detach().squeeze(1),
        norm_weight=out_norm.weight.detach(),
        norm_eps=norm(out_norm).eps,
        gate=Gate(out_norm.activation, module.g_b_proj.weight.detach() if factored_gate else None),
        decay=decay,
        impl=build.room.impl,
    )


def lay_flat(module: Any, heads: DeltaHeads) -> Tensor:
    """Put Qwen3-Next's interleaved projections in the order `[q, k, v, z, b, a]`, and let the module read them so.

    Per key head it holds `[q, k, v of its value heads, z of them]` and `[b, a]`.

    Returns:
        The fused weight; the module's two projections are views of it.
    """
    if "fix_query_key_value_ordering" in vars(module):
        # An engine was made of this model before.
        return fused((module.in_proj_qkvz, module.in_proj_ba))[0]
    group = heads.value_heads // heads.key_heads
    values = group * heads.value_width
    first = module.in_proj_qkvz.weight.detach().unflatten(0, (heads.key_heads, -1))
    second = module.in_proj_ba.weight.detach().unflatten(0, (heads.key_heads, -1))
    blocks = first.split([heads.key_width, heads.key_width, values, values], dim=1)
    module.in_proj_qkvz.weight.data = torch.cat([block.flatten(0, 1) for block in blocks])
    module.in_proj_ba.weight.data = torch.cat([block.flatten(0, 1) for block in second.split([group, group], dim=1)])
    sizes = [*heads.sizes, heads.sizes[2]]

    def flat_order(mixed_qkvz: Tensor, mixed_ba: Tensor) -> tuple[Tensor, ...]:
        q, k, v, z = mixed_qkvz.split(sizes, dim=-1)
        keys, vals = (heads.key_heads, heads.key_width), (heads.value_heads, heads.value_width)
        parts = (q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, vals), z.unflatten(-1, vals))
        return (*parts, *mixed_ba.split(heads.value_heads, dim=-1))

    # The module's forward pass asks this of itself.
    module.fix_query_key_value_ordering = flat_order
    weight, _ = fused((module.in_proj_qkvz, module.in_proj_ba))
    return weight


def qwen_plan(model: Any, room: "Room") -> "Plan":
    """Qwen3-Next, Qwen3.5 and Lara, with or without experts."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    # Lara has norms of its own, and rotates in layers with a window alone.
    lara = build.config.model_type == "lara_mini"
    sublayers: list[Sublayer] = []
    for index, block in enumerate(build.base.layers):
        if hasattr(block, "linear_attn"):
            mixer: Part = gated_delta_mixer(build, block.linear_attn)
        else:
            rotary = not lara or block.block_type == "sliding_attention"
            mixer = build.attention_part(block.self_attn, index, rotary=rotary)
        sublayers += [
            Sublayer(mixer, norm(block.input_layernorm, centred=not lara)),
            Sublayer(mlp(block.mlp, build.config), norm(block.post_attention_layernorm, centred=not lara)),
        ]
    return build.plan(build.base.embed_tokens, sublayers, norm(build.base.norm, centred=not lara), Head(model.lm_head))


def olmo_plan(model: Any, room: "Room") -> "Plan":
    """OLMo-Hybrid: attention blocks have their norms behind, recurrent ones in front."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    sublayers: list[Sublayer] = []
    for index, block in enumerate(build.base.layers):
        feed = mlp(block.mlp, build.config)
        if hasattr(block, "linear_attn"):
            sublayers += [
                Sublayer(gated_delta_mixer(build, block.linear_attn), norm(block.input_layernorm)),
                Sublayer(feed, norm(block.post_attention_layernorm)),
            ]
        else:
            mixer = build.attention_part(block.self_attn, index)
            sublayers += [
                Sublayer(mixer, None, norm(block.post_attention_layernorm)),
                Sublayer(feed, None, norm(block.post_feedforward_layernorm)),
            ]
    return build.plan(build.base.embed_tokens, sublayers, norm(build.base.norm), Head(model.lm_head))


def kimi_plan(model: Any, room: "Room") -> "Plan":
    """Kimi Linear and Bailing: KDA and latent attention under one name."""
    from lapcli.runtime.plans import Sublayer

    build = Builder(model, room)
    sublayers: list[Sublayer] = []
    for index, block in enumerate(build.base.layers):
        module = block.self_attn
        latent = hasattr(module, "kv_lora_rank")
        mixer: Part = build.latent_attention_part(module, index) if latent else kimi_mixer(build, module)
        sublayers += [
            Sublayer(mixer, norm(block.input_layernorm)),
            Sublayer(mlp(block.mlp, build.config), norm(block.post_attention_layernorm)),
        ]
    return build.plan(build.base.embed_tokens, sublayers, norm(build.base.norm), Head(model.lm_head))
