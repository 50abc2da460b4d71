"""What every selector takes and gives: statistics of one layer in, kept channels (or directions) per key head out.

A selector never sees a model and never edits weights. Axes as in `lapcli.shapes`: `H` key heads, `K` key width,
`K'` kept width, `D` model width. Everything is on the CPU; statistics and scores are fp64.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

ScoreFrom: TypeAlias = Literal["both", "key", "query"]


@dataclass(frozen=True)
class HeadStatistics:
    """What is known of one layer, per key head.

    Where several heads share a key head (GVA, shared queries), each entry is the sum over them.

    Attributes:
        gram_key: `Kc^T Kc` of the calibration's keys, fp64.
        gram_query: `Qc^T Qc` of its queries, fp64.
        magnitude_key: per key channel, `sum_i |W_ij|`, fp64.
        magnitude_query: likewise for queries.
        wanda_key: per key channel, `sum_i |W_ij| ||X_:i||_2` over the mixer's inputs, fp64.
        wanda_query: likewise for queries.
        saliency_key: per key channel, `sum_i |W_ij dL/dW_ij|`, fp64.
        saliency_query: likewise for queries.
        tokens: calibration tokens behind the sums.
        triangle_key: for `--exact`, the triangle of a streamed QR of the keys (`R^T R = gram_key`), which resolves
            singular values that the Gram matrix cannot; used in place of the Gram matrices where given.
        triangle_query: likewise for queries.
    """

    gram_key: Float64[Tensor, "H K K"] | None = None
    gram_query: Float64[Tensor, "H K K"] | None = None
    magnitude_key: Float64[Tensor, "H K"] | None = None
    magnitude_query: Float64[Tensor, "H K"] | None = None
    wanda_key: Float64[Tensor, "H K"] | None = None
    wanda_query: Float64[Tensor, "H K"] | None = None
    saliency_key: Float64[Tensor, "H K"] | None = None
    saliency_query: Float64[Tensor, "H K"] | None = None
    tokens: int = 0
    triangle_key: Float64[Tensor, "H K K"] | None = None
    triangle_query: Float64[Tensor, "H K K"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Key heads H and key width K, as the first statistic that is there has them.

        Raises:
            ValueError: there is none with heads.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.ndim >= 2:
                return value.shape[0], value.shape[1]
        raise ValueError("no statistic has heads and channels")


class RankBounds(NamedTuple):
    """What the strong rank-revealing QR achieved, per head, beside what its theorem promises.

    `A` stands for the `k = width` columns that the factorisation rests on, `C` for what the others leave over,
    `sigma_i` for singular values of the joint activations `M`, `c = sqrt(1 + f^2 k (K - k))`.
    Source: Gu and Eisenstat (1996), Theorem 3.2; arXiv 2602.04852, Sec. 3.4.

    Attributes:
        width: k, the kept width, or the rank where that is smaller.
        rank: numerical rank of `M`.
        swaps: exchanges after the pivoted start.
        rho: largest `rho_ij` on return.
        factor: c.
        sigma_kept_min: `sigma_k(A)`; the theorem: at least `sigma_bound`.
        sigma_kept_max: `sigma_1(A)`.
        sigma_bound: `sigma_k(M) / c`.
        c_norm: `||C||_2`; the theorem: at most `c_bound`.
        c_bound: `c sigma_{k+1}(M)`.
        kappa: `sigma_1(A) / sigma_k(A)`; the theorem: at most `kappa_bound`.
        kappa_bound: `c sigma_1(M) / sigma_k(M)`.
        holds: whether `rho <= f`, `sigma_i(A) >= sigma_i(M) / c` for every i and `||C|| <= c sigma_{k+1}(M)`, up to
            what fp64 sums resolve, `sqrt(K eps) sigma_1(M)`.
    """

    width: Int64[Tensor, " H"]
    rank: Int64[Tensor, " H"]
    swaps: Int64[Tensor, " H"]
    rho: Float64[Tensor, " H"]
    factor: Float64[Tensor, " H"]
    sigma_kept_min: Float64[Tensor, " H"]
    sigma_kept_max: Float64[Tensor, " H"]
    sigma_bound: Float64[Tensor, " H"]
    c_norm: Float64[Tensor, " H"]
    c_bound: Float64[Tensor, " H"]
    kappa: Float64[Tensor, " H"]
    kappa_bound: Float64[Tensor, " H"]
    holds: Bool[Tensor, " H"]


class Selection(NamedTuple):
    """The channels that one layer keeps.

    Attributes:
        kept: indices within the head, ascending, int64.
        scores: what the selector thought of every channel; larger is better. For `drrqr`: of a kept channel its
            distance from the span of the other kept ones, of a dropped channel its distance from the span of the
            kept ones (of those that the factorisation rests on, where the rank is below K').
        bounds: for `drrqr`.
        warnings: what the user should look at, one sentence each.
    """

    kept: Int64[Tensor, "H kept"]
    scores: Float64[Tensor, "H K"]
    bounds: RankBounds | None = None
    warnings: tuple[str, ...] = ()


class Rotation(NamedTuple):
    """The directions that one layer keeps, where a selector mixes channels instead of choosing among them.

    Attributes:
        basis: T, per head orthonormal rows: keys and queries become `T k`, `T q`.
        variance: sum of squares of the activations along each direction there is, descending; the basis has the first.
        warnings: what the user should look at, one sentence each.
    """

    basis: Float64[Tensor, "H kept K"]
    variance: Float64[Tensor, "H K"]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """What is asked of a selector, beside the statistics.

    Attributes:
        kept_width: K'.
        score_from: whether keys, queries or both decide. The kept set applies to both all the same.
        f: tolerance of the strong rank-revealing QR, at least 1.
        seed: of the random selector.
        layer: number of the layer, for the random selector and for messages.
    """

    kept_width: int
    score_from: ScoreFrom = "both"
    f: float = 1.5
    seed: int = 0
    layer: int = 0

    def sides(self, stem: str) -> tuple[str, ...]:
        """The statistics `stem_key`, `stem_query` that `score_from` lets decide."""
        chosen = ("key", "query") if self.score_from == "both" else (self.score_from,)
        return tuple(f"{stem}_{side}" for side in chosen)


SelectorFunction: TypeAlias = Callable[[HeadStatistics, Request], Selection | Rotation]


def statistic(statistics: HeadStatistics, name: str) -> Tensor:
    """One of the statistics, in fp64.

    Args:
        statistics: of one layer.
        name: its attribute.

    Raises:
        ValueError: it was not collected.
    """
    value: Tensor | None = getattr(statistics, name)
    if value is None:
        raise ValueError(f"the statistic {name} was not collected")
    return value.to(device="cpu", dtype=torch.float64)


def keep_best(scores: Float64[Tensor, "H K"], kept_width: int) -> Selection:
    """Keep the channels of the largest scores; of equal ones, the lower index.

    Args:
        scores: larger is better.
        kept_width: K'.
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return Selection(order[:, :kept_width].sort(dim=-1).values, scores)


def best_of_sum(statistics: HeadStatistics, request: Request, stem: str) -> Selection:
    """Keep the channels whose statistic is largest, summed over the sides that `score_from` lets decide.

    Args:
        statistics: of one layer.
        request: kept width and `score_from`.
        stem: "magnitude" stands for `magnitude_key` and `magnitude_query`, and so on.
    """
    sides = [statistic(statistics, name) for name in request.sides(stem)]
    return keep_best(sum(sides[1:], start=sides[0]), request.kept_width)
