"""Several gated linear states that share keys and values and are read as one mixture: GLA, DSLA."""

from lapkernels.dual_state.api import (
    IMPLEMENTATIONS,
    DualStateOutput,
    dual_state,
    select_impl,
    why_not,
)

__all__ = ["IMPLEMENTATIONS", "DualStateOutput", "dual_state", "select_impl", "why_not"]
