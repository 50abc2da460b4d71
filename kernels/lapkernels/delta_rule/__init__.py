"""The delta rule with a scalar gate and a separate erase direction: DeltaNet, Gated DeltaNet, Q-Delta."""

from lapkernels.delta_rule.api import (
    IMPLEMENTATIONS,
    Choice,
    DeltaRuleOutput,
    delta_rule,
    l2_normalise,
    select_impl,
    why_not,
)
from lapkernels.delta_rule.gates import GIVEN, RawGates

__all__ = [
    "GIVEN",
    "IMPLEMENTATIONS",
    "Choice",
    "DeltaRuleOutput",
    "RawGates",
    "delta_rule",
    "l2_normalise",
    "select_impl",
    "why_not",
]
