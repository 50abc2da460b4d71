"""Strong rank-revealing QR from the matrix itself: slower than from its Gram matrix, and resolving more.

A Gram matrix squares singular values, so fp64 sums lose those below about `1e-8 sigma_1`; the triangle of a QR keeps
them down to `1e-16 sigma_1`. It also streams: the triangle of two stacked blocks is that of their stacked triangles.
Nothing here is shared with the Gram form but its result type and its last step, the comparison with the bounds, so
each is a check of the other.

Source: Gu and Eisenstat, SIAM J. Sci. Comput. 17 (1996), Algorithm 4, Lemma 3.1, Theorem 3.2.
"""

import numpy as np

from lapcli.selectors.lapack import (
    EPS,
    FloatArray,
    IndexArray,
    pivoted_triangle,
    singular_values,
    solve_upper,
    triangle_of,
)
from lapcli.selectors.strong_rrqr import Bounds, StrongRRQR, bounds_of, check_request, resolved


def stack_triangles(*blocks: FloatArray) -> FloatArray:
    """Triangle [n, n] of a QR of the stacked blocks, for streaming: pass the triangle so far and the next rows.

    Args:
        blocks: matrices of n columns each, fp64.
    """
    return _square(triangle_of(np.concatenate(blocks)))


def strong_rrqr_qr(matrix: FloatArray, k: int, f: float = 1.5, *, measure: bool = True) -> StrongRRQR:
    """Choose k columns by strong rank-revealing QR of `matrix`, or of a triangle that a streamed QR has left of it.

    The numerical rank r counts the pivots above `max(m, n) eps` times the first. Where r < k the factorisation is
    done at r and the rest filled in by largest residual, as in the Gram form.

    Args:
        matrix: [m, n], fp64.
        k: columns to keep, 1..n.
        f: tolerance, at least 1.
        measure: whether to compute the singular values and check the bounds.

    Raises:
        ValueError: `matrix` is not two-dimensional and finite, or k or f is out of range.
    """
    matrix = np.asarray(matrix, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"strong RRQR takes a matrix, not an array of shape {list(matrix.shape)}")
    if not np.isfinite(matrix).all():
        raise ValueError("the matrix holds NaN or infinite entries")
    n = matrix.shape[1]
    check_request(n, k, f)

    triangle, order = pivoted_triangle(matrix)
    triangle = _square(triangle)
    pivots = np.abs(triangle.diagonal())
    rank = int((pivots > max(matrix.shape) * EPS * pivots[0]).sum())
    width = min(k, rank)
    triangle, order, swaps, largest = _exchange_until_strong(triangle, order, width, f)

    basis = np.sort(order[:width])
    kept = basis if width == k else np.sort(np.concatenate([basis, _fill(triangle, order, width, k - width)]))
    _, inverse_rows, left_over = _parts(triangle, width)
    scores = np.empty(n)
    scores[order[:width]] = 1 / inverse_rows
    scores[order[width:]] = left_over
    bounds = _measure(triangle, width, largest, f) if measure else None
    return StrongRRQR(kept, basis, rank, swaps, largest, scores, bounds)


def _square(triangle: FloatArray) -> FloatArray:
    """The triangle with zero rows added below, where the matrix had fewer rows than columns."""
    rows, n = triangle.shape
    return np.concatenate([triangle, np.zeros((n - rows, n))]) if rows < n else triangle


def _parts(triangle: FloatArray, k: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """`U = A^-1 B`, the norms of the rows of `A^-1` (that is `1 / omega_i`), and `gamma_j`, the columns of C."""
    leading = triangle[:k, :k]
    solved = solve_upper(leading, np.concatenate([triangle[:k, k:], np.eye(k)], axis=1))
    coupling, inverse = solved[:, : triangle.shape[1] - k], solved[:, triangle.shape[1] - k :]
    length = np.linalg.norm(triangle[:, k:], axis=0)
    left_over = resolved(np.linalg.norm(triangle[k:, k:], axis=0), len(triangle) * EPS * length)
    return coupling, np.linalg.norm(inverse, axis=1), left_over


def _largest_rho(triangle: FloatArray, k: int) -> tuple[int, int, float]:
    """The pair (i, j) of the largest rho, and that rho."""
    if k in (0, len(triangle)):
        return 0, 0, 0.0
    coupling, inverse_rows, left_over = _parts(triangle, k)
    rho = np.hypot(coupling, np.outer(inverse_rows, left_over))
    i, j = divmod(int(rho.argmax()), rho.shape[1])
    return i, j, float(rho[i, j])


def _exchange_until_strong(
    triangle: FloatArray, order: IndexArray, k: int, f: float
) -> tuple[FloatArray, IndexArray, int, float]:
    """Exchange columns until rho <= f: triangle, order, number of exchanges, rho.

    Every exchange must enlarge the volume of the leading columns by more than rounding does, so no basis can come
    back and the loop ends without a cap; one that does not has met the limit of fp64.
    """
    rounding = len(triangle) * k * EPS
    swaps = 0
    i, j, largest = _largest_rho(triangle, k)
    while largest > f:
        exchanged, permuted = _exchange(triangle, order, k, i, k + j)
        if not _log_volume(exchanged, k) > _log_volume(triangle, k) + rounding:
            break
        triangle, order = exchanged, permuted
        swaps += 1
        i, j, largest = _largest_rho(triangle, k)
    return triangle, order, swaps, largest


def _exchange(triangle: FloatArray, order: IndexArray, k: int, i: int, j: int) -> tuple[FloatArray, IndexArray]:
    """Exchange columns i < k <= j and restore the triangle.

    Column i moves to the end of the leading block and j to the front of the trailing one, each of which is made
    triangular by itself; exchanging the two neighbours then spoils one element.
    """
    n = len(triangle)
    shifted = np.r_[0:i, i + 1 : k, i, j, k:j, j + 1 : n]
    triangle, order = triangle[:, shifted], order[shifted]
    triangle[i:k, i:] = triangle_of(triangle[i:k, i:])
    triangle[k:, k:] = triangle_of(triangle[k:, k:])
    triangle[:, [k - 1, k]] = triangle[:, [k, k - 1]]
    order[[k - 1, k]] = order[[k, k - 1]]
    triangle[k - 1 : k + 1, k - 1 :] = triangle_of(triangle[k - 1 : k + 1, k - 1 :])
    return triangle, order


def _log_volume(triangle: FloatArray, k: int) -> float:
    with np.errstate(divide="ignore"):
        return float(np.log(np.abs(triangle.diagonal()[:k])).sum())


def _fill(triangle: FloatArray, order: IndexArray, k: int, count: int) -> IndexArray:
    """The `count` trailing columns with the largest residuals, each taken from those that follow.

    What cancelled to a residual was of the size of the column and of its parts along the leading ones; below that
    rounding it counts as none, and the longest columns are taken.
    """
    left_over = triangle[k:, k:].copy()
    length = np.linalg.norm(triangle, axis=0)
    coupling = _parts(triangle, k)[0]
    resolution = len(triangle) * EPS * np.hypot(length[k:], np.linalg.norm(length[:k, None] * coupling, axis=0))
    candidates = list(range(left_over.shape[1]))
    taken: list[int] = []
    while len(taken) < count:
        norms = np.linalg.norm(left_over, axis=0)
        open_ones = [index for index in candidates if norms[index] > resolution[index]]
        if not open_ones:
            candidates.sort(key=lambda index: (-length[k + index], order[k + index]))
            taken += candidates[: count - len(taken)]
            break
        best = max(open_ones, key=lambda index: norms[index])
        candidates.remove(best)
        taken.append(best)
        direction = left_over[:, best] / norms[best]
        left_over -= np.outer(direction, direction @ left_over)
    return order[k:][taken]


def _measure(triangle: FloatArray, k: int, rho: float, f: float) -> Bounds:
    whole = singular_values(triangle)
    over = singular_values(triangle[k:, k:])
    return bounds_of(whole, singular_values(triangle[:k, :k]), float(over.max(initial=0.0)), rho, f)
