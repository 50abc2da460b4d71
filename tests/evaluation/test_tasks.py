import subprocess
import sys

import pytest

from lapcli.errors import DataError, UsageError
from lapcli.evaluation.names import check_spelling
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.evaluation.tasks import TASKS, parse_tasks, unknown_task, unknown_tasks


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


def test_all_unknown_names_are_named_each_with_its_nearest():
    error = unknown_tasks(["lamdba", "arc_esay", "zzzzzz"], ["arc_easy", "arc_challenge"])
    assert "'lamdba', 'arc_esay', 'zzzzzz'" in error.message
    assert "'lamdba': did you mean lambada? 'arc_esay': did you mean arc_easy? tasks: builtin," in str(error)


@pytest.fixture
def definitions(tmp_path, monkeypatch):
    """A package in the shape of lm-eval's definitions: one name spelled, one group whose members are put together."""
    folder = tmp_path / "lm_eval" / "tasks" / "arc"
    folder.mkdir(parents=True)
    (tmp_path / "lm_eval" / "__init__.py").write_text("raise AssertionError('it was imported')")
    (folder / "arc_easy.yaml").write_text("tag:\n  - ai2_arc\ntask: arc_easy\n")
    (folder / "_default.yaml").write_text("group: many\ntask:\n  - task: 'many_all'\nsubjects: [law, trade]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)


@pytest.mark.usefixtures("definitions")
def test_names_that_nobody_can_know_are_refused_without_lm_eval():
    check_spelling(parse_tasks(["niah", "arc_easy", "many", "many_all", "many_law"]))
    with pytest.raises(UsageError, match="'nihh', 'arc_esay'") as caught:
        check_spelling(parse_tasks(["nihh", "builtin", "arc_esay", "arc_easy"]))
    assert "'nihh': did you mean niah? 'arc_esay': did you mean arc_easy?" in str(caught.value)
    # What may be put together of parts that are there is for lm-eval to say, of all names.
    check_spelling(parse_tasks(["nihh", "many_trade"]))


def test_an_unknown_name_is_refused_before_anything_heavy_is_imported():
    code = """
import sys
from lapcli.cli.app import main
sys.argv = ["lapcli", "eval", "nihh", "bultin", "--model", "demo:gdn"]
try:
    main()
except SystemExit as ended:
    assert ended.code == 2, ended.code
assert not {"torch", "transformers", "lm_eval"} & set(sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "'nihh', 'bultin'" in ended.stderr
