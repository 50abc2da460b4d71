"""The eight tasks, log-likelihood by log-likelihood, against lm-eval's own command of the same model."""

import lzma
import math
from itertools import islice

import pytest
import torch

from lapcli.evaluation import harness
from lapcli.evaluation.harness import load_task, run_harness
from lapcli.evaluation.local_data import find_local
from lapcli.evaluation.scoring import LoadedModel
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.evaluation.tasks import TASKS
from lapcli.reporting import SilentReporter
from lapcli.testing import shared_data
from lapcli.testing.models import byte_tokenizer

DOCUMENTS = 20
# Shorter than some of the prompts, which lose their beginnings.
MAX_LENGTH = 384


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=259, max_position_embeddings=MAX_LENGTH, initializer_range=0.3, **sizes)
    return LoadedModel(model=LlamaForCausalLM(config).eval(), tokenizer=byte_tokenizer(), name="llama")


def stock_samples(name, loaded, documents, monkeypatch):
    """lm-eval's `simple_evaluate` of its own task, whose data set the hub would have served."""
    import datasets

    def served(path, name=None, **_):
        assert path.count("/") == 1
        table = datasets.Dataset.from_list(documents)
        # lm-eval wants every split that its definition names to be there; the others are not asked.
        return datasets.DatasetDict({"train": table.select([0]), "validation": table, "test": table})

    monkeypatch.setattr(datasets, "load_dataset", served)
    with harness._quiet():
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        model = HFLM(
            pretrained=loaded.model, tokenizer=loaded.tokenizer, backend="causal", max_length=MAX_LENGTH, batch_size=4
        )
        found = simple_evaluate(
            model=model,
            tasks=[name],
            task_manager=harness._manager([name]),
            limit=DOCUMENTS,
            bootstrap_iters=0,
            log_samples=True,
        )
    assert found is not None
    return found["samples"][name], found["results"][name]


def first_documents(name, data, folder):
    """A folder with the first lines of a task's files: all of HellaSwag takes seconds."""
    path, local = find_local(name, data) or pytest.fail(f"no copy of {name}")
    for file in local.files(path):
        read = lzma.open if file.suffix == ".xz" else open
        with read(file, "rt", encoding="utf-8") as lines:
            (folder / file.name.removesuffix(".xz")).write_text("".join(islice(lines, DOCUMENTS + 5)))
    return folder


@pytest.mark.shared
@pytest.mark.parametrize("task", TASKS["zeroshot8"].members)
def test_every_log_likelihood_is_that_of_lm_eval(llama, monkeypatch, tmp_path, task):
    root = shared_data()
    if root is None:
        pytest.skip("needs the shared data folder: eval")
    name = TASKS[task].harness_name
    assert name is not None
    folder = first_documents(name, root / "data", tmp_path)
    ours, _ = run_harness(
        load_task(task, name, folder),
        llama,
        EvaluationSettings(limit=DOCUMENTS),
        max_length=MAX_LENGTH,
        batch_size=7,
        reporter=SilentReporter(),
    )
    path, local = find_local(name, folder) or pytest.fail("no copy")
    samples, results = stock_samples(name, llama, local.read(path), monkeypatch)
    assert len(samples) == len(ours["samples"][name]) == DOCUMENTS
    count = 0
    for theirs, mine in zip(samples, ours["samples"][name], strict=True):
        for part in ("arguments", "target", "prompt_hash", "target_hash"):
            assert mine[part] == theirs[part]
        for (answer,), (wanted,) in zip(mine["resps"], theirs["resps"], strict=True):
            # fp32 log-probabilities; batches of other sizes multiply in another order.
            assert float(answer[0]) == pytest.approx(float(wanted[0]), rel=1e-4)
            assert str(answer[1]) == str(wanted[1])
            count += 1
    assert count >= DOCUMENTS
    for metric, value in results.items():
        if metric.endswith(",none") and "stderr" not in metric:
            assert ours["results"][name][metric] == pytest.approx(value, rel=1e-4)


@pytest.mark.shared
def test_squad_runs_on_its_copy_and_says_what_it_lacks(tiny):
    root = shared_data()
    if root is None:
        pytest.skip("needs the shared data folder: eval")
    task = load_task("squad", "squad_completion", root / "data")
    (score,) = harness.measure_harness(
        task, tiny, EvaluationSettings(limit=2), max_length=256, batch_size=2, reporter=SilentReporter()
    )
    assert (score.task, score.metric, score.estimate.n) == ("squad", "contains", 2)
    assert "2910 of the 5928" in score.notes[0]
    assert math.isfinite(score.estimate.value)
    assert '"until": ["\\n"]' in score.settings["generation"]
    assert '"max_gen_toks": 48' in score.settings["generation"]
