"""The commands that a report prints: each asks for just what is there already."""

import json
import platform
import shlex

import pytest

from lapcli import __version__ as lapcli_version
from lapcli.evaluation.estimates import accuracy, average, mean
from lapcli.evaluation.request import request_digest
from lapcli.evaluation.results import Evaluation, ModelScores, Score
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.evaluation.tasks import TASKS
from lapcli.reports.measured import commands, measured
from lapcli.testing.models import tiny_gated_deltanet

PAGES = "".join(f" = Page {number} = \n \n Words of page {number} , more than that . \n \n" for number in range(4))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("model") / "tiny")


def printed(lapcli, folder):
    """The `eval` commands of a report's Markdown, and all of it."""
    code, _out, err = lapcli("report", folder, "--output", "out")
    assert code == 0, err
    with open("out/report.md") as file:
        words = file.read()
    return [line.strip() for line in words.splitlines() if line.startswith("    lapcli eval ")], words


def test_what_is_printed_is_what_was_measured(lapcli, tiny, text, tmp_path):
    data = tmp_path / "copies" / "wikitext-2"
    data.mkdir(parents=True)
    (data / "wiki.test.raw").write_text(PAGES)
    chosen = ["--model", tiny, "--run", "alone", "--device", "cpu"]
    asked = [
        [f"text:{text}", "--limit", "2", "--max-length", "64", "--stride", "32", "--bos", "never", "--seed", "5"],
        ["niah_noise", "--niah-lengths", "400,448", "--limit", "2", "--seed", "5", "--bos", "never"],
        ["wikitext", "--limit", "3", "--max-length", "96", "--task-data", "copies"],
    ]
    for each in asked:
        code, _out, err = lapcli("eval", *each, *chosen)
        assert code == 0, err
    lines, words = printed(lapcli, "alone")
    # Needles read neither length nor stride, so they go with the text; the copies of the data have no name here.
    common = f"--model {tiny} --run alone"
    assert lines == [
        f"lapcli eval text:{text} niah_noise --limit 2 --bos never --seed 5 --max-length 64 --stride 32 "
        f"--niah-lengths 400,448 {common}",
        f"lapcli eval wikitext --limit 3 --max-length 96 --task-data DIR {common}",
    ]
    assert "DIR stands for the folder with local copies" in words
    assert f"| text:{text} | file {text} |".replace("_", "\\_") in words
    assert "| 2 windows | 2 | 64 | 32 | – | never | 5 |" in words
    assert "| 2 prompts a length | 2 | – | – | 400, 448 | never | 5 |" in words
    assert "| wikitext | a local copy; its folder is not noted |" in words
    assert "| 3 documents | 3 | 96 | – | – | auto | – |" in words
    for line in lines:
        typed = shlex.split(line.replace("--task-data DIR", "--task-data copies"))[1:]
        code, out, err = lapcli(*typed, "--device", "cpu", "--dry-run", "--json")
        assert code == 0, err
        # The oracle: the digest of the request knows of every setting.
        assert json.loads(out)["measures"] == {"model": None}


VERSIONS = {"lapcli": lapcli_version, "device": "cpu", "python": platform.python_version()}


def score(name, settings, folder=None, length=None, lengths=(), max_length=512, **more):
    """A score with the request that such an evaluation has."""
    digest = request_digest(
        TASKS[name], settings, EvaluationOptions(task_data=folder), max_length, VERSIONS, "tokenizer"
    )
    estimate = accuracy([True, False]) if length else mean([1.0, 3.0])
    stored = {"bos": settings.bos, "data": "0" * 64}
    if TASKS[name].kind == "harness":
        stored |= {"limit": settings.limit, "max_length": max_length, "seed": None}
    else:
        stored |= {"samples": settings.limit or 25, "seed": settings.seed}
    return Score(name, "exact_match", True, estimate, stored, length=length, request=digest, **more)


def evaluation(*scores, kernel="auto"):
    return Evaluation((ModelScores("base", "m", None, "d", "float32", kernel, 9, scores, "tokenizer"),), VERSIONS)


def test_data_of_the_hub_and_of_a_folder_that_is_known(tmp_path):
    (tmp_path / "wiki.test.raw").write_text(PAGES)
    settings = EvaluationSettings(seed=7)
    found = evaluation(score("wikitext", settings, folder=tmp_path), score("niah_noise", settings, length=512))
    found = evaluation(*found.models[0].scores, score("lambada", settings))
    by_name = {each.task: each.origin for each in measured(found, [tmp_path / "none", tmp_path])}
    assert by_name["wikitext"] == f"local folder {tmp_path}"
    assert by_name["lambada"] == "the hub, or its cache"
    assert commands(found, [tmp_path])[0][:1] == ["eval"]
    assert [line for line in commands(found, [tmp_path]) if "lambada" in line and "--task-data" in line] == []
    (line,) = (line for line in commands(found, [tmp_path]) if "wikitext" in line)
    assert line[line.index("--task-data") + 1] == str(tmp_path)


def test_of_another_version_the_folder_is_not_guessed():
    found = evaluation(score("wikitext", EvaluationSettings()))
    other = Evaluation(found.models, {**VERSIONS, "lapcli": "0.0.0"})
    (each,) = measured(other)
    assert (each.origin, each.folder) == ("not noted", None)


def test_a_haystack_of_the_users(tmp_path, monkeypatch):
    monkeypatch.setattr("lapcli.reports.measured.own_text_digest", lambda task: "1" * 64)
    (tmp_path / "hay.txt").write_text("Some text.")
    settings = EvaluationSettings(niah_haystack=tmp_path / "hay.txt")
    (each,) = measured(evaluation(score("niah", settings, length=512)))
    assert each.haystack
    (line,) = commands(evaluation(score("niah", settings, length=512)))
    assert line[line.index("--niah-haystack") + 1] == "FILE"
    # lapcli's own text is no part of the digest.
    (each,) = measured(evaluation(score("niah", EvaluationSettings(niah_lengths=(512,)), length=512)))
    assert (each.haystack, each.said_items) == (False, "2 prompts a length")
    # Of a request whose other lengths are gone, the text tells.
    monkeypatch.setattr("lapcli.reports.measured.own_text_digest", lambda task: "0" * 64)
    (each,) = measured(evaluation(score("niah", EvaluationSettings(), length=512)))
    assert not each.haystack


def test_25_prompts_are_the_default_and_go_with_either_limit():
    for limit in (None, 25):
        found = evaluation(
            score("wikitext", EvaluationSettings(limit=limit)),
            score("niah_noise", EvaluationSettings(), length=512),
        )
        (line,) = commands(found)
        assert line == ["eval", "wikitext", "niah_noise", *([] if limit is None else ["--limit", "25"]),
                        "--max-length", "512", "--niah-lengths", "512"]  # fmt: skip


def test_a_group_stands_for_its_members_and_for_their_lengths():
    settings = EvaluationSettings(limit=4, ruler_lengths=(256, 1024))
    parts = [
        score(name, settings, length=length)
        for name in TASKS["ruler"].members
        for length in (256, 1024)
        if (name, length) != ("niah_multikey_3", 256)  # no room there
    ]
    at = [part for part in parts if part.length == 1024]
    whole = Score(
        "ruler", "mean", True, average([part.estimate for part in at]), {"limit": None}, length=1024,
        of=tuple(part.request for part in at),
    )  # fmt: skip
    assert commands(evaluation(*parts, whole, kernel="chunked")) == [
        ["eval", "ruler", "--limit", "4", "--ruler-lengths", "256,1024", "--kernel", "chunked"]
    ]
    # A member that was left out takes the group's name away.
    names = commands(evaluation(*(part for part in parts if part.task != "ruler_vt"), whole))[0]
    assert "ruler" not in names
    assert "ruler_fwe" in names
