import json
import math
from dataclasses import replace

import pytest

from lapcli.errors import UsageError
from lapcli.evaluation.estimates import accuracy, average, gap, mean
from lapcli.evaluation.groups import group_scores
from lapcli.evaluation.results import Evaluation, ModelScores, Score, compare
from lapcli.evaluation.run import evaluate
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.evaluation.tasks import TASKS, expand, parse_tasks
from lapcli.families.loading import resolve_model


def test_average_golden():
    # Of 1, 0, 1, 1: 0.75 with a variance of 0.25 / 4 = 1/16; of 0, 1: 0.5 with 0.5 / 2 = 1/4.
    found = average([mean([1, 0, 1, 1]), mean([0, 1])])
    assert found.value == pytest.approx(0.625)
    assert found.stderr == pytest.approx(math.sqrt(1 / 16 + 1 / 4) / 2)
    assert found.n == 6
    # By questions: 4/6 and 2/6.
    weighted = average([mean([1, 0, 1, 1]), mean([0, 1])], [4, 2])
    assert weighted.value == pytest.approx(4 / 6)
    assert weighted.stderr == pytest.approx(math.sqrt((4 / 6) ** 2 / 16 + (2 / 6) ** 2 / 4))


def test_averages_are_compared_item_by_item():
    base = [mean([1, 0, 1, 1]), mean([0, 1])]
    other = [mean([1, 1, 1, 1]), mean([0, 1])]
    found = gap(average(base), average(other))
    assert found.paired
    assert found.value == pytest.approx(0.125)
    # Only the first task changed: by 0, 1, 0, 0, whose mean has a variance of 0.25 / 4; halved by the second task.
    assert found.stderr == pytest.approx(math.sqrt(1 / 16) / 2)
    assert gap(average(base), average(base)).stderr == 0


def test_an_average_without_all_errors_has_none():
    found = average([mean([1, 0]), mean([1])])
    assert (found.value, found.stderr, found.influences) == (0.75, None, ())
    assert average([accuracy([True, False])]).value == 0.5


def score(task, metric, values, **settings):
    return Score(task, metric, True, mean(values), {"data": task, **settings}, request=f"request of {task}")


def of_zeroshot(shift=0.0):
    parts = TASKS["zeroshot"].means["mean"]
    return [score(task, metric, [shift, 1.0, float(place)]) for place, (task, metric) in enumerate(parts)]


def test_a_group_is_the_mean_of_the_metrics_that_it_names():
    others = [score("arc_easy", "acc", [9, 9]), score("boolq", "acc", [9, 9])]
    (found,) = group_scores([TASKS["zeroshot"], TASKS["arc_easy"]], [*others, *of_zeroshot()])
    assert (found.task, found.metric, found.higher_is_better) == ("zeroshot", "mean", True)
    assert found.estimate.value == pytest.approx(sum((1 + place) / 3 for place in range(6)) / 6)
    assert found.settings["parts"].startswith("arc_easy acc_norm, arc_challenge acc_norm, hellaswag acc_norm")
    assert len(found.of) == 6


def test_a_group_without_all_its_members_has_no_mean():
    assert group_scores([TASKS["zeroshot"]], of_zeroshot()[1:]) == ()


def test_means_of_unlike_members_are_not_compared():
    (base,) = group_scores([TASKS["zeroshot"]], of_zeroshot())
    (same,) = group_scores([TASKS["zeroshot"]], of_zeroshot(0.5))
    assert compare(base, same).gap.value == pytest.approx(0.5 / 3)
    changed = [*of_zeroshot()[:5], score("lambada", "acc", [0.0, 1.0, 5.0], max_length=7)]
    (other,) = group_scores([TASKS["zeroshot"]], changed)
    with pytest.raises(UsageError, match="settings"):
        compare(base, other)


def test_groups_are_measured_as_their_members_once():
    names = [info.name for info in expand(parse_tasks(["lambada", "zeroshot8", "zeroshot", "builtin"]))]
    assert names[:2] == ["lambada", "arc_easy"]
    assert len(names) == len(set(names)) == 9
    assert TASKS["summarize"].members == ("cnn_dailymail", "xsum")
    assert len(TASKS["longbench"].members) == 7


def test_a_mean_goes_with_the_scores_that_it_was_of():
    def of(*scores):
        return Evaluation((ModelScores("base", "b", None, "d", "float32", "auto", 1, scores, "t"),), {})

    parts = of_zeroshot()
    older = of(*parts, *group_scores([TASKS["zeroshot"]], parts))
    anew = Score("arc_easy", "acc_norm", True, mean([1, 1]), {"limit": 2}, request="another")
    merged, whole = of(anew).merged_with(older)
    assert whole
    assert [score.task for score in merged.models[0].scores] == [part.task for part in parts]
    kept, _ = of(score("niah", "exact_match", [1, 0])).merged_with(older)
    assert "zeroshot" in [score.task for score in kept.models[0].scores]
    again = Evaluation.from_json(json.loads(json.dumps(kept.to_json()))).models[0].scores
    assert {name.task: name.of for name in again}["zeroshot"] == tuple(part.request for part in parts)


def test_a_group_takes_members_that_are_there(tiny_folder, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("A text of some words.")
    text = f"text:{tmp_path}/a.txt"
    pair = replace(TASKS["zeroshot"], name="pair", means={"mean": (("lambada", "acc"), (text, "word_perplexity"))})
    monkeypatch.setitem(TASKS, "pair", pair)
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "a b"}\n{"text": "c d"}\n')
    options = EvaluationOptions(task_data=tmp_path)
    models = [("base", resolve_model(str(tiny_folder)))]
    settings = EvaluationSettings(max_length=64, limit=2)
    alone = evaluate(models, ["lambada"], settings, options=options)
    kept = []
    found = evaluate(models, ["pair"], settings, options=options, earlier=alone, keep=kept.append)
    assert len(kept) == 1  # the text alone was measured
    scores = {(one.task, one.metric): one for one in found.models[0].scores}
    wanted = [scores["lambada", "acc"].estimate, scores[text, "word_perplexity"].estimate]
    assert scores["lambada", "acc"] == next(one for one in alone.models[0].scores if one.metric == "acc")
    assert scores["pair", "mean"].estimate.value == pytest.approx(sum(one.value for one in wanted) / 2)
    everything = evaluate(
        models, ["pair"], settings, options=options, earlier=found, keep=lambda _: pytest.fail("work")
    )
    assert everything == found
    # Other data: what was measured on it is not taken.
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "a b"}\n{"text": "c e"}\n')
    evaluate(models, ["pair"], settings, options=options, earlier=found, keep=kept.append)
    assert len(kept) == 2
