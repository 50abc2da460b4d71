"""The engine process: `python -m lapcli.serving.worker FD`, with a socket to the front under that descriptor."""

import gc
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from lapcli.errors import LapcliError, ModelError
from lapcli.serving.protocol import Inbox, Message, encode
from lapcli.serving.settings import DEFAULT_CPU_ROWS, MOST_ROWS, EngineSettings

if TYPE_CHECKING:
    import torch

    from lapcli.runtime import Batch

_SHARE = 0.9
"""Of a GPU's free memory that is taken where nobody says how much."""
_RESERVE = 0.1
"""Of that for activations and graphs."""
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

    # The libraries' million objects would let Python look for garbage among the old ones far too rarely.
    gc.freeze()
    loop = EngineLoop(batch, take, send)
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

    from lapcli.families.loading import load_model, load_tokenizer, resolve_model
    from lapcli.runtime import Batch, Engine, GenerationSettings
    from lapcli.runtime.engine import prefill_kernel

    source = resolve_model(settings.model)
    device = torch.device(settings.device)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    if settings.memory is not None and device.type == "cuda":
        # What activations take counts, too; what goes beyond it fails here, not in another program.
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings.memory / whole), device)
    trusted = settings.trust_remote_code
    tokenizer = load_tokenizer(source, trust_remote_code=trusted)
    model = load_model(
        source, device=device, dtype=dtype, kernel=prefill_kernel(settings.kernel), trust_remote_code=trusted
    )
    room: dict[str, Any] = {
        "max_length": settings.max_length,
        "kernel": settings.kernel,
        "state_dtype": getattr(torch, settings.state_dtype),
    }
    # An engine of one row says what one takes.
    engine = Engine(model, max_rows=1, **room)
    taken = engine.nbytes()
    # The pools of attention have a row more, which takes what padding writes.
    spare = taken["attention"] // 2
    row = taken["states"] + taken["convolutions"] + spare
    rows = rows_that_fit(settings, device, taken["weights"] + spare, row)
    if rows > 1:
        engine = Engine(model, max_rows=rows, **room)
    piece = settings.piece or (_GPU_PIECE if device.type == "cuda" else _CPU_PIECE)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= rows]
    for way in (
        GenerationSettings(),
        GenerationSettings(temperature=1.0),
        GenerationSettings(temperature=1.0, top_p=0.9),
    ):
        engine.warm_up(sorted({*sizes, rows}), way)
    facts = {
        "max_length": settings.max_length,
        "rows": rows,
        "vocabulary": engine.vocabulary,
        "path": str(engine.path),
        "bytes": engine.nbytes(),
        "row_bytes": row,
        "piece": piece,
    }
    return Batch(engine, tokenizer, together=piece, piece=piece), facts


def rows_that_fit(settings: EngineSettings, device: "torch.device", weights: int, row: int) -> int:
    """How many rows there is memory for.

    Args:
        settings: that say how much memory, and how many rows are wanted.
        device: whose memory it is where they do not.
        weights: bytes of them, and of all else that does not depend on the rows.
        row: bytes of a row.

    Raises:
        ModelError: not for one, or not for as many as are wanted.
    """
    memory = settings.memory
    if memory is None and device.type == "cuda":
        import torch

        # Weights are loaded, so they are no longer among what is free.
        memory = int(_SHARE * torch.cuda.mem_get_info(device)[0]) + weights
    if memory is None:
        return settings.max_rows or DEFAULT_CPU_ROWS
    left = int((1 - _RESERVE) * (memory - weights))
    fit = MOST_ROWS if row == 0 else left // row
    if settings.max_rows is not None and settings.max_rows <= fit:
        return settings.max_rows
    if fit < 1 or settings.max_rows is not None:
        raise ModelError(
            f"{memory} bytes hold {weights} of weights and {max(fit, 0)} requests of {row} bytes each"
            + (f", not {settings.max_rows}" if settings.max_rows else ""),
            "raise --memory, or lower --max-rows, --max-length or --state-dtype",
        )
    return min(fit, MOST_ROWS)


if __name__ == "__main__":
    main()
