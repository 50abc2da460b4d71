"""The steps of lapcli's own DeltaNet, Gated DeltaNet and Q-Delta."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lapcli.models.delta_net import DeltaNetMixer
from lapcli.models.gated_deltanet import GatedDeltaNetMixer
from lapcli.models.mixer import DeltaRuleMixer
from lapcli.models.norms import GatedRMSNorm
from lapcli.models.precision import widened
from lapcli.models.qdelta import QDeltaMixer
from lapcli.runtime.layers import Decay, DeltaHeads, DeltaMixer, Feedback, Gate, GatedMlp, Head, Norm, fused
from lapcli.runtime.pools import RecurrentPool, RecurrentShape
from lapcli.runtime.prefill import OwnPrefiller

if TYPE_CHECKING:
    from lapcli.runtime.plans import Plan, Room


def why_not_own(model: Any) -> str | None:
    """Why a model's mixers cannot run as fused steps, or `None`."""
    for mixer in model.mixers():
        if isinstance(mixer, DeltaNetMixer):
            if mixer.qk_activation not in ("silu", "identity"):
                return f"qk_activation = '{mixer.qk_activation}'"
            if not mixer.normalise_in_kernel:
                return "keys and queries are normalised by their sum"
        elif not isinstance(mixer, GatedDeltaNetMixer):
            return f"a mixer of type {type(mixer).__name__}"
    return None


def own_plan(model: Any, room: "Room") -> "Plan":
    """The plan of one of lapcli's own models."""
    from lapcli.runtime.plans import Plan, Sublayer

    recurrent: dict[int, RecurrentPool] = {}
    sublayers: list[Sublayer] = []
    for block in model.model.layers:
        mixer = _mixer(block.attn, room)
        recurrent[block.attn.layer_idx] = mixer.pool
        mlp = GatedMlp(block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj)
        sublayers += [Sublayer(mixer, _norm(block.attn_norm)), Sublayer(mlp, _norm(block.mlp_norm))]
    return Plan(
        embed=model.model.embeddings,
        sublayers=sublayers,
        final=_norm(model.model.norm),
        head=Head(model.lm_head),
        prefiller=OwnPrefiller(model, recurrent),
        recurrent=recurrent,
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.eps)


def _strength(mixer: DeltaRuleMixer) -> float:
    assert isinstance(mixer, GatedDeltaNetMixer | DeltaNetMixer)
    return mixer.strength


def _mixer(mixer: DeltaRuleMixer, room: "Room") -> DeltaMixer:
    shape = mixer.shape
    feedback = _feedback(mixer) if isinstance(mixer, QDeltaMixer) else None
    learned = not isinstance(mixer, DeltaNetMixer) or mixer.use_beta
    convolutions = (mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d) if mixer.use_short_conv else ()
    pool = RecurrentPool(
        RecurrentShape(
            (shape.value_heads, shape.key_width, shape.value_width),
            2 * shape.key_channels + shape.value_channels if convolutions else 0,
            convolutions[0].width - 1 if convolutions else 0,
        ),
        room.rows,
        state_dtype=room.state_dtype,
        input_dtype=mixer.q_proj.weight.dtype,
        device=mixer.q_proj.weight.device,
    )
    # In the order that `DeltaMixer` divides.
    names = ["q_proj", "k_proj", "v_proj"]
    parts = {"g_proj": mixer.use_gate, "b_proj": learned, "a_proj": mixer.gated}
    parts["lamb_proj"] = feedback is not None and feedback.learned
    names += [name for name, there in parts.items() if there]
    weight, _ = fused([linear for name in names if isinstance(linear := mixer.get_submodule(name), nn.Linear)])
    activation = mixer.o_norm.activation if isinstance(mixer.o_norm, GatedRMSNorm) else None
    return DeltaMixer(
        pool,
        DeltaHeads(shape.key_heads, shape.value_heads, shape.key_width, shape.value_width),
        weight,
        mixer.o_proj,
        taps=torch.cat([each.filters().detach() for each in convolutions]) if convolutions else None,
        norm_weight=mixer.o_norm.weight.detach(),
        norm_eps=mixer.o_norm.eps,
        gate=None if activation is None else Gate("silu" if activation == "swish" else activation),
        learned_strength=learned,
        decay=_decay(mixer),
        feedback=feedback,
        strength=_strength(mixer),
        silu=mixer.silu_on_keys,
        impl=room.impl,
    )


def _decay(mixer: DeltaRuleMixer) -> Decay | None:
    if not isinstance(mixer, GatedDeltaNetMixer) or not mixer.gated:
        return None
    return Decay(mixer.A_log.detach(), mixer.dt_bias.detach())


def _feedback(mixer: QDeltaMixer) -> Feedback:
    """How a Q-Delta reads it, from the projections of its own and of its write strength."""

    def read(projected: Tensor | None, b: Tensor) -> Tensor:
        return mixer.feedback_of(projected, mixer.strength * widened(b).sigmoid()).detach()

    return Feedback(mixer.lamb_fixed is None, read)
