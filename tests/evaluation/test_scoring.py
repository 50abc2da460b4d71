import math
import random

import pytest
import torch

from lapcli.errors import ModelError
from lapcli.evaluation import scoring
from lapcli.evaluation.scoring import LoadedModel, Request, score
from lapcli.families.loading import load_model, resolve_model
from lapcli.reporting import SilentReporter
from lapcli.testing.models import byte_tokenizer
from lapcli.testing.stock_models import tiny_stock_model


def run(loaded, requests, batch_size=None, reporter=None):
    return score(loaded, requests, batch_size=batch_size, reporter=reporter or SilentReporter(), description="test")


def some_requests(count, seed=0):
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        tokens = [rng.randrange(3, 259) for _ in range(rng.randint(2, 70))]
        requests.append(Request(tokens, rng.randint(1, len(tokens) - 1)))
    return requests


def by_the_definition(loaded, request):
    """log p(token | all before it), one forward pass a token."""
    total, greedy = 0.0, True
    tokens = list(request.tokens)
    for end in range(len(tokens) - request.scored, len(tokens)):
        logits = loaded.model(input_ids=torch.tensor([tokens[:end]])).logits[0, -1].double()
        total += float(torch.log_softmax(logits, -1)[tokens[end]])
        greedy &= int(logits.argmax()) == tokens[end]
    return total, greedy


def test_scores_are_those_of_the_definition(tiny):
    requests = some_requests(12)
    with torch.no_grad():
        wanted = [by_the_definition(tiny, request) for request in requests]
    found = run(tiny, requests)
    # fp32 logits of size one, up to 70 of them summed.
    assert [answer.log_probability for answer in found] == pytest.approx([total for total, _ in wanted], abs=1e-4)
    assert [answer.greedy for answer in found] == [greedy for _, greedy in wanted]


@pytest.mark.parametrize("batch_size", [2, 8, 64, None])
def test_batches_give_what_single_rows_give(tiny, batch_size):
    requests = some_requests(21, seed=4)
    alone = run(tiny, requests, 1)
    together = run(tiny, requests, batch_size)
    assert [answer.log_probability for answer in together] == pytest.approx(
        [answer.log_probability for answer in alone], abs=1e-4
    )


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next", "nemotron_h", "olmo_hybrid"])
def test_padding_changes_nothing_in_recurrent_models(tmp_path, model_type):
    """Rows of 2 to 71 tokens in one batch: states and convolutions of the short ones run on over padding, unread."""
    source = resolve_model(str(tiny_stock_model(model_type, tmp_path)))
    loaded = LoadedModel(load_model(source), byte_tokenizer(), model_type)
    requests = some_requests(9, seed=2)
    alone, together = run(loaded, requests, 1), run(loaded, requests, 9)
    assert len({len(request.tokens) for request in requests}) > 5
    # fp32 sums of up to 70 log-probabilities of about 5.
    assert [answer.log_probability for answer in together] == pytest.approx(
        [answer.log_probability for answer in alone], rel=1e-5, abs=1e-4
    )


@pytest.fixture
def at_once(monkeypatch):
    """Batches are looked at as on a GPU: all rows together, some logits at a time."""
    begin = scoring._Runner.__init__

    def on_a_gpu(self, *args):
        begin(self, *args)
        self._on_cpu = False

    monkeypatch.setattr(scoring._Runner, "__init__", on_a_gpu)


@pytest.mark.parametrize("logits", [1, 259 * 7, 1 << 28], ids=["a token at a time", "seven", "all"])
def test_rows_looked_at_together_are_those_one_by_one(tiny, monkeypatch, at_once, logits):
    requests = some_requests(12, seed=3)
    # Two that are greedy, so that both answers come.
    for number in (2, 7):
        tokens = list(requests[number].tokens)
        with torch.no_grad():
            tokens += [int(tiny.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())]
        requests[number] = Request(tokens, 1)
    monkeypatch.setattr(scoring, "_MAX_LOGITS", logits)
    with torch.no_grad():
        wanted = [by_the_definition(tiny, request) for request in requests]
    found = run(tiny, requests, 5)
    assert [answer.log_probability for answer in found] == pytest.approx([total for total, _ in wanted], abs=1e-4)
    assert [answer.greedy for answer in found] == [greedy for _, greedy in wanted]
    assert {True, False} == {answer.greedy for answer in found}


def test_one_row_without_numbers_is_an_error_among_others(model_of_logits, at_once):
    def logits(ids):
        found = torch.zeros(*ids.shape, 259)
        found[1, -1, 5] = math.nan
        return found

    with pytest.raises(ModelError, match="made up gives logits that are not numbers"):
        run(model_of_logits(logits), [Request([1, 2, 3], 1)] * 3)


def test_uniform_logits_cost_the_log_of_the_vocabulary(uniform):
    (found,) = run(uniform, [Request([5, 6, 7, 8], 3)])
    assert found.log_probability == pytest.approx(-3 * math.log(259))


def test_out_of_memory_goes_on_with_smaller_batches(model_of_logits):
    def logits(ids):
        if len(ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(*ids.shape, 259)

    loaded = model_of_logits(logits)
    reporter = SilentReporter()
    found = run(loaded, [Request([1, 2, 3], 2)] * 9, 8, reporter)
    assert [answer.log_probability for answer in found] == pytest.approx([-2 * math.log(259)] * 9)
    assert loaded.model.rows == [8, 4, 2, 2, 2, 2, 1]
    assert reporter.warnings[-1] == "memory ran out; going on with batches of 2"


def test_out_of_memory_on_one_row_says_how_long_it_was(model_of_logits):
    def logits(ids):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ModelError, match="one row of 5 tokens"):
        run(model_of_logits(logits), [Request([1, 2, 3, 4, 5], 2)] * 4)


def test_logits_that_are_not_numbers_are_an_error(model_of_logits):
    loaded = model_of_logits(lambda ids: torch.full((*ids.shape, 259), math.nan))
    with pytest.raises(ModelError, match="made up gives logits that are not numbers"):
        run(loaded, [Request([1, 2, 3], 2)])
