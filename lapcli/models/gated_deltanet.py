"""Gated DeltaNet: the delta rule with a scalar decay per value head. fla's `gated_deltanet`, field by field.

Source: arXiv 2412.06464; `fla/models/gated_deltanet` and `fla/layers/gated_deltanet.py` of release 0.6.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PretrainedConfig

from lapcli.errors import ModelError
from lapcli.models.decoder import RecurrentForCausalLM, RecurrentModel, RecurrentPreTrainedModel
from lapcli.models.mixer import DeltaRuleMixer, MixerShape
from lapkernels.delta_rule import RawGates

_DT_RANGE = (1e-3, 0.1)
_DT_FLOOR = 1e-4


class GatedDeltaNetConfig(PretrainedConfig):
    """The fields and defaults of fla's configuration.

    Args:
        attn_mode: fla's choice of kernel; kept, not used.
        hidden_size: D.
        expand_v: V over K; `V = int(head_dim * expand_v)`.
        use_gate: whether the output is gated.
        use_short_conv: whether short convolutions precede the state.
        allow_neg_eigval: whether the write strength reaches 2 instead of 1.
        conv_size: taps of the convolutions.
        head_dim: K.
        num_heads: H.
        num_v_heads: HV; `None` for H.
        max_position_embeddings: the length trained for; nothing depends on it.
        hidden_ratio: sets the MLP's width where `intermediate_size` does not.
        intermediate_size: the MLP's width.
        hidden_act: `swish`.
        num_hidden_layers: blocks.
        norm_eps: of every RMS norm.
        attn: softmax attention layers of a hybrid; must be `None` to be run here.
        use_cache: whether evaluation returns states by default.
        pad_token_id: token id of padding.
        bos_token_id: token id of a beginning.
        eos_token_id: token id of an end.
        tie_word_embeddings: whether the head is the embedding.
        initializer_range: standard deviation of fresh weights.
        fuse_norm: a choice of kernel in fla; kept, not used.
        fuse_swiglu: a choice of kernel in fla; kept, not used.
        fuse_cross_entropy: a choice of kernel in fla; kept, not used.
        fuse_linear_cross_entropy: a choice of kernel in fla; kept, not used.
        use_l2warp: a penalty in fla's loss; training with it is refused here.
        vocab_size: tokens.
        attnres_block_size: attention over residuals; must be `None` to be run here.
        output_gate_activation: `swish` or `silu` (the same), or `sigmoid`.
        kwargs: what every configuration of transformers has.
    """

    model_type = "gated_deltanet"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 -- transformers reads a plain list

    def __init__(
        self,
        attn_mode: str = "chunk",
        hidden_size: int = 2048,
        expand_v: float = 2.0,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        max_position_embeddings: int = 2048,
        hidden_ratio: int | None = 4,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        num_hidden_layers: int = 21,
        norm_eps: float = 1e-6,
        attn: Any = None,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = 1,
        eos_token_id: int | None = 2,
        tie_word_embeddings: bool = False,
        initializer_range: float = 0.02,
        fuse_norm: bool = True,
        fuse_swiglu: bool = True,
        fuse_cross_entropy: bool = True,
        fuse_linear_cross_entropy: bool = False,
        use_l2warp: bool = False,
        vocab_size: int = 32000,
        attnres_block_size: int | None = None,
        output_gate_activation: str = "swish",
        **kwargs: Any,
    ):
        self.attn_mode = attn_mode
        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.use_gate = use_gate
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.conv_size = conv_size
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.max_position_embeddings = max_position_embeddings
        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.num_hidden_layers = num_hidden_layers
        self.norm_eps = norm_eps
        self.attn = attn
        self.use_cache = use_cache
        self.initializer_range = initializer_range
        self.fuse_norm = fuse_norm
        self.fuse_swiglu = fuse_swiglu
        self.fuse_cross_entropy = fuse_cross_entropy
        self.fuse_linear_cross_entropy = fuse_linear_cross_entropy
        self.use_l2warp = use_l2warp
        self.vocab_size = vocab_size
        self.attnres_block_size = attnres_block_size
        self.output_gate_activation = output_gate_activation
        kwargs |= {
            "pad_token_id": pad_token_id,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "tie_word_embeddings": tie_word_embeddings,
        }
        super().__init__(**kwargs)


def gated_deltanet_shape(config: GatedDeltaNetConfig) -> MixerShape:
    """The heads that a configuration means, by the library's own arithmetic.

    Raises:
        ModelError: `expand_v` gives no whole value width, or the value heads are no multiple of the key heads.
    """
    value_heads = config.num_heads if config.num_v_heads is None else config.num_v_heads
    value_width = int(config.head_dim * config.expand_v)
    if not math.isclose(config.head_dim * config.expand_v, value_width, rel_tol=1e-5):
        raise ModelError(
            f"expand_v = {config.expand_v} times head_dim = {config.head_dim} is "
            f"{config.head_dim * config.expand_v}, not a whole value width"
        )
    if value_heads % config.num_heads:
        raise ModelError(f"num_v_heads = {value_heads} is no multiple of num_heads = {config.num_heads}")
    return MixerShape(config.num_heads, value_heads, config.head_dim, value_width)


class GatedDeltaNetMixer(DeltaRuleMixer):
    """The mixer of one layer.

    Args:
        config: of the model.
        layer: its number.
        gated: whether the state decays.

    Attributes:
        A_log: `[HV]`, log of the decay rate.
        dt_bias: `[HV]`, added to the step size before its softplus.
    """

    def __init__(self, config: GatedDeltaNetConfig, layer: int, *, gated: bool = True):
        if config.output_gate_activation not in ("swish", "silu", "sigmoid"):
            raise ModelError(
                f"output_gate_activation = '{config.output_gate_activation}'; it is 'swish', 'silu' or 'sigmoid'"
            )
        super().__init__(
            config.hidden_size,
            gated_deltanet_shape(config),
            layer,
            conv_size=config.conv_size if config.use_short_conv else None,
            silu_on_keys=True,
            use_gate=config.use_gate,
            gate_activation=config.output_gate_activation,
            norm_eps=config.norm_eps,
        )
        self.strength = 2.0 if config.allow_neg_eigval else 1.0
        self.gated = gated
        if gated:
            self.a_proj = nn.Linear(config.hidden_size, self.shape.value_heads, bias=False)
        self.b_proj = nn.Linear(config.hidden_size, self.shape.value_heads, bias=False)
        if gated:
            self.A_log = nn.Parameter(torch.empty(self.shape.value_heads, dtype=torch.float32))
            self.dt_bias = nn.Parameter(torch.empty(self.shape.value_heads, dtype=torch.float32))

    def raw_gates(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None, RawGates]:
        """`beta = sigmoid(b)` (twice that with negative eigenvalues), `g = -exp(A_log) softplus(a + dt_bias)`."""
        beta = self.b_proj(hidden_states)
        if not self.gated:
            return beta, None, RawGates(self.strength)
        return beta, self.a_proj(hidden_states), RawGates(self.strength, self.A_log, self.dt_bias)


class GatedDeltaNetPreTrainedModel(RecurrentPreTrainedModel):
    """Gated DeltaNet's part of what transformers asks of a model class."""

    config_class = GatedDeltaNetConfig
    # These two set time constants over four decades; bf16 has three digits.
    _keep_in_fp32_modules_strict = {"A_log", "dt_bias"}  # noqa: RUF012 -- transformers reads a plain set

    @classmethod
    def build_mixer(cls, config: Any, layer: int) -> DeltaRuleMixer:
        """The mixer of one layer."""
        return GatedDeltaNetMixer(config, layer)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GatedDeltaNetMixer) and module.gated:
            low, high = (math.log(bound) for bound in _DT_RANGE)
            rate = torch.empty_like(module.A_log).uniform_(0, 16)
            step = torch.empty_like(module.dt_bias).uniform_(low, high).exp().clamp(min=_DT_FLOOR)
            init.copy_(module.A_log, rate.log())
            # The inverse of softplus.
            init.copy_(module.dt_bias, step + torch.log(-torch.expm1(-step)))


class GatedDeltaNetModel(GatedDeltaNetPreTrainedModel, RecurrentModel):
    """The stack without its head."""


class GatedDeltaNetForCausalLM(GatedDeltaNetPreTrainedModel, RecurrentForCausalLM):
    """The language model; `RecurrentForCausalLM.forward` documents its arguments."""

    model_class = GatedDeltaNetModel
