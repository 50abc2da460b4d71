"""RMS norms, plain and gated: fp32 inside, with the weight applied before rounding, as fla's kernels do.

On a GPU they are one kernel of `lapkernels.norm`, forward and backward, residual sum and gate included; elsewhere, and
compiled, plain PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.models.precision import by_one_kernel, widened
from lapkernels.norm import rms_norm, select_impl


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis, in x's dtype.

    Args:
        width: of the last axis.
        eps: added to the mean square.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.weight.shape[0]}, eps={self.eps}"

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., width]`."""
        if by_one_kernel(x, select_impl):
            return rms_norm(x, self.weight, self.eps).output
        return self._normalised(x).to(x.dtype)

    def _normalised(self, x: Tensor) -> Tensor:
        # One kernel on a GPU, where both have one dtype.
        return F.rms_norm(widened(x), self.weight.shape, widened(self.weight), self.eps)


class NormOfSum(RMSNorm):
    """The norm of the residual stream with what was added to it; both are wanted."""

    def forward(self, x: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`x + change`, `[..., width]`, normalised; and the sum."""
        # What is added may be narrower, as what a matrix product makes under autocast is.
        if torch.promote_types(x.dtype, change.dtype) == x.dtype and by_one_kernel(x, select_impl):
            return rms_norm(change, self.weight, self.eps, residual=x, dtype=x.dtype)
        x = x + change
        return self._normalised(x).to(x.dtype), x


class GatedRMSNorm(RMSNorm):
    """`x / rms(x) * weight * f(gate)`, f being SiLU or the sigmoid, in x's dtype.

    Args:
        width: of the last axis.
        eps: added to the mean square.
        activation: `swish` or `silu` (the same), or `sigmoid`.
    """

    def __init__(self, width: int, eps: float, activation: str):
        super().__init__(width, eps)
        self.activation = activation

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{super().extra_repr()}, activation={self.activation}"

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Normalise `[..., width]` and gate it by the same shape."""
        if by_one_kernel(x, select_impl):
            return rms_norm(x, self.weight, self.eps, gate=gate, gate_activation=self.activation).output
        opened = torch.sigmoid(widened(gate)) if self.activation == "sigmoid" else F.silu(widened(gate))
        return (self._normalised(x) * opened).to(x.dtype)
