"""How fast a training step runs here, variant by variant, on random tokens; no data needed."""

import gc
import time
from typing import Any

import torch

from demo_gdn.modelling import demo_config, fresh_model, make_optimiser
from demo_gdn.operator_variants import use_operator
from demo_gdn.step import Network, TrainStep


def profile(
    variants: list[str], modes: list[str], batches: list[int], *, steps: int, length: int, kernels: bool
) -> None:
    """Time every combination and print a table as it grows.

    Args:
        variants: of the operator.
        modes: of the step.
        batches: rows of a step.
        steps: timed ones, after the warm-up.
        length: tokens of a row.
        kernels: whether to list where the time of the last variant's uncaptured step goes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, rows of {length}", flush=True)
    print(
        f"{'operator':9s} {'mode':15s} {'batch':>5s} {'ms/step':>9s} {'M tok/s':>8s} {'GiB':>6s} {'ready s':>8s}  loss",
        flush=True,
    )
    last: TrainStep | None = None
    for batch in batches:
        for variant in variants:
            for mode in modes:
                last = None
                gc.collect()
                try:
                    last = _time(variant, mode, batch, steps, length, device)
                except Exception as error:
                    print(
                        f"{variant:9s} {mode:15s} {batch:5d} failed: {type(error).__name__}: {str(error)[:400]}",
                        flush=True,
                    )
    if kernels and last is not None and device.type == "cuda":
        _print_kernels(last)


def _time(variant: str, mode: str, batch: int, steps: int, length: int, device: torch.device) -> TrainStep:
    started = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model: Any = fresh_model(demo_config(None, 4096, length=1024, tiny=False), device, 0)
    use_operator(model, variant)
    model.train()
    torch.manual_seed(0)
    pool = torch.randint(0, 4096, (batch * (length + 1) * 4,), device=device).to(torch.int16)
    step = TrainStep(
        Network(model, compiled="compiled" in mode, device=device),
        make_optimiser(model, device, muon_rate=0.02, adam_rate=0.003),
        pool, batch=batch, length=length, answer_weight=2.0, graph="graph" in mode,
    )  # fmt: skip
    step.starts.copy_(torch.arange(batch, device=device) * (length + 1))
    for _ in range(2):
        step()
    _wait(device)
    ready = time.perf_counter() - started
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    seconds = (time.perf_counter() - began) / steps
    loss = float(step.sums[0] / step.sums[1])
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    print(
        f"{variant:9s} {mode:15s} {batch:5d} {1000 * seconds:9.2f} {batch * length / seconds / 1e6:8.3f} "
        f"{memory:6.1f} {ready:8.1f}  {loss:.3f}",
        flush=True,
    )
    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _print_kernels(step: TrainStep) -> None:
    """Where the time of one step goes, by kernel; a captured step shows its kernels too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    rows = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in rows)
    print(f"kernels of one step, {total / 3000:.2f} ms:")
    for event in rows[:30]:
        print(f"{event.self_device_time_total / 3000:8.3f} ms {event.count // 3:5d} x  {event.key[:110]}", flush=True)
