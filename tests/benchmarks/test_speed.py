"""`lapcli bench decode` and its kin at toy size: what is measured is right, labelled, and beside the right floor."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from lapcli.benchmarks.speed import decode, step_operator
from lapcli.benchmarks.speed.chunk_operator import chunk_operator_benchmark
from lapcli.benchmarks.speed.configs import (
    CONFIGS,
    attention_flop,
    converted_subject,
    read_config,
    recurrence_flop,
    rows_that_fit,
    subject,
)
from lapcli.benchmarks.speed.decode import DecodeSettings, Models, decode_benchmark, memory_benchmark, step_floor
from lapcli.benchmarks.speed.gate import compare
from lapcli.benchmarks.speed.layers import Shape, shapes_of
from lapcli.benchmarks.speed.library import LibraryDecode
from lapcli.benchmarks.speed.mixer import mixer_benchmark
from lapcli.benchmarks.speed.models import Model
from lapcli.benchmarks.speed.prefill import prefill_benchmark, prefill_floor
from lapcli.benchmarks.speed.results import Budget, Results, Row, read_results
from lapcli.benchmarks.speed.step_operator import step_operator_benchmark
from lapcli.errors import ArtifactError, ModelError, UsageError
from lapcli.testing.stock_models import tiny_stock_model

# Memory is freed after each case.
pytestmark = pytest.mark.usefixtures("older_objects_left_alone")

CPU = torch.device("cpu")
FEW = DecodeSettings(warmup=1, repeats=3, trials=1, limit=0.2, latency_tokens=4, generated=(2, 12))
MACHINE = {"device": "a machine", "copy_bytes": 1e9, "product_flops": 1e10, "date": "2026-11-30", "versions": {}}


def toy(*ratios):
    return [subject("toy", CONFIGS["toy"], ratio) for ratio in ratios or ("0", "0.5")]


def collected(**options):
    return Results("lapcli bench decode", MACHINE, **options)


def run_decode(results, subjects=None, *, batches=(3,), models=None, **options):
    options = {"contexts": (9,), "latency": False, "generate": False, "settings": FEW, **options}
    decode_benchmark(subjects or toy(), batches, results, models or Models(CPU, torch.float32), **options)
    return results.rows


def test_every_way_of_every_width_is_judged_and_timed():
    rows = run_decode(collected(), latency=True, generate=True)
    found = {(row.cell.what, row.cell.way, row.cell.key_width): row for row in rows}
    for width in (32, 16):
        for what, way in (
            ("decode", "lapcli"), ("decode", "pytorch"), ("latency", "lapcli"),
            ("generate", "lapcli"), ("generate", "library"),
        ):  # fmt: skip
            row = found[what, way, width]
            assert row.status == "measured", row
            assert row.seconds > 0
            assert row.over_floor == pytest.approx(row.seconds / row.floor_seconds)
        assert 0 < found["decode", "lapcli", width].error_share <= 1
    # Ways that are not here are said once, with the reason.
    missing = [row for row in rows if row.status == "not here"]
    assert [(row.cell.way, row.detail) for row in missing] == [
        ("fla graph", "fla needs a GPU"),
        ("fla", "fla needs a GPU"),
        ("library", "lapcli and fla have this model, transformers has not"),
    ]


def test_a_generation_that_took_less_than_no_time_is_no_measurement(monkeypatch):
    """Of a machine that others use, the longer of two may be the faster one."""
    monkeypatch.setattr(decode, "generate_seconds", lambda *_: -1e-6)
    rows = run_decode(collected(), toy("0"), ways=("library",), generate=True)
    (row,) = [row for row in rows if row.cell.what == "generate"]
    assert (row.status, row.seconds) == ("failed", None)


def test_states_in_half_precision_are_judged_by_what_they_can_hold():
    halves = replace(FEW, state_dtype=torch.bfloat16)
    (row,) = run_decode(collected(), toy("0"), ways=("lapcli",), settings=halves)
    assert (row.status, row.cell.state_dtype) == ("measured", "bfloat16")
    # Against fp32's own rounding they would be wrong by far.
    model = Model(toy("0")[0], CPU, torch.float32)
    way = decode.EngineDecode(model.ours, 3, 32, torch.bfloat16)
    assert model.judge(way.start, way.step, 3, 9).share > 10


def test_a_way_whose_results_are_wrong_has_no_speed(monkeypatch):
    from lapcli.runtime import layers

    right = layers.delta_step
    monkeypatch.setattr(layers, "delta_step", lambda *a, **k: 1.01 * right(*a, **k))
    found = run_decode(collected(), toy("0"), latency=True, generate=True)
    rows = {row.cell.way: row for row in found if row.status != "not here" and row.cell.what == "decode"}
    assert {row.status for row in found if row.cell.way == "lapcli"} == {"wrong"}
    assert {row.cell.what for row in found if row.cell.way == "lapcli"} == {"decode", "generate", "latency"}
    assert rows["lapcli"].seconds is None
    assert rows["lapcli"].error_share > 1
    assert "error" in rows["lapcli"].detail
    assert rows["pytorch"].status == "measured"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out of memory"),
        (RuntimeError("no kernel image is available\nmore"), "failed"),
    ],
    ids=["torch", "triton", "a defect"],
)
def test_a_cell_that_fails_is_labelled_and_the_others_go_on(monkeypatch, error, status):
    made = decode.make_way

    def failing(way, model, *rest):
        if way == "lapcli" and model.subject.ratio == 0:
            raise error
        return made(way, model, *rest)

    monkeypatch.setattr(decode, "make_way", failing)
    rows = run_decode(collected(), ways=("lapcli",))
    assert [row.status for row in rows] == [status, "measured"]
    assert rows[0].seconds is None
    if status == "failed":
        assert rows[0].detail == "RuntimeError: no kernel image is available"


def test_where_memory_is_short_other_models_give_way(monkeypatch):
    made, models = decode.make_way, Models(CPU, torch.float32)
    tried = []

    def failing(way, model, *rest):
        tried.append((model.subject.ratio, len(models._held)))
        if len(models._held) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(way, model, *rest)

    monkeypatch.setattr(decode, "make_way", failing)
    rows = run_decode(collected(), models=models, ways=("lapcli",))
    assert [row.status for row in rows] == ["measured", "measured"]
    assert tried == [(0.0, 1), (0.5, 2), (0.5, 1)]


def test_a_budget_that_is_spent_leaves_the_rest_out():
    results = collected(budget=Budget(1e-9))
    rows = run_decode(results, latency=True, generate=True)
    memory_benchmark(toy(), 2**20, results, Models(CPU, torch.float32), settings=FEW)
    prefill_benchmark(toy(), [(1, 8)], results, Models(CPU, torch.float32), settings=FEW)
    mixer_benchmark(toy(), [(1, 8)], results, CPU, torch.float32, decode=True, settings=FEW)
    step_operator_benchmark(shapes_of("toy"), [1], results, CPU, torch.float32, settings=FEW)
    chunk_operator_benchmark(shapes_of("toy"), [(1, 8)], results, CPU, torch.float32, settings=FEW)
    assert {row.status for row in rows} == {"no time"}
    assert len({row.cell.what for row in rows}) == 8


def test_each_row_is_on_disk_before_the_next_is_made(tmp_path):
    path, seen = tmp_path / "rows.json", []

    def each(row):
        seen.append(len(json.loads(path.read_text())["rows"]))

    results = collected(path=path, each=each)
    assert json.loads(path.read_text())["rows"] == []
    rows = run_decode(results)
    assert seen == list(range(1, len(rows) + 1))
    ((document, read),) = read_results([path])
    assert document["command"] == "lapcli bench decode"
    assert read == rows
    newer = json.loads(path.read_text()) | {"schema": 2}
    path.write_text(json.dumps(newer))
    with pytest.raises(ArtifactError, match="schema 2"):
        read_results([path])
    path.write_text("{}")
    with pytest.raises(ArtifactError, match="no results"):
        read_results([path])


def test_the_floor_of_a_step_is_its_weights_and_its_states_twice():
    whole, half = (Model(one, CPU, torch.float32) for one in toy())
    # By hand, two layers of hidden size 64, two heads of K = 32 and V = 64, four taps, an MLP of 128, 259 tokens.
    mixer = 64 * (2 * 64 + 3 * 128) + 128 * 4 + 64 * 2 * 4 + 2 * 64 * 2 + 2 * 2 + 64
    weights = 2 * (mixer + 3 * 64 * 128 + 2 * 64) + 64 + 259 * 64
    assert whole.weight_bytes() == 4 * weights
    assert half.weight_bytes() == 4 * (weights - 2 * (2 * 32 * 64 + 2 * 32 * 4))
    assert whole.subject.state_bytes() == 2 * 2 * 32 * 64 * 4
    assert half.subject.state_bytes() == whole.subject.state_bytes() // 2
    assert step_floor(whole, 5, 512, 1e9) == (4 * weights + 2 * 5 * 32768) / 1e9
    assert step_floor(whole, 5, 512, 1e9, state_itemsize=2) == (4 * weights + 5 * 32768) / 1e9


def test_keys_and_values_of_a_hybrid_count_with_the_context(tmp_path):
    folder = tiny_stock_model("qwen3_next", tmp_path / "m")
    name, config = read_config(str(folder))
    model = Model(subject(name, config, 0), CPU, torch.float32)
    short, long = (step_floor(model, 3, context, 1.0) for context in (10, 11))
    layers = sum(kind == "full_attention" for kind in model.ours.config.layer_types)
    width = model.ours.config.num_key_value_heads * model.ours.config.head_dim
    assert layers > 0
    assert long - short == 3 * layers * 2 * width * 4


def test_a_stock_hybrid_from_its_config_alone(tmp_path):
    folder = tiny_stock_model("qwen3_next", tmp_path / "m")
    name, config = read_config(str(folder))
    rows = {row.cell.way: row for row in run_decode(collected(), [subject(name, config, 0)])}
    assert rows["lapcli"].status == "measured", rows["lapcli"].detail
    assert rows["library"].status == "measured", rows["library"].detail
    assert rows["fla"].detail == "qwen3_next is a model of transformers"


def test_a_transformer_at_shares_of_its_layers():
    """Rows of every share are judged and say what a sequence keeps; floors count keys and values of what is left."""
    shares = [converted_subject("toy-llama", CONFIGS["toy-llama"], share) for share in ("0", "0.25", "1")]
    assert [one.name for one in shares] == ["toy-llama", "toy-llama, 25 % states", "toy-llama, 100 % states"]
    assert [one.layers for one in shares] == [0, 1, 4]
    models = Models(CPU, torch.float32)
    rows = {
        (row.cell.model, row.cell.way): row
        for row in run_decode(collected(), shares, models=models, contexts=(40,), ways=("lapcli", "library"))
    }
    assert {row.status for row in rows.values()} == {"measured"}, rows
    # By hand: two key heads of 16, fp32; two states of 16 x 16 a head.
    for one, layers in zip(shares, (4, 3, 0), strict=True):
        more = rows[one.name, "lapcli"].more
        assert more["key_value_bytes"] == 40 * layers * 2 * 2 * 16 * 4
        assert more["state_bytes"] == (4 - layers) * 2 * 2 * 16 * 16 * 4
        short, long = (step_floor(models.get(one), 3, context, 1.0) for context in (10, 11))
        assert long - short == 3 * layers * 2 * 2 * 16 * 4
    results = collected()
    prefill_benchmark(shares, [(1, 70)], results, models, settings=FEW)
    assert {row.status for row in results.rows if row.cell.way == "lapcli"} == {"measured"}
    assert {row.cell.way for row in results.rows if row.status == "not here"} == {"triton", "fla", "library", "pytorch"}


def test_the_floor_of_a_transformers_prompt_is_what_torch_counts():
    """Attention to half of the tokens: torch counts all of them, masked or not."""
    from torch.utils.flop_counter import FlopCounterMode

    whole, tokens = converted_subject("toy-llama", CONFIGS["toy-llama"], "0"), 96
    model = Model(whole, CPU, torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.ours(input_ids=model.tokens(1, tokens), logits_to_keep=1)
    counted = prefill_floor(model, 1, tokens, 1.0) + tokens * attention_flop(whole, tokens)
    assert counter.get_total_flops() == counted


def test_shares_count_the_products_of_states():
    """By hand: one layer of two key heads, four readers, two states of 16 x 16, half a chunk of 8 before each token."""
    one = converted_subject("toy-llama", CONFIGS["toy-llama"], "0.25")
    writes, reads, within = 2 * 2 * 16 * 16, 4 * 2 * 16 * 16, 4 * 4 * (2 * 16 + 16)
    assert recurrence_flop(one, chunk=8) == 2 * (writes + reads + within)
    assert attention_flop(one, 100) == 2 * 3 * 4 * 50 * 32


def test_the_shapes_of_released_transformers():
    """Parameters of SmolLM2-135M, and of a 1.3 B Llama."""
    for name, count in (("smollm2-like", 134_515_008), ("llama-like", 1_345_423_360)):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIGS[name].items() if k != "model_type"}))
        assert sum(value.numel() for value in {id(x): x for x in model.parameters()}.values()) == count


def test_the_floor_of_a_prompt_is_what_recovery_counts_forward():
    """Against the count of `lapcli.benchmarks.recovery`, which a test of its own holds against torch's."""
    from lapcli.benchmarks import recovery

    (whole,) = toy("0")
    model = Model(whole, CPU, torch.float32)
    head = model.ours.get_output_embeddings().weight.numel()
    # Its matrices without the head, and the recurrence; embeddings are in neither.
    weights = recovery._weights(model.ours) - head
    assert model.product_weights() == weights
    flop = 300 * (2 * weights + recurrence_flop(whole)) + 6 * head - 3 * 99 * 2 * model.last_weights()
    assert prefill_floor(model, 3, 100, 1e10) == flop / 1e10


def test_what_the_last_token_alone_is_multiplied_with_is_what_torch_counts_less():
    from torch.utils.flop_counter import FlopCounterMode

    (whole,) = toy("0")
    model = Model(whole, CPU, torch.float32)
    model.ours.set_kernel("chunked")
    counted = []
    for kept in (0, 1):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.ours(input_ids=model.tokens(2, 70), logits_to_keep=kept)
        counted.append(counter.get_total_flops())
    head = model.ours.get_output_embeddings().weight.numel()
    assert counted[0] - counted[1] == 2 * 2 * 69 * (head + model.last_weights())
    assert model.last_weights() > 0


def test_prompts_mixers_and_operators_are_judged_and_timed():
    results, models = collected(), Models(CPU, torch.float32)
    prefill_benchmark(toy(), [(2, 70)], results, models, settings=FEW)
    mixer_benchmark(toy(), [(2, 70)], results, CPU, torch.float32, decode=False, settings=FEW)
    mixer_benchmark(toy(), [(5, 9)], results, CPU, torch.float32, decode=True, settings=FEW)
    step_operator_benchmark(shapes_of("toy", (32, 16)), [6], results, CPU, torch.float32, settings=FEW)
    chunk_operator_benchmark(
        shapes_of("toy", (16,)), [(2, 150)], results, CPU, torch.float32, backward=(False, True), settings=FEW
    )
    measured = {
        (row.cell.what, row.cell.key_width, row.cell.way, row.cell.state_dtype, row.cell.backward)
        for row in results.rows
        if row.status == "measured"
    }
    assert {row.status for row in results.rows} == {"measured", "not here"}
    for width in (32, 16):
        assert {
            ("prefill", width, "lapcli", "float32", False),
            ("prefill mixer", width, "lapcli", "float32", False),
            ("decode mixer", width, "lapcli", "float32", False),
            ("decode operator", width, "lapcli", "float32", False),
            ("decode operator", width, "pytorch", "bfloat16", False),
        } <= measured
    for backward in (False, True):
        assert ("prefill operator", 16, "lapcli", "float32", backward) in measured
    assert all(row.over_floor > 0 for row in results.rows if row.status == "measured")


@pytest.mark.parametrize("what", ["decode", "prefill", "backward"])
def test_an_operator_that_is_wrong_has_no_speed(monkeypatch, what):
    results = collected()
    if what == "decode":
        import lapkernels.delta_step as module

        right = module.delta_step
        monkeypatch.setattr(module, "delta_step", lambda *a, impl, **k: right(*a, impl=impl, **k) * 1.001)
        monkeypatch.setattr(step_operator.StepCase, "step", _definition(right))
        step_operator_benchmark(shapes_of("toy"), [6], results, CPU, torch.float32, ways=("lapcli",), settings=FEW)
    else:
        from lapkernels.delta_rule import api

        right = api.delta_rule_chunked

        class Leaky(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.001 if what == "prefill" else x.clone()

            @staticmethod
            def backward(ctx, gradient):
                return 1.001 * gradient

        monkeypatch.setattr(api, "delta_rule_chunked", lambda q, *rest: right(Leaky.apply(q), *rest))
        chunk_operator_benchmark(
            shapes_of("toy"), [(2, 150)], results, CPU, torch.float32, backward=(what == "backward",),
            ways=("lapcli",), settings=FEW,
        )  # fmt: skip
    assert {row.status for row in results.rows} == {"wrong"}
    assert all(row.seconds is None for row in results.rows)


def _definition(right):
    """The case's own comparison, by the function as it was."""
    step = step_operator.StepCase.step

    def inner(self, *arguments):
        import lapkernels.delta_step as module

        slipped, module.delta_step = module.delta_step, right
        try:
            return step(self, *arguments)
        finally:
            module.delta_step = slipped

    return inner


class _FakeFla:
    """A model whose cache keeps a dictionary a layer, as fla's does, and writes a new state beside the old one."""

    class Config:
        model_type = "fake"

    def __init__(self):
        self.seen = []

    def forward(self, input_ids, use_cache, logits_to_keep, past_key_values):
        class Layer:
            state = None

        class Cache:
            def __init__(self):
                self.layers = [Layer()]

        cache = past_key_values or Cache()
        before = 0.0 if cache.layers[0].state is None else float(cache.layers[0].state["recurrent_state"])
        self.seen.append(before)
        cache.layers[0].state = cache.layers[0].state or {}
        cache.layers[0].state["recurrent_state"] = torch.tensor(before + float(input_ids.sum()))
        logits = torch.nn.functional.one_hot(torch.full((input_ids.shape[0], 1), 3), 5).double()

        class Output(dict):
            pass

        output = Output(past_key_values=cache)
        output.logits = logits
        return output

    def __call__(self, **options):
        return self.forward(**options)


def test_a_step_to_be_captured_begins_from_the_same_state_each_time():
    model = _FakeFla()
    way = LibraryDecode(model, piece=2, graph=True)
    way.start(torch.ones(1, 5, dtype=torch.int64))
    assert model.seen == [0, 2, 4]  # the prompt in pieces of two
    run = way.call(torch.tensor([7]))
    for _ in range(3):
        run()
    assert model.seen[3:] == [5, 5, 5]
    eager = LibraryDecode(model, piece=2)
    eager.start(torch.ones(1, 5, dtype=torch.int64))
    model.seen.clear()
    run = eager.call(torch.tensor([7]))
    for _ in range(3):
        run()
    # The first token, then the likeliest one, twice; each from where the one before ended.
    assert model.seen == [5, 12, 15]


def test_rows_that_repeat_a_prompt_have_its_state():
    way = decode.EngineDecode(Model(toy("0")[0], CPU, torch.float32).ours, 6, 64, torch.float32)
    prompts = torch.randint(0, 259, (4, 9), generator=torch.Generator().manual_seed(0)).repeat(2, 1)[:6]
    logits = way.start(prompts)
    after = way.step(torch.tensor([5, 6, 7, 8, 5, 6]))
    # Rows at the end of a product's block may be added up in another order.
    for found in (logits, after):
        torch.testing.assert_close(found[4:], found[:2], rtol=1e-5, atol=1e-5)
    assert (after[0] - after[1]).abs().max() > 0.01


def test_memory_counts_sequences_and_takes_fewer_where_a_step_needs_room(monkeypatch):
    (whole,) = toy("0")
    model = Model(whole, CPU, torch.float32)
    weights = sum(value.nbytes for value in model.ours.parameters())
    each = whole.state_bytes() + whole.convolution_bytes(4)
    asked = []

    def at_rows(_model, rows, _context, _settings):
        asked.append(rows)
        peak = weights + rows * each + 2.5 * each
        return decode.measure(lambda: None, CPU, repeats=1, trials=1), int(peak)

    monkeypatch.setattr(decode, "_at_rows", at_rows)
    results = collected()
    memory_benchmark([whole], weights + 10.5 * each, results, Models(CPU, torch.float32), context=9, settings=FEW)
    (row,) = results.rows
    assert asked == [10, 8]
    assert (row.cell.batch, row.more["fit"], row.more["sequence_bytes"]) == (8, 10, each)
    assert row.detail == ""
    results = collected()
    memory_benchmark([whole], weights, results, Models(CPU, torch.float32), context=9, settings=FEW)
    assert (results.rows[0].status, results.rows[0].cell.batch) == ("out of memory", 0)


def test_memory_counts_whole_pages(monkeypatch):
    """A Transformer, 70 tokens a sequence: two pages of 64 in each of four layers, two heads of 16."""
    whole = converted_subject("toy-llama", CONFIGS["toy-llama"], "0")
    models = Models(CPU, torch.float32)
    weights = sum(value.nbytes for value in {id(x): x for x in models.get(whole).ours.parameters()}.values())
    each = 128 * 4 * 2 * 2 * 16 * 4
    timing = decode.measure(lambda: None, CPU, repeats=1, trials=1)
    monkeypatch.setattr(decode, "_at_rows", lambda *_: (timing, None))
    results = collected()
    memory_benchmark([whole], weights + 3.9 * each, results, models, context=70, settings=FEW)
    (row,) = results.rows
    assert (row.cell.batch, row.more["fit"], row.more["sequence_bytes"]) == (3, 3, each)


def test_half_the_state_fits_nearly_twice_the_sequences():
    results = collected()
    memory_benchmark(toy(), 2**20, results, Models(CPU, torch.float32), context=9, most_rows=4, settings=FEW)
    base, half = results.rows
    assert {base.status, half.status} == {"measured"}
    assert half.more["fit"] > 1.9 * base.more["fit"]
    assert base.cell.batch == half.cell.batch == 4


@pytest.mark.parametrize(
    ("slip", "right"),
    [(0.0, True), (1e-9, True), (1e-3, False), (float("nan"), False)],
    ids=["none", "rounding", "a slip", "not finite"],
)
def test_the_gate_allows_rounding_and_nothing_more(slip, right):
    truth = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = truth.repeat(3, 1)[:5] + slip
    found = compare(actual, truth, truth.float(), torch.float32)
    assert found.right is right


def test_the_gate_looks_at_every_row_and_shape():
    truth = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = truth.repeat(20, 1)
    actual[-1, -1] += 1
    assert not compare(actual, truth, truth.float(), torch.float32).right
    assert not compare(actual[:, :4], truth, truth.float(), torch.float32).right


def test_configs_are_pruned_as_slicing_prunes_them():
    whole, half, quarter = toy("0", "0.5", "0.75")
    assert whole.config == CONFIGS["toy"]
    assert [one.key_width for one in (whole, half, quarter)] == [32, 16, 8]
    assert {one.value_width for one in (whole, half, quarter)} == {64}
    qwen = subject("q", CONFIGS["qwen3.5-like"], "0.5")
    assert (qwen.key_heads, qwen.value_heads, qwen.key_width, qwen.value_width) == (16, 32, 64, 128)
    gdn = subject("gdn", CONFIGS["gdn"], 0)
    # What targets are written for: 24 layers of 6 heads, K 256, V 512, fp32.
    assert gdn.state_bytes() == 24 * 6 * 256 * 512 * 4


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda _: read_config("nothing"), ModelError, "neither one of gdn"),
        (lambda path: read_config(str(_written(path, "{"))), ModelError, "no JSON"),
        (lambda path: read_config(str(_written(path, "{}"))), ModelError, "no model_type"),
        (lambda _: subject("toy", CONFIGS["toy"], "x"), UsageError, "no number"),
        (lambda _: subject("toy", CONFIGS["toy"], "50"), UsageError, "did you mean 0.5"),
    ],
    ids=["no config", "not JSON", "no type", "no ratio", "percent"],
)
def test_what_is_no_model_is_refused(tmp_path, call, error, said):
    with pytest.raises(error, match=said):
        call(tmp_path / "config.json")


def _written(path, text):
    path.write_text(text)
    return path


def test_rows_that_fit():
    assert rows_that_fit(100, 10, 30) == 3
    assert rows_that_fit(100, 200, 30) == 0


def test_an_operators_floor_is_its_states_twice():
    results = collected()
    shape = Shape("toy", 2, 4, 16, 32)
    step_operator_benchmark([shape], [6], results, CPU, torch.float32, ways=("lapcli",), settings=FEW)
    by_state = {row.cell.state_dtype: row for row in results.rows}
    assert by_state["float32"].floor_seconds == 2 * 6 * 4 * 16 * 32 * 4 / 1e9
    assert by_state["bfloat16"].floor_seconds == by_state["float32"].floor_seconds / 2


def test_rows_of_newer_versions_are_read():
    document = Row(decode.cell_of(toy("0")[0], "decode", "lapcli", 1, 9), "measured", seconds=1.0).to_json()
    assert Row.from_json(document | {"watts": 700}).more["watts"] == 700
    assert replace(Row.from_json(document), more={}).to_json() == document


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_fla_is_there_too():
    device = torch.device("cuda")
    results = Results("x", {**MACHINE, "copy_bytes": 4e12})
    config = {**CONFIGS["toy"], "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 512}
    subjects = [subject("mid", config, ratio) for ratio in ("0", "0.5")]
    decode_benchmark(subjects, (8, 1), results, Models(device, torch.bfloat16), contexts=(70,), settings=FEW)
    bad = [row for row in results.rows if row.status not in ("measured", "not here")]
    assert not bad, bad
    ways = {row.cell.way for row in results.rows if row.status == "measured"}
    assert {"lapcli", "fla graph", "fla"} <= ways
    assert all(
        row.graphed for row in results.rows if row.cell.way in ("lapcli", "fla graph") and row.graphed is not None
    )
