from dataclasses import replace

import pytest
import torch

from lapcli.evaluation import captured, rows
from lapcli.evaluation.captured import CapturedWriter
from lapcli.evaluation.decoding import Writing, write_greedily
from lapcli.evaluation.run import evaluate
from lapcli.evaluation.scoring import LoadedModel, Request, score
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.reporting import SilentReporter
from lapcli.testing.decoding import prompts_of
from lapcli.testing.models import byte_tokenizer
from lapcli.testing.stock_models import tiny_stock_model

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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gated_deltanet", "qwen3_5", "mamba2", "zamba2"])
def test_captured_steps_write_what_generation_writes(tiny_folder, tmp_path, monkeypatch, name):
    """In fp32, where no two logits are so close that another order of sums would change a token."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    source = resolve_model(str(tiny_folder if name == "gated_deltanet" else tiny_stock_model(name, tmp_path)))
    writings = [Writing(prompt, 3 + 5 * number) for number, prompt in enumerate(prompts_of(5, 17, 33, 12, 40, 7, 1))]
    own, other = (LoadedModel(load_model(source, device="cuda"), byte_tokenizer(), name) for _ in range(2))
    writer = CapturedWriter.of(other.model, "auto", 100)
    assert writer is not None
    graphs = replace(other, writer=writer)

    def write(loaded, batch_size=None):
        return write_greedily(loaded, writings, batch_size=batch_size, reporter=SilentReporter(), description="")

    wanted = write(own)
    for batch_size in (None, 2):
        assert write(graphs, batch_size) == wanted
    engine = writer._engine
    assert engine is not None
    assert engine.path.graph
    assert engine.path.kernel == "triton"
    assert (engine.slots.free, engine.pages.free) == (engine.max_rows, engine.pages.count)
    # Rows are filled up to eight.
    assert {key[0] for key in engine.steps._graphs} == {8}


def test_an_evaluation_writes_by_captured_steps_with_one_engine(tiny_folder, monkeypatch):
    made, blocks = [], []

    class Counted(captured.Engine):
        def __init__(self, *args, **options):
            made.append(options["max_rows"])
            super().__init__(*args, **options)

        def decode(self, tokens, steps, *args, **options):
            blocks.append((len(tokens), steps))
            return super().decode(tokens, steps, *args, **options)

    monkeypatch.setattr(captured, "Engine", Counted)
    models = [("base", resolve_model(str(tiny_folder)))]
    settings = EvaluationSettings(ruler_lengths=(600, 700), limit=20)
    found = evaluate(models, ["niah_single_1", "niah_single_2"], settings, device="cuda")
    assert made == [1, captured.MOST_ROWS]
    # 127 steps after the first token, in eight blocks each time, or fewer where all rows have ended.
    assert 2 * 2 <= len(blocks) <= 2 * 2 * 8
    assert all(count <= 20 and steps <= captured.BLOCK for count, steps in blocks)
    monkeypatch.setattr(CapturedWriter, "of", lambda *_: None)
    wanted = evaluate(models, ["niah_single_1", "niah_single_2"], settings, device="cuda")
    assert found.models[0].scores == wanted.models[0].scores


def test_rows_of_a_pass_follow_the_free_memory(tiny_folder):
    model = load_model(resolve_model(str(tiny_folder)), device="cuda", dtype=torch.bfloat16)
    free = rows.free_bytes(model.device)
    assert free is not None
    assert 0 < free <= torch.cuda.get_device_properties(model.device).total_memory
    assert 4096 < rows.tokens_of_a_pass(model) <= 1 << 18
    assert 1 << 20 < rows.logits_of_a_pass(model) <= 1 << 30
