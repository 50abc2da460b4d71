"""What steps and prompts cost an engine here: measured once, for simulations of what cannot be run."""

import json
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lapcli.artifacts import atomic_file
from lapcli.errors import DataError
from lapcli.serving.memory import Needs
from lapcli.serving.policy import Configuration

if TYPE_CHECKING:
    from lapcli.runtime import Batch, Engine

_STEPS = 24
_REPEATS = 5
_PROMPT = 4
_CPU_TOKENS = 2048
_SPARE = 192
"""Tokens that rows of a measured step may still get, and are admitted by."""


ONE = Configuration("base", 0, 0)
"""Of a model that comes in one, where nobody says more."""


class FrontCosts(NamedTuple):
    """Seconds of what lies between a client and the engine: HTTP, tokenising, queues, pipes, and the client's reading.

    It does one thing after the other, and the engine goes on meanwhile.

    Attributes:
        request: from a client's sending until the engine has it, of a request without a prompt.
        prompt_token: more for each token of its prompt.
        message: from what an engine says of a step until a client has the first token of it.
        token: more for each further one of that step, as long as which it can do nothing else.
    """

    request: float = 0.0
    prompt_token: float = 0.0
    message: float = 0.0
    token: float = 0.0


NO_FRONT = FrontCosts()
"""For what is asked without one."""
NO_NEEDS = Needs()
"""Of an engine of which nobody noted any."""


@dataclass(frozen=True)
class Curve:
    """Seconds of an engine's work for rows of one configuration.

    Attributes:
        steps: rows and seconds of a step, ascending.
        prompts: tokens and seconds of one pass of a prompt, ascending.
        context_step: seconds more of a step for each token that its rows have seen.
        context_prompt: seconds more of a pass for each token seen before, times the tokens of the pass.
    """

    steps: tuple[tuple[int, float], ...]
    prompts: tuple[tuple[int, float], ...]
    context_step: float = 0.0
    context_prompt: float = 0.0


@dataclass(frozen=True)
class StepCosts(Curve):
    """Seconds of an engine's work; steps and prompts are of its configuration with the fewest converted layers.

    Layers are alike, so that what lies between the fewest and the most converted ones is on a straight line.

    Attributes:
        model: whose, as it was named.
        digest: of it, and of what is known of its configurations; empty where nobody noted it.
        device: where.
        rows: the engine has room for.
        window: tokens of a request, prompt and answer.
        piece: prompt tokens between two steps, at most.
        configurations: that it has, by how much they convert.
        most: of the one with the most; `None` where there is one configuration.
        split_seconds: more of a step for each layer that is attention for some of its rows and states for others.
        weights_bytes: of the model, all configurations together.
        layer_bytes: of these, for each layer that is there twice.
        gate_bytes: of these, what a layer has more as states than as attention.
        slot_bytes: of states, for each row that there is room for.
        total_bytes: that pages might take in the engine that was measured; 0 where it has none.
        page_bytes: of each; 0 where nobody noted it.
        state_bytes: of a converted layer's states: a page, where no layer is attention; 0 where nobody noted it.
        front: what comes before and behind the engine.
        needs: memory that it takes beside weights and rows.
    """

    model: str = ""
    digest: str = ""
    device: str = "cpu"
    rows: int = 1
    window: int = 2
    piece: int = 1
    configurations: tuple[Configuration, ...] = (ONE,)
    most: Curve | None = None
    split_seconds: float = 0.0
    weights_bytes: int = 0
    layer_bytes: int = 0
    gate_bytes: int = 0
    slot_bytes: int = 0
    total_bytes: int = 0
    page_bytes: int = 0
    state_bytes: int = 0
    front: FrontCosts = NO_FRONT
    needs: Needs = NO_NEEDS

    def step(self, rows: int, seen: float, converted: float = 0.0, seen_converted: float = 0.0) -> float:
        """Seconds of a step, but for layers that run in parts.

        Args:
            rows: in it.
            seen: tokens that they have seen together.
            converted: the sum over rows of how far each is from the fewest converted layers to the most, 0 to 1.
            seen_converted: the same sum, each times the tokens that its row has seen.
        """
        seconds = _between(self.steps, rows) + self.context_step * seen
        if self.most is None or not converted:
            return seconds
        other = _between(self.most.steps, rows) - _between(self.steps, rows)
        context = (self.most.context_step - self.context_step) * seen_converted
        return seconds + other * converted / rows + context

    def prompt(self, tokens: int, seen: int, converted: float = 0.0) -> float:
        """Seconds of a pass of so many tokens after so many others, for a row that is so far converted, 0 to 1."""
        seconds = _between(self.prompts, tokens) + self.context_prompt * tokens * seen
        if self.most is None or not converted:
            return seconds
        other = _between(self.most.prompts, tokens) + self.most.context_prompt * tokens * seen
        return seconds + (other - seconds) * converted

    def write(self, path: Path) -> None:
        """Write them as JSON."""
        told = [each.document() for each in self.configurations]
        parts = {"front": self.front._asdict(), "needs": self.needs._asdict()}
        document = {**asdict(self), "configurations": told, **parts}
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")


def read_costs(path: Path) -> StepCosts:
    """Read costs that were written.

    Raises:
        DataError: the file is none of those; naming the field that is wrong.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _no_costs(path, "it is no JSON") from error
    try:
        found = _curve_of(document, "")
        if found.get("most") is not None:
            found["most"] = Curve(**_curve_of(found["most"], "most."))
        found["front"] = FrontCosts(**_checked(found.get("front", {}), "front.", NO_FRONT._asdict()))
        found["needs"] = Needs(**_checked(found.get("needs", {}), "needs.", NO_NEEDS._asdict()))
        told = found.pop("configurations", None)
        if told is not None:
            found["configurations"] = _configurations(told)
        return StepCosts(**_checked(found, "", vars(StepCosts((), ()))))
    except _Wrong as error:
        raise _no_costs(path, str(error)) from error


class _Wrong(Exception):
    """What is wrong with a file of costs: a field, the value found and the value wanted."""

    def __init__(self, field: str, value: Any, wanted: str):
        found = "missing" if value is _MISSING else repr(value)[:80]
        super().__init__(f"{field} is {found}, and {wanted} is wanted")


_MISSING = object()


def _no_costs(path: Path, why: str) -> DataError:
    return DataError(f"{path} holds no step costs: {why}", "delete it, and they are measured again")


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(field, value, "a JSON object")
    return {**value}


def _curve_of(value: Any, where: str) -> dict[str, Any]:
    """The fields of a curve, and whatever else lies among them: of sizes and seconds, in pairs."""
    found = _object(value, where.rstrip(".") or "the whole")
    for name in ("steps", "prompts"):
        pairs = found.get(name, _MISSING)
        if not isinstance(pairs, list) or not pairs:
            raise _Wrong(where + name, pairs, "a list of pairs [size, seconds]")
        for number, pair in enumerate(pairs):
            match pair:
                # A prompt may take no time, and no step does.
                case [size, seconds] if _is_number(size, int, 1) and _is_number(seconds, float, 0):
                    good = seconds > 0 or name == "prompts"
                case _:
                    good = False
            if not good:
                raise _Wrong(f"{where}{name}[{number}]", pair, "a pair [size from 1 on, seconds]")
        found[name] = tuple((size, float(seconds)) for size, seconds in pairs)
    return found if not where else _checked(found, where, vars(Curve((), ())))


def _configurations(value: Any) -> tuple[Configuration, ...]:
    """What `Configuration.document` wrote of each."""
    if not isinstance(value, list) or not value:
        raise _Wrong("configurations", value, "a list of configurations")
    found: list[Configuration] = []
    for number, each in enumerate(value):
        where = f"configurations[{number}]."
        fields = _object(each, where[:-1])
        quality = _object(fields.pop("quality", _MISSING), where + "quality")
        usual = Configuration("", 0, 0)._asdict()
        usual.pop("increase")
        told = _checked({**dict.fromkeys(usual, _MISSING), **fields}, where, usual)
        # A perplexity that is beyond all numbers, or under the unconverted model's, is one too.
        increase = quality.get("increase", _MISSING)
        if type(increase) not in (int, float) or math.isnan(increase):
            raise _Wrong(where + "quality.increase", increase, "a number")
        found.append(Configuration(**told, increase=float(increase)))
    return tuple(found)


def _checked(fields: dict[str, Any], where: str, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Fields, if each is one that there is and of the kind that it usually has: text, or a finite number from 0 on."""
    found = _object(fields, where.rstrip(".") or "the whole")
    for name, value in found.items():
        if name not in usual:
            raise _Wrong(where + name, value, "no such field")
        kind, least = type(usual[name]), 1 if name in ("rows", "window", "piece") else 0
        if kind is str and not isinstance(value, str):
            raise _Wrong(where + name, value, "a text")
        if kind is bool and not isinstance(value, bool):
            raise _Wrong(where + name, value, "true or false")
        if kind in (int, float) and not _is_number(value, kind, least):
            raise _Wrong(where + name, value, f"{'a whole' if kind is int else 'a'} number from {least} on")
    return found


def _is_number(value: Any, kind: type, least: float) -> bool:
    return type(value) in (int, kind) and least <= value < math.inf


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


def measure_costs(
    batch: "Batch",
    *,
    model: str,
    window: int,
    digest: str = "",
    known: Sequence[Configuration] = (),
    needs: Needs | None = None,
) -> StepCosts:
    """Measure, with an engine that does nothing else meanwhile.

    Args:
        batch: as a server has it, with a tokenizer: making texts of tokens is a part of a step.
        model: its name.
        window: tokens of a request.
        digest: of it.
        known: configurations that there are, where the engine holds the first and the last of them alone.
        needs: of the engine; default: estimated.
    """
    from lapcli.serving.estimates import estimated

    engine, piece = batch.engine, batch.piece or batch.together
    held = told_of(engine)
    least, most = held[0], held[-1]
    rows = rows_of_steps(batch)
    curve = _measure_curve(batch, rows, window, None if len(held) == 1 else least.name)
    other = None if len(held) == 1 else _measure_curve(batch, rows, window, most.name)
    split = 0.0
    if other is not None and rows > 1:
        split = split_cost(batch, rows, (curve.steps[-1][1] + other.steps[-1][1]) / 2)
    weights, (as_attention, as_states) = engine.nbytes()["weights"], engine.layer_bytes
    return StepCosts(
        **vars(curve),
        model=model,
        digest=digest,
        device=str(engine.device),
        rows=engine.max_rows,
        window=window,
        piece=piece,
        configurations=tuple(_between_bytes(each, least, most) for each in known) or tuple(held),
        most=other,
        split_seconds=split,
        weights_bytes=weights,
        layer_bytes=as_states,
        gate_bytes=as_states - as_attention,
        slot_bytes=engine.slot_bytes,
        total_bytes=engine.pages.count * engine.pages.page_bytes,
        page_bytes=engine.pages.page_bytes,
        state_bytes=max((pool.block_bytes for pool in engine.pages.states.values()), default=0),
        needs=needs or estimated(engine, window=window, device=engine.device),
    )


def _between_bytes(configuration: Configuration, least: Configuration, most: Configuration) -> Configuration:
    """A configuration with its bytes, which lie between those of two others as its layers do."""
    span = max(1, most.converted - least.converted)
    place = configuration.converted - least.converted
    fixed, token = (
        low + (high - low) * place // span
        for low, high in ((least.fixed_bytes, most.fixed_bytes), (least.token_bytes, most.token_bytes))
    )
    return configuration._replace(fixed_bytes=fixed, token_bytes=token)


def told_of(engine: "Engine") -> list[Configuration]:
    """What a front is told of an engine's configurations: bytes of pages, since slots are there in any case."""
    return [
        Configuration(
            each.name,
            each.converted,
            each.layers,
            engine.row_bytes(0, each.name) - engine.slot_bytes,
            each.token_bytes,
            each.quality.get("increase", 0.0),
        )
        for each in engine.configurations
    ]


def rows_of_steps(batch: "Batch") -> int:
    """As many rows as the engine has room for where each has a short text."""
    engine = batch.engine
    tokens = min(engine.max_length, _PROMPT + _STEPS + 8 + engine.max_rows)
    need = max(engine.pages_of(tokens, each.name) for each in engine.configurations)
    return max(1, min(engine.max_rows, engine.pages.count // need if need else engine.max_rows))


def _measure_curve(batch: "Batch", rows: int, window: int, name: str | None) -> Curve:
    """What one configuration takes."""
    engine, piece = batch.engine, batch.piece or batch.together
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < rows] + [rows]
    # Prompts of one token that is surely there; what it is does not matter.
    token = engine.vocabulary // 2
    steps = tuple((size, step_seconds(batch, [name] * size, _PROMPT, token)) for size in sizes)
    passes = [size for size in (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if size < min(piece, window)]
    passes.append(min(piece, window - 1))
    prompts = tuple((size, prompt_seconds(batch, [token] * size, name)) for size in passes)
    context_step = context_prompt = 0.0
    if engine.limited and window > 4 * _STEPS:
        far = window // 2
        # A GPU reads the texts of many rows at a time, and of one no faster than its latencies allow. A CPU would take
        # long to make them.
        need, most = engine.pages_of(far + _SPARE, name), _CPU_TOKENS // far if engine.device.type == "cpu" else rows
        many = max(1, min(rows, most, engine.pages.count // need if need else 1))
        more = step_seconds(batch, [name] * many, far, token) - _between(steps, many)
        context_step = max(0.0, more / many / far)
        # A pass of the usual length may be longer than what is left of the window.
        part = min(passes[-1], window - far)
        context_prompt = max(0.0, _context_seconds(batch, token, far, part, _between(prompts, part), name))
    return Curve(steps, prompts, context_step, context_prompt)


def split_cost(batch: "Batch", rows: int, alike: float) -> float:
    """Seconds more of a step for each layer that runs in parts.

    Args:
        batch: with several configurations.
        rows: of the step, half of them of the first and half of the last configuration.
        alike: seconds of a step of so many rows where they agree, as a mean of both.
    """
    first, last = batch.engine.configurations[0], batch.engine.configurations[-1]
    names: list[str | None] = [(first, last)[number % 2].name for number in range(rows)]
    mixed = step_seconds(batch, names, _PROMPT, batch.engine.vocabulary // 2)
    return max(0.0, (mixed - alike) / (last.converted - first.converted))


def step_seconds(batch: "Batch", configurations: Sequence[str | None], prompt: int, token: int) -> float:
    """Seconds of a step of rows of these configurations, with making text and telling it."""
    from lapcli.serving.loop import EngineLoop
    from lapcli.serving.protocol import encode

    # By the graph that is theirs, which steps often have later, and not by one for any rows.
    steps, seldom = batch.engine.steps, batch.engine.steps.seldom
    steps.seldom = False
    # What it says goes nowhere, but has to be made.
    said: list[int] = []
    loop = EngineLoop(batch, lambda wait: [], lambda message: said.append(len(encode(message))))
    settings = {"max_new_tokens": _STEPS + 8 + len(configurations), "eos": [], "stop": []}
    for number, name in enumerate(configurations):
        told = {"op": "add", "id": str(number), "prompt": [token] * prompt}
        loop.obey({**told, "settings": settings, "configuration": name})
    while batch.waiting:
        loop.tell(batch.advance())
    loop.tell(batch.advance())
    found: list[float] = []
    # Rows end where there is no room for more tokens.
    for _ in range(max(1, min(_STEPS, batch.engine.max_length - prompt - len(configurations) - 8))):
        begun = time.perf_counter()
        loop.tell(batch.advance())
        found.append(time.perf_counter() - begun)
    batch.close()
    steps.seldom = seldom
    return statistics.median(found)


def prompt_seconds(batch: "Batch", tokens: list[int], name: str | None = None) -> float:
    """Seconds of a prompt that goes through at once, and of choosing its first token."""
    engine = batch.engine
    found: list[float] = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        row = engine.prefill(tokens, piece=len(tokens), configuration=name)
        row.logits.argmax().item()
        found.append(time.perf_counter() - begun)
        engine.release(row.slot)
    return statistics.median(found[1:])


def _context_seconds(batch: "Batch", token: int, far: int, piece: int, first: float, name: str | None) -> float:
    """Seconds more of a pass for each token seen before and each of its own."""
    engine = batch.engine
    found: list[float] = []
    for _ in range(3):
        filling = engine.begin([token] * (far + piece), name)
        for _ in range(0, far, piece):
            engine.fill(filling, min(piece, far - filling.seen))
        begun = time.perf_counter()
        done = engine.fill(filling, piece)
        if done is not None:
            done.logits.argmax().item()
        found.append(time.perf_counter() - begun)
        engine.release(filling.slot)
    return (statistics.median(found) - first) / far / piece
