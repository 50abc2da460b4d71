import math
import sys

import pytest

from lapcli.cli.app import main
from lapcli.errors import UsageError
from lapcli.evaluation.checks import check_checks, failures, parse_check
from lapcli.evaluation.estimates import mean
from lapcli.evaluation.results import Evaluation, ModelScores, Score
from lapcli.evaluation.tasks import TASKS, parse_tasks


def evaluation(*values, metric="word_perplexity", lengths=(None,), settings=None):
    """One model a value, the first labelled base."""
    models = []
    for place, value in enumerate(values):
        scores = tuple(
            Score("wikitext", metric, False, mean([value, value]), settings or {}, length=length) for length in lengths
        )
        models.append(
            ModelScores(
                ["base", "sliced", "recovered", "control"][place], "m", None, None, "float32", "auto", 1, scores
            )
        )
    return Evaluation(tuple(models), {})


def test_a_check_is_read():
    check = parse_check(" text:/a.b/c.txt.token_perplexity >=1.1x ")
    assert (check.task, check.metric, check.sign) == ("text:/a.b/c.txt", "token_perplexity", ">=")
    assert (check.value, check.relative) == (1.1, True)
    assert parse_check("zeroshot.mean < .45").relative is False


@pytest.mark.parametrize(
    "text", ["", "wikitext > 1", "wikitext.ppl = 3", "a.b > x", "a.b > nan", "a.b > 1.1y", "a.b >", ".b > 1"]
)
def test_what_is_no_check_is_refused(text):
    with pytest.raises(UsageError, match="is no check"):
        parse_check(text)


@pytest.mark.parametrize(
    ("sign", "value", "fails"),
    [
        pytest.param(">", 9.9, True, id="above"),
        pytest.param(">", 10.0, False, id="not above itself"),
        pytest.param(">=", 10.0, True, id="at"),
        pytest.param("<", 10.0, False, id="not below itself"),
        pytest.param("<=", 10.0, True, id="at from below"),
        pytest.param("<", 10.1, True, id="below"),
    ],
)
def test_plain_numbers_are_absolute(sign, value, fails):
    assert bool(failures(evaluation(1.0, 10.0), [parse_check(f"wikitext.word_perplexity {sign} {value}")])) is fails


def test_factors_are_of_the_base_and_the_last_model_is_checked():
    check = [parse_check("wikitext.word_perplexity > 1.1x")]
    assert failures(evaluation(10.0, 20.0, 10.9), check) == []
    (sentence,) = failures(evaluation(10.0, 10.0, 11.1), check)
    assert "recovered's is 11.10" in sentence
    assert "base's is 10.00" in sentence


def test_ppl_is_the_first_perplexity_of_a_task():
    check = [parse_check("wikitext.ppl > 1.1x")]
    for metric in ("word_perplexity", "perplexity"):
        (sentence,) = failures(evaluation(10.0, 12.0, metric=metric), check)
        assert sentence.startswith("wikitext.ppl > 1.1x: sliced's is 12")
    with pytest.raises(UsageError, match="has no metric 'ppl'"):
        failures(evaluation(10.0, 12.0, metric="acc"), check)
    names = {"wikitext": True, "builtin": True, "lambada": True, "niah": False}
    for name, has_one in names.items():
        asked = ([parse_check(f"{name}.ppl > 1")], parse_tasks([name]))
        if has_one:
            check_checks(*asked, models=1, metrics_of=lambda info: info.metrics)
        else:
            with pytest.raises(UsageError, match="has no metric 'ppl'"):
                check_checks(*asked, models=1, metrics_of=lambda info: info.metrics)


@pytest.mark.parametrize("sign", [">", "<"])
def test_what_is_no_number_fails(sign):
    assert failures(evaluation(1.0, math.nan), [parse_check(f"wikitext.word_perplexity {sign} 5")])
    assert failures(evaluation(math.nan, 1.0), [parse_check(f"wikitext.word_perplexity {sign} 5x")])


def test_each_length_is_checked():
    found = failures(evaluation(1.0, 2.0, lengths=(512, 1024)), [parse_check("wikitext.word_perplexity > 1.5")])
    assert ["at 512" in found[0], "at 1024" in found[1]] == [True, True]


def test_scores_that_may_not_be_compared_fail_a_factor():
    base, other = evaluation(1.0), evaluation(1.0, 1.0, settings={"limit": 9})
    mixed = Evaluation((base.models[0], other.models[1]), {})
    assert "unlike settings" in failures(mixed, [parse_check("wikitext.word_perplexity > 2x")])[0]
    assert failures(mixed, [parse_check("wikitext.word_perplexity > 2")]) == []


def test_the_control_is_not_what_is_checked():
    check = parse_check("wikitext.word_perplexity > 1.1x")
    assert "recovered's is 12" in failures(evaluation(10, 10, 12, 10), [check])[0]
    assert failures(evaluation(10, 10, 10, 12), [check]) == []
    alone = evaluation(10, 10, 10, 12)
    assert "control's is 12" in failures(Evaluation((alone.models[0], alone.models[3]), {}), [check])[0]


def test_a_model_that_is_not_checked_spoils_no_check():
    unlike = evaluation(10, 10, settings={"bos": "never"}).models[1]
    found = evaluation(10, 10, 10)
    found = Evaluation((found.models[0], unlike, found.models[2]), {})
    assert failures(found, [parse_check("wikitext.word_perplexity > 1.1x")]) == []


@pytest.mark.parametrize(
    ("text", "models", "message"),
    [
        pytest.param("wikitxt.word_perplexity > 1", 2, "did you mean wikitext", id="task"),
        pytest.param("lambada.acc < 1", 2, "none of the tasks asked for", id="task not asked for"),
        pytest.param("wikitext.word_perplexty > 1", 2, "did you mean word_perplexity", id="metric"),
        pytest.param("wikitext.zzz > 1", 2, "metrics: word_perplexity, byte_perplexity", id="no metric near"),
        pytest.param("wikitext.word_perplexity > 1.1x", 1, "--baseline", id="no base"),
    ],
)
def test_checks_are_checked(text, models, message):
    with pytest.raises(UsageError) as caught:
        check_checks(
            [parse_check(text)], parse_tasks(["wikitext"]), models=models, metrics_of=lambda info: info.metrics
        )
    assert message in str(caught.value)


def test_members_of_a_group_can_be_checked():
    checks = [parse_check("zeroshot.mean < 1"), parse_check("arc_easy.acc < 1")]
    check_checks(checks, [TASKS["zeroshot"]], models=1, metrics_of=lambda info: info.metrics)


def test_a_failed_check_exits_with_3_when_all_is_written(tiny_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("A text of a few words.")
    monkeypatch.chdir(tmp_path)

    def run(*checks):
        arguments = [part for check in checks for part in ("--fail-if", check)]
        monkeypatch.setattr(
            sys, "argv", ["lapcli", "eval", "text:a.txt", "--model", str(tiny_folder), "--device", "cpu", *arguments]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    name = "text:a.txt.token_perplexity"
    code, _, err = run(f"{name} > 1", f"{name} < 1")
    assert code == 3
    assert (tmp_path / "lapcli-run" / "evaluation.json").is_file()
    assert "token_perplexity" in err.split(f"{name} > 1: model's is")[0]  # the table comes first
    assert f"{name} < 1" not in err
    code, _, err = run(f"{name} > 1", "--json")
    assert code == 2  # an option is no check
    code, _, err = run(f"{name} < 1")
    assert code == 0
    assert "nothing to do" in err
    monkeypatch.setattr("lapcli.evaluation.run._prepare", lambda *_: pytest.fail("measured again"))
    assert run(f"{name} >= 1")[0] == 3


def test_a_metric_that_turns_out_missing_is_an_error():
    check = parse_check("wikitext.word_perplexty > 1")
    check_checks([check], [TASKS["wikitext"]], models=1, metrics_of=lambda info: None)
    with pytest.raises(UsageError, match="word_perplexty"):
        failures(evaluation(1.0), [check])


def test_a_group_without_a_mean_fails_its_check():
    """RULER's tasks at lengths that have no room for one of them: there is no mean, and no metric was misspelt."""
    found = failures(evaluation(1.0), [parse_check("ruler.mean < 0.5")])
    assert found == ["ruler.mean < 0.5: there is no score to check"]


@pytest.mark.parametrize("text", ["builtin.ppl > -1x", "builtin.ppl < -0.5x"])
def test_a_negative_factor_is_refused(text):
    with pytest.raises(UsageError, match="no factor of a base's value"):
        parse_check(text)
    assert parse_check(text.removesuffix("x")).value < 0, "a plain number may be negative"


def test_a_length_that_was_asked_for_and_not_measured_fails():
    check = [parse_check("wikitext.word_perplexity > 9")]
    found = evaluation(1.0, 2.0, lengths=(256, 512))
    assert failures(found, check, {"wikitext": (256, 512), "builtin": (64,)}) == []
    assert failures(found, check, {"wikitext": (64, 256, 64, 512)}) == [
        f"{check[0].text}: there is no score to check at 64"
    ]
