"""The short causal convolution over a prompt, and the SiLU behind it, as one pass over the input; with gradients."""

from lapkernels.decoding.choice import IMPLEMENTATIONS
from lapkernels.short_conv.api import select_impl, short_conv, why_not

__all__ = ["IMPLEMENTATIONS", "select_impl", "short_conv", "why_not"]
