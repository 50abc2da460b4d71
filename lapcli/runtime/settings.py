"""How a row is continued, what comes out of it, and which path computes it."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lapcli.errors import ModelError, UsageError

Reason = Literal["eos", "stop", "length", "full", "cancelled"]
"""Why a row ended: an end token, a stop string, as many tokens as asked for, no room for more, or somebody said so."""


@dataclass(frozen=True)
class GenerationSettings:
    """How one row is continued.

    Attributes:
        max_new_tokens: the most tokens.
        temperature: the logits' divisor; 0 takes the likeliest token.
        top_k: only the so many likeliest; 0 for all.
        top_p: only the likeliest that together have this probability; 1 for all.
        seed: of the row's draws.
        eos: token ids that end the row; they are counted and not shown.
        stop: texts that end the row; neither they nor what follows is shown. They need a tokenizer.
        logprobs: with each token come its log-probability and those of the so many likeliest; `None` for neither.

    Raises:
        UsageError: a value that makes no sense.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    eos: frozenset[int] = field(default_factory=frozenset)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check."""
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens}: at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature}: 0 (the likeliest token) or more, and finite")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k}: 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p}: above 0, and at most 1 (all)")
        if any(not text for text in self.stop):
            raise UsageError("--stop: an empty text ends every row before it begins")
        if self.logprobs is not None and self.logprobs < 0:
            raise UsageError(f"logprobs {self.logprobs}: 0 (of the token alone) or more")


class DecodePath(NamedTuple):
    """What runs a step.

    Attributes:
        name: `fused` (lapcli's fused steps), `library` (the library's forward pass over static states) or `eager` (the
            library's forward pass and its own cache, row by row).
        kernel: which implementation of the state's step, or of the attention's where nothing has a state.
        graph: whether CUDA graphs are replayed.
        reason: why it is not a faster one, or what is fused.
    """

    name: str
    kernel: str
    graph: bool
    reason: str

    @property
    def fast(self) -> bool:
        """Whether this is what the machine should give: fused steps of compiled kernels, replayed as graphs."""
        return self.graph and self.kernel == "triton" and self.name in ("fused", "library")

    def refuse_slow(self) -> None:
        """Refuse it where it is no fast one, for whoever asked for that.

        Raises:
            ModelError: it is not.
        """
        if not self.fast:
            raise ModelError(
                f"--require-fast: {self}",
                "use a CUDA device with triton and a model that has fused steps, or drop --require-fast",
            )

    def __str__(self) -> str:
        how = {"fused": "fused steps", "library": "the library's layers over static states"}.get(
            self.name, "the library's forward pass, row by row"
        )
        kernel = "" if self.name == "eager" else f", step kernel: {self.kernel}"
        return f"decoding: {how}{kernel}, {'CUDA graphs' if self.graph else 'no CUDA graphs'} ({self.reason})"


class TokenScores(NamedTuple):
    """How likely a token was, by the model's logits as they are: before temperature, `top_k` and `top_p`.

    Attributes:
        token: its id.
        logprob: its natural log-probability.
        top: ids and log-probabilities of the likeliest, as many as asked for, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """Something new of a row.

    Attributes:
        row: its number.
        tokens: token ids that came.
        text: what is new of its text; empty without a tokenizer, or while a character or a stop text is not whole.
        reason: why the row ended, with its last event; else `None`.
        scores: of each token, where the row's settings ask for them.
    """

    row: int
    tokens: tuple[int, ...]
    text: str = ""
    reason: Reason | None = None
    scores: tuple[TokenScores, ...] = ()
