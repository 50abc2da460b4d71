from dataclasses import replace

import numpy as np
import pytest
import torch

from lapcli.selectors import drrqr
from lapcli.selectors.base import HeadStatistics
from lapcli.selectors.registry import select_layer
from lapcli.selectors.strong_rrqr import strong_rrqr_gram
from lapcli.selectors.strong_rrqr_qr import stack_triangles

H, ROWS, K = 5, 120, 24


def activations(seed, heads=H, width=K):
    return np.abs(np.random.default_rng(seed).standard_normal((heads, ROWS, width)))


def grams(keys, queries):
    return HeadStatistics(
        gram_key=torch.as_tensor(keys.swapaxes(1, 2) @ keys),
        gram_query=torch.as_tensor(queries.swapaxes(1, 2) @ queries),
        tokens=ROWS,
    )


def test_every_head_is_that_of_its_joint_matrix():
    keys, queries = activations(0), activations(1)
    selection = select_layer("drrqr", grams(keys, queries), 10, f=1.01)
    for head in range(H):
        joint = np.concatenate([keys[head], queries[head]])
        alone = strong_rrqr_gram(joint.T @ joint, 10, 1.01)
        assert selection.kept[head].tolist() == alone.kept.tolist()
        np.testing.assert_allclose(selection.scores[head], alone.scores, rtol=1e-10)
        bounds = {name: getattr(selection.bounds, name)[head].item() for name in selection.bounds._fields}
        assert (bounds["rank"], bounds["width"], bounds["swaps"]) == (K, 10, alone.swaps)
        assert bounds["rho"] == pytest.approx(alone.rho)
        for name, value in alone.bounds._asdict().items():
            assert bounds[name] == pytest.approx(value)
    assert selection.bounds.holds.all()
    assert selection.warnings == ()


@pytest.mark.parametrize("score_from", ["both", "key", "query"])
def test_streamed_triangles_choose_the_same(score_from):
    keys, queries = activations(2), activations(3)

    def streamed(side):
        half = ROWS // 2
        return torch.as_tensor(np.stack([stack_triangles(stack_triangles(head[:half]), head[half:]) for head in side]))

    exact = HeadStatistics(triangle_key=streamed(keys), triangle_query=streamed(queries))
    summed = select_layer("drrqr", grams(keys, queries), 10, score_from)
    streamed_choice = select_layer("drrqr", exact, 10, score_from)
    assert torch.equal(summed.kept, streamed_choice.kept)
    torch.testing.assert_close(summed.scores, streamed_choice.scores)


def test_sums_over_the_heads_that_share_a_key_head_are_the_stacked_activations():
    # Two query heads read one key head: their queries are more rows of the same matrix.
    keys, queries = activations(4, heads=1), activations(5, heads=2)
    shared = replace(grams(keys, keys), gram_query=grams(queries, queries).gram_query.sum(0, keepdim=True))
    stacked = grams(keys, queries.reshape(1, 2 * ROWS, K))
    assert torch.equal(select_layer("drrqr", shared, 8).kept, select_layer("drrqr", stacked, 8).kept)


def test_rank_below_the_kept_width_is_warned_of_by_head():
    keys, queries = activations(6), activations(7)
    for side in (keys, queries):
        side[1, :, 4:] = 0
        side[3, :, 9:] = side[3, :, :1]
    selection = select_layer("drrqr", grams(keys, queries), 12, layer=8)
    assert selection.bounds.rank.tolist() == [K, 4, K, 9, K]
    assert selection.bounds.width.tolist() == [12, 4, 12, 9, 12]
    assert set(range(4)) <= set(selection.kept[1].tolist())
    assert len(selection.warnings) == 1
    assert "layer 8: numerical rank below the kept width 12 (head 1: 4, head 3: 9)" in selection.warnings[0]


def test_a_bound_that_does_not_hold_is_warned_of(monkeypatch):
    choose = drrqr.strong_rrqr_gram

    def broken(gram, k, f):
        chosen = choose(gram, k, f)
        return replace(chosen, rho=2.5, bounds=chosen.bounds._replace(holds=False))

    monkeypatch.setattr(drrqr, "strong_rrqr_gram", broken)
    selection = select_layer("drrqr", grams(activations(8), activations(9)), 10, layer=6)
    assert not selection.bounds.holds.any()
    assert "layer 6: heads 0, 1, 2, 3, 4 miss the bounds" in selection.warnings[0]
    assert "rho 2.5, f 1.5" in selection.warnings[0]


def test_a_zero_and_a_repeated_channel_are_not_kept():
    keys, queries = activations(10), activations(11)
    for side in (keys, queries):
        side[:, :, 3] = 0
        side[:, :, 17] = side[:, :, 2]
    selection = select_layer("drrqr", grams(keys, queries), K - 2)
    assert selection.bounds.rank.tolist() == [K - 2] * H
    for kept in selection.kept.tolist():
        assert 3 not in kept
        assert len({2, 17} & set(kept)) == 1
