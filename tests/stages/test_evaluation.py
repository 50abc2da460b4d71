"""Evaluation as a stage: what is there is not measured again, and scores of a model that is no more do not stay."""

import json
import shutil
from dataclasses import replace

import pytest

from lapcli.errors import ArtifactError, DataError
from lapcli.evaluation.results import Evaluation
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.families.source import resolve_model
from lapcli.machine import Machine
from lapcli.reporting import SilentReporter
from lapcli.stages.evaluation import evaluate_into, plan_stage
from lapcli.stages.evaluation_file import forget_stale, read_evaluation
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.slices import random_kept, sliced_by

SETTINGS = EvaluationSettings(max_length=64, limit=2, niah_lengths=(400,))
CPU = Machine(device="cpu")
NO_OPTIONS = EvaluationOptions()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    return [tiny_gated_deltanet(made / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture
def measure(folders, tmp_path):
    """Measure two of the models into one file; gives the scores and whether anything ran."""

    def run(*tasks, models=(("base", 0), ("sliced", 1)), settings=SETTINGS, options=NO_OPTIONS, reporter=None, **more):
        chosen = [(label, resolve_model(str(folders[number]))) for label, number in models]
        output = tmp_path / "evaluation.json"
        reporter = reporter or SilentReporter()
        return evaluate_into(output, chosen, tasks, settings, options=options, machine=CPU, reporter=reporter, **more)

    return run


@pytest.fixture
def no_model(monkeypatch):
    """From its call on, loading a model fails the test."""
    return lambda: monkeypatch.setattr(
        "lapcli.families.loading.load_model", lambda *_args, **_more: pytest.fail("a model was loaded")
    )


def test_a_model_that_changed_since_lapcli_wrote_it_is_measured_with_a_warning(folders, tmp_path):
    base = resolve_model(str(folders[0]))
    sliced = sliced_by(base, random_kept(base, 8), tmp_path)
    weights, said = sliced.path / "model.safetensors", []
    whole = weights.read_bytes()
    for content in (whole, whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]])):
        weights.write_bytes(content)
        reporter, models = SilentReporter(), [("base", base), ("sliced", resolve_model(str(sliced.path)))]
        evaluate_into(
            tmp_path / "evaluation.json", models, ["builtin"], SETTINGS,
            options=NO_OPTIONS, machine=CPU, reporter=reporter,
        )  # fmt: skip
        said.append([warning for warning in reporter.warnings if "no longer as lapcli wrote it" in warning])
    assert said[0] == []
    assert str(sliced.path) in said[1][0]


def test_what_is_there_is_not_measured_again(measure, no_model, tmp_path):
    first, worked = measure("builtin", "niah")
    assert worked
    file = (tmp_path / "evaluation.json").read_bytes()
    no_model()
    again, worked = measure("niah", "builtin")
    assert not worked
    assert [model.digest for model in again.models] == [model.digest for model in first.models]
    by_key = [{score.key: score for score in model.scores} for model in first.models]
    assert [{score.key: score for score in model.scores} for model in again.models] == by_key
    assert again.models[0].scores[0].task == "niah", "in the order asked for"
    assert (tmp_path / "evaluation.json").read_bytes() == file


@pytest.mark.parametrize(
    "change",
    [{"limit": 3}, {"max_length": 32}, {"stride": 16}, {"bos": "never"}, {"seed": 1}],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_is_another_request(measure, change):
    measure("builtin", models=[("base", 0)])
    asked = {"max_length": 64, "limit": 2, "niah_lengths": (400,)} | change
    _found, worked = measure("builtin", models=[("base", 0)], settings=EvaluationSettings(**asked))
    assert worked


def test_changed_text_is_measured_again(measure, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("One text of a few words.")
    first, _worked = measure(f"text:{path}", models=[("base", 0)])
    path.write_text("Another text, of a few more words.")
    again, worked = measure(f"text:{path}", models=[("base", 0)])
    assert worked
    assert again.models[0].scores[0].estimate.value != first.models[0].scores[0].estimate.value


def test_other_tasks_and_lengths_stay_beside_new_ones(measure, tmp_path):
    measure("builtin")
    measure("niah")
    found, _worked = measure("niah", settings=EvaluationSettings(max_length=64, limit=2, niah_lengths=(500,)))
    assert {score.length for score in found.models[0].scores} == {500}, "what was asked for"
    stored = Evaluation.from_json(json.loads((tmp_path / "evaluation.json").read_text()))
    assert [(row.task, row.length) for row in stored.rows()] == [
        ("builtin", None), ("builtin", None), ("niah", 400), ("niah", 500),
    ]  # fmt: skip
    assert all(row.differences[0] is not None for row in stored.rows())
    assert not (tmp_path / "evaluation.previous.json").exists()


@pytest.mark.parametrize("content", ["{}", "[1]", "{", '{"kind": "evaluation", "schema": 1}'])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "evaluation.json").write_text(content)
    for path in (tmp_path / "evaluation.json", tmp_path / "evaluation.json" / "deeper.json"):
        with pytest.raises(ArtifactError, match=r"evaluation\.json"):
            read_evaluation(path)


def test_measuring_again_leaves_other_tasks_where_they_are(measure, tmp_path):
    measure("builtin")
    measure("niah")
    _found, worked = measure("niah", overwrite=True)
    assert worked
    stored = read_evaluation(tmp_path / "evaluation.json")
    assert stored is not None
    assert [row.task for row in stored.rows()] == ["builtin", "builtin", "niah"]


def test_an_evaluation_that_was_stopped_goes_on(measure, monkeypatch, tmp_path):
    from lapcli.evaluation import run

    whole = run.measure_niah
    monkeypatch.setattr(run, "measure_niah", lambda *_args, **_more: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        measure("builtin", "niah")
    kept = read_evaluation(tmp_path / "evaluation.json")
    assert kept is not None
    assert [score.task for model in kept.models for score in model.scores] == ["builtin", "builtin"]
    monkeypatch.setattr(run, "measure_niah", whole)
    perplexities = []
    whole_perplexity = run.measure_perplexity

    def counted(task, documents, loaded, *args, **more):
        perplexities.append(loaded.name)
        return whole_perplexity(task, documents, loaded, *args, **more)

    monkeypatch.setattr(run, "measure_perplexity", counted)
    found, _worked = measure("builtin", "niah")
    assert perplexities == ["sliced"]
    assert [len(model.scores) for model in found.models] == [3, 3]


def test_another_model_under_the_same_label_replaces_it_and_a_copy_stays(measure, tmp_path):
    measure("builtin")
    before = (tmp_path / "evaluation.json").read_bytes()
    measure("builtin", models=[("base", 0), ("sliced", 2)])
    stored = read_evaluation(tmp_path / "evaluation.json")
    assert stored is not None
    assert len(stored.models) == 2
    assert (tmp_path / "evaluation.previous.json").read_bytes() == before


def test_scores_of_another_base_are_not_compared_with(measure, tmp_path):
    measure("builtin")
    measure("builtin", models=[("base", 2)])
    stored = read_evaluation(tmp_path / "evaluation.json")
    assert stored is not None
    assert [model.label for model in stored.models] == ["base"]
    assert (tmp_path / "evaluation.previous.json").exists()


def test_a_model_made_anew_loses_its_scores_but_not_its_base(measure, folders, tmp_path):
    output, reporter = tmp_path / "evaluation.json", SilentReporter()
    forget_stale(output, "sliced", "no evaluation yet", reporter)
    measure("builtin")
    forget_stale(output, "sliced", resolve_model(str(folders[1])).digest, reporter)
    assert not reporter.notices, "the same model again"
    forget_stale(output, "sliced", "another digest", reporter)
    assert "evaluation.previous.json" in reporter.notices[0]
    stored = read_evaluation(output)
    assert stored is not None
    assert [model.label for model in stored.models] == ["base"]


def test_a_damaged_evaluation_is_named_and_stands_in_no_ones_way(measure, tmp_path):
    output = tmp_path / "evaluation.json"
    output.write_text('{"kind": "evaluation", ')
    with pytest.raises(ArtifactError, match=r"evaluation\.json is no JSON"):
        measure("builtin", models=[("base", 0)])
    measure("builtin", models=[("base", 0)], overwrite=True)
    assert (tmp_path / "evaluation.previous.json").read_text() == '{"kind": "evaluation", '
    assert read_evaluation(output) is not None
    output.write_text('{"kind": "evaluation", ')
    forget_stale(output, "sliced", "a digest", SilentReporter())
    assert not output.exists()
    assert (tmp_path / "evaluation.previous.json").exists()


def test_a_dry_run_reads_the_data_that_is_here(folders, tmp_path, no_model):
    no_model()
    models = [("base", resolve_model(str(folders[0])))]
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "fine"}\nno json\n')
    more = {"options": EvaluationOptions(), "machine": CPU, "dry_run": True}
    with pytest.raises(DataError, match="line 2"):
        plan_stage(tmp_path / "evaluation.json", models, [f"text:{path}"], SETTINGS, **more)
    with pytest.raises(DataError, match="holds no copy"):
        plan_stage(
            tmp_path / "evaluation.json", models, ["wikitext"], SETTINGS,
            options=EvaluationOptions(task_data=tmp_path), machine=CPU, dry_run=True,
        )  # fmt: skip


def test_a_dry_run_fetches_nothing(folders, tmp_path, no_model, monkeypatch):
    from lapcli.evaluation import harness

    no_model()
    models = [("base", resolve_model(str(folders[0])))]
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "a b"}\n')
    copy = tmp_path / "hazyresearch" / "based-swde-v2"
    copy.mkdir(parents=True)
    (copy / "validation.jsonl").write_text('{"text": "a b", "value": "b"}\n')
    monkeypatch.setattr(harness, "_hub_answers", lambda: pytest.fail("the hub was asked"))
    read = []
    original = harness.load_task
    monkeypatch.setattr(
        "lapcli.evaluation.run.load_task", lambda name, *rest: read.append(name) or original(name, *rest)
    )

    def fetched(*tasks, **options):
        plan = plan_stage(
            tmp_path / "evaluation.json", models, tasks, SETTINGS,
            options=EvaluationOptions(**options), machine=CPU, dry_run=True,
        )  # fmt: skip
        return plan.fetched

    # A task of lapcli's own table, a group of lm-eval's, a task that has only its lm-eval name.
    assert fetched("logiqa", "lambada", "mmlu", "swde", "sciq", task_data=tmp_path) == ("logiqa", "mmlu", "sciq")
    assert read == ["lambada", "swde"]
    assert fetched("logiqa", "lambada", "builtin") == ("logiqa", "lambada")
    assert read == ["lambada", "swde"]


def test_another_tokenizer_is_another_request(folders, tmp_path):
    folder, output = tmp_path / "model", tmp_path / "evaluation.json"
    shutil.copytree(folders[0], folder)

    def measure(*tasks):
        return evaluate_into(
            output, [("base", resolve_model(str(folder)))], tasks, SETTINGS,
            options=NO_OPTIONS, machine=CPU, reporter=SilentReporter(),
        )  # fmt: skip

    first, _worked = measure("builtin", "niah")
    assert not measure("builtin")[1]
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "e"}, "content": "x"}
    file.write_text(json.dumps(tokenizer))
    again, worked = measure("builtin")
    assert worked
    assert again.models[0].digest == first.models[0].digest, "of the weights"
    assert again.models[0].scores[0].estimate.value != first.models[0].scores[0].estimate.value
    stored = read_evaluation(output)
    assert stored is not None
    assert {score.task for score in stored.models[0].scores} == {"builtin"}, "the rest is of the other tokenizer"
    assert (tmp_path / "evaluation.previous.json").exists()


def limited(limit):
    return EvaluationSettings(max_length=64, limit=limit, niah_lengths=(400,))


def of_the_view(reporter):
    return [notice for notice in reporter.notices if "evaluation.json" in notice]


def samples(evaluation):
    return [score.settings["samples"] for model in evaluation.models for score in model.scores if score.task == "niah"]


def test_going_back_to_other_settings_is_no_work_and_is_said(measure, no_model, tmp_path):
    output, reporter = tmp_path / "evaluation.json", SilentReporter()
    first, _ = measure("builtin", "niah", settings=limited(3))
    shown = output.read_bytes()
    measure("niah", settings=limited(2), reporter=reporter)
    (notice,) = of_the_view(reporter)
    assert "no longer niah of other settings" in notice
    assert f"kept in {tmp_path / 'evaluations'}" in notice
    assert samples(read_evaluation(output)) == [2, 2]
    assert not (tmp_path / "evaluation.previous.json").exists()
    no_model()
    assert samples(measure("niah", settings=limited(2))[0]) == [2, 2]
    again, worked = measure("niah", "builtin", settings=limited(3))
    assert not worked
    assert samples(again) == [3, 3]
    assert output.read_bytes() == shown, "the view follows what was asked for"
    assert {score.key: score for score in again.models[1].scores} == {
        score.key: score for score in first.models[1].scores
    }


def test_what_an_older_lapcli_measured_is_kept_too(measure, no_model, tmp_path):
    measure("niah", settings=limited(3))
    shutil.rmtree(tmp_path / "evaluations")
    measure("niah", settings=limited(2))
    no_model()
    assert samples(measure("niah", settings=limited(3))[0]) == [3, 3]


def test_a_view_that_was_deleted_comes_back(measure, no_model, tmp_path):
    measure("builtin")
    shown = (tmp_path / "evaluation.json").read_bytes()
    (tmp_path / "evaluation.json").unlink()
    no_model()
    assert not measure("builtin")[1]
    assert (tmp_path / "evaluation.json").read_bytes() == shown


def test_another_model_of_the_same_label_evicts_nothing(measure, no_model, tmp_path):
    reporter = SilentReporter()
    first, _ = measure("builtin", models=[("model", 0)], reporter=reporter)
    assert not of_the_view(reporter)
    measure("builtin", models=[("model", 1)], reporter=reporter)
    (notice,) = of_the_view(reporter)
    assert f"no longer model ({first.models[0].name})" in notice
    assert "no more" not in notice
    no_model()
    again, worked = measure("builtin", models=[("model", 0)])
    assert not worked
    assert again.models[0].scores == first.models[0].scores
    stored = read_evaluation(tmp_path / "evaluation.json")
    assert stored is not None
    assert stored.models[0].digest == first.models[0].digest
    # Under another label it is the same model.
    assert not measure("builtin", models=[("base", 1), ("model", 0)])[1]


def test_a_model_made_anew_as_it_was_finds_its_scores(measure, no_model, tmp_path):
    measure("builtin")
    shutil.rmtree(tmp_path / "evaluations")
    forget_stale(tmp_path / "evaluation.json", "sliced", "another digest", SilentReporter())
    no_model()
    assert not measure("builtin")[1]


def test_measuring_anew_replaces_what_is_kept(measure, no_model, monkeypatch, tmp_path):
    from lapcli.evaluation import run

    measure("builtin")
    whole = run.measure_perplexity

    def other(*args, **more):
        return [replace(score, counts={"tokens": 7}) for score in whole(*args, **more)]

    monkeypatch.setattr(run, "measure_perplexity", other)
    assert measure("builtin", overwrite=True)[1]
    (tmp_path / "evaluation.json").unlink()
    no_model()
    found, _ = measure("builtin")
    assert {score.counts["tokens"] for model in found.models for score in model.scores} == {7}


def test_a_kept_score_that_is_damaged_is_named(measure, tmp_path):
    measure("builtin", models=[("base", 0)])
    measure("builtin", models=[("base", 1)])
    (tmp_path / "evaluation.json").unlink()
    one, other = sorted((tmp_path / "evaluations").iterdir())
    one.write_bytes(other.read_bytes())
    models = [("base", 0), ("sliced", 1)]
    with pytest.raises(ArtifactError, match=rf"{one.name} holds other scores"):
        measure("builtin", models=models)
    one.write_text("{")
    with pytest.raises(ArtifactError, match=rf"{one.name} is no JSON"):
        measure("builtin", models=models)
    assert measure("builtin", models=models, overwrite=True)[1]
    assert not measure("builtin", models=models)[1]


def test_other_versions_are_named(measure, monkeypatch):
    from lapcli.evaluation import run

    reporter, now = SilentReporter(), run.versions("cpu")
    measure("builtin")
    monkeypatch.setattr(run, "versions", lambda _device: {**now, "torch": "0.0"})
    assert measure("builtin", reporter=reporter)[1]
    (notice,) = of_the_view(reporter)
    assert f"all scores of other versions (torch {now['torch']})" in notice
    assert "evaluation.previous.json" in notice
    monkeypatch.undo()
    assert not measure("builtin")[1]
