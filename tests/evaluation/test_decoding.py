"""Writing with a cache, against argmax over whole texts without one."""

import random
from contextlib import contextmanager

import pytest
import torch

from lapcli.errors import ModelError
from lapcli.evaluation.decoding import Writing, stop_tokens, write_greedily
from lapcli.evaluation.scoring import LoadedModel, Request, score
from lapcli.families.loading import load_model, resolve_model
from lapcli.reporting import SilentReporter
from lapcli.testing.decoding import greedy_by_whole_passes
from lapcli.testing.models import byte_tokenizer
from lapcli.testing.stock_models import tiny_stock_model

LENGTHS = (5, 17, 33, 12, 40, 7)


def some_prompts(lengths=LENGTHS, seed=8):
    rng = random.Random(seed)
    return [[rng.randrange(3, 259) for _ in range(length)] for length in lengths]


def write(loaded, prompts, limit=6, batch_size=None, stop=(), ends=None, reporter=None):
    return write_greedily(
        loaded,
        [Writing(prompt, limit, ends) for prompt in prompts],
        stop=stop,
        batch_size=batch_size,
        reporter=reporter or SilentReporter(),
        description="test",
    )


@contextmanager
def passes(model):
    """Rows and tokens of each pass through the model."""
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple((args[0] if args else kwargs["input_ids"]).shape)), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


@pytest.fixture(
    scope="module", params=["gated_deltanet", "mamba2", "qwen3_next", "nemotron_h", "olmo_hybrid", "zamba2"]
)
def writer(request, tiny, tmp_path_factory):
    if request.param == "gated_deltanet":
        return tiny
    source = resolve_model(str(tiny_stock_model(request.param, tmp_path_factory.mktemp(request.param))))
    return LoadedModel(load_model(source), byte_tokenizer(), request.param)


def test_a_batch_of_unlike_lengths_writes_what_single_rows_write(writer):
    prompts = some_prompts()
    wanted = [greedy_by_whole_passes(writer.model, prompt, 6) for prompt in prompts]
    assert write(writer, prompts, batch_size=6) == wanted
    assert write(writer, prompts, batch_size=1) == wanted


def test_prompts_go_through_once_and_each_new_token_alone(writer):
    with passes(writer.model) as seen:
        write(writer, some_prompts(), limit=7, batch_size=4)
    longest, shortest = 40, 7
    assert seen == [(4, longest), *[(4, 1)] * 6, (2, shortest), *[(2, 1)] * 6]


def test_rows_end_by_their_own_rules_and_a_batch_with_its_last(tiny):
    prompts = some_prompts()
    whole = write(tiny, prompts, limit=9)
    stop = whole[0][4]
    wanted = [row[: row.index(stop)] if stop in row else row for row in whole]
    assert write(tiny, prompts, limit=9, stop={stop}) == wanted
    ends = [Writing(prompt, 2 + number, None) for number, prompt in enumerate(prompts)]
    ends[5] = Writing(prompts[5], 9, lambda written: len(written) == 3)
    with passes(tiny.model) as seen:
        found = write_greedily(tiny, ends, batch_size=6, reporter=SilentReporter(), description="test")
    assert found == [row[:size] for row, size in zip(whole, (2, 3, 4, 5, 6, 3), strict=True)]
    assert len(seen) == 6  # as many as the longest row takes, which is not the limit of the last


def test_writing_is_greedy_whatever_the_model_says_of_itself(tiny):
    prompts = some_prompts((3, 5, 1))
    wanted = write(tiny, prompts, limit=4)
    saved = tiny.model.generation_config
    try:
        tiny.model.generation_config = type(saved)(
            do_sample=True, temperature=9.0, max_new_tokens=1, repetition_penalty=5.0, eos_token_id=[*range(259)]
        )
        assert write(tiny, prompts, limit=4, batch_size=3) == wanted
        assert tiny.model.generation_config.temperature == 9.0
        assert stop_tokens(tiny) == frozenset(range(259))
    finally:
        tiny.model.generation_config = saved
    assert all(len(answer) == 4 for answer in wanted)


def test_greedy_scores_mean_that_writing_gives_these_tokens(tiny):
    prompts = some_prompts()
    answers = write(tiny, prompts, batch_size=4)
    wrong = [answer.copy() for answer in answers]
    for number, answer in enumerate(wrong):
        answer[number] = 3 if answer[number] != 3 else 4

    def greedy(written):
        requests = [Request(prompt + answer, 6) for prompt, answer in zip(prompts, written, strict=True)]
        found = score(tiny, requests, batch_size=None, reporter=SilentReporter(), description="test")
        return [answer.greedy for answer in found]

    assert greedy(answers) == [True] * 6
    assert greedy(wrong) == [False] * 6


def test_out_of_memory_goes_on_with_smaller_batches(tiny, monkeypatch):
    prompts, reporter = some_prompts(), SilentReporter()
    wanted = write(tiny, prompts)
    generate = tiny.model.generate

    def short_of_memory(input_ids, **rest):
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(input_ids=input_ids, **rest)

    monkeypatch.setattr(tiny.model, "generate", short_of_memory)
    assert write(tiny, prompts, reporter=reporter) == wanted
    assert reporter.warnings == [
        "memory ran out; going on with batches of 3",
        "memory ran out; going on with batches of 1",
    ]


def test_logits_that_are_not_numbers_are_an_error(tiny):
    head = tiny.model.lm_head.weight
    saved = head.detach().clone()
    try:
        with torch.no_grad():
            head[7] = float("nan")
        with pytest.raises(ModelError, match="tiny gives logits that are not numbers"):
            write(tiny, some_prompts((3,)))
    finally:
        with torch.no_grad():
            head.copy_(saved)
