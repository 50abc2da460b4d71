"""`l1`, `s-wanda`, `grad` and `rand` on numbers worked out by hand."""

import pytest
import torch

from lapcli.selectors.base import HeadStatistics, keep_best
from lapcli.selectors.l1 import channel_magnitudes
from lapcli.selectors.registry import select_layer
from lapcli.selectors.s_wanda import channel_wanda


def of_weights(query, key, input_sq):
    """The statistics that calibration makes of weights `[H, K, D]` and inputs."""
    return {
        "magnitude_query": channel_magnitudes(query),
        "magnitude_key": channel_magnitudes(key),
        "wanda_query": channel_wanda(query, input_sq),
        "wanda_key": channel_wanda(key, input_sq),
    }


# One head of three channels, two inputs.
BY_HAND = HeadStatistics(
    **of_weights(
        query=torch.tensor([[[1.0, -2.0], [0.0, 3.0], [-1.0, 1.0]]]),
        key=torch.tensor([[[0.5, 0.0], [-1.0, -1.0], [4.0, 0.0]]]),
        input_sq=torch.tensor([4.0, 9.0], dtype=torch.float64),  # norms 2 and 3
    ),
    saliency_query=torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64),
    saliency_key=torch.tensor([[0.5, 0.0, 0.25]], dtype=torch.float64),
)


@pytest.mark.parametrize(
    ("method", "score_from", "scores", "kept"),
    [
        ("l1", "query", [3, 3, 2], [0]),
        ("l1", "key", [0.5, 2, 4], [2]),
        ("l1", "both", [3.5, 5, 6], [2]),
        ("s-wanda", "query", [8, 9, 5], [1]),
        ("s-wanda", "key", [1, 5, 8], [2]),
        ("s-wanda", "both", [9, 14, 13], [1]),
        ("grad", "query", [0.1, 0.2, 0.3], [2]),
        ("grad", "key", [0.5, 0, 0.25], [0]),
        ("grad", "both", [0.6, 0.2, 0.55], [0]),
    ],
)
def test_scores_and_choice(method, score_from, scores, kept):
    selection = select_layer(method, BY_HAND, 1, score_from)
    torch.testing.assert_close(selection.scores, torch.tensor([scores], dtype=torch.float64))
    assert selection.kept.tolist() == [kept]
    assert selection.bounds is None
    assert selection.warnings == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_fp64_whatever_the_weights_are(dtype):
    row = torch.tensor([2.0**30, 1.0]).to(dtype)  # in fp32 the one is lost beside 2^30
    weights = torch.stack([row * torch.tensor([1.0, 0.0], dtype=dtype), row])[None]
    statistics = HeadStatistics(**of_weights(weights, weights, torch.ones(2, dtype=torch.float64)))
    for method in ("l1", "s-wanda"):
        assert select_layer(method, statistics, 1, "query").kept.tolist() == [[1]]


def test_ties_keep_the_lower_index():
    scores = torch.tensor([[1.0, 2, 2, 1, 2, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    assert keep_best(scores, 2).kept.tolist() == [[1, 2], [0, 1]]
    assert keep_best(scores, 4).kept.tolist() == [[0, 1, 2, 4], [0, 1, 2, 3]]


def test_every_head_is_chosen_by_itself():
    scores = torch.rand(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    together = keep_best(scores, 7).kept
    for head in range(5):
        assert keep_best(scores[head : head + 1], 7).kept.tolist() == [together[head].tolist()]


def rand(kept, **where):
    statistics = HeadStatistics(magnitude_key=torch.zeros(3, 32, dtype=torch.float64))
    return select_layer("rand", statistics, kept, "key", **where)


def test_random_choice_depends_on_seed_layer_and_head():
    first = rand(8, seed=1, layer=2)
    assert torch.equal(first.kept, rand(8, seed=1, layer=2).kept)
    assert not torch.equal(first.kept, rand(8, seed=2, layer=2).kept)
    assert not torch.equal(first.kept, rand(8, seed=1, layer=3).kept)
    assert len({tuple(head) for head in first.kept.tolist()}) == 3


def test_random_choice_is_the_same_everywhere():
    assert rand(5).kept[0].tolist() == [13, 14, 16, 20, 23]


def test_random_choice_of_a_smaller_width_is_part_of_that_of_a_larger():
    small, large = rand(4, seed=5).kept, rand(20, seed=5).kept
    for few, many in zip(small.tolist(), large.tolist(), strict=True):
        assert set(few) < set(many)


def test_random_choice_is_uniform():
    kept = torch.cat([rand(8, seed=seed).kept.flatten() for seed in range(400)])
    share = torch.bincount(kept, minlength=32) / (400 * 3)
    # 1200 draws of probability 1/4: five standard deviations.
    assert (share - 0.25).abs().max() < 5 * (0.25 * 0.75 / 1200) ** 0.5
