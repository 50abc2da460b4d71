"""Operators with a recurrent matrix state: one folder an operator, contract first, fast path last.

Needs torch alone. Triton, fla and everything else are imported where a caller asks for them.
"""

from lapkernels.errors import InvalidInput, KernelUnavailable

__all__ = ["InvalidInput", "KernelUnavailable"]
