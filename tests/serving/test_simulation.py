"""Simulated engines of several configurations: costs between measured ones, memory that runs out, the policy's part."""

import json
from dataclasses import replace

import pytest

from lapcli.errors import LapcliError
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.serving.adaptive import Adaptive, Cap
from lapcli.serving.costs import Curve, StepCosts, measure_costs, read_costs, told_of
from lapcli.serving.memory import Needs
from lapcli.serving.modes import Wish, parse_modes, read_conversion
from lapcli.serving.policy import Configuration, Decision, OneConfiguration
from lapcli.serving.replay_modes import plan_mode, simulate_mode
from lapcli.serving.replay_results import compared
from lapcli.serving.replay_trace import Fitted, Turn
from lapcli.serving.settings import EngineSettings
from lapcli.serving.simulation import Counted, simulate
from lapcli.serving.worker import prepare
from lapcli.testing.decoding import prompts_of, work_off
from lapcli.testing.dual_state import tiny_conversion
from lapcli.testing.models import byte_tokenizer

NAMES = [f"{n}-of-4" for n in range(5)]
KINDS = tuple(Configuration(name, n, 4, 0, 10 * (4 - n), n / 100) for n, name in enumerate(NAMES))
COSTS = StepCosts(
    ((1, 1.0), (9, 9.0)), ((1, 1.0), (100, 10.0)), 0.1, 0.01, model="x", rows=8, window=1000, piece=100,
    configurations=KINDS, most=Curve(((1, 3.0), (9, 5.0)), ((1, 2.0), (100, 4.0)), 0.0, 0.0), split_seconds=0.5,
)  # fmt: skip


class Fixed:
    """Gives each request the next of some configurations, and switches nothing."""

    def __init__(self, *names):
        self.names = list(names)

    def choose(self, request, load):
        return Decision(self.names.pop(0), "as told")

    def review(self, running, load):
        return []


def turn(number, prompt, answer, seconds=0.0):
    return Turn(seconds, number, (prompt,), answer, prompt)


def test_costs_between_the_least_and_the_most_converted():
    assert COSTS.step(5, 100) == pytest.approx(5.0 + 10.0)
    # All five converted to the end: 4 seconds, and none for what was read.
    assert COSTS.step(5, 100, 5.0, 100.0) == pytest.approx(4.0)
    # Two rows, one of them half converted, which has read 60 of 100 tokens.
    assert COSTS.step(2, 100, 0.5, 30.0) == pytest.approx(2.0 + (3.25 - 2.0) * 0.5 / 2 + 0.1 * 70)
    assert COSTS.prompt(100, 50) == pytest.approx(10.0 + 50.0)
    assert COSTS.prompt(100, 50, 0.5) == pytest.approx((60.0 + 4.0) / 2)


def test_rows_of_several_configurations_share_a_step():
    """Their prompts one after the other, then a step: half-way between their kinds, and four layers in parts."""
    counted = Counted()
    turns = [turn(0, 50, 2), turn(1, 50, 2)]
    first, second = simulate(turns, replace(COSTS, context_step=0.0), policy=Fixed("0-of-4", "4-of-4"), counted=counted)
    prompts = (1 + 9 * 49 / 99) + (2 + 2 * 49 / 99)
    assert first.end == second.end == pytest.approx(prompts + (2.0 + 3.25) / 2 + 4 * 0.5)
    assert (counted.steps, counted.mixed_steps) == (1, 1)
    assert counted.split_seconds == 2.0
    assert counted.tokens_as == {"0-of-4": 2, "4-of-4": 2}


def test_who_finds_no_page_is_set_back():
    """Twelve pages of unconverted layers (a row has four a page of tokens): two rows, until both want a third page."""
    page = 64 * 10
    counted = Counted()
    turns = [turn(0, 60, 80), turn(1, 60, 80)]
    outcomes = simulate(turns, COSTS, total_bytes=20 * page, counted=counted)
    assert [each.tokens for each in outcomes] == [80, 80]
    # 60 tokens are one page a layer; with 129 there are three: 24 pages for both.
    assert counted.set_back == 1
    assert counted.peak_bytes == 20 * page
    assert outcomes[0].end < outcomes[1].end
    # Converted to the half they never meet.
    counted = Counted()
    simulate(turns, COSTS, total_bytes=20 * page, policy=OneConfiguration("2-of-4"), counted=counted)
    assert counted.set_back == 0


def test_pressure_is_met_and_passes():
    """A crowd, and one long answer that outlasts it: switched when they are there, and back when they are gone."""
    policy = Adaptive((Cap(0, 0.0),), 0.05, patience=100.0)
    turns = [turn(0, 300, 300), *(turn(n, 200, 20, 1.0) for n in range(1, 7))]
    costs = replace(COSTS, prompts=((1, 0.001), (100, 0.001)), context_prompt=0.0)
    counted = Counted()
    outcomes = simulate(turns, costs, policy=policy, total_bytes=44_000, counted=counted)
    assert all(each.done for each in outcomes)
    assert counted.switches["memory is short"] >= 1
    assert counted.switches["memory is free"] >= 1
    assert counted.switch_tokens >= 300
    assert counted.switch_seconds > 0
    assert set(counted.tokens_as) > {"0-of-4"}
    never = Counted()
    unconverted = simulate(turns, costs, total_bytes=44_000, counted=never)
    assert never.switches == {}
    assert sum(each.end for each in outcomes) < sum(each.end for each in unconverted)
    # The limit holds whatever the pressure.
    counted = Counted()
    simulate(turns, costs, policy=Adaptive((Cap(0, 0.0),), 0.01), total_bytes=44_000, counted=counted)
    assert set(counted.tokens_as) <= {"0-of-4", "1-of-4"}


def test_modes_are_compared():
    fitted = Fitted([turn(n, 250 + 50 * (n % 5), 40, 3.0 * n) for n in range(40)], 0, 0)
    found = {}
    for mode in parse_modes("never,static:0.5,adaptive"):
        costs = replace(COSTS, total_bytes=60_000)
        found[mode.name], outcomes = simulate_mode(mode, fitted, costs, Wish(caps="0:0%"))
        assert all(each.done for each in outcomes)
    never, static, adaptive = found.values()
    assert (never["share_converted"], never["ppl_increase"], static["share_converted"]) == (0.0, 0.0, 0.5)
    assert static["ppl_increase"] == pytest.approx(0.02)
    said = adaptive["tokens_as"]
    assert adaptive["ppl_increase"] == pytest.approx(sum(int(name[0]) * n for name, n in said.items()) / 100 / 1600)
    assert adaptive["normalised_seconds"]["mean"] < never["normalised_seconds"]["mean"]
    ratios = compared(found)
    assert list(ratios) == ["never / adaptive", "static:0.5 / adaptive"]
    wanted = never["normalised_seconds"]["mean"] / adaptive["normalised_seconds"]["mean"]
    assert ratios["never / adaptive"]["normalised_seconds"] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("costs", "mode", "memory", "words"),
    [
        (replace(COSTS, configurations=KINDS[:1], most=None), "never", None, "comes in one configuration"),
        (replace(COSTS, configurations=KINDS[:3]), "static:1", None, "1 of 4 layers are 4, and 2 are converted"),
        (replace(COSTS, weights_bytes=10**6), "never", 10**6, "hold 1000000 of weights; .* leaves 0"),
        (replace(COSTS, weights_bytes=0), "never", 81_919, "that leaves 40959 for requests; the longest takes 40960"),
    ],
    ids=["one configuration", "not converted", "weights alone", "no request"],
)
def test_what_cannot_be_simulated(costs, mode, memory, words):
    (mode,) = parse_modes(mode)
    with pytest.raises(LapcliError, match=words):
        simulate_mode(mode, Fitted([turn(0, 5, 5)], 0, 0), costs, Wish(), memory=memory)


def test_engines_have_the_rows_and_the_bytes_that_a_server_would_make_room_for(monkeypatch):
    """Of 9000 bytes of weights 1000 are of each layer's second kind, and a layer's states take 100 bytes of a row.

    A prompt of full length, 1024 tokens in whole pages, is on its way; rows are as many as take an eighth of 1000
    tokens, two pages of 40 bytes a token, or of 10 for each layer that is attention in the one that converts the most.
    """
    kinds = tuple(each._replace(fixed_bytes=100 * each.converted) for each in KINDS)
    costs = replace(COSTS, weights_bytes=9000, layer_bytes=1000, configurations=kinds)
    given, held = [], []

    def simulate(_, costs, *, total_bytes, configurations, **others):
        given.append((costs.rows, total_bytes, costs.piece))
        held.append([each.converted for each in configurations])

    monkeypatch.setattr("lapcli.serving.replay_modes.simulate", simulate)
    monkeypatch.setattr("lapcli.serving.replay_modes.summary", lambda *_, **__: {})

    def made(text, limit=None, memory=109_000, **others):
        (mode,) = parse_modes(text)
        simulate_mode(mode, Fitted([], 0, 0), costs, Wish(max_ppl_increase=limit), memory=memory, **others)
        return given.pop()

    never, static = 1024 * 40, 1024 * 20 + 200
    # Unconverted there are no states, and no layer is there twice.
    assert made("never") == ((104_000 - never) // (128 * 40), 104_000 - never, 100)
    assert made("static:0.5") == ((104_000 - static) // (128 * 20 + 200), 104_000 - static, 100)
    assert made("adaptive", "2%") == ((102_000 - never) // (128 * 20 + 200), 102_000 - never, 100)
    assert made("adaptive")[0] == (100_000 - never) // 400 == 147
    assert made("adaptive", max_rows=5) == (5, 100_000 - never, 100)
    # What was measured beside: of states where there are some, and with shorter pieces where that takes too much.
    costs = replace(costs, needs=Needs(kept=3000, pass_token=100, pass_states=200, step_row=10, measured=True))
    left = 104_000 - 3000 - 10_000 - never
    assert made("never") == (left // (128 * 40), left, 100)
    left = 104_000 - 3000 - 20_000 - static
    assert made("static:0.5") == (left // (128 * 20 + 200), left, 100)
    # Or else there is no room for one of full length; and a quarter at most of what the weights leave is for a pass.
    assert made("never", memory=99_000)[2] == 64
    assert made("static:0.5", memory=84_000)[2] == 64
    with pytest.raises(LapcliError, match="as measured, graphs and libraries keep 3000"):
        made("never", memory=80_000)
    # Slots of what has one configuration are there besides.
    costs = replace(costs, slot_bytes=40, needs=Needs())
    left = 104_000 - static - 40
    assert made("static:0.5") == (left // (128 * 20 + 240), left - left // (128 * 20 + 240) * 40, 100)
    assert held[:5] == [[0], [2], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    return tiny_conversion(tmp_path_factory.mktemp("simulated") / "tiny")


@pytest.mark.parametrize("pages", [13, 60], ids=["too few pages for all", "enough"])
def test_a_simulation_does_the_steps_of_an_engine_with_configurations(conversion, pages):
    """Rows join, are set back and end as the real ones do, step for step, and have as many pages at most."""
    lengths, answers = (60, 61, 120, 30, 63, 90, 5, 64), (140, 150, 20, 66, 3, 40, 5, 9)
    names = [f"{n}-of-3" for n in (0, 0, 1, 3, 2, 0, 1, 3)]
    probe = Engine.load(conversion, max_length=256)
    engine = Engine.load(conversion, max_length=256, max_rows=5, kv_bytes=pages * probe.pages.page_bytes)
    batch = Batch(engine, together=32, piece=32)
    for prompt, answer, name in zip(prompts_of(*lengths), answers, names, strict=True):
        batch.add(prompt, GenerationSettings(max_new_tokens=answer), name)
    steps, ends = work_off(batch)
    kinds = tuple(told_of(engine))
    costs = StepCosts(((1, 1.0), (5, 1.0)), ((1, 1e-9), (32, 1e-9)), rows=5, window=256, piece=32, configurations=kinds)
    counted = Counted()
    turns = [turn(n, p, a) for n, (p, a) in enumerate(zip(lengths, answers, strict=True))]
    total = engine.pages.count * engine.pages.page_bytes
    outcomes = simulate(turns, costs, policy=Fixed(*names), total_bytes=total, counted=counted)
    assert (batch.set_back > 0) == (pages == 13)
    assert (counted.set_back, counted.steps) == (batch.set_back, steps)
    assert counted.mixed_steps == batch.mixed_steps
    assert counted.peak_bytes == (engine.pages.count - engine.pages.least_free) * engine.pages.page_bytes
    assert (engine.pages.least_free < 5) == (pages == 13)
    assert [each.number for each in sorted(outcomes, key=lambda each: (each.end, ends.index(each.number)))] == ends


@pytest.fixture(scope="module")
def measured(conversion):
    """The costs of an engine with the ends alone, as `lapcli replay --simulate` has them measured."""
    known = read_conversion(conversion)
    settings = EngineSettings(str(known.place.base), "cpu", "float32", max_length=128, conversion=str(conversion))
    batch, _ = prepare(replace(settings, configurations=[0, 3]))
    return settings, measure_costs(batch, model="x", window=128, known=known.configurations)


@pytest.mark.parametrize("memory", [None, 900_000], ids=["what rows take", "900 kB"])
@pytest.mark.parametrize("rows", [None, 3], ids=["rows that fit", "three rows"])
def test_simulated_engines_have_the_rows_and_pages_of_served_ones(measured, memory, rows):
    settings, costs = measured
    for text in ("never", "static:0.34", "static:1", "adaptive"):
        (mode,) = parse_modes(text)
        _, allowed, *simulated = plan_mode(mode, costs, Wish(max_ppl_increase="1"), memory, rows)
        wanted = [each.converted for each in allowed]
        batch, _ = prepare(replace(settings, memory=memory, max_rows=rows, configurations=wanted))
        served = batch.engine
        assert simulated == [served.max_rows, served.pages.count * served.pages.page_bytes, batch.piece], text


def test_costs_of_a_conversion_are_measured_written_and_read(conversion, tmp_path):
    engine = Engine.load(conversion, max_rows=3, max_length=64)
    costs = measure_costs(Batch(engine, byte_tokenizer(), together=32, piece=32), model="x", window=64)
    assert [each.name for each in costs.configurations] == ["0-of-3", "1-of-3", "2-of-3", "3-of-3"]
    assert [each.increase for each in costs.configurations] == pytest.approx([0, 0.105, 0.221, 0.35], abs=1e-3)
    assert costs.most is not None
    assert all(seconds > 0 for curve in (costs, costs.most) for _, seconds in (*curve.steps, *curve.prompts))
    assert costs.split_seconds >= 0
    # Of each layer the projections are there twice, and gates besides.
    assert costs.layer_bytes > 4 * (32 * 32 * 2 + 2 * 32 * 16)
    costs.write(tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == costs
    # An engine with the ends alone is as good.
    engine = Engine.load(conversion, max_rows=3, max_length=64, configurations=[0, 3])
    ends = Batch(engine, byte_tokenizer(), together=32, piece=32)
    known = [each._replace(fixed_bytes=0, token_bytes=0) for each in costs.configurations]
    assert [each.fixed_bytes for each in costs.configurations] == [0, 64 * 128, 2 * 64 * 128, 3 * 64 * 128]
    assert measure_costs(ends, model="x", window=64, known=known).configurations == costs.configurations
    document = json.loads((tmp_path / "costs.json").read_text())
    # Those of before there were configurations.
    old = {name: document[name] for name in ("model", "device", "rows", "window", "piece", "steps", "prompts")}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert read_costs(tmp_path / "old.json").configurations[0].name == "base"
