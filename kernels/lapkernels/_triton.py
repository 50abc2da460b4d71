"""The only place that imports triton: which version there is, and whether its kernels can run here."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch


@cache
def triton_version() -> tuple[int, ...] | None:
    """The version of the triton that is installed, or `None`; asks the metadata, so it imports nothing."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        text = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        # Builds of torch for some platforms ship triton under another distribution name.
        import triton

        text = triton.__version__
    return parse_version(text)


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: `3.7.1+git5` is `(3, 7, 1)`.

    Raises:
        ValueError: the text does not start with a number.
    """
    numbers: list[int] = []
    for part in text.split("+", 1)[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    if not numbers:
        raise ValueError(f"'{text}' is not a version")
    return tuple(numbers)


def is_interpreted() -> bool:
    """Whether kernels run in triton's interpreter; the variable counts from before triton's import on."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_compiling_only: int | None = None
"""The capability that launches compile for, where they do no more; `lapkernels.offline` sets it."""


def set_compiling_only(capability: int) -> None:
    """Say that launches of this process only compile, for such a device."""
    global _compiling_only
    _compiling_only = capability


def kernels_can_run(device: torch.device | None = None) -> bool:
    """Whether a triton kernel can be launched.

    Args:
        device: where its tensors lie; `None` asks for any device of this machine.
    """
    if triton_version() is None:
        return False
    if is_interpreted() or _compiling_only is not None:
        return True
    return torch.cuda.is_available() and (device is None or device.type == "cuda")


@cache
def may_begin_early(device: torch.device) -> bool:
    """Whether a kernel may begin before the one before it in its stream has ended (programmatic dependent launch).

    GPUs can from capability 9 on, and CUDA graphs keep it. LAPKERNELS_WAIT=1 in the environment turns it off.
    """
    if is_interpreted() or os.environ.get("LAPKERNELS_WAIT") == "1":
        return False
    if _compiling_only is not None:
        return _compiling_only >= 90
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def shared_memory(device: torch.device) -> int | None:
    """Bytes of shared memory that a program may have; `None` where there is no NVIDIA GPU to ask."""
    if is_interpreted() or _compiling_only is not None or device.type != "cuda" or torch.version.hip is not None:
        return None
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@cache
def is_hopper(index: int = 0) -> bool:
    """Whether CUDA device `index` is an NVIDIA Hopper (compute capability 9)."""
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability(index)[0] == 9


def runs_on_hopper(device: torch.device) -> bool:
    """Whether kernels that are cut for Hopper, its TMA and shared memory, can run where these tensors lie."""
    if is_interpreted():
        return True
    if _compiling_only is not None:
        return _compiling_only == 90
    return device.type == "cuda" and is_hopper(device.index or 0)


@contextmanager
def first_configurations() -> Generator[None]:
    """Let every autotuner take its first configuration that runs, without a search; those of fla take minutes.

    What a kernel computes does not depend on the configuration, unless a compiler errs. What was tuned before keeps
    its result, and what comes later is tuned then.
    """
    if triton_version() is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    tuned: Any = Autotuner.run

    def first(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = self.configs
        try:
            for number in range(len(whole)):
                self.configs = whole[number : number + 1]
                try:
                    return tuned(self, *args, **kwargs)
                except OutOfResources:
                    if number == len(whole) - 1:
                        raise
        finally:
            self.configs = whole

    Autotuner.run = first
    try:
        yield
    finally:
        Autotuner.run = tuned


_TIMED = {"warmup": 5, "rep": 20}
"""Milliseconds for which `quick_searches` runs a configuration before it is timed, and while it is; Triton: 25, 100."""


@contextmanager
def quick_searches(threads: int | None = None) -> Generator[None]:
    """Let every autotuner compile the configurations of a search side by side, and time each for a fifth as long.

    fla's chunked GLA has 314 configurations, forward and backward. One after the other they take minutes, of one core,
    before a first step; most of that the compiler works outside of Python. Processes that begin a search together take
    configurations in orders of their own, and find in Triton's cache what another has compiled. What is found is kept
    there by whoever keeps it otherwise (fla does), for the next process.

    Args:
        threads: that compile; by default as many as there are cores for this process, 16 at most.
    """
    if triton_version() is None or is_interpreted():
        yield
        return
    from triton.runtime.autotuner import Autotuner

    workers = threads or min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)
    timed, benchmarker = Autotuner._bench, Autotuner.__dict__["do_bench"]
    searches: dict[int, Any] = {}

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        # Arguments by name are made anew for each search, and stay during it.
        if searches.get(id(self)) is not self.nargs:
            searches[id(self)] = self.nargs
            # What fails here fails once more where it is timed, and is heard of there.
            with suppress(Exception):
                _compile_all(self, args, meta, workers)
        return timed(self, *args, config=config, **meta)

    def do_bench(self: Any) -> Any:
        if self._do_bench is not None:
            return self._do_bench
        from triton.runtime import driver

        return partial(driver.active.get_benchmarker(), **_TIMED)

    Autotuner._bench = bench
    Autotuner.do_bench = property(do_bench)
    try:
        yield
    finally:
        Autotuner._bench = timed
        Autotuner.do_bench = benchmarker


def _compile_all(tuner: Any, args: tuple[Any, ...], meta: dict[str, Any], workers: int) -> None:
    """Compile all configurations that an autotuner will time."""
    from triton.runtime._async_compile import AsyncCompileMode

    configs = tuner.prune_configs(meta)
    first = os.getpid() * 7 % len(configs)
    with ThreadPoolExecutor(workers) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for config in configs[first:] + configs[:first]:
            tuner.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})


_SCRATCH = 2**28
"""Bytes that Triton's tuner writes between two measurements, so that nothing of the last one is in a cache."""
_LEAST_SCRATCH = 2**20


def tune_within_memory(device: torch.device) -> None:
    """Let Triton's tuner do with less scratch, from now on, where a device has no room for its 256 MiB.

    Kernels are tuned whenever a shape comes that they were not tuned for; in a process whose memory is divided to the
    last there is hardly that much. Measured with less they may find something in a cache, and a slower one may win.

    Args:
        device: where kernels are tuned.
    """
    if triton_version() is None:
        return
    from triton.runtime import driver

    active: Any = driver.active
    whole = active.get_empty_cache_for_benchmark
    if getattr(whole, "within_memory", False):
        return

    def scratch() -> torch.Tensor:
        count = _SCRATCH
        while True:
            try:
                return whole() if count == _SCRATCH else torch.empty(count // 4, dtype=torch.int32, device=device)
            except torch.OutOfMemoryError:
                if count <= _LEAST_SCRATCH:
                    raise
                count //= 2

    scratch.within_memory = True  # pyright: ignore[reportFunctionMemberAccess]
    active.get_empty_cache_for_benchmark = scratch
