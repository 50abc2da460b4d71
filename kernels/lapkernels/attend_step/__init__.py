"""One decode step of softmax attention over pages of keys and values: write the new token, read the row's own."""

from lapkernels.attend_step.api import attend_step, select_impl, why_not
from lapkernels.attend_step.pages import read_tokens, write_tokens
from lapkernels.decoding.choice import IMPLEMENTATIONS

__all__ = ["IMPLEMENTATIONS", "attend_step", "read_tokens", "select_impl", "why_not", "write_tokens"]
