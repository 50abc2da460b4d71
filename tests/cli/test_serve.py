"""`lapcli serve` as a process: it says where it is, refuses what cannot be, and ends in good order."""

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lapcli.cli.app import main
from lapcli.errors import ModelError, UsageError
from lapcli.families.loading import load_tokenizer, resolve_model
from lapcli.serving.assembling import model_name, read_chat_template
from lapcli.serving.modes import Wish, find_conversion
from lapcli.serving.schema import ChatRequest, CompletionRequest
from lapcli.serving.settings import EngineSettings
from lapcli.serving.texts import Texts
from lapcli.serving.worker import planned, prepare
from lapcli.testing.dual_state import tiny_conversion
from lapcli.testing.models import tiny_gated_deltanet


def lapcli(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["lapcli", *arguments])
    try:
        main()
    except SystemExit as exit:
        return exit.code or 0
    return 0


def test_what_it_would_do(monkeypatch, capsys, tmp_path):
    model = tiny_gated_deltanet(tmp_path / "tiny")
    code = lapcli(
        monkeypatch,
        "serve",
        str(model),
        "--port",
        "0",
        "--host",
        "0.0.0.0",
        "--max-length",
        "9999",
        "--dry-run",
        "--json",
    )
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert code == 0
    assert found["url"].startswith("http://0.0.0.0:")
    assert (found["steps"], found["tokens_of_a_request"], found["keys"]) == ("fused", 9999, 0)
    assert "everybody who reaches it" in out.err
    assert "was made for 2048" in out.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--max-rows", "0"], 2, ["--max-rows 0"]),
        (["--max-length", "-4"], 2, ["--max-length -4"]),
        (["--prefill-tokens", "0"], 2, ["--prefill-tokens 0"]),
        (["--max-per-client", "0"], 2, ["--per-client 0"]),
        (["--memory", "5"], 2, ["--memory 5", "did you mean 5GiB"]),
        (["--kernel", "quick"], 2, ["'quick'"]),
        (["--state-dtype", "int8"], 2, ["'int8'"]),
        (["--api-key-file", "/nowhere"], 2, ["/nowhere", "one key a line"]),
        (["--chat-template", "/nowhere"], 2, ["/nowhere"]),
        (["--host", "192.0.2.1"], 2, ["192.0.2.1"]),
        (["--host", "no.such.host.invalid"], 2, ["no.such.host.invalid"]),
        (["--port", "70000"], 2, ["--port 70000"]),
        (["--port", "-1"], 2, ["--port -1"]),
        (["--device", "cuda:77"], 2, ["cuda:77"]),
        (["--require-fast", "--device", "cpu"], 1, ["--require-fast", "on a CPU"]),
        (["no-such-model/here"], 1, ["no-such-model"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be(monkeypatch, capsys, arguments, code, words):
    assert lapcli(monkeypatch, "serve", "--port", "0", "--dry-run", *arguments) == code
    said = " ".join(capsys.readouterr().err.split())
    assert all(word in said for word in words)


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    """Three layers, all converted, at 10.5, 22 and 35 % more perplexity."""
    return tiny_conversion(tmp_path_factory.mktemp("converted") / "mine")


def test_what_it_would_do_with_a_conversion(monkeypatch, capsys, conversion):
    def would(*arguments):
        assert lapcli(monkeypatch, "serve", str(conversion), "--port", "0", "--dry-run", "--json", *arguments) == 0
        return json.loads(capsys.readouterr().out)["configurations"]

    assert list(would("--max-ppl-increase", "25%")) == ["0-of-3", "1-of-3", "2-of-3"]
    assert would("--adapt", "--max-ppl-increase", "1")["3-of-3"] == {"converted": 1.0, "ppl_increase": 0.3499}
    assert list(would("--fraction", "0.67")) == ["2-of-3"]
    assert list(would("--no-adapt")) == ["0-of-3"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["1-of-3, the best, has a perplexity 10.5% above", "--max-ppl-increase 11% or more"]),
        (["--adapt", "--fraction", "1"], ["--adapt and --fraction 1", "pass one of them"]),
        (["--fraction", "1", "--max-ppl-increase", "30%"], ["3-of-3", "35.0% above", "--fraction 0.6667 at most"]),
        (["--fraction", "33"], ["did you mean 0.33, or 33%?"]),
        (["--fraction", "130%"], ["--fraction 130%: more than all of the layers, which are 1, or 100%"]),
        (["--max-ppl-increase", "30%", "--caps", "1:2"], ["--caps 2: more than the whole"]),
        (["--no-adapt", "--offload"], ["--offload is for --adapt"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0][:2] == "--" else None,
)
def test_what_a_conversion_cannot_be_served_as(monkeypatch, capsys, conversion, arguments, words):
    assert lapcli(monkeypatch, "serve", str(conversion), "--port", "0", "--dry-run", *arguments) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert all(word in said for word in words)


def test_one_model_cannot_adapt(monkeypatch, capsys, conversion):
    assert lapcli(monkeypatch, "serve", str(conversion / "base"), "--adapt", "--dry-run") == 2
    assert "is one model" in " ".join(capsys.readouterr().err.split())


def test_a_port_that_is_taken(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert lapcli(monkeypatch, "serve", "--port", str(port)) == 2
    said = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 is taken" in said
    assert "pass another --port" in said


def test_names(tmp_path):
    from lapcli.families.source import resolve_model

    assert model_name(resolve_model("demo:gdn")) == "demo:gdn"
    assert model_name(resolve_model(str(tiny_gated_deltanet(tmp_path / "mine")))) == "mine"


@pytest.fixture
def started(tmp_path):
    """Starts a server of its own process; gives it, its port and where it logs."""
    running = []

    def start(*arguments, environment=None):
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "lapcli", "serve", *arguments, "--port", "0", "--json"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        running.append(process)
        head = ""
        while not head.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, (tmp_path / "log").read_text()
            head += line
        return process, int(json.loads(head)["url"].rpartition(":")[2]), tmp_path / "log"

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_whole_life(started, tmp_path):
    """A key from the environment, a request, SIGTERM in the middle of a stream, which ends first, and exit code 0."""
    model = tiny_gated_deltanet(tmp_path / "tiny")
    process, port, log = started(str(model), environment={"LAPCLI_API_KEY": "a-key-of-the-test"})
    headers = {"content-type": "application/json", "authorization": "Bearer a-key-of-the-test"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    first = response.readline()
    assert first.startswith(b"data: {")
    process.send_signal(signal.SIGTERM)
    rest = response.read()
    connection.close()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert process.wait(30) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    events = [line["event"] for line in lines]
    assert events[:3] == ["engine begins", "engine ready", "serving"]
    assert events[-1] == "ended"
    assert [line["tokens"] for line in lines if line["event"] == "request"] == [300]
    assert "a-key-of-the-test" not in log.read_text()
    # The engine is no more, either.
    engine = lines[0]["pid"]
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{engine}"):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_an_engine_that_is_not_fast_is_refused_where_it_must_be(tmp_path):
    """What no dry run can know: whether steps could be captured."""
    model = str(tiny_gated_deltanet(tmp_path / "tiny"))
    settings = EngineSettings(model, "cpu", "float32", max_length=64, require_fast=True)
    with pytest.raises(ModelError, match="--require-fast: decoding: fused steps, step kernel: reference"):
        prepare(settings)


def test_a_dry_run_knows_what_memory_holds(monkeypatch, capsys, conversion):
    """As many rows as the engine then has, but for what padding takes of a tiny one; too little memory is refused."""
    found = find_conversion(str(conversion), Wish(max_ppl_increase="1"))
    base = EngineSettings(str(found.conversion.place.base), "cpu", "float32", max_length=256)
    model = str(tiny_gated_deltanet(conversion.parent / "tiny"))
    for settings in (replace(base, **found.settings), base, replace(base, model=model)):
        _, facts = prepare(replace(settings, memory=2**20 + facts_of(settings)["weights"]))
        told = planned(replace(settings, memory=2**20 + facts_of(settings)["weights"]))
        # Fused projections are filled up to 64 rows of 32 numbers.
        padding = facts["bytes"]["weights"] - told["weights"]
        assert 0 <= padding <= 2**17
        fewer = replace(settings, memory=2**20 + facts_of(settings)["weights"] - padding)
        assert planned(fewer)["rows"] == facts["rows"] > 1
        assert told["rows"] >= facts["rows"]
    resident, offloaded = (planned(replace(base, **{**found.settings, "offload": each})) for each in (False, True))
    # Of three layers' projections (with biases) two stay.
    assert resident["weights"] - offloaded["weights"] == 4 * (2 * 33 * 32 + 2 * 33 * 16)
    arguments = ["serve", str(conversion), "--port", "0", "--dry-run", "--json", "--max-ppl-increase", "1"]
    assert lapcli(monkeypatch, *arguments, "--memory", "64KiB") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "65536 bytes hold" in said
    assert "raise --memory to" in said
    enough = re.search(r"--memory to (\d+)B", said)[1]
    assert lapcli(monkeypatch, *arguments, "--memory", f"{enough}B") == 0
    assert json.loads(capsys.readouterr().out)["rows_together"] >= 1
    assert lapcli(monkeypatch, *arguments, "--memory", f"{enough}B", "--max-rows", "3") == 0


def facts_of(settings):
    return planned(replace(settings, memory=None))


def test_the_documented_requests_are_taken():
    """Chats of models without a chat template among them, by the one that ships."""
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    found = re.findall(r"/v1/(completions|chat/completions) .* -d '(.*)'$", page, re.MULTILINE)
    assert {path for path, _ in found} == {"completions", "chat/completions"}
    (name,) = re.findall(r"^    lapcli serve --chat-template (\S+)$", page, re.MULTILINE)
    texts = Texts(load_tokenizer(resolve_model("demo:gdn")), read_chat_template(Path(name)))
    for path, body in found:
        if path == "completions":
            assert CompletionRequest.model_validate_json(body).prompts()
            continue
        messages = [message.plain() for message in ChatRequest.model_validate_json(body).messages]
        prompt = texts.tokenizer.decode(asyncio.run(texts.encode_chat([*messages, {"role": "user", "content": "a b"}])))
        assert prompt == "user: Hello\nuser: a b\nassistant:"
    texts.close()
    with pytest.raises(UsageError, match="--chat-template plain: No such file") as raised:
        read_chat_template(Path("plain"))
    assert "plain-chat" in str(raised.value.hint)
