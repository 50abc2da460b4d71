"""The directions of `pca`: leading, orthonormal, of a sign that does not depend on LAPACK's."""

import pytest
import torch

from lapcli.selectors.base import HeadStatistics
from lapcli.selectors.registry import select_layer


def rows(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_by_hand():
    """Columns (3, 4) / 5 and (4, -3) / 5 carry 9 and 1."""
    first, second = torch.tensor([0.6, 0.8]).double(), torch.tensor([0.8, -0.6]).double()
    gram = 9 * torch.outer(first, first) + torch.outer(second, second)
    found = select_layer("pca", HeadStatistics(gram_key=gram[None]), 1, "key")
    torch.testing.assert_close(found.basis, first.view(1, 1, 2))
    torch.testing.assert_close(found.variance, torch.tensor([[9.0, 1.0]]).double())
    both = select_layer("pca", HeadStatistics(gram_key=gram[None]), 2, "key").basis[0]
    torch.testing.assert_close(both, torch.stack((first, second)))


@pytest.mark.parametrize("score_from", ["both", "key", "query"])
def test_no_other_plane_holds_more(score_from):
    keys, queries = rows(3, 50, 12) * torch.linspace(1, 3, 12), rows(3, 50, 12, seed=1)
    statistics = HeadStatistics(gram_key=keys.mT @ keys, gram_query=queries.mT @ queries)
    activations = {"both": torch.cat((keys, queries), 1), "key": keys, "query": queries}[score_from]
    found = select_layer("pca", statistics, 5, score_from)
    assert found.basis.dtype == torch.float64
    torch.testing.assert_close(found.basis @ found.basis.mT, torch.eye(5).double().expand(3, 5, 5))
    values = torch.linalg.svdvals(activations) ** 2
    torch.testing.assert_close(found.variance, values)
    held = (activations @ found.basis.mT).square().sum((1, 2))
    torch.testing.assert_close(held, values[:, :5].sum(1))  # Eckart and Young: as much as any plane can
    largest = found.basis.gather(2, found.basis.abs().argmax(2, keepdim=True))
    assert (largest > 0).all()


def test_triangles_give_what_gram_matrices_give_and_more_exactly():
    keys, queries = rows(2, 40, 8), rows(2, 40, 8, seed=1) * 10.0 ** -torch.arange(8)
    keys = keys * 10.0 ** -torch.arange(8)
    sums = HeadStatistics(gram_key=keys.mT @ keys, gram_query=queries.mT @ queries)
    exact = HeadStatistics(triangle_key=torch.linalg.qr(keys).R, triangle_query=torch.linalg.qr(queries).R)
    found, finer = (select_layer("pca", statistics, 4) for statistics in (sums, exact))
    torch.testing.assert_close(found.basis, finer.basis, rtol=0, atol=1e-8)
    # The last of the sums of squares is 1e-14 of the first, which a Gram matrix in fp64 does not resolve.
    wanted = torch.linalg.svdvals(torch.cat((keys, queries), 1)) ** 2
    torch.testing.assert_close(finer.variance, wanted, rtol=1e-6, atol=0)


def test_a_rank_below_the_kept_width_is_told():
    keys = rows(2, 3, 8)
    keys[1] = 0
    found = select_layer("pca", HeadStatistics(gram_key=keys.mT @ keys), 4, "key", layer=5)
    assert found.warnings[0].startswith("layer 5: numerical rank below the kept width 4 (head 0: 3, head 1: 0)")
    torch.testing.assert_close(found.basis @ found.basis.mT, torch.eye(4).double().expand(2, 4, 4))
