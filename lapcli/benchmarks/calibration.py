"""What calibration costs beside the forward pass that it rides on."""

import resource
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource
from lapcli.machine import Machine
from lapcli.reporting import Reporter, SilentReporter
from lapcli.stages.observation import observe
from lapkernels.timing import product_rate, synchronize


@dataclass(frozen=True)
class CalibrationRow:
    """One model and batch.

    Attributes:
        model: its name.
        tokens: of each timed pass.
        bare_seconds: the forward pass alone, median.
        calibrating_seconds: the same with the sums, median.
        overhead: the median of the ratios, pair by pair, less one.
        sums_bytes: what the sums take, whatever the number of tokens.
        floor_seconds: the least that the sums' arithmetic must take here, from a measured fp64 matrix product.
        peak_bytes_few: peak memory of the process (of the device, on a GPU) after two batches.
        peak_bytes_many: the same after all of them.
    """

    model: str
    tokens: int
    bare_seconds: float
    calibrating_seconds: float
    overhead: float
    sums_bytes: int
    floor_seconds: float
    peak_bytes_few: int
    peak_bytes_many: int


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def calibration_benchmark(
    source: ModelSource,
    *,
    machine: Machine | None = None,
    batch: int = 4,
    seq_len: int = 1024,
    pairs: int = 7,
    reporter: Reporter | None = None,
) -> CalibrationRow:
    """Time forward passes on random tokens, in turn without and with the sums.

    Args:
        source: the model.
        machine: where it runs.
        batch: sequences of a pass.
        seq_len: tokens of a sequence.
        pairs: timed pairs, after one that is not.
        reporter: told of the progress.
    """
    from lapcli.families.loading import load_model

    machine = machine or Machine()
    reporter = reporter or SilentReporter()
    device = machine.torch_device()
    family = family_for(source.config)
    layers = family.layers(source.config)
    model: Any = load_model(source, device=device, dtype=machine.torch_dtype(source.config), kernel=machine.kernel)
    machine.announce(model, reporter)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, source.config["vocab_size"], (batch, seq_len), generator=generator).to(device)
    sums = observe(layers)

    def seconds(observed: bool) -> float:
        context = sums.attached(family, model) if observed else nullcontext()
        with torch.inference_mode(), context:
            started = _now(device)
            model.get_decoder()(input_ids=ids, use_cache=False)
            return _now(device) - started

    timed: list[tuple[float, float]] = []
    peak_few = 0
    with reporter.task("calibration", total=pairs + 1, unit="pairs") as task:
        for number in range(pairs + 1):
            # Either goes first in turn, so that a drift of the machine's speed cancels.
            first = bool(number % 2)
            found = {first: seconds(first), not first: seconds(not first)}
            if number > 0:
                timed.append((found[False], found[True]))
            if number == 1:
                peak_few = _peak(device)
            task.advance(1)
    flops = sum(2 * 2 * layer.heads * layer.key_width**2 for layer in layers) * batch * seq_len
    return CalibrationRow(
        model=source.name,
        tokens=batch * seq_len,
        bare_seconds=statistics.median(bare for bare, _with in timed),
        calibrating_seconds=statistics.median(observed for _bare, observed in timed),
        overhead=statistics.median(observed / bare for bare, observed in timed) - 1,
        sums_bytes=sums.nbytes(),
        floor_seconds=flops / product_rate(device, torch.float64, 1024),
        peak_bytes_few=peak_few,
        peak_bytes_many=_peak(device),
    )
