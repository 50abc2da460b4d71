"""What every implementation of the step is given."""

from typing import NamedTuple

from torch import Tensor


class StepArguments(NamedTuple):
    """The arguments of `dual_state_step`, which documents them, checked and completed.

    Attributes:
        scale: factor on q, never `None`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    gate: Tensor
    mixture: Tensor
    normaliser: float
    floor: float
    scale: float
    position: Tensor | None
    slots: Tensor | None
    commit: Tensor | None
