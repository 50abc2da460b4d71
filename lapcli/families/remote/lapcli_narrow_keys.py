"""Kimi Delta Attention whose heads have fewer key channels than value channels.

Written by lapcli beside a model from which it cut key channels: the model's own config has one width for both. All but
this layer is the installed transformers' code of the model's family. Licence: Apache 2.0.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps
from transformers.integrations.accelerate import force_accelerate_hooks

_SHORT_CONVOLUTION = "conv1d.weight"


class NarrowKeyAttention(nn.Module):
    """Comes before a family's own mixer among the bases of a class, and sets the key width apart.

    Queries, keys and the decay of each key channel have `config.linear_key_head_dim` channels a head; values, the
    output gate, its norm and the output projection keep `config.linear_head_dim`. Queries are read out times the key
    width to the power of -1/2, which the recurrence takes from their shape.
    """

    library: ClassVar[Any]
    """The module of the family's own mixer, where the recurrence is looked up each time it is called."""

    # Made by the family's own mixer.
    hidden_size: int
    num_heads: int
    qkv_dim: int
    conv_kernel_size: int
    layer_idx: int
    activation: str
    v_proj: nn.Linear
    b_proj: nn.Linear
    o_proj: nn.Linear
    o_norm: nn.Module
    forget_gate: Any
    g_a_proj: Any
    g_b_proj: Any

    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)  # pyright: ignore[reportCallIssue]
        self.key_dim = self.num_heads * config.linear_key_head_dim
        self.q_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)

        self.conv_dim = 2 * self.key_dim + self.qkv_dim
        wide: Any = self.conv1d
        self.conv1d = nn.Conv1d(
            self.conv_dim,
            self.conv_dim,
            self.conv_kernel_size,
            groups=self.conv_dim,
            padding=self.conv_kernel_size - 1,
            bias=False,
            dtype=wide.weight.dtype,
        )

        gate = self.forget_gate
        gate.head_dim, gate.qkv_dim = config.linear_key_head_dim, self.key_dim
        gate.dt_bias = nn.Parameter(torch.empty(self.key_dim, dtype=gate.dt_bias.dtype))
        # The full projection, or the second of two whose first is of low rank.
        name = "f_proj" if hasattr(gate, "f_proj") else "f_b_proj"
        setattr(gate, name, nn.Linear(getattr(gate, name).in_features, self.key_dim, bias=False))

    @force_accelerate_hooks("conv1d")
    def forward(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """From `[B, T, D]` to the same; the cache's entry of this layer moves on by T tokens."""
        library = self.library
        hidden_states = library.apply_mask_to_padding_states(hidden_states, attention_mask)
        length = hidden_states.shape[1]
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx, state_idx=0)

        projected = torch.cat([layer(hidden_states) for layer in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        mixed = self._convolved(projected.transpose(1, 2), cache, **kwargs).transpose(1, 2)
        parts = mixed.split([self.key_dim, self.key_dim, self.qkv_dim], dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)

        one_step = state is not None and length == 1
        run = library.recurrent_kimi_delta_attention if one_step else library.chunk_kimi_delta_attention
        read, state = run(
            query,
            key,
            value,
            g=self.forget_gate(hidden_states),
            beta=self.b_proj(hidden_states).sigmoid(),
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            **kwargs,
        )
        if cache is not None:
            cache.update_recurrent_state(state.float(), self.layer_idx)
        gate = self.output_gate(hidden_states).unflatten(-1, (self.num_heads, -1))
        return self.o_proj(self.o_norm(read, gate).flatten(-2))

    def output_gate(self, hidden_states: Tensor) -> Tensor:
        """Before its activation, `[B, T, H V]`."""
        return self.g_b_proj(self.g_a_proj(hidden_states))

    def _convolved(self, projected: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        """The short convolution and its activation over `[B, channels, T]` and what the cache holds from before."""
        length = projected.shape[-1]
        filters = {"weight": self.conv1d.weight.squeeze(1), "bias": None, "activation": self.activation}
        window = None if cache is None else cache.get_conv_state(self.layer_idx, state_idx=0)
        if window is not None and length == 1:
            return self.library.causal_conv1d_update(projected, window, **filters)
        if cache is not None:
            projected = cache.update_conv_state(projected, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        return self.library.causal_conv1d_fn(projected, **filters, **kwargs)[..., -length:]


def narrow_keys(model: Any, layers: nn.ModuleList, config: Any, mixer: type[NarrowKeyAttention]) -> None:
    """Give a model that its family's own class has built the narrower mixer, wherever it has the family's."""
    wide = mixer.__mro__[mixer.__mro__.index(NarrowKeyAttention) + 1]
    for index, layer in enumerate(layers):
        if type(layer.self_attn) is wide:
            layer.self_attn = mixer(config, index)
    # Once more, for what is new.
    model.post_init()


class _JoinFilters(Concatenate):
    """The filters of q, k and v, apart on disk, in one tensor; on the way back each gets its own number of them."""

    @property
    def reverse_op(self) -> ConversionOps:
        return _PartFilters()


class _PartFilters(ConversionOps):
    """The other way round: what is not the values' is shared by queries and keys."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        (found,) = input_dict.values()
        filters = found[0] if isinstance(found, list) else found
        config = kwargs["config"].get_text_config()
        keys = config.linear_num_heads * config.linear_key_head_dim
        parts = filters.split([keys, keys, len(filters) - 2 * keys])
        return {name: part.contiguous() for name, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        return _JoinFilters()


def register_names_on_disk(model_type: str, of: str) -> None:
    """Let a type's checkpoints have the names that those of another type have."""
    conversions: list[Any] = get_checkpoint_conversion_mapping(of) or []
    for conversion in conversions:
        if any(name.endswith(_SHORT_CONVOLUTION) for name in conversion.target_patterns):
            conversion.operations = [_JoinFilters()]
    register_checkpoint_conversion_mapping(model_type, conversions, overwrite=True)
