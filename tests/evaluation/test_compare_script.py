"""`scripts/compare_with_lm_eval.py`: finds agreement where there is some, and a difference where one is put in."""

import importlib.util
import json
from pathlib import Path

import pytest

import lapcli
from lapcli.evaluation import scoring


@pytest.fixture(scope="module")
def script():
    path = Path(lapcli.__file__).resolve().parents[1] / "scripts" / "compare_with_lm_eval.py"
    spec = importlib.util.spec_from_file_location("compare_with_lm_eval", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data(tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    pages = [f" = Page {number} = \n \n Some words , {number} of them . \n" for number in range(4)]
    (tmp_path / "wikitext-2" / "wiki.test.raw").write_text(" \n" + "\n".join(pages))
    lines = "".join(json.dumps({"text": f"the cat sat on {number} mats"}) + "\n" for number in range(9))
    (tmp_path / "lambada_test.jsonl").write_text(lines)
    questions = [
        {"question": f"Which {word}?", "answers": [{"text": word}], "is_impossible": False} for word in ("a", "e", "o")
    ]
    article = {"title": "T", "paragraphs": [{"context": "A few words.", "qas": questions}]}
    (tmp_path / "dev-v2.0.json").write_text(json.dumps({"data": [article]}))
    return tmp_path


def test_lapcli_and_lm_eval_agree(script, tiny_folder, data, capsys):
    names = ["wikitext", "lambada", "squad"]
    sizes = ["--items", "5", "--max-length", "64", "--batch-size", "3"]
    assert script.main([str(tiny_folder), *names, "--task-data", str(data), *sizes]) == 0
    cells = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    # Pages of 42 characters are a window each, of which five are asked for; there are four pages and three questions.
    assert [row[:3] for row in cells] == [["`wikitext`", "4", "4"], ["`lambada`", "5", "5"], ["`squad`", "3", "3"]]
    assert all(float(row[3]) < script.TOLERANCE and row[4] == "0" for row in cells)


def test_a_difference_is_found(script, tiny_folder, data, monkeypatch, capsys):
    from lapcli.evaluation import harness_model

    def shifted(*args, **kwargs):
        found = scoring.score(*args, **kwargs)
        return [found[0]._replace(log_probability=found[0].log_probability * 1.001), *found[1:]]

    monkeypatch.setattr(harness_model, "score", shifted)
    code = script.main([str(tiny_folder), "lambada", "--task-data", str(data), "--items", "5", "--max-length", "64"])
    assert code == 1
    assert "they differ on lambada" in capsys.readouterr().err


def test_items_of_a_group_are_dealt_out(script):
    assert script._shares(["zeroshot", "lambada"], 500) == {
        "arc_easy": 84, "arc_challenge": 84, "hellaswag": 84, "piqa": 84, "winogrande": 84, "lambada": 500,
    }  # fmt: skip
    with pytest.raises(SystemExit, match="none of lapcli's names"):
        script._shares(["lamdba"], 5)
