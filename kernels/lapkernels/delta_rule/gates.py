"""Gates of a layer, before their activations."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RawGates(NamedTuple):
    """What makes write strengths and log decays of a layer's projections, as in Gated DeltaNet.

    Attributes:
        strength: factor on the sigmoid of `beta` (2 with negative eigenvalues); `None`: `beta` is the write strength.
        A_log: `[HV]`, log of the decay rate: the log decay is `-exp(A_log) softplus(g + dt_bias)`; `None`: `g` is the
            log decay.
        dt_bias: `[HV]`; `None` for none.
    """

    strength: float | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None

    def activated(self, beta: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Write strength and log decay, in fp32 (fp64 where a tensor is).

        Args:
            beta: `[B, T, HV]`, before its sigmoid where there is a `strength`.
            g: `[B, T, HV]`, before its softplus where there is an `A_log`; `None` for no decay.
        """
        if self.strength is not None:
            beta = _wide(beta).sigmoid()
            beta = beta if self.strength == 1 else self.strength * beta
        if g is not None and self.A_log is not None:
            step = _wide(g) if self.dt_bias is None else _wide(g) + self.dt_bias.to(_wide(g).dtype)
            g = -self.A_log.to(step.dtype).exp() * F.softplus(step)
        return beta, g


GIVEN = RawGates()
"""Nothing is left to do: write strengths and log decays are given."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
