"""Numbers with standard errors, and differences of paired numbers.

Each estimate keeps the *influence* of every item (a document, a window, a prompt): how far that item moves the
value, to first order; they sum to zero. With n items the standard error is `sqrt(n / (n - 1) * sum(influence^2))`,
which is the usual one for a mean, the delta method for a perplexity, and the jackknife for anything else. Two models
measured on the same items have influences item by item, so that the standard error of their difference comes from
the differences of the influences, and what both find hard cancels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

Method = Literal["accuracy", "mean", "delta", "jackknife"]

MAX_JACKKNIFE_BLOCKS = 200
_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A value and how sure it is.

    Attributes:
        value: the estimate.
        stderr: its standard error; `None` with fewer than two items, or where lm-eval gives no items.
        n: items it was measured on.
        method: how the standard error was found: `accuracy` is Wilson's interval at one standard deviation (it does
            not vanish at 0 and 1), the others are as the module says.
        interval: 95 %: Wilson's for an accuracy, else `None`.
        influences: one a item, or a block of items for a jackknife; empty where there are no items.
    """

    value: float
    stderr: float | None
    n: int
    method: Method
    interval: tuple[float, float] | None = None
    influences: tuple[float, ...] = ()


@dataclass(frozen=True)
class Gap:
    """What one estimate has more than another.

    Attributes:
        value: other minus base.
        stderr: its standard error, `None` where one of the two has none.
        paired: whether it was taken item by item.
    """

    value: float
    stderr: float | None
    paired: bool


def accuracy(hits: Sequence[bool]) -> Estimate:
    """The share of hits; at least one item."""
    n = len(hits)
    share = sum(hits) / n
    low, high = _wilson(share, n, 1.0)
    return Estimate(
        value=share,
        stderr=(high - low) / 2,
        n=n,
        method="accuracy",
        interval=_wilson(share, n, _Z95),
        influences=tuple((hit - share) / n for hit in hits),
    )


def mean(values: Sequence[float]) -> Estimate:
    """The mean, with the standard error that lm-eval gives a mean."""
    n = len(values)
    centre = math.fsum(values) / n
    influences = tuple((value - centre) / n for value in values)
    return Estimate(value=centre, stderr=_stderr(influences), n=n, method="mean", influences=influences)


def perplexity(log_likelihoods: Sequence[float], weights: Sequence[float]) -> Estimate:
    """`exp(-sum(log-likelihoods) / sum(weights))`, weights being tokens, words, bytes or documents of each item."""
    rate, influences = _ratio(log_likelihoods, weights)
    value = math.exp(-rate) if -rate < 700 else math.inf
    scaled = tuple(-value * influence for influence in influences) if math.isfinite(value) else ()
    return Estimate(value=value, stderr=_stderr(scaled), n=len(weights), method="delta", influences=scaled)


def bits(log_likelihoods: Sequence[float], weights: Sequence[float]) -> Estimate:
    """`-sum(log-likelihoods) / sum(weights) / ln 2`: bits per byte, where the weights are bytes."""
    rate, influences = _ratio(log_likelihoods, weights)
    scaled = tuple(-influence / math.log(2) for influence in influences)
    return Estimate(
        value=-rate / math.log(2), stderr=_stderr(scaled), n=len(weights), method="delta", influences=scaled
    )


def jackknife(items: Sequence[Any], value: Callable[[list[Any]], float]) -> Estimate:
    """Any other statistic, leaving out blocks of items one at a time (single items, while there are few)."""
    n = len(items)
    whole = float(value(list(items)))
    blocks = min(n, MAX_JACKKNIFE_BLOCKS)
    if blocks < 2:
        return Estimate(value=whole, stderr=None, n=n, method="jackknife")
    edges = [n * block // blocks for block in range(blocks + 1)]
    without = [float(value([*items[:start], *items[end:]])) for start, end in pairwise(edges)]
    centre = math.fsum(without) / blocks
    influences = tuple((centre - part) * (blocks - 1) / blocks for part in without)
    return Estimate(value=whole, stderr=_stderr(influences), n=n, method="jackknife", influences=influences)


def average(parts: Sequence[Estimate], weights: Sequence[float] | None = None) -> Estimate:
    """The mean of independent estimates, such as those of several tasks.

    Its standard error is the root of the weighted sum of their variances (of `n` equal weights: the root of the summed
    variances, over `n`); there is none where a part has none. The influences of the parts are scaled so that they give
    just this, and so that two such means of the same items can be compared item by item.

    Args:
        parts: the estimates, at least one.
        weights: of each, of any scale; `None`: all equal.
    """
    given = weights or [1.0] * len(parts)
    shares = [weight / math.fsum(given) for weight in given]
    value = math.fsum(share * part.value for share, part in zip(shares, parts, strict=True))
    n = sum(part.n for part in parts)
    if any(part.stderr is None for part in parts):
        return Estimate(value=value, stderr=None, n=n, method="mean")
    errors = [share * part.stderr for share, part in zip(shares, parts, strict=True) if part.stderr is not None]
    count = sum(len(part.influences) for part in parts)
    influences: list[float] = []
    if all(len(part.influences) == part.n > 1 for part in parts):
        for share, part in zip(shares, parts, strict=True):
            # Each part has its own n / (n - 1); pooled they get that of all.
            scale = share * math.sqrt(part.n / (part.n - 1) * (count - 1) / count)
            influences += [scale * influence for influence in part.influences]
    return Estimate(value=value, stderr=math.hypot(*errors), n=n, method="mean", influences=tuple(influences))


def gap(base: Estimate, other: Estimate) -> Gap:
    """What `other` has more than `base`; paired when both hold influences of the same items.

    Whether they do hold the same items is for the caller to know (`results.compare`). Two accuracies use the paired
    interval of Agresti and Min (2005, half a count added to each cell), which does not vanish where both models agree.
    """
    value = other.value - base.value
    n = len(base.influences)
    if n > 1 and n == len(other.influences) and base.n == other.n:
        if base.method == other.method == "accuracy":
            return Gap(value, _agresti_min(base, other), paired=True)
        pairs = zip(base.influences, other.influences, strict=True)
        return Gap(value, _stderr([right - left for left, right in pairs]), paired=True)
    if base.stderr is None or other.stderr is None:
        return Gap(value, None, paired=False)
    return Gap(value, math.hypot(base.stderr, other.stderr), paired=False)


def _ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, list[float]]:
    total = math.fsum(denominators)
    rate = math.fsum(numerators) / total
    return rate, [(top - rate * bottom) / total for top, bottom in zip(numerators, denominators, strict=True)]


def _stderr(influences: Sequence[float]) -> float | None:
    n = len(influences)
    return math.sqrt(n / (n - 1) * math.fsum(part * part for part in influences)) if n > 1 else None


def _wilson(share: float, n: int, z: float) -> tuple[float, float]:
    spread = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    middle = share + z * z / (2 * n)
    scale = 1 + z * z / n
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def _agresti_min(base: Estimate, other: Estimate) -> float:
    n = base.n
    moves = [
        round((right * n + other.value) - (left * n + base.value))
        for left, right in zip(base.influences, other.influences, strict=True)
    ]
    gained, lost = moves.count(1), moves.count(-1)
    return math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / (n + 2)) / (n + 2)
