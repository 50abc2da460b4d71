"""Models walked side by side over the same text, and measured on the way."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from lapcli.analysis.findings import Findings, LayerFindings
from lapcli.analysis.measuring import measurer_for
from lapcli.analysis.states import Walker
from lapcli.reporting import Task


def walk(
    walkers: Mapping[str, Walker],
    ids: Tensor,
    positions: Sequence[int],
    *,
    batch: int,
    longest: int | None = None,
    progress: Task | None = None,
) -> Findings:
    """Take all models over the text and measure their states.

    Args:
        walkers: by label; outputs of the others are compared with those of the first.
        ids: `[N, T]`, without padding. What is after the last position is not looked at.
        positions: ascending: after how many tokens states are measured.
        batch: documents at a time.
        longest: tokens that a model takes in at once; `None` for all from one position to the next.
        progress: told of the tokens that each model has taken in, and how long that took and the measuring.

    Raises:
        ModelError: a state is NaN or infinite (the layer is named), or the cache holds none.
    """
    base = next(iter(walkers))
    found: Findings = {
        label: {layer.index: LayerFindings.of(layer, len(ids), len(positions)) for layer in walker.layers}
        for label, walker in walkers.items()
    }
    device = walkers[base].body.device
    clock = _Clock(device)
    with ExitStack() as stack:
        for walker in walkers.values():
            stack.enter_context(walker.attached())
        measurer = stack.enter_context(measurer_for(device, found))
        for first in range(0, len(ids), batch):
            rows = ids[first : first + batch].to(device)
            for walker in walkers.values():
                walker.restart()
            batch_rows = slice(first, first + len(rows))
            for number, (start, stop) in enumerate(zip([0, *positions[:-1]], positions, strict=True)):
                clock.begin()
                for begin in range(start, stop, longest or stop - start):
                    stretch = rows[:, begin : min(begin + (longest or stop), stop)]
                    _read(walkers, base, stretch, found)
                    if progress is not None:
                        progress.advance(len(walkers) * stretch.numel())
                clock.end("reading")
                for label, walker in walkers.items():
                    measurer.measure(label, walker, batch_rows, number)
                clock.end("measuring")
                if progress is not None:
                    progress.note(f"{clock}, after {stop} tokens of {batch_rows.stop} of {len(ids)} samples")
            measurer.finish()
            clock.end("measuring")
    return found


def _read(walkers: Mapping[str, Walker], base: str, stretch: Tensor, found: Findings) -> None:
    """Let all models take in a stretch, and compare what their mixers give."""
    for label, walker in walkers.items():
        walker.step(stretch)
        if label != base:
            walker.step_alongside(stretch, walkers[base].own.inputs)
            for index, layer in found[label].items():
                layer.add_error("own", walker.own.outputs[index], walkers[base].own.outputs[index])
                layer.add_error("base", walker.alongside.outputs[index], walkers[base].own.outputs[index])


class _Clock:
    """How long models read and states were measured, to the end of what a device was given to do."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds = {"reading": 0.0, "measuring": 0.0}
        self._last = 0.0

    def begin(self) -> None:
        self._last = time.perf_counter()

    def end(self, what: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._seconds[what] += now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{seconds:.0f} s {what}" for what, seconds in self._seconds.items())
