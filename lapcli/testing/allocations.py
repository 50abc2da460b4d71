"""What a call takes of a CPU's memory at most, as torch's profiler sees its allocator."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocated(NamedTuple):
    """Bytes of tensors.

    Attributes:
        most: at any moment of the call, beyond what was there before.
        kept: by what the call returned, and whatever else outlives it.
    """

    most: int
    kept: int


def allocated(call: Callable[[], Any]) -> Allocated:
    """Run a call, and say what it allocated.

    Args:
        call: computes on the CPU.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    now = most = 0
    inner: Any = profiler.profiler
    for event in inner.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    del kept
    return Allocated(most, now)
