"""What the engine is made for, and how much of everything a client may send."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lapcli.errors import UsageError

DEFAULT_CPU_ROWS = 16
"""Rows at once where no GPU's memory sets a number: a CPU's steps get slower with every row."""
MOST_ROWS = 256
"""Rows at once where memory would hold more and nobody asked for them: the largest step that has a CUDA graph."""


@dataclass(frozen=True)
class EngineSettings:
    """What the engine process is told.

    Attributes:
        model: as the command line takes it.
        device: `cpu`, `cuda`, `cuda:1`, ….
        dtype: a torch dtype's name.
        kernel: see `lapcli.runtime.engine.KERNELS`.
        state_dtype: of recurrent states, a torch dtype's name.
        max_length: tokens of a request, prompt and answer.
        max_rows: requests decoded together; `None` for what memory holds.
        memory: bytes that weights, states, keys and values may take; `None` for most of what is free on a GPU.
        piece: prompt tokens between two steps, at most; `None` for what suits the device.
        require_fast: whether an engine that decodes in PyTorch, or without graphs, is an error.
        trust_remote_code: whether code in the model's directory may run.
        conversion: the directory of a conversion, whose teacher `model` is; `None` for a model by itself.
        configurations: how many of the conversion's layers, in their order, are converted in each of the configurations
            that requests may run as.
        offload: whether those parts of layers that most requests do without lie in the host's memory.
    """

    model: str
    device: str
    dtype: str
    kernel: str = "auto"
    state_dtype: str = "float32"
    max_length: int = 4096
    max_rows: int | None = None
    memory: int | None = None
    piece: int | None = None
    require_fast: bool = False
    trust_remote_code: bool = False
    conversion: str | None = None
    configurations: Sequence[int] = ()
    offload: bool = False

    def document(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """How much of everything a client may send, and how long it may take.

    Attributes:
        body_bytes: of a request.
        prompts: of one request.
        messages: of a chat.
        stops: stop texts of a request.
        stop_characters: of one stop text.
        logprobs: likeliest tokens that come with a token.
        waiting: requests that wait for room.
        waiting_tokens: prompt tokens of them.
        per_client: requests of one key, or of one address where there are no keys, that wait or are answered.
        connections: at once.
        header_seconds: until the first line and the headers of a request are there.
        body_seconds: until its body is there.
        send_seconds: until a client has taken in a piece of an answer.
        drain_seconds: for requests under way after SIGTERM.
        engine_seconds: without a sign of life until an engine with work is taken for hung.
    """

    body_bytes: int = 4 * 2**20
    prompts: int = 64
    messages: int = 1024
    stops: int = 16
    stop_characters: int = 256
    logprobs: int = 20
    waiting: int = 1024
    waiting_tokens: int = 16 * 2**20
    per_client: int = 256
    connections: int = 4096
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    send_seconds: float = 60.0
    drain_seconds: float = 30.0
    engine_seconds: float = 300.0

    def __post_init__(self) -> None:
        """Check."""
        for field in fields(self):
            value = getattr(self, field.name)
            # Nobody has to be waited for; everything else needs one of it.
            if value < (0 if field.name in ("waiting", "drain_seconds") else 1e-3):
                raise UsageError(f"--{field.name.replace('_', '-')} {value}: too little to serve anything")
