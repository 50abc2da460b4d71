"""`pca`: the directions of largest variance, not channels. Source: arXiv 2602.04852, App. B.3 and Tables 14-15.

Experimental, since it is the paper's counter-example: a rotation mixes channels, and neither a filter for each channel
nor SiLU commutes with that (`lapcli.stages.rotating`).
"""

import numpy as np
import torch

from lapcli.selectors.base import HeadStatistics, Request, Rotation, statistic
from lapcli.selectors.lapack import EPS, FloatArray, one_blas_thread
from lapcli.selectors.strong_rrqr import check_gram

_ROUNDING = EPS**0.5


def select(statistics: HeadStatistics, request: Request) -> Rotation:
    """Choose, per head, the leading eigenvectors of `G = M^T M`, of the joint activations `M = [Kc; Qc]`.

    The sums are not centred: what a state holds is sums of products, not covariances. A direction has no sign of its
    own; of each, that is taken in which the component of largest magnitude is positive.

    Args:
        statistics: `gram_key`, `gram_query` (or `triangle_key`, `triangle_query`, which are used where they are there)
            as `score_from` needs them.
        request: kept width, `score_from`, and the layer for warnings.

    Raises:
        ValueError: a head's statistics are not a Gram matrix's.
    """
    heads, _ = statistics.shape
    triangles = [getattr(statistics, name) for name in request.sides("triangle")]
    exact = all(triangle is not None for triangle in triangles)
    stem = "triangle" if exact else "gram"
    sides: list[FloatArray] = [statistic(statistics, name).numpy() for name in request.sides(stem)]

    def decompose(head: int) -> tuple[FloatArray, FloatArray]:
        parts = [side[head] for side in sides]
        if exact:
            return _of_rows(np.concatenate(parts))
        try:
            return _of_gram(parts[0] if len(parts) == 1 else parts[0] + parts[1])
        except ValueError as error:
            raise ValueError(f"head {head}: {error}") from error

    with one_blas_thread():
        found = [decompose(head) for head in range(heads)]
    variance = np.stack([variances for variances, _directions in found])
    basis = np.stack([_signed(directions[: request.kept_width]) for _variances, directions in found])
    return Rotation(torch.as_tensor(basis), torch.as_tensor(variance), tuple(_warnings(variance, request)))


def _of_gram(gram: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Eigenvalues, descending, and eigenvectors, a row each."""
    values, vectors = np.linalg.eigh(check_gram(gram))
    if values[0] < -_ROUNDING * max(values[-1], 0.0):
        raise ValueError("the matrix is not positive semidefinite: it is not the Gram matrix of any columns")
    return np.maximum(values[::-1], 0.0), vectors.T[::-1]


def _of_rows(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The same of `matrix^T matrix`, which is not formed."""
    _left, values, directions = np.linalg.svd(matrix, full_matrices=False)
    return values**2, directions


def _signed(directions: FloatArray) -> FloatArray:
    largest = np.abs(directions).argmax(axis=1)
    return np.ascontiguousarray(directions * np.sign(directions[np.arange(len(directions)), largest])[:, None])


def _warnings(variance: FloatArray, request: Request) -> list[str]:
    ranks = (variance > variance.shape[1] * EPS * variance[:, :1]).sum(axis=1)
    low = [f"head {head}: {rank}" for head, rank in enumerate(ranks) if rank < request.kept_width]
    if not low:
        return []
    return [
        f"layer {request.layer}: numerical rank below the kept width {request.kept_width} ({', '.join(low)}); the last "
        "directions kept are any that nothing lies in"
    ]
