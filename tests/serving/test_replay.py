"""Replays: traces and the sessions made of them, prompts of given lengths, replays against a server and without one."""

import asyncio
import json
import lzma
import math
import statistics
import sys
from collections import Counter

import pytest

from lapcli.cli.app import main
from lapcli.errors import DataError, ModelError, UsageError
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.serving.costs import StepCosts, measure_costs, read_costs
from lapcli.serving.replay_client import Client
from lapcli.serving.replay_results import Outcome, spread, summary
from lapcli.serving.replay_texts import Prompts
from lapcli.serving.replay_trace import Arrival, Turn, fit, make_sessions, read_trace, scaled, shares
from lapcli.serving.settings import Limits
from lapcli.serving.simulation import simulate
from lapcli.testing.decoding import prompts_of, work_off
from lapcli.testing.models import byte_tokenizer

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def trace(tmp_path):
    def write(*lines, head=HEAD, name="trace.csv"):
        path = tmp_path / name
        text = (head + "\n".join(lines)).encode()
        path.write_bytes(lzma.compress(text) if name.endswith("xz") else text)
        return path

    return write


def test_a_trace_is_read_in_the_order_of_time(trace):
    lines = ["2023-11-16 23:59:59.9999999,374,44", "2023-11-17 00:00:01.2500000,0,7", "2023-11-16 23:59:59.5,1,1"]
    for name in ("trace.csv", "trace.csv.xz"):
        found = read_trace(trace(*lines, name=name))
        assert [(each.prompt, each.answer) for each in found] == [(1, 1), (374, 44), (1, 7)]
        assert [each.seconds for each in found] == pytest.approx([0, 0.4999999, 1.75], abs=1e-6)


@pytest.mark.parametrize(
    ("lines", "head", "word"),
    [
        ((), HEAD, "no request"),
        (("2023-11-16 18:15:46,1,2",), "a,b\n", "no column TIMESTAMP"),
        (
            ("2023-11-16 18:15:46,1,2", "", "yesterday,1,2"),
            HEAD,
            "line 4 .*: TIMESTAMP is 'yesterday', and a time such as",
        ),
        (("2023-11-16 18:15:46.1e5,1,2",), HEAD, "TIMESTAMP is '2023-11-16 18:15:46.1e5'"),
        (("2023-11-16 18:15:46,1",), HEAD, "line 2 .*: GeneratedTokens is missing, and a whole number"),
        (("2023-11-16 18:15:46,-1,2",), HEAD, "ContextTokens is '-1', and a whole number"),
        (("2023-11-16 18:15:46,many,2",), HEAD, "line 2 .*: ContextTokens is 'many'"),
        (("2023-11-16 18:15:46,1.5,2",), HEAD, "ContextTokens is '1.5'"),
        (("2023-11-16 18:15:46,1," + 200_000 * "2",), HEAD, "line 2 .* no line of a CSV file"),
    ],
)
def test_what_is_no_trace(trace, lines, head, word):
    with pytest.raises(DataError, match=word):
        read_trace(trace(*lines, head=head))


def test_a_file_that_is_not_what_its_name_says(tmp_path):
    (tmp_path / "x.csv.xz").write_bytes(b"not packed")
    for name in ("x.csv.xz", "none.csv"):
        with pytest.raises(DataError, match="cannot read"):
            read_trace(tmp_path / name)


def test_sessions_concatenate_what_was_said():
    arrivals = [Arrival(float(n), 10 + n % 7, 1 + n % 5) for n in range(4000)]
    turns = make_sessions(arrivals, 3.0, seed=1)
    said, last = {}, {}
    for arrival, turn in zip(arrivals, turns, strict=True):
        before = said.setdefault(turn.session, [])
        assert turn.parts == (*before, arrival.prompt)
        assert (turn.seconds, turn.answer, turn.prompt) == (arrival.seconds, arrival.answer, sum(turn.parts))
        said[turn.session] = [*turn.parts, arrival.answer]
        last[turn.session] = turn.seconds
    # Those that ended well before the end have all their turns: max(1, Poisson(3)).
    lengths = Counter(len(said[session]) // 2 for session, at in last.items() if at < 3000 and session < 600)
    count, mean = sum(lengths.values()), 3 + math.exp(-3)
    found = sum(length * times for length, times in lengths.items()) / count
    # Its variance is under that of Poisson's; four standard errors.
    assert abs(found - mean) < 4 * math.sqrt(3 / count)
    assert make_sessions(arrivals, 3.0, seed=1) == turns
    assert make_sessions(arrivals, 3.0, seed=2) != turns
    alone = make_sessions(arrivals, 0, seed=1)
    assert [turn.parts for turn in alone] == [(arrival.prompt,) for arrival in arrivals]
    assert len({turn.session for turn in alone}) == 4000


def test_what_does_not_fit_is_cut_and_counted():
    turns = [Turn(0, n, (prompt,), answer, prompt) for n, (prompt, answer) in enumerate([(5, 5), (90, 20), (5, 400)])]
    found = fit(turns, 100)
    assert [(turn.prompt, turn.answer) for turn in found.turns] == [(5, 5), (80, 20), (5, 50)]
    assert (found.prompts_cut, found.answers_cut) == (1, 1)
    with pytest.raises(UsageError, match="window of 1"):
        fit(turns, 1)
    assert scaled([Arrival(2.0, 10, 3)], 0.5, 0.2) == [Arrival(1.0, 2, 1)]
    with pytest.raises(UsageError, match="--time-scale 0"):
        scaled([], 0, 1)
    assert shares([0, 2047, 2048, 9000]) == [50, 25, 0, 25]


@pytest.mark.parametrize("name", ["bytes", "demo"])
def test_prompts_have_as_many_tokens_as_they_should(name):
    tokenizer = byte_tokenizer() if name == "bytes" else load_tokenizer(resolve_model("demo:gdn"))
    prompts = Prompts(tokenizer, seed=3)
    assert prompts.as_text
    first, second = Turn(0, 4, (30,), 9, 30), Turn(1, 4, (30, 9, 500), 9, 539)
    texts = [prompts.of(turn) for turn in (first, second, second._replace(prompt=100))]
    assert [len(tokenizer(text)["input_ids"]) for text in texts] == [30, 539, 100]
    # A turn goes on from the one before, and what is cut is its beginning.
    assert texts[1].startswith(texts[0])
    assert texts[1].endswith(texts[2])
    assert Prompts(tokenizer, seed=3).of(second) == texts[1] != Prompts(tokenizer, seed=4).of(second)


def test_prompts_of_a_tokenizer_without_whole_words():
    """One that merges whatever stands side by side."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "a": 1, "b": 2, "aa": 3, "ab": 4, "ba": 5, "bb": 6}
    merges = [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]
    backend = Tokenizer(models.BPE(vocab=words, merges=merges, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    prompts = Prompts(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), seed=0)
    assert not prompts.as_text
    found = prompts.of(Turn(0, 0, (3, 2), 1, 5))
    assert len(found) == 5
    assert set(found) <= set(range(1, 7))


def test_figures():
    values = [0.5, 0.1, 0.9, 0.2, 0.3]
    assert spread(values) == {"mean": statistics.fmean(values), "p50": 0.3, "p95": 0.9, "p99": 0.9, "max": 0.9}
    assert spread(list(range(1, 101)))["p95"] == 95
    assert spread([]) is None
    outcomes = [
        Outcome(0, 1.0, 10, 4, 1.0, 1.5, 3.0, 4, [0.5, 0.5, 0.5], 200),
        Outcome(1, 2.0, 10, 4, 2.1, None, 2.2, 0, [], 429, "busy"),
        Outcome(2, 2.0, 10, 4, 2.0, 2.5, 4.0, 0, [], 200, "the engine died"),
    ]
    found = summary(outcomes, mode="x")
    assert (found["done"], found["refused"], found["failed"], found["seconds"]) == (1, 1, 1, 4.0)
    assert found["normalised_seconds"]["mean"] == 0.5
    assert found["first_token_seconds"]["max"] == 0.5
    assert found["tokens_per_second"] == 1.0
    assert found["latest_send_seconds"] == pytest.approx(0.1)


COSTS = StepCosts(((1, 1.0), (2, 1.5)), ((100, 10.0), (200, 20.0)), model="x", rows=2, window=1000, piece=100)


def test_a_simulation_by_hand():
    """Two requests and then a third, on an engine of two rows."""
    turns = [Turn(0.0, 0, (100,), 3, 100), Turn(5.0, 1, (250,), 2, 250), Turn(6.0, 2, (100,), 1, 100)]
    first, second, third = simulate(turns, COSTS)
    # Its prompt takes 10 and a step 1, and a CPU says both tokens then; the second prompt's first piece comes between.
    assert (first.first, first.end) == (11.0, 22.0)
    # Pieces end at 21 and 32, and the last 50 tokens, measured as 100 at least, at 42; then a step.
    assert (second.first, second.end) == (43.0, 43.0)
    assert (third.first, third.end) == (53.0, 53.0)
    assert [each.tokens for each in (first, second, third)] == [3, 2, 1]


def test_a_simulation_refuses_and_spreads():
    turns = [Turn(0.0, n, (100,), 1, 100) for n in range(6)]
    alone = simulate(turns, COSTS, waiting=1)
    # Two have rows, one is sent ahead, so that the engine never waits for the front, and one waits.
    assert [each.status for each in alone] == [200, 200, 200, 200, 429, 429]
    spreaded = simulate(turns, COSTS, replicas=3, waiting=1)
    assert all(each.done for each in spreaded)
    # Two each, and prompts of one length that fit a piece only one by one.
    assert sorted(each.end for each in spreaded) == [10.0] * 3 + [20.0] * 3


def test_a_simulation_does_the_steps_that_an_engine_does(folder):
    """All there at once: the order of ends and the number of steps are the real one's."""
    lengths, answers = (3, 70, 8, 8, 130, 5, 64, 1), (9, 4, 12, 1, 6, 2, 7, 5)
    engine = Engine(load_model(resolve_model(str(folder))), max_rows=3)
    batch = Batch(engine, together=32, piece=32)
    for prompt, answer in zip(prompts_of(*lengths), answers, strict=True):
        batch.add(prompt, GenerationSettings(max_new_tokens=answer))
    steps, ends = work_off(batch)
    # One unit of time for each step, whatever its rows, and none for prompts.
    costs = StepCosts(((1, 1.0), (3, 1.0)), ((1, 1e-9), (32, 1e-9)), rows=3, window=1000, piece=32)
    turns = [Turn(0.0, n, (p,), a, p) for n, (p, a) in enumerate(zip(lengths, answers, strict=True))]
    outcomes = simulate(turns, costs)
    assert round(max(each.end for each in outcomes)) == steps
    assert [each.number for each in sorted(outcomes, key=lambda each: (each.end, ends.index(each.number)))] == ends


def test_costs_are_measured_written_and_read(folder, tmp_path):
    engine = Engine(load_model(resolve_model(str(folder))), max_rows=3)
    batch = Batch(engine, byte_tokenizer(), together=32, piece=32)
    costs = measure_costs(batch, model="tiny", window=64)
    assert [size for size, _ in costs.steps] == [1, 2, 3]
    assert [size for size, _ in costs.prompts] == [1, 16, 32]
    assert all(seconds > 0 for _, seconds in (*costs.steps, *costs.prompts))
    assert engine.slots.free == 3
    costs.write(tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == costs
    assert costs.step(6, 0) == pytest.approx(2 * costs.step(3, 0))
    low, high = costs.prompt(16, 0), costs.prompt(32, 0)
    assert costs.prompt(24, 0) == pytest.approx((low + high) / 2)
    whole = json.loads((tmp_path / "costs.json").read_text())
    one = {"name": "x", "converted": 0, "layers": 1, "fixed_bytes": 0, "token_bytes": 1, "quality": {"increase": 0.0}}
    for text, words in (
        ("", "it is no JSON"), ("[]", "the whole is [], and a JSON object is wanted"), ("{}", "steps is missing"),
        *((json.dumps({**whole, **change}), words) for change, words in (
            ({"rows": "3"}, "rows is '3', and a whole number from 1 on"), ({"rows": 0}, "rows is 0, and a whole"),
            ({"rows": 2.5}, "rows is 2.5"), ({"model": 1}, "model is 1, and a text"), ({"rows": True}, "rows is True"),
            ({"context_step": -1e-9}, "context_step is -1e-09, and a number from 0 on"), ({"steps": []}, "steps is []"),
            ({"slot_bytes": None}, "slot_bytes is None"), ({"steps": [[1, -0.1]]}, "steps[0] is [1, -0.1], and a pair"),
            ({"steps": [[1, 0]]}, "steps[0]"), ({"prompts": [[1, 1.0], [1]]}, "prompts[1] is [1]"),
            ({"prompts": [[1, math.nan]]}, "prompts[0]"), ({"front": {"token": math.inf}}, "front.token is inf"),
            ({"front": 3}, "front is 3, and a JSON object"), ({"needs": {"kept": None}}, "needs.kept is None"),
            ({"needs": {"measured": 1}}, "needs.measured is 1, and true or false"),
            ({"speed": 3}, "speed is 3, and no such field"),
            ({"most": {"steps": whole["steps"], "prompts": whole["prompts"], "context_step": -1.0}},
             "most.context_step is -1.0"),
            ({"most": {"steps": whole["steps"]}}, "most.prompts is missing"),
            ({"configurations": [one, {}]}, "configurations[1].quality is missing"),
            ({"configurations": [{**one, "layers": "1"}]}, "configurations[0].layers is '1', and a whole number"),
            ({"configurations": [{**one, "quality": {}}]}, "configurations[0].quality.increase is missing"),
        )),
    ):  # fmt: skip
        (tmp_path / "broken").write_text(text)
        with pytest.raises(DataError, match="no step costs") as raised:
            read_costs(tmp_path / "broken")
        assert words in raised.value.message


def test_a_replay_against_a_server(scripted):
    """Forty requests in half a second; each is sent when it is due, and has the tokens that it should."""
    arrivals = [Arrival(n / 80, 3 + n % 5, 1 + n % 4) for n in range(40)]
    turns = fit(make_sessions(arrivals, 3.0, 0), 100).turns
    with scripted(rows=4, pace=0.001, limits=Limits(waiting=1000)) as server:
        client = Client(server.running.url)
        card = asyncio.run(client.card())
        assert (card["id"], card["max_model_len"]) == ("tiny", 100)
        outcomes = asyncio.run(client.replay(turns, Prompts(byte_tokenizer(), 0), "tiny"))
        metrics = asyncio.run(client.metrics())
    assert [each.number for each in outcomes] == list(range(40))
    for outcome, turn in zip(outcomes, turns, strict=True):
        assert outcome.done, outcome.error
        assert (outcome.tokens, outcome.wanted) == (turn.answer, turn.answer)
        assert turn.seconds <= outcome.sent <= outcome.first <= outcome.end
    assert metrics['lapcli_tokens_total{kind="prompt"}'] == sum(turn.prompt for turn in turns)
    assert metrics['lapcli_tokens_total{kind="answer"}'] == sum(turn.answer for turn in turns)
    with pytest.raises(ModelError, match="no server answers"):
        asyncio.run(Client(server.running.url).card())


def lapcli(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["lapcli", *map(str, arguments)])
    try:
        main()
    except SystemExit as exit:
        return exit.code or 0
    return 0


def test_the_command(monkeypatch, capsys, trace, tmp_path, scripted):
    lines = [f"2023-11-16 18:15:{n:02}.0000000,{200 + 300 * n},{n + 1}" for n in range(30)]
    path, costs = trace(*lines), tmp_path / "costs.json"
    COSTS.write(costs)
    assert lapcli(monkeypatch, "replay", path, "--dry-run", "--json") == 0
    would = json.loads(capsys.readouterr().out)
    assert (would["requests"], would["seconds"]) == (30, 29.0)
    assert list(would["percent_in_the_paper"].values()) == [64.68, 16.16, 16.03, 3.10]
    assert lapcli(monkeypatch, "replay", path, "--dry-run", "--json", "--simulate", costs) == 0
    would = json.loads(capsys.readouterr().out)
    assert would["engines"] == {"simulated": {"rows": 2, "bytes": "any number", "piece": 100}}
    assert would["costs"].endswith("costs.json, of x")
    found = []
    for replicas in (1, 4):
        output = tmp_path / f"{replicas}.json"
        options = ("--simulate", costs, "--replicas", replicas, "--turns", 0, "--output", output)
        assert lapcli(monkeypatch, "replay", path, "--json", *options) == 0
        found.append(json.loads(capsys.readouterr().out))
        assert len(json.loads(output.read_text())["each"]) == 30
    assert [each["done"] for each in found] == [30, 30]
    assert found[0]["prompts_cut"] == sum(200 + 300 * n + n + 1 > 1000 for n in range(30))
    assert found[1]["normalised_seconds"]["mean"] < found[0]["normalised_seconds"]["mean"] / 3
    with scripted(rows=8, pace=0.0) as server:
        options = ("--url", server.running.url, "--time-scale", 0.001, "--length-scale", 0.01)
        assert lapcli(monkeypatch, "replay", path, *options) == 0
        said = capsys.readouterr().err
        assert lapcli(monkeypatch, "replay", path, *options, "--json") == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["done"] == 30
        assert "replaying, as served: " in err
        assert "arXiv" not in err
        assert lapcli(monkeypatch, "replay", path, *options, "--json", "--quiet") == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["done"] == 30
        # What is left there is the server's own log, for it runs in this process.
        assert all(line.startswith("{") for line in err.splitlines())
    assert "30 of 30 requests" in said
    assert "arXiv 2506.09316" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requests", "0"], "--requests 0"),
        (["--replicas", "0"], "--replicas 0"),
        (["--turns", "-1"], "--turns -1"),
        (["--time-scale", "0"], "--time-scale 0"),
        (["--length-scale", "nan"], "--length-scale nan"),
        (["--simulate", "nowhere.json"], "pass --model"),
        (["--simulate", "costs.json", "--model", "demo:gdn"], "holds the costs of x"),
        (["--simulate", "broken.json"], "holds no step costs"),
        (["--simulate", "costs.json", "--modes", "adaptive"], "comes in one configuration"),
        (["--simulate", "new.json", "--model", "no-such-model/here"], "no-such-model"),
        (["--url", "ftp://here"], "begins with http://"),
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--output", "no/such/folder.json"], "no folder"),
        (["--output", "."], ". is a folder"),
        (["--dry-run", "--output", "costs.json"], "`lapcli replay` did not write it"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_replayed(monkeypatch, capsys, trace, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    COSTS.write(tmp_path / "costs.json")
    (tmp_path / "broken.json").write_text("[]")
    path = trace("2023-11-16 18:15:46,1,2")
    assert lapcli(monkeypatch, "replay", path, *arguments) in (1, 2)
    assert words in " ".join(capsys.readouterr().err.split())
    if "--simulate" in arguments:
        # A dry run refuses it as well.
        assert lapcli(monkeypatch, "replay", path, *arguments, "--dry-run") in (1, 2)
        assert words in " ".join(capsys.readouterr().err.split())
