"""One decode step of gated states that share keys and values, on a pool of states."""

from lapkernels.decoding.choice import IMPLEMENTATIONS
from lapkernels.decoding.configs import StepConfig
from lapkernels.dual_state_step.api import allocate_state, dual_state_step, select_impl, why_not

__all__ = ["IMPLEMENTATIONS", "StepConfig", "allocate_state", "dual_state_step", "select_impl", "why_not"]
