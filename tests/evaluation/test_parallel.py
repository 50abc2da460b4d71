"""Evaluation by several processes, as under torchrun, gives what one process gives, and writes it once."""

import json

import pytest

from lapcli.evaluation.run import evaluate
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.families.loading import resolve_model
from lapcli.testing.processes import run_together


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

    done = run_together(2, *command)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("evaluated: ") == 1
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
    again = run_together(2, *command, "--fail-if", "lambada.acc <= 1")
    assert again.returncode != 0
    assert "lambada.acc <= 1: model's is" in again.stderr
