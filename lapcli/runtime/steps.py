"""One decoding step over static tensors, captured as a CUDA graph for each number of rows."""

import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lapcli.runtime.layers import Mix, Rows
from lapcli.runtime.pieces import captured
from lapcli.runtime.sampling import Choices, Mode, choose
from lapkernels.greedy_token import greedy_token

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows that a graph is captured for; fewer rows are filled up."""

MOST_GRAPHS = 64
"""Graphs that are kept beside those that were captured ahead; the one that was not used for longest makes room."""

_SELDOM = 20.0
"""Seconds between two captures of `Steps.seldom`, for each second that the last one took."""

Forward = Callable[[Tensor, Rows], Tensor]
"""Tokens `[B]` and their rows to logits `[B, vocabulary]`."""

Span = tuple[int, int] | None
"""The least and the most converted layers of a step's rows; `None` for a model in one configuration."""


_Key = tuple[int, Mode, Span]

_ENOUGH_FOR: dict[Mode, tuple[Mode, ...]] = {
    "logits": ("logits",),
    "greedy": ("greedy",),
    "draw": ("greedy", "draw"),
    "filtered": ("greedy", "draw", "filtered"),
}


def _within(span: Span, other: Span) -> bool:
    """Whether a step of rows of these configurations is one of those as well."""
    if span is None or other is None:
        return span == other
    return other[0] <= span[0] and span[1] <= other[1]


class Steps:
    """Runs steps for up to so many rows; on a GPU by replaying a graph.

    Args:
        forward: the model's step.
        rows: the most.
        device: where.
        capture: whether to capture graphs; needs a CUDA device.
        blocks: layers whose states lie in pages.
        scores: see `Choices`.

    Attributes:
        tokens: `[rows]`, int64: what the next step takes in; a step that chooses tokens leaves them here.
        slots: `[rows]`, int32; negative for none.
        positions: `[rows]`, int64; a step that chooses tokens counts them up.
        choices: how tokens are chosen.
        converted: `[rows]`, int64: converted layers of each row, where rows differ in that.
        blocks: `[layers, rows]`, int32: see `Rows`.
        span: of the next step's rows.
        capture: whether steps are graphs; not any more once one could not be captured.
        seldom: whether a step that has no graph of its own, where one that was captured ahead does, takes that while
            captures would take more than a twentieth of the time.
        failure: why it could not.
    """

    def __init__(
        self,
        forward: Forward,
        rows: int,
        device: torch.device,
        *,
        capture: bool,
        blocks: int = 0,
        scores: int | None = None,
    ):
        self.forward, self.rows, self.device, self.capture = forward, rows, device, capture
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.choices = Choices(rows, device, scores)
        self.converted = torch.zeros(rows, dtype=torch.int64, device=device)
        self.blocks = torch.full((blocks, rows), -1, dtype=torch.int32, device=device)
        self.span: Span = None
        self.failure: str | None = None
        self.seldom = False
        # In the order of their last use.
        self._graphs: dict[_Key, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._ahead: set[_Key] = set()
        self._next = -math.inf
        self._logits: Tensor | None = None
        self._memory = torch.cuda.graph_pool_handle() if capture else None

    @property
    def mixed(self) -> bool:
        """Whether the next step's rows are of several configurations."""
        return self.span is not None and self.span[0] < self.span[1]

    def bucket(self, rows: int) -> int:
        """How many rows a step for `rows` of them runs."""
        if not self.capture:
            return rows
        return next((size for size in BUCKETS if rows <= size <= self.rows), self.rows)

    def set_rows(
        self,
        tokens: Sequence[int] | Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        converted: Sequence[int] | None = None,
        blocks: Sequence[Sequence[int]] = (),
    ) -> None:
        """Say which rows the next step is for; all others are padding."""
        count = len(slots)
        self.slots.fill_(-1)
        self.positions.zero_()
        self.slots[:count].copy_(torch.tensor(slots, dtype=torch.int32))
        self.positions[:count].copy_(torch.tensor(positions, dtype=torch.int64))
        self.tokens[:count].copy_(torch.as_tensor(tokens))
        if converted is not None:
            self.converted[:count].copy_(torch.tensor(converted, dtype=torch.int64))
            self.span = min(converted), max(converted)
        if blocks:
            self.blocks.fill_(-1)
            self.blocks[:, :count].copy_(torch.tensor(blocks, dtype=torch.int32))

    def run(self, rows: int, mode: Mode = "logits", *, longest: int | None = None) -> Tensor:
        """Run one step for the first `rows` rows.

        Args:
            rows: how many.
            mode: what the step ends with; except for `logits`, the tokens chosen are in `tokens`, positions are counted
                up, and the next step may follow at once.
            longest: tokens of the longest row after this step, where known.

        Returns:
            Logits `[rows, vocabulary]`, which the next step may overwrite.
        """
        found = self._graph(rows, mode) if self.capture else None
        if found is None:
            return self._step(rows, mode, longest)
        graph, logits = found
        graph.replay()
        return logits[:rows]

    def warm_up(self, rows: Sequence[int], modes: Sequence[Mode], spans: Sequence[Span] = (None,)) -> None:
        """Capture what steps of so many rows will need, before any has to wait for it."""
        for count, mode, self.span in itertools.product(rows, modes, spans):
            # One row has one configuration.
            if self.capture and (self.span is None or count > 1 or self.span[0] == self.span[1]):
                key = self.bucket(count), mode, self.span
                self._ahead.add(key)
                if key not in self._graphs:
                    self._capture(key)

    @property
    def buckets(self) -> list[int]:
        """All numbers of rows that steps run."""
        return sorted({self.bucket(rows) for rows in range(1, self.rows + 1)})

    def _step(self, rows: int, mode: Mode, longest: int | None = None) -> Tensor:
        slots, positions = self.slots[:rows], self.positions[:rows]
        mix = None if self.span is None else Mix(self.converted[:rows], *self.span)
        logits = self.forward(self.tokens[:rows], Rows(slots, positions, longest, mix, self.blocks[:, :rows]))
        if mode == "greedy":
            greedy_token(logits, self.tokens[:rows], positions, slots)
        elif mode != "logits":
            positions += slots >= 0
            self.tokens[:rows] = choose(logits, positions, self.choices, mode)
        return logits

    def _graph(self, rows: int, mode: Mode) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """The graph of a step and its logits; `None` where something in the step cannot be captured."""
        key = self.bucket(rows), mode, self.span
        found = self._graphs.pop(key, None)
        if found is not None:
            self._graphs[key] = found
            return found
        wider = self._wider(key) if self.seldom else None
        if wider is not None and time.monotonic() < self._next:
            return wider
        begun = time.monotonic()
        try:
            self._capture(key)
        except torch.OutOfMemoryError:
            if wider is None:
                raise
        now = time.monotonic()
        self._next = now + _SELDOM * (now - begun)
        return self._graphs.get(key, wider if self.capture else None)

    def _wider(self, key: "_Key") -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """A graph captured ahead of more rows, modes and configurations than a step has, as few as there is one of."""
        rows, mode, span = key
        found = [
            each
            for each in self._ahead & self._graphs.keys()
            if each[0] >= rows and mode in _ENOUGH_FOR[each[1]] and _within(span, each[2])
        ]
        return None if not found else self._graphs[min(found, key=lambda each: (each[0], len(_ENOUGH_FOR[each[1]])))]

    def _capture(self, key: "_Key") -> None:
        """Capture a step, unless something in it cannot be."""
        kept = [(tensor, tensor.clone()) for tensor in (self.tokens, self.slots, self.positions, self.blocks)]
        try:
            self._graphs[key] = self._captured(*key[:2])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # What runs eagerly all the same (a module that reads values on the host) is only slower.
            self.capture, self.failure = False, str(error).partition("\n")[0]
        finally:
            for tensor, before in kept:
                tensor.copy_(before)
        # None of them is under way: a capture waits for the device.
        later = [each for each in self._graphs if each not in self._ahead]
        for each in later[: max(0, len(later) - MOST_GRAPHS)]:
            del self._graphs[each]

    def _captured(self, rows: int, mode: Mode) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a step, run before for no row at all."""
        self.slots.fill_(-1)
        self.blocks.fill_(-1)
        self.positions.zero_()
        return captured(lambda: self._kept_step(rows, mode), self.device, self._memory)

    def _kept_step(self, rows: int, mode: Mode) -> Tensor:
        """A step; of many graphs all have their logits in one place, which would else be each one's own for good."""
        logits = self._step(rows, mode)
        if not self.seldom and self._logits is None:
            return logits
        if self._logits is None:
            self._logits = logits.new_empty(self.rows, logits.shape[-1])
        return self._logits[:rows].copy_(logits)
