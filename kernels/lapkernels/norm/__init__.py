"""The small operators around a layer, each one kernel: residual sum with RMS norm, and SwiGLU's activation."""

from lapkernels.decoding.choice import IMPLEMENTATIONS
from lapkernels.norm.api import NormOutput, rms_norm, select_impl, swiglu, why_not

__all__ = ["IMPLEMENTATIONS", "NormOutput", "rms_norm", "select_impl", "swiglu", "why_not"]
