"""Every selector, and the one function that the selection stage calls per layer."""

import difflib
import math
from dataclasses import dataclass, fields
from typing import get_args

import numpy as np
from torch import Tensor

from lapcli.errors import DataError, UsageError
from lapcli.selectors import drrqr, grad, l1, pca, rand, s_wanda
from lapcli.selectors.base import HeadStatistics, Request, Rotation, ScoreFrom, Selection, SelectorFunction


@dataclass(frozen=True)
class Selector:
    """One way to choose channels.

    Attributes:
        name: as typed after `--method`.
        summary: one line for `lapcli list selectors`.
        source: paper and place.
        per_side: statistics of keys and of queries, without their ending: "gram" stands for `gram_key`, `gram_query`.
        fn: statistics and request in, selection out.
        rotates: whether it keeps directions, which mix channels, and not channels: its result is a `Rotation`.
        experimental: whether it is for comparison only, and its results may change.
    """

    name: str
    summary: str
    source: str
    per_side: tuple[str, ...]
    fn: SelectorFunction
    rotates: bool = False
    experimental: bool = False

    def needs(self, score_from: ScoreFrom) -> frozenset[str]:
        """Attributes of `HeadStatistics` that it reads."""
        request = Request(kept_width=1, score_from=score_from)
        return frozenset(name for stem in self.per_side for name in request.sides(stem))


SELECTORS: dict[str, Selector] = {
    "drrqr": Selector(
        name="drrqr",
        summary="strong rank-revealing QR of keys and queries: channels that span them, well conditioned",
        source="arXiv 2602.04852, Sec. 3.4, Algorithm 2; Gu and Eisenstat (1996), Algorithm 4",
        per_side=("gram",),
        fn=drrqr.select,
    ),
    "grad": Selector(
        name="grad",
        summary="first-order sensitivity of the loss to the projection weights",
        source="arXiv 2602.04852, Sec. 3.4",
        per_side=("saliency",),
        fn=grad.select,
    ),
    "s-wanda": Selector(
        name="s-wanda",
        summary="absolute projection weights times the norms of their inputs",
        source="arXiv 2602.04852, Sec. 3.4",
        per_side=("wanda",),
        fn=s_wanda.select,
    ),
    "l1": Selector(
        name="l1",
        summary="absolute projection weights; from queries alone a strong control",
        source="arXiv 2602.04852, Sec. 3.4, Table 16",
        per_side=("magnitude",),
        fn=l1.select,
    ),
    "rand": Selector(
        name="rand",
        summary="random channels, from a seed: the control",
        source="arXiv 2602.04852, Sec. 3.4",
        per_side=(),
        fn=rand.select,
    ),
    "pca": Selector(
        name="pca",
        summary="experimental: no channels but directions of largest variance; breaks filters and SiLU, the paper's "
        "counter-example",
        source="arXiv 2602.04852, App. B.3, Tables 14-15",
        per_side=("gram",),
        fn=pca.select,
        rotates=True,
        experimental=True,
    ),
}

CHANNEL_SELECTORS = tuple(name for name, found in SELECTORS.items() if not found.rotates)
"""Those that keep channels as they are, and whose choices can be compared with each other."""

_REMEDIES = {
    "gram": "run `lapcli calibrate` again",
    "saliency": "extend the calibration with `lapcli calibrate --grad`",
    "magnitude": "run `lapcli calibrate` again",
    "wanda": "run `lapcli calibrate` again",
}


def selector(method: str) -> Selector:
    """The selector of a name.

    Raises:
        UsageError: there is none; the nearest is named.
    """
    if method in SELECTORS:
        return SELECTORS[method]
    near = difflib.get_close_matches(method.lower(), SELECTORS, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"there is no selector {method!r}", f"{meant}known: {', '.join(SELECTORS)}")


def select_layer(
    method: str,
    statistics: HeadStatistics,
    kept_width: int,
    score_from: ScoreFrom = "both",
    f: float = 1.5,
    seed: int = 0,
    layer: int = 0,
) -> Selection | Rotation:
    """Choose the channels (of `pca`: the directions) that one layer keeps, the same way in every key head.

    Args:
        method: a name in `SELECTORS`.
        statistics: of this layer; what `SELECTORS[method].needs(score_from)` names must be there.
        kept_width: K', 1..K.
        score_from: whether keys, queries or both decide.
        f: tolerance of the strong rank-revealing QR, at least 1.
        seed: of the random selector, not negative.
        layer: number of the layer, for the random selector and for messages.

    Raises:
        UsageError: the method, `score_from`, f, the seed or the kept width is not one that can be used.
        DataError: a statistic is missing, holds NaN or infinity, does not fit the others, or is no Gram matrix.
    """
    chosen = selector(method)
    if score_from not in get_args(ScoreFrom):
        raise UsageError(f"--score-from {score_from!r}", f"pass one of {', '.join(get_args(ScoreFrom))}")
    if not 1 <= f < math.inf:
        raise UsageError(f"--f {f:g}: the tolerance is a finite number of at least 1", "1.5 is the paper's")
    if seed < 0:
        raise UsageError(f"--seed {seed} is negative")
    _check_statistics(chosen, statistics, score_from, layer)
    _, width = statistics.shape
    if not 1 <= kept_width <= width:
        raise UsageError(f"layer {layer}: a kept width of {kept_width} of {width} channels")
    try:
        return chosen.fn(statistics, Request(kept_width, score_from, f, seed, layer))
    except ValueError as error:
        raise DataError(f"layer {layer}: {error}", _REMEDIES["gram"]) from error


def _check_statistics(chosen: Selector, statistics: HeadStatistics, score_from: ScoreFrom, layer: int) -> None:
    """Refuse statistics that are missing, not finite or do not fit each other."""
    present: dict[str, Tensor] = {}
    for field in fields(statistics):
        value = getattr(statistics, field.name)
        if isinstance(value, Tensor):
            present[field.name] = value
    for name in sorted(chosen.needs(score_from)):
        exact = name.replace("gram", "triangle")
        if name not in present and exact not in present:
            stem = name if name in _REMEDIES else name.rsplit("_", 1)[0]
            raise DataError(f"layer {layer}: {chosen.name} needs {name}, which is not there", _REMEDIES[stem])
    if not any(value.ndim > 1 for value in present.values()):
        raise DataError(f"layer {layer}: the calibration says nothing of its heads", _REMEDIES["gram"])
    heads, width = statistics.shape
    for name, value in present.items():
        _check_shape(name, value, heads, width, layer)
        _check_finite(name, value, layer)


def _check_shape(name: str, value: Tensor, heads: int, width: int, layer: int) -> None:
    square = name.split("_", 1)[0] in ("gram", "triangle")
    if tuple(value.shape) != ((heads, width, width) if square else (heads, width)):
        raise DataError(
            f"layer {layer}: {name} has shape {list(value.shape)}, but the layer has {heads} heads of {width}"
        )


def _check_finite(name: str, value: Tensor, layer: int) -> None:
    # In NumPy, here and in `drrqr`: work this small is done before torch has woken its threads, which can take a
    # hundred times as long where others use the cores.
    good = np.isfinite(value.detach().cpu().double().numpy())
    if good.all():
        return
    where = ""
    if value.ndim > 1:
        heads = [head for head in range(value.shape[0]) if not good[head].all()]
        where = f" in head {', '.join(map(str, heads))}"
    raise DataError(
        f"layer {layer}: {name} holds NaN or infinity{where}",
        "the model overflowed on the calibration text: calibrate again with --dtype float32, or on other text",
    )
