"""How much goes through a model at once: the arithmetic of it, on a device that says what is free."""

from types import SimpleNamespace

import pytest
import torch

from lapcli.errors import ModelError
from lapcli.evaluation import rows, scoring
from lapcli.evaluation.rows import Rows, free_bytes, logits_of_a_pass, tokens_of_a_pass, vocabulary_of
from lapcli.evaluation.scoring import Request
from lapcli.reporting import SilentReporter


def model_of(dtype=torch.float32, vocabulary=1000, widest=512):
    """Enough of a model: embeddings, a layer, a vector, and a convolution."""
    weights = [
        torch.empty(vocabulary, 64, device="meta"),
        torch.empty(64, widest, device="meta"),
        torch.empty(100_000, device="meta"),
        torch.empty(9_000, 1, 4, device="meta"),
    ]
    return SimpleNamespace(
        device=torch.device("cpu"),
        dtype=dtype,
        config=SimpleNamespace(vocab_size=vocabulary),
        parameters=lambda: iter(weights),
    )


@pytest.mark.parametrize(
    ("free", "dtype", "widest", "tokens"),
    [
        # A quarter of what is free, over 16 widths of a token in 4 or 2 bytes.
        (1 << 30, torch.float32, 512, (1 << 28) // (16 * 512 * 4)),
        (1 << 30, torch.bfloat16, 512, (1 << 28) // (16 * 512 * 2)),
        (1 << 30, torch.float32, 3000, (1 << 28) // (16 * 3000 * 4)),
        (1 << 37, torch.bfloat16, 2048, 1 << 18),  # enough is enough
        (1 << 10, torch.float32, 512, 1),  # one has to go through
        (None, torch.float32, 512, 4096),
    ],
    ids=["fp32", "bf16", "wide", "much is free", "nothing is free", "a CPU"],
)
def test_tokens_of_a_pass_go_by_what_is_free_and_by_the_widest_layer(monkeypatch, free, dtype, widest, tokens):
    monkeypatch.setattr(rows, "free_bytes", lambda device: free)
    assert tokens_of_a_pass(model_of(dtype, widest=widest)) == tokens


@pytest.mark.parametrize(("free", "logits"), [(1 << 20, 1 << 16), (1 << 50, 1 << 30), (3, 1), (None, 1 << 30)])
def test_logits_of_a_pass_go_by_what_is_free(monkeypatch, free, logits):
    monkeypatch.setattr(rows, "free_bytes", lambda device: free)
    assert logits_of_a_pass(model_of()) == logits


def test_what_is_free_of_a_gpu_is_what_nobody_has_or_no_tensor_uses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    assert free_bytes(torch.device("cuda")) == 1200
    assert free_bytes(torch.device("cpu")) is None


def test_the_vocabulary_of_a_model_of_text_and_pictures_is_that_of_its_text():
    assert vocabulary_of(SimpleNamespace(vocab_size=3, text_config=SimpleNamespace(vocab_size=5))) == 5


def test_rows_are_those_asked_for_or_those_that_suit():
    assert [Rows("m", None, SilentReporter()).at(suits) for suits in (0, 1, 70)] == [1, 1, 70]
    assert [Rows("m", 6, SilentReporter()).at(suits) for suits in (0, 1, 70)] == [6, 6, 6]


def test_memory_that_ran_out_once_is_remembered():
    reporter = SilentReporter()
    asked = Rows("m", None, reporter)
    requests = [Request([1, 2, 3], 1)] * 9

    def answer(batch):
        if len(batch) > 2:
            raise torch.OutOfMemoryError
        return [len(batch)] * len(batch)

    assert asked.run(requests, answer) == [2, 2]
    assert asked.at(70) == 2
    assert asked.at(1) == 1
    assert reporter.warnings == [f"memory ran out; going on with batches of {count}" for count in (4, 2)]

    def never(batch):
        raise torch.OutOfMemoryError

    with pytest.raises(ModelError, match="memory ran out on m with one row of 3 tokens"):
        asked.run(requests, never)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("tokens", "logits"), [(4096, 1 << 30), (300, 1 << 30), (10**9, 259 * 500), (10, 10)])
def test_a_batch_holds_as_many_requests_as_tokens_and_logits_allow(uniform, monkeypatch, keeps, tokens, logits):
    """Counted by hand: each row as wide as the first, logits from the first position that any row needs."""
    if keeps:
        plain = uniform.model.forward
        monkeypatch.setattr(
            type(uniform.model),
            "forward",
            lambda self, input_ids, use_cache, logits_to_keep=0: plain(input_ids, use_cache),
        )
    monkeypatch.setattr(scoring, "tokens_of_a_pass", lambda model: tokens)
    monkeypatch.setattr(scoring, "logits_of_a_pass", lambda model: logits)
    runner = scoring._Runner(uniform, None, SilentReporter())
    requests = [Request([5] * length, 1 + length // 3) for length in range(90, 20, -1)]

    def fits(count):
        part = requests[:count]
        first = min(len(request.tokens) - 1 - request.scored for request in part) if keeps else 0
        return count * 89 <= tokens and count * (89 - first) * 259 <= logits

    assert runner.rows(requests) == max([count for count in range(1, 71) if fits(count)], default=1)


def test_answers_together_are_those_of_each_row(uniform):
    """What a GPU does, against log-softmax of each row in fp64."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 12, 259, generator=generator)
    requests = [
        Request(torch.randint(0, 259, (length,), generator=generator).tolist(), scored)
        for length, scored in ((13, 3), (13, 12), (6, 1), (2, 1), (9, 4))
    ]
    requests[2] = Request([*requests[2].tokens[:-1], int(logits[2, 4].argmax())], 1)
    runner = scoring._Runner(uniform, None, SilentReporter())
    found = runner._together(logits, 0, requests)
    for row, request, answer in zip(logits.double().log_softmax(-1), requests, found, strict=True):
        places = range(len(request.tokens) - 1 - request.scored, len(request.tokens) - 1)
        wanted = sum(float(row[place, request.tokens[place + 1]]) for place in places)
        # The sum of exponentials is fp32.
        assert answer.log_probability == pytest.approx(wanted, rel=1e-6)
        assert answer.greedy == all(int(row[place].argmax()) == request.tokens[place + 1] for place in places)
    assert [answer.greedy for answer in found] == [False, False, True, False, False]
    # And where the first logits are not there.
    late = [requests[0], requests[4]]
    assert runner._together(logits[[0, 4], 4:], 4, late) == [found[0], found[4]]
