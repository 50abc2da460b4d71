"""The delta rule with gates of heads or key channels and a separate erase direction: (Gated) DeltaNet, Q-Delta, KDA."""

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
