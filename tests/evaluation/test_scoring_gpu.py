import pytest
import torch

from lapcli.evaluation.captured import CapturedWriter
from lapcli.evaluation.decoding import Writing, write_greedily
from lapcli.evaluation.run import evaluate
from lapcli.evaluation.scoring import LoadedModel, Request, score
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.reporting import SilentReporter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_gpu_scores_and_continues_as_the_cpu_does(tiny, tiny_folder):
    source = resolve_model(str(tiny_folder))
    loaded = LoadedModel(load_model(source, device="cuda"), load_tokenizer(source), "tiny")
    prompts = [list(range(10, 10 + length)) for length in (5, 60, 33)]
    said, on_gpu = (
        write_greedily(
            model, [Writing(prompt, 5) for prompt in prompts], batch_size=3, reporter=SilentReporter(), description=""
        )
        for model in (tiny, loaded)
    )
    assert on_gpu == said
    requests = [Request(prompt + answer, 5) for prompt, answer in zip(prompts, said, strict=True)]
    here, there = (
        score(model, requests, batch_size=None, reporter=SilentReporter(), description="") for model in (tiny, loaded)
    )
    assert [answer.greedy for answer in there] == [True] * 3
    # Five log-probabilities of about 5 in fp32; kernels on a GPU may multiply in TF32, of ten bits.
    assert [answer.log_probability for answer in there] == pytest.approx(
        [answer.log_probability for answer in here], abs=5 * 5 * 2**-10
    )


def test_captured_steps_write_what_the_cpu_writes(tiny, tiny_folder):
    model = load_model(resolve_model(str(tiny_folder)), device="cuda")
    writer = CapturedWriter.of(model, "auto", 100)
    assert writer is not None
    loaded = LoadedModel(model, tiny.tokenizer, "tiny", writer=writer)
    prompts = [list(range(10, 10 + length)) for length in (5, 60, 33, 1, 2)]
    writings = [Writing(prompt, limit) for prompt, limit in zip(prompts, (5, 17, 40, 1, 16), strict=True)]
    said, on_gpu = (
        write_greedily(model, writings, batch_size=3, reporter=SilentReporter(), description="")
        for model in (tiny, loaded)
    )
    assert on_gpu == said
    assert writer._engine is not None
    assert writer._engine.path.graph


def test_bf16_evaluates_on_a_gpu(tiny_folder):
    found = evaluate(
        [("base", resolve_model(str(tiny_folder)))],
        ["builtin", "niah"],
        EvaluationSettings(max_length=256, limit=8, niah_lengths=(400,)),
        device="cuda",
        dtype=torch.bfloat16,
    )
    assert found.models[0].dtype == "bfloat16"
    assert found.models[0].scores[0].estimate.value == pytest.approx(290, rel=0.2)
