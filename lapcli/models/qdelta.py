"""Q-Delta: Gated DeltaNet with query feedback in the state's update. The released `qdelta`, and variants of it.

Source: arXiv 2606.08804; fields and parameters as in the released code (github.com/psmiz/Q-Delta, commit 4afe5b5).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from lapcli.errors import ModelError
from lapcli.models.decoder import RecurrentForCausalLM, RecurrentModel
from lapcli.models.gated_deltanet import GatedDeltaNetConfig, GatedDeltaNetMixer, GatedDeltaNetPreTrainedModel
from lapcli.models.mixer import DeltaRuleMixer
from lapcli.models.precision import widened

RELEASED = "released"
"""The value of the config's `compat` that asks for the recurrence of the released kernels."""


class QDeltaConfig(GatedDeltaNetConfig):
    """The released configuration (Gated DeltaNet's fields and defaults, and `lamb_bias`), and four fields of ours.

    Ours are written only where they say something, so that a released one stays word for word what it was.

    Args:
        lamb_bias: what is taken from the feedback's projection before its sigmoid; there is no bias parameter.
        lamb_fixed: a constant feedback in [0, 1] instead of a learned one; `lamb_proj` is not there then. 1 is the
            paper's "without gate".
        lamb_gain: whether each value head multiplies its feedback by `tanh(lamb_gain)`, a parameter; at 0, where a
            converted model begins, it is a Gated DeltaNet.
        use_decay: whether the state decays; without, `a_proj`, `A_log` and `dt_bias` are not there.
        compat: `released` for the recurrence that the released kernels compute (see `lapkernels.delta_rule`); `None`
            for the paper's.
        kwargs: the fields of `GatedDeltaNetConfig`.
    """

    model_type = "qdelta"
    # So that a loader may set it where the file says nothing.
    compat: str | None = None

    def __init__(
        self,
        lamb_bias: float = 0.9,
        lamb_fixed: float | None = None,
        lamb_gain: bool = False,
        use_decay: bool = True,
        compat: str | None = None,
        **kwargs: Any,
    ):
        self.lamb_bias = lamb_bias
        if lamb_fixed is not None:
            self.lamb_fixed = lamb_fixed
        if lamb_gain:
            self.lamb_gain = True
        if not use_decay:
            self.use_decay = False
        if compat is not None:
            self.compat = compat
        super().__init__(**kwargs)


class QDeltaMixer(GatedDeltaNetMixer):
    """The mixer of one layer.

    Args:
        config: of the model.
        layer: its number.

    Attributes:
        lamb_proj: from the layer's input to the feedback before its sigmoid, `[HV, D]`; not there with a fixed one.
        lamb_gain: `[HV]`, or `None`.

    Raises:
        ModelError: the configuration asks for something that is not here.
    """

    erasing = True

    def __init__(self, config: QDeltaConfig, layer: int):
        if config.compat not in (None, RELEASED):
            raise ModelError(f"compat = '{config.compat}'; it is '{RELEASED}', or not there")
        fixed: float | None = getattr(config, "lamb_fixed", None)
        if fixed is not None and not 0 <= fixed <= 1:
            raise ModelError(f"lamb_fixed = {fixed}; a feedback in [0, 1] is wanted")
        super().__init__(config, layer, gated=getattr(config, "use_decay", True))
        self.released = config.compat == RELEASED
        self.lamb_bias, self.lamb_fixed = config.lamb_bias, fixed
        value_heads = self.shape.value_heads
        if fixed is None:
            self.lamb_proj = nn.Linear(config.hidden_size, value_heads, bias=False)
        self.lamb_gain: nn.Parameter | None = None
        if getattr(config, "lamb_gain", False):
            self.lamb_gain = nn.Parameter(torch.zeros(value_heads, dtype=torch.float32))
        # What feedback is good for depends on keys and queries, of which pruning takes a part and which LoRA moves.
        learned, gained = fixed is None, self.lamb_gain is not None
        self.retrained = ("lamb_proj.weight",) * learned + ("lamb_gain",) * gained

    def query_feedback(self, hidden_states: Tensor, beta: Tensor) -> Tensor:
        """`sigmoid(W x - bias)`, or the fixed one, as `feedback_of` goes on with it."""
        return self.feedback_of(None if self.lamb_fixed is not None else self.lamb_proj(hidden_states), beta)

    def feedback_of(self, projected: Tensor | None, beta: Tensor) -> Tensor:
        """The feedback that is used.

        As in the release, negative eigenvalues double it along with the write strength. The mixed error shrinks by
        `1 - beta k.x` (Lemma 3.1), and k.x lies between `1 - lambda` and `1 + lambda`: so that the error contracts
        whatever q and k are, the feedback is then held to `min(1, 2 / beta - 1)`, which the release does not do. With
        a strength below 1 that could never bind.

        Args:
            projected: `[..., HV]`, what `lamb_proj` gives; `None` where the feedback is fixed.
            beta: `[..., HV]`, the write strength that is used.

        Returns:
            `[..., HV]` in beta's dtype, fp32 or wider.
        """
        if projected is None:
            lamb = torch.full_like(beta, self.lamb_fixed or 0.0)
        else:
            lamb = (widened(projected) - self.lamb_bias).sigmoid().to(beta.dtype)
        if self.lamb_gain is not None:
            lamb = lamb * self.lamb_gain.to(beta.dtype).tanh()
        if self.strength != 1:
            lamb = self.strength * lamb
            if not self.released:
                bound = (2 / beta.clamp(min=1) - 1).clamp(max=1)
                lamb = torch.minimum(torch.maximum(lamb, -bound), bound)
        return lamb


class QDeltaPreTrainedModel(GatedDeltaNetPreTrainedModel):
    """Q-Delta's part of what transformers asks of a model class."""

    config_class = QDeltaConfig
    # A gain that begins at 0 would not move in bf16 once it is a little away from it.
    _keep_in_fp32_modules_strict = {"A_log", "dt_bias", "lamb_gain"}  # noqa: RUF012 -- transformers reads a plain set

    @classmethod
    def build_mixer(cls, config: Any, layer: int) -> DeltaRuleMixer:
        """The mixer of one layer."""
        return QDeltaMixer(config, layer)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, QDeltaMixer) and module.lamb_gain is not None:
            init.zeros_(module.lamb_gain)


class QDeltaModel(QDeltaPreTrainedModel, RecurrentModel):
    """The stack without its head."""


class QDeltaForCausalLM(QDeltaPreTrainedModel, RecurrentForCausalLM):
    """The language model; `RecurrentForCausalLM.forward` documents its arguments."""

    model_class = QDeltaModel
