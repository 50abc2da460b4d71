"""Gates of a layer, before their activations."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RawGates(NamedTuple):
    """What makes write strengths and log decays of a layer's projections, as in Gated DeltaNet and in KDA.

    Attributes:
        strength: factor on the sigmoid of `beta` (2 with negative eigenvalues); `None`: `beta` is the write strength.
        A_log: `[HV]`, log of the decay rate: the log decay is `-exp(A_log) softplus(g + dt_bias)`; `None`: `g` is the
            log decay.
        dt_bias: `[HV]`, or `[HV, K]` where g is of each key channel; `None` for none.
        decay_lower_bound: the log decay is `decay_lower_bound sigmoid(exp(A_log) (g + dt_bias))` instead (KDA's "safe
            gate"; a negative number).
    """

    strength: float | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    decay_lower_bound: float | None = None

    def activated(self, beta: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Write strength and log decay, in fp32 (fp64 where a tensor is).

        Args:
            beta: `[B, T, HV]`, before its sigmoid where there is a `strength`.
            g: `[B, T, HV]` or `[B, T, HV, K]`, before its softplus where there is an `A_log`; `None` for no decay.
        """
        return self.write_strength(beta), self.log_decay(g)

    def write_strength(self, beta: Tensor) -> Tensor:
        """Write strengths, in fp32 (fp64 where beta is); beta itself without a `strength`."""
        if self.strength is None:
            return beta
        beta = _wide(beta).sigmoid()
        return beta if self.strength == 1 else self.strength * beta

    def log_decay(self, g: Tensor | None) -> Tensor | None:
        """Log decays, in fp32 (fp64 where g is); g itself without an `A_log`."""
        if g is None or self.A_log is None:
            return g
        step = _wide(g) if self.dt_bias is None else _wide(g) + self.dt_bias.to(_wide(g).dtype)
        rate = self.A_log.to(step.dtype).exp()
        rate = rate.unsqueeze(-1) if g.ndim == 4 else rate
        if self.decay_lower_bound is not None:
            return self.decay_lower_bound * (rate * step).sigmoid()
        return -rate * F.softplus(step)


GIVEN = RawGates()
"""Nothing is left to do: write strengths and log decays are given."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
