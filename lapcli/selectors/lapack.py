"""The few dense factorisations that strong RRQR needs, with types, on fp64 arrays in Fortran order.

A head is small: a BLAS that splits a 128 x 128 product over every core of a machine waits longer than it computes, and
far longer where others use those cores. Callers work within `one_blas_thread`.
"""

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import scipy.linalg  # pyright: ignore[reportMissingTypeStubs]  (there are none; the names used get types below)
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController  # pyright: ignore[reportMissingTypeStubs]  (likewise)

FloatArray: TypeAlias = NDArray[np.float64]
IndexArray: TypeAlias = NDArray[np.int64]

EPS = float(np.finfo(np.float64).eps)

_lapack: Any = scipy.linalg.lapack
_blas: Any = scipy.linalg.blas
_linalg: Any = scipy.linalg


def pivoted_cholesky(gram: FloatArray, tolerance: float) -> tuple[FloatArray, IndexArray, int]:
    """Cholesky factor with complete pivoting, stopped where the residual squared falls to `tolerance`.

    Returns:
        `L` [n, n], of which the columns before the rank are lower triangular and right and the others hold leftovers;
        the pivot order [n]; the rank. `G[order][:, order][:, :rank] = (L L^T)[:, :rank]`. LAPACK `dpstrf`.
    """
    factor, pivots, rank, info = _lapack.dpstrf(gram.T, tol=tolerance, lower=1)
    order = np.asarray(pivots, dtype=np.int64) - 1
    return factor, order, gram.shape[0] if info == 0 else int(rank)


def pivoted_triangle(matrix: FloatArray) -> tuple[FloatArray, IndexArray]:
    """Triangle `R` [min(m, n), n] and column order [n] of QR with column pivoting. LAPACK `dgeqp3`."""
    triangle, order = _linalg.qr(matrix, mode="r", pivoting=True, check_finite=False)
    rows = min(matrix.shape)
    return triangle[:rows], np.asarray(order, dtype=np.int64)


def triangle_of(matrix: FloatArray) -> FloatArray:
    """Triangle `R` [min(m, n), n] of QR without pivoting. LAPACK `dgeqrf`."""
    (triangle,) = _linalg.qr(matrix, mode="r", check_finite=False)
    return triangle[: min(matrix.shape)]


def cholesky(gram: FloatArray) -> FloatArray | None:
    """Lower Cholesky factor; `None` where the matrix is not positive definite. LAPACK `dpotrf`."""
    try:
        return np.asarray(np.linalg.cholesky(gram), dtype=np.float64)
    except np.linalg.LinAlgError:
        return None


def singular_values(matrix: FloatArray) -> FloatArray:
    """Singular values, descending. LAPACK `dgesdd`."""
    if matrix.size == 0:
        return np.zeros(0)
    return np.asarray(np.linalg.svd(matrix, compute_uv=False), dtype=np.float64)


def singular_values_from_gram(gram: FloatArray) -> FloatArray:
    """Singular values of M from `M^T M`, descending. LAPACK `dsyevd`."""
    if gram.size == 0:
        return np.zeros(0)
    return np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0))


def lower_inverse(factor: FloatArray) -> FloatArray:
    """Inverse of a lower triangle with a positive diagonal; zero above the diagonal. LAPACK `dtrtri`."""
    if factor.size == 0:
        return np.zeros((0, 0))
    inverse, info = _lapack.dtrtri(np.asfortranarray(np.tril(factor)), lower=1, overwrite_c=1)
    assert info == 0, "a diagonal element is zero"
    return inverse


def solve_upper(triangle: FloatArray, right: FloatArray) -> FloatArray:
    """`triangle^-1 right` for an upper triangle. LAPACK `dtrtrs`."""
    if triangle.size == 0:
        return right
    return _linalg.solve_triangular(triangle, right, check_finite=False)


def add_outer(target: FloatArray, factor: float, left: FloatArray, right: FloatArray) -> None:
    """`target += factor left right^T`, in place. `target` must be in Fortran order. BLAS `dger`."""
    result = _blas.dger(factor, left, right, a=target, overwrite_x=0, overwrite_y=0, overwrite_a=1)
    assert result is target or np.shares_memory(result, target), "the target was copied"


@cache
def _thread_pools() -> Any:
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[Any]:
    """Within it, BLAS and LAPACK run on the thread that calls them."""
    limiter: AbstractContextManager[Any] = _thread_pools().limit(limits=1, user_api="blas")
    return limiter
