"""One decode step of a Mamba-2 layer, from raw projections to the gated and normed output, on a pool of states."""

from lapkernels.decoding.choice import IMPLEMENTATIONS
from lapkernels.decoding.configs import StepConfig
from lapkernels.decoding.rows import ConvState, store_inputs
from lapkernels.decoding.workspace import Workspace
from lapkernels.ssd_step.api import allocate_state, select_impl, ssd_step, why_not

__all__ = [
    "IMPLEMENTATIONS",
    "ConvState",
    "StepConfig",
    "Workspace",
    "allocate_state",
    "select_impl",
    "ssd_step",
    "store_inputs",
    "why_not",
]
