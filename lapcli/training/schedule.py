"""The learning rate of each step, as a share of the largest."""

from math import ceil, cos, pi


def learning_rate_factor(step: int, steps: int, *, warmup: float = 0.05, floor: float = 0.1) -> float:
    """A straight rise to 1, then half a cosine down to `floor`.

    The first of `w = max(1, ceil(warmup steps))` steps has `1 / w`, the last of them 1, the last of all `floor`, unless
    the rise takes all steps.

    Args:
        step: which one, from 0 to `steps - 1`.
        steps: how many there are.
        warmup: the share of them that rises, from 0 to 1.
        floor: the lowest factor of the cosine, from 0 to 1: the last learning rate over the largest.

    Returns:
        From 0, which only `floor` = 0 reaches, to 1.

    Raises:
        ValueError: a step or a share that there is not.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step {step} of {steps}")
    if not 0 <= warmup <= 1 or not 0 <= floor <= 1:
        raise ValueError(f"warmup = {warmup} and floor = {floor} should be from 0 to 1")
    # 0.05 * 60 is 3.0000000000000004 in some orders of multiplication; such a crumb is no step.
    rising = max(1, ceil(warmup * steps - 1e-9))
    if step < rising:
        return (step + 1) / rising
    return floor + (1 - floor) * (1 + cos(pi * (step + 1 - rising) / (steps - rising))) / 2
