import subprocess
import sys

import pytest

from lapcli.errors import DataError, UsageError
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.evaluation.tasks import TASKS, parse_tasks, unknown_task


def test_registry_names_agree():
    assert all(name == info.name for name, info in TASKS.items())
    assert all((info.harness_name is not None) == (info.kind == "harness") for info in TASKS.values())


def test_names_are_taken_once_in_order(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    names = ["niah", f"text:{tmp_path}/a.txt", "arc_easy", "niah"]
    parsed = parse_tasks(names)
    assert [info.name for info in parsed] == names[:3]
    assert [info.kind for info in parsed] == ["niah", "perplexity", "harness"]


def test_nothing_to_do_is_refused():
    with pytest.raises(UsageError, match="no task"):
        parse_tasks([])


def test_a_missing_text_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt is no file"):
        parse_tasks([f"text:{tmp_path}/gone.txt"])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        pytest.param("lamdba", "did you mean lambada?", id="ours"),
        pytest.param("arc_esay", "did you mean arc_easy?", id="lm-eval's"),
        pytest.param("zzzzzz", "tasks: builtin, wikitext, lambada, niah, niah_noise", id="nothing near"),
    ],
)
def test_unknown_names_get_the_nearest(name, hint):
    error = unknown_task(name, ["arc_easy", "arc_challenge", "lambada_openai"])
    assert name in error.message
    assert hint in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_length": 1}, id="window of one"),
        pytest.param({"stride": 0}, id="no stride"),
        pytest.param({"stride": 100, "max_length": 50}, id="stride beyond the window"),
        pytest.param({"limit": 0}, id="limit 0"),
        pytest.param({"niah_lengths": ()}, id="no lengths"),
        pytest.param({"niah_lengths": (512, -1)}, id="negative length"),
        pytest.param({"ruler_lengths": ()}, id="no lengths of RULER"),
        pytest.param({"ruler_lengths": (0,)}, id="RULER at 0"),
        pytest.param({"niah_samples": 0}, id="no prompts"),
        pytest.param({"bos": "sometimes"}, id="unknown bos"),
    ],
)
def test_settings_that_cannot_be_met(settings):
    with pytest.raises(UsageError):
        EvaluationSettings(**settings)


def test_options_that_cannot_be_met(tmp_path):
    with pytest.raises(UsageError, match="batch"):
        EvaluationOptions(batch_size=0)
    with pytest.raises(UsageError, match="no folder"):
        EvaluationOptions(task_data=tmp_path / "gone")


def test_the_list_of_tasks_needs_no_torch():
    code = "import sys, lapcli.evaluation.tasks; sys.exit('torch' in sys.modules or 'lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
