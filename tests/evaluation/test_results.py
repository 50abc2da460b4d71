import dataclasses
import json
import math

import pytest

from lapcli.errors import ArtifactError, UsageError
from lapcli.evaluation.estimates import accuracy, perplexity
from lapcli.evaluation.results import Evaluation, ModelScores, Score, compare


def word_perplexity(values, **settings):
    return Score(
        task="wikitext",
        metric="word_perplexity",
        higher_is_better=False,
        estimate=perplexity(values, [4] * len(values)),
        settings={"max_length": 1024, "bos": "auto", "data": "d1", **settings},
        counts={"documents": len(values)},
    )


def recall(hits, length):
    return Score("niah", "exact_match", True, accuracy(hits), {"seed": 0}, length=length)


def model(label, *scores):
    return ModelScores(
        label=label,
        name=f"demo:{label}",
        revision=None,
        digest="0" * 64,
        dtype="float32",
        kernel="auto",
        parameters=6,
        scores=scores,
    )


def two_models():
    base = model("base", word_perplexity([-8.0, -9.0, -10.0]), recall([True, True], 512), recall([True, False], 1024))
    other = model("sliced", word_perplexity([-9.0, -9.5, -12.0]), recall([True, False], 512))
    return Evaluation(models=(base, other), versions={"lapcli": "1", "python": "3.11"})


def test_differences_have_direction_and_error():
    rows = two_models().rows()
    assert [(row.task, row.metric, row.length) for row in rows] == [
        ("wikitext", "word_perplexity", None),
        ("niah", "exact_match", 512),
        ("niah", "exact_match", 1024),
    ]
    (worse,) = rows[0].differences
    assert worse is not None
    assert worse.gap.value == pytest.approx(math.exp(30.5 / 12) - math.exp(27 / 12))
    assert worse.gap.paired
    assert worse.better is False
    assert worse.ratio == pytest.approx(math.exp(3.5 / 12))
    (lost,) = rows[1].differences
    assert lost is not None
    assert lost.gap.value == -0.5
    assert lost.better is False
    assert rows[2].differences == (None,)
    assert rows[2].scores[1] is None


def test_equal_scores_are_neither_better_nor_worse():
    assert compare(word_perplexity([-8.0, -9.0]), word_perplexity([-8.0, -9.0])).better is None


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_length": 2048}, id="window length"),
        pytest.param({"bos": "never"}, id="bos"),
        pytest.param({"data": "d2"}, id="data"),
        pytest.param({"stride": 512}, id="a setting the other lacks"),
    ],
)
def test_unlike_settings_are_refused_and_named(settings):
    with pytest.raises(UsageError, match=next(iter(settings))):
        compare(word_perplexity([-8.0, -9.0]), word_perplexity([-8.0, -9.0], **settings))


def test_different_measures_are_refused():
    with pytest.raises(UsageError, match="different measures"):
        compare(recall([True], 512), recall([True], 1024))


def test_an_evaluation_keeps_both_and_says_why_there_is_no_difference():
    evaluation = Evaluation(
        models=(
            model("base", word_perplexity([-8.0, -9.0])),
            model("other", word_perplexity([-8.0, -9.5], max_length=2048)),
        ),
        versions={},
    )
    (row,) = evaluation.rows()
    assert all(score is not None for score in row.scores)
    assert row.differences == (None,)
    assert row.refusals == (
        "base and other: wikitext word_perplexity was measured with unlike settings: max_length 1024 and 2048",
    )
    assert evaluation.to_json()["rows"][0]["refused"] == list(row.refusals)


def test_json_gives_back_the_same_evaluation():
    evaluation = two_models()
    text = json.dumps(evaluation.to_json(), allow_nan=False)
    again = Evaluation.from_json(json.loads(text))
    assert again == evaluation
    assert json.dumps(again.to_json()) == text


def test_json_holds_infinite_perplexities():
    bad = dataclasses.replace(word_perplexity([-8.0]), estimate=perplexity([-9000.0], [4]))
    evaluation = Evaluation(models=(model("base", bad), model("other", bad)), versions={})
    text = json.dumps(evaluation.to_json(), allow_nan=False)
    (score,) = Evaluation.from_json(json.loads(text)).models[0].scores
    assert score.estimate.value == math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"kind": "selection"}, "no evaluation", id="another kind"),
        pytest.param({"schema": 99}, "schema 99", id="newer schema"),
        pytest.param({"models": [{"label": "base"}]}, "damaged", id="damaged"),
    ],
)
def test_foreign_documents_are_refused(change, message):
    document = {**two_models().to_json(), **change}
    with pytest.raises(ArtifactError, match=message):
        Evaluation.from_json(document)
