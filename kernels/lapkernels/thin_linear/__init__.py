"""A linear layer over few rows, bound by reading its matrix: norm or SwiGLU before it, the residual sum behind it."""

from lapkernels.decoding.choice import IMPLEMENTATIONS
from lapkernels.thin_linear.api import MOST_ROWS, Normed, select_impl, thin_linear, why_not

__all__ = ["IMPLEMENTATIONS", "MOST_ROWS", "Normed", "select_impl", "thin_linear", "why_not"]
