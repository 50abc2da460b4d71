"""The study of serving: what it keeps of its pieces, the tables that it makes, and the model that it draws."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import serving_study as study  # noqa: E402
from serving.lines import ENDURANCE, FIXED, MODES  # noqa: E402
from serving.pieces import Evidence  # noqa: E402
from studies.lines import add_line  # noqa: E402

from lapcli.errors import ModelError  # noqa: E402
from lapcli.runtime import Engine  # noqa: E402
from lapcli.serving.modes import Wish, find_conversion  # noqa: E402
from lapcli.serving.settings import EngineSettings  # noqa: E402
from lapcli.serving.worker import planned  # noqa: E402
from lapcli.stages.planning import memory_bytes  # noqa: E402

PAGE = f"# Page\n\nbefore\n\n{study.BEGIN}\nold\n{study.END}\n\nafter\n"
COMMON = {"machine": "M", "dtype": "bfloat16", "trace": "T", "requests": 9, "length_scale": 1.0, "max_length": 64,
          "memory": "1GiB", "date": "2026-11-30"}  # fmt: skip


def figures(mean, **more):
    spread = dict.fromkeys(("mean", "p50", "p95", "p99", "max"), mean)
    latencies = ("normalised_seconds", "first_token_seconds", "inter_token_seconds", "answer_seconds")
    counts = ("mixed_steps", "replays", "switch_tokens", "set_back", "refused", "failed", "share_converted")
    made = {**dict.fromkeys(latencies, spread), **dict.fromkeys(counts, 0), "switches": {}, "steps": 10, "done": 9}
    return {**made, "requests": 9, "tokens_per_second": 100.0, "rows_peak_bytes": 2**20, **more}


def mode(name, mean, served=True, **more):
    known = {"kind": MODES, "model": "C", "drawn": False, "time_scale": 0.5, "caps": "default", "seconds": 1.0}
    made = {**COMMON, **known, "mode": name, "served": served, "command": f"lapcli replay {name} {served}"}
    return {**made, "figures": figures(mean, ppl_increase=0.05), **more}


def cells(table, name):
    return [
        [cell.strip() for cell in row.split("|")[2:-1]] for row in table.splitlines() if row.startswith(f"| {name} |")
    ]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    for name, served, mean in (
        ("adaptive", True, 0.01), ("never", False, 0.022), ("never", True, 0.02), ("adaptive", False, 0.008)
    ):  # fmt: skip
        add_line(path, mode(name, mean, served))
    return path


def test_modes_stand_side_by_side_served_and_simulated(lines):
    add_line(lines, mode("static:0.5", 15.0, served=False))
    table = study.write([lines, lines])
    (row,) = cells(table, "normalised latency, mean")
    assert row == ["20.0 ms, 22.0 ms", "-, 15.0 s", "10.0 ms, 8.0 ms"]
    assert "served: never / adaptive 2.00." in table
    assert "simulated: never / adaptive 2.75, static:0.5 / adaptive 1875.00." in table
    assert "Simulated over served: never +10 %, adaptive -20 %." in table
    assert "paper has 2.29" in table
    assert cells(table, "perplexity above the base's")[0][0] == "5.0 %, 5.0 %"
    assert "    lapcli replay never True" in table
    assert "replay never False" not in table
    # Of what was simulated only, that command.
    assert "    lapcli replay static:0.5 False" in table


def test_what_does_not_compare_is_not_in_one_table(lines):
    add_line(lines, mode("never", 0.5, memory="2GiB", drawn=True))
    add_line(lines, mode("never", 0.04))
    table = study.write([lines])
    assert [len(row) for row in cells(table, "normalised latency, mean")] == [2, 1]
    # Of two with one key the later one counts.
    assert cells(table, "normalised latency, mean")[0][0] == "40.0 ms, 22.0 ms"
    assert "drawn at random" in table.partition("2GiB")[2]
    assert len(cells(table, "perplexity above the base's")) == 1


def test_other_pieces_have_tables_too(lines, tmp_path):
    for name, rows in (("demo:gdn", 100), ("demo:gdn, 0.5 cut", 190)):
        line = {**COMMON, "kind": FIXED, "model": name, "rows": rows, "figures": figures(0.1), "command": f"X {name}"}
        add_line(lines, {**line, "peak_memory_bytes": 2**28})
    growth = {"bytes_a_request": 4.8, "standard_error": 0.2, "bytes_last": 2**29}
    found = {"requests": 20000, "seconds": 60.0, "front": growth, "engine": growth, "left_over": {"x": 0.0}}
    known = {"kind": ENDURANCE, "model": "a tiny one", "machine": "M", "concurrency": 32, "date": "2026-11-30"}
    add_line(lines, {**known, "figures": found, "command": "python Y"})
    table = study.write([lines])
    assert cells(table, "requests at once") == [["100", "190"]]
    assert "front 4.8 ± 0.2 bytes a request (of 512 MiB)" in table
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    study.main(["write", str(lines), str(page)])
    assert page.read_text() == PAGE.replace("old\n", table)
    (tmp_path / "nothing").write_text("")
    with pytest.raises(SystemExit, match="no lines"):
        study.write([tmp_path / "nothing"])
    assert study.BEGIN in (ROOT / "docs" / "serve.md").read_text()


class Pieces(Evidence):
    """Notes what would be run, and says what came of it."""

    def lapcli(self, gpu, *arguments):
        self.asked.append(arguments)
        output = Path(arguments[arguments.index("--output") + 1]) if "--output" in arguments else None
        if output is not None:
            name = arguments[arguments.index("--modes") + 1]
            output.write_text(json.dumps({"modes": {name: figures(0.01)}}))
        return 1.0


def conversion(tmp_path):
    """What passes for one until it is served."""
    (tmp_path / "C" / "base").mkdir(parents=True, exist_ok=True)
    (tmp_path / "C" / "base" / "config.json").write_text("{}")
    return tmp_path / "C"


def options(tmp_path, *more):
    arguments = ["run", "--trace", str(tmp_path / "trace.csv"), "--work", str(tmp_path), "--output",
                 str(tmp_path / "out.jsonl"), "--time-scale", "0.5", "--replay-seconds", "3", *more]  # fmt: skip
    return study.main, arguments


def test_pieces_that_are_there_are_not_measured_again(tmp_path, monkeypatch):
    (tmp_path / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:{second:02}.0,{10},{2}\n" for second in range(40))
    )
    asked = []
    monkeypatch.setattr(Pieces, "asked", asked, raising=False)
    monkeypatch.setattr(study, "Evidence", Pieces)
    _, arguments = options(
        tmp_path, "--parts", "modes", "--model", str(conversion(tmp_path)), "--modes", "never,adaptive"
    )
    for count, extra in ((5, ()), (1, ()), (1, ("--seconds", "20", "--max-length", "99")), (3, ("--max-length", "99"))):
        # Costs, which a file holds afterwards, and each mode twice; servers only where there is time.
        asked.clear()
        with pytest.raises(SystemExit) as ended:
            study.main([*arguments, *extra])
        replays = [each for each in asked if "--modes" in each]
        assert ended.value.code == int("--seconds" in extra)
        assert len(asked) == count + (2 if "--seconds" in extra else 0), asked
        assert all("--simulate" in each for each in replays) or "--seconds" not in extra
        # Within three seconds, at twice the trace's pace, come those of its first six.
        assert {each[each.index("--requests") + 1] for each in replays} <= {"8"}


def test_half_the_load_is_twice_the_time(tmp_path, monkeypatch):
    lines = "".join(f"2023-11-16 18:15:{second:02}.0,{10},{2}\n" for second in range(40))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines)
    asked = []
    monkeypatch.setattr(Pieces, "asked", asked, raising=False)
    monkeypatch.setattr(study, "Evidence", Pieces)
    _, arguments = options(tmp_path, "--parts", "near", "--model", str(conversion(tmp_path)), "--replay-seconds", "20")
    with pytest.raises(SystemExit):
        study.main(arguments)
    _, simulated, served = asked
    for each in (simulated, served):
        assert each[each.index("--time-scale") + 1] == "1"
        assert each[each.index("--requests") + 1] == "21"
        assert each[each.index("--modes") + 1] == "never"


def test_what_fails_ends_nothing_else(tmp_path, monkeypatch, capsys):
    """One of the modes, served; a part as a whole, in a way that nobody foresaw; the exit code tells."""
    lines = "".join(f"2023-11-16 18:15:{second:02}.0,{10},{2}\n" for second in range(40))
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines)
    asked, burst = [], []

    class Failing(Pieces):
        def lapcli(self, gpu, *arguments):
            super().lapcli(gpu, *arguments)
            if "adaptive" in arguments and "--simulate" not in arguments:
                raise RuntimeError("lapcli replay: exit code 1: of the test")
            return 1.0

        def _burst(self, model, rows):
            burst.append((model, rows))
            if model == "demo:gdn" and len(burst) == 1:
                raise ModelError("too much", "raise --memory to 9B at least, or lower --max-rows to 77 or --max-length")
            if model == "demo:gdn":
                return {"rows": rows, "figures": {"tokens_per_second": 5.0}}
            raise ModelError("the engine died")

        def _endurance(self):
            return 1 / 0

    monkeypatch.setattr(Failing, "asked", asked, raising=False)
    monkeypatch.setattr(study, "Evidence", Failing)
    monkeypatch.setattr("serving.pieces.rows_at_most", lambda *_: 99)
    more = ["--model", str(conversion(tmp_path)), "--modes", "adaptive,never"]
    _, arguments = options(tmp_path, "--parts", "modes,fixed,endurance,near", *more)
    with pytest.raises(SystemExit) as ended:
        study.main(arguments)
    assert ended.value.code == 1
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(each.get("mode"), each.get("served")) for each in found if each["kind"] == MODES] == [
        ("adaptive", False), ("never", False), ("never", True), ("never", False), ("never", True)
    ]  # fmt: skip
    # As many rows as are held, where that is fewer than was estimated.
    assert [each["rows"] for each in found if each["kind"] == FIXED] == [77]
    assert [rows for _, rows in burst] == [99, 77, 99]
    said = capsys.readouterr().err
    for words in ("adaptive, served: lapcli replay: exit code 1", "0.5 cut: the engine died", "ZeroDivisionError"):
        assert words in said
    assert "1 of 4 done" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--trace", "nosuch"], "nosuch"),
        (["--known", "nosuch.jsonl"], "nosuch.jsonl cannot be read"),
        (["--model", "nosuch"], "--model nosuch is no conversion"),
        (["--modes", "never,sometimes"], "'sometimes' is none of"),
        (["--shape", "nosuch"], "--shape 'nosuch' is none of"),
        (["--memory", "much"], "much"),
        (["--gdn", "demo:nosuch"], "nosuch"),
        (["--change", "{"], "is no JSON"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_named_is_looked_at_before_anything_is_made(tmp_path, monkeypatch, capsys, more, said):
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:01.0,10,2\n")
    asked = []
    monkeypatch.setattr(Pieces, "asked", asked, raising=False)
    monkeypatch.setattr(study, "Evidence", Pieces)
    _, arguments = options(tmp_path, "--work", str(tmp_path / "work"), *more)
    with pytest.raises(SystemExit) as ended:
        study.main(arguments)
    assert said in f"{ended.value.code}{capsys.readouterr().err}"
    assert ended.value.code not in (0, 1)
    assert not asked
    assert not (tmp_path / "work").exists()


def test_a_drawn_conversion_is_one(tmp_path):
    root = study.draw(tmp_path / "drawn", shape="toy-llama", fraction=0.75, vocab_size=8192)
    found = find_conversion(str(root), Wish(max_ppl_increase="1"))
    assert [each.converted for each in found.conversion.configurations] == [0, 1, 2, 3]
    assert all(each.increase > 0 for each in found.conversion.configurations[1:])
    engine = Engine.load(root, max_length=64, max_rows=2)
    slots = [engine.prefill([5, 6, 7000], configuration=f"{number}-of-4").slot for number in (0, 3)]
    assert engine.step([8, 9], slots).isfinite().all()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert study.draw(root) == root
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    base = str(found.conversion.place.base)
    rows = study.rows_at_most(base, "64MiB", "float32", 128, 0)
    settings = EngineSettings(base, "cpu", "float32", max_length=128, memory=memory_bytes("64MiB"))
    assert planned(settings)["rows"] <= rows
    with pytest.raises(ModelError):
        planned(EngineSettings(base, "cpu", "float32", max_length=4096, memory=memory_bytes("4MiB")))
