import json
import math

import pytest
import torch

from lapcli.errors import DataError, UsageError
from lapcli.evaluation import run
from lapcli.evaluation.results import Evaluation
from lapcli.evaluation.run import evaluate, evaluate_model, plan_evaluation, resolve_max_length
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.families.loading import resolve_model
from lapcli.reporting import SilentReporter
from lapcli.testing.models import byte_tokenizer, tiny_gated_deltanet

SETTINGS = EvaluationSettings(max_length=128, limit=6, niah_lengths=(400,))


@pytest.fixture(scope="module")
def sources(tiny_folder, tmp_path_factory):
    other = tiny_gated_deltanet(tmp_path_factory.mktemp("other"), seed=1)
    return [("base", resolve_model(str(tiny_folder))), ("other", resolve_model(str(other)))]


@pytest.fixture(scope="module")
def evaluation(sources):
    return evaluate(sources, ["builtin", "niah"], SETTINGS)


def test_two_models_side_by_side(evaluation, sources):
    rows = evaluation.rows()
    assert [(row.task, row.metric, row.length) for row in rows] == [
        ("builtin", "token_perplexity", None),
        ("builtin", "word_perplexity", None),
        ("niah", "exact_match", 400),
    ]
    for row in rows:
        assert all(score is not None and score.estimate.n == 6 for score in row.scores)
        assert row.refusals == ()
        assert all(found is not None and found.gap.paired for found in row.differences)
    assert [model.digest for model in evaluation.models] == [source.digest for _, source in sources]
    assert all(model.dtype == "float32" and model.parameters > 0 for model in evaluation.models)
    assert {"lapcli", "python", "torch", "transformers"} <= set(evaluation.versions)
    assert Evaluation.from_json(json.loads(json.dumps(evaluation.to_json(), allow_nan=False))) == evaluation


def test_repeating_gives_the_same_numbers(evaluation, sources):
    assert evaluate(sources, ["builtin", "niah"], SETTINGS) == evaluation


def test_a_model_in_memory_scores_the_same(evaluation, tiny):
    tiny.model.train()
    try:
        again = evaluate_model(tiny.model, tiny.tokenizer, ["builtin", "niah"], SETTINGS, label="base")
        assert tiny.model.training
    finally:
        tiny.model.eval()
    assert again.models[0].scores == evaluation.models[0].scores
    assert again.models[0].digest is None


def test_a_text_file_is_a_task(sources, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "One text of a few words."}\n{"text": "Another one."}\n')
    found = evaluate(sources[:1], [f"text:{path}"])
    token, word = found.models[0].scores
    assert token.task == f"text:{path}"
    assert token.counts == {"windows": 2, "tokens": 36, "words": 8}
    assert math.log(word.estimate.value) / math.log(token.estimate.value) == pytest.approx(36 / 8)


def test_essays_of_ones_own_are_a_haystack(sources, tmp_path):
    path = tmp_path / "essays.txt"
    path.write_text(" ".join(f"Sentence number {number} is one of mine." for number in range(60)))
    settings = EvaluationSettings(niah_lengths=(400,), niah_samples=2, niah_haystack=path)
    (score,) = evaluate(sources[:1], ["niah"], settings).models[0].scores
    (other,) = evaluate(sources[:1], ["niah"], EvaluationSettings(niah_lengths=(400,), niah_samples=2)).models[0].scores
    assert score.settings["data"] != other.settings["data"]


def test_lm_eval_tasks_stand_beside_ours(sources, tmp_path):
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "a b"}\n{"text": "c d"}\n')
    found = evaluate(
        sources, ["lambada", "builtin"], SETTINGS, options=EvaluationOptions(task_data=tmp_path, batch_size=1)
    )
    assert [row.task for row in found.rows()] == ["lambada", "lambada", "builtin", "builtin"]
    assert all(row.differences[0] is not None and row.differences[0].gap.paired for row in found.rows())


@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        pytest.param(["builtin", "text:/gone.txt"], DataError, "is no file", id="missing file"),
        pytest.param([], UsageError, "no task", id="nothing to do"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(sources, monkeypatch, tasks, error, message):
    monkeypatch.setattr("lapcli.families.loading.load_model", lambda *args, **kwargs: pytest.fail("loaded"))
    with pytest.raises(error, match=message):
        evaluate(sources, tasks)


def test_any_causal_model_of_transformers_is_taken(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    found = evaluate(
        [("model", resolve_model(str(tmp_path)))],
        ["niah_noise"],
        EvaluationSettings(niah_lengths=(400,), niah_samples=2),
    )
    assert found.models[0].scores[0].estimate.n == 2


def test_labels_must_differ(sources):
    with pytest.raises(UsageError, match="label"):
        evaluate([sources[0], sources[0]], ["builtin"])
    with pytest.raises(UsageError, match="label"):
        evaluate([], ["builtin"])


def test_window_length_is_that_of_the_shortest_model():
    reporter = SilentReporter()
    configs = [{"max_position_embeddings": 4096}, {"text_config": {"max_position_embeddings": 1024}}, {}]
    assert resolve_max_length(EvaluationSettings(), configs, reporter) == 1024
    assert resolve_max_length(EvaluationSettings(), configs[:1], reporter) == 2048
    assert resolve_max_length(EvaluationSettings(), [{}], reporter) == 2048
    assert not reporter.notices
    assert resolve_max_length(EvaluationSettings(max_length=2000), configs, reporter) == 2000
    assert "1024 positions" in reporter.notices[0]


def test_the_machine_is_not_part_of_the_numbers(sources, evaluation):
    found = evaluate(sources, ["builtin"], SETTINGS, options=EvaluationOptions(batch_size=1))
    for left, right in zip(found.models, evaluation.models, strict=True):
        for one, many in zip(left.scores, right.scores, strict=False):
            assert one.settings == many.settings
            assert math.log(one.estimate.value) == pytest.approx(math.log(many.estimate.value), abs=1e-5)


def test_versions_name_what_ran():
    found = run.versions("cuda:1")
    assert (found["torch"], found["device"]) == (torch.__version__, "cuda")


@pytest.mark.parametrize("package", ["flash-linear-attention", "triton", "causal-conv1d", "mamba-ssm"])
def test_scores_are_of_the_kernels_that_are_installed(sources, monkeypatch, package):
    def installed(name, *, found=run.version):
        return "0.0.1" if name == package else found(name)

    def request():
        options = {"device": "cpu", "dtype": torch.float32, "kernel": "auto"}
        plan = plan_evaluation(sources[:1], ["builtin"], SETTINGS, EvaluationOptions(), **options)
        return plan.requests["base"]["builtin"]

    before = request()
    monkeypatch.setattr(run, "version", installed)
    assert request() != before


def test_scores_are_of_one_type_of_device(sources, evaluation):
    def missing(device):
        options = {"device": device, "dtype": torch.float32, "kernel": "auto", "earlier": evaluation}
        return plan_evaluation(sources, ["builtin"], SETTINGS, EvaluationOptions(), **options).missing("other")

    assert not missing("cpu")
    assert [info.name for info in missing("cuda")] == ["builtin"]
