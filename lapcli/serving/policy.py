"""Which configuration of a model a request gets, and which running one is handed over to another.

A policy is asked when a request leaves the queue, and again while it runs. It answers from its arguments alone, so that
a server and a simulation ask the same object the same way.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

REVIEW_SECONDS = 0.1
"""Between two reviews of what runs, at least."""


class Configuration(NamedTuple):
    """A prefix of the order in which a model's layers were converted; the others are attention.

    Attributes:
        name: `3-of-30`, say.
        converted: layers that keep a state.
        layers: all that can be converted.
        fixed_bytes: of a row, whatever its length.
        token_bytes: of a row, for each of its tokens.
        increase: of perplexity over the unconverted model, as a share, measured at conversion.
    """

    name: str
    converted: int
    layers: int
    fixed_bytes: int = 0
    token_bytes: int = 0
    increase: float = 0.0

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Configuration":
        """From what the engine says of one."""
        return cls(
            document["name"],
            int(document["converted"]),
            int(document["layers"]),
            int(document["fixed_bytes"]),
            int(document["token_bytes"]),
            float(document["quality"]["increase"]),
        )

    def document(self) -> dict[str, Any]:
        """As the engine says it."""
        *fields, increase = self
        names = self._fields[:-1]
        return {**dict(zip(names, fields, strict=True)), "quality": {"increase": increase}}

    @property
    def share(self) -> float:
        """Of the layers that are converted."""
        return self.converted / self.layers if self.layers else 0.0

    def row_bytes(self, tokens: int) -> int:
        """Bytes of a row that has seen so many tokens."""
        return self.fixed_bytes + self.token_bytes * tokens


class RequestFacts(NamedTuple):
    """What a decision may depend on, of the request.

    Attributes:
        prompt_tokens: of its prompt.
        max_tokens: of its answer, at most.
    """

    prompt_tokens: int
    max_tokens: int


class RunningFacts(NamedTuple):
    """What a decision may depend on, of a request in the engine.

    Attributes:
        name: of the request.
        configuration: that it runs as.
        tokens: of its prompt and of what it has said.
        left: tokens that it may still say, at most.
        waits: whether its tokens have to go through the model anyway, so that another configuration costs nothing.
        switching: whether it is being handed over.
    """

    name: str
    configuration: str
    tokens: int
    left: int
    waits: bool = False
    switching: bool = False


class Load(NamedTuple):
    """What a decision may depend on, of the server.

    Attributes:
        active: requests in the engine.
        waiting: requests that wait for room.
        rows: requests that the engine has room for now.
        total_bytes: that rows may take; 0 where nothing limits them.
        free_bytes: of these.
        prefill_seconds: measured, for each token that goes through the model as a prompt.
        step_seconds: measured, of a step.
        configurations: that the engine has, by how much they convert.
    """

    active: int
    waiting: int
    rows: int
    total_bytes: int = 0
    free_bytes: int = 0
    prefill_seconds: float = 0.0
    step_seconds: float = 0.0
    configurations: tuple[Configuration, ...] = ()

    @property
    def used(self) -> float:
        """Share of the bytes that rows take."""
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class Decision(NamedTuple):
    """What was decided.

    Attributes:
        configuration: the name of one that the engine has.
        reason: why, in one of few phrases: it is logged, and a label of metrics.
    """

    configuration: str
    reason: str


class Switch(NamedTuple):
    """A running request that is to go on as another configuration.

    Attributes:
        name: of the request.
        configuration: the name of one that the engine has.
        reason: as in `Decision`.
        replay_seconds: what handing it over takes of the engine, as far as is known.
        frees_bytes: what it then takes less; below 0 what it takes more.
    """

    name: str
    configuration: str
    reason: str
    replay_seconds: float
    frees_bytes: int


class Policy(Protocol):
    """Decides for each request, and later again."""

    def choose(self, request: RequestFacts, load: Load) -> Decision:
        """The configuration that a request begins as."""
        ...

    def review(self, running: Sequence[RunningFacts], load: Load) -> list[Switch]:
        """The running requests that are better handed over now."""
        ...


ONLY = "base"
"""What the configuration of a model is called that comes in one; it says nothing of the model."""


class OneConfiguration:
    """For models that come in one configuration.

    Args:
        name: of it.
        reason: why there is no choice.
    """

    def __init__(self, name: str = ONLY, reason: str = "the only one"):
        self.decision = Decision(name, reason)

    def choose(self, request: RequestFacts, load: Load) -> Decision:
        """The only one."""
        return self.decision

    def review(self, running: Sequence[RunningFacts], load: Load) -> list[Switch]:
        """Nothing: there is no other."""
        return []
