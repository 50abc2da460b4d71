"""One decode step of a delta-family layer, from raw projections to the gated output, on a pool of states."""

from lapkernels.decoding.choice import IMPLEMENTATIONS
from lapkernels.decoding.configs import StepConfig
from lapkernels.decoding.rows import ConvState, store_inputs
from lapkernels.decoding.workspace import Workspace
from lapkernels.delta_step.api import allocate_state, delta_step, select_impl, why_not

__all__ = [
    "IMPLEMENTATIONS",
    "ConvState",
    "StepConfig",
    "Workspace",
    "allocate_state",
    "delta_step",
    "select_impl",
    "store_inputs",
    "why_not",
]
