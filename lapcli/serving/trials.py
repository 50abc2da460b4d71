"""What an engine takes of a GPU, measured before there is one: passes and steps on room for one request.

Shapes do not say it: kernels have scratch of their own, graphs keep what they were captured with, libraries have
workspaces, and the allocator hands memory out in pieces. So the largest pass of a prompt and the largest step are run
under the limit, and what they leave is for requests.
"""

import gc
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from lapcli.errors import ModelError
from lapcli.runtime.plans import Plan
from lapcli.runtime.prefill import OwnPrefiller
from lapcli.runtime.sampling import SCORES, Choices, choose
from lapcli.runtime.steps import Steps
from lapcli.serving.estimates import table_bytes
from lapcli.serving.memory import SMALLEST_PIECE, Limits, Needs, Room, RowBytes, rows_that_fit
from lapkernels._triton import tune_within_memory
from lapkernels.timing import out_of_memory as device_is_full

if TYPE_CHECKING:
    from lapcli.runtime import Engine

_SHORT_PROMPT = 200
_ATTEMPTS = 8
_SLACK = 16
"""Of all memory, the part that is left free once more where an engine ran out of it as it began."""


class Memory(Protocol):
    """A device's memory, as its allocator tells of it."""

    def settled(self) -> int:
        """Wait, give back what nobody holds, and say the bytes that are held all the same."""
        ...

    def begin(self) -> None:
        """Look for the most from now on."""
        ...

    def most(self) -> int:
        """The most bytes that were held since."""
        ...


class CudaMemory:
    """A GPU's, of which torch's allocator may hold so much and no more.

    What goes beyond it fails in this process, not in another one.

    Args:
        device: with its index.
        limit: bytes.
    """

    def __init__(self, device: torch.device, limit: int):
        self.device = device
        tune_within_memory(device)
        # In torch 2.11 this is the one function that does not take `cuda` for the current device.
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole), device.index)

    def settled(self) -> int:
        """Wait, give back what nobody holds, and say the bytes that are held all the same."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def begin(self) -> None:
        """Look for the most from now on."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def most(self) -> int:
        """The most bytes that were held since."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)


def place(device: torch.device) -> torch.device:
    """A device with its index, which is this process's current one from now on."""
    if device.type != "cuda":
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: on a GPU, of torch or of a library, or where a CPU's allocator was refused."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in str(error) or device_is_full(error))


class Model(NamedTuple):
    """What engines are made of.

    Attributes:
        make: an engine with as many rows, bytes of pages, tokens of a captured pass and scores as `Room` says.
        weights: bytes.
        row: what requests keep.
        vocabulary: scores of a row.
    """

    make: "Callable[[Room], Engine]"
    weights: int
    row: RowBytes
    vocabulary: int


class _Short(Exception):
    """Memory ran out in something."""

    def __init__(self, what: str, why: str):
        super().__init__(what, why)
        self.what, self.why = what, why


class _Found(NamedTuple):
    """What was measured, and the bytes of `needs.kept` that are there only once all is captured."""

    needs: Needs
    graphs: int


_PASS, _STEP = "a pass", "a step"


def engine_that_fits(
    model: Model, memory: Memory, limits: Limits, guess: Room, begin: "Callable[[Engine, int], None]"
) -> "tuple[Engine, Room, Needs]":
    """Make an engine that keeps to a limit, with as much room for requests as that leaves.

    Args:
        model: of which.
        memory: of its device, which refuses what goes beyond the limit.
        limits: that it is to keep.
        guess: pieces, scores and rows to begin with.
        begin: what an engine does before the first request comes, with pieces of so many tokens.

    Returns:
        The engine, which has begun; its room; and what was measured.

    Raises:
        ModelError: memory holds no request, or not as many as are wanted; saying what takes how much.
    """
    room, (needs, graphs) = _measured_room(model, memory, limits, guess)
    assert limits.memory is not None
    for _ in range(_ATTEMPTS):
        spare = 0
        try:
            engine = _alone(model, memory, room)
            # More than all rows ever take, or less than a page.
            spare = max(0, (room.row_bytes or 0) - engine.pages.count * engine.pages.page_bytes)
            lacking = memory.settled() + graphs + room.beside.prompt + room.beside.passing - limits.memory
            if lacking <= 0:
                begin(engine, room.piece)
                return engine, room, needs
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            lacking = limits.memory // _SLACK
        # Never two at a time.
        engine = None
        # What the allocator rounds up, or nobody foresaw.
        needs = needs._replace(kept=needs.kept + spare + lacking)
        room = _divided(model, limits, room, needs)
    raise ModelError(
        f"{limits.memory} bytes were divided {_ATTEMPTS} times, and each time the engine took more than it should",
        "raise --memory, or lower --max-rows or --max-length",
    )


def _alone(model: Model, memory: Memory, room: Room) -> "Engine":
    """An engine, once what nobody holds of one before is free."""
    gc.collect()
    memory.settled()
    return model.make(room)


def _divided(model: Model, limits: Limits, room: Room, needs: Needs) -> Room:
    """Memory divided by what was measured with a room's pieces, scores and rows, which are the most that there are."""
    given = limits._replace(piece=room.piece, most=room.rows)
    divided = rows_that_fit(given, model.row, needs, states=bool(needs.pass_states), shorten=False)
    return divided._replace(scores=room.scores)


def _measured_room(model: Model, memory: Memory, limits: Limits, room: Room) -> tuple[Room, _Found]:
    """Run what takes most, with less of it while memory runs out or too little is left."""
    tuned = False
    while True:
        try:
            if not tuned:
                # Kernels are compiled and tuned, which takes what nothing takes again.
                _measured(model, memory, limits, room)
                tuned = True
            found = _measured(model, memory, limits, room)
        except _Short as short:
            room = _smaller(model, limits, room, short)
            continue
        try:
            divided = _divided(model, limits, room, found.needs)
        except ModelError:
            if room.piece <= SMALLEST_PIECE:
                raise
            room = room._replace(piece=max(SMALLEST_PIECE, room.piece // 2))
            continue
        if divided.piece == room.piece:
            return divided, found
        # Shorter, to leave more for requests.
        room = room._replace(piece=divided.piece)


def _smaller(model: Model, limits: Limits, room: Room, short: _Short) -> Room:
    """What to try next.

    Raises:
        ModelError: nothing is left to try.
    """
    scores = SCORES if room.scores is None else room.scores
    if short.what == _PASS and room.piece > SMALLEST_PIECE:
        return room._replace(piece=max(SMALLEST_PIECE, room.piece // 2))
    if short.what == _STEP and scores > model.vocabulary:
        return room._replace(scores=scores // 2)
    if short.what == _STEP and limits.max_rows is None and room.rows > 1:
        return room._replace(rows=room.rows // 2)
    size = f"{room.piece} tokens" if short.what == _PASS else f"{room.rows} rows"
    raise _nothing_left(model, limits, f"{short.what} of {size}", short.why)


def _nothing_left(model: Model, limits: Limits, what: str, why: str) -> ModelError:
    return ModelError(
        f"{limits.memory} bytes hold {model.weights} of weights, and a request of full length takes "
        f"{model.row.longest}; {what} ran out of memory beside them: {why}",
        "raise --memory, or lower --max-length or --max-rows",
    )


@torch.no_grad()
def _measured(model: Model, memory: Memory, limits: Limits, room: Room) -> _Found:
    """Run a step of all rows, and passes of a piece, on room for one request.

    Raises:
        _Short: memory ran out in one of them.
        ModelError: there is no room for one request.
    """
    try:
        engine = _alone(model, memory, room._replace(rows=1, row_bytes=None))
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise _nothing_left(model, limits, "room for one request", shortly(error)) from None
    before = memory.settled()
    # What is captured is there until all was measured.
    kept: list[Any] = []
    step = _most_of(memory, _STEP, _steps(engine, room, kept))
    names = dict.fromkeys((engine.configurations[0].name, engine.configurations[-1].name))
    passes = [
        _most_of(memory, _PASS, _passes(engine, room.piece, name)) - engine.row_bytes(engine.max_length, name)
        for name in names
    ]
    after = memory.settled()
    held = engine.nbytes()
    pools = held["states"] + held["convolutions"] + held["attention"]
    tokens = [math.ceil(max(0, each) / room.piece) for each in passes]
    needs = Needs(
        kept=after - model.weights - pools,
        pass_token=tokens[0],
        pass_states=tokens[-1] if len(tokens) > 1 else 0,
        step_fixed=step,
        step_row=table_bytes(engine, engine.max_length),
        measured=True,
    )
    return _Found(needs, after - before)


def _most_of(memory: Memory, what: str, calls: Iterator[Callable[[], Any]]) -> int:
    """Bytes that any of some calls takes for a while, beyond what it leaves."""
    most = 0
    for call in calls:
        memory.settled()
        memory.begin()
        try:
            call()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise _Short(what, shortly(error)) from None
        peak = memory.most()
        most = max(most, peak - memory.settled())
    return most


def _steps(engine: "Engine", room: Room, kept: list[Any]) -> Iterator[Callable[[], Any]]:
    """A step of all rows, each of them padding; and first tokens of as many."""
    if isinstance(engine.plan, Plan):
        # One row has one configuration.
        rows = room.rows if engine.widest is None else max(2, room.rows)
        steps = Steps(
            engine.plan,
            rows,
            engine.device,
            capture=engine.steps.capture,
            blocks=len(engine.pages.states),
            scores=room.scores,
        )
        steps.seldom, steps.span = True, engine.widest
        kept.append(steps)
        if steps.capture:
            yield lambda: steps.warm_up([rows], ["filtered"], [engine.widest])
        else:
            yield lambda: steps.run(rows, "filtered", longest=1)

    def first_tokens() -> None:
        found = [torch.zeros(engine.vocabulary, dtype=engine.dtype, device=engine.device)] * room.rows
        positions = torch.zeros(room.rows, dtype=torch.int64, device=engine.device)
        choices = Choices(room.rows, engine.device, room.scores)
        choices.temperature.fill_(1.0)
        choose(torch.stack(found), positions, choices, "filtered")

    yield first_tokens


def _passes(engine: "Engine", piece: int, name: str) -> Iterator[Callable[[], Any]]:
    """A prompt's first piece, the last one of the longest prompt, and several prompts together."""
    longest = max(1, min(piece, engine.max_length - 1))
    for tokens in sorted({longest, max(1, longest - 1)}, reverse=True):
        yield lambda tokens=tokens: _prompt(engine, tokens, name)
    seen = engine.max_length - 1 - longest
    if engine.limited and seen > 0:
        yield lambda: _prompt(engine, longest, name, seen)
    rows = min(engine.plan.together, piece)
    if rows > 1:
        yield lambda: _together(engine, rows, max(1, min(piece // rows, engine.max_length - 1)), name)


def _prompt(engine: "Engine", tokens: int, name: str, seen: int = 0) -> None:
    """A pass of so many tokens after so many others."""
    prompt = [engine.vocabulary // 2] * tokens
    if not seen:
        engine.release(engine.prefill(prompt, piece=tokens, configuration=name).slot)
        return
    (slot,) = engine.occupy(1, seen, name)
    try:
        engine.prefill(prompt, slot, piece=tokens)
    finally:
        engine.release(slot)


def _together(engine: "Engine", rows: int, tokens: int, name: str) -> None:
    """A pass of several prompts."""
    prefiller = engine.plan.prefiller_of(engine.converted(name))
    prompts = torch.full((rows, tokens), engine.vocabulary // 2, device=engine.device)
    prefiller.forward(prompts, prefiller.cache(), 0)


def warm_prompts(engine: "Engine", piece: int) -> None:
    """Let prompts' kernels be compiled, tuned and captured before a request waits for it: for all lengths of passes.

    The largest come first: others find room in what they leave.
    """
    longest = max(1, min(piece, engine.max_length - 1))
    pieces = engine.plan.prefiller.pieces if isinstance(engine.plan.prefiller, OwnPrefiller) else None
    lengths = {1, min(_SHORT_PROMPT, longest), longest}
    if pieces is not None:
        lengths |= {tokens for length in pieces.lengths for tokens in (length, length - 1) if tokens <= longest}
    for name in dict.fromkeys((engine.configurations[0].name, engine.configurations[-1].name)):
        for tokens in sorted(lengths, reverse=True):
            _prompt(engine, tokens, name)


def shortly(error: BaseException) -> str:
    """What an allocator says of what it could not give, without advice."""
    return str(error).partition("\n")[0].partition(". GPU ")[0].partition(" Of the allocated memory")[0] or repr(error)
