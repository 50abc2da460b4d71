"""The study of query feedback: what is there is not run again, what is cut short goes on, tables say what they compare.

The module under test is a script, so it is found beside the repository's packages.
"""

import json
import lzma
import random
import shutil
import sys
import threading
from pathlib import Path
from statistics import mean, stdev

import pytest

import lapcli
from lapcli.data.builtin import heldout_builtin_text
from lapcli.data.overlap import HeldOutIndex, paragraphs_of
from lapcli.shipped import shipped_recipes

sys.path.append(str(Path(lapcli.__file__).resolve().parents[1] / "scripts"))

import query_feedback_study as study

PAGE = f"# Page\n\nbefore\n\n{study.BEGIN}\nold\n{study.END}\n\nafter\n"


def line(variant, seed, *, tokens=1000, limit=10, text="a" * 64, date="2026-11-30", ppl=30.0, recall=0.5):
    rows = [{"task": "builtin", "metric": "token_perplexity", "length": None, "values": {"model": {"value": ppl}}}]
    rows.append({"task": "builtin", "metric": "bits_per_byte", "length": None, "values": {"model": {"value": 1.0}}})
    rows += [
        {"task": task, "metric": "string_match", "length": length, "values": {"model": {"value": recall}}}
        for task in study.NEEDLES
        for length in (512, 2048)
    ]
    return {
        "variant": variant, "seed": seed, "tokens": tokens, "text": text, "limit": limit, "date": date, "machine": "M",
        "commands": ["lapcli train X", "lapcli eval Y"], "training": {"after": {"cross_entropy": 3.0}}, "rows": rows,
    }  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    """Three seeds of two kinds; the difference in recall is 0.1 + 0.02 seed, in perplexity -2."""
    path = tmp_path / "runs.jsonl"
    for seed in range(3):
        study.add_line(path, line("gdn", seed, ppl=30.0 + seed, recall=0.3 + 0.1 * seed))
        study.add_line(path, line("qdelta", seed, ppl=28.0 + seed, recall=0.4 + 0.12 * seed))
    return path


def cells(table, name):
    return [
        [cell.strip() for cell in row.split("|")[2:-1]] for row in table.splitlines() if row.startswith(f"| {name} |")
    ]


def test_every_kind_has_a_recipe():
    shipped = {recipe.name for recipe in shipped_recipes()}
    assert {f"train/small-{name}" for name in study.VARIANTS} <= shipped


def test_tables_hold_means_spreads_and_differences_by_seed(runs):
    table = study.write([runs])
    (gdn,) = cells(table, study.VARIANTS["gdn"])
    assert gdn[0] == "3"
    assert gdn[2] == f"{mean([30, 31, 32]):.2f} ± {stdev([30, 31, 32]):.2f}"
    assert gdn[3] == f"0.400 ± {stdev([0.3, 0.4, 0.5]):.3f}"
    _, paired = cells(table, study.VARIANTS["qdelta"])
    gaps = [0.1, 0.12, 0.14]
    assert paired[:2] == ["3", "-2.00 ± 0.00"]
    assert paired[2] == f"+{mean(gaps):.3f} ± {stdev(gaps) / 3**0.5:.3f}"
    # 2048 is beyond the trained length: a column of its own.
    assert paired[-1] == paired[2]
    assert "2026-11-30, M" in table


def test_what_does_not_compare_is_not_in_one_table(runs):
    study.add_line(runs, line("gdn", 0, tokens=500, ppl=99.0))
    study.add_line(runs, line("gdn", 5, date="2026-12-01"))
    table = study.write([runs])
    assert [row[0] for row in cells(table, study.VARIANTS["gdn"])] == ["4", "1"]
    assert "2026-11-30 to 2026-12-01" in table
    # Once in two files is once.
    assert study.write([runs, runs]) == table


def test_what_has_no_room_for_a_task_is_said_not_measured(tmp_path):
    path = tmp_path / "runs.jsonl"
    for variant in ("gdn", "qdelta"):
        made = line(variant, 0)
        made["rows"] = [row for row in made["rows"] if (row["task"], row["length"]) != ("niah_single_3", 512)]
        study.add_line(path, made)
    (gdn, (_, paired)) = (cells(study.write([path]), study.VARIANTS[name]) for name in ("gdn", "qdelta"))
    assert gdn[0][3:] == ["0.500", "0.500", "0.500", "0.500", "not measured", "0.500"]
    assert paired == ["1", "+0.00", "+0.000", "+0.000", "not measured", "+0.000"]


def test_a_line_that_was_cut_short_is_none_and_spoils_no_other(runs):
    whole = runs.read_text()
    runs.write_text(whole + whole.splitlines()[0][:50])
    assert len(study.read_lines(runs)) == 6
    study.add_line(runs, line("delta-net", 0))
    assert [each["variant"] for each in study.read_lines(runs)][-1] == "delta-net"
    assert len(study.read_lines(runs)) == 7


def test_tables_go_between_the_marks_of_a_page(runs, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for _ in range(2):
        study.main(["write", str(runs), str(page)])
        text = page.read_text()
        assert text.startswith(f"# Page\n\nbefore\n\n{study.BEGIN}\n| | seeds |")
        assert text.endswith(f"{study.END}\n\nafter\n")
        assert "old" not in text
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="needs the lines"):
        study.main(["write", str(runs), str(page)])
    assert page.read_text() == "no marks"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A study whose commands leave what lapcli would, and the commands that it started."""
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "The mill stood near the river. Nobody knew who had built it. " * 50}) + "\n")
    begun = []

    def pretend(self, gpu, *arguments):
        begun.append((gpu, arguments))
        run = Path(arguments[arguments.index("--run") + 1])
        if arguments[0] == "train":
            (run / "training").mkdir(parents=True)
            names = ("step", "tokens", "before", "stopped", "contraction")
            record = {**dict.fromkeys(names), "seconds": 1.0, "after": {"cross_entropy": 3.0}}
            (run / "training" / "training.json").write_text(json.dumps({"record": record}))
        else:
            rows = line("gdn", 0)["rows"]
            (run / "evaluation.json").write_text(json.dumps({"rows": rows, "versions": {}}))
        return 1.0

    monkeypatch.setattr(study.Study, "_lapcli", pretend)
    monkeypatch.setattr(study, "recall_shard", lambda *_: "")
    monkeypatch.setattr(study, "ProcessPoolExecutor", study.ThreadPoolExecutor)
    monkeypatch.setattr(study.signal, "signal", lambda *_: None)

    def run(*more):
        begun.clear()
        with pytest.raises(SystemExit) as ended:
            study.main(
                ["run", "--work", str(tmp_path / "work"), "--text", str(text), "--output", str(tmp_path / "out.jsonl"),
                 "--tokens", "1000", "--gpus", "2", "--workers", "2", "--variants", "gdn,qdelta", *more]
            )  # fmt: skip
        return ended.value.code, sorted(arguments for _, arguments in begun)

    run.begun, run.output, run.text = begun, tmp_path / "out.jsonl", text
    return run


def test_what_is_there_is_not_run_again(started, tmp_path):
    code, commands = started("--seeds", "0")
    assert code == 0
    assert [arguments[0] for arguments in commands] == ["eval", "eval", "train", "train"]
    assert {gpu for gpu, _ in started.begun} == {0, 1}
    train = commands[2]
    assert train[1] == "train/small-gdn"
    assert f"{started.text}:0.6,builtin:0.06" in train[train.index("--data") + 1]
    assert started("--seeds", "0") == (0, [])
    # Lines that another machine made count too, but those of another text do not.
    known = tmp_path / "known.jsonl"
    started.output.rename(known)
    assert started("--seeds", "0", "--known", str(known)) == (0, [])
    assert not started.output.exists()
    started.text.write_text(started.text.read_text() * 2)
    shutil.rmtree(tmp_path / "work")
    assert len(started("--seeds", "0", "--known", str(known))[1]) == 4
    assert study.write([known, started.output]).count("| | seeds | held-out") == 2


def test_one_that_fails_or_is_cut_short_leaves_no_line(started, monkeypatch):
    pretend = study.Study._lapcli

    def failing(self, gpu, *arguments):
        if "train/small-qdelta" in arguments:
            raise RuntimeError("no room")
        return pretend(self, gpu, *arguments)

    monkeypatch.setattr(study.Study, "_lapcli", failing)
    assert started("--seeds", "0")[0] == 1
    assert [each["variant"] for each in study.read_lines(started.output)] == ["gdn"]
    monkeypatch.setattr(study.Study, "_lapcli", lambda *_: None)
    assert started("--seeds", "0")[0] == 1
    assert len(study.read_lines(started.output)) == 1


def test_the_end_of_time_reaches_what_runs_and_nothing_begins_after(tmp_path, monkeypatch):
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "print(flush=True)\n"
        "time.sleep(60)"
    )
    sleeper = [sys.executable, "-c", program]
    real = study.subprocess.Popen
    ready = threading.Event()

    def popen(_command, **options):
        process = real(sleeper, **{**options, "stdout": study.subprocess.PIPE})
        process.stdout.readline()
        ready.set()
        return process

    monkeypatch.setattr(study.subprocess, "Popen", popen)
    options = study.argparse.Namespace(work=tmp_path, text=Path(__file__), gpus=0)
    under_way = study.Study(options)
    threading.Thread(target=lambda: (ready.wait(20), under_way.end())).start()
    assert under_way._lapcli(0, "train") is None
    ready.clear()
    assert under_way._lapcli(0, "train") is None
    assert not ready.is_set()


def test_the_corpus_holds_nothing_that_is_measured_and_keeps_its_shares(tmp_path):
    chance = random.Random(0)
    index = HeldOutIndex(document.text for document in heldout_builtin_text())
    paragraphs = (each for document in heldout_builtin_text() for each in paragraphs_of(document.text))
    held = next(each for each in paragraphs if index.clean(each).dropped)
    for name in study._FILES:
        words = [" ".join(chance.choices([*name.split("_"), "the", "of", "mill"], k=40)) + "." for _ in range(300)]
        (tmp_path / name.removesuffix(".xz")).write_text(
            "".join(json.dumps({"text": f"{each}\n\n{held}\n\n{each}"}) + "\n" for each in words)
        )
    names = {name.removesuffix(".xz"): share for name, share in study._FILES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "_FILES", names)
        said = study.prepare(tmp_path, tmp_path / "made.jsonl.xz", 40_000)
    texts = [
        json.loads(each)["text"] for each in lzma.decompress((tmp_path / "made.jsonl.xz").read_bytes()).splitlines()
    ]
    assert 35_000 < sum(map(len, texts)) < 41_000
    assert " 0 held-out paragraphs" not in said
    assert not sum(index.clean(text).dropped for text in texts)


def test_recall_documents_follow_from_the_shard_alone(tmp_path):
    text = tmp_path / "text.jsonl"
    sentences = [f"The mill number {i} stood near the river in the year {1800 + i}." for i in range(400)]
    text.write_text("".join(json.dumps({"text": " ".join(sentences[i::16])}) + "\n" for i in range(32)))
    first, again, other = (study.recall_shard(text, shard, 20_000) for shard in (0, 0, 1))
    assert first == again != other
    documents = [json.loads(each)["text"] for each in first.splitlines()]
    assert 20_000 <= sum(map(len, documents)) < 25_000
    assert len({len(document) // 500 for document in documents}) > 2
