"""The end of a greedy step: each row's likeliest token, where the next step reads it, and its position counted up."""

from lapkernels.decoding.choice import IMPLEMENTATIONS
from lapkernels.greedy_token.api import greedy_token, select_impl, why_not

__all__ = ["IMPLEMENTATIONS", "greedy_token", "select_impl", "why_not"]
