"""How long a call takes, as medians of independent trials, and the rates that floors are computed with.

On a GPU a call is timed by events on its stream, through a CUDA graph where one is asked for; elsewhere by the clock.
Nothing here knows what is timed.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WARMUP, REPEATS, TRIALS = 10, 100, 3
"""Calls that do not count, calls that do, and how often both: as the paper does (arXiv 2602.04852, appendix G)."""

_FEWEST = 5
"""Calls that count in a trial, however slow they are."""


@dataclass(frozen=True)
class Timing:
    """What a call took.

    Attributes:
        seconds: the median of the trials' medians.
        trials: the median of each trial.
        repeats: calls of a trial.
        graphed: whether a CUDA graph was replayed.
    """

    seconds: float
    trials: tuple[float, ...]
    repeats: int
    graphed: bool

    @property
    def spread(self) -> float:
        """Slowest trial over fastest, less one."""
        return max(self.trials) / min(self.trials) - 1


def measure(
    calls: Callable[[], Any] | Sequence[Callable[[], Any]],
    device: torch.device,
    *,
    warmup: int = WARMUP,
    repeats: int = REPEATS,
    trials: int = TRIALS,
    graph: bool = False,
    limit: float | None = None,
) -> Timing:
    """Time one call, or several that do the same work on operands of their own.

    Several are made in turn, so that none finds its operands in a cache that a real program would have filled with
    others meanwhile (see `copies`); the time is that of one of them. With `graph` all of them are in one graph, which
    each trial captures anew.

    Args:
        calls: what is timed. With `graph` it must not wait for the device.
        device: where it runs.
        warmup: rounds that do not count, in each trial.
        repeats: rounds that do.
        trials: how often both.
        graph: whether to capture and replay; without a GPU nothing is captured.
        limit: seconds that all trials together should take; slow calls are repeated less often, 5 times at least.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
        RuntimeError: the calls cannot be captured.
    """
    several = [calls] if callable(calls) else list(calls)
    graphed = graph and device.type == "cuda"
    medians: list[float] = []
    one_round: Callable[[], None] | None = None
    for _ in range(trials):
        # A graph keeps what its calls return: let go of the last one first.
        del one_round
        one_round = _captured(several, device) if graphed else _in_turn(several)
        if limit is not None:
            # The first round of a trial also compiles; the second tells how long the others will take.
            one_round()
            once = _clocked(one_round, device)
            # A fifth of what is left to the trial warms up.
            fit = int(0.8 * (limit / trials / max(once, 1e-9) - 2))
            if fit < repeats:
                repeats = max(_FEWEST, fit)
                warmup = min(warmup, max(1, repeats // 4))
        for _ in range(warmup):
            one_round()
        medians.append(statistics.median(samples(one_round, repeats, device)) / len(several))
    return Timing(statistics.median(medians), tuple(medians), repeats, graphed)


def samples(call: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Seconds of each of `count` calls, queued one behind the other on a GPU."""
    if device.type != "cuda":
        return [_clocked(call, device) for _ in range(count)]
    with torch.cuda.device(device):
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        torch.cuda.synchronize()
        for before, after in events:
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in events]


def latencies(call: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Seconds of each of `count` calls by the clock, the device waited for after each: what a reader of tokens sees."""
    synchronize(device)
    return [_clocked(call, device) for _ in range(count)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a percentile of nothing")
    # Less a rounding error: 0.07 of 100 values is the 7th, not the 8th.
    return sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]


def copies(nbytes: int, device: torch.device) -> int:
    """How many sets of operands of `nbytes` it takes to fill the device's last cache four times over; 1 elsewhere."""
    if device.type != "cuda" or nbytes < 1:
        return 1
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return max(1, -(-4 * cache // nbytes))


def copy_bandwidth(device: torch.device, nbytes: int | None = None) -> float:
    """Bytes a second that a large copy moves, reading and writing counted: the rate of floors that memory sets.

    Args:
        device: whose memory.
        nbytes: of what is copied; default: 1 GiB on a GPU (an eighth of what is free, if that is less), else 64 MiB.
    """
    if nbytes is None:
        nbytes = 2**26 if device.type != "cuda" else min(2**30, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.empty(nbytes // 4, dtype=torch.float32, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: target.copy_(source), device, warmup=3, repeats=10).seconds


def product_rate(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """Floating-point operations a second of a large product of two square matrices.

    Args:
        device: where.
        dtype: of both matrices and the result.
        size: rows; default: 8192 on a GPU, else 512.
    """
    size = size or (8192 if device.type == "cuda" else 512)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    return 2 * size**3 / measure(lambda: torch.mm(left, right, out=result), device, warmup=3, repeats=10).seconds


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; nothing elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give back what is no longer used, so that the next case finds the memory that the first one found."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that one call takes of a GPU at most, beyond what is held before it; `None` elsewhere."""
    if device.type != "cuda":
        return None
    synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = call()
    synchronize(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - held


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that a device has too little memory.

    Triton's and cuBLAS's are no `torch.OutOfMemoryError`.
    """
    chain = [error, error.__cause__, error.__context__]
    return any(
        isinstance(each, torch.OutOfMemoryError)
        or "out of memory" in str(each)
        or "CUBLAS_STATUS_ALLOC_FAILED" in str(each)
        for each in chain
        if each is not None
    )


def _clocked(call: Callable[[], Any], device: torch.device) -> float:
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def _in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    def one_round() -> None:
        for call in calls:
            call()

    return one_round


def _captured(calls: Sequence[Callable[[], Any]], device: torch.device) -> Callable[[], None]:
    """A graph of all calls. What they return lives as long as the graph does."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Compilation, autotuning and cuBLAS's workspace come before a capture, not in it.
            for _ in range(3):
                calls[0]()
            for call in calls[1:]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call() for call in calls]

    def one_round(_kept: Any = kept) -> None:
        graph.replay()

    return one_round
