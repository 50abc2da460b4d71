"""Writing with the runtime's engine, against the model's own generation and its passes without a cache."""

import random
from types import SimpleNamespace

import pytest
import torch

from lapcli.errors import ModelError
from lapcli.evaluation import captured
from lapcli.evaluation.captured import BLOCK, CapturedWriter
from lapcli.evaluation.decoding import Writing, write_greedily
from lapcli.evaluation.scoring import LoadedModel
from lapcli.families.loading import load_model, resolve_model
from lapcli.reporting import SilentReporter
from lapcli.testing.decoding import greedy_by_whole_passes
from lapcli.testing.dual_state import converted_source, tiny_source
from lapcli.testing.models import byte_tokenizer, tiny_gated_deltanet
from lapcli.testing.stock_models import tiny_stock_model

# transformers warns of what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

# Shorter than a convolution, and across the chunks of a recurrence.
LENGTHS = (1, 33, 2, 70, 5, 17, 64, 3)
LIMITS = (1, 15, 16, 17, 18, 33, 34, 40)


def prompts_of(lengths=LENGTHS, seed=8):
    rng = random.Random(seed)
    return [[rng.randrange(3, 259) for _ in range(length)] for length in lengths]


def source_of(kind, folder):
    if kind == "gated_deltanet":
        return resolve_model(str(tiny_gated_deltanet(folder)))
    if kind == "llama":
        return tiny_source("llama", folder)
    if kind == "dual_state":
        return converted_source(tiny_source("llama", folder / "teacher"), folder / "converted", (1,))[0]
    return resolve_model(str(tiny_stock_model(kind, folder)))


@pytest.fixture(scope="module", params=["gated_deltanet", "llama", "dual_state", "qwen3_next"])
def pair(request, tmp_path_factory):
    """A model that writes by its own generation, and the same one with an engine."""
    source = source_of(request.param, tmp_path_factory.mktemp(request.param) / "m")
    plain, model = load_model(source), load_model(source)
    writer = CapturedWriter(model, capture=False)
    return (
        LoadedModel(plain, byte_tokenizer(), request.param),
        LoadedModel(model, byte_tokenizer(), request.param, writer=writer),
    )


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return resolve_model(str(tiny_gated_deltanet(tmp_path_factory.mktemp("own") / "m")))


@pytest.fixture(scope="module")
def whole(pair):
    """37 tokens after each prompt, by the model's own generation."""
    return write(pair[0], [Writing(prompt, 37) for prompt in prompts_of()])


def write(loaded, writings, stop=(), batch_size=None, reporter=None):
    return write_greedily(
        loaded, writings, stop=stop, batch_size=batch_size, reporter=reporter or SilentReporter(), description="test"
    )


def writer_of(loaded):
    assert loaded.writer is not None
    return loaded.writer


def nothing_is_left(loaded):
    engine = writer_of(loaded)._engine
    assert engine is not None
    return not engine.slots.positions and engine.slots.free == engine.max_rows


def test_it_writes_what_the_models_own_generation_writes(pair):
    plain, loaded = pair
    writings = [Writing(prompt, limit) for prompt, limit in zip(prompts_of(), LIMITS, strict=True)]
    wanted = write(plain, writings)
    assert [len(row) for row in wanted] == list(LIMITS)
    assert write(loaded, writings) == wanted
    assert nothing_is_left(loaded)
    # Three rows at once, which others join as they end.
    assert write(loaded, writings, batch_size=3) == wanted
    assert nothing_is_left(loaded)


def test_it_writes_what_whole_passes_say(pair):
    plain, loaded = pair
    prompts = prompts_of((2, 40, 9))
    wanted = [greedy_by_whole_passes(plain.model, prompt, 18) for prompt in prompts]
    assert write(loaded, [Writing(prompt, 18) for prompt in prompts]) == wanted


# The first token comes from the prompt's pass, and the blocks of steps begin after it.
# Where rows end has nothing to do with the model.
@pytest.mark.parametrize("pair", ["gated_deltanet"], indirect=True)
@pytest.mark.parametrize("place", [0, 1, 8, BLOCK, BLOCK + 1])
def test_rows_end_before_a_stop_token_wherever_it_lies_in_a_block(pair, whole, place):
    _, loaded = pair
    writings = [Writing(prompt, 37) for prompt in prompts_of()]
    stop = {whole[3][place]}
    wanted = [row[: next((at for at, token in enumerate(row) if token in stop), 37)] for row in whole]
    assert write(loaded, writings, stop=stop, batch_size=4) == wanted
    assert nothing_is_left(loaded)


# Where rows end has nothing to do with the model.
@pytest.mark.parametrize("pair", ["gated_deltanet"], indirect=True)
@pytest.mark.parametrize("size", [1, 2, 9, BLOCK + 1, BLOCK + 2])
def test_rows_end_by_rules_of_their_own(pair, whole, size):
    _, loaded = pair
    prompts = prompts_of()
    # Every other row has a rule; once it holds it goes on holding.
    writings = [
        Writing(prompt, 37, (lambda written: len(written) >= size) if number % 2 else None)
        for number, prompt in enumerate(prompts)
    ]
    assert write(loaded, writings) == [row[:size] if number % 2 else row for number, row in enumerate(whole)]


def test_a_rule_a_stop_token_and_a_limit_in_one_block(pair):
    """Whichever comes first ends the row."""
    plain, loaded = pair
    prompts = prompts_of((12, 30, 6))
    whole = write(plain, [Writing(prompt, 12) for prompt in prompts])
    stop = {whole[0][5]}
    first = [next((at for at, token in enumerate(row) if token in stop), 99) for row in whole]
    for size in (5, 6):
        for limit in (2, 5, 6, 12):
            writings = [Writing(prompt, limit, lambda written: len(written) >= size) for prompt in prompts]  # noqa: B023 -- called at once
            wanted = [row[: min(size, limit, at)] for row, at in zip(whole, first, strict=True)]
            assert write(loaded, writings, stop=stop) == wanted


def test_more_prompts_than_rows_or_pages(tmp_path, monkeypatch):
    """Pages for two of the longest rows: the others wait for theirs."""
    source = source_of("llama", tmp_path)
    plain = LoadedModel(load_model(source), byte_tokenizer(), "llama")
    model = load_model(source)
    monkeypatch.setattr(captured, "MOST_ROWS", 5)
    loaded = LoadedModel(model, byte_tokenizer(), "llama", writer=CapturedWriter(model, capture=False))
    prompts = prompts_of((*LENGTHS, *LENGTHS[::-1], 7, 50, 150))
    writings = [Writing(prompt, 5 + number) for number, prompt in enumerate(prompts)]
    one = captured.Engine(model, max_rows=1, max_length=200).row_bytes(200)
    monkeypatch.setattr(captured, "_CPU_BYTES", 2 * one)
    assert write(loaded, writings) == write(plain, writings)
    engine = writer_of(loaded)._engine
    assert engine is not None
    assert engine.max_rows == 5
    assert engine.pages.free < engine.pages_of(200) * 5
    assert nothing_is_left(loaded)


def test_progress_counts_each_prompt_once(own):
    model = load_model(own)
    loaded = LoadedModel(model, byte_tokenizer(), "tiny")
    counted = []
    writings = [Writing(prompt, 20) for prompt in prompts_of()]
    CapturedWriter(model, capture=False).write(
        loaded, writings, stop={7, 8, 9}, batch_size=3, reporter=SilentReporter(), done=counted.append
    )
    assert sum(counted) == len(writings)


def test_a_longer_prompt_than_the_engine_was_made_for(tmp_path):
    source = source_of("llama", tmp_path)
    plain, model = load_model(source), load_model(source)
    loaded = LoadedModel(model, byte_tokenizer(), "llama", writer=CapturedWriter(model, longest=30, capture=False))
    for lengths in ((10, 20), (140, 3), (8,)):
        writings = [Writing(prompt, 9) for prompt in prompts_of(lengths)]
        assert write(loaded, writings) == write(LoadedModel(plain, byte_tokenizer(), "llama"), writings)
    engine = writer_of(loaded)._engine
    assert engine is not None
    assert engine.max_length == 149 + BLOCK


def test_memory_that_runs_out_halves_what_goes_in_together(own, monkeypatch):
    model, reporter = load_model(own), SilentReporter()
    writer = CapturedWriter(model, capture=False)
    loaded = LoadedModel(model, byte_tokenizer(), "tiny", writer=writer)
    writings = [Writing(prompt, 6) for prompt in prompts_of()]
    wanted = write(loaded, writings)
    engine = writer._engine
    assert engine is not None
    together = engine.prefill_together

    def short_of_memory(prompts):
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return together(prompts)

    monkeypatch.setattr(engine, "prefill_together", short_of_memory)
    assert write(loaded, writings, reporter=reporter) == wanted
    assert reporter.warnings == [f"memory ran out; going on with batches of {count}" for count in (4, 2)]
    assert nothing_is_left(loaded)

    def no_memory(prompts):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine, "prefill_together", no_memory)
    with pytest.raises(ModelError, match="memory ran out on tiny with one row of 70 tokens"):
        write(loaded, writings)
    assert nothing_is_left(loaded)


@pytest.mark.parametrize("late", [False, True])
def test_logits_that_are_not_numbers_are_an_error_and_leave_no_rows(own, late):
    """In the prompt's pass, or only in a step: then the embedding of a token that is written first is not a number."""
    model = load_model(own)
    writings = [Writing(prompt, 6) for prompt in prompts_of((3, 9))]
    loaded = LoadedModel(model, byte_tokenizer(), "tiny", writer=CapturedWriter(model, capture=False))
    first = write(loaded, writings)[0][0]
    writer_of(loaded)._engine = None
    with torch.no_grad():
        if late:
            assert all(first not in writing.tokens for writing in writings)
            model.get_input_embeddings().weight[first] = float("nan")
        else:
            model.lm_head.weight[7] = float("nan")
    with pytest.raises(ModelError, match="tiny gives logits that are not numbers"):
        write(loaded, writings)
    assert nothing_is_left(loaded)


def test_where_no_engine_can_be_made_the_models_own_generation_writes(own, monkeypatch):
    model = load_model(own)
    loaded = LoadedModel(model, byte_tokenizer(), "tiny", writer=CapturedWriter(model, capture=False))
    writings = [Writing(prompt, 6) for prompt in prompts_of()]
    asked = []

    def no_room(*arguments, **options):
        asked.append(options)
        raise ModelError("no room", "none")

    monkeypatch.setattr(captured, "Engine", no_room)
    wanted = write(LoadedModel(load_model(own), byte_tokenizer(), "tiny"), writings)
    assert write(loaded, writings) == wanted
    assert write(loaded, writings) == wanted
    assert len(asked) == 1  # and it is not tried again


def test_nothing_to_write(own):
    model = load_model(own)
    assert write(LoadedModel(model, byte_tokenizer(), "tiny", writer=CapturedWriter(model, capture=False)), []) == []


def test_it_is_for_gpus(own):
    model = load_model(own)
    assert CapturedWriter.of(model, "auto", 100) is None
    on_gpu = SimpleNamespace(device=torch.device("cuda"), mixers=lambda: [], hf_device_map={"": 0})
    assert CapturedWriter.of(on_gpu, "auto", 100) is None
    assert CapturedWriter.of(on_gpu, "reference", 100) is None
