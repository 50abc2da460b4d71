"""Eigenvalues of very many small symmetric matrices, by operations that take all of them at once on any device.

`torch.linalg.eigvalsh` takes matrices that are wider than 32 one after the other on a GPU (torch 2.11: cuSOLVER's syevd
in a loop, about a millisecond each), and waits for the device every time. Here Householder reflections bring all
matrices to tridiagonal form together, which reads and writes each matrix once a column, and bisection finds the
eigenvalues that are wanted of as many tridiagonal matrices as were gathered. Both are backward stable: the eigenvalues
are off by some `n eps` of the largest in magnitude, as LAPACK's are. Nothing here waits for a device.

Source: G. H. Golub, C. F. Van Loan, Matrix Computations (4th ed.), Secs. 8.3.1 and 8.4.1; J. Demmel, I. Dhillon,
H. Ren, On the Correctness of Some Bisection-like Parallel Eigenvalue Algorithms in Floating Point Arithmetic (1995),
whose count by sign bits needs no test for pivots of zero.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_HALVINGS = 54
"""Of an interval that reaches as far to either side as a matrix's largest eigenvalue may: down to fp64's rounding."""

_LEAST_SQUARE = 1e-290
"""Keeps 0 / 0 out of the count; its root is far below what rounding leaves of a matrix of norm 1."""

_AT_ONCE = 1 << 22
"""Eigenvalues that are looked for together: enough to keep a GPU busy, 32 MiB a vector."""


class Tridiagonal(NamedTuple):
    """Symmetric tridiagonal matrices, scaled to a norm below 1.

    Attributes:
        diagonal: `[N, n]`, fp64.
        squares: of what is beside the diagonal, `[N, n - 1]`, fp64.
        scale: what the matrices were multiplied by, a power of two, `[N]`.
    """

    diagonal: Tensor
    squares: Tensor
    scale: Tensor

    @property
    def traces(self) -> Tensor:
        """The sums of all eigenvalues, `[N]`."""
        return self.diagonal.sum(-1) / self.scale


def tridiagonal(matrices: Tensor) -> Tridiagonal:
    """Bring matrices to tridiagonal form with the same eigenvalues.

    Args:
        matrices: symmetric, fp64 `[N, n, n]`; overwritten. One that is not finite spoils no other.
    """
    rest = matrices
    width = rest.shape[-1]
    exponents = rest.abs().sum(-1).amax(-1).frexp().exponent.clamp(-1000, 1000)
    scale = torch.exp2(-exponents.double())
    rest.mul_(scale[:, None, None])
    beside = [rest.new_zeros(len(rest), 0)]
    for _column in range(width - 2):
        x = rest[:, 1:, :1]
        length = x.norm(dim=1, keepdim=True)
        mirrored = -length.copysign(x[:, :1])
        beside.append(mirrored[:, :, 0])
        v = x.clone()
        v[:, :1] -= mirrored
        # 2 / v.v; nothing is to be mirrored where the column is zero.
        factor = length * (length + x[:, :1].abs())
        factor = torch.where(factor > 0, 1 / factor, 0.0)
        rest = rest[:, 1:, 1:]
        product = rest @ v * factor
        w = product - v * (v.mT @ product) * (factor / 2)
        rest.baddbmm_(torch.cat((v, w), -1), torch.cat((w, v), -1).mT, alpha=-1)
    if width > 1:
        beside.append(rest[:, 1:, 0])
    return Tridiagonal(matrices.diagonal(dim1=-2, dim2=-1).clone(), torch.cat(beside, -1).square(), scale)


def eigenvalues(forms: Tridiagonal, which: Sequence[int] | None = None) -> Tensor:
    """Eigenvalues of tridiagonal matrices, ascending.

    Args:
        forms: `N` matrices of width `n`.
        which: their numbers in ascending order, from 0; negative ones count from the largest; `None` for all.

    Returns:
        fp64 `[N, n or len(which)]`.
    """
    width = forms.diagonal.shape[-1]
    device = forms.diagonal.device
    if which is None:
        targets = torch.arange(width, device=device)
    else:
        targets = torch.cat([torch.full((1,), number % width, device=device) for number in which])
    rows = max(1, _AT_ONCE // len(targets))
    parts = zip(*(tensor.split(rows) for tensor in forms), strict=True)
    return torch.cat([_bisected(Tridiagonal(*part), targets) for part in parts])


def _bisected(forms: Tridiagonal, targets: Tensor) -> Tensor:
    """The eigenvalues of these numbers: so many are below x as pivots of the matrix less x are negative."""
    diagonal, squares, scale = forms
    edges = F.pad(squares.sqrt(), (1, 1))
    reach = (diagonal.abs() + edges[:, 1:] + edges[:, :-1]).amax(-1)
    # A row of numbers for each step of the count.
    on, beside = diagonal.mT.contiguous()[..., None], squares.clamp(min=_LEAST_SQUARE).mT.contiguous()[..., None]
    high = reach[:, None].repeat(1, len(targets))
    low = -high
    pivot, shifted = torch.empty_like(low), torch.empty_like(low)
    negative = torch.empty_like(low, dtype=torch.bool)
    for _halving in range(_HALVINGS):
        middle = (low + high) / 2
        torch.sub(on[0], middle, out=pivot)
        below = pivot.signbit().int()
        for square, entry in zip(beside, on[1:], strict=True):
            torch.sub(entry, middle, out=shifted)
            # A pivot of zero makes the next one infinite, of the sign that the count needs, and that one is forgotten.
            torch.addcdiv(shifted, square, pivot, value=-1, out=pivot)
            below += torch.signbit(pivot, out=negative)
        beyond = below > targets
        high = torch.where(beyond, middle, high)
        low = torch.where(beyond, low, middle)
    return (low + high) / 2 / scale[:, None]
