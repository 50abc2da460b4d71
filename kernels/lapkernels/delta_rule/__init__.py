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

__all__ = ["IMPLEMENTATIONS", "Choice", "DeltaRuleOutput", "delta_rule", "l2_normalise", "select_impl", "why_not"]
