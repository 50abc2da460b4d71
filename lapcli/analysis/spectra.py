"""Measures of a state's singular values, and the two bounds that arXiv 2602.04852 proves of them.

All is computed in fp64 from the Gram matrix of the state's shorter side. That squares the condition number, which fp64
bears: what it costs in precision is less than the rounding of an fp32 state itself (see `spectrum_floor`), and it takes
less time than an fp64 SVD.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_EPS = torch.finfo(torch.float64).eps
_PRECISION = 1e-3
"""Relative, of every singular value that is told from rounding."""


class Spectrum(NamedTuple):
    """The singular values of states, and what follows from them.

    Attributes:
        squares: `sigma_i^2`, descending, fp64 `[..., min(K, V)]`.
        effective_rank: `er = sum sigma_i^2 / sigma_1^2` (the stable rank), `[...]`; 0 for a state of zeros.
        kappa: `sigma_1 / sigma_min`, `[...]`, with `sigma_min` no less than `floor sigma_1`; `1 / floor` for zeros.
        floored: whether `sigma_min` is below that, so that `kappa` is a lower limit, `[...]`.
    """

    squares: Tensor
    effective_rank: Tensor
    kappa: Tensor
    floored: Tensor

    @property
    def utilisation(self) -> Tensor:
        """`u = er / min(K, V)`, `[...]`."""
        return self.effective_rank / self.squares.shape[-1]

    @property
    def normalised(self) -> Tensor:
        """`sigma_i / sigma_1`, `[..., min(K, V)]`; zeros for a state of zeros."""
        largest = self.squares[..., :1]
        return torch.where(largest > 0, self.squares / largest, 0.0).sqrt()


def spectrum_floor(state: Tensor) -> float:
    """The share of `sigma_1` below which a singular value of `[..., K, V]` is rounding.

    The state was summed up in its own dtype, which leaves `max(K, V) eps` of it. Eigenvalues of the Gram matrix are off
    by `min(K, V) eps sigma_1^2` in fp64, so values from `sqrt(min(K, V) eps / 1e-3) sigma_1` on are right to 1e-3; for
    an fp32 state that is the lower of the two wherever K or V is 16 or more.
    """
    own = max(state.shape[-2:]) * torch.finfo(state.dtype).eps
    return max(own, (min(state.shape[-2:]) * _EPS / _PRECISION) ** 0.5)


def spectrum(state: Tensor) -> Spectrum:
    """Measure states.

    Args:
        state: `[..., K, V]`; orientation does not matter.
    """
    return spectrum_of(squared_singular_values(state), spectrum_floor(state))


def spectrum_of(squares: Tensor, floor: float) -> Spectrum:
    """What follows from the squared singular values of states.

    Args:
        squares: descending, fp64 `[..., min(K, V)]`.
        floor: see `spectrum_floor`.
    """
    largest, least = squares[..., 0], squares[..., -1]
    there = largest > 0
    rank = torch.where(there, squares.sum(-1) / largest, 0.0)
    share = torch.where(there, least / largest, 0.0).sqrt()
    return Spectrum(squares, rank, 1 / share.clamp(min=floor), share < floor)


def gram(matrix: Tensor) -> Tensor:
    """The Gram matrix of the shorter side of `[..., m, n]`, fp64 `[..., min(m, n), min(m, n)]`."""
    wide = matrix.double()
    return wide @ wide.mT if wide.shape[-2] <= wide.shape[-1] else wide.mT @ wide


def squared_singular_values(matrix: Tensor) -> Tensor:
    """`sigma_i^2` of `[..., m, n]`, descending, fp64 `[..., min(m, n)]`."""
    return torch.linalg.eigvalsh(gram(matrix)).flip(-1).clamp(min=0)


class KeyBound(NamedTuple):
    """`er(S) >= nu(V) / kappa(K)^2`, side by side.

    Attributes:
        kappa: `sigma_1 / sigma_min` of the keys so far, `[..., H]`; infinite where they do not span all channels.
        margin: `er(S) kappa(K)^2 / nu(V)`, at least 1, `[..., HV]`; NaN where the keys do not span all channels, which
            the bound presumes, or the state is zero.
    """

    kappa: Tensor
    margin: Tensor


def key_bound(state: Tensor, rank: Tensor, keys: Tensor) -> KeyBound:
    """Hold the effective rank of states against what wrote them.

    Args:
        state: `[..., HV, K, V]`.
        rank: their effective rank `[..., HV]`.
        keys: `K K^T` of the keys so far, fp64 `[..., H, K, K]`; value head j reads key head `j // (HV // H)`.

    Source: arXiv 2602.04852, Eq. 4 and App. F.1.
    """
    values = torch.linalg.eigvalsh(keys)
    ends = values[..., 0], values[..., -1]
    identity = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device)
    # A factor is wanted of those alone that have one.
    spanning = torch.where(_span(*ends, keys.shape[-1])[..., None, None], keys, identity)
    squares = squared_singular_values(written(state, spanning))
    return key_bound_of(rank, *ends, keys.shape[-1], squares.sum(-1) / squares[..., 0])


def written(state: Tensor, keys: Tensor) -> Tensor:
    """A matrix with the singular values of what the keys can write of the pseudo-values.

    A state is `S = K V^T` with the keys so far in the columns of `K` and pseudo-values in those of `V`, decays and
    corrections included. The part of `V` that the keys can write is `S^T (K K^T)^-1 K`, whatever `V` was, and its
    singular values are those of `L^-1 S` with `K K^T = L L^T`: state and Gram matrix are all that is needed.

    Args:
        state: `[..., HV, K, V]`.
        keys: `K K^T`, fp64 `[..., H, K, K]`.

    Returns:
        fp64 `[..., HV, K, V]`; of no meaning where the keys do not span all channels.
    """
    factor, _info = torch.linalg.cholesky_ex(keys)
    shared = state.shape[-3] // keys.shape[-3]
    return torch.linalg.solve_triangular(factor.repeat_interleave(shared, -3), state.double(), upper=False)


def key_bound_of(rank: Tensor, least: Tensor, largest: Tensor, width: int, nu: Tensor) -> KeyBound:
    """The bound, from eigenvalues.

    Args:
        rank: effective rank of the states, `[..., HV]`.
        least: the smallest eigenvalue of `K K^T`, `[..., H]`.
        largest: the largest.
        width: K.
        nu: effective rank of what the keys can write of the pseudo-values, `[..., HV]`.
    """
    spans = _span(least, largest, width)
    kappa = torch.where(spans, largest / torch.where(spans, least, 1.0), torch.inf).sqrt()
    shared = rank.shape[-1] // least.shape[-1]
    margin = rank * kappa.repeat_interleave(shared, -1).square() / nu
    usable = spans.repeat_interleave(shared, -1) & (rank > 0)
    return KeyBound(kappa, torch.where(usable, margin, torch.nan))


def _span(least: Tensor, largest: Tensor, width: int) -> Tensor:
    """Whether keys span all channels, as far as fp64 tells."""
    return least > width * _EPS * largest


def pearson(x: Tensor, y: Tensor) -> float | None:
    """Pearson's correlation of two vectors; `None` where one of them does not vary, or has fewer than two entries."""
    if x.numel() < 2:
        return None
    a, b = (values.double().flatten() - values.double().mean() for values in (x, y))
    scale = a.norm() * b.norm()
    # What rounding leaves of a constant.
    least = _EPS * x.numel() * x.double().abs().max() * y.double().abs().max()
    return float((a @ b / scale).clamp(-1, 1)) if scale > least else None
