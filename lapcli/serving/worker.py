"""The engine process: `python -m lapcli.serving.worker FD`, with a socket to the front under that descriptor."""

import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lapcli.errors import LapcliError, ModelError
from lapcli.serving.protocol import Inbox, Message, encode
from lapcli.serving.settings import EngineSettings

if TYPE_CHECKING:
    import torch

    from lapcli.families.source import ModelSource
    from lapcli.runtime import Batch, Engine
    from lapcli.serving.loop import Measured
    from lapcli.serving.memory import Limits, Needs, Room, RowBytes
    from lapcli.serving.trials import CudaMemory

_SHARE = 0.9
"""Of a GPU's free memory that is taken where nobody says how much."""
_MEASURED_ROWS = 8
"""Rows of the steps that are measured at the start, where there are so many."""
_CPU_PIECE, _GPU_PIECE = 256, 2048
"""Prompt tokens between two steps: about as long as a few steps of many rows."""


def main() -> None:
    """Serve whoever holds the other end of the socket."""
    # A terminal's Ctrl-C is for the front, which says `stop` when it is time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        from lapcli.launching import end_with_the_parent

        end_with_the_parent()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox = Inbox(connection)

    def send(message: Message) -> None:
        connection.sendall(encode(message))

    first = inbox.take(wait=True)
    begin = first[0]
    if begin is None:
        return
    # What was said meanwhile is not lost.
    rest = first[1:]

    def take(wait: bool) -> list[Message | None]:
        found = rest[:]
        rest.clear()
        return found or inbox.take(wait=wait)

    settings = EngineSettings(**begin["settings"])
    try:
        batch, facts = prepare(settings)
        with shortage_said(settings, "steps were measured"):
            measured = measure(batch)
    except LapcliError as error:
        send({"op": "fatal", "message": error.message, "hint": error.hint})
        return
    from lapcli.serving.loop import EngineLoop

    # The libraries' million objects would let Python look for garbage among the old ones far too rarely.
    gc.freeze()
    loop = EngineLoop(batch, take, send, measured)
    try:
        send({"op": "ready", **facts, "stats": loop.stats()})
        loop.run()
    except (BrokenPipeError, ConnectionResetError):
        # The front is gone, and nobody else is there to be told.
        return


def prepare(settings: EngineSettings) -> "tuple[Batch, dict[str, Any]]":
    """Load the model and make room for rows; on a GPU after measuring what else there will be.

    Returns:
        Where rows are decoded, and what the front should know.

    Raises:
        LapcliError: the model cannot be loaded, or memory holds no row of it.
    """
    import torch

    from lapcli.families.loading import load_tokenizer, resolve_model
    from lapcli.runtime import Batch
    from lapcli.serving.costs import told_of
    from lapcli.serving.trials import CudaMemory, place
    from lapkernels._triton import quick_searches

    source = resolve_model(settings.model)
    device = place(torch.device(settings.device))
    settings = replace(settings, memory=_memory(settings, device))
    memory = None if device.type != "cuda" or settings.memory is None else CudaMemory(device, settings.memory)
    tokenizer = load_tokenizer(source, trust_remote_code=settings.trust_remote_code)
    with shortage_said(settings, "its weights were loaded"):
        model = _load(settings, source, device)
    # Where kernels are tuned as they first run, requests would wait for it.
    with shortage_said(settings, "room was made"), quick_searches() if memory is not None else contextlib.nullcontext():
        engine, room, needs = _engine(settings, model, memory)
    if settings.require_fast:
        engine.path.refuse_slow()
    facts = {
        "max_length": settings.max_length,
        "rows": room.rows,
        "vocabulary": engine.vocabulary,
        "path": str(engine.path),
        "bytes": engine.nbytes(),
        "beside": {**room.beside._asdict(), "piece": room.piece, "measured": needs.measured},
        "row_bytes": engine.row_bytes(settings.max_length),
        "piece": room.piece,
        "needs": needs._asdict(),
        "configurations": [each.document() for each in told_of(engine)],
    }
    return Batch(engine, tokenizer, together=room.piece, piece=room.piece), facts


def _memory(settings: EngineSettings, device: "torch.device") -> int | None:
    """Bytes that there may be; `None` for any number, which a CPU has."""
    import torch

    if settings.memory is None and device.type == "cuda":
        return int(_SHARE * torch.cuda.mem_get_info(device)[0])
    return settings.memory


@contextlib.contextmanager
def shortage_said(settings: EngineSettings, doing: str) -> Generator[None]:
    """Say what memory ran out for, in place of a traceback.

    Raises:
        ModelError: it did.
    """
    from lapcli.serving.trials import out_of_memory, shortly

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        allowed = "" if settings.memory is None else f"; {settings.memory} bytes are allowed (--memory)"
        raise ModelError(
            f"{settings.model} on {settings.device}: memory ran out while {doing}: {shortly(error)}{allowed}",
            "raise --memory, lower --max-length or --max-rows, or see what else takes this device's memory: nvidia-smi"
            if settings.device.startswith("cuda")
            else "lower --max-length or --max-rows, or see what else takes memory: free -h",
        ) from error


def _engine(settings: EngineSettings, model: Any, memory: "CudaMemory | None") -> "tuple[Engine, Room, Needs]":
    """An engine that has begun, what memory is divided into, and what is beside weights and rows."""
    from lapcli.runtime import Engine
    from lapcli.serving.estimates import estimated
    from lapcli.serving.memory import MOST_ROWS, SMALLEST_PIECE, Room, rows_that_fit
    from lapcli.serving.trials import Model, engine_that_fits, warm_prompts

    def make(room: "Room") -> "Engine":
        made = Engine(
            model,
            max_rows=room.rows,
            kv_bytes=room.row_bytes,
            captured_tokens=min(room.piece, settings.max_length),
            scores=room.scores,
            **_common(settings),
        )
        if memory is not None and made.plan.recurrent:
            # A state of each row of a pass lies beside the pools; so many are no more than the chunks of one row.
            made.plan.together = min(made.plan.together, max(1, room.piece // SMALLEST_PIECE))
        return made

    # An engine of one row says what rows take.
    engine = Engine(model, max_rows=1, **_common(settings))
    weights, row = engine.nbytes()["weights"], _row_bytes(engine, settings)
    limits = _limits(settings, weights)
    needs = estimated(engine, window=settings.max_length, device=engine.device)
    states, vocabulary = bool(needs.pass_states), engine.vocabulary
    # Never two at a time.
    del engine
    if memory is None:
        room = rows_that_fit(limits, row, needs, states=states)
        engine = make(room)
        engine.warm_up_for_all()
        return engine, room, needs
    assert limits.memory is not None
    try:
        guess = rows_that_fit(limits, row, needs, states=states)
    except ModelError:
        # Shapes do not say it exactly.
        guess = Room(1, None, min(limits.piece, SMALLEST_PIECE), vocabulary)
    most = (limits.memory - weights) // max(1, row.usual)
    guess = guess._replace(rows=limits.max_rows or max(1, min(MOST_ROWS, most)))

    def begin(engine: "Engine", piece: int) -> None:
        warm_prompts(engine, piece)
        engine.warm_up_for_all()

    return engine_that_fits(Model(make, weights, row, vocabulary), memory, limits, guess, begin)


def _common(settings: EngineSettings) -> dict[str, Any]:
    """What all engines of some settings are told."""
    import torch

    return {
        "max_length": settings.max_length,
        "kernel": settings.kernel,
        "state_dtype": getattr(torch, settings.state_dtype),
    }


def _limits(settings: EngineSettings, weights: int) -> "Limits":
    from lapcli.serving.memory import Limits

    piece = settings.piece or (_GPU_PIECE if settings.device.startswith("cuda") else _CPU_PIECE)
    return Limits(settings.memory, weights, settings.max_rows, piece, easy=settings.piece is None)


def _row_bytes(engine: "Engine", settings: EngineSettings) -> "RowBytes":
    """What rows keep, by an engine of one."""
    from lapcli.serving.memory import RowBytes, usual_length

    usual, longest = (
        [engine.row_bytes(tokens, each.name) for each in engine.configurations]
        for tokens in (usual_length(settings.max_length), settings.max_length)
    )
    return RowBytes(engine.slot_bytes, min(usual), max(longest))


def planned(settings: EngineSettings) -> dict[str, Any]:
    """What `prepare` would make room for, by shapes alone: nothing is loaded, and nothing measured.

    Returns:
        Bytes of `weights` and of `longest_request`, `rows` together, tokens of a `piece`, and what is `beside` (none
        where memory has no limit), which is estimated.

    Raises:
        LapcliError: memory holds no request, or not as many as are wanted; the model cannot be decoded here.
    """
    import torch

    from lapcli.families.loading import resolve_model
    from lapcli.runtime import Engine
    from lapcli.runtime.configurations import Convertible
    from lapcli.serving.estimates import estimated
    from lapcli.serving.memory import rows_that_fit, said_of

    model = _load(replace(settings, offload=False, kernel="auto"), resolve_model(settings.model), None)
    weights = sum(tensor.nbytes for tensor in _tensors(model))
    if settings.offload and isinstance(model, Convertible):
        # Two places on the device are left of all that may be states.
        each = [sum(tensor.nbytes for tensor in module.parameters()) for module in model.attention.values()]
        weights -= sum(sorted(each)[:-2])
    engine = Engine(model, max_rows=1, **{**_common(settings), "kernel": "auto"})
    device = torch.device(settings.device)
    settings = replace(settings, memory=_memory(settings, device))
    needs = estimated(engine, window=settings.max_length, device=device)
    row = _row_bytes(engine, settings)
    room = rows_that_fit(_limits(settings, weights), row, needs, states=bool(needs.pass_states))
    found: dict[str, Any] = {"weights": weights, "longest_request": row.longest, "rows": room.rows, "piece": room.piece}
    return found if settings.memory is None else {**found, "beside": said_of(room, needs)}


def _tensors(model: Any) -> "set[torch.Tensor]":
    from lapcli.runtime.configurations import Convertible

    return {*(model.tensors() if isinstance(model, Convertible) else (*model.parameters(), *model.buffers()))}


def _load(settings: EngineSettings, source: "ModelSource", device: "torch.device | None") -> Any:
    """The model, or the conversion whose base it is; without a device, its shapes."""
    import torch

    from lapcli.families.loading import load_model
    from lapcli.runtime.configurations import load_convertible
    from lapcli.runtime.engine import prefill_kernel

    dtype: torch.dtype = getattr(torch, settings.dtype)
    kernel = prefill_kernel(settings.kernel)
    where: dict[str, Any] = {"device": device} if device is not None else {"device": "cpu", "weights": "nowhere"}
    if settings.conversion is None:
        trusted = settings.trust_remote_code
        return load_model(source, dtype=dtype, kernel=kernel, trust_remote_code=trusted, **where)
    return load_convertible(
        settings.conversion,
        dtype=dtype,
        kernel=kernel,
        configurations=settings.configurations or None,
        offload=settings.offload,
        **where,
    )


def measure(batch: "Batch") -> "Measured":
    """What a policy wants to know of an engine before anything ran; nothing where there is nothing to choose."""
    from lapcli.serving.costs import prompt_seconds, rows_of_steps, split_cost, step_seconds
    from lapcli.serving.loop import Measured

    engine = batch.engine
    if len(engine.configurations) < 2:
        return Measured()
    first, last = engine.configurations[0].name, engine.configurations[-1].name
    rows, token = min(_MEASURED_ROWS, rows_of_steps(batch)), engine.vocabulary // 2
    tokens = min(batch.piece or batch.together, engine.max_length - 1)
    alike = [step_seconds(batch, [name] * rows, 4, token) for name in (first, last)]
    split = split_cost(batch, rows, sum(alike) / 2) if rows > 1 else 0.0
    measured = Measured(prompt_seconds(batch, [token] * tokens, first) / tokens, sum(alike) / 2, split)
    # Of what was measured nothing is counted.
    batch.mixed_steps = batch.set_back = 0
    return measured


if __name__ == "__main__":
    main()
