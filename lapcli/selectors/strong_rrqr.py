"""Strong rank-revealing QR from the Gram matrix: which k of n columns span the rest best, with a guarantee.

Column pivots, triangular factors and residuals of a QR of `M` depend on `M` only through `G = M^T M`, so the choice
needs no more than the sums that a calibration streams. With the columns split into a basis 1 and a rest 2,

    H = G11^-1,   U = H G12,   S = G22 - G21 U,   rho_ij^2 = U_ij^2 + H_ii S_jj,

and exchanging basis column i for column j multiplies `det(G11)` by `rho_ij^2`. The start is a pivoted Cholesky; while
the largest rho exceeds f its pair is exchanged, which is one 2 x 2 principal pivot of `[[-H, U], [U^T, S]]`.

Rounding. Exchanges run on that tableau in rounds; each round ends with a fresh factorisation from `G`, which alone
decides: its determinant must have grown, and the last word on rho is its own. Fresh determinants that grow strictly
cannot visit a basis twice, so the loop ends without a cap. A round whose determinant did not grow has drifted and is
repeated with a factorisation per exchange; if even a single exchange gains nothing, rho exceeds f only by what fp64
sums cannot resolve, and the loop ends there with that rho in its result.

Source: Gu and Eisenstat, SIAM J. Sci. Comput. 17 (1996), Algorithm 4, Lemma 3.1, Theorem 3.2; arXiv 2602.04852,
Sec. 3.4.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lapcli.selectors.lapack import (
    EPS,
    FloatArray,
    IndexArray,
    add_outer,
    cholesky,
    lower_inverse,
    pivoted_cholesky,
    singular_values_from_gram,
)

# A fresh factorisation costs about as much as twenty exchanges.
_EXCHANGES_PER_ROUND = 64


class Bounds(NamedTuple):
    """The singular values of one factorisation and its theorem's bounds; fields as in `base.RankBounds`."""

    factor: float
    sigma_kept_min: float
    sigma_kept_max: float
    sigma_bound: float
    c_norm: float
    c_bound: float
    kappa: float
    kappa_bound: float
    holds: bool


@dataclass(frozen=True)
class StrongRRQR:
    """A choice of k of n columns.

    Attributes:
        kept: the k columns, ascending.
        basis: those that the factorisation rests on, ascending: `kept`, or `rank` of them where the rank is below k;
            the others of `kept` were then filled in by largest residual.
        rank: numerical rank.
        swaps: exchanges after the pivoted start.
        rho: largest `rho_ij` of the basis, from a fresh factorisation. Above f only where fp64 cannot resolve the
            difference.
        scores: [n]; of a basis column its distance from the span of the other basis columns, of another column its
            distance from the span of the basis.
        bounds: measured singular values and the theorem's bounds; `None` when not asked for.
    """

    kept: IndexArray
    basis: IndexArray
    rank: int
    swaps: int
    rho: float
    scores: FloatArray
    bounds: Bounds | None


def strong_rrqr_gram(gram: FloatArray, k: int, f: float = 1.5, *, measure: bool = True) -> StrongRRQR:
    """Choose k columns of `M` by strong rank-revealing QR, given `G = M^T M`.

    The numerical rank r counts the pivots whose residual squared exceeds `n eps max_j G_jj`. Where r < k the
    factorisation is done at r, and the rest filled in by largest residual; a residual that is below what a sum of
    the column's own size resolves counts as none, so that neither a zero column nor a copy is preferred to an
    independent one, however small. A residual at that level counts as zero in rho, too.

    Args:
        gram: [n, n], symmetric positive semidefinite, fp64.
        k: columns to keep, 1..n.
        f: tolerance, at least 1.
        measure: whether to compute the singular values and check the bounds (three quarters of the time).

    Raises:
        ValueError: `gram` is not square, finite, symmetric and positive semidefinite, or k or f is out of range.
    """
    gram = check_gram(gram)
    n = gram.shape[0]
    check_request(n, k, f)
    diagonal = gram.diagonal()

    factor, order, rank = pivoted_cholesky(gram, n * EPS * float(diagonal.max(initial=0.0)))
    width = min(k, rank)
    state = _Split(gram, order, width, factor[:width, :width], factor[width:, :width].T)
    _check_semidefinite(state)
    state, swaps = _exchange_until_strong(gram, state, f)

    basis = np.sort(state.basis)
    kept = basis if width == k else np.sort(np.concatenate([basis, _fill(state, k - width)]))
    scores = np.empty(n)
    scores[state.basis] = 1 / np.sqrt(state.inverse_diagonal)
    scores[state.rest] = np.sqrt(state.residual)
    bounds = _measure(gram, state, f) if measure else None
    return StrongRRQR(kept, basis, rank, swaps, state.rho, scores, bounds)


def bounds_of(whole: FloatArray, kept: FloatArray, c_norm: float, rho: float, f: float) -> Bounds:
    """Compare measured singular values with the theorem's bounds.

    Args:
        whole: singular values of `M`, descending, [n].
        kept: singular values of the basis columns, descending, [k].
        c_norm: 2-norm of what the other columns leave over.
        rho: largest `rho_ij`.
        f: tolerance.
    """
    n, k = len(whole), len(kept)
    factor = math.sqrt(1 + f * f * k * (n - k))
    largest = float(whole[0])
    slack = math.sqrt(n * EPS) * largest
    beyond = float(whole[k]) if k < n else 0.0
    c_bound = factor * beyond
    holds = (
        rho <= f * (1 + math.sqrt(n * EPS))
        and bool((kept >= whole[:k] / factor - slack).all())
        and c_norm <= c_bound + slack
    )
    if k == 0:  # M is zero
        return Bounds(factor, 0.0, 0.0, 0.0, c_norm, c_bound, 1.0, factor, holds)
    smallest = float(whole[k - 1])
    return Bounds(
        factor=factor,
        sigma_kept_min=float(kept[-1]),
        sigma_kept_max=float(kept[0]),
        sigma_bound=smallest / factor,
        c_norm=c_norm,
        c_bound=c_bound,
        kappa=_ratio(float(kept[0]), float(kept[-1])),
        kappa_bound=factor * _ratio(largest, smallest),
        holds=holds,
    )


class _Split:
    """Columns split into a basis and a rest, with what rho needs, freshly from the Gram matrix."""

    def __init__(
        self, gram: FloatArray, order: IndexArray, width: int, factor: FloatArray, projected: FloatArray
    ) -> None:
        """Take the basis `order[:width]`, the Cholesky factor `L` of its block, and `projected = L^-1 G12`."""
        self.order = order
        self.width = width
        self.basis, self.rest = order[:width], order[width:]
        self.diagonal = gram.diagonal()[order]
        self.log_det = 2 * float(np.log(factor.diagonal()).sum())
        self._gram = gram
        self._projected = projected
        self._inverse = lower_inverse(factor)
        self.inverse_diagonal = np.einsum("ij,ij->j", self._inverse, self._inverse)
        self.coupling = np.asfortranarray(self._inverse.T @ projected)
        self.raw_residual = self.diagonal[width:] - np.einsum("ij,ij->j", projected, projected)
        self.resolution = len(order) * EPS * self.diagonal
        self.residual = resolved(self.raw_residual, self.resolution[width:])
        self.pair, self.rho = _worst(self.coupling, self.inverse_diagonal, self.residual)

    @classmethod
    def of_basis(cls, gram: FloatArray, basis: IndexArray) -> "_Split | None":
        """Factorise the Gram matrix for a basis; `None` where it is not positive definite there.

        The columns are taken in ascending order, so that the result depends on the set alone.
        """
        chosen = np.zeros(gram.shape[0], dtype=bool)
        chosen[basis] = True
        basis, rest = np.flatnonzero(chosen), np.flatnonzero(~chosen)
        factor = cholesky(gram[np.ix_(basis, basis)])
        if factor is None:
            return None
        projected = lower_inverse(factor) @ gram[np.ix_(basis, rest)]
        return cls(gram, np.concatenate([basis, rest]), len(basis), factor, projected)

    @cached_property
    def residual_gram(self) -> FloatArray:
        """`S`, the Gram matrix of what the rest leaves over."""
        return self._gram[np.ix_(self.rest, self.rest)] - self._projected.T @ self._projected

    def cancelled(self) -> FloatArray:
        """Size of the terms that cancelled to each residual, `G_jj + sum_i U_ij^2 G_ii`."""
        k = self.width
        return self.diagonal[k:] + (self.coupling**2).T @ self.diagonal[:k]

    def tableau(self) -> FloatArray:
        """`[[-H, U], [U^T, S]]`, in Fortran order."""
        k = self.width
        table = np.empty((len(self.order), len(self.order)), order="F")
        table[:k, :k] = -(self._inverse.T @ self._inverse)
        table[:k, k:] = self.coupling
        table[k:, :k] = self.coupling.T
        table[k:, k:] = self.residual_gram
        return table


def _exchange_until_strong(gram: FloatArray, state: _Split, f: float) -> tuple[_Split, int]:
    """Exchange columns until rho <= f; the split and the number of exchanges."""
    tolerance = max(f, 1 + len(gram) * EPS)  # at f = 1 equal columns would trade places for their rounding
    swaps = 0
    limit = _EXCHANGES_PER_ROUND
    while state.rho > tolerance:
        basis, exchanges = _round(state, tolerance, limit)
        fresh = _Split.of_basis(gram, basis)
        if fresh is not None and fresh.log_det > state.log_det:
            state = fresh
            swaps += exchanges
        elif limit > 1:
            limit = 1
        else:
            break
    return state, swaps


def _round(state: _Split, tolerance: float, limit: int) -> tuple[IndexArray, int]:
    """Up to `limit` exchanges on the tableau; the basis reached and their number."""
    k = state.width
    table = state.tableau()
    order = state.order.copy()
    resolution = state.resolution.copy()
    pair, rho = state.pair, state.rho
    exchanges = 0
    while rho > tolerance and exchanges < limit:
        i, j = pair[0], k + pair[1]
        if not _exchange(table, i, j):
            break
        for labels in (order, resolution):
            labels[[i, j]] = labels[[j, i]]
        exchanges += 1
        diagonal = table.diagonal()
        pair, rho = _worst(table[:k, k:], -diagonal[:k], resolved(diagonal[k:], resolution[k:]))
    return order[:k], exchanges


def _exchange(table: FloatArray, i: int, j: int) -> bool:
    """Take i out of the basis and j into it, in place: a 2 x 2 principal pivot as two symmetric sweeps.

    i leaves first: the second pivot is then `S_jj + U_ij^2 / H_ii`, a sum of positive terms, and no small `S_jj` is
    divided by. False where rounding has turned a pivot's sign; the tableau is then of no more use.
    """
    for index, sign in ((i, -1.0), (j, 1.0)):
        pivot = float(table[index, index])
        if not sign * pivot > 0:
            return False
        column = table[:, index].copy()
        add_outer(table, -1 / pivot, column, column)
        column *= sign / pivot
        column[index] = -1 / pivot
        table[:, index] = column
        table[index, :] = column
    table[:, [i, j]] = table[:, [j, i]]
    table[[i, j], :] = table[[j, i], :]
    return True


def _worst(coupling: FloatArray, inverse: FloatArray, residual: FloatArray) -> tuple[tuple[int, int], float]:
    """The pair (i, j) of the largest rho, and that rho; (0, 0) and 0 where there is no pair."""
    if coupling.size == 0:
        return (0, 0), 0.0
    squares = np.empty(coupling.shape, order="F")
    np.multiply(coupling, coupling, out=squares)
    add_outer(squares, 1.0, inverse, residual)
    j, i = divmod(int(squares.T.argmax()), coupling.shape[0])
    return (i, j), math.sqrt(float(squares[i, j]))


def resolved(residual: FloatArray, resolution: FloatArray) -> FloatArray:
    """Residuals with those at or below the resolution set to zero."""
    return np.where(residual > resolution, residual, 0.0)


def _fill(state: _Split, count: int) -> IndexArray:
    """The `count` columns of the rest with the largest residuals, each taken from those that follow.

    A dependent column's computed residual is rounding at the size of the terms that cancelled; only what exceeds
    that counts. When nothing does, the longest columns are taken.
    """
    k = state.width
    table = state.residual_gram.copy()
    resolution = len(state.order) * EPS * state.cancelled()
    left = np.ones(len(table), dtype=bool)
    taken: list[int] = []
    while len(taken) < count:
        residual = np.where(left, resolved(table.diagonal(), resolution), 0.0)
        best = int(residual.argmax())
        if residual[best] == 0:
            remaining = np.flatnonzero(left)
            by_length = np.lexsort((state.rest[remaining], -state.diagonal[k:][remaining]))
            taken.extend(int(index) for index in remaining[by_length][: count - len(taken)])
            break
        taken.append(best)
        left[best] = False
        np.subtract(table, np.outer(table[:, best], table[best] / residual[best]), out=table)
    return state.rest[taken]


def _measure(gram: FloatArray, state: _Split, f: float) -> Bounds:
    whole = singular_values_from_gram(gram)
    kept = singular_values_from_gram(gram[np.ix_(state.basis, state.basis)])
    over = singular_values_from_gram(state.residual_gram)
    return bounds_of(whole, kept, float(over.max(initial=0.0)), state.rho, f)


def _ratio(upper: float, lower: float) -> float:
    return upper / lower if lower > 0 else math.inf


def check_request(n: int, k: int, f: float) -> None:
    """Refuse a width or tolerance that no strong rank-revealing QR has.

    Raises:
        ValueError: k is not in 1..n, or f is below 1 or not finite.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} of {n} columns: k lies in 1..{n}")
    if not 1 <= f < math.inf:
        raise ValueError(f"f = {f}: the tolerance is finite and at least 1")


def check_gram(gram: FloatArray) -> FloatArray:
    """The matrix, exactly symmetric, once it is seen to be a finite symmetric one up to rounding.

    Raises:
        ValueError: it is not.
    """
    gram = np.ascontiguousarray(gram, dtype=np.float64)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.size == 0:
        raise ValueError(f"a Gram matrix is square, not of shape {list(gram.shape)}")
    if not np.isfinite(gram).all():
        raise ValueError("the Gram matrix holds NaN or infinite entries")
    diagonal = gram.diagonal()
    if (diagonal < 0).any():
        raise ValueError(f"the Gram matrix has a negative diagonal element, {diagonal.min():.3g}")
    if (gram == gram.T).all():
        return gram
    # Sums of products in another order differ by rounding; a wrong matrix differs by much more.
    length = np.sqrt(diagonal)
    asymmetry = np.abs(gram - gram.T)
    if (asymmetry > 1e-9 * np.outer(length, length)).any():
        i, j = np.unravel_index(asymmetry.argmax(), gram.shape)
        raise ValueError(f"the Gram matrix is not symmetric: [{i}, {j}] {gram[i, j]:.6g}, [{j}, {i}] {gram[j, i]:.6g}")
    return (gram + gram.T) / 2


def _check_semidefinite(state: _Split) -> None:
    """Refuse a matrix that is no sum of squares: a residual squared further below zero than rounding takes it."""
    if (state.raw_residual < -state.resolution[state.width :]).any():
        slack = math.sqrt(len(state.order) * EPS)
        if (state.raw_residual < -slack * state.cancelled()).any():
            raise ValueError("the matrix is not positive semidefinite: it is not the Gram matrix of any columns")
