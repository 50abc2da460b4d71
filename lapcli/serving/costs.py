"""What steps and prompts cost an engine here: measured once, for simulations of what cannot be run."""

import json
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.errors import DataError

if TYPE_CHECKING:
    from lapcli.runtime import Batch

_STEPS = 24
_REPEATS = 5


@dataclass(frozen=True)
class StepCosts:
    """Seconds of an engine's work.

    Attributes:
        model: whose.
        device: where.
        rows: the engine has room for.
        window: tokens of a request, prompt and answer.
        piece: prompt tokens between two steps, at most.
        steps: rows and seconds of a step, ascending.
        prompts: tokens and seconds of one pass of a prompt, ascending.
        context_step: seconds more of a step for each token that its rows have seen.
        context_prompt: seconds more of a pass for each token seen before, times the tokens of the pass.
    """

    model: str
    device: str
    rows: int
    window: int
    piece: int
    steps: tuple[tuple[int, float], ...]
    prompts: tuple[tuple[int, float], ...]
    context_step: float = 0.0
    context_prompt: float = 0.0

    def step(self, rows: int, seen: int) -> float:
        """Seconds of a step of rows that have seen so many tokens together."""
        return _between(self.steps, rows) + self.context_step * seen

    def prompt(self, tokens: int, seen: int) -> float:
        """Seconds of a pass of so many tokens after so many others."""
        return _between(self.prompts, tokens) + self.context_prompt * tokens * seen

    def write(self, path: Path) -> None:
        """Write them as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_costs(path: Path) -> StepCosts:
    """Read costs that were written.

    Raises:
        DataError: the file is none of those.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        for name in ("steps", "prompts"):
            document[name] = tuple((int(size), float(seconds)) for size, seconds in document[name])
            if not document[name]:
                raise ValueError(f"{name} is empty")
        return StepCosts(**document)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} holds no step costs: {error}", "delete it, and they are measured again") from error


def _between(points: Sequence[tuple[int, float]], size: int) -> float:
    """A value between measured ones, on a straight line; beyond the last, in proportion."""
    place = bisect_left(points, size, key=lambda point: point[0])
    if place == len(points):
        return points[-1][1] * size / points[-1][0]
    high, above = points[place]
    if high == size or place == 0:
        return above
    low, below = points[place - 1]
    return below + (above - below) * (size - low) / (high - low)


def measure_costs(batch: "Batch", *, model: str, window: int) -> StepCosts:
    """Measure, with an engine that does nothing else meanwhile.

    Args:
        batch: as a server has it, with a tokenizer: making texts of tokens is a part of a step.
        model: its name.
        window: tokens of a request.
    """
    engine = batch.engine
    rows, piece = engine.max_rows, batch.piece or batch.together
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < rows] + [rows]
    # Prompts of one token that is surely there; what it is does not matter.
    token = engine.vocabulary // 2
    steps = tuple((size, _step_seconds(batch, size, 4, token)) for size in sizes)
    passes = [size for size in (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if size < min(piece, window)]
    passes.append(min(piece, window - 1))
    prompts = tuple((size, _prompt_seconds(batch, [token] * size)) for size in passes)
    context_step = context_prompt = 0.0
    if engine.limited and window > 512:
        far = window // 2
        context_step = max(0.0, (_step_seconds(batch, 1, far, token) - steps[0][1]) / far)
        context_prompt = max(0.0, _context_seconds(batch, token, far, passes[-1], prompts[-1][1]))
    return StepCosts(model, str(engine.device), rows, window, piece, steps, prompts, context_step, context_prompt)


def _step_seconds(batch: "Batch", rows: int, prompt: int, token: int) -> float:
    """Seconds of a step of so many rows, text and all."""
    from lapcli.runtime import GenerationSettings

    for _ in range(rows):
        batch.add([token] * prompt, GenerationSettings(max_new_tokens=_STEPS + 8 + rows))
    while batch.waiting:
        batch.advance()
    batch.advance()
    found: list[float] = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        batch.advance()
        found.append(time.perf_counter() - begun)
    batch.close()
    return statistics.median(found)


def _prompt_seconds(batch: "Batch", tokens: list[int]) -> float:
    """Seconds of a prompt that goes through at once, and of choosing its first token."""
    engine = batch.engine
    found: list[float] = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        row = engine.prefill(tokens, piece=len(tokens))
        row.logits.argmax().item()
        found.append(time.perf_counter() - begun)
        engine.release(row.slot)
    return statistics.median(found[1:])


def _context_seconds(batch: "Batch", token: int, far: int, piece: int, first: float) -> float:
    """Seconds more of a pass for each token seen before and each of its own."""
    engine = batch.engine
    found: list[float] = []
    for _ in range(3):
        filling = engine.begin([token] * (far + piece))
        for _ in range(0, far, piece):
            engine.fill(filling, min(piece, far - filling.seen))
        begun = time.perf_counter()
        done = engine.fill(filling, piece)
        if done is not None:
            done.logits.argmax().item()
        found.append(time.perf_counter() - begun)
        engine.release(filling.slot)
    return (statistics.median(found) - first) / far / piece
