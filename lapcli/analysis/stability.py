"""How a delta rule tracks its values: contraction, residual drift and the bound on the error, step by step in fp64.

Source: Q-Delta, arXiv 2606.08804, Lemma 3.1 and Theorem 3.2. With `x = k + lambda q` (`k` without feedback), the state
after a step `S_t`, the state it begins with `S'_t = e^g S_{t-1}` and predictions `p_t = S_t^T x_t`:

    e_t = v_t - S_t^T x_t = (1 - beta_t k_t.x_t) (v_t - S'_t^T x_t)                       the lemma, an identity
    v_t - S'_t^T x_t = e_{t-1} + r_t,  r_t = (v_t - v_{t-1}) - (S'_t^T x_t - p_{t-1})     residual drift
    |e_t| <= rho^t |e_0| + rho (1 - rho^t) / (1 - rho) r                                  the theorem

where `rho` is the largest `|1 - beta k.x|` and `r` the largest `|r_t|` of a sequence and head. What decay takes away is
part of the prediction's drift.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapcli.models.mixer import DeltaRuleMixer, RuleInputs
from lapkernels.delta_rule import l2_normalise

TRACKED_ROWS = 4
"""Rows that `lapcli analyze` follows, at most."""
TRACKED_TOKENS = 1024
"""And tokens of each: every one is a step of a loop in fp64."""

_STATE_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Of all states of a step, about: what one pass over the tokens works on."""


@dataclass(frozen=True)
class Tracking:
    """What became of a value in every step of one layer; all `[B, T, HV]`, fp64, NaN in the first step where noted.

    Attributes:
        product: `beta k.x`.
        before: `|v_t - S'_t^T x_t|`.
        after: `|e_t|`.
        lemma: how far `e_t` is from the lemma's, relative to `|v_t|`.
        drift: `|r_t|`, NaN in the first step.
        value_drift: `|v_t - v_{t-1}|`, likewise.
        prediction_drift: `|S'_t^T x_t - p_{t-1}|`, likewise.
        bound: of `|e_t|` by the theorem; NaN in the first step, and where `rho` is not below 1.
        cosine: between `S_{t-1}^T q_t` and `S_{t-1}^T k_t`; NaN where one of them is zero.
    """

    product: Tensor
    before: Tensor
    after: Tensor
    lemma: Tensor
    drift: Tensor
    value_drift: Tensor
    prediction_drift: Tensor
    bound: Tensor
    cosine: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return dict(vars(self))


@torch.no_grad()
def track(given: RuleInputs) -> Tracking:
    """Run the recurrence of what a mixer hands to the delta rule, and look at every step.

    Args:
        given: rows of one length, without padding or packing, from zero states.
    """
    assert given.padding is None
    assert given.packing is None
    assert given.initial_state is None
    q, k, v, beta = (x.double() for x in (given.q, given.k, given.v, given.beta))
    if given.normalise:
        q, k = l2_normalise(q), l2_normalise(k)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    x = k if given.lamb is None else k + given.lamb.double().unsqueeze(-1) * q
    product = beta * (k * x).sum(-1)
    decay = torch.ones_like(beta) if given.g is None else given.g.double().exp()
    state = q.new_zeros(*v.shape[::2], k.shape[3], v.shape[3])
    errors: list[Tensor] = []
    found: dict[str, list[Tensor]] = {name: [] for name in Tracking.__annotations__ if name not in ("product", "bound")}

    def read(state: Tensor, direction: Tensor) -> Tensor:
        return (direction.unsqueeze(-2) @ state).squeeze(-2)

    prediction = torch.full_like(v[:, 0], torch.nan)
    for t in range(v.shape[1]):
        queried, keyed = read(state, q[:, t]), read(state, k[:, t])
        found["cosine"].append((queried * keyed).sum(-1) / (queried.norm(dim=-1) * keyed.norm(dim=-1)))
        state = state * decay[:, t, :, None, None]
        expected = read(state, x[:, t])
        before = v[:, t] - expected
        state = state + k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * before).unsqueeze(-2)
        after = v[:, t] - read(state, x[:, t])
        value = v[:, t] - v[:, t - 1] if t else torch.full_like(before, torch.nan)
        moved = expected - prediction
        prediction = v[:, t] - after
        told = (after - (1 - product[:, t]).unsqueeze(-1) * before).norm(dim=-1) / v[:, t].norm(dim=-1)
        errors.append(after.norm(dim=-1))
        for name, vector in (("before", before), ("drift", value - moved), ("value_drift", value),
                             ("prediction_drift", moved)):  # fmt: skip
            found[name].append(vector.norm(dim=-1))
        found["after"].append(errors[-1])
        found["lemma"].append(told)
    whole = {name: torch.stack(parts, dim=1) for name, parts in found.items()}
    return Tracking(product=product, bound=_bound(product, whole["after"], whole["drift"]), **whole)


def _bound(product: Tensor, after: Tensor, drift: Tensor) -> Tensor:
    """The theorem's right side, `[B, T, HV]`."""
    rho = (1 - product).abs().amax(1, keepdim=True)
    largest = drift.nan_to_num(0.0).amax(1, keepdim=True)
    steps = torch.arange(product.shape[1], dtype=product.dtype, device=product.device).view(1, -1, 1)
    power = rho**steps
    bound = power * after[:, :1] + rho * (1 - power) / (1 - rho) * largest
    return torch.where((steps > 0) & (rho < 1), bound, torch.nan)


def track_layers(model: Any, ids: Tensor) -> dict[int, Tracking]:
    """Follow every layer of one of lapcli's own models over rows of tokens.

    Args:
        model: it runs as it is; its layers' inputs are then followed in fp64, each by itself.
        ids: `[B, T]`.

    Returns:
        By layer, on the CPU.
    """
    found: dict[int, Tracking] = {}
    mixers: list[DeltaRuleMixer] = model.mixers()
    for mixer in mixers:

        def see(given: RuleInputs, layer: int = mixer.layer_idx) -> None:
            found[layer] = Tracking(**{name: tensor.cpu() for name, tensor in track(given).tensors().items()})

        mixer.watch, mixer.watched = see, True
    try:
        with torch.no_grad():
            model.model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for mixer in mixers:
            mixer.watch, mixer.watched = None, False
    return found


def rows_at_once(model: Any, device: str) -> int:
    """How many rows are followed together: as many as the states of a step have room for."""
    largest = max(mixer.shape.value_heads * mixer.shape.key_width * mixer.shape.value_width for mixer in model.mixers())
    return max(1, _STATE_NUMBERS.get(device, _STATE_NUMBERS["cpu"]) // largest)


def summary(layers: Mapping[int, Mapping[str, Tensor]]) -> dict[str, float | int | None]:
    """The figures of some layers together.

    Args:
        layers: by number, the tensors of a `Tracking`.
    """
    joined = {name: torch.cat([tensors[name].flatten().double() for tensors in layers.values()]) for name in _SUMMED}
    product = joined["product"]
    quantiles = product.sort().values[[int(share * (len(product) - 1)) for share in (0.01, 0.5, 0.99)]].tolist()
    held = ~joined["bound"].isnan()
    after, bound = joined["after"][held], joined["bound"][held]
    return {
        "count": len(product),
        "mean": float(product.mean()),
        **dict(zip(("p01", "p50", "p99"), quantiles, strict=True)),
        "outside": float((~((product > 0) & (product < 2))).double().mean()),
        "rho": float((1 - product).abs().max()),
        "error_before": float(joined["before"].mean()),
        "error_after": float(joined["after"].mean()),
        "drift": float(joined["drift"].nanmean()),
        "value_drift": float(joined["value_drift"].nanmean()),
        "prediction_drift": float(joined["prediction_drift"].nanmean()),
        "cosine": float(joined["cosine"].nanmean()),
        "lemma": float(joined["lemma"].nan_to_num(0.0).max()),
        "bound_count": int(held.sum()),
        "bound_share": float((after <= bound * (1 + _ROUNDING)).double().mean()) if held.any() else None,
    }


_SUMMED = tuple(Tracking.__annotations__)
_ROUNDING = 1e-9
"""By how much, relatively, a bound may seem to be missed in fp64."""
