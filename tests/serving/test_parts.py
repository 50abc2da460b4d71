"""The parts of a server by themselves: the queue, the engine's loop when memory runs out, keys, metrics, limits."""

import asyncio
import itertools
import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.errors import ModelError, UsageError
from lapcli.families.loading import load_model, resolve_model
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.serving.answers import Answer, CompletionForm, _Offsets
from lapcli.serving.dispatch import Dispatcher
from lapcli.serving.jobs import FairQueue, Job
from lapcli.serving.keys import ApiKeys, read_keys
from lapcli.serving.loop import EngineLoop
from lapcli.serving.memory import Needs, scores_together
from lapcli.serving.metrics import Registry
from lapcli.serving.policy import OneConfiguration
from lapcli.serving.ray_app import build
from lapcli.serving.settings import EngineSettings, Limits
from lapcli.serving.texts import Texts, TooLong
from lapcli.serving.trials import warm_prompts
from lapcli.serving.worker import prepare
from lapcli.testing.decoding import prompts_of
from lapcli.testing.dual_state import tiny_teacher
from lapcli.testing.models import byte_tokenizer


def job(client, prompt=1, tokens=1, number=0):
    return Job(f"{client}-{number}", client, [0] * prompt, {"max_new_tokens": tokens})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.sampled_from(["put", "put", "take", "remove"])),
        max_size=80,
    )
)
def test_the_queue_serves_clients_in_proportion(actions):
    """Of two clients that wait all the time, neither gets ahead of the other by more than the largest jobs."""
    queue, waiting, served = FairQueue(), [], dict.fromkeys("abc", 0)
    for number, (client, size, action) in enumerate(actions):
        if action == "put" or not waiting:
            made = job(client, size, size, number)
            queue.put(made)
            waiting.append(made)
        elif action == "remove":
            queue.remove(waiting.pop(size % len(waiting)))
        else:
            waiting.remove(queue.take())
        assert len(queue) == len(waiting)
        assert queue.tokens == sum(len(each.prompt) for each in waiting)
    # From here on all of them have work, and only the queue decides.
    for number in range(60):
        for client in "abc":
            made = job(client, 25, 25, 1000 + number)
            queue.put(made)
            waiting.append(made)
    begun = {
        client: sum(each.cost for each in waiting if each.client == client and "-1" not in each.name)
        for client in "abc"
    }
    while len({each.client for each in waiting}) == 3:
        taken = queue.take()
        waiting.remove(taken)
        served[taken.client] += taken.cost
        for one in "abc":
            for other in "abc":
                assert served[one] - served[other] <= 200 + sum(begun.values())


def test_turns_of_the_queue():
    queue = FairQueue()
    for number in range(3):
        queue.put(job("many", number=number))
    queue.put(job("few"))
    back = job("gone")
    queue.put_back(back)
    names = [queue.take().name for _ in range(5)]
    assert names == ["gone-0", "many-0", "few-0", "many-1", "many-2"]
    # Nobody is behind for ever, and nobody is remembered.
    queue.put(job("many"))
    assert queue.take().name == "many-0"
    assert not queue._ends


def test_a_queue_forgets_clients_and_jobs():
    queue = FairQueue()
    queue.put(job("first"))
    for number in range(5000):
        passing = job(f"client-{number}")
        queue.put(passing)
        queue.remove(passing)
    assert len(queue) == 1
    assert max(len(queue._heap), len(queue._ends), len(queue._counts)) < 300


class Front:
    """Stands for the front: says what it was told to, and keeps what comes."""

    def __init__(self, *messages):
        self.messages, self.texts, self.failed = list(messages), {}, {}

    def take(self, wait):
        if wait and not self.messages:
            return [{"op": "stop"}]
        found, self.messages = self.messages, []
        return found

    def send(self, message):
        json.dumps(message)
        if message["op"] == "failed":
            self.failed[message["id"]] = message["kind"]
        else:
            for name, tokens, _, reason, _ in message["events"]:
                self.texts.setdefault(name, []).extend(tokens)
                if reason is not None:
                    self.texts[name].append(reason)


def add(name, prompt, count, **fields):
    wanted = asdict(GenerationSettings(max_new_tokens=count, **fields))
    told = {**wanted, "eos": [], "stop": []}
    return {"op": "add", "id": name, "prompt": prompt, "settings": told, "configuration": "base"}


@pytest.fixture
def batch(folder):
    return Batch(Engine(load_model(resolve_model(str(folder))), max_rows=4), together=128, piece=128)


@pytest.fixture
def expected(folder):
    """What each request gets where nothing goes wrong."""
    alone = Engine(load_model(resolve_model(str(folder))))
    return lambda prompt, count: [
        *(t for event in alone.generate([prompt], GenerationSettings(max_new_tokens=count)) for t in event.tokens),
        "length",
    ]


class ScarceMemory:
    """Lets forward passes and steps fail that take more than so much at once."""

    def __init__(self, monkeypatch, engine, *, tokens=10**9, rows=10**9):
        self.tokens, self.rows, self.refused = tokens, rows, 0
        forward, step = engine.plan.prefiller.forward, engine.steps.forward
        monkeypatch.setattr(
            engine.plan.prefiller, "forward", lambda *a: self.if_small(forward, a[0].numel(), self.tokens, a)
        )
        monkeypatch.setattr(engine.steps, "forward", lambda *a: self.if_small(step, len(a[0]), self.rows, a))

    def if_small(self, work, size, most, arguments):
        if size > most:
            self.refused += 1
            raise torch.OutOfMemoryError(f"tried to allocate for {size}")
        return work(*arguments)


@pytest.mark.parametrize(("tokens", "rows"), [(10**9, 1), (64, 10**9), (70, 2)], ids=["steps", "prompts", "both"])
def test_a_step_without_memory_is_done_smaller(batch, expected, monkeypatch, capfd, tokens, rows):
    scarce = ScarceMemory(monkeypatch, batch.engine, tokens=tokens, rows=rows)
    prompts = prompts_of(100, 40, 3, 90, 60, 7)
    front = Front(*(add(str(n), prompt, 6 + n) for n, prompt in enumerate(prompts)))
    EngineLoop(batch, front.take, front.send).run()
    assert scarce.refused
    assert front.texts == {str(n): expected(prompt, 6 + n) for n, prompt in enumerate(prompts)}
    assert not front.failed
    said = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert {line["event"] for line in said} == {"out of memory"}
    assert batch.engine.slots.free == 4


def test_only_a_request_that_does_not_fit_alone_fails(batch, expected, monkeypatch):
    """At 64 tokens a piece there is an end: a prompt whose pieces do not fit is given up, and the others go on."""
    forward = batch.engine.plan.prefiller.forward

    def refuses_the_long(tokens, cache, seen):
        if seen + tokens.shape[1] > 64:
            raise torch.OutOfMemoryError("too long")
        return forward(tokens, cache, seen)

    monkeypatch.setattr(batch.engine.plan.prefiller, "forward", refuses_the_long)
    short, long, other = prompts_of(5, 100, 9)
    front = Front(add("short", short, 12), add("long", long, 5), add("other", other, 4))
    EngineLoop(batch, front.take, front.send).run()
    assert front.failed == {"long": "memory"}
    assert front.texts == {"short": expected(short, 12), "other": expected(other, 4)}


def test_more_is_tried_again_later(batch, expected, monkeypatch):
    scarce = ScarceMemory(monkeypatch, batch.engine, rows=1)
    prompts = prompts_of(4, 5, 6)
    front = Front(*(add(str(n), prompt, 90) for n, prompt in enumerate(prompts)))
    loop = EngineLoop(batch, front.take, front.send)
    send = front.send

    def relieved(message):
        send(message)
        if len(front.texts.get("0", ())) > 20:
            scarce.rows = 10**9

    loop.send = relieved
    loop.run()
    assert front.texts == {str(n): expected(prompt, 90) for n, prompt in enumerate(prompts)}
    assert batch.most == 4
    assert loop.stats()["shrunk"] == scarce.refused > 0


def test_requests_that_outgrow_the_pages_take_turns():
    """Twelve that want a third of all pages each: the front is told how many there is room for, and none is lost."""
    pages = {"max_length": 200, "kv_bytes": 36 * 64 * 2 * (8 + 8) * 4}
    engines = [Engine(tiny_teacher("llama"), max_rows=12, **room) for room in ({"max_length": 200}, pages)]
    prompts, said = prompts_of(*range(10, 22), high=60), []
    for engine in engines:
        front, rooms = Front(*(add(str(n), prompt, 170) for n, prompt in enumerate(prompts))), []
        loop = EngineLoop(Batch(engine, together=128, piece=16), front.take, front.send)
        send = loop.send
        loop.send = lambda message, send=send, rooms=rooms: (rooms.append(message["stats"]["rows"]), send(message))
        loop.run()
        assert not front.failed
        said.append(front.texts)
        few = engine.pages.count == 36
        assert (loop.stats()["set_back"] > 0) == few
        assert (min(rooms) < 7) == few
    assert said[0] == said[1]
    assert len(said[0]) == 12


def test_a_defect_is_no_want_of_memory(batch, monkeypatch):
    monkeypatch.setattr(batch.engine.steps, "forward", lambda *_: 1 / 0)
    front = Front(add("0", [5], 3))
    with pytest.raises(ZeroDivisionError):
        EngineLoop(batch, front.take, front.send).run()


def test_the_loop_refuses_and_cancels(batch, expected):
    (prompt,) = prompts_of(6)
    front = Front(
        add("bad", [9999], 3),
        add("good", prompt, 3),
        add("gone", prompt, 3),
        {"op": "cancel", "id": "gone"},
        {"op": "cancel", "id": "never was"},
    )
    EngineLoop(batch, front.take, front.send).run()
    assert (front.failed, front.texts) == ({"bad": "invalid"}, {"good": expected(prompt, 3)})


def test_an_engine_is_made_for_the_memory_there_is(folder):
    made = EngineSettings(str(folder), "cpu", "float32", max_length=64, piece=32)
    _, facts = prepare(replace(made, max_rows=2))
    # States of two layers and two heads, and the last three inputs of their convolutions, and one more place.
    assert facts["row_bytes"] == 4 * (2 * 2 * 32 * 32 + 2 * 4 * 3 * 64)
    # For nine rows, one more on its way, and what a pass takes.
    needs = Needs(**facts["needs"])
    memory = facts["bytes"]["weights"] + 10 * facts["row_bytes"] + max(needs.for_pass(32), needs.for_step(9, 300))
    batch, facts = prepare(replace(made, memory=memory))
    assert (batch.engine.max_rows, facts["rows"], batch.piece) == (9, 9, 32)
    assert batch.engine.steps.choices.scores == scores_together(memory - facts["bytes"]["weights"], needs) == 512
    with pytest.raises(ModelError, match="for requests; the longest takes"):
        prepare(replace(made, memory=facts["bytes"]["weights"] + facts["row_bytes"]))


def test_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the house\nthe-first-key\n\n  the-second-key  \n")
    keys = read_keys({"LAPCLI_API_KEY": "the-one-of-the-environment"}, file)
    assert [
        keys.client(f"{scheme} {key}")
        for scheme, key in (
            ("Bearer", "the-one-of-the-environment"),
            ("bearer", "the-second-key"),
            ("Basic", "the-first-key"),
            ("Bearer", "the-first-ke"),
            ("Bearer", ""),
            ("", "the-first-key"),
            ("Bearer", "schlüssel"),
        )
    ] == ["key-1", "key-3", None, None, None, None, None]
    assert keys.client(None) is None
    assert len(read_keys({}, None)) == 0
    assert "key" not in str(vars(keys)["_digests"])
    for content, word in (("", "no key"), ("short\n", "8 characters"), ("two words here\n", "without spaces")):
        file.write_text(content)
        with pytest.raises(UsageError, match=word):
            read_keys({}, file)
    with pytest.raises(UsageError, match="No such file"):
        read_keys({}, tmp_path / "none")
    with pytest.raises(UsageError, match="API key 1 of 1"):
        ApiKeys(["with\nnewline-in-it"])


def test_metrics_are_written_as_prometheus_reads_them():
    registry = Registry()
    counter = registry.counter("c_total", "Things.")
    counter.add(path='a"b\\c\nd')
    counter.add(2, path="x")
    registry.gauge("g", "A gauge.", lambda: 1.5)
    registry.gauge("h", "By kind.", lambda: {"one": 1, "two": 2}, "kind")
    histogram = registry.histogram("s", "Seconds.")
    for value in (0.001, 0.002, 100.0):
        histogram.observe(value)
    lines = registry.text().splitlines()
    assert 'c_total{path="a\\"b\\\\c\\nd"} 1' in lines
    assert lines[lines.index("# TYPE g gauge") + 1] == "g 1.5"
    assert 'h{kind="two"} 2' in lines
    assert [line for line in lines if "s_bucket" in line][:2] == ['s_bucket{le="0.001"} 1', 's_bucket{le="0.0025"} 2']
    assert lines[-3:] == ['s_bucket{le="+Inf"} 3', "s_sum 100.003", "s_count 3"]


def test_tokens_within_characters_have_names_of_their_own():
    texts = Texts(byte_tokenizer())
    tokens = byte_tokenizer()("a€", add_special_tokens=False)["input_ids"]
    assert [texts.token(token) for token in tokens] == [
        ("a", b"a"),
        ("bytes:\\xe2", b"\xe2"),
        ("bytes:\\x82", b"\x82"),
        ("bytes:\\xac", b"\xac"),
    ]
    assert texts.token(2) == ("</s>", b"</s>")
    texts.close()


@pytest.mark.parametrize("sizes", [(11,), (1,) * 11, (2, 3, 6), (6, 5)], ids=str)
def test_offsets_are_those_of_the_text(sizes):
    """Of a whole answer or its pieces, which end anywhere: tokens within a character are where it begins."""
    text = "a€b\u0301😀c"
    texts = Texts(byte_tokenizer())
    tokens = byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    # A character of one, three, one, two and four bytes, and one more, less the last byte.
    wanted = [number for number, character in enumerate(text) for _ in character.encode()]
    assert len(tokens) == len(wanted) == 12
    form = CompletionForm("id", "model", texts, scored=True)
    found, rest = [], iter(tokens)
    for size in sizes:
        scores = [[token, -0.5, []] for token in itertools.islice(rest, size)]
        choice = form.piece(0, Answer("", size, None, scores))["choices"][0]
        found += choice["logprobs"]["text_offset"]
        # Another answer of the same request has its own.
        other = form.piece(1, Answer("", size, None, scores[:1]))["choices"][0]["logprobs"]["text_offset"]
        assert len(other) == 1
    assert found == wanted[:11]
    texts.close()


def test_offsets_behind_a_character_that_never_ends():
    offsets = _Offsets()
    parts = b"a", b"\xe2", b"b", b"\xff", b"\xe2\x82", b"\xac", b"c"
    assert b"".join(parts).decode(errors="replace") == "a\ufffdb\ufffd€c"
    assert [offsets.push(part) for part in parts] == [0, 1, 2, 3, 4, 4, 5]


def test_single_bytes_as_sentencepiece_writes_them():
    class Pieces:
        def decode(self, tokens, **_):
            return "\N{REPLACEMENT CHARACTER}"

        def convert_ids_to_tokens(self, token):
            return f"<0x{token:02X}>"

    texts = Texts(Pieces())
    assert texts.token(0xE2) == ("bytes:\\xe2", b"\xe2")
    texts.close()


class Counting:
    """A tokenizer that notes how many characters it was given."""

    def __init__(self):
        self.own, self.read = byte_tokenizer(), 0

    def __call__(self, text, **options):
        self.read += len(text)
        return self.own(text, **options)

    def __getattr__(self, name):
        return getattr(self.own, name)


@pytest.mark.parametrize(("length", "refused"), [(100, False), (2000, False), (10**6, True)])
def test_what_is_far_too_long_is_refused_by_its_beginning(length, refused):
    """Everybody waits for the tokenizer; the text's length makes no difference."""
    tokenizer = Counting()
    texts = Texts(tokenizer, most=100)
    if refused:
        with pytest.raises(TooLong, match="more than 100 tokens"):
            asyncio.run(texts.encode(["a" * length]))
        assert tokenizer.read == 16 * (100 + 64)
    else:
        # A little over is for the caller to find, who can then say by how much.
        assert len(asyncio.run(texts.encode(["a" * length]))[0]) >= length
        assert tokenizer.read <= 2 * length
    texts.close()


def test_a_beginning_of_few_tokens_says_nothing_of_the_rest():
    """Of a tokenizer that drops blanks, say: the text may be short all the same."""

    class Dropping(Counting):
        def __call__(self, text, **options):
            return super().__call__(text.replace(" ", ""), **options)

    texts = Texts(Dropping(), most=100)
    assert asyncio.run(texts.encode([" " * 100_000 + "ab"])) == asyncio.run(texts.encode(["ab"]))
    texts.close()


def test_a_request_that_is_being_read_keeps_a_server_from_ending():
    async def run():
        dispatcher = Dispatcher(Limits(), OneConfiguration(), Registry())
        await asyncio.wait_for(dispatcher.idle(), 1)
        with dispatcher.arriving(), pytest.raises(TimeoutError):
            await asyncio.wait_for(dispatcher.idle(), 0.05)
        await asyncio.wait_for(dispatcher.idle(), 1)

    asyncio.run(run())


def test_limits_that_serve_nobody():
    with pytest.raises(UsageError, match="per-client 0"):
        Limits(per_client=0)
    assert Limits(waiting=0, drain_seconds=0).waiting == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({}, "no model is named"), ({"model": "demo:gdn", "rows": 3}, "no such argument: rows")],
    ids=["no model", "a misspelt one"],
)
def test_arguments_of_replicas_that_nobody_knows(arguments, word):
    with pytest.raises(UsageError, match=word):
        build(arguments)


def test_prompts_are_tried_before_there_are_any(monkeypatch):
    """Whole pieces and short ones, and nothing of them is left."""
    engine = Engine(tiny_teacher("llama", vocab_size=300), max_rows=2, max_length=300)
    lengths, prefill = [], engine.prefill

    def noting(tokens, **options):
        lengths.append(len(tokens))
        return prefill(tokens, **options)

    monkeypatch.setattr(engine, "prefill", noting)
    for piece, wanted in ((256, [256, 200, 1]), (1000, [299, 200, 1]), (50, [50, 1])):
        lengths.clear()
        warm_prompts(engine, piece)
        assert lengths == wanted
    assert (engine.slots.free, engine.pages.free) == (2, engine.pages.count)
