"""Packed documents through decoders that read no boundaries: as if alone (case 9), in few calls."""

import random
from itertools import pairwise

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lapcli.families.loading import load_model
from lapcli.families.source import resolve_model
from lapcli.models.loss import IGNORED
from lapcli.testing.stock_models import STOCK_MODELS, tiny_stock_model
from lapcli.training.distillation import distillation_sums, head_of
from lapcli.training.packing import PackedBatch, last_hidden, reads_packing
from lapcli.training.stream import PackedSequence

ROUNDING = 1e-5  # fp32, as the contract of families
ROWS = ((7, 1, 70, 18), (65, 2, 16, 13), (96,))
"""Lengths of documents: on both sides of a chunk of 64, several in a call, one that fills a row, and a single token."""


def packed(*rows, seed=0):
    chance = torch.Generator().manual_seed(seed)
    sequences = []
    for lengths in rows:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        ids = torch.randint(3, 259, (starts[-1],), generator=chance)
        sequences.append(PackedSequence(ids, tuple(starts[:-1]), "here"))
    return PackedBatch.of(sequences)


@pytest.mark.parametrize("model_type", list(STOCK_MODELS))
def test_the_loss_of_packed_documents_is_that_of_each_alone(model_type, tmp_path):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    model = load_model(resolve_model(str(tiny_stock_model(model_type, tmp_path / "m"))))
    assert not reads_packing(model)
    batch, head = packed(*ROWS), head_of(model)
    calls = []
    handle = model.get_decoder().register_forward_hook(lambda *_: calls.append(0))
    with torch.no_grad():
        hidden = last_hidden(model, batch)
        handle.remove()
        found = float(distillation_sums(hidden, head, None, None, batch.labels).cross_entropy)
        ids, wanted = batch.ids.flatten(), 0.0
        for start, end in batch.documents:
            assert (batch.labels[end - 1] == IGNORED).all()
            alone = model.get_decoder()(input_ids=ids[None, start:end], use_cache=False).last_hidden_state[0]
            labels = batch.labels[start:end]
            wanted += float(distillation_sums(alone, head, None, None, labels).cross_entropy)
            if end - start > 1:
                assert (hidden[start:end] - alone).abs().max() <= ROUNDING * alone.abs().max()
    assert found == pytest.approx(wanted, rel=ROUNDING)
    assert len(calls) == len(batch.calls) < len(batch.documents) - 1


def cost(calls, each=256):
    return sum(max(sizes) * len(sizes) + each for sizes in calls)


def test_calls_part_the_documents_and_cost_least():
    for seed in range(30):
        chance = random.Random(seed)
        lengths = [chance.choice((1, 2, 5, 30, 31, 200, 400, 900)) + chance.randrange(3) for _ in range(9)]
        batch = packed(lengths, seed=seed)
        assert sorted(span for call in batch.calls for span in call) == [
            (start, end) for start, end in batch.documents if end - start > 1
        ]
        found = [[end - start for start, end in call] for call in batch.calls]
        rows = sorted((length for length in lengths if length > 1), reverse=True)
        # Whatever way to part them by length there is.
        cuts = [[i for i in range(1, len(rows)) if number >> i & 1] for number in range(0, 2 ** len(rows), 2)]
        ways = [[rows[start:end] for start, end in pairwise([0, *each, len(rows)])] for each in cuts]
        assert cost(found) == min(map(cost, ways))


def test_one_token_makes_no_call():
    assert packed((1, 1, 1)).calls == ()
    assert packed((3,), (3,)).calls == (((0, 3), (3, 6)),)
