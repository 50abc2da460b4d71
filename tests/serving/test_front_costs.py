"""What lies around an engine: measured, put into simulations, and seen in what a server does."""

import asyncio
import random
import statistics
import sys
from dataclasses import replace

import pytest

from lapcli.serving.costs import FrontCosts, StepCosts, read_costs
from lapcli.serving.front_costs import measure_front, measure_front_at
from lapcli.serving.replay_client import Client
from lapcli.serving.replay_results import summary
from lapcli.serving.replay_texts import Prompts
from lapcli.serving.replay_trace import Turn
from lapcli.serving.settings import Limits
from lapcli.serving.simulation import simulate
from lapcli.testing.models import byte_tokenizer
from lapcli.testing.serving import local_server

STEP = 0.04
"""Seconds of the scripted engine's steps; prompts take none."""
BOUND = 0.15
FRONT = FrontCosts(request=0.5, prompt_token=0.25, message=0.125, token=0.0625)
COSTS = StepCosts(((1, 1.0), (4, 1.0)), ((1, 0.0), (1000, 0.0)), device="cuda", rows=4, window=1000, piece=1000)


def turn(number, prompt, answer, seconds=0.0):
    return Turn(seconds, number, (prompt,), answer, prompt)


def test_a_front_by_hand():
    """Two requests at one time: the front is busy with the first, then with the second; then with their tokens."""
    costs = replace(COSTS, front=FRONT)
    first, second = simulate([turn(0, 2, 2), turn(1, 4, 3)], costs)
    # The front takes 1 for the first and 1.5 for the second, which was there before the first token.
    assert first.first == 2.5 + 0.125
    # That it told, for as long as which it was busy.
    assert first.end == 2.5 + 0.0625 + 0.125
    assert (second.sent, second.first) == (0.0, 2.5 + 2 * 0.0625 + 0.125)
    # From then on the engine is the slower one: it had the second at 2.5.
    assert second.end == 2.5 + 2 * 1.0 + 0.125
    # Those that come at one time are told one after the other.
    many = simulate([turn(n, 1, 2) for n in range(4)], replace(costs, front=FrontCosts(token=0.0625, message=0.5)))
    assert [each.first for each in many] == [0.5 + 0.0625 * n for n in range(4)]
    assert [each.end for each in many] == [1.5 + 0.0625 * n for n in range(4)]
    without = simulate([turn(n, 1, 2) for n in range(4)], COSTS)
    assert [(each.first, each.end) for each in without] == [(0.0, 1.0)] * 4


def test_a_front_that_is_slower_than_its_engine_is_what_limits():
    costs = replace(COSTS, front=FrontCosts(token=0.5))
    found = simulate([turn(n, 1, 40) for n in range(4)], costs)
    # Four tokens take two seconds, an engine's step one.
    assert max(each.end for each in found) == pytest.approx(40 * 4 * 0.5, rel=0.05)


@pytest.fixture
def echoing(folder):
    command = (sys.executable, "-m", "lapcli.serving.echo", "engine")
    return lambda: local_server(folder, command=command, max_length=100)


def test_simulated_latencies_are_those_that_are_served(scripted, echoing, tmp_path):
    """Requests that come and go, more of them than there are rows for now and then.

    Both are of real time: what else runs on the machine may take it from one and not from the other, but not always.
    """
    draw = random.Random(1)
    turns = [turn(n, draw.randint(1, 30), draw.randint(2, 24), n * 0.1 + draw.random() / 10) for n in range(40)]
    told: list[str] = []
    for _ in range(3):
        # Measured as it is where server and client are one process, as they are here.
        with echoing() as server:
            front = asyncio.run(measure_front_at(server.running.url, Prompts(byte_tokenizer(), 0), 100))
        with scripted(rows=4, pace=STEP, steady=True, limits=Limits(waiting=1000)) as server:
            outcomes = asyncio.run(Client(server.running.url).replay(turns, Prompts(byte_tokenizer(), 0), "tiny"))
        served = summary(outcomes, mode="served")
        costs = replace(COSTS, steps=((1, STEP), (4, STEP)), front=front, window=100)
        costs.write(tmp_path / "costs.json")
        assert read_costs(tmp_path / "costs.json") == costs
        simulated = summary(simulate(turns, costs), mode="simulated")
        assert served["done"] == simulated["done"] == 40
        # Some had to wait for a row.
        assert simulated["first_token_seconds"]["p95"] > 3 * STEP
        means = ("normalised_seconds", "first_token_seconds", "answer_seconds", "inter_token_seconds")
        pairs = {name: (simulated[name]["mean"], served[name]["mean"]) for name in means}
        pairs["seconds"] = (simulated["seconds"], served["seconds"])
        far = {name: pair for name, pair in pairs.items() if pair[0] != pytest.approx(pair[1], rel=BOUND)}
        if not far:
            return
        told.append(str(far))
    pytest.fail("; ".join(told))


def test_a_front_is_measured_in_a_process_of_its_own(folder):
    found = measure_front(str(folder), 100)
    assert 0 < found.request < 1
    assert 0 < found.message < 1
    assert 0 <= found.prompt_token < 0.01
    assert 0 <= found.token < 0.1
    assert statistics.fmean(found) < 0.5
