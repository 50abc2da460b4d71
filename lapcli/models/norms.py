"""RMS norms, plain and gated: fp32 inside, with the weight applied before rounding, as fla's kernels do."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.models.precision import widened


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
        return self._normalised(x).to(x.dtype)

    def _normalised(self, x: Tensor) -> Tensor:
        # One kernel on a GPU, where both have one dtype.
        return F.rms_norm(widened(x), self.weight.shape, widened(self.weight), self.eps)


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
        opened = torch.sigmoid(widened(gate)) if self.activation == "sigmoid" else F.silu(widened(gate))
        return (self._normalised(x) * opened).to(x.dtype)
