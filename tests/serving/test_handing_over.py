"""The engine's side of configurations: rows that are handed over while they run, and a real server under pressure."""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.serving.adaptive import BY_PRESSURE, Adaptive, Cap
from lapcli.serving.estimates import estimated
from lapcli.serving.loop import EngineLoop, Measured
from lapcli.serving.memory import beside
from lapcli.serving.modes import Wish, find_conversion
from lapcli.testing.decoding import prompts_of
from lapcli.testing.dual_state import tiny_conversion
from lapcli.testing.models import byte_tokenizer
from lapcli.testing.serving import local_server

PATH = "/v1/completions"


class Free(Adaptive):
    """Takes a replay for free."""

    def review(self, running, load):
        return super().review(running, load._replace(prefill_seconds=0.0))


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    return tiny_conversion(tmp_path_factory.mktemp("handing") / "tiny")


@pytest.fixture(scope="module")
def alone(conversion):
    """What a row of a configuration gets that nobody else is beside."""
    engine = Engine.load(conversion, max_length=256)

    def generate(prompt, count, configuration):
        batch = Batch(engine)
        batch.add(prompt, GenerationSettings(max_new_tokens=count), configuration)
        found = []
        while batch.unfinished:
            found += [token for event in batch.advance() for token in event.tokens]
        return found

    return generate


def add(name, prompt, count, configuration):
    told = {**asdict(GenerationSettings(max_new_tokens=count)), "eos": [], "stop": []}
    return {"op": "add", "id": name, "prompt": prompt, "settings": told, "configuration": configuration}


class Front:
    """Says what it is told to, some of it once a request has so many tokens; keeps what comes."""

    def __init__(self, *messages, later=()):
        self.messages, self.later = list(messages), list(later)
        self.tokens, self.switched, self.stats, self.failed = {}, [], {}, {}

    def take(self, wait):
        due = [each for each in self.later if len(self.tokens.get(each[0], ())) >= each[1]]
        self.later = [each for each in self.later if each not in due]
        found, self.messages = [*self.messages, *(each[2] for each in due)], []
        return found or ([{"op": "stop"}] if wait else [])

    def send(self, message):
        message = json.loads(json.dumps(message))
        if message["op"] == "failed":
            self.failed[message["id"]] = message["message"]
            return
        # What was switched is so for the events that come with it.
        self.switched += message["switched"]
        self.stats = message["stats"]
        for name, tokens, *_ in message["events"]:
            self.tokens.setdefault(name, []).extend(tokens)


def switch(name, configuration):
    return {"op": "switch", "id": name, "configuration": configuration}


@pytest.mark.parametrize("piece", [None, 8], ids=["at once", "in pieces"])
def test_what_is_handed_over_goes_on_as_a_fresh_run_would(conversion, alone, piece):
    """Up, and down again; beside rows of other configurations, which do not notice."""
    engine = Engine.load(conversion, max_rows=3, max_length=256)
    prompts = prompts_of(40, 9, 21)
    later = [("a", 5, switch("a", "3-of-3")), ("a", 14, switch("a", "1-of-3")), ("b", 3, switch("b", "0-of-3"))]
    front = Front(
        add("a", prompts[0], 30, "0-of-3"), add("b", prompts[1], 20, "0-of-3"), add("c", prompts[2], 25, "2-of-3"),
        later=later,
    )  # fmt: skip
    EngineLoop(Batch(engine, piece=piece, together=piece or 8192), front.take, front.send).run()
    assert front.tokens["b"] == alone(prompts[1], 20, "0-of-3")
    assert front.tokens["c"] == alone(prompts[2], 25, "2-of-3")
    # What b is told it is already.
    assert front.switched[0][:3] in (["b", "0-of-3", 0], ["a", "3-of-3", 45])
    found = [each for each in front.switched if each[0] == "a"]
    assert [each[1] for each in found] == ["3-of-3", "1-of-3"]
    said, runs_as = [], "0-of-3"
    for _, configuration, tokens, seconds in [*found, [None, None, 70, 1.0]]:
        part = alone([*prompts[0], *said], tokens - 40 - len(said), runs_as)
        assert seconds > 0
        said, runs_as = said + part, configuration
    assert front.tokens["a"] == said
    # It matters, or this would compare nothing.
    assert said != alone(prompts[0], 30, "0-of-3")
    assert (front.stats["switches"], front.stats["mixed_steps"] > 0) == (2, True)
    assert engine.slots.free == 3


def test_who_waits_begins_as_what_it_is_told(conversion, alone):
    engine = Engine.load(conversion, max_rows=1, max_length=256)
    first, second = prompts_of(6, 11)
    front = Front(
        add("first", first, 8, "0-of-3"), add("second", second, 6, "0-of-3"),
        later=[("first", 2, switch("second", "3-of-3")), ("first", 2, switch("nobody", "3-of-3"))],
    )  # fmt: skip
    EngineLoop(Batch(engine), front.take, front.send).run()
    assert front.switched == [["second", "3-of-3", 0, 0.0]]
    assert front.tokens == {"first": alone(first, 8, "0-of-3"), "second": alone(second, 6, "3-of-3")}
    assert front.stats["switches"] == 0


def test_who_ends_or_goes_while_it_replays(conversion):
    """Nothing is left of it, and nothing is said of it."""
    engine = Engine.load(conversion, max_rows=2, max_length=256)
    (prompt,) = prompts_of(60)
    later = [("a", 3, switch("a", "3-of-3")), ("a", 3, {"op": "cancel", "id": "a"})]
    front = Front(add("a", prompt, 30, "0-of-3"), later=later)
    loop = EngineLoop(Batch(engine, piece=4, together=4), front.take, front.send)
    loop.run()
    assert (front.switched, loop._handed, engine.slots.free) == ([], {}, 2)


def test_who_ends_as_it_comes_back_was_handed_over(conversion, alone):
    """It had one token left, which it says as the new configuration; that is told before its end."""
    engine = Engine.load(conversion, max_rows=2, max_length=256)
    (prompt,) = prompts_of(20)
    front = Front(add("a", prompt, 10, "0-of-3"), later=[("a", 9, switch("a", "3-of-3"))])
    EngineLoop(Batch(engine), front.take, front.send).run()
    assert [each[:3] for each in front.switched] == [["a", "3-of-3", 29]]
    said = alone(prompt, 9, "0-of-3")
    assert front.tokens["a"] == [*said, *alone([*prompt, *said], 1, "3-of-3")]


class Restless(Front):
    """Tells an engine to take in, switch and drop requests, as a seed has it."""

    def __init__(self, seed, todo):
        super().__init__()
        self.draw, self.todo, self.gone = random.Random(seed), todo, set()
        self.inside = []

    def take(self, wait):
        draw, found = self.draw, []
        while self.todo and ((wait and not found) or draw.random() < 0.3):
            found.append(self.todo.pop(0))
            self.inside.append(found[-1]["id"])
        if draw.random() < 0.2:
            found.append(switch(draw.choice(self.inside), f"{draw.randrange(4)}-of-3"))
        if draw.random() < 0.01:
            found.append({"op": "cancel", "id": draw.choice(self.inside)})
            self.gone.add(found[-1]["id"])
        return found if self.todo or not wait else [{"op": "stop"}]


@pytest.mark.parametrize(("seed", "pages", "piece"), [(0, 40, 16), (1, 13, None), (19, 14, 64)])
def test_whatever_is_told_nothing_is_lost(conversion, alone, seed, pages, piece):
    """Answers are those of the configurations that were told, one after the other; in the end all room is free."""
    draw = random.Random(seed)
    todo = [
        add(str(n), prompts_of(draw.randint(1, 120), seed=n)[0], draw.randint(1, 80), f"{draw.randrange(4)}-of-3")
        for n in range(14)
    ]
    page = Engine.load(conversion, max_length=256).pages.page_bytes
    engine = Engine.load(conversion, max_rows=4, max_length=256, kv_bytes=pages * page)
    front = Restless(seed, list(todo))
    loop = EngineLoop(Batch(engine, together=piece or 256, piece=piece), front.take, front.send)
    loop.run()
    assert (loop._handed, loop._rows, engine.slots.free) == ({}, {}, 4)
    assert engine.pages.free == engine.pages.count
    checked = 0
    for request in todo:
        name, prompt, count = request["id"], request["prompt"], request["settings"]["max_new_tokens"]
        told = [(configuration, tokens) for each, configuration, tokens, _ in front.switched if each == name]
        if name in front.gone or any(tokens == 0 for _, tokens in told):
            # Of what was told while it waited, nobody knows with how many tokens.
            continue
        said, runs_as = [], request["configuration"]
        for configuration, tokens in [*told, (None, len(prompt) + count)]:
            more = tokens - len(prompt) - len(said)
            said, runs_as = said + (alone([*prompt, *said], more, runs_as) if more else []), configuration
        assert front.tokens[name] == said
        checked += 1
    assert checked >= 4


def test_an_unknown_configuration_fails_alone(conversion):
    engine = Engine.load(conversion, max_rows=2, max_length=256)
    (prompt,) = prompts_of(6)
    front = Front(add("bad", prompt, 3, "9-of-3"), add("good", prompt, 3, "1-of-3"))
    EngineLoop(Batch(engine), front.take, front.send).run()
    assert "9-of-3" in front.failed["bad"]
    assert len(front.tokens["good"]) == 3


def test_statistics_of_mixed_steps(conversion):
    """Each step of rows that lie two layers apart is charged twice what a layer costs."""
    engine = Engine.load(conversion, max_rows=2, max_length=256)
    one, other = prompts_of(5, 5)
    front = Front(add("a", one, 9, "1-of-3"), add("b", other, 9, "3-of-3"))
    EngineLoop(Batch(engine), front.take, front.send, Measured(0.5, 0.25, 0.125)).run()
    mixed = front.stats["mixed_steps"]
    assert mixed > 4
    assert front.stats["split_seconds"] == pytest.approx(mixed * 2 * 0.125)
    assert front.stats["prefill_seconds"] == 0.5
    assert front.stats["mixed_seconds"] > 0
    assert front.stats["peak_bytes"] <= front.stats["total_bytes"]
    assert front.stats["queued"] == []


def test_a_server_adapts(conversion, alone, capfd, monkeypatch):
    """Real keys and values in real pages run short, and more is converted; who is handed over goes on as it should."""
    # A tiny model's answers are short.
    monkeypatch.setattr("lapcli.serving.dispatch.REVIEW_SECONDS", 0.0)
    found = find_conversion(str(conversion), Wish(max_ppl_increase="1"))
    probe = Engine.load(conversion, max_length=256)
    # A row of 250 tokens has four pages in each of two layers; there are 20 pages.
    rows, page = 6, probe.pages.page_bytes
    needs, longest = estimated(probe, window=256, device=probe.device), probe.row_bytes(256, "0-of-3")
    # Of so little memory the scores of one row are looked at at a time.
    taken = sum(beside(needs, longest, rows, 64, scores=300))
    memory = probe.nbytes()["weights"] + taken + math.ceil(20.5 * page)
    # Replays are free here, since the price of a tiny model's is the machine's noise.
    policy = Free((Cap(0, 0.0), Cap(100, 0.34)), 1.0)
    settings = {**found.settings, "max_length": 256, "max_rows": rows, "piece": 64, "memory": memory}
    counts = (150, 100, 100, 100, 90, 90)
    # The first one is short, and other than the rest while there is room.
    prompts = prompts_of(40, 120, 130, 140, 150, 160)
    with (
        local_server(found.conversion.place.base, policy=policy, **settings) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        assert server.metric("lapcli_memory_for_rows_bytes") == 20 * page
        asked = [
            pool.submit(
                server.send, PATH, {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0}
            )
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        answers = [each.result() for each in asked]
        assert [each.status for each in answers] == [200] * 6
        switched = {
            name: server.metric(f'lapcli_switches_total{{configuration="{name}",reason="{BY_PRESSURE}"}}')
            for name in ("2-of-3", "3-of-3")
        }
        mixed = server.metric("lapcli_mixed_steps")
    assert mixed > 0
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    switches = [line for line in lines if line["event"] == "switch"]
    for name, count in switched.items():
        assert sum(line["configuration"] == name and line["reason"] == BY_PRESSURE for line in switches) == count
    assert sum(switched.values()) >= 1
    # Who was left alone is answered as if nobody else had been there.
    touched, tokenizer = {line["id"] for line in switches}, byte_tokenizer()
    begun = {line["prompt_tokens"]: line for line in lines if line["event"] == "configuration"}
    for prompt, count, reply in zip(prompts, counts, answers, strict=True):
        if (line := begun[len(prompt)])["id"] not in touched:
            expected = tokenizer.decode(alone(prompt, count, line["configuration"]))
            assert reply.document["choices"][0]["text"] == expected
