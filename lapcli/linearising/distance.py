"""What a token gets from those before it, by distance: softmax weights of a teacher, contributions of states.

A state's contribution of token s to what a query head reads at token t is a vector, `share (q_t . (decay * k_s)) v_s`,
with the product of all gates between the two for decay; its norm is what is drawn beside a softmax weight. The two are
no like quantities: weights add up to 1, contributions may cancel. Pictures compare shapes over distance.

Source: arXiv 2506.09316, eqs. 6 to 8 and Figs. 1 and 5.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lapcli.families.remote.lapcli_dual_state import DualStateAttention
from lapcli.linearising.watching import attending_by, attention_of

_NAME = "lapcli_distance"


@torch.no_grad()
def contributions(q: Tensor, k: Tensor, v: Tensor, decays: Tensor, shares: Tensor, scale: float) -> Tensor:
    """What the last token reads of every token, state by state, in fp64.

    Args:
        q: `[B, T, HQ, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        decays: `[B, T, states, H, K]`, logs.
        shares: `[states]`, of the mixture.
        scale: factor on q.

    Returns:
        `[B, states, HQ, T, V]`; summed over states and tokens it is what the layer gives at the last token.
    """
    q, k, v, decays, shares = (x.double() for x in (q, k, v, decays, shares))
    repeats = q.shape[2] // k.shape[2]
    after = torch.cat((decays[:, 1:], torch.zeros_like(decays[:, :1])), 1)
    left = after.flip(1).cumsum(1).flip(1).exp()
    k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    left = left.repeat_interleave(repeats, 3)
    weights = torch.einsum("a,bhk,bshk,bsahk->bahs", shares, q[:, -1] * scale, k, left)
    return weights.unsqueeze(-1) * v.transpose(1, 2).unsqueeze(1)


@torch.no_grad()
def by_distance(model: Any, layer: int, ids: Tensor) -> dict[str, Tensor]:
    """What the last token of each window takes from each distance, mean over windows and query heads.

    Args:
        model: a teacher, or a model in which the layer is converted.
        layer: its number.
        ids: `[windows, T]`.

    Returns:
        Of softmax attention `{"weight": [T]}`; of states `{"mixed": [T], "state 0": [T], ...}`, norms of contributions.
        Index 0 is the token itself. fp64, on the CPU.

    Raises:
        ValueError: the layer is a window.
    """
    attention = attention_of(model, layer)
    if not isinstance(attention, DualStateAttention):
        return {"weight": _softmax_weights(model, layer, ids)}
    if attention.settings.window is not None:
        raise ValueError(f"layer {layer} is a window, not states")
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def after(_module: Any, _args: Any, output: Any) -> None:
            seen[name] = output

        return after

    def entered(_module: Any, args: Any, kwargs: Any) -> None:
        seen["hidden"] = args[0] if args else kwargs["hidden_states"]

    plain = attention.mix

    def mix(q: Tensor, k: Tensor, v: Tensor, scaling: float, call: Any) -> Tensor:
        seen["v"], seen["scale"] = v.transpose(1, 2), torch.tensor(scaling)
        return plain(q, k, v, scaling, call)

    handles = [
        attention.tap.register_forward_hook(keep("directions")),
        attention.register_forward_pre_hook(entered, with_kwargs=True),
    ]
    attention.mix = mix
    try:
        model.get_decoder()(input_ids=ids.to(model.device), use_cache=False)
    finally:
        del attention.mix
        for handle in handles:
            handle.remove()
    q, k = seen["directions"]
    vectors = contributions(
        q,
        k,
        seen["v"],
        attention.log_decays(seen["hidden"]),
        attention.mixture.float().softmax(0),
        float(seen["scale"]),
    )
    found = {"mixed": vectors.sum(1).norm(dim=-1).mean((0, 1))}
    for state in range(vectors.shape[1]):
        found[f"state {state}"] = vectors[:, state].norm(dim=-1).mean((0, 1))
    return {name: values.flip(0).cpu() for name, values in found.items()}


def _softmax_weights(model: Any, layer: int, ids: Tensor) -> Tensor:
    found: list[Tensor] = []

    def look(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **kwargs: Any
    ) -> Any:
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).double()
        scores = (query[:, :, -1:].double() @ keys.transpose(2, 3)).squeeze(2) * scaling
        window = kwargs.get("sliding_window")
        if window is not None:
            scores[..., : max(0, scores.shape[-1] - window)] = -torch.inf
        found.append(scores.softmax(-1).mean((0, 1)))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)

    with attending_by(model, [layer], _NAME, look):
        model.get_decoder()(input_ids=ids.to(model.device), use_cache=False)
    return found[0].flip(0).cpu()
