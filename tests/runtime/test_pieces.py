"""Prompts in pieces of fixed lengths: the same as in one pass, whatever their length and whatever came before."""

import pytest
import torch

from lapcli.families.loading import load_model, resolve_model
from lapcli.models.cache import RecurrentCache
from lapcli.runtime import Engine
from lapcli.runtime.pieces import LENGTHS, Piece, Pieces, lengths_within, pieces_of
from lapcli.runtime.prefill import OwnPrefiller
from lapcli.testing.decoding import prompts_of
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet, tiny_qdelta

MODELS = {
    "gated": (tiny_gated_deltanet, {"num_v_heads": 4}),
    "no convolution": (tiny_gated_deltanet, {"use_short_conv": False}),
    "elu": (tiny_delta_net, {"qk_activation": "elu", "qk_norm": "sum", "use_gate": True}),
    "query feedback": (tiny_qdelta, {}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    make, config = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model") / "model"
    make(folder, **config)
    return load_model(resolve_model(str(folder)), dtype=torch.float64).requires_grad_(False)


def held_by(cache):
    return [tensor for state in cache.layers for tensor in state.tensors()]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 31, 32, 33, 64, 100])
def test_as_in_one_pass(model, count):
    """fp64: chunks begin elsewhere, which changes the order of sums."""
    (first, second) = (torch.tensor([row]) for row in prompts_of(count, 11))
    whole, parts = RecurrentCache(), RecurrentCache()
    runner = Pieces(model, capture=False, lengths=(8, 32))
    # Another row ran before: nothing of it may remain.
    runner.run(second, RecurrentCache())
    for tokens in (first, second):
        wanted = model(input_ids=tokens, cache=whole, use_cache=True, logits_to_keep=1).logits[:, -1]
        found = runner.run(tokens, parts)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        assert parts.seen_tokens == whole.seen_tokens
        for ours, theirs in zip(held_by(parts), held_by(whole), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_what_a_cache_holds_is_its_own(model):
    runner, cache = Pieces(model, capture=False, lengths=(8,)), RecurrentCache()
    runner.run(torch.tensor([[3, 4, 5]]), cache)
    before = [tensor.clone() for tensor in held_by(cache)]
    runner.run(torch.tensor([[9, 8]]), RecurrentCache())
    assert all(torch.equal(*pair) for pair in zip(before, held_by(cache), strict=True))


def test_the_cut():
    assert list(pieces_of(4500)) == [Piece(0, 2048, 2048), Piece(2048, 2048, 2048), Piece(4096, 404, 1024)]
    for tokens in (1, 64, 65, 2047, 2048, 2049, 10000):
        cut = list(pieces_of(tokens))
        assert sum(piece.count for piece in cut) == tokens
        assert all(piece.length in LENGTHS and piece.count <= piece.length for piece in cut)
        assert all(piece.count == LENGTHS[-1] for piece in cut[:-1])


def test_lengths_of_passes_are_no_longer_than_asked_for():
    assert lengths_within(None) == lengths_within(2048) == lengths_within(10**6) == LENGTHS
    assert lengths_within(2047) == LENGTHS[:3]
    assert lengths_within(64) == lengths_within(1) == LENGTHS[:1]


def test_an_engine_that_runs_prompts_so(tmp_path):
    """As on a GPU, without graphs."""
    tiny_gated_deltanet(tmp_path / "model")
    engine, plain = (Engine.load(str(tmp_path / "model"), max_rows=2) for _ in range(2))
    assert isinstance(engine.plan.prefiller, OwnPrefiller)
    engine.plan.prefiller.pieces = Pieces(engine.model, capture=False, lengths=(8, 16))
    (row,) = prompts_of(45)
    slots = []
    for one in (engine, plain):
        slots.append(one.prefill(row[:20]).slot)
        one.prefill(row[20:], slots[-1])
    for token in (5, 6):
        found, wanted = (one.step([token], [slot]) for one, slot in zip((engine, plain), slots, strict=True))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
