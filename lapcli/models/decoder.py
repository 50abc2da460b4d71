"""One causal language model around any mixer with a recurrent state, in the manner of transformers."""

from dataclasses import fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from lapcli.errors import ModelError
from lapcli.models.cache import RecurrentCache
from lapcli.models.convolution import ShortConvolution
from lapcli.models.loss import cross_entropy, next_token_labels
from lapcli.models.mixer import DeltaRuleMixer
from lapcli.models.norms import NormOfSum, RMSNorm
from lapcli.models.precision import as_product_input, by_one_kernel
from lapcli.models.tokens import Packing, Padding
from lapkernels.delta_rule import IMPLEMENTATIONS, Choice, select_impl, why_not
from lapkernels.norm import select_impl as select_norm
from lapkernels.norm import swiglu

# transformers 5.24 renamed the field, and `generate` carries whichever name it finds from step to step.
_CACHE_FIELD = "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Refuse a configuration that fla can build and this implementation cannot.

    Raises:
        ModelError: naming the field and its value.
    """
    hint = "fla on a GPU runs it; lapcli's own implementation does not"
    if config.attn is not None:
        raise ModelError(f"attn = {config.attn}: softmax attention layers among the recurrent ones", hint)
    if config.attnres_block_size is not None:
        raise ModelError(f"attnres_block_size = {config.attnres_block_size}: attention over residuals", hint)
    if config.hidden_act != "swish":
        raise ModelError(f"hidden_act = '{config.hidden_act}'; 'swish' is what runs", hint)
    if config.attn_mode not in ("chunk", "fused_recurrent"):
        raise ModelError(f"attn_mode = '{config.attn_mode}'; fla knows 'chunk' and 'fused_recurrent'")


def mlp_width(config: PretrainedConfig) -> int:
    """The MLP's inner width: as given, else two thirds of `hidden_ratio * hidden_size`, up to a multiple of 256."""
    if config.intermediate_size is not None:
        return config.intermediate_size
    ratio = 4 if config.hidden_ratio is None else config.hidden_ratio
    return 256 * -(-int(config.hidden_size * ratio * 2 / 3) // 256)


class GatedMLP(nn.Module):
    """`down(SiLU(gate(x)) * up(x))`.

    Args:
        hidden_size: D.
        width: inner width.
    """

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to the same."""
        x = as_product_input(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        inner = swiglu(gate, up) if by_one_kernel(gate, select_norm) else F.silu(gate) * up
        return self.down_proj(inner)


class DecoderBlock(GradientCheckpointingLayer):
    """Mixer and MLP, each behind its norm and added to the residual stream.

    Args:
        config: of the model.
        mixer: the layer's mixer.
    """

    def __init__(self, config: PretrainedConfig, mixer: nn.Module):
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = mixer
        self.mlp_norm = NormOfSum(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, mlp_width(config))

    def forward(self, hidden_states: Tensor, kept: slice | Tensor | None = None, **mixing: Any) -> Tensor:
        """`[B, T, D]` to the same, or to the positions that are kept; `mixing` goes to the mixer."""
        mixed = self.attn(self.attn_norm(hidden_states), kept=kept, **mixing)
        if kept is not None:
            hidden_states = hidden_states[:, kept]
        normed, hidden_states = self.mlp_norm(hidden_states, mixed)
        return hidden_states + self.mlp(normed)


class RecurrentPreTrainedModel(PreTrainedModel):
    """What transformers asks of a model class, for every family here. A family says how its mixer is built."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock"]
    _is_stateful = True
    _input_embed_layer = "embeddings"

    @classmethod
    def build_mixer(cls, config: Any, layer: int) -> DeltaRuleMixer:
        """The mixer of one layer."""
        raise NotImplementedError

    def mixers(self) -> list[DeltaRuleMixer]:
        """The mixers, layer by layer."""
        return [module for module in self.modules() if isinstance(module, DeltaRuleMixer)]

    def set_kernel(self, name: str, device: torch.device | None = None) -> None:
        """Choose what computes the delta rule in every layer; nothing of it is stored with the model.

        Args:
            name: `auto`, `reference`, `chunked`, `triton` or `fla`.
            device: where the model will lie, if not where it lies now.

        Raises:
            ModelError: there is no such implementation, or it cannot run a forward pass where the model lies. That
                it is wrong in the backward pass alone shows only there (`KernelUnavailable`).
        """
        if name not in IMPLEMENTATIONS:
            raise ModelError(
                f"kernel '{name}' does not compute the delta rule", f"choose one of {', '.join(IMPLEMENTATIONS)}"
            )
        mixers = self.mixers()
        for mixer in mixers:
            why = why_not(
                name, device or self.device, self.dtype, key_width=mixer.shape.key_width, gated=mixer.gated,
                erasing=mixer.erasing,
            )  # fmt: skip
            if mixer.released and name not in ("auto", "chunked"):
                why = "the released recurrence is there as chunks in PyTorch alone"
            if why is not None:
                raise ModelError(f"kernel '{name}' cannot run here: {why}", "use --kernel auto")
        for mixer in mixers:
            mixer.kernel = name

    def kernel_choice(self, time: int, *, training: bool = False, device: torch.device | None = None) -> Choice:
        """Which implementation runs rows of `time` tokens, and why, in one line; `device` as for `set_kernel`."""
        mixer = self.mixers()[0]
        if mixer.released:
            return Choice("chunked", "nothing else computes the released recurrence")
        if mixer.kernel != "auto":
            return Choice(mixer.kernel, "asked for by name")
        return select_impl(
            device or self.device, self.dtype, key_width=mixer.shape.key_width, time=time, gated=mixer.gated,
            erasing=mixer.erasing, needs_gradient=training, value_width=mixer.shape.value_width,
        )  # fmt: skip

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as fla does: N(0, `initializer_range`) wherever a matrix or filter is, ones in norms."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding | ShortConvolution):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)


class RecurrentModel(RecurrentPreTrainedModel):
    """Embeddings, blocks and the last norm.

    Args:
        config: of the family.

    Raises:
        ModelError: the configuration asks for something that is not here, or its widths do not come out even.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        refuse_unsupported(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            DecoderBlock(config, self.build_mixer(config, layer)) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Padding | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        cache: RecurrentCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        kept: slice | Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Run the stack; the arguments are those of `RecurrentForCausalLM.forward`.

        Of `kept` positions alone, an index into T, is there a last hidden state, and the last block computes beyond
        its state for no others: of a long prompt whose last token is wanted that is a layer's MLP less. `None`: all.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden_states = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        rows, time = hidden_states.shape[:2]
        cache = _one_cache(cache, past_key_values)
        padding, packing = read_layout(attention_mask, position_ids, cu_seqlens, cache, rows, time)

        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # The backward pass runs each block again, and would find the states it wrote the first time.
            if cache is not None:
                raise ValueError("a cache cannot be used with gradient checkpointing in training")
            use_cache = False
        if use_cache and cache is None:
            cache = RecurrentCache()

        if padding is not None:
            # Not even NaN at a pad may reach a gradient: the backward pass would multiply it by zero.
            hidden_states = padding.keep(hidden_states)
        if packing is not None and rows > 1:
            hidden_states = hidden_states.flatten(0, 1).unsqueeze(0)
        seen: list[Tensor] = []
        layout: dict[str, Any] = {"padding": padding, "packing": packing, "cache": cache, "use_cache": use_cache}
        # Packed rows are one, in which positions are other ones.
        early = kept if packing is None and not output_hidden_states else None
        for number, block in enumerate(self.layers, 1):
            if output_hidden_states:
                seen.append(hidden_states.view(rows, time, -1))
            hidden_states = block(hidden_states, kept=early if number == len(self.layers) else None, **layout)
        hidden_states = self.norm(hidden_states)
        if early is None:
            hidden_states = hidden_states.view(rows, time, -1)
        if use_cache and cache is not None:
            cache.advance(time)
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden_states if kept is None or early is not None else hidden_states[:, kept],
            hidden_states=(*seen, hidden_states) if output_hidden_states else None,
            **_cache_field(cache if use_cache else None),
        )
        return output if _wants_dict(return_dict, self.config) else output.to_tuple()


class RecurrentForCausalLM(RecurrentPreTrainedModel, GenerationMixin):
    """The language model: the stack and its head.

    Args:
        config: of the family.

    Raises:
        ModelError: as `RecurrentModel`.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embeddings.weight"}
    model_class: ClassVar[type[RecurrentModel]]

    def __init__(self, config: Any):
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Tell `generate` that the model brings its own cache."""
        return False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Padding | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        cache: RecurrentCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Predict the next token at every position.

        Args:
            input_ids: `[B, T]`, or `inputs_embeds` `[B, T, D]`.
            attention_mask: `[B, T or more]`, 1 for a token; its last T columns count. Padding may lie anywhere and
                changes nothing, to the bit. Or what was read of a mask before.
            inputs_embeds: instead of `input_ids`.
            past_key_values: the cache, under its name before transformers 5.24.
            cache: the states to go on from; they are read, and written when `use_cache`.
            labels: `[B, T]`, the tokens themselves, -100 where none counts (`next_token_labels` says what else
                does not).
            use_cache: whether to return (and write) the states; default: `config.use_cache`, not in training.
            output_hidden_states: whether to return what enters each block, and what leaves the last norm.
            logits_to_keep: only the last so many positions, or those given, go through the head; 0 for all. With
                `labels` all do.
            position_ids: positions that start again from 0 mark packed sequences; not read with padding or a cache.
            cu_seqlens: `[sequences + 1]` boundaries of sequences packed in one row (B = 1). A cache then holds one
                state a sequence.
            num_items_in_batch: what the summed loss is divided by, instead of the labels that count.
            return_dict: `False` for a plain tuple.
            kwargs: whatever else `generate` or a trainer passes along; not used.

        Returns:
            Loss, logits `[B, T, vocabulary]` in the model's dtype, cache and hidden states.
        """
        kept: slice | Tensor | None = None
        if labels is None and not isinstance(logits_to_keep, int):
            kept = logits_to_keep
        elif labels is None and logits_to_keep:
            kept = slice(-logits_to_keep, None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cache=_one_cache(cache, past_key_values),
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            kept=kept,
            return_dict=True,
        )
        hidden_states = outputs.last_hidden_state
        loss = None
        if labels is None:
            logits = self.lm_head(hidden_states)
        else:
            if self.config.use_l2warp and torch.is_grad_enabled():
                raise ModelError(
                    "use_l2warp = True: a penalty on the largest logit in fla's loss, which is not here",
                    "set use_l2warp to false in config.json to train without it",
                )
            logits = self.lm_head(hidden_states)
            rows, time = labels.shape
            padding, packing = read_layout(attention_mask, position_ids, cu_seqlens, None, rows, time)
            targets = next_token_labels(labels.to(logits.device), padding, packing)
            loss = cross_entropy(logits, targets, num_items_in_batch)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **_cache_field(outputs.get(_CACHE_FIELD)),
        )
        return output if _wants_dict(return_dict, self.config) else output.to_tuple()


def read_layout(
    attention_mask: Tensor | Padding | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: RecurrentCache | None,
    rows: int,
    time: int,
) -> tuple[Padding | None, Packing | None]:
    """What the arguments of a call say about padding and packed sequences.

    Raises:
        ModelError: padding inside packed sequences, or arguments that make no sense by themselves.
    """
    padding = Padding.of(attention_mask, time)
    continuing = cache is not None and cache.seen_tokens > 0
    if padding is not None or continuing:
        position_ids = None
    packing = Packing.of(cu_seqlens, position_ids, rows, time)
    if padding is not None and packing is not None:
        raise ModelError("cu_seqlens with padding in attention_mask: leave the padding out of the packed row")
    return padding, packing


def _cache_field(cache: Any) -> dict[str, Any]:
    return {_CACHE_FIELD: cache}


def _one_cache(cache: Any, past_key_values: Any) -> RecurrentCache | None:
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values are two names of one argument; give one")
    cache = past_key_values if cache is None else cache
    if cache is not None and not isinstance(cache, RecurrentCache):
        raise TypeError(f"the cache of this model is a RecurrentCache, not a {type(cache).__name__}")
    return cache


def _wants_dict(return_dict: bool | None, config: PretrainedConfig) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)
