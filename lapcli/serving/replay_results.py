"""What came of a replay: latencies by their percentiles, throughput, and what was refused."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lapcli.serving.policy import Configuration

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


def adapting_figures(
    configurations: Sequence[Configuration],
    *,
    tokens_as: Mapping[str, float],
    began_as: Mapping[str, float],
    switches: Mapping[str, float],
    replays: float,
    switch_tokens: float,
    switch_seconds: float,
    steps: float,
    mixed_steps: float,
    mixed_seconds: float,
    split_seconds: float,
    set_back: float,
    peak_bytes: float,
    total_bytes: float,
) -> dict[str, Any]:
    """What converting cost and how much of it was done.

    The quality proxy is the increase of perplexity that was measured of the configuration that said a token, as a mean
    over all tokens of answers.

    Args:
        configurations: that there were.
        tokens_as: tokens of answers, by the name of the configuration that said them.
        began_as: requests, by that they began as.
        switches: requests in the engine that were handed over, by the reason.
        replays: of these, those that had begun, and had to replay their tokens.
        switch_tokens: that were replayed.
        switch_seconds: from orders to replay until these were done, together.
        steps: of the engine.
        mixed_steps: of rows of several configurations.
        mixed_seconds: that these took.
        split_seconds: of these, for layers that ran in parts, by the cost of one that was measured.
        set_back: rows that lost their place for want of memory.
        peak_bytes: that keys and values of rows took, at most.
        total_bytes: that they might have taken.
    """
    by_name = {each.name: each for each in configurations}
    said = sum(tokens_as.values())

    def mean(of: Callable[[Configuration], float]) -> float | None:
        return sum(of(by_name[name]) * tokens for name, tokens in tokens_as.items()) / said if said else None

    return {
        "share_converted": mean(lambda each: each.share),
        "ppl_increase": mean(lambda each: each.increase),
        "tokens_as": dict(tokens_as),
        "began_as": dict(began_as),
        "switches": dict(switches),
        "replays": replays,
        "switch_tokens": switch_tokens,
        "switch_mean_seconds": switch_seconds / replays if replays else None,
        "steps": steps,
        "mixed_steps": mixed_steps,
        # A prompt went in beside every one of them where no time is known.
        "mixed_mean_seconds": mixed_seconds / mixed_steps if mixed_steps and mixed_seconds else None,
        "split_mean_seconds": split_seconds / mixed_steps if mixed_steps else None,
        "split_percent_of_mixed": 100 * split_seconds / mixed_seconds if mixed_seconds else None,
        "set_back": set_back,
        "rows_peak_bytes": peak_bytes,
        "rows_total_bytes": total_bytes,
    }


def compared(modes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """What the other modes took, over what the last one took: above 1 it is the better.

    Args:
        modes: figures of each, the one that is compared last.
    """
    *others, last = modes
    found: dict[str, dict[str, float | None]] = {}
    for name in others:
        found[f"{name} / {last}"] = {
            figure: _ratio(modes[name][figure], modes[last][figure], column)
            for figure, column in (
                ("normalised_seconds", "mean"),
                ("first_token_seconds", "p95"),
                ("inter_token_seconds", "p95"),
                ("answer_seconds", "p99"),
                ("rows_peak_bytes", None),
            )
        }
    return found


def _ratio(above: Any, under: Any, column: str | None) -> float | None:
    if column is not None:
        above, under = (None if each is None else each[column] for each in (above, under))
    return above / under if above is not None and under else None
