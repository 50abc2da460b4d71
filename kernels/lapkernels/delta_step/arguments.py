"""What every implementation of the step is given."""

from typing import NamedTuple

from torch import Tensor

from lapkernels.decoding.rows import ConvState


class StepArguments(NamedTuple):
    """The arguments of `delta_step`, which documents them, checked and completed.

    Attributes:
        scale: factor on q, never `None`.
        silu: whether SiLU follows q, k and v.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    b: Tensor | None
    a: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    decay_lower_bound: float | None
    conv: ConvState | None
    position: Tensor | None
    slots: Tensor | None
    gate: Tensor | None
    norm_weight: Tensor | None
    norm_eps: float
    gate_activation: str
    lamb: Tensor | None
    strength: float
    scale: float
    qk_l2norm: bool
    silu: tuple[bool, bool, bool]
    commit: Tensor | None
    rounding_seed: Tensor | None
