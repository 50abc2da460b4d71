"""Which configuration of a model a request gets: asked once for each, when it leaves the queue."""

from typing import NamedTuple, Protocol


class RequestFacts(NamedTuple):
    """What a decision may depend on, of the request.

    Attributes:
        prompt_tokens: of its prompt.
        max_tokens: of its answer, at most.
    """

    prompt_tokens: int
    max_tokens: int


class Load(NamedTuple):
    """What a decision may depend on, of the server.

    Attributes:
        active: requests in the engine.
        waiting: requests that wait for room.
        rows: requests that the engine has room for now.
    """

    active: int
    waiting: int
    rows: int


class Decision(NamedTuple):
    """What was decided.

    Attributes:
        configuration: the name of one that the engine has.
        reason: why, in a few words; it is logged.
    """

    configuration: str
    reason: str


class Policy(Protocol):
    """Decides for each request."""

    def choose(self, request: RequestFacts, load: Load) -> Decision:
        """The configuration of a request, which it keeps to its end."""
        ...


class OneConfiguration:
    """For models that come in one configuration.

    Args:
        name: of it.
    """

    def __init__(self, name: str = "base"):
        self.decision = Decision(name, "the only one")

    def choose(self, request: RequestFacts, load: Load) -> Decision:
        """The only one."""
        return self.decision
