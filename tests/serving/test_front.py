"""The HTTP front on an engine without a model: limits, fairness, clients that vanish, engines that die."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lapcli.errors import LapcliError
from lapcli.serving.settings import Limits
from lapcli.testing.serving import local_server

SCRIPTED = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))
DIE_AT_ONCE, DIE_LATER, HANG, FAIL, NONSENSE, LONG = 200, 201, 202, 203, 204, 205
PATH = "/v1/completions"


def asking(token=7, count=5, **fields):
    return {"prompt": [3, token], "max_tokens": count, **fields}


def text(reply):
    return reply.document["choices"][0]["text"]


def raw(server, data, *, timeout=20.0):
    """All that comes back for some bytes, until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout) as connection:
        connection.sendall(data)
        got = b""
        # Of a connection that is cut while we still send, nothing more is to be had.
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                got += part
        return got


def test_an_engine_that_dies(scripted):
    """Who was waiting is served by the next one; a stream in the middle ends by an error; the culprit fails."""
    with scripted(rows=3, pace=0.03) as server, ThreadPoolExecutor(8) as pool:
        stream = server.stream(PATH, asking(count=90))
        events = iter(stream)
        assert next(events)["choices"][0]["text"].startswith("7")
        with server.held() as engine:
            whole = [pool.submit(server.send, PATH, asking(token, 20)) for token in (5, 6, 8, 9)]
            server.wait_for("lapcli_waiting", 1)
            os.kill(engine, signal.SIGKILL)
        assert "SIGKILL" in list(events)[-1]["error"]["message"]
        stream.close()
        assert [text(each.result()) for each in whole] == [f"{token} " * 20 for token in (5, 6, 8, 9)]
        assert server.metric("lapcli_engine_restarts_total") == 1
        culprit, innocent = (
            pool.submit(server.send, PATH, asking(DIE_AT_ONCE)),
            pool.submit(server.send, PATH, asking()),
        )
        assert culprit.result().status == 500
        assert "3 engines died" in culprit.result().document["error"]["message"]
        assert text(innocent.result()) == "7 " * 5
        server.wait_for("lapcli_up", 1)
        assert server.send("/health").status == 200


def test_an_answer_that_nobody_has_seen_begins_anew(scripted):
    """Also where pieces of it have come."""
    with scripted(rows=4) as server, ThreadPoolExecutor(4) as pool:
        answer = pool.submit(server.send, PATH, asking(5, 60))
        server.wait_for('lapcli_tokens_total{kind="prompt"}', 2)
        assert server.send(PATH, asking(DIE_LATER, 9)).status == 500
        assert text(answer.result()) == "5 " * 60
        assert answer.result().document["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("order", [HANG, NONSENSE], ids=["hangs", "talks nonsense"])
def test_an_engine_that_is_of_no_use_is_replaced(scripted, order):
    with scripted(limits=Limits(engine_seconds=0.3)) as server:
        assert server.send(PATH, asking(order)).status == 500
        assert text(server.send(PATH, asking())) == "7 " * 5


def test_an_engine_that_cannot_begin(scripted):
    with pytest.raises(LapcliError, match="no such model") as raised, scripted(max_length=666):
        pass
    assert raised.value.hint == "name another"


@pytest.mark.parametrize(
    ("ends", "why", "hint"),
    [
        ("sys.exit(1)", "exit code 1", "what it said is above"),
        ("os.kill(os.getpid(), 9)", r"signal 9 \(SIGKILL\)", "more memory than this machine has"),
        ("os.kill(os.getpid(), 15)", r"signal 15 \(SIGTERM\)", "what it said is above"),
    ],
    ids=["an error", "killed", "told to end"],
)
def test_an_engine_that_dies_as_it_loads(folder, ends, why, hint):
    """Memory is named where that is likely, and nowhere else."""
    command = (sys.executable, "-c", f"import os, sys; {ends}")
    with (
        pytest.raises(LapcliError, match=f"died while it loaded the model: {why}") as raised,
        local_server(folder, command=command, max_length=100),
    ):
        pass
    assert hint in raised.value.hint
    assert ("memory" in raised.value.hint) == ("SIGKILL" in why)


def test_an_engine_that_cannot_begin_a_second_time_is_tried_again(folder, monkeypatch, tmp_path, capfd):
    """What one engine could, another one can: a device is full for a while, perhaps of the one that died."""
    monkeypatch.setattr("lapcli.serving.supervisor._PAUSE", 0.0)
    lives = tmp_path / "lives"
    script = tmp_path / "engine.py"
    script.write_text(
        "import json, pathlib, runpy, socket, sys\n"
        f"lives = pathlib.Path({str(lives)!r})\n"
        "life = len(lives.read_text()) if lives.exists() else 0\n"
        "lives.write_text('x' * (life + 1))\n"
        "if life in (1, 2):\n"
        "    connection = socket.socket(fileno=int(sys.argv[1]))\n"
        "    message = {'op': 'fatal', 'message': 'memory ran out', 'hint': 'raise it'}\n"
        "    connection.sendall(json.dumps(message).encode() + b'\\n')\n"
        "    sys.exit(0)\n"
        f"runpy.run_path({SCRIPTED[1]!r}, run_name='__main__')\n"
    )
    with local_server(folder, command=(sys.executable, str(script)), max_length=100) as server:
        assert server.send(PATH, asking(DIE_LATER, 9)).status == 500
        assert text(server.send(PATH, asking())) == "7 " * 5
    # Three that the request killed, or that could not begin; and one more.
    assert len(lives.read_text()) >= 4
    assert "memory ran out" in capfd.readouterr().err


def test_a_request_that_fails_alone(scripted):
    with scripted() as server:
        failed = server.send(PATH, asking(FAIL))
        assert (failed.status, failed.document["error"]["type"]) == (503, "server_error")
        events = server.send(PATH, asking(FAIL, stream=True)).events
        assert "out of memory" in events[-1]["error"]["message"]
        assert server.metric("lapcli_active") == 0


def test_clients_that_vanish_make_room(scripted):
    with scripted(rows=1, pace=0.02) as server:
        stream = server.stream(PATH, asking(count=95))
        next(iter(stream))
        waiting = server.connect()
        waiting.request("POST", PATH, json.dumps(asking(count=95)), {"content-type": "application/json"})
        server.wait_for("lapcli_active", 2)
        stream.close()
        waiting.close()
        server.wait_for('lapcli_answers_total{reason="cancelled"}', 2)
        assert (server.metric("lapcli_active"), server.metric("lapcli_waiting")) == (0, 0)
        assert text(server.send(PATH, asking())) == "7 " * 5


def test_too_many(scripted):
    limits = Limits(waiting=2, per_client=5)
    with scripted(rows=1, pace=0.02, limits=limits, keys=["the-first-key", "the-second-key"]) as server:
        first, second = ({"authorization": f"Bearer the-{name}-key"} for name in ("first", "second"))
        streams = [server.stream(PATH, asking(count=90), first) for _ in range(4)]
        refused = server.send(PATH, asking(), headers=second)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "wait already" in refused.document["error"]["message"]
        for stream in streams:
            stream.close()
        server.wait_for("lapcli_active", 0)
        # Several prompts of one request come in or stay out together.
        crowd = {"prompt": [[3, 7]] * 6, "max_tokens": 1}
        refused = server.send(PATH, crowd, headers=first)
        assert refused.status == 429
        assert "of this client" in refused.document["error"]["message"]
        assert server.send(PATH, {**crowd, "prompt": [[3, 7]] * 3}, headers=first).status == 200
        for headers in ({}, {"authorization": "Bearer the-third-key"}, {"authorization": "Basic the-first-key"}):
            reply = server.send(PATH, asking(), headers=headers)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert server.send("/health").status == 200


def test_no_client_starves(scripted):
    """Where forty requests of one client came before, one of another does not end behind them all."""
    keys = ["the-greedy-key", "the-modest-key"]
    with scripted(rows=1, pace=0.002, keys=keys) as server, ThreadPoolExecutor(50) as pool:
        greedy, modest = ({"authorization": f"Bearer {key}"} for key in keys)
        ends = []

        def ask(who, headers):
            assert server.send(PATH, asking(count=20), headers=headers).status == 200
            ends.append(who)

        with server.held():
            crowd = [pool.submit(ask, "greedy", greedy) for _ in range(40)]
            server.wait_for("lapcli_waiting", 38)
        pool.submit(ask, "modest", modest).result()
        assert [each.result() for each in crowd] == [None] * 40
        # A queue without turns would let it end as one of the last.
        assert ends.index("modest") < 30


BAD = {
    "no json": (b"{", 400),
    "half a number": (b'{"prompt": 1', 400),
    "a list": (b"[1, 2]", 400),
    "nothing": (b"", 400),
    "deep": (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    "no utf-8": (b'{"prompt": "\xff\xfe"}', 400),
    "half a surrogate": (b'{"prompt": "\\ud800"}', 400),
    "nan": (b'{"prompt": "x", "temperature": NaN}', 400),
    "a long number": (b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", 400),
    "twice": (b'{"prompt": "x", "prompt": {}}', 400),
}


def test_what_is_not_even_a_request(scripted):
    with scripted(limits=Limits(body_bytes=200_000)) as server:
        for name, (body, status) in BAD.items():
            reply = server.send(PATH, body)
            assert (name, reply.status) == (name, status)
            assert reply.document["error"]["type"] == "invalid_request_error"
            assert len(reply.body) < 1000
        assert server.send(PATH, b"prompt=x", headers={"content-type": "text/plain"}).status == 415
        assert server.send("/v1/none", {}).status == 404
        assert server.send(PATH, method="GET").status == 405
        assert server.send(PATH, {"prompt": "x" * 300_000}).status == 413
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        assert b" 413 " in raw(server, head + b"transfer-encoding: chunked\r\n\r\n" + chunk * 4)
        assert b" 413 " in raw(server, head + b"content-length: 999999999999\r\n\r\n")
        assert b" 400 " in raw(server, b"\x16\x03\x01 what is this\r\n\r\n")
        assert raw(server, b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n")[:12] in (b"HTTP/1.1 400", b"")
        assert text(server.send(PATH, asking())) == "7 " * 5


def test_what_does_not_come(scripted):
    """Headers and bodies that stop on their way, and connections that never ask for anything."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{"
    with scripted(limits=Limits(header_seconds=0.3, body_seconds=0.3)) as server:
        begun = time.monotonic()
        assert b" 408 " in raw(server, head)
        assert raw(server, b"POST /v1/comp") == b""
        assert raw(server, b"") == b""
        # Each of them took its time, and no more than a busy machine adds to that.
        assert 0.8 < time.monotonic() - begun < 15


def test_a_client_that_does_not_read(scripted):
    """Its row ends, and so does its connection."""
    with scripted(pace=0.05, limits=Limits(send_seconds=0.2)) as server:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", server.port))
            body = json.dumps(asking(LONG, 98, stream=True)).encode()
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
                + str(len(body)).encode()
                + b"\r\n\r\n"
                + body
            )
            server.wait_for('lapcli_answers_total{reason="cancelled"}', 1)
        assert text(server.send(PATH, asking())) == "7 " * 5


def test_it_drains(scripted):
    """What is under way ends, what comes is refused, and health says so; what takes too long fails."""
    with scripted(pace=0.05, limits=Limits(drain_seconds=1.5)) as server, ThreadPoolExecutor(4) as pool:
        with server.held():
            short = pool.submit(server.send, PATH, asking(count=6))
            endless = server.stream(PATH, asking(count=98))
            server.wait_for("lapcli_active", 2)
        server.loop.call_soon_threadsafe(server.running.end)
        reply = server.send("/health")
        while reply.status == 200:
            reply = server.send("/health")
        assert reply.document == {"status": "draining"}
        refused = server.send(PATH, asking())
        assert (refused.status, "retry-after" in refused.headers) == (503, True)
        assert text(short.result()) == "7 " * 6
        assert "the server ends" in list(endless)[-1]["error"]["message"]
        endless.close()


def test_many_connections(scripted):
    """Two hundred at once, more than a select() loop or the default of any pool would take."""
    with scripted(rows=64, limits=Limits(per_client=400)) as server:
        connections = [server.connect() for _ in range(200)]
        for connection in connections:
            connection.request("POST", PATH, json.dumps(asking(count=3)), {"content-type": "application/json"})
        assert [connection.getresponse().status for connection in connections] == [200] * 200
        for connection in connections:
            connection.close()
        threads = threading.active_count()
        assert threads < 20


def test_keys_and_prompts_are_in_no_log(scripted, capfd):
    with scripted(keys=["a-key-that-is-secret"]) as server:
        for key in ("a-key-that-is-secret", "a-key-that-is-wrong"):
            headers = {"authorization": f"Bearer {key}"}
            server.send(PATH, {"prompt": "the prompt", "max_tokens": 2, "stop": ["my stop"]}, headers=headers)
    said = capfd.readouterr().err
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    found = [line for line in lines if line["event"] == "request"]
    assert [(line["status"], line["client"]) for line in found] == [(200, "key-1"), (401, "nobody")]
    assert found[0]["prompt_tokens"] == 10
    # Nothing was chosen: the model comes in one configuration.
    assert not {"configuration", "why"} & found[0].keys()
    assert not any(word in said for word in ("secret", "wrong", "the prompt", "my stop"))
