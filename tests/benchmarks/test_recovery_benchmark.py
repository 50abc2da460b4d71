import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lapcli.benchmarks import recovery
from lapcli.benchmarks.recovery import (
    LARGE,
    SMALL,
    WAYS,
    RecoverySizes,
    SyntheticStream,
    flop_per_token,
    recovery_benchmark,
)
from lapcli.errors import ModelError
from lapcli.families.loading import load_model
from lapcli.families.source import resolve_model
from lapcli.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.training.adapters import apply_adapters, plan_adapters, trained_parameters

# Memory is freed after each way.
pytestmark = pytest.mark.usefixtures("older_objects_left_alone")

TOY = RecoverySizes(seq_len=48, batch=4, warmup=1, steps=2)
ROUNDING = 1e-5  # fp32, as the contract of families


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    source = resolve_model(str(tiny_gated_deltanet(tmp_path_factory.mktemp("model"))))
    return recovery_benchmark(source, sizes=TOY, random_model=SMALL)


def test_every_way_of_both_models_is_measured(rows):
    assert [row.way for row in rows] == [*WAYS, *WAYS]
    for row in rows:
        assert (row.tokens, row.micro_batch, row.kernel) == (4 * 48, 4, "chunked")
        assert row.tokens_per_second == pytest.approx(row.tokens / row.step_seconds)
        assert row.flops == pytest.approx(row.flop_per_token * row.tokens / row.step_seconds)
        assert row.share_of_product == pytest.approx(row.flops / row.product_flops)
        # A CPU is no chip that is known, and its memory is not measured.
        assert (row.share_of_nominal, row.peak_bytes) == (None, None)


def test_ways_with_a_teacher_compute_the_same(rows):
    losses = {row.way: row.loss for row in rows[len(WAYS) :]}
    for way in ("dense loss", "checkpointing"):
        assert losses[way] == pytest.approx(losses["lapcli"], rel=ROUNDING)
    assert losses["no teacher"] < losses["lapcli"] * (1 - 100 * ROUNDING)


def small_case(sizes=TOY, **config):
    config = GatedDeltaNetConfig(**{**SMALL, **config})
    student, teacher = (
        recovery._random(config, torch.device("cpu"), torch.float32, "chunked", seed) for seed in (0, 1)
    )
    plan = plan_adapters(student, config.to_dict())
    teacher.requires_grad_(False)
    return recovery._Case("small", apply_adapters(student, plan), teacher, plan, sizes, 1.0), config


@pytest.mark.parametrize(
    "fields",
    [{}, {"num_v_heads": 4, "head_dim": 32, "expand_v": 0.5}],
    ids=["one value head a key head", "two value heads"],
)
def test_flop_are_those_that_torch_counts(fields):
    """Torch counts matrix products alone, of this very step; what it passes over or adds is named."""
    tokens, chunk = 256, 64
    case, config = small_case(**fields)
    case.student.train()
    stream = SyntheticStream(config.vocab_size, tokens)
    document = recovery.PackedSequence(next(stream).ids, (0,), "one document")
    with FlopCounterMode(display=False) as counter:
        case._dense_loss(recovery.PackedBatch.of([document])).backward()
    value_heads = config.num_hidden_layers * (config.num_v_heads or config.num_heads)
    convolutions = sum(value.numel() for name, value in case.teacher.named_parameters() if "conv1d" in name)
    key_width, value_width = config.head_dim, int(config.head_dim * config.expand_v)
    # Triangular systems are not counted: forward in both models, twice as much backward in one. But there the gradient
    # of the inverse takes two whole products of squares.
    squares = -2 * chunk**2 - 2 * chunk**2 + 4 * chunk**2
    # What the state is multiplied with from chunk to chunk is made in both models, and takes the state's place forward
    # in both and backward in one.
    transitions = 4 * key_width**2 + 6 * key_width**2 * value_width / chunk
    # Erase and write directions are multiplied for each value head: forward in both, twice backward in one.
    shared = 1 - config.num_heads / (config.num_v_heads or config.num_heads)
    per_token = value_heads * (squares + transitions + 8 * chunk * key_width * shared)
    # Convolutions are sums of shifted rows: forward in both models, backward for inputs and for filters in one.
    per_token -= 4 * 2 * convolutions
    # The last token predicts nothing: forward in both models, backward in one.
    once = -3 * 2 * config.hidden_size * config.vocab_size
    wanted = flop_per_token(case.base, case.teacher, config.to_dict()) * tokens
    assert counter.get_total_flops() == wanted + per_token * tokens + once


def test_the_micro_batch_is_halved_until_it_fits(monkeypatch):
    case, _config = small_case()
    train = recovery._Case._train
    tried = []

    def small_memory(self, way, micro_batch):
        tried.append(micro_batch)
        result = train(self, way, micro_batch)
        if micro_batch == 4:
            raise ModelError("the memory is too small") from torch.OutOfMemoryError("CUDA out of memory.")
        if micro_batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result

    monkeypatch.setattr(recovery._Case, "_train", small_memory)
    row = case.row("lapcli")
    assert tried == [4, 2, 1]
    assert row.micro_batch == 1
    # The attempts before it trained the student, and left no trace.
    monkeypatch.setattr(recovery._Case, "_train", train)
    assert row.loss == pytest.approx(case.row("lapcli").loss, rel=ROUNDING)


def test_what_does_not_fit_has_no_figures_and_other_failures_are_told(monkeypatch):
    case, _config = small_case()

    def fail(message):
        def raise_it(*_arguments):
            raise RuntimeError(message)

        monkeypatch.setattr(recovery._Case, "_train", raise_it)

    fail("Triton Error [CUDA]: out of memory")
    row = case.row("dense loss")
    assert (row.micro_batch, row.step_seconds, row.tokens_per_second, row.flops, row.loss) == (None,) * 5
    fail("an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        case.row("dense loss")


def test_the_text_is_packed_and_repeats_with_its_seed():
    one, again = (SyntheticStream(50, 4000) for _ in range(2))
    first, same, second = next(one), next(again), next(one)
    assert torch.equal(first.ids, same.ids)
    assert first.starts == same.starts
    assert not torch.equal(first.ids, second.ids)
    assert first.starts[0] == 0
    assert len(first.starts) > 1
    assert int(first.ids.max()) == 49


def test_the_large_model_has_the_size_it_is_said_to_have():
    with torch.device("meta"):
        model = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**LARGE))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1.365e9, rel=1e-3)


def test_random_models_are_made_in_bf16_with_their_time_constants_in_fp32():
    config = GatedDeltaNetConfig(**SMALL)
    made = recovery._random(config, torch.device("cpu"), torch.bfloat16, "auto", 0)
    wide = {name.rpartition(".")[2] for name, value in made.named_parameters() if value.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias"}
    assert made.dtype == torch.bfloat16


def test_a_sliced_students_flop_shrink_by_its_recurrence_alone(tmp_path):
    """At half the key width only projections, filters and products with K get smaller."""
    found = []
    for width in (32, 16):
        source = resolve_model(str(tiny_gated_deltanet(tmp_path / str(width), head_dim=width, expand_v=32 / width)))
        model = load_model(source)
        student = apply_adapters(model, plan_adapters(model, source.config))
        base = student.get_base_model()
        trained = sum(value.numel() for value in trained_parameters(base).values() if value.ndim > 1)
        found.append(flop_per_token(base, None, source.config) - 2 * trained - 4 * recovery._weights(base))
    # Per token, three times forward: 2 layers x 2 heads x 2 (3 C K + 3 K V), with C = 64 and V = 32.
    assert found[0] - found[1] == 3 * 2 * 2 * 2 * 16 * (3 * 64 + 3 * 32)
