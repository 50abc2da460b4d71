"""Where a step's time goes: its kernels, by torch's profiler."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lapkernels.timing import synchronize

STEPS = 5
MOST = 12
_LONGEST_NAME = 60


class KernelTime(NamedTuple):
    """One kernel of a step.

    Attributes:
        name: as the profiler has it, cut.
        calls: of a step.
        seconds: of a step, all of them together.
    """

    name: str
    calls: float
    seconds: float


def kernel_times(run: Callable[[], Any], device: torch.device) -> list[KernelTime]:
    """The kernels of a step that has run before, the longest first; what is beyond `MOST` is `others`.

    On a CPU these are torch's operators.
    """
    from torch.profiler import ProfilerActivity, profile

    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    with warnings.catch_warnings():
        # About clocks, and about profiling that was there before.
        warnings.simplefilter("ignore")
        with profile(activities=activities) as found:
            for _ in range(STEPS):
                run()
            synchronize(device)
        averages = found.key_averages()
    times = [KernelTime(_short(each.key), each.count / STEPS, _own(each, gpu) / 1e6 / STEPS) for each in averages]
    times = sorted((time for time in times if time.seconds > 0), key=lambda time: time.seconds, reverse=True)
    rest = times[MOST:]
    if rest:
        return [
            *times[:MOST],
            KernelTime("others", sum(time.calls for time in rest), sum(time.seconds for time in rest)),
        ]
    return times


def _own(event: Any, gpu: bool) -> float:
    """Microseconds that are an event's own; the names differ between releases of torch."""
    names = ("self_device_time_total", "self_cuda_time_total") if gpu else ("self_cpu_time_total",)
    return float(next((getattr(event, name) for name in names if hasattr(event, name)), 0.0))


def _short(name: str) -> str:
    """Without templates and arguments, which are longer than they tell."""
    plain = name.removeprefix("void ").partition("<")[0].partition("(")[0].strip() or name
    return plain if len(plain) <= _LONGEST_NAME else plain[: _LONGEST_NAME - 1] + "…"
