"""Greedy writing by the runtime's engine: many rows at once, steps that are captured, a look at them every few steps.

A step by a library's `generate` is hundreds of launches and three waits for the device, however small the model. Here
a step is one replay of a graph, and the host looks at what was written once a block of steps: rows that have ended by
then may have written on, which is cut off again. Prompts go through the model many in one pass, padded.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapcli.errors import ModelError
from lapcli.evaluation.decoding import Writing
from lapcli.evaluation.rows import Rows, free_bytes, tokens_of_a_pass
from lapcli.evaluation.scoring import LoadedModel, not_numbers
from lapcli.reporting import Reporter
from lapcli.runtime.engine import Engine
from lapcli.runtime.plans import why_no_plan

BLOCK = 16
"""Steps between two looks. Answers of RULER take 7 to 40 tokens, and a row that has ended costs nearly nothing."""
MOST_ROWS = 256
# Fewer rows than these would have graphs of their own, of which each takes some launches to capture.
_LEAST_ROWS = 8
# Of the device's free memory, for rows; the rest is for the passes of prompts and of tasks that are scored.
_SHARE = 0.3
# Where a device does not say what is free.
_CPU_BYTES = 1 << 30


@dataclass(eq=False)
class _Row:
    """A prompt under way.

    Attributes:
        number: among the writings.
        writing: the prompt.
        slot: of the engine.
        written: so far; the last token has not been taken in yet.
    """

    number: int
    writing: Writing
    slot: int
    written: list[int] = field(default_factory=list)

    def take(self, tokens: Sequence[int], stop: Collection[int]) -> bool:
        """Add tokens up to where the row ends, and say whether it has."""
        before, limit = len(self.written), self.writing.limit
        stopped = next((place for place, token in enumerate(tokens) if token in stop), None)
        self.written += tokens[:stopped][: limit - before]
        ended = stopped is not None or len(self.written) == limit
        ends = self.writing.ends
        if ends is not None and len(self.written) > before and ends(self.written):
            first = next(count for count in range(before + 1, len(self.written) + 1) if ends(self.written[:count]))
            del self.written[first:]
            ended = True
        return ended


class CapturedWriter:
    """Writes with one engine of a model, which is made when it is first needed, and kept with its graphs.

    Args:
        model: loaded for this alone: its projections become views of fused ones, and need no gradient.
        kernel: as asked for when it was loaded.
        longest: tokens of the longest row that will come, with what is written, as far as that is known.
        capture: whether steps are captured; without a GPU they cannot be.
    """

    def __init__(self, model: Any, *, kernel: str = "auto", longest: int = 0, capture: bool = True):
        self._model, self._kernel, self._longest, self._capture = model, kernel, longest, capture
        self._engine: Engine | None = None
        self._useless = False

    @classmethod
    def of(cls, model: Any, kernel: str, longest: int) -> "CapturedWriter | None":
        """One for a model whose steps can be captured; `None` where its own generation has to do."""
        released = any(mixer.released for mixer in model.mixers()) if hasattr(model, "mixers") else False
        spread = getattr(model, "hf_device_map", None) is not None
        if model.device.type != "cuda" or kernel == "reference" or released or spread or why_no_plan(model) is not None:
            return None
        return cls(model, kernel=kernel, longest=longest)

    def write(
        self,
        loaded: LoadedModel,
        writings: Sequence[Writing],
        *,
        stop: Collection[int],
        batch_size: int | None,
        reporter: Reporter,
        done: Callable[[int], None],
    ) -> list[list[int]] | None:
        """Continue prompts; see `lapcli.evaluation.decoding.write_greedily`.

        Args:
            loaded: the model, for its name.
            writings: the prompts.
            stop: tokens that end a row.
            batch_size: rows per pass and per step; `None`: as many as suit.
            reporter: told when batches are made smaller.
            done: told of rows that have ended.

        Returns:
            The tokens written after each prompt; `None` where no engine can do it.

        Raises:
            ModelError: the logits are not numbers, or memory runs out on a single row.
        """
        longest = max((len(writing.tokens) + writing.limit for writing in writings), default=0)
        engine = self._engine_for(longest)
        if engine is None:
            return None
        rows = Rows(loaded.name, batch_size, reporter)
        most = min(engine.max_rows, batch_size or engine.max_rows)
        order = sorted(range(len(writings)), key=lambda index: -len(writings[index].tokens))
        waiting = deque((number, writings[number]) for number in order)
        written: list[list[int]] = [[] for _ in writings]
        active: list[_Row] = []

        def take(tokens: Sequence[tuple[_Row, Sequence[int]]]) -> None:
            for row, new in tokens:
                if row.take(new, stop):
                    active.remove(row)
                    engine.release(row.slot)
                    written[row.number] = row.written
                    done(1)

        try:
            while waiting or active:
                # Prompts come in numbers, so that steps are not held up for one.
                joins = not active or most - len(active) >= min(len(waiting), most // 2)
                while joins and (count := self._joining(engine, waiting, most - len(active), rows)):
                    joined = self._begin(engine, [waiting[place] for place in range(count)], rows, loaded.name)
                    for row, _ in joined:
                        waiting.popleft()
                        active.append(row)
                    take(joined)
                if active:
                    take(self._steps(engine, active, loaded.name))
        finally:
            for row in active:
                engine.release(row.slot)
        return written

    def _joining(self, engine: Engine, waiting: deque[tuple[int, Writing]], free: int, rows: Rows) -> int:
        """How many of the waiting prompts go through the model in one pass, where so many rows are free."""
        if not waiting:
            return 0
        count = min(free, len(waiting), rows.at(tokens_of_a_pass(self._model) // len(waiting[0][1].tokens)))
        pages = engine.pages.free
        for place in range(count):
            writing = waiting[place][1]
            pages -= engine.pages_of(_room_of(writing))
            if pages < 0:
                return place
        return count

    def _begin(
        self, engine: Engine, prompts: Sequence[tuple[int, Writing]], rows: Rows, name: str
    ) -> list[tuple[_Row, Sequence[int]]]:
        """Take prompts in, as many of them as memory takes; each with the token that follows it."""

        def together(part: Sequence[Writing]) -> list[tuple[int, int]]:
            found = engine.prefill_together([writing.tokens for writing in part])
            slots = [each.slot for each in found]
            try:
                engine.pages.grow(dict(zip(slots, map(_room_of, part), strict=True)))
                logits = torch.stack([each.logits for each in found])
                chosen = logits.argmax(dim=1)
                # NaN is the largest of all.
                if bool(logits.gather(1, chosen.unsqueeze(1)).isnan().any()):
                    raise not_numbers(name)
                return list(zip(slots, chosen.tolist(), strict=True))
            except BaseException:
                for slot in slots:
                    engine.release(slot)
                raise

        found = rows.run([writing for _, writing in prompts], together)
        return [
            (_Row(number, writing, slot), [first])
            for (number, writing), (slot, first) in zip(prompts, found, strict=False)
        ]

    def _steps(self, engine: Engine, active: Sequence[_Row], name: str) -> list[tuple[_Row, Sequence[int]]]:
        """The next tokens of each row, of some more than it may have."""
        steps = min(BLOCK, max(row.writing.limit - len(row.written) for row in active))
        scores = torch.empty(steps, len(active), dtype=torch.float32, device=engine.device)
        at = iter(scores)

        def watch(logits: Tensor, tokens: Tensor) -> None:
            next(at).copy_(logits.gather(1, tokens.unsqueeze(1)).squeeze(1))

        tokens = engine.decode(
            [row.written[-1] for row in active],
            steps,
            [row.slot for row in active],
            watch=watch,
            at_least=_LEAST_ROWS,
        )
        if bool(scores.isnan().any()):
            raise not_numbers(name)
        return list(zip(active, tokens.T.tolist(), strict=True))

    def _engine_for(self, longest: int) -> Engine | None:
        """An engine with room for rows of so many tokens and a block; `None` where there can be none."""
        made = self._engine
        if self._useless or (made is not None and (not made.limited or longest + BLOCK <= made.max_length)):
            return made
        self._engine, made = None, None
        self._longest = max(self._longest, longest)
        try:
            self._engine = self._made(self._longest + BLOCK)
        except (ModelError, torch.OutOfMemoryError):
            # The model's own generation needs less memory for fewer rows, or says what is amiss.
            self._engine = None
        self._useless = self._engine is None
        return self._engine

    def _made(self, length: int) -> Engine | None:
        device = self._model.device
        free = free_bytes(device)
        budget = _CPU_BYTES if free is None else int(_SHARE * free)
        room: dict[str, Any] = {
            "max_length": length,
            "kernel": self._kernel,
            "graphs": None if self._capture else False,
            # What these save of a step is less than compiling them takes.
            "thin": 0,
            "few": 0,
        }
        # An engine of one row says what rows take.
        one = Engine(self._model, max_rows=1, **room)
        if self._capture and not one.path.graph:
            return None
        slot, pages = one.slot_bytes, one.row_bytes(length) - one.slot_bytes
        del one
        most = budget // 2 if pages else budget
        rows = max(1, min(MOST_ROWS, most // slot if slot else MOST_ROWS))
        return Engine(self._model, max_rows=rows, kv_bytes=max(pages, budget - rows * slot), **room)


def _room_of(writing: Writing) -> int:
    """Tokens that a row may come to, a block that it does not need included."""
    return len(writing.tokens) + writing.limit + BLOCK
