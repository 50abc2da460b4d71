"""Which steps are captured, and when: on a CPU, where a stand-in for graphs runs the step anew at each replay."""

import random

import pytest
import torch

from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.runtime import steps as module
from lapcli.runtime.either import Either
from lapcli.runtime.steps import MOST_GRAPHS
from lapcli.testing.decoding import prompts_of
from lapcli.testing.dual_state import tiny_conversion

SECONDS = 0.25
"""That a capture takes by the clock of these tests; a step takes a fourth."""


class Graph:
    """What was captured, run anew into the tensor that it gave."""

    def __init__(self, call):
        self.call, self.found = call, call()

    def replay(self):
        self.found.copy_(self.call())


class Clock:
    def __init__(self):
        self.now, self.captures, self.replays, self.fails = 100.0, [], 0, None

    def monotonic(self):
        return self.now

    def captured(self, call, device, memory=None):
        if self.fails is not None:
            raise self.fails
        self.now += SECONDS
        graph = Graph(call)
        self.captures.append(self.now)
        return graph, graph.found


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "captured", clock.captured)
    return clock


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tiny_conversion(tmp_path_factory.mktemp("steps") / "dir")


def capturing(root, rows, *, ahead=True, **options):
    """An engine whose steps are captured."""
    engine = Engine.load(root, max_length=64, max_rows=rows, **options)
    engine.steps.capture = True
    # As on a GPU: a graph cannot look which rows are of a kind.
    for sub in engine.plan.sublayers:
        if isinstance(sub.part, Either):
            sub.part.by_index = False
    if ahead:
        engine.warm_up_for_all()
    return engine


def test_an_engine_of_many_configurations_begins_with_a_graph_for_each_number_of_rows(root, clock):
    engine = capturing(root, 256)
    assert engine.steps.buckets == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    # One row has one configuration, so that the graph of two is enough for it.
    assert len(clock.captures) == 8
    assert {key[1:] for key in engine.steps._graphs} == {("filtered", (0, 3))}
    one = capturing(root / "base", 6)
    # The largest first, so that others find room in what it leaves.
    assert list(one.steps._graphs) == [(rows, "filtered", None) for rows in (6, 4, 2, 1)]


WAYS = (
    GenerationSettings(max_new_tokens=9),
    GenerationSettings(max_new_tokens=5, temperature=0.9, seed=1),
    GenerationSettings(max_new_tokens=12, temperature=0.9, top_p=0.8, seed=2),
    GenerationSettings(max_new_tokens=7, temperature=1.1, top_k=4, seed=3),
)


def run(engine, clock=None):
    """Twenty rows of all configurations and ways, some switched, on four places; tokens, and captures of each step."""
    batch, draw, tokens, captures = Batch(engine, piece=8), random.Random(3), {}, []
    for number, prompt in enumerate(prompts_of(*range(2, 22), high=250)):
        batch.add(prompt, WAYS[number % 4], f"{draw.randrange(4)}-of-3")
    while batch.unfinished:
        before = len(clock.captures) if clock else 0
        for event in batch.advance():
            tokens.setdefault(event.row, []).extend(event.tokens)
        if clock is not None:
            clock.now += SECONDS / 4
            captures.append(len(clock.captures) - before)
    return tokens, captures


def test_captures_take_little_of_the_time_and_change_nothing(root, clock):
    plain, _ = run(Engine.load(root, max_length=64, max_rows=4))
    engine = capturing(root, 4)
    begun, ahead = clock.now, len(clock.captures)
    for _ in range(6):
        tokens, captures = run(engine, clock)
        assert tokens == plain
        assert max(captures) <= 1
    found = len(clock.captures) - ahead
    assert found > 3
    # Each is followed by twenty times what it took.
    assert SECONDS * (found + 20 * (found - 1)) <= clock.now - begun
    gaps = [after - before for before, after in zip(clock.captures[ahead:], clock.captures[ahead + 1 :], strict=False)]
    assert min(gaps) >= 21 * SECONDS
    # What is often needed has its own graph in the end, and takes no other's.
    batch = Batch(engine)
    batch.add([5, 6, 7], GenerationSettings(max_new_tokens=40), "0-of-3")
    for _ in range(3):
        clock.now += 30 * SECONDS
        batch.advance()
    assert (1, "greedy", (0, 0)) in engine.steps._graphs


def test_without_that_each_kind_is_captured_when_it_first_comes(root, clock):
    plain, _ = run(Engine.load(root, max_length=64, max_rows=4))
    engine = capturing(root, 4, ahead=False)
    tokens, captures = run(engine, clock)
    assert tokens == plain
    assert sum(captures) == len(engine.steps._graphs) > 10
    assert run(engine, clock)[1].count(0) == len(captures)


def test_who_was_not_used_for_longest_makes_room(root, clock, monkeypatch):
    monkeypatch.setattr(module, "MOST_GRAPHS", 5)
    plain, _ = run(Engine.load(root, max_length=64, max_rows=4))
    engine = capturing(root, 4)
    engine.steps.seldom = False
    ahead = set(engine.steps._graphs)
    assert run(engine, clock)[0] == plain
    assert len(engine.steps._graphs) == len(ahead) + 5
    assert ahead <= engine.steps._graphs.keys()
    last = [key for key in engine.steps._graphs if key not in ahead]
    # One that is used again stays, and the next one goes.
    rows, mode, span = last[0]
    engine.steps.span = span
    engine.steps.run(rows, mode)
    engine.steps.span = (1, 1)
    engine.steps.run(3, "logits")
    assert last[0] in engine.steps._graphs
    assert last[1] not in engine.steps._graphs
    assert MOST_GRAPHS >= 32


def test_no_memory_for_a_graph_costs_the_graph_alone(root, clock):
    engine = capturing(root, 4)
    held = dict(engine.steps._graphs)
    clock.fails = torch.OutOfMemoryError("of the test")
    plain, _ = run(Engine.load(root, max_length=64, max_rows=4))
    assert run(engine, clock)[0] == plain
    assert engine.steps._graphs.keys() == held.keys()
    assert engine.steps.capture
    # Nothing is enough for logits alone, so that one has to be told.
    with pytest.raises(torch.OutOfMemoryError, match="of the test"):
        engine.step([5], engine.occupy(1, 3))
    clock.fails = RuntimeError("reads on the host\nand more")
    clock.now += 100
    assert run(engine, clock)[0] == plain
    assert (engine.steps.capture, engine.steps.failure) == (False, "reads on the host")
