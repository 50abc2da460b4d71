"""The small operators around a layer, each one kernel and one back: residual sum with RMS norm, SwiGLU's activation."""

from lapkernels.decoding.choice import IMPLEMENTATIONS
from lapkernels.norm.api import NormOutput, rms_norm, select_impl, swiglu, why_not

__all__ = ["IMPLEMENTATIONS", "NormOutput", "rms_norm", "select_impl", "swiglu", "why_not"]
