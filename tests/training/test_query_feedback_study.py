"""The study of query feedback: what is there is not run again, what is cut short goes on, tables say what they compare.

The module under test is a script, so it is found beside the repository's packages.
"""

import argparse
import json
import lzma
import random
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

import pytest

import lapcli
from lapcli.data.builtin import heldout_builtin_text
from lapcli.data.overlap import HeldOutIndex, paragraphs_of
from lapcli.shipped import shipped_recipes
from lapcli.testing.models import tiny_gated_deltanet, tiny_qdelta

sys.path.append(str(Path(lapcli.__file__).resolve().parents[1] / "scripts"))

import query_feedback_study as study
from query_feedback import corpora, recovering, throughput, variants
from studies import commands

PAGE = f"# Page\n\nbefore\n\n{study.BEGIN}\nold\n{study.END}\n\nafter\n"


def rows_of(ppl, recall, lengths=(512, 2048)):
    rows = [{"task": "builtin", "metric": "token_perplexity", "length": None, "values": {"model": {"value": ppl}}}]
    rows.append({"task": "builtin", "metric": "bits_per_byte", "length": None, "values": {"model": {"value": 1.0}}})
    rows += [
        {"task": task, "metric": "string_match", "length": length, "values": {"model": {"value": recall}}}
        for task in study.NEEDLES
        for length in lengths
    ]
    return rows


def line(variant, seed, *, tokens=1000, limit=10, text="a" * 64, date="2026-11-30", ppl=30.0, recall=0.5):
    return {
        "variant": variant, "seed": seed, "tokens": tokens, "text": text, "limit": limit, "date": date, "machine": "M",
        "mixture": "half", "batch": 4096, "optimizer": "adamw", "lr": 0.003, "dtype": "float32",
        "commands": ["lapcli train X", "lapcli eval Y"], "training": {"after": {"cross_entropy": 3.0}},
        "rows": rows_of(ppl, recall),
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

    monkeypatch.setattr(study.Study, "lapcli", pretend)
    monkeypatch.setattr(corpora, "recall_shard", lambda *_: "")
    monkeypatch.setattr(corpora, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)

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
    assert f"{started.text}:0.49,builtin:0.06" in train[train.index("--data") + 1]
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


def test_other_numbers_of_prompts_are_measured_and_stand_in_a_table_of_their_own(started):
    assert started("--seeds", "0", "--variants", "gdn", "--limit", "2")[0] == 0
    shutil.rmtree(started.output.parent / "work" / "gdn-0" / "training")
    code, begun = started("--seeds", "0", "--variants", "gdn", "--limit", "3")
    assert (code, begun[0][begun[0].index("--limit") + 1]) == (0, "3")
    assert study.write([started.output]).count("prompts a length") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run --text nowhere.jsonl --work w --output o", "nowhere.jsonl: No such file"),
        ("prepare nowhere made.jsonl", "gutenberg_train.jsonl.xz cannot be opened"),
    ],
    ids=["no text", "no raw texts"],
)
def test_what_is_missing_is_named_in_a_line(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=said):
        study.main(arguments.split())


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("recover", ["--methods", "l2"], "'l2' is none of"),
        ("run", ["--seeds", "x"], "argument --seeds: 'x' is no whole number; values with commas are wanted"),
        ("run", ["--lr", "fast"], "argument --lr: 'fast' is no number"),
        ("run", ["--batch-tokens", "many"], "argument --batch-tokens: 'many' is no whole number"),
        ("pilot", ["--rates", "0.1,"], "argument --rates: '' is no number"),
        ("run", ["--workers", "0"], "argument --workers: '0' is less than 1"),
        ("run", ["--optimizer", "adamw,muon"], "one name is wanted"),
        ("ship", ["lines", "--variant", "gdn"], "invalid choice: 'gdn'"),
    ],
    ids=["selector", "seed", "rate", "batch", "rates", "workers", "two optimisers", "no Q-Delta"],
)
def test_what_cannot_be_is_refused_before_anything_runs(command, arguments, said, capsys):
    with pytest.raises(SystemExit):
        study.main(
            [command, *arguments, "--work", "w", "--output", "o", *(["--text", "t"] if command != "ship" else [])]
        )
    assert said in capsys.readouterr().err


def test_recall_that_was_cut_short_while_it_was_written_is_made_again(started, tmp_path, monkeypatch):
    ask = ("--seeds", "0", "--variants", "gdn")
    recall = tmp_path / "work" / "recall-drills-0.25.jsonl"
    monkeypatch.setattr(corpora, "recall_shard", lambda *_: "whole\n")
    assert started(*ask)[0] == 0
    whole = recall.read_text()

    def killed(self, text, **_):
        with self.open("w") as file:
            file.write("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            started(*ask, "--tokens", "2000")
    assert recall.read_text() == "half"
    started.output.unlink()
    shutil.rmtree(tmp_path / "work" / "gdn-0")
    assert started(*ask)[0] == 0
    assert recall.read_text() == whole


def test_one_that_fails_or_is_cut_short_leaves_no_line(started, monkeypatch):
    pretend = study.Study.lapcli

    def failing(self, gpu, *arguments):
        if "train/small-qdelta" in arguments:
            raise RuntimeError("no room")
        return pretend(self, gpu, *arguments)

    monkeypatch.setattr(study.Study, "lapcli", failing)
    assert started("--seeds", "0")[0] == 1
    assert [each["variant"] for each in study.read_lines(started.output)] == ["gdn"]
    monkeypatch.setattr(study.Study, "lapcli", lambda *_: None)
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
    real = commands.subprocess.Popen
    ready = threading.Event()

    def popen(_command, **options):
        process = real(sleeper, **{**options, "stdout": commands.subprocess.PIPE})
        process.stdout.readline()
        ready.set()
        return process

    monkeypatch.setattr(commands.subprocess, "Popen", popen)
    options = argparse.Namespace(work=tmp_path, text=Path(__file__), gpus=0)
    under_way = study.Study(options)
    threading.Thread(target=lambda: (ready.wait(20), under_way.end())).start()
    assert under_way.lapcli(0, "train") is None
    ready.clear()
    assert under_way.lapcli(0, "train") is None
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
    for kind in corpora.RECALL:
        first, again, other = (study.recall_shard(text, kind, 16 * 20_000, shard) for shard in (0, 0, 1))
        assert first == again != other
        documents = [json.loads(each)["text"] for each in first.splitlines()]
        assert 20_000 <= sum(map(len, documents)) < 25_000
        assert len({len(document) // 250 for document in documents}) > 2


def test_mixtures_are_whole_and_their_lines_are_apart(started, tmp_path):
    assert all(sum(shares.values()) == pytest.approx(1) for shares in corpora.MIXTURES.values())
    assert set.union(*map(set, corpora.MIXTURES.values())) == {"text", "builtin", *corpora.RECALL}
    for name, batch in (("half", "2048"), ("denser", "1024"), ("half", "2048")):
        more = ("--work", str(tmp_path / name), "--mixture", name, "--batch-tokens", batch)
        code, arguments = started("--seeds", "0", "--variants", "gdn", *more)
        assert code == 0
        assert all("recall-prompts-0.2.jsonl:0.2" in each[each.index("--data") + 1] for each in arguments[1:])
    assert not arguments
    assert [(each["mixture"], each["batch"]) for each in study.read_lines(started.output)] == [
        ("half", 2048),
        ("denser", 1024),
    ]
    assert study.write([started.output]).count("tokens a run of the mixture") == 2


def test_a_pilot_shows_what_is_recalled_by_mixture(tmp_path):
    path = tmp_path / "runs.jsonl"
    for mixture, batch, recall in (("half", 16, 0.125), ("denser", 16, 0.25), ("half", 32, 0.375)):
        study.add_line(path, {**line("gdn", 0, recall=recall), "kind": "pilot", "mixture": mixture, "batch": batch})
    rows = [row for row in study.write([path]).splitlines() if row.startswith("| `")]
    assert [row.split("|")[4].strip() for row in rows] == ["32", "16", "16"]
    assert ["0.375" in rows[0], "0.125" in rows[1], "0.250" in rows[2]] == [True] * 3


def prompts(variant, length, rate, **more):
    seconds = 2 * length / rate
    return {
        "kind": "throughput", "variant": variant, "length": length, "batch": 2, "dtype": "bfloat16", "machine": "M",
        "date": "2026-11-30", "command": "lapcli bench prefill", "seconds": seconds, "tokens_per_second": rate,
        "trials": [seconds, 1.1 * seconds], "detail": "kernel: fla", **more,
    }  # fmt: skip


def test_throughput_stands_beside_the_base(runs):
    before = study.write([runs])
    for variant, rate in (("gdn", 50_000.0), ("qdelta", 40_000.0)):
        study.add_line(runs, prompts(variant, 2048, rate))
    study.add_line(runs, prompts("gdn", 4096, 60_000.0))
    table = study.write([runs])
    assert table.startswith(before)
    assert cells(table, study.VARIANTS["gdn"])[1] == ["50", "60"]
    assert cells(table, study.VARIANTS["qdelta"])[2] == ["40 (0.80)", "not measured"]
    assert "within 10.0% of it" in table
    # A second measurement on the same machine takes the place of the first, one on another machine stands beside it.
    study.add_line(runs, prompts("gdn", 2048, 80_000.0))
    study.add_line(runs, prompts("gdn", 2048, 10_000.0, machine="N"))
    shown = [row for row in cells(study.write([runs]), study.VARIANTS["gdn"]) if len(row) < 3]
    assert shown == [["80", "60"], ["10"]]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """`throughput` with a stand-in for `lapcli bench`, which finds no time for prompts of 200."""
    begun = []

    def pretend(self, gpu, *arguments):
        begun.append(arguments)
        option = {
            name: arguments[arguments.index(name) + 1] for name in ("--config", "--tokens", "--batch", "--output")
        }
        rows = [
            {"model": Path(config).stem, "tokens": int(length), "batch": int(option["--batch"]), "detail": "",
             "status": "no time" if length == "200" else "measured", "seconds": 1.0, "trials": [1.0], "repeats": 1,
             "error_share": 0.1, "peak_bytes": None, "tokens_per_second": float(length)}
            for length in option["--tokens"].split(",") for config in option["--config"].split(",")
        ]  # fmt: skip
        Path(option["--output"]).write_text(json.dumps({"rows": rows}))
        return 1.0

    monkeypatch.setattr(throughput.Throughput, "lapcli", pretend)
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)

    def run(*more):
        begun.clear()
        with pytest.raises(SystemExit) as ended:
            study.main(["throughput", "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out.jsonl"),
                        "--variants", "gdn,qdelta", *more])  # fmt: skip
        return ended.value.code, list(begun)

    run.output = tmp_path / "out.jsonl"
    return run


def test_prompts_that_are_measured_are_not_measured_again(bench, tmp_path):
    assert bench("--prompts", "100")[0] == 0
    code, begun = bench("--prompts", "100,200")
    # Those of 200 came to nothing, which is said by the code; the next call tries them, and nothing else.
    assert code == 1
    assert [arguments[arguments.index("--tokens") + 1] for arguments in begun] == ["200"]
    assert [(each["variant"], each["length"]) for each in study.read_lines(bench.output)] == [
        ("gdn", 100), ("qdelta", 100)
    ]  # fmt: skip
    assert bench("--prompts", "100") == (0, [])
    # In each dtype it is another measurement.
    assert len(bench("--prompts", "100", "--dtype", "float32")[1]) == 1
    config = json.loads((tmp_path / "work" / "throughput" / "qdelta.json").read_text())
    assert (config["model_type"], config["vocab_size"], config["hidden_size"]) == ("qdelta", 4096, 256)
    assert config["max_position_embeddings"] >= 100


def recovered(arm, seed, recall, *, method="l1", digest="d", ppl=30.0, tokens=5000, lengths=(512, 2048)):
    trained = arm in variants.TRAINED
    return {
        "kind": "recovery", "base": "demo:gdn", "digest": digest, "method": method, "ratio": "0.5" if method else "0",
        "arm": arm, "seed": seed, "tokens": tokens if trained else 0, "text": "a" * 64 if trained else "", "limit": 10,
        "machine": "M", "date": "2026-11-30", "commands": [f"lapcli recover {arm}"],
        "rows": rows_of(ppl, recall, lengths),
    }  # fmt: skip


def test_recall_that_returns_is_counted_from_what_pruning_took(tmp_path):
    path = tmp_path / "runs.jsonl"
    study.add_line(path, recovered("base", 0, 0.9, method=""))
    study.add_line(path, recovered("sliced", 0, 0.1))
    for seed in range(3):
        study.add_line(path, recovered("control", seed, 0.95, method=""))
        study.add_line(path, recovered("plain", seed, 0.5 + 0.1 * seed, ppl=25.0))
        study.add_line(path, recovered("feedback", seed, 0.58 + 0.12 * seed, ppl=24.0))
    table = study.write([path])
    nothing, cut = cells(table, "nothing"), cells(table, "l1")
    assert [row[:2] for row in nothing] == [["unpruned, as it is", "–"], ["unpruned, trained alike", "3"]]
    assert nothing[0][2:4] == ["30.00", "0.900"]
    assert [row[0] for row in cut[:3]] == [
        "pruned, not recovered",
        variants.TRAINED["plain"],
        variants.TRAINED["feedback"],
    ]
    gaps = [0.08, 0.1, 0.12]
    assert cut[3][:3] == ["3", "-1.00 ± 0.00", f"+{mean(gaps):.3f} ± {stdev(gaps) / 3**0.5:.3f}"]
    # (0.6 - 0.1) / (0.9 - 0.1) = 0.625 without, (0.7 - 0.1) / 0.8 = 0.75 with feedback.
    assert cut[4] == [variants.TRAINED["plain"], "3", f"{0.625:.2f} ± {stdev([0.5, 0.625, 0.75]):.2f}"]
    assert cut[5][2].startswith(f"{0.75:.2f} ± ")
    assert "5,000 tokens of recovery" in table
    # Another budget is another table, which has the same untrained models.
    study.add_line(path, recovered("plain", 0, 0.3, tokens=6000))
    assert [row[0] for row in cells(study.write([path]), "l1")].count("pruned, not recovered") == 2


def test_a_model_that_pruning_took_nothing_from_has_no_share(tmp_path):
    path = tmp_path / "runs.jsonl"
    for arm, method in (("base", ""), ("sliced", "l1"), ("plain", "l1")):
        study.add_line(path, recovered(arm, 0, 0.0, method=method))
    assert "Of the recall" not in study.write([path])


@pytest.fixture
def recoveries(tmp_path, monkeypatch):
    """`recover` with a stand-in for lapcli, and the commands that it started, without the calibration."""
    begun, failing = [], []
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "The mill stood near the river."}) + "\n")

    def pretend(self, gpu, *arguments):
        if any(set(words) <= set(arguments) for words in failing):
            raise RuntimeError("no room")
        run = Path(arguments[arguments.index("--run") + 1])
        run.mkdir(parents=True, exist_ok=True)
        if arguments[0] == "calibrate":
            (run / "calibration.safetensors").touch()
            return 1.0
        begun.append(arguments)
        if arguments[0] == "recover":
            folder = run / ("recovery-control" if "--control" in arguments else "recovery")
            folder.mkdir(exist_ok=True)
            (folder / "recovery.json").write_text(json.dumps({"record": {"step": 3, "tokens": 5}}))
        if arguments[0] == "eval":
            (run / "evaluation.json").write_text(json.dumps({"rows": rows_of(1.0, 0.5), "versions": {}}))
        return 1.0

    monkeypatch.setattr(recovering.Recoveries, "lapcli", pretend)
    monkeypatch.setattr(corpora, "recall_shard", lambda *_: "")
    monkeypatch.setattr(corpora, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)

    def run(*more):
        begun.clear()
        with pytest.raises(SystemExit) as ended:
            study.main(["recover", "--work", str(tmp_path / "work"), "--text", str(text), "--output",
                        str(tmp_path / "out.jsonl"), "--tokens", "100000", "--methods", "l1", *more])  # fmt: skip
        return ended.value.code, list(begun)

    run.output, run.failing = tmp_path / "out.jsonl", failing
    return run


def test_one_budget_for_all_arms_and_what_is_there_is_not_done_again(recoveries):
    code, begun = recoveries("--seeds", "0,1")
    assert code == 0
    trained = [arguments for arguments in begun if arguments[0] == "recover"]
    assert len(trained) == 6
    # 100 000 tokens in steps of 64 rows of 1024 are two; feedback differs from none in its flag and its place.
    shared = {tuple(arguments[: arguments.index("--seed")]) for arguments in trained}
    assert len(shared) == 1
    assert " --steps 2 " in " ".join(*shared)
    assert sum("--add-query-feedback" in arguments for arguments in trained) == 2
    assert all(("--control" in arguments) == ("--teacher" in arguments) for arguments in trained)
    # The base and the slice are measured once, for l1 draws nothing.
    lines = study.read_lines(recoveries.output)
    assert sorted((each["arm"], each["seed"]) for each in lines) == [
        ("base", 0), ("control", 0), ("control", 1), ("feedback", 0), ("feedback", 1), ("plain", 0), ("plain", 1),
        ("sliced", 0),
    ]  # fmt: skip
    assert recoveries("--seeds", "0,1") == (0, [])
    # Another budget trains anew and measures no untrained model again.
    code, begun = recoveries("--seeds", "0", "--tokens", "200000")
    assert code == 0
    assert [arguments[0] for arguments in begun].count("eval") == 3
    # So does another rate.
    code, begun = recoveries("--seeds", "0", "--lr", "0.001")
    assert [arguments[0] for arguments in begun].count("eval") == 3
    assert study.write([recoveries.output]).count("tokens of recovery") == 3
    # What rand draws it draws by the seed, so each seed has a slice of its own.
    _code, begun = recoveries("--seeds", "0,1", "--methods", "rand", "--arms", "plain")
    drawn = [arguments[arguments.index("--seed") + 1] for arguments in begun if arguments[0] == "select"]
    assert sorted(drawn) == ["0", "0", "1", "1"]


def test_a_failed_recovery_leaves_no_line_and_the_others_their_own(recoveries):
    recoveries.failing.append(("recover", "--add-query-feedback"))
    assert recoveries("--seeds", "0")[0] == 1
    assert sorted(each["arm"] for each in study.read_lines(recoveries.output)) == ["base", "control", "plain", "sliced"]
    recoveries.failing.clear()
    code, begun = recoveries("--seeds", "0")
    assert code == 0
    assert [arguments[0] for arguments in begun] == ["select", "slice", "recover", "eval"]


def test_models_that_were_trained_are_pruned_where_they_are_there(recoveries, tmp_path, capsys):
    for seed in (0, 1):
        tiny_gated_deltanet(tmp_path / "work" / f"gdn-{seed}" / "trained", seed=seed)
    tiny_qdelta(tmp_path / "work" / "qdelta-0" / "trained")
    code, begun = recoveries("--seeds", "0,1", "--bases", "gdn,qdelta")
    # qdelta-1 is not there, which is said, and counts as not done.
    assert code == 1
    assert "qdelta, seed 1" in capsys.readouterr().err
    lines = study.read_lines(recoveries.output)
    assert len({each["digest"] for each in lines if each["base"] == "gdn"}) == 2
    assert sorted(each["arm"] for each in lines if each["base"] == "gdn") == sorted(
        ["base", "sliced", "control", "plain", "feedback"] * 2
    )
    # A Q-Delta has its feedback already.
    assert sorted(each["arm"] for each in lines if each["base"] == "qdelta") == ["base", "control", "plain", "sliced"]
    assert all(str(tmp_path / "work") in " ".join(arguments) for arguments in begun)


def test_what_ships_holds_no_place_of_the_machine_and_is_refused_where_it_is_too_large(tmp_path, monkeypatch):
    work, output, runs = tmp_path / "work", tmp_path / "demo" / "qdelta", tmp_path / "runs.jsonl"
    trained = tiny_qdelta(work / "qdelta-0" / "trained", num_hidden_layers=1)
    (trained / "lapcli.json").write_text(json.dumps({"data": str(tmp_path)}))
    (trained / "README.md").write_text(f"of {tmp_path}")
    (trained.parent / "training").mkdir()
    (trained.parent / "training" / "training.json").write_text(json.dumps({"record": {"digest": "d" * 64}}))
    ask = ["ship", str(runs), "--work", str(work), "--output", str(output)]
    runs.write_text("")
    with pytest.raises(SystemExit, match="has no line"):
        study.main(ask)
    made = line("qdelta", 0)
    made["commands"] = [f"lapcli train --data {tmp_path}"]
    made["versions"], made["seconds"] = {"torch": "2"}, {"train": 9.0}
    made["training"] |= {"digest": "d" * 64, "tokens": 1234567, "step": 9, "contraction": {"mean": 0.5, "outside": 0.0}}
    study.add_line(runs, made)
    monkeypatch.setattr("query_feedback.shipping.LIMIT", 1000)
    with pytest.raises(SystemExit, match="1,000 are allowed"):
        study.main(ask)
    assert not output.parent.exists() or not list(output.parent.iterdir())
    monkeypatch.undo()
    study.main(ask)
    texts = {file.name: file.read_text() for file in output.iterdir() if file.suffix in (".md", ".json")}
    assert not [name for name, text in texts.items() if str(tmp_path) in text]
    assert "lapcli.json" not in texts
    card = texts["README.md"]
    assert card.startswith("---\nlicense: cc-by-sa-4.0")
    assert all(word in card for word in ("# demo:qdelta", "Gutenberg", "CC BY-SA 4.0", "held-out", "1,234,567 tokens"))
    assert "| niah_single_1, 512 tokens: string match | 0.5 |" in card
    with pytest.raises(SystemExit, match="is there"):
        study.main(ask)
