"""A linear layer over 16 to 64 rows, which tensor cores multiply, and whose sum over parts of D its reader may make."""

from lapkernels.few_linear.api import (
    IMPLEMENTATIONS,
    MOST_ROWS,
    few_linear,
    few_swiglu,
    is_faster,
    select_impl,
    why_not,
)

__all__ = ["IMPLEMENTATIONS", "MOST_ROWS", "few_linear", "few_swiglu", "is_faster", "select_impl", "why_not"]
