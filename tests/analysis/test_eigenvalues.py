"""Eigenvalues of many matrices at once: against LAPACK's, and against closed forms."""

import math

import pytest
import torch

from lapcli.analysis import eigenvalues as module
from lapcli.analysis.eigenvalues import Tridiagonal, eigenvalues, tridiagonal

EPS = torch.finfo(torch.float64).eps
PATH = torch.diag(torch.ones(3), 1) + torch.diag(torch.ones(3), -1)


def symmetric(count, width, low=6.0):
    """Gram matrices whose eigenvalues lie up to `10^(2 low)` apart."""
    random = torch.Generator().manual_seed(width)
    rows = torch.randn(count, width, width + 3, dtype=torch.float64, generator=random)
    rows = rows * torch.logspace(0, -low, width, dtype=torch.float64)[:, None]
    return rows @ rows.mT


@pytest.mark.parametrize("width", [1, 2, 3, 8, 33, 64])
def test_as_near_to_lapack_s_as_both_may_be_off(width):
    matrices = torch.cat([symmetric(5, width), symmetric(5, width, 0.0), -symmetric(2, width)])
    wanted = torch.linalg.eigvalsh(matrices)
    found = eigenvalues(tridiagonal(matrices.clone()))
    # Each is off by some `n eps` of the norm; tenfold less was seen.
    bound = width * EPS * wanted.abs().amax(-1, keepdim=True)
    assert ((found - wanted).abs() <= bound).all()
    assert (found.diff(dim=-1) >= 0).all()


def test_a_closed_form():
    # Second differences: 2 - 2 cos(j pi / (n + 1)).
    width = 40
    form = Tridiagonal(
        torch.full((1, width), 2.0, dtype=torch.float64),
        torch.ones(1, width - 1, dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
    )
    wanted = torch.tensor(
        [2 - 2 * math.cos(j * math.pi / (width + 1)) for j in range(1, width + 1)], dtype=torch.float64
    )
    assert torch.allclose(eigenvalues(form)[0], wanted, rtol=0, atol=8 * EPS)
    assert form.traces.item() == 2.0 * width


@pytest.mark.parametrize(
    ("matrix", "wanted"),
    [
        (torch.zeros(4, 4), [0.0] * 4),
        (torch.eye(3) * 7, [7.0] * 3),
        (torch.diag(torch.tensor([3.0, 0.0, -2.0, 3.0])), [-2.0, 0.0, 3.0, 3.0]),
        (torch.ones(5, 5), [0.0] * 4 + [5.0]),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), [-1.0, 1.0]),
        # Every pivot of the first try, in the middle, is zero or infinite.
        (PATH, [2 * math.cos(j * math.pi / 5) for j in (4, 3, 2, 1)]),
    ],
    ids=["zeros", "multiple", "diagonal", "rank-one", "swap", "path"],
)  # fmt: skip
@pytest.mark.parametrize("scale", [1.0, 2.0**-900, 2.0**900], ids=["as-is", "tiny", "huge"])
def test_matrices_of_note_at_any_scale(matrix, wanted, scale):
    found = eigenvalues(tridiagonal(matrix.double()[None] * scale))[0] / scale
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=64 * EPS)
    if not matrix.any():
        assert not found.any()


def test_those_that_are_asked_for_in_parts_and_beside_one_that_is_not_finite(monkeypatch):
    matrices = symmetric(7, 12)
    wanted = eigenvalues(tridiagonal(matrices.clone()))
    matrices[3, 5, 5] = torch.nan
    forms = tridiagonal(matrices)
    monkeypatch.setattr(module, "_AT_ONCE", 6)
    others = torch.arange(7) != 3
    assert torch.equal(eigenvalues(forms, (0, -1, 5))[others], wanted[:, [0, 11, 5]][others])
    assert torch.allclose(forms.traces[others], wanted.sum(-1)[others], rtol=1e-13)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("width", [1, 2, 33, 64, 128])
def test_a_gpu_finds_the_same(width):
    matrices = torch.cat([symmetric(300, width), torch.zeros(1, width, width, dtype=torch.float64)])
    wanted = torch.linalg.eigvalsh(matrices)
    found = eigenvalues(tridiagonal(matrices.cuda())).cpu()
    assert ((found - wanted).abs() <= width * EPS * wanted.abs().amax(-1, keepdim=True)).all()
