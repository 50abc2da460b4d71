"""`lapcli sweep` and `lapcli report` at the terminal: what they would do, refuse and say."""

import json
import re

import pytest

from lapcli.testing.models import tiny_gated_deltanet


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def job(tiny, text):
    return ["sweep", "--model", tiny, "--data", text, "--samples", "8", "--seq-len", "64", "--tasks", f"text:{text}",
            "--device", "cpu"]  # fmt: skip


def test_a_dry_run_by_options(lapcli, job, tmp_path):
    axes = ["--method", "drrqr,grad", "--ratio", "0.25,0.5", "--seed", "0,1", "--score-from", "both,key"]
    code, out, err = lapcli(*job, *axes, "--recover", "--dry-run", "--json")
    assert code == 0, err
    # The default recovery of a model that is no demo.
    assert json.loads(out)["recovery_tokens"] == 16 * 32000 * 2048
    code, out, err = lapcli(*job, *axes, "--dry-run", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["cells"] == len(document["cells_to_do"]) == document["slices"] == 16
    assert [plan["saliency"] for plan in document["calibrations"].values()] == [True, True]
    assert document["calibration_tokens"] == 2 * 8 * 64
    assert document["recovery_tokens"] == 0
    assert not document["base_evaluated"]
    code, out, err = lapcli(*job, *axes, "--dry-run")
    assert (code, out) == (0, "")
    assert "16, 0 there already, 16 slices" in err
    assert not list(tmp_path.iterdir())


def test_a_recipe_with_options_over_it(lapcli, tiny, text, tmp_path):
    path = tmp_path / "sweep.yaml"
    recovery = {"data": str(text), "seq_len": 32, "steps": 3, "batch": 2, "validation": 1}
    settings = {
        "model": str(tiny),
        "calibration": {"data": str(text), "samples": 8, "seq_len": 64},
        "selection": {"ratio": 0.5},
        "recovery": recovery,
        "sweep": {
            "method": ["l1", "rand"],
            "seed": [0, 1],
            "seed_of": ["selection"],
            "recoveries": {"a": {}, "b": {"lr": 1e-3}},
        },
    }
    path.write_text(json.dumps(settings))
    code, out, err = lapcli("sweep", path, "--dry-run", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["tasks"] == []
    assert (document["cells"], document["slices"]) == (6, 3)
    assert document["recovery_tokens"] == 6 * 3 * 2 * 32
    code, out, err = lapcli("sweep", path, "--no-recover", "--method", "l1", "--keep", "8,16", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["cells_to_do"] == [f"l1-k{keep}-{'-'.join(name_of(document))}" for keep in (8, 16)]
    code, out, err = lapcli("run", path)
    assert code == 1
    assert "is a sweep" in err
    path.write_text(json.dumps({**settings, "sweep": {"methods": ["l1"]}}))
    code, out, err = lapcli("sweep", path)
    assert (code, out) == (1, "")
    assert "there is no setting 'sweep.methods'" in err
    assert "'method'" in err


def name_of(document):
    """Text, amount and seed of a cell's name."""
    return document["cells_to_do"][0].split("-")[2:5]


def test_a_dry_run_says_what_comes_from_the_hub(lapcli, job, tmp_path):
    (tmp_path / "wiki.test.raw").write_text(" = A = \n \n Words .\n")
    (tmp_path / "none").mkdir()
    job[job.index("--tasks") + 1] += ",wikitext"
    code, out, err = lapcli(*job, "--dry-run")
    assert (code, out) == (0, "")
    assert re.search(r"data from the hub +wikitext", err)
    code, out, err = lapcli(*job, "--task-data", tmp_path, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["data_from_the_hub"] == []
    code, out, err = lapcli(*job, "--task-data", "none", "--dry-run")
    assert (code, out) == (1, "")
    assert "none holds no copy of its data" in err


def test_a_slip_in_the_name_of_a_recipe(lapcli):
    for command in ("sweep", "run"):
        code, out, err = lapcli(command, "demo/slectors", "--dry-run")
        assert (code, out) == (1, "")
        assert "did you mean demo/selectors?" in err


@pytest.mark.parametrize(
    ("arguments", "code", "wanted"),
    [
        (["--method", "drqr"], 2, "drrqr"),
        (["--ratio", "50"], 2, "0.5"),
        (["--ratio", "0.5", "--keep", "8"], 2, "ratio"),
        (["--seed", "0,x"], 2, "--seed '0,x' is no list of whole numbers seeds, for example 0,1,2"),
        (["--score-from", "both,values"], 2, "--score-from"),
        (["--samples", "0"], 2, "samples"),
        (["--jobs", "0"], 2, "--jobs 0: give at least 1"),
        (["--limit", "0"], 2, "--limit"),
        (["--seed", "0,4294967296"], 2, "--seed: "),
        (["--device", "auto", "--gpus", "9"], 2, "--gpus is 9"),
        (["--data", "no-such-text"], 1, "no-such-text"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_before_any_work(lapcli, job, tmp_path, arguments, code, wanted):
    found, out, err = lapcli(*job, *arguments)
    assert (found, out) == (code, ""), err
    assert wanted in err.replace("\n", " ")
    assert not list(tmp_path.iterdir())


def test_a_sweep_lies_neither_in_a_file_nor_in_a_run(lapcli, job, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    for place, said in (("file", "file is no folder"), ("run", "run holds a run")):
        code, out, err = lapcli(*job, "--run", place, "--dry-run")
        assert (code, out) == (1, "")
        assert said in err


def test_a_sweep_that_another_process_works_on(lapcli, job, tmp_path):
    import fcntl

    folder = tmp_path / "busy"
    folder.mkdir()
    with (folder / ".lock").open("a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        code, _out, err = lapcli(*job, "--run", "busy")
    assert code == 1
    assert "is at work in busy" in err


def test_a_report(lapcli, tiny, text, tmp_path):
    size = ["--data", text, "--samples", "8", "--seq-len", "64", "--device", "cpu"]
    assert lapcli("prune", tiny, *size, "--ratio", "0.5")[0] == 0
    code, out, err = lapcli("report", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["writes"] == ["lapcli-run/report.html", "lapcli-run/report.md"]
    assert not (tmp_path / "lapcli-run" / "report.html").exists()
    code, out, err = lapcli("report", "lapcli-run", "--output", "out", "--json")
    assert code == 0, err
    assert json.loads(out) == {
        "html": "out/report.html", "markdown": "out/report.md", "chains": 1, "whole": 1, "problems": [],
    }  # fmt: skip
    words = (tmp_path / "out" / "report.md").read_text()
    # Two heads of 32 x 32, two layers.
    assert "| 16 of 32 | 4,096 → 2,048 (50.0% fewer) | not measured | not measured |" in words
    assert f"    lapcli calibrate {tiny} --data {text} --samples 8 --seq-len 64 --seed 0 --run lapcli-run" in words
    assert "    lapcli select --method drrqr --ratio 0.5 --run lapcli-run" in words
    code, out, err = lapcli("report", "nothing")
    assert (code, out) == (1, "")
    assert "neither a run nor a sweep in nothing" in err
