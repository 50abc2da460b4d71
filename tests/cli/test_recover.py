"""`lapcli recover`: from a run to a healed model, by options and by recipe, alone and by two processes."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.processes import Forked, run_forked

pytestmark = pytest.mark.usefixtures("quick_reload")

SMALL = ("--steps", "4", "--batch-size", "2", "--seq-len", "48", "--validation", "2", "--lora-rank", "4")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Many documents, since those that are held out are held out whole."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"Line {i} says {i * i % 89}, and little more. " * 3}) + "\n" for i in range(99))
    )
    return path


@pytest.fixture(scope="module")
def pruned(tmp_path_factory, text):
    """A run with a slice; made once, and copied."""
    folder = tmp_path_factory.mktemp("pruned")
    base = tiny_gated_deltanet(folder / "base")
    done = run_forked("prune", base, "--data", text, "--samples", "4", "--seq-len", "64", "--run", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(pruned, tmp_path):
    return Path(shutil.copytree(pruned, tmp_path / "lapcli-run"))


def until(process, there, seconds=150):
    end = time.monotonic() + seconds
    while not there():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.02)


def steps_in(run):
    curve = run / "recovery" / "curve.jsonl"
    return sum('"tokens"' in line for line in curve.read_text().splitlines()) if curve.is_file() else 0


def test_from_a_run_to_a_healed_model_and_its_scores(lapcli, run, text):
    code, out, err = lapcli("recover", "--data", text, *SMALL, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["worked"]
    assert document["step"] == 4
    assert Path(document["recovered"]).is_dir()
    code, out, err = lapcli("recover", "--data", text, *SMALL)
    assert code == 0
    assert "nothing to do" in err
    code, _out, err = lapcli("recover", "--data", text, *SMALL, "--control", "--json")
    assert code == 0, err
    code, out, err = lapcli("eval", f"text:{text}", "--limit", "2", "--max-length", "32", "--json")
    assert code == 0, err
    assert [model["label"] for model in json.loads(out)["models"]] == ["base", "sliced", "recovered", "control"]
    commands = [entry["command"] for entry in json.loads((run / "run.json").read_text())["commands"]]
    assert commands == ["prune", "recover", "recover"]


def test_a_dry_run_counts_and_does_nothing(lapcli, run, text):
    before = sorted(path for path in run.rglob("*"))
    code, out, err = lapcli("recover", "--data", text, *SMALL, "--dry-run", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["tokens"] == 4 * 2 * 48
    assert document["resumes_after"] is None
    assert document["settings"]["lr_min"] == pytest.approx(document["settings"]["lr"] / 10)
    assert sorted(path for path in run.rglob("*")) == before
    code, out, err = lapcli("recover", "--data", text, *SMALL, "--dry-run")
    assert out == ""
    assert "384 tokens" in err


def test_a_dry_run_refuses_what_the_work_would(lapcli, run, text, tmp_path):
    whole = ("recover", "--data", text, *SMALL)
    texts = {"empty.jsonl": "", "short.txt": "Too little. " * 3, "broken.jsonl": "{\n"}
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
        said = []
        for more in ((), ("--dry-run",)):
            code, _out, err = lapcli("recover", "--data", tmp_path / name, *SMALL, *more)
            assert code == 1
            said.append(err)
        assert said[0] == said[1]
        assert name in said[0]
    assert not (run / "recovery").exists()
    process = Forked(*whole, "--save-every", "1", "--run", run)
    until(process, lambda: steps_in(run) > 1)
    process.kill()
    process.communicate()
    code, out, err = lapcli(*whole, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["resumes_after"] >= 1
    for options, what in ((("--lr", "0.1"), "lr: 0.1 wanted"), (("--seq-len", "40"), "seq_len was 48 and is 40")):
        said = []
        for more in ((), ("--dry-run",)):
            code, _out, err = lapcli(*whole, *options, *more)
            assert code == 1
            said.append(" ".join(err.split()))
        assert said[0] == said[1]
        assert what in said[0]
    code, out, err = lapcli(*whole, "--lr", "0.1", "--restart", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["resumes_after"] is None
    (run / "recovered").mkdir()
    (run / "recovered" / "thesis.tex").write_text("years of work")
    code, _out, err = lapcli(*whole, "--dry-run")
    assert code == 1
    assert "did not write it" in err


def test_samples_that_become_more_are_said(lapcli, run, text):
    for samples, said in ((7, True), (8, False)):
        asked = ("recover", "--data", text, *SMALL[2:], "--samples", str(samples), "--dry-run")
        code, _out, err = lapcli(*asked)
        assert code == 0, err
        assert (f"{samples} samples become 8, since steps are whole: 4 of 2 sequences" in err) == said


def test_a_recipe_of_which_options_go_first(lapcli, run, text, tmp_path):
    recipe = tmp_path / "r.yaml"
    recovery = {"data": str(text), "seq_len": 48, "samples": 8, "batch": 2, "rank": 4, "validation": 2, "lr": 0.002}
    calibration = {"data": str(text), "samples": 4, "seq_len": 64}
    parts = {"model": str(run.parent / "m"), "calibration": calibration, "selection": {"ratio": 0.5}}
    recipe.write_text(json.dumps({**parts, "recovery": recovery}))
    code, out, err = lapcli("recover", "--recipe", recipe, "--batch-size", "4", "--dry-run", "--json")
    assert code == 0, err
    settings = json.loads(out)["settings"]
    assert (settings["lr"], settings["batch"], settings["samples"]) == (0.002, 4, 8)
    code, out, err = lapcli("recover", "--recipe", recipe, "--steps", "3", "--dry-run", "--json")
    assert (json.loads(out)["settings"]["steps"], json.loads(out)["settings"]["samples"]) == (3, None)
    # What it does not say is as `lapcli run` has it, whatever the model.
    del recovery["lr"]
    recipe.write_text(json.dumps({**parts, "recovery": recovery}))
    code, out, err = lapcli("recover", "--recipe", recipe, "--dry-run", "--json")
    settings = json.loads(out)["settings"]
    assert (settings["lr"], settings["lr_min"]) == (1e-4, 1e-5)
    recipe.write_text(json.dumps(parts))
    code, _out, err = lapcli("recover", "--recipe", recipe, "--dry-run")
    assert code == 1
    assert "has no `recovery`" in err


def test_a_whole_recipe(lapcli, pruned, text, tmp_path):
    recipe = tmp_path / "r.yaml"
    document = {
        "model": str(pruned.parent / "base"),
        "calibration": {"data": str(text), "samples": 4, "seq_len": 64},
        "selection": {"method": "l1", "ratio": 0.5},
        "recovery": {"data": str(text), "seq_len": 48, "steps": 2, "batch": 2, "rank": 4, "validation": 2},
        "evaluation": {"tasks": [f"text:{text}"], "limit": 2},
    }
    recipe.write_text(json.dumps(document))
    code, out, err = lapcli("run", recipe, "--dry-run")
    assert (code, out) == (0, ""), err
    said = " ".join(err.split())
    assert f"recovery of the slice, 2 steps of 2 x 48 = 192 tokens of {text}" in said
    assert f"evaluation text:{text}, 2 items of each" in said
    assert "sliced/, recovered/, evaluation.json" in said
    # No name of a field.
    assert not [word for word in said.split() if "_" in word and str(text.parent) not in word and "/" not in word]
    code, out, err = lapcli("run", recipe, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["recovery_tokens"] == 192
    code, out, err = lapcli("run", recipe, "--json")
    assert code == 0, err
    assert json.loads(out)["recovery"]["worked"]
    code, out, err = lapcli("run", recipe, "--json")
    assert code == 0, err
    assert not json.loads(out)["recovery"]["worked"]
    # What recovery would refuse is refused before calibration.
    document["recovery"]["targets"] = ["nothing"]
    recipe.write_text(json.dumps(document))
    code, _out, err = lapcli("run", recipe, "--run", "other")
    assert code == 1
    assert "nothing" in err
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--steps", "4", "--samples", "8"), 2, "either samples or steps"),
        (("--lr", "0"), 2, "--lr"),
        (("--kl-weight", "inf"), 2, "--kl-weight"),
        (("--lora-rank", "0"), 2, "--lora-rank"),
        (("--full", "--lora-rank", "4"), 2, "--lora-rank beside --full"),
        (("--seed", "99999999999999999999999"), 2, "--seed"),
        (("--save-every", "0"), 2, "--save-every"),
        (("--teacher-device", "cuda:7"), 2, "--teacher-device"),
        (("--lr", "1e-4", "--lr-min", "1e-3"), 2, "above lr"),
        (("--sharding", "some"), 2, "--sharding"),
        (("--gpus", "3", "--device", "cpu", "--batch-size", "4"), 2, "cannot be shared by 3"),
        (("--gpus", "2"), 2, "CUDA devices"),
        (("--lora-target", "k_conv1d"), 1, "k_conv1d"),
        (("--lora-rank", "999"), 1, "--lora-rank 32 or less"),
        (("--tracker", "carrier-pigeon"), 2, "carrier-pigeon"),
        (("--data", "missing.jsonl"), 1, "missing.jsonl"),
        (("--teacher", "nowhere/at-all"), 1, "nowhere/at-all"),
    ],
)
def test_refused_at_once(lapcli, run, text, options, code, said):
    found, _out, err = lapcli("recover", "--data", text, *options, "--json")
    assert found == code, err
    assert said in " ".join(err.split())
    assert not (run / "recovery").exists()


def test_divergence_is_no_success(lapcli, run, text):
    code, out, err = lapcli("recover", "--data", text, *SMALL, "--lr", "1e30", "--validate-every", "1", "--json")
    assert code == 3
    assert "training stopped early" in err
    assert json.loads(out)["stopped"]


def test_without_a_run(lapcli):
    code, _out, err = lapcli("recover")
    assert code == 1
    assert "lapcli prune" in err
    assert not Path("lapcli-run").exists()


LONG = (*SMALL[2:], "--steps", "40", "--save-every", "5")


@pytest.fixture(scope="module")
def unbroken(pruned, text, tmp_path_factory):
    """What a run that never stopped ends with."""
    folder = shutil.copytree(pruned, tmp_path_factory.mktemp("unbroken") / "run")
    done = run_forked("recover", "--data", text, *LONG, "--run", folder)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "recovered" / "model.safetensors")


# Ctrl-C: the test of two processes below.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_it_goes_on_to_the_same_bits(run, text, unbroken, number):
    long = ("recover", "--data", text, *LONG, "--run", run)
    process = Forked(*long)
    until(process, lambda: steps_in(run) > 6)
    process.send_signal(number)
    _out, err = process.communicate(timeout=150)
    if number != signal.SIGKILL:
        assert process.returncode == 130, err
        assert "goes on from there" in err
    assert not (run / "recovered").exists()
    assert 6 <= steps_in(run) < 40
    again = run_forked(*long)
    assert again.returncode == 0, again.stderr
    assert "goes on after step" in again.stderr
    found = load_file(run / "recovered" / "model.safetensors")
    assert found.keys() == unbroken.keys()
    assert all((found[name] == unbroken[name]).all() for name in unbroken)


def test_a_killed_process_takes_the_other_with_it_and_is_named(run, text, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = Forked("recover", "--data", text, *LONG, "--gpus", "2", "--device", "cpu", "--run", run)
    until(process, lambda: steps_in(run) > 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    _out, err = process.communicate(timeout=150)
    assert process.returncode == 1
    # What the other said of it is kept, not shown.
    first, hint = err[err.index("error:") :].splitlines()
    assert first == "error: process 1 of 2 was killed (signal 9), so the others ended too"
    assert "Traceback" not in err
    assert "gloo" not in err
    (logs,) = tmp_path.glob("lapcli-processes-*")
    assert str(logs) in hint
    assert "gloo" in (logs / "process-0.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word to children is Linux's")
def test_processes_end_with_the_one_that_started_them(run, text):
    process = Forked("recover", "--data", text, *LONG, "--gpus", "2", "--device", "cpu", "--run", run)
    until(process, lambda: steps_in(run) > 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate(timeout=150)
    end = time.monotonic() + 60
    while any(Path(f"/proc/{child}/cmdline").exists() for child in children):
        assert time.monotonic() < end
        time.sleep(0.1)
    # They had time to save.
    assert (run / "recovery" / "checkpoints").is_dir()
    assert steps_in(run) < 40


def test_two_processes_end_together_and_go_on_as_one(run, text, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    long = ("recover", "--data", text, *SMALL[2:], "--steps", "60", "--device", "cpu", "--run", run)
    process = Forked(*long, "--gpus", "2")
    until(process, lambda: steps_in(run) > 3)
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=150)
    assert process.returncode == 130, err
    assert err.count("goes on from there") == 1
    assert not list(tmp_path.glob("lapcli-processes-*"))
    assert 3 < steps_in(run) < 60
    # The text is the same, whoever reads it.
    again = run_forked(*long)
    assert again.returncode == 0, again.stderr
    assert json.loads((run / "recovery" / "recovery.json").read_text())["record"]["step"] == 60
