"""Continuous batching: what a row gets does not depend on who else is there."""

import pytest
import torch

from lapcli.errors import UsageError
from lapcli.families.loading import load_model
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.testing.decoding import full_logits, prompts_of


def run(batch):
    """All events, by row: tokens, text and reason."""
    found = {}
    while batch.unfinished:
        for event in batch.advance():
            tokens, text, reason = found.get(event.row, ((), "", None))
            assert reason is None
            found[event.row] = (tokens + event.tokens, text + event.text, event.reason)
    return found


def greedy(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(full_logits(model, tokens).argmax()))
    return tuple(tokens[len(prompt) :])


def test_greedy_rows_are_those_of_the_model_alone(engine, reference):
    """Seven rows through four slots, of several lengths, that end at several times."""
    prompts = prompts_of(3, 8, 1, 8, 15, 2, 3)
    batch = Batch(engine)
    counts = [1, 9, 4, 2, 7, 3, 12]
    for prompt, count in zip(prompts, counts, strict=True):
        batch.add(prompt, GenerationSettings(max_new_tokens=count))
    found = run(batch)
    for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        assert found[row] == (greedy(reference, prompt, count), "", "length")
    assert engine.slots.free == 4
    assert not engine.slots.positions


def test_samples_do_not_depend_on_the_batch(source):
    settings = [
        GenerationSettings(max_new_tokens=12, temperature=1.2, seed=5),
        GenerationSettings(max_new_tokens=5, temperature=0.9, top_k=40, seed=5),
        GenerationSettings(max_new_tokens=9, temperature=1.0, top_p=0.9, seed=6),
        GenerationSettings(max_new_tokens=7),
    ]
    prompts = prompts_of(4, 6, 4, 9)
    alone = []
    for prompt, wanted in zip(prompts, settings, strict=True):
        batch = Batch(Engine(load_model(source)))
        batch.add(prompt, wanted)
        alone.append(run(batch)[0])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        batch = Batch(Engine(load_model(source), max_rows=3))
        for row in order:
            batch.add(prompts[row], settings[row])
        found = run(batch)
        assert [found[number] for number in range(4)] == [alone[row] for row in order]
    other = Batch(Engine(load_model(source)))
    other.add(prompts[0], GenerationSettings(max_new_tokens=12, temperature=1.2, seed=6))
    assert run(other)[0] != alone[0]


def test_a_row_joins_in_the_middle(engine, reference):
    first, second = prompts_of(5, 7)
    batch = Batch(engine)
    batch.add(first, GenerationSettings(max_new_tokens=8))
    events = [event for _ in range(3) for event in batch.advance()]
    batch.add(second, GenerationSettings(max_new_tokens=3))
    while batch.unfinished:
        events += batch.advance()
    tokens = {row: tuple(t for event in events if event.row == row for t in event.tokens) for row in (0, 1)}
    assert tokens == {0: greedy(reference, first, 8), 1: greedy(reference, second, 3)}


def test_an_end_token_ends_a_row(engine, reference):
    (prompt,) = prompts_of(5)
    wanted = greedy(reference, prompt, 6)
    at = next(i for i in range(1, 6) if wanted[i] not in wanted[:i])
    batch = Batch(engine)
    batch.add(prompt, GenerationSettings(max_new_tokens=50, eos=frozenset({wanted[at]})))
    batch.add(prompt, GenerationSettings(max_new_tokens=1, eos=frozenset({wanted[0]})))
    assert run(batch) == {0: (wanted[: at + 1], "", "eos"), 1: (wanted[:1], "", "eos")}


def test_a_stop_text_ends_a_row(engine, reference, tokenizer):
    (prompt,) = prompts_of(5)
    text = tokenizer.decode(greedy(reference, prompt, 20))
    stop = text[6:9]
    batch = Batch(engine, tokenizer)
    batch.add(prompt, GenerationSettings(max_new_tokens=20, stop=(stop,)))
    batch.add(prompt, GenerationSettings(max_new_tokens=20))
    found = run(batch)
    assert found[0][1:] == (text[: text.index(stop)], "stop")
    assert found[1][1:] == (text, "length")
    with pytest.raises(UsageError, match="needs a tokenizer"):
        Batch(engine).add(prompt, GenerationSettings(stop=("x",)))


def test_rows_can_be_cancelled(engine, reference):
    prompts = prompts_of(3, 4, 5, 6, 7)
    batch = Batch(engine)
    for prompt in prompts:
        batch.add(prompt, GenerationSettings(max_new_tokens=6))
    batch.advance()
    batch.advance()
    assert [event.reason for number in (1, 4) for event in batch.cancel(number)] == ["cancelled"] * 2
    assert batch.cancel(1) == []
    assert batch.cancel(99) == []
    assert run(batch).keys() == {0, 2, 3}
    assert engine.slots.free == 4
    batch.add(prompts[0], GenerationSettings(max_new_tokens=3))
    assert run(batch)[5][0] == greedy(reference, prompts[0], 3)
    batch.add(prompts[0], GenerationSettings(max_new_tokens=30))
    batch.advance()
    batch.close()
    assert not batch.unfinished
    assert engine.slots.free == 4


def test_a_prompt_that_fails_waits_on(engine, reference, monkeypatch):
    batch, prompts = Batch(engine), prompts_of(3, 4)
    for prompt in prompts:
        batch.add(prompt, GenerationSettings(max_new_tokens=2))
    with monkeypatch.context() as patch:
        patch.setattr(engine.plan.prefiller, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.advance()
    assert (batch.waiting, batch.active, engine.slots.free) == (2, 0, 4)
    assert run(batch) == {row: (greedy(reference, prompt, 2), "", "length") for row, prompt in enumerate(prompts)}


def test_long_prompts_go_through_piece_by_piece_between_steps(engine, reference):
    """While a long prompt is on its way, a row that is under way gets a token a step."""
    long, short = prompts_of(50, 4)
    batch = Batch(engine, piece=8)
    batch.add(short, GenerationSettings(max_new_tokens=20))
    found = {0: tuple(token for event in batch.advance() for token in event.tokens), 1: ()}
    batch.add(long, GenerationSettings(max_new_tokens=5))
    before = None
    while batch.unfinished:
        for event in batch.advance():
            found[event.row] += event.tokens
        if found[1] and before is None:
            before = len(found[0])
    assert found == {0: greedy(reference, short, 20), 1: greedy(reference, long, 5)}
    # Two of the step that it began with, and one more with each of seven pieces, the last of which lets the other join.
    assert before == 9
    assert engine.slots.free == 4


def test_a_prompt_on_its_way_is_cancelled_or_fails(engine, reference, monkeypatch):
    long, short = prompts_of(50, 4)
    batch = Batch(engine, piece=8)
    batch.add(long, GenerationSettings(max_new_tokens=3))
    batch.add(short, GenerationSettings(max_new_tokens=3))
    for _ in range(3):
        batch.advance()
    with monkeypatch.context() as patch:
        patch.setattr(engine.plan.prefiller, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.advance()
    assert (batch.waiting, batch.first_waiting, engine.slots.free) == (2, 0, 4)
    for _ in range(3):
        batch.advance()
    assert engine.slots.free == 3
    assert [event.reason for event in batch.cancel(0)] == ["cancelled"]
    assert run(batch) == {1: (greedy(reference, short, 3), "", "length")}
    batch.add(long, GenerationSettings(max_new_tokens=3))
    batch.advance()
    batch.close()
    assert not batch.unfinished
    assert engine.slots.free == 4


def test_a_step_that_fails_halfway_is_done_again_with_fewer_rows(engine, reference, monkeypatch):
    """The second layer of a step fails when the first has gone on: states are made anew from tokens."""
    prompts = prompts_of(3, 8, 5)
    batch = Batch(engine)
    for prompt in prompts:
        batch.add(prompt, GenerationSettings(max_new_tokens=9))
    events = [event for _ in range(4) for event in batch.advance()]
    second = engine.plan.sublayers[2].part
    whole = type(second)._step

    def fails(self, projected, rows):
        if self is second:
            raise torch.OutOfMemoryError
        return whole(self, projected, rows)

    with monkeypatch.context() as patch:
        patch.setattr(type(second), "_step", fails)
        with pytest.raises(torch.OutOfMemoryError):
            batch.advance()
    assert (batch.active, batch.waiting, engine.slots.free) == (0, 3, 4)
    batch.most = 2
    while batch.unfinished:
        events += batch.advance()
        assert batch.active <= 2
    for row, prompt in enumerate(prompts):
        assert tuple(t for event in events if event.row == row for t in event.tokens) == greedy(reference, prompt, 9)


def test_log_probabilities_come_with_the_tokens_that_asked_for_them(engine, reference):
    prompts = prompts_of(5, 9, 4)
    batch = Batch(engine)
    for prompt, count in zip(prompts, (3, None, 0), strict=True):
        batch.add(prompt, GenerationSettings(max_new_tokens=4, temperature=0.7, seed=3, logprobs=count))
    events = [event for _ in range(9) for event in batch.advance()]
    for row, count in ((0, 3), (2, 0)):
        tokens = list(prompts[row])
        for event in (event for event in events if event.row == row):
            wanted = full_logits(reference, tokens).log_softmax(-1)
            (score,) = event.scores
            assert score.token == event.tokens[0]
            # fp32 logits of order 1, by another order of sums.
            assert score.logprob == pytest.approx(wanted[score.token].item(), abs=1e-5)
            assert [token for token, _ in score.top] == wanted.topk(count).indices.tolist()
            assert [value for _, value in score.top] == pytest.approx(wanted.topk(count).values.tolist(), abs=1e-5)
            tokens += event.tokens
    assert all(event.scores == () for event in events if event.row == 1)
    assert sum(len(event.tokens) for event in events) == 12


def test_rows_held_otherwise_are_left_alone(engine, reference):
    held = prompts_of(6)[0]
    slot = engine.prefill(held).slot
    batch = Batch(engine)
    for prompt in prompts_of(2, 3, 4, 5):
        batch.add(prompt, GenerationSettings(max_new_tokens=3))
    run(batch)
    assert int(engine.step([9], [slot])[0].argmax()) == greedy(reference, [*held, 9], 1)[0]


def test_the_engine_generates_by_itself(engine, reference, tokenizer):
    prompts = prompts_of(3, 9)
    events = list(engine.generate(prompts, GenerationSettings(max_new_tokens=4), tokenizer))
    for row, prompt in enumerate(prompts):
        wanted = greedy(reference, prompt, 4)
        assert tuple(t for event in events if event.row == row for t in event.tokens) == wanted
        assert "".join(event.text for event in events if event.row == row) == tokenizer.decode(wanted)


def test_scores_looked_at_a_few_at_a_time_are_the_same(source):
    """Draws and log-probabilities, of the first tokens and of steps; one row asks for none."""
    found = []
    for scores in (None, 1, 500):
        batch = Batch(Engine(load_model(source), max_rows=5, scores=scores))
        for number, prompt in enumerate(prompts_of(5, 5, 2, 9, 5)):
            asked = None if number == 3 else number
            batch.add(prompt, GenerationSettings(6, temperature=0.8, top_p=0.9, seed=number, logprobs=asked))
        events = []
        while batch.unfinished:
            events += batch.advance()
        found.append(events)
    assert found[0] == found[1] == found[2]
    assert [len(event.scores) for event in found[0][:5]] == [1, 1, 1, 0, 1]
    assert len(found[0][4].scores[0].top) == 4
