"""Configurations under load, on an engine without a model: what requests begin as, and when they are switched."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from lapcli.serving.adaptive import Adaptive, Cap

PATH = "/v1/completions"
CAPS = (Cap(0, 0.0), Cap(50, 0.5))


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """What runs is looked at after every step: answers here are short."""
    monkeypatch.setattr("lapcli.serving.dispatch.REVIEW_SECONDS", 0.0)


def asking(prompt, count, token=7, **fields):
    return {"prompt": [3] * (prompt - 1) + [token], "max_tokens": count, **fields}


def lines(capfd, event):
    said = capfd.readouterr().err
    return [
        line
        for line in map(json.loads, filter(lambda line: line[:1] == "{", said.splitlines()))
        if line["event"] == event
    ]


def test_requests_begin_as_their_length_asks_for(scripted, capfd):
    with scripted(rows=8, memory=10**6, policy=Adaptive(CAPS)) as server:
        for prompt, name in ((10, "0-of-4"), (60, "2-of-4")):
            reply = server.send(PATH, asking(prompt, 5))
            assert reply.document["choices"][0]["text"] == "7 " * 5
            assert server.metric(f'lapcli_configurations_total{{configuration="{name}",reason="prompt length"}}') == 1
            assert server.metric(f'lapcli_configuration_tokens_total{{configuration="{name}"}}') == 5
        assert server.metric('lapcli_configuration_ppl_increase{configuration="3-of-4"}') == 0.03
        assert server.metric('lapcli_configuration_share{configuration="3-of-4"}') == 0.75
        assert server.metric("lapcli_memory_for_rows_bytes") == 10**6
    (first, second) = lines(capfd, "configuration")
    assert (first["configuration"], first["reason"], first["prompt_tokens"]) == ("0-of-4", "prompt length", 10)
    assert second["was"] is None
    assert 0 <= second["memory_used"] < 0.01


def test_pressure_converts_running_requests_and_its_end_brings_them_back(scripted, capfd):
    """Six long requests take more than there is; one is left in the end."""
    with scripted(rows=8, pace=0.02, memory=1000, policy=Adaptive(CAPS)) as server, ThreadPoolExecutor(8) as pool:
        with server.held():
            lasting = pool.submit(server.send, PATH, asking(62, 38))
            server.wait_for("lapcli_active", 1)
        crowd = [pool.submit(server.send, PATH, asking(60, 10, token)) for token in (11, 12, 13, 14, 15, 16)]
        for token, each in zip((11, 12, 13, 14, 15, 16), crowd, strict=True):
            assert each.result().document["choices"][0]["text"] == f"{token} " * 10
        assert lasting.result().document["choices"][0]["text"] == "7 " * 38
        under = sum(
            server.metric(f'lapcli_switches_total{{configuration="{name}",reason="memory is short"}}')
            for name in ("3-of-4", "4-of-4")
        )
        after = server.metric('lapcli_switches_total{configuration="2-of-4",reason="memory is free"}')
        replayed = server.metric("lapcli_switch_tokens_total")
        assert 0 < server.metric("lapcli_switch_seconds_count") <= under + after
        said = {
            name: server.metric(f'lapcli_configuration_tokens_total{{configuration="{name}"}}')
            for name in ("2-of-4", "3-of-4", "4-of-4")
        }
    assert sum(said.values()) == 98
    switches = lines(capfd, "switch")
    assert len(switches) == under + after
    up, down = ([line for line in switches if line["reason"] == f"memory is {how}"] for how in ("short", "free"))
    # The one that is there longest is the longest, and goes first; it comes back when it is alone.
    assert up[0]["id"] == down[-1]["id"]
    assert up[0]["was"] == down[-1]["configuration"] == "2-of-4"
    assert up[0]["configuration"] in ("3-of-4", "4-of-4")
    assert up[0]["memory_used"] > 0.85
    assert down[-1]["memory_used"] < 0.6
    assert up[0]["frees_bytes"] > 0 > down[-1]["frees_bytes"]
    assert replayed == sum(line["tokens"] for line in switches)


def test_the_quality_limit_holds_under_pressure(scripted, capfd):
    policy = Adaptive(CAPS, 0.02)
    with scripted(rows=8, pace=0.01, memory=400, policy=policy) as server, ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(server.send, PATH, asking(60, 10)) for _ in range(8)]
        assert all(each.result().status == 200 for each in crowd)
        for worse in ("3-of-4", "4-of-4"):
            assert server.metric(f'lapcli_configuration_tokens_total{{configuration="{worse}"}}') == 0
    assert lines(capfd, "switch") == []


def test_what_waits_for_memory_waits_in_the_queue(scripted):
    """Rows enough, and memory for one: the second is sent when the first has left room, and decided on only then."""
    with scripted(rows=8, pace=0.02, memory=150, policy=Adaptive(CAPS, 0.02)) as server, ThreadPoolExecutor(8) as pool:
        with server.held():
            crowd = [pool.submit(server.send, PATH, asking(60, 20)) for _ in range(4)]
            server.wait_for("lapcli_waiting", 2)
            assert server.metric("lapcli_active") == 2
        assert [each.result().status for each in crowd] == [200] * 4


def test_an_engine_that_dies_forgets_what_ran_as_what(scripted):
    """What is run again is decided anew, and a switch that was under way is void."""
    with scripted(rows=8, pace=0.01, memory=1000, policy=Adaptive(CAPS)) as server, ThreadPoolExecutor(8) as pool:
        with server.held():
            crowd = [pool.submit(server.send, PATH, asking(60, 30, 20 + n)) for n in range(7)]
            server.wait_for("lapcli_active", 7)
        culprit = pool.submit(server.send, PATH, {"prompt": [3, 201], "max_tokens": 9})
        for number, each in enumerate(crowd):
            assert each.result().document["choices"][0]["text"] == f"{20 + number} " * 30
        assert culprit.result().status == 500
        assert server.metric("lapcli_engine_restarts_total") == 3


@pytest.mark.parametrize("waiting", [1, 3])
def test_a_full_queue_is_full_whatever_the_number_of_rows(scripted, waiting):
    from lapcli.serving.settings import Limits

    limits = Limits(waiting=waiting)
    with scripted(rows=64, pace=0.05, memory=150, policy=Adaptive(CAPS, 0.0), limits=limits) as server:
        streams = [server.stream(PATH, asking(60, 40)) for _ in range(1 + waiting)]
        server.wait_for("lapcli_waiting", waiting)
        assert server.send(PATH, asking(60, 5)).status == 429
        for stream in streams:
            stream.close()
