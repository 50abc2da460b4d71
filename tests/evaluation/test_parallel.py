"""Evaluation by several processes gives what one gives, writes it once, says it once, and ends as one."""

import json
import signal
import time

import pytest

from lapcli.evaluation.run import evaluate
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.families.loading import resolve_model
from lapcli.testing.processes import Forked, launch_together, run_forked, run_together


@pytest.mark.slow
def test_two_processes_measure_what_one_measures(tiny_folder, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(f"Line {number} says {number * number}." for number in range(40)))
    passages = ["the cat sat on a b", "a b", "one line\nand one more a b"]  # an odd number, of unlike lengths
    (tmp_path / "lambada_test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    questions = [
        {"question": f"Which {word}?", "answers": [{"text": word}], "is_impossible": False} for word in ("a", "e", "o")
    ]
    article = {"title": "T", "paragraphs": [{"context": "Caf\N{LATIN SMALL LETTER E WITH ACUTE}.", "qas": questions}]}
    (tmp_path / "dev-v2.0.json").write_text(json.dumps({"data": [article]}))
    tasks = [f"text:{tmp_path}/a.txt", "lambada", "squad"]
    command = [
        "eval", *tasks, "--model", str(tiny_folder), "--task-data", str(tmp_path), "--max-length", "128",
        "--device", "cpu", "--run", str(tmp_path / "run"),
    ]  # fmt: skip

    # All of it fails the check, once.
    done = launch_together(2, *command, "--fail-if", "lambada.acc <= 1")
    assert done.returncode == 3, done.stderr
    for said in ("evaluated: ", "kernel: ", "error: lambada.acc <= 1: model's is"):
        assert done.stderr.count(said) == 1, done.stderr
    assert done.stdout == ""
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())["models"][0]["scores"]
    wanted = evaluate(
        [("model", resolve_model(str(tiny_folder)))],
        tasks,
        EvaluationSettings(max_length=128),
        options=EvaluationOptions(task_data=tmp_path),
    )
    scores = wanted.models[0].scores
    assert [score["metric"] for score in found] == [score.metric for score in scores]
    for mine, score in zip(found, scores, strict=True):
        # The same rows in other batches, in fp32.
        assert mine["estimate"]["value"] == pytest.approx(score.estimate.value, rel=1e-5)
        assert mine["settings"] == dict(score.settings)
        assert mine["request"] == score.request
    # What there is counts for any number of processes.
    written = (tmp_path / "run" / "evaluation.json").stat().st_mtime_ns
    for number in ([], ["--gpus", "2"]):
        again = run_forked(*command, *number, "--json")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["models"][0]["scores"] == found
    assert (tmp_path / "run" / "evaluation.json").stat().st_mtime_ns == written


FAILS = """
import os
from lapcli.cli.app import main
from lapcli.errors import ModelError
from lapcli.evaluation import scoring

if os.environ["RANK"] == "1":
    def run(self, batch):
        raise ModelError("no room on this device")
    scoring._Runner.run = run
main()
"""


def test_an_error_of_one_process_is_said_once_and_ends_all(tiny_folder, tmp_path):
    command = ["eval", "niah_noise", "--niah-lengths", "384", "--model", tiny_folder, "--device", "cpu"]
    done = run_together(2, *command, "--run", tmp_path / "run", program=FAILS)
    assert done.returncode not in (0, None)
    assert done.stderr.count("error: no room on this device") == done.stderr.count("error:") == 1
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_interrupted_they_end_together_and_keep_what_is_whole(tiny_folder, tmp_path):
    (tmp_path / "a.txt").write_text("One line.\n")
    file = tmp_path / "run" / "evaluation.json"
    command = [
        "eval", f"text:{tmp_path}/a.txt", "niah", "--limit", "1000", "--model", tiny_folder, "--device", "cpu",
        "--run", tmp_path / "run",
    ]  # fmt: skip
    process = Forked(*command, "--gpus", "2")
    end = time.monotonic() + 100
    while not file.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.count("interrupted; every finished artifact is whole") == 1
    assert "Traceback" not in err
    assert {score["task"] for score in json.loads(file.read_text())["models"][0]["scores"]} == {
        f"text:{tmp_path}/a.txt"
    }
    planned = run_forked(*command, "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["measures"] == {"model": ["niah"]}
