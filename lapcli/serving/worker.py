"""The engine process: `python -m lapcli.serving.worker FD`, with a socket to the front under that descriptor."""

import gc
import math
import os
import signal
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lapcli.errors import LapcliError, ModelError
from lapcli.serving.protocol import Inbox, Message, encode
from lapcli.serving.settings import DEFAULT_CPU_ROWS, MOST_ROWS, EngineSettings

if TYPE_CHECKING:
    import torch

    from lapcli.families.source import ModelSource
    from lapcli.runtime import Batch, Engine
    from lapcli.serving.loop import Measured

_SHARE = 0.9
"""Of a GPU's free memory that is taken where nobody says how much."""
_RESERVE = 0.1
"""Of that for activations and graphs."""
_USUAL = 8
"""Of a request's longest length, the part that a request is taken to have when slots are counted."""
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

    try:
        batch, facts = prepare(EngineSettings(**begin["settings"]))
    except LapcliError as error:
        send({"op": "fatal", "message": error.message, "hint": error.hint})
        return
    from lapcli.serving.loop import EngineLoop

    measured = measure(batch)
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
    """Load the model and make room for rows.

    Returns:
        Where rows are decoded, and what the front should know.

    Raises:
        LapcliError: the model cannot be loaded, or memory holds no row of it.
    """
    import torch

    from lapcli.families.loading import load_tokenizer, resolve_model
    from lapcli.runtime import Batch, Engine
    from lapcli.serving.costs import told_of

    source = resolve_model(settings.model)
    device = torch.device(settings.device)
    if settings.memory is not None and device.type == "cuda":
        # What activations take counts, too; what goes beyond it fails here, not in another program.
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings.memory / whole), device)
    tokenizer = load_tokenizer(source, trust_remote_code=settings.trust_remote_code)
    model = _load(settings, source, device)
    room: dict[str, Any] = {
        "max_length": settings.max_length,
        "kernel": settings.kernel,
        "state_dtype": getattr(torch, settings.state_dtype),
    }
    # An engine of one row says what rows take.
    engine = Engine(model, max_rows=1, **room)
    rows, kv_bytes = _rows_of(engine, settings, device, engine.nbytes()["weights"])
    if rows > 1:
        engine = Engine(model, max_rows=rows, kv_bytes=kv_bytes, **room)
    piece = settings.piece or (_GPU_PIECE if device.type == "cuda" else _CPU_PIECE)
    if device.type == "cuda":
        warm_prompts(engine, piece)
    engine.warm_up_for_all()
    facts = {
        "max_length": settings.max_length,
        "rows": rows,
        "vocabulary": engine.vocabulary,
        "path": str(engine.path),
        "bytes": engine.nbytes(),
        "row_bytes": engine.row_bytes(settings.max_length),
        "piece": piece,
        "configurations": [each.document() for each in told_of(engine)],
    }
    return Batch(engine, tokenizer, together=piece, piece=piece), facts


def warm_prompts(engine: "Engine", piece: int) -> None:
    """Let prompts' kernels be compiled, and tuned, before a request waits for it: short ones and whole pieces."""
    longest = max(1, min(piece, engine.max_length - 1))
    for name in {engine.configurations[0].name, engine.configurations[-1].name}:
        for tokens in {1, min(200, longest), longest}:
            found = engine.prefill([engine.vocabulary // 2] * tokens, configuration=name)
            engine.release(found.slot)


def planned(settings: EngineSettings) -> dict[str, int]:
    """What `prepare` would make room for, by shapes alone: nothing is loaded.

    Returns:
        Bytes of `weights` and of `longest_request`, and `rows` together.

    Raises:
        LapcliError: memory holds no request, or not as many as are wanted; the model cannot be decoded here.
    """
    import torch

    from lapcli.families.loading import resolve_model
    from lapcli.runtime import Engine
    from lapcli.runtime.configurations import Convertible

    model = _load(replace(settings, offload=False, kernel="auto"), resolve_model(settings.model), None)
    weights = sum(tensor.nbytes for tensor in _tensors(model))
    if settings.offload and isinstance(model, Convertible):
        # Two places on the device are left of all that may be states.
        each = [sum(tensor.nbytes for tensor in module.parameters()) for module in model.attention.values()]
        weights -= sum(sorted(each)[:-2])
    state_dtype = getattr(torch, settings.state_dtype)
    engine = Engine(model, max_rows=1, max_length=settings.max_length, state_dtype=state_dtype)
    device = torch.device(settings.device)
    if settings.memory is None and device.type == "cuda":
        settings = replace(settings, memory=int(_SHARE * torch.cuda.mem_get_info(device)[0]))
    rows, _ = _rows_of(engine, settings, device, weights)
    longest = max(engine.row_bytes(settings.max_length, each.name) for each in engine.configurations)
    return {"weights": weights, "longest_request": longest, "rows": rows}


def _tensors(model: Any) -> "set[torch.Tensor]":
    from lapcli.runtime.configurations import Convertible

    return {*(model.tensors() if isinstance(model, Convertible) else (*model.parameters(), *model.buffers()))}


def _rows_of(
    engine: "Engine", settings: EngineSettings, device: "torch.device", weights: int
) -> tuple[int, int | None]:
    """Rows, and bytes of their pages, as `rows_that_fit` says by an engine of one row."""
    weights += beside_rows(engine, settings.max_length, device)
    usual, longest = (
        [engine.row_bytes(tokens, each.name) for each in engine.configurations]
        for tokens in (usual_length(settings.max_length), settings.max_length)
    )
    return rows_that_fit(settings, device, weights, slot=engine.slot_bytes, usual=min(usual), longest=max(longest))


def beside_rows(engine: "Engine", length: int, device: "torch.device") -> int:
    """Bytes that a step may take beside weights and what rows have, on a GPU, where memory is kept to the byte.

    A prompt that goes through in pieces lies in a cache of its own until it is in its pages; and where tokens are drawn
    there are scores of many kinds for a while.
    """
    from lapcli.runtime.sampling import BYTES_A_SCORE, rows_together

    if device.type != "cuda":
        return 0
    prompt = max(engine.row_bytes(length, each.name) for each in engine.configurations)
    scores = min(MOST_ROWS, rows_together(engine.vocabulary)) * engine.vocabulary * BYTES_A_SCORE
    # One set of logits for all graphs.
    return prompt + scores + MOST_ROWS * engine.vocabulary * engine.dtype.itemsize


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


def usual_length(longest: int) -> int:
    """Tokens that a request is taken to have when rows are counted, by the most that one may have."""
    return longest // _USUAL


def rows_that_fit(
    settings: EngineSettings, device: "torch.device", weights: int, *, slot: int, usual: int, longest: int
) -> tuple[int, int | None]:
    """How many rows there is memory for, and for how many bytes of keys and values.

    There are as many slots as there would be rows if each had an eighth of the longest length; pages get all the rest,
    and one row of full length has room in any case.

    Args:
        settings: that say how much memory, and how many rows are wanted.
        device: whose memory it is where they do not.
        weights: bytes of them, and of all else that does not depend on the rows.
        slot: bytes of a row whatever its length, which there are for each slot.
        usual: bytes of a row of the usual length, in the configuration where they are fewest.
        longest: bytes of a row of the longest length, where they are most.

    Returns:
        Rows, and bytes; `None` for as many as all rows at full length take.

    Raises:
        ModelError: not for one, or not for as many as are wanted.
    """
    memory = settings.memory
    if memory is None and device.type == "cuda":
        import torch

        # Weights are loaded, so they are no longer among what is free.
        memory = int(_SHARE * torch.cuda.mem_get_info(device)[0]) + weights
    if memory is None:
        return settings.max_rows or DEFAULT_CPU_ROWS, None
    left = int((1 - _RESERVE) * (memory - weights))
    most = math.inf if slot == 0 else (left - longest + slot) // slot
    if longest > left or most < (settings.max_rows or 1):
        others = (settings.max_rows or 1) - 1
        each = f", and each of {others} others {slot} at least, together {longest + others * slot}" if others else ""
        enough = weights + math.ceil((longest + others * slot) / (1 - _RESERVE))
        raise ModelError(
            f"{memory} bytes hold {weights} of weights, a tenth of the rest is for activations, and that leaves "
            f"{max(left, 0)} for requests; the longest takes {longest}{each}",
            f"raise --memory to {enough}B at least, or lower --max-rows or --max-length"
            + (" (lapcli serve: or --state-dtype)" if slot else ""),
        )
    rows = settings.max_rows or max(1, int(min(MOST_ROWS, most, left // usual if usual else MOST_ROWS)))
    return rows, left - rows * slot


if __name__ == "__main__":
    main()
