"""Replays of a conversion in several modes: servers that are started for it, what their metrics say, refusals."""

import contextlib
import json
import shutil
import sys
from dataclasses import replace

import psutil
import pytest

from lapcli.artifacts import read_artifact, write_artifact
from lapcli.cli.app import main
from lapcli.cli.replay import _serve_modes
from lapcli.errors import ModelError, UsageError
from lapcli.linearising.plan import Place
from lapcli.reporting import SilentReporter
from lapcli.serving.costs import Curve, StepCosts
from lapcli.serving.modes import Wish, parse_modes, read_conversion
from lapcli.serving.replay_engines import Engines, started
from lapcli.serving.replay_modes import served_figures
from lapcli.testing.dual_state import tiny_conversion
from lapcli.testing.processes import subprocess_of_forks


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    """Three layers, all converted, at 10.5, 22 and 35 % more perplexity."""
    return tiny_conversion(tmp_path_factory.mktemp("modes") / "tiny")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:15:{n // 10:02}.{n % 10}00000,{60 + 20 * (n % 9)},{20 + n % 7}" for n in range(24)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
    return path


def lapcli(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["lapcli", *map(str, arguments)])
    try:
        main()
    except SystemExit as exit:
        return exit.code or 0
    return 0


def test_metrics_become_figures():
    """Between two looks: half of the tokens by each of two configurations, a third one before."""
    kinds = {"0-of-4": (0.0, 0.0), "2-of-4": (0.04, 0.5), "4-of-4": (0.2, 1.0)}
    before = {
        'lapcli_configuration_tokens_total{configuration="4-of-4"}': 30.0,
        'lapcli_configuration_tokens_total{configuration="2-of-4"}': 10.0,
        "lapcli_switch_seconds_sum": 1.0,
        "lapcli_switch_seconds_count": 1.0,
    }
    after = {
        **{f'lapcli_configuration_ppl_increase{{configuration="{name}"}}': kind[0] for name, kind in kinds.items()},
        **{f'lapcli_configuration_share{{configuration="{name}"}}': kind[1] for name, kind in kinds.items()},
        'lapcli_configuration_tokens_total{configuration="4-of-4"}': 30.0,
        'lapcli_configuration_tokens_total{configuration="2-of-4"}': 60.0,
        'lapcli_configuration_tokens_total{configuration="0-of-4"}': 50.0,
        'lapcli_configurations_total{configuration="2-of-4",reason="prompt length"}': 3.0,
        'lapcli_configurations_total{configuration="2-of-4",reason="memory is short"}': 2.0,
        'lapcli_switches_total{configuration="4-of-4",reason="memory is short"}': 2.0,
        'lapcli_switches_total{configuration="2-of-4",reason="memory is short"}': 1.0,
        "lapcli_switch_seconds_sum": 4.0,
        "lapcli_switch_seconds_count": 3.0,
        "lapcli_switch_tokens_total": 700.0,
        "lapcli_steps": 50.0,
        "lapcli_mixed_steps": 20.0,
        "lapcli_mixed_seconds": 0.4,
        "lapcli_split_seconds": 0.1,
        "lapcli_memory_for_rows_peak_bytes": 1000.0,
        "lapcli_peak_memory_bytes": 5.0,
    }
    found = served_figures(before, after)
    assert found["tokens_as"] == {"2-of-4": 50.0, "0-of-4": 50.0}
    assert found["share_converted"] == pytest.approx(0.25)
    assert found["ppl_increase"] == pytest.approx(0.02)
    assert found["began_as"] == {"2-of-4": 5.0}
    assert found["switches"] == {"memory is short": 3.0}
    assert (found["replays"], found["switch_mean_seconds"], found["switch_tokens"]) == (2.0, 1.5, 700.0)
    assert (found["mixed_mean_seconds"], found["split_mean_seconds"]) == (pytest.approx(0.02), pytest.approx(0.005))
    assert found["split_percent_of_mixed"] == pytest.approx(25)
    assert (found["rows_peak_bytes"], found["peak_memory_bytes"]) == (1000.0, 5.0)
    untimed = served_figures(before, {**after, "lapcli_mixed_seconds": 0.0})
    assert (untimed["mixed_mean_seconds"], untimed["split_percent_of_mixed"]) == (None, None)
    # A server of before, or of somebody else.
    assert served_figures({}, {})["ppl_increase"] is None


def test_a_trace_in_two_modes(monkeypatch, capsys, trace, conversion, tmp_path):
    """Each server is started, replayed against and ended; files hold every request of each."""
    monkeypatch.setattr("lapcli.serving.replay_engines.subprocess", subprocess_of_forks())
    output = tmp_path / "modes.json"
    options = [
        "--turns",
        "0",
        "--max-ppl-increase",
        "1",
        "--caps",
        "0:34%,100:67%",
        "--max-length",
        "400",
        "--time-scale",
        "0.01",
    ]
    code = lapcli(
        monkeypatch, "replay", trace, "--model", conversion, "--modes", "never,adaptive", "--output", output, *options
    )
    said = capsys.readouterr().err
    assert code == 0, said
    found = json.loads(output.read_text())
    assert list(found["modes"]) == ["never", "adaptive"]
    never, adaptive = found["modes"].values()
    for mode, figures in found["modes"].items():
        assert (figures["mode"], figures["done"], figures["failed"]) == (mode, 24, 0)
        assert len(found["each"][mode]) == 24
        assert sum(figures["tokens_as"].values()) == figures["tokens"] == sum(20 + n % 7 for n in range(24))
    assert (never["share_converted"], never["ppl_increase"], never["mixed_steps"]) == (0.0, 0.0, 0.0)
    assert set(adaptive["tokens_as"]) == {"1-of-3", "2-of-3"}
    expected = sum(n * {"1": 0.105171, "2": 0.221403}[name[0]] for name, n in adaptive["tokens_as"].items())
    assert adaptive["ppl_increase"] == pytest.approx(expected / adaptive["tokens"], abs=1e-5)
    assert adaptive["mixed_steps"] > 0
    assert list(found["compared"]) == ["never / adaptive"]
    assert "layers converted, mean over tokens" in said
    for mode in ("never", "adaptive"):
        log = [json.loads(line) for line in (tmp_path / f"modes.json.{mode}.log").read_text().splitlines()]
        assert log[-1]["event"] == "ended"
        (engine,) = [line["pid"] for line in log if line["event"] == "engine begins"]
        assert not psutil.pid_exists(engine)
    assert sum(line["event"] == "configuration" for line in log) == 24


@pytest.mark.parametrize(
    ("error", "left"),
    [(KeyboardInterrupt(), []), (ModelError("it died"), ["m.json.never.log", "m.json.static-0.34.log"])],
    ids=["interrupted", "failed"],
)
def test_logs_of_servers_stay_where_they_tell_why_and_go_where_nothing_is_kept(
    monkeypatch, conversion, tmp_path, error, left
):
    answers = iter([({}, []), error])

    @contextlib.contextmanager
    def fake_server(_model, _options, log):
        log.write_text("a server's words")
        yield "http://nowhere"

    async def send(*_):
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr("lapcli.serving.replay_engines.started", fake_server)
    monkeypatch.setattr("lapcli.cli.replay._send", send)
    engine = Engines(str(conversion), None, None, None, 9, "cpu", "auto", 1, False)
    modes, wish, output = parse_modes("never,static:0.34"), Wish(), tmp_path / "m.json"
    with pytest.raises(type(error)):
        _serve_modes([], modes, wish, engine, None, 0, output, SilentReporter())
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_server_that_cannot_begin(conversion):
    with pytest.raises(UsageError, match="exit code 2") as raised, started(str(conversion), ["--fraction", "2"]):
        pass
    assert "--fraction 2" in raised.value.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modes", "never,always"], "'always' is none of"),
        (["--modes", "never"], "pass --model DIR"),
        (["--modes", "never", "--model", "demo:gdn"], "--modes serves a conversion, and demo:gdn is none"),
        (["--modes", "adaptive", "--model", "demo:gdn"], "then pass --model DIR"),
        (["--modes", "adaptive", "--model", "CONVERSION"], "--max-ppl-increase 11% or more"),
        (["--modes", "never", "--model", "CONVERSION", "--url", "http://x"], "--url http://x names one that runs"),
        (["--modes", "never", "--model", "CONVERSION", "--caps", "0:1%"], "--caps is for --modes with adaptive"),
        (["--modes", "never", "--model", "CONVERSION", "--replicas", "2"], "--replicas 2 is for --simulate"),
        (["--modes", "never", "--model", "CONVERSION", "--memory", "5"], "did you mean 5GiB"),
        (["--max-rows", "5"], "--max-rows is for engines that are started or simulated here"),
        (["--require-fast"], "--require-fast is for engines that are started or simulated here"),
        (["--offload"], "--offload is for --modes"),
        (["--max-length", "0"], "--max-length 0"),
        (["--modes", "never", "--simulate", "COSTS"], "of x, which comes in one configuration"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_modes_that_cannot_be(monkeypatch, capsys, trace, tmp_path, conversion, arguments, words):
    costs = tmp_path / "costs.json"
    StepCosts(((1, 1.0),), ((1, 1.0),), model="x").write(costs)
    named = {"CONVERSION": str(conversion), "COSTS": str(costs)}
    assert lapcli(monkeypatch, "replay", trace, *(named.get(each, each) for each in arguments)) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_what_modes_would_do(monkeypatch, capsys, trace, conversion):
    options = ["--modes", "never,static:0.34", "--model", conversion, "--dry-run", "--json", "--max-length", 128]
    assert lapcli(monkeypatch, "replay", trace, *options) == 0
    would = json.loads(capsys.readouterr().out)
    assert would["modes"] == ["never", "static:0.34"]
    assert [each["rows"] for each in would["engines"].values()] == [16, 16]
    never, static = (each["longest_request"] for each in would["engines"].values())
    assert 0 < static < never


@pytest.mark.parametrize("simulated", [False, True], ids=["served", "measured for it"])
@pytest.mark.parametrize("dry", [False, True], ids=["run", "dry run"])
def test_too_little_memory_is_said_before_anything_begins(
    monkeypatch, capsys, trace, conversion, tmp_path, dry, simulated
):
    """As a server would say it, and a dry run what a run would."""
    begun = []
    monkeypatch.setattr("lapcli.serving.replay_engines.started", lambda *_: begun.append(1))
    monkeypatch.setattr("lapcli.serving.replay_engines.prepare", lambda *_: begun.append(1))
    options = ["--modes", "static:1,never", "--model", conversion, "--memory", "150kB"]
    options += ["--simulate", tmp_path / "costs.json"] * simulated + ["--dry-run"] * dry
    assert lapcli(monkeypatch, "replay", trace, *options) == 1
    said = capsys.readouterr().err
    assert "150000 bytes hold" in said
    assert "raise --memory to" in said
    assert not begun
    assert lapcli(monkeypatch, "serve", conversion, "--no-adapt", "--memory", "150kB", "--dry-run", "--port", 0) == 1
    assert "150000 bytes hold" in capsys.readouterr().err


def test_costs_are_of_what_the_model_is(monkeypatch, capsys, trace, conversion, tmp_path):
    """Not of what it is called: by another name they hold, and for another conversion of the same name they do not."""
    digest = read_conversion(conversion).digest
    costs, options = tmp_path / "costs.json", ["--dry-run", "--json", "--simulate", tmp_path / "costs.json"]
    StepCosts(((1, 1.0),), ((1, 1.0),), model="x", digest=digest).write(costs)
    monkeypatch.chdir(conversion.parent)
    assert lapcli(monkeypatch, "replay", trace, *options, "--model", conversion.name) == 0
    shutil.copytree(conversion, tmp_path / "copy")
    assert lapcli(monkeypatch, "replay", trace, *options, "--model", tmp_path / "copy") == 0
    # Its last layer was measured to be worse, then it is gone, then the teacher is another.
    last = Place(tmp_path / "copy").prefix(3, 1)
    artifact = read_artifact(last)
    record = {**artifact.lineage.record, "cross_entropy": 3.0}
    for change in (
        lambda: write_artifact(last, replace(artifact.lineage, record=record), artifact.tensors()),
        last.unlink,
        lambda: tiny_conversion(tmp_path / "copy", teacher={"seed": 1}),
    ):
        change()
        capsys.readouterr()
        assert lapcli(monkeypatch, "replay", trace, *options, "--model", tmp_path / "copy") == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"holds the costs of x ({digest[:12]})" in said
        assert "delete that file, and they are measured anew" in said
    # Nobody names a model: what was measured is simulated.
    assert lapcli(monkeypatch, "replay", trace, *options) == 0


def test_a_limit_is_of_adaptive_and_others_are_measured_by_it(monkeypatch, capsys, trace, conversion, tmp_path):
    """Static means static, simulated as served."""
    kinds = tuple(each._replace(token_bytes=1) for each in read_conversion(conversion).configurations)
    costs = StepCosts(((1, 1e-3), (9, 1e-3)), ((1, 1e-3),), model="x", rows=9, window=400, piece=64)
    replace(costs, configurations=kinds, most=Curve(costs.steps, costs.prompts)).write(tmp_path / "costs.json")
    options = ["--modes", "never,static:1,adaptive", "--max-ppl-increase", "15%", "--model", conversion]
    assert lapcli(monkeypatch, "replay", trace, *options, "--dry-run") == 0
    capsys.readouterr()
    options = [*options[:4], "--simulate", tmp_path / "costs.json"]
    assert lapcli(monkeypatch, "replay", trace, *options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_ppl_increase"] == 0.15
    assert [each["within_limit"] for each in found["modes"].values()] == [True, False, True]
    assert found["modes"]["static:1"]["ppl_increase"] == pytest.approx(0.35, abs=1e-3)
    assert lapcli(monkeypatch, "replay", trace, *options) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "within 15 %" in line]
    assert line.split()[-3:] == ["yes", "no", "yes"]
