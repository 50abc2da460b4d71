from dataclasses import replace
from itertools import combinations

import pytest
import torch

from lapcli.errors import DataError, UsageError
from lapcli.selectors.base import HeadStatistics
from lapcli.selectors.registry import CHANNEL_SELECTORS, SELECTORS, select_layer, selector

H, K, KEPT = 3, 32, 16


def random_statistics(heads=H, width=K, seed=0):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    keys, queries = normal(heads, 200, width), normal(heads, 200, width)
    return HeadStatistics(
        gram_key=keys.mT @ keys,
        gram_query=queries.mT @ queries,
        magnitude_key=normal(heads, width).abs(),
        magnitude_query=normal(heads, width).abs(),
        wanda_key=normal(heads, width).abs(),
        wanda_query=normal(heads, width).abs(),
        saliency_key=normal(heads, width).abs(),
        saliency_query=normal(heads, width).abs(),
        tokens=200,
    )


@pytest.fixture
def statistics():
    return random_statistics()


@pytest.mark.parametrize("score_from", ["both", "key", "query"])
def test_no_selector_is_a_no_op_or_another_one(statistics, score_from):
    kept = {method: select_layer(method, statistics, KEPT, score_from).kept for method in CHANNEL_SELECTORS}
    first = torch.arange(KEPT).expand(H, KEPT)
    for method, chosen in kept.items():
        assert chosen.shape == (H, KEPT)
        assert chosen.dtype == torch.int64
        assert (chosen.diff() > 0).all()
        assert not torch.equal(chosen, first), method
    for one, other in combinations(kept, 2):
        assert not torch.equal(kept[one], kept[other]), (one, other)


@pytest.mark.parametrize("method", ["drrqr", "grad", "s-wanda", "l1", "pca"])
def test_score_from_decides(statistics, method):
    key, query, both = (select_layer(method, statistics, KEPT, side)[0] for side in ("key", "query", "both"))
    assert not torch.equal(key, query)
    assert not torch.equal(key, both)
    assert not torch.equal(query, both)


@pytest.mark.parametrize("method", SELECTORS)
@pytest.mark.parametrize("score_from", ["both", "key", "query"])
def test_what_is_needed_is_enough_and_nothing_less_is(statistics, method, score_from):
    needs = SELECTORS[method].needs(score_from)
    absent = {name: None for name in statistics.__dataclass_fields__ if name not in needs | {"tokens"}}
    if not needs:
        absent.pop("magnitude_key")  # rand needs only to know how many channels there are
    enough = replace(statistics, **absent)
    # Channels, or directions.
    assert torch.equal(
        select_layer(method, enough, KEPT, score_from)[0], select_layer(method, statistics, KEPT, score_from)[0]
    )
    for name in needs:
        with pytest.raises(DataError, match=f"layer 7: {method} needs {name}"):
            select_layer(method, replace(statistics, **{name: None}), KEPT, score_from, layer=7)


def test_names_and_keys_agree():
    assert all(name == found.name for name, found in SELECTORS.items())
    assert all(found.summary and found.source for found in SELECTORS.values())


def test_missing_saliency_is_answered_with_the_command_that_collects_it(statistics):
    with pytest.raises(DataError) as caught:
        select_layer("grad", replace(statistics, saliency_key=None), KEPT)
    assert "lapcli calibrate --grad" in (caught.value.hint or "")


@pytest.mark.parametrize(("typed", "meant"), [("drqr", "drrqr"), ("Wanda", "s-wanda"), ("random", "rand")])
def test_an_unknown_method_names_the_nearest(typed, meant):
    with pytest.raises(UsageError) as caught:
        selector(typed)
    assert f"did you mean {meant}?" in (caught.value.hint or "")
    assert all(name in (caught.value.hint or "") for name in SELECTORS)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["gram_key", "magnitude_query", "saliency_key", "wanda_key"])
def test_statistics_that_are_not_finite_name_layer_and_head(statistics, name, value):
    bad = getattr(statistics, name).clone()
    bad[-1] = value
    with pytest.raises(DataError, match=f"layer 4: {name} holds NaN or infinity in head {H - 1}"):
        select_layer("drrqr", replace(statistics, **{name: bad}), KEPT, layer=4)


def test_statistics_that_do_not_fit_each_other_are_refused(statistics):
    with pytest.raises(DataError, match=r"layer 2: gram_query has shape \[3, 31, 31\]"):
        select_layer("drrqr", replace(statistics, gram_query=statistics.gram_query[:, 1:, 1:]), KEPT, layer=2)
    with pytest.raises(DataError, match=r"saliency_key has shape \[2, 32\]"):
        select_layer("grad", replace(statistics, saliency_key=statistics.saliency_key[1:]), KEPT)
    with pytest.raises(DataError, match="nothing of its heads"):
        select_layer("rand", HeadStatistics(tokens=5), 1)


@pytest.mark.parametrize("method", ["drrqr", "pca"])
def test_what_is_no_gram_matrix_names_the_layer(statistics, method):
    crooked = statistics.gram_key.clone()
    crooked[1, 0, 1] += 100
    with pytest.raises(DataError, match=r"layer 3: head 1: .*not symmetric"):
        select_layer(method, replace(statistics, gram_key=crooked), KEPT, layer=3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"score_from": "keys"}, "--score-from 'keys'"),
        ({"f": 0.5}, "--f 0.5"),
        ({"f": float("nan")}, "--f nan"),
        ({"seed": -1}, "--seed -1"),
        ({"kept_width": 0}, "kept width of 0"),
        ({"kept_width": K + 1}, "kept width of 33"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(statistics, wrong, message):
    arguments = {"kept_width": KEPT} | wrong
    with pytest.raises(UsageError, match=message):
        select_layer("drrqr", statistics, **arguments)
