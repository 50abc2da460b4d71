"""What came of a replay: latencies by their percentiles, throughput, and what was refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 95, 99)


@dataclass
class Outcome:
    """What came of one request. Times are seconds after the replay began.

    Attributes:
        number: of the request.
        due: when it was to be sent.
        prompt: tokens.
        wanted: tokens of the answer, as the trace has it.
        sent: when it was sent.
        first: when its first token came; `None` where none did.
        end: when its last one came.
        tokens: of the answer.
        gaps: seconds between what came and what came before.
        status: of HTTP; 0 where there was no answer at all.
        error: what went wrong; `None` for nothing.
    """

    number: int
    due: float
    prompt: int
    wanted: int
    sent: float = 0.0
    first: float | None = None
    end: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    status: int = 0
    error: str | None = None

    @property
    def done(self) -> bool:
        """Whether the whole answer came."""
        return self.error is None and self.tokens > 0


def summary(outcomes: Sequence[Outcome], *, mode: str) -> dict[str, Any]:
    """The figures of a replay.

    Latencies count from when a request was due, not from when a busy client sent it. The normalised latency is that of
    a whole answer over its tokens, as arXiv 2506.09316 has it (table 4).

    Args:
        outcomes: of all requests.
        mode: what served them.
    """
    done = [each for each in outcomes if each.done]
    seconds = max((each.end for each in outcomes), default=0.0)
    tokens = sum(each.tokens for each in done)
    errors: dict[str, int] = {}
    for each in outcomes:
        if each.error is not None:
            kind = str(each.status or each.error)
            errors[kind] = errors.get(kind, 0) + 1
    refused = sum(each.status in (429, 503) for each in outcomes)
    return {
        "mode": mode,
        "requests": len(outcomes),
        "done": len(done),
        "refused": refused,
        "failed": len(outcomes) - len(done) - refused,
        "errors": errors,
        "seconds": seconds,
        "prompt_tokens": sum(each.prompt for each in done),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else None,
        "requests_per_second": len(done) / seconds if seconds else None,
        "normalised_seconds": spread([(each.end - each.due) / each.tokens for each in done]),
        "first_token_seconds": spread([each.first - each.due for each in done if each.first is not None]),
        "inter_token_seconds": spread([gap for each in done for gap in each.gaps]),
        "answer_seconds": spread([each.end - each.due for each in done]),
        "latest_send_seconds": max((each.sent - each.due for each in outcomes), default=0.0),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and the largest; `None` of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    found = {"mean": math.fsum(ordered) / len(ordered)}
    for percent in PERCENTILES:
        # The least value that so many percent do not exceed.
        found[f"p{percent}"] = ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
    return {**found, "max": ordered[-1]}
