"""DeltaNet: the delta rule without decay. fla's `delta_net`, field by field.

Source: arXiv 2406.06484; `fla/models/delta_net` and `fla/layers/delta_net.py` of release 0.6.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.configuration_utils import PretrainedConfig

from lapcli.errors import ModelError
from lapcli.models.decoder import RecurrentForCausalLM, RecurrentModel, RecurrentPreTrainedModel
from lapcli.models.mixer import DeltaRuleMixer, MixerShape
from lapcli.models.precision import widened
from lapkernels.delta_rule import GIVEN, RawGates

_ACTIVATIONS = ("silu", "relu", "elu", "identity")
_NORMS = ("l2", "sum")
_SUM_EPS = 1e-6


class DeltaNetConfig(PretrainedConfig):
    """The fields and defaults of fla's configuration, and one of ours, `head_shared_conv`.

    Args:
        attn_mode: fla's choice of kernel; kept, not used.
        hidden_size: D.
        expand_k: all key channels over D; `K = round(hidden_size * expand_k) // num_heads`.
        expand_v: all value channels over D.
        use_gate: whether the output is gated.
        use_short_conv: whether short convolutions precede the state.
        allow_neg_eigval: whether the write strength reaches 2 instead of 1.
        conv_size: taps of the convolutions.
        use_beta: whether the write strength is learned; else it is 1.
        use_output_norm: kept, not used: fla always has the norm.
        num_heads: H, which is HV too.
        qk_norm: `l2`, or `sum` (absolute values sum to 1).
        qk_activation: of q and k: `silu`, `relu`, `elu` (elu + 1) or `identity`.
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
        head_shared_conv: whether the channels of a head share one filter, in the convolutions of q and of k (arXiv
            2602.04852, App. B.5): such a convolution commutes with a rotation of the head's channels. `q_conv1d.weight`
            and `k_conv1d.weight` then are `[num_heads, 1, conv_size]`; v keeps a filter for each channel. fla has no
            such option and refuses the checkpoint for its shapes; it takes one whose filters are written out, a
            head's for each of its K channels (`weight.repeat_interleave(K, 0)`), without this field.
        kwargs: what every configuration of transformers has.
    """

    model_type = "delta_net"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 -- transformers reads a plain list

    def __init__(
        self,
        attn_mode: str = "chunk",
        hidden_size: int = 2048,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        use_gate: bool = False,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        use_beta: bool = True,
        use_output_norm: bool = True,
        num_heads: int = 16,
        qk_norm: str = "l2",
        qk_activation: str = "silu",
        max_position_embeddings: int = 2048,
        hidden_ratio: int | None = 4,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        num_hidden_layers: int = 24,
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
        head_shared_conv: bool = False,
        **kwargs: Any,
    ):
        self.attn_mode = attn_mode
        self.hidden_size = hidden_size
        self.expand_k = expand_k
        self.expand_v = expand_v
        self.use_gate = use_gate
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.conv_size = conv_size
        self.use_beta = use_beta
        self.use_output_norm = use_output_norm
        self.num_heads = num_heads
        self.qk_norm = qk_norm
        self.qk_activation = qk_activation
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
        # fla's own checkpoints stay word for word what they were.
        if head_shared_conv:
            self.head_shared_conv = True
        kwargs |= {
            "pad_token_id": pad_token_id,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "tie_word_embeddings": tie_word_embeddings,
        }
        super().__init__(**kwargs)


def delta_net_shape(config: DeltaNetConfig) -> MixerShape:
    """The heads that a configuration means, by the library's own arithmetic.

    Raises:
        ModelError: `expand_k` or `expand_v` gives no whole number of channels, or the heads do not divide it.
    """
    widths = []
    for field, factor in (("expand_k", config.expand_k), ("expand_v", config.expand_v)):
        exact = config.hidden_size * factor
        channels = round(exact)
        if not math.isclose(exact, channels):
            raise ModelError(
                f"{field} = {factor} times hidden_size = {config.hidden_size} is {exact}, no whole number of channels"
            )
        if channels % config.num_heads:
            raise ModelError(
                f"{field} = {factor} gives {channels} channels, which {config.num_heads} heads do not share"
            )
        widths.append(channels // config.num_heads)
    return MixerShape(config.num_heads, config.num_heads, *widths)


class DeltaNetMixer(DeltaRuleMixer):
    """The mixer of one layer.

    Args:
        config: of the model.
        layer: its number.
    """

    gated = False

    def __init__(self, config: DeltaNetConfig, layer: int):
        if config.qk_activation not in _ACTIVATIONS:
            raise ModelError(f"qk_activation = '{config.qk_activation}'; it is one of {', '.join(_ACTIVATIONS)}")
        if config.qk_norm not in _NORMS:
            raise ModelError(f"qk_norm = '{config.qk_norm}'; it is one of {', '.join(_NORMS)}")
        super().__init__(
            config.hidden_size,
            delta_net_shape(config),
            layer,
            conv_size=config.conv_size if config.use_short_conv else None,
            silu_on_keys=config.qk_activation == "silu",
            use_gate=config.use_gate,
            gate_activation="swish",
            norm_eps=config.norm_eps,
            head_shared_conv=getattr(config, "head_shared_conv", False),
        )
        self.qk_activation = config.qk_activation
        self.normalise_in_kernel = config.qk_norm == "l2"
        self.strength = 2.0 if config.allow_neg_eigval else 1.0
        self.use_beta = config.use_beta
        if config.use_beta:
            self.b_proj = nn.Linear(config.hidden_size, self.shape.value_heads, bias=False)

    def raw_gates(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None, RawGates]:
        """`beta = sigmoid(b)`, or 1 when it is not learned; twice that with negative eigenvalues. No decay."""
        if self.use_beta:
            return self.b_proj(hidden_states), None, RawGates(self.strength)
        rows = hidden_states.shape[:2]
        return widened(hidden_states).new_full((*rows, self.shape.value_heads), self.strength), None, GIVEN

    def activate_keys(self, x: Tensor) -> Tensor:
        """The activations that are not SiLU."""
        if self.qk_activation == "relu":
            return F.relu(x)
        if self.qk_activation == "elu":
            return (F.elu(widened(x)) + 1).to(x.dtype)
        return x

    def normalise_keys(self, x: Tensor) -> Tensor:
        """The norm that makes absolute values sum to 1, where the configuration asks for it."""
        return x if self.normalise_in_kernel else F.normalize(widened(x), p=1.0, dim=-1, eps=_SUM_EPS).to(x.dtype)


class DeltaNetPreTrainedModel(RecurrentPreTrainedModel):
    """DeltaNet's part of what transformers asks of a model class."""

    config_class = DeltaNetConfig

    @classmethod
    def build_mixer(cls, config: Any, layer: int) -> DeltaRuleMixer:
        """The mixer of one layer."""
        return DeltaNetMixer(config, layer)


class DeltaNetModel(DeltaNetPreTrainedModel, RecurrentModel):
    """The stack without its head."""


class DeltaNetForCausalLM(DeltaNetPreTrainedModel, RecurrentForCausalLM):
    """The language model; `RecurrentForCausalLM.forward` documents its arguments."""

    model_class = DeltaNetModel
