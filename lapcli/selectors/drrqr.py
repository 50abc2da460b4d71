"""`drrqr`: strong rank-revealing QR of the joint keys and queries. Source: arXiv 2602.04852, Sec. 3.4, Algorithm 2."""

import numpy as np
import torch

from lapcli.selectors.base import HeadStatistics, RankBounds, Request, Selection, statistic
from lapcli.selectors.lapack import FloatArray, one_blas_thread
from lapcli.selectors.strong_rrqr import StrongRRQR, strong_rrqr_gram
from lapcli.selectors.strong_rrqr_qr import stack_triangles, strong_rrqr_qr


def select(statistics: HeadStatistics, request: Request) -> Selection:
    """Choose, per head, channels that span the joint activations `M = [Kc; Qc]` well and are well conditioned.

    Works on the sum of the Gram matrices that `score_from` names, or on the triangles of a streamed QR where the
    statistics hold those.

    Args:
        statistics: `gram_key`, `gram_query` (or `triangle_key`, `triangle_query`) as `score_from` needs them.
        request: kept width, `score_from`, f, and the layer for warnings.

    Raises:
        ValueError: a head's statistics are not a Gram matrix's.
    """
    heads, _ = statistics.shape
    triangles = [getattr(statistics, name) for name in request.sides("triangle")]
    if all(triangle is not None for triangle in triangles):
        sides = [statistic(statistics, name).numpy() for name in request.sides("triangle")]

        def choose(head: int) -> StrongRRQR:
            return strong_rrqr_qr(stack_triangles(*(side[head] for side in sides)), request.kept_width, request.f)
    else:
        grams: list[FloatArray] = [statistic(statistics, name).numpy() for name in request.sides("gram")]
        joint = grams[0] if len(grams) == 1 else grams[0] + grams[1]

        def choose(head: int) -> StrongRRQR:
            try:
                return strong_rrqr_gram(joint[head], request.kept_width, request.f)
            except ValueError as error:
                raise ValueError(f"head {head}: {error}") from error

    with one_blas_thread():
        chosen = [choose(head) for head in range(heads)]

    bounds = _stack(chosen)
    return Selection(
        kept=torch.as_tensor(np.stack([head.kept for head in chosen])),
        scores=torch.as_tensor(np.stack([head.scores for head in chosen])),
        bounds=bounds,
        warnings=tuple(_warnings(bounds, request)),
    )


def _stack(chosen: list[StrongRRQR]) -> RankBounds:
    def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    measured = [head.bounds for head in chosen if head.bounds is not None]
    assert len(measured) == len(chosen), "a head was chosen without its bounds"
    whole, real = torch.int64, torch.float64
    return RankBounds(
        width=column([len(head.basis) for head in chosen], whole),
        rank=column([head.rank for head in chosen], whole),
        swaps=column([head.swaps for head in chosen], whole),
        rho=column([head.rho for head in chosen], real),
        factor=column([bound.factor for bound in measured], real),
        sigma_kept_min=column([bound.sigma_kept_min for bound in measured], real),
        sigma_kept_max=column([bound.sigma_kept_max for bound in measured], real),
        sigma_bound=column([bound.sigma_bound for bound in measured], real),
        c_norm=column([bound.c_norm for bound in measured], real),
        c_bound=column([bound.c_bound for bound in measured], real),
        kappa=column([bound.kappa for bound in measured], real),
        kappa_bound=column([bound.kappa_bound for bound in measured], real),
        holds=column([bound.holds for bound in measured], torch.bool),
    )


def _warnings(bounds: RankBounds, request: Request) -> list[str]:
    warnings: list[str] = []
    low = [(head, int(rank)) for head, rank in enumerate(bounds.rank) if rank < request.kept_width]
    if low:
        ranks = ", ".join(f"head {head}: {rank}" for head, rank in low)
        warnings.append(
            f"layer {request.layer}: numerical rank below the kept width {request.kept_width} ({ranks}); the "
            "best-conditioned channels are kept, the rest filled in by largest residual"
        )
    broken = [head for head, holds in enumerate(bounds.holds) if not holds]
    if broken:
        worst = max(float(bounds.rho[head]) for head in broken)
        warnings.append(
            f"layer {request.layer}: heads {', '.join(map(str, broken))} miss the bounds of the strong "
            f"rank-revealing QR (rho {worst:.4g}, f {request.f:g}): their activations are conditioned worse than "
            "fp64 sums resolve"
        )
    return warnings
