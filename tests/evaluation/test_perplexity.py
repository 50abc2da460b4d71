import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lapcli.data.documents import Document
from lapcli.errors import DataError, UsageError
from lapcli.evaluation.perplexity import measure_perplexity, rolling_windows
from lapcli.evaluation.results import compare
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.evaluation.tokenization import prompt_start, text_start, token_name, tokenizer_digest
from lapcli.reporting import SilentReporter
from lapcli.testing.models import byte_tokenizer

TEXTS = [
    Document("a", "The delta rule writes what the state does not hold yet."),
    Document("b", "Short."),
    Document("c", "x" * 65 + " and then, after a long word, others that fill more than two windows of it."),
]


def measure(loaded, documents=TEXTS, max_length=32, batch_size=None, **settings):
    return measure_perplexity(
        "text",
        documents,
        loaded,
        EvaluationSettings(**settings),
        max_length=max_length,
        batch_size=batch_size,
        reporter=SilentReporter(),
    )


@given(
    length=st.integers(0, 60),
    start=st.sampled_from([None, 1]),
    max_length=st.integers(2, 20),
    stride=st.integers(1, 20),
)
def test_windows_score_each_token_once_with_the_context_they_promise(length, start, max_length, stride):
    stride = min(stride, max_length)
    tokens = list(range(100, 100 + length))
    whole = tokens if start is None else [start, *tokens]
    windows = list(rolling_windows(tokens, start, max_length, stride))
    scored = [token for window in windows for token in window.tokens[-window.scored :]]
    assert scored == whole[1:]
    for number, window in enumerate(windows):
        assert len(window.tokens) <= max_length + 1
        assert window.scored <= (max_length if number == 0 else stride)
        end = whole.index(window.tokens[-1]) + 1
        # As much of the text as fits stands before the scored tokens.
        assert list(window.tokens) == whole[max(0, end - max_length - 1) : end]


def test_uniform_logits_have_the_vocabulary_for_a_perplexity(uniform):
    token, word = measure(uniform)
    tokens = sum(len(document.text) for document in TEXTS)
    words = sum(len(document.text.split()) for document in TEXTS)
    assert token.estimate.value == pytest.approx(259)
    assert word.estimate.value == pytest.approx(259 ** (tokens / words))
    assert token.counts == {"windows": 2 + 1 + 5, "tokens": tokens, "words": words}
    assert token.estimate.stderr == pytest.approx(0, abs=1e-9)


def test_perplexity_is_that_of_the_definition(tiny):
    """Windows of 32 tokens, each later one seeing one token before it, the last as many as fit; nothing shared."""
    total, count = 0.0, 0
    with torch.no_grad():
        for document in TEXTS:
            ids = [1, *(token for token in tiny.tokenizer(document.text).input_ids)]
            for place in range(1, len(ids)):
                window = (place - 1) // 32
                last = window == (len(ids) - 2) // 32
                begin = max(0, len(ids) - 1 - 32) if last else 32 * window
                logits = tiny.model(input_ids=torch.tensor([ids[begin:place]])).logits[0, -1].double()
                total += float(torch.log_softmax(logits, -1)[ids[place]])
                count += 1
    token, word = measure(tiny)
    assert token.counts["tokens"] == count
    # The mean of fp32 log-probabilities of about 5.5.
    assert math.log(token.estimate.value) == pytest.approx(-total / count, abs=1e-5)
    words = sum(len(document.text.split()) for document in TEXTS)
    assert math.log(word.estimate.value) == pytest.approx(-total / words, abs=1e-4)


def test_batches_of_one_equal_batches_of_eight(tiny):
    one, eight = measure(tiny, batch_size=1), measure(tiny, batch_size=8)
    for left, right in zip(one, eight, strict=True):
        assert math.log(left.estimate.value) == pytest.approx(math.log(right.estimate.value), abs=1e-5)
        assert left.settings == right.settings


def test_without_bos_the_first_token_is_context_only(uniform):
    with_bos, _ = measure(uniform)
    without, _ = measure(uniform, bos="never")
    assert without.counts["tokens"] == with_bos.counts["tokens"] - len(TEXTS)
    assert with_bos.settings["start_token"] == "<s>"
    assert without.settings["start_token"] is None
    with pytest.raises(UsageError, match="bos"):
        compare(with_bos, without)


def test_two_window_lengths_are_stored_and_not_compared(tiny):
    short, _ = measure(tiny, max_length=16)
    long, _ = measure(tiny, max_length=32)
    assert (short.settings["max_length"], long.settings["max_length"]) == (16, 32)
    assert (short.settings["stride"], long.settings["stride"]) == (16, 32)
    with pytest.raises(UsageError, match="max_length 16 and 32"):
        compare(short, long)


def test_overlapping_windows_are_not_compared_either(tiny):
    with pytest.raises(UsageError, match="stride 32 and 8"):
        compare(measure(tiny)[0], measure(tiny, stride=8)[0])


def test_limit_draws_windows_by_the_seed(uniform):
    limited = [measure(uniform, limit=3, seed=seed)[0] for seed in (0, 0, 1)]
    assert all(score.counts["windows"] == 3 for score in limited)
    assert limited[0] == limited[1]
    assert limited[0].settings != limited[2].settings


def test_a_text_of_no_tokens_is_an_error(uniform):
    with pytest.raises(DataError, match="no text to score"):
        measure(uniform, [Document("one", "x")], bos="never")


def test_start_tokens_follow_the_tokenizer():
    tokenizer = byte_tokenizer()
    assert text_start(tokenizer, "auto") == 1
    assert text_start(tokenizer, "never") is None
    # This tokenizer adds no BOS by itself, so that prompts have none unless asked for.
    assert prompt_start(tokenizer, "auto") is None
    assert prompt_start(tokenizer, "always") == 1
    tokenizer.bos_token = None
    assert token_name(tokenizer, text_start(tokenizer, "auto")) == "</s>"
    tokenizer.eos_token = None
    assert text_start(tokenizer, "auto") is None
    with pytest.raises(UsageError, match="neither a BOS nor an EOS"):
        text_start(tokenizer, "always")


def test_tokenizers_are_named_by_content():
    plain, padded, other = byte_tokenizer(), byte_tokenizer(), byte_tokenizer()
    padded(["a", "abc"], padding=True, truncation=True, max_length=2)
    other.add_tokens(["new"])
    assert tokenizer_digest(plain) == tokenizer_digest(padded)
    assert tokenizer_digest(plain) != tokenizer_digest(other)
