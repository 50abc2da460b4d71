"""Stock transformers models in the engine: logits of the one full pass of the library's own class, for each family."""

import pytest
import torch

import lapcli.runtime.layers
import lapcli.runtime.mamba
from lapcli.errors import ModelError
from lapcli.families.loading import load_model, resolve_model
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.runtime.layers import DirectPart, GatedMlp, SplitPart, Sum
from lapcli.runtime.llama_models import TRANSFORMERS
from lapcli.runtime.planned import PLANS
from lapcli.testing.decoding import cached_logits, distance, full_logits, prompts_of, spoil
from lapcli.testing.slices import random_kept, sliced_by
from lapcli.testing.stock_models import STOCK_MODELS, tiny_stock_model

# transformers warns of what it deprecates, and fla of a machine without a GPU.
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = {
    "qwen3_next": {},
    "qwen3_5": {},
    "qwen3_5_moe": {"multimodal": True},
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "lara_mini": {"sliding_window": 6},
    "kimi_linear": {},
    "bailing_hybrid": {},
    "mamba2": {"n_groups": 2, "time_step_limit": (0.4, 0.6)},
    "bamba": {"mamba_n_groups": 2},
    "falcon_h1": {},
    "granitemoehybrid": {"residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "nemotron_h": {},
    "zamba2": {},
    "glm5_next": {},
    "qwen4_exp": {},
}
BY_THE_LIBRARY = {"glm5_next", "qwen4_exp"}
# As for lapcli's own models.
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=CASES)
def models(request, tmp_path_factory):
    """The library's model, and another one for an engine."""
    folder = tiny_stock_model(request.param, tmp_path_factory.mktemp(request.param) / "m", **CASES[request.param])
    source = resolve_model(str(folder))
    return request.param, load_model(source), load_model(source)


def tolerance(model, rows):
    """`TOLERANCE`, or twice what the library's own decoding is off, where experts make rounding grow; never much more.

    (The library does not clamp Mamba's steps when it decodes, so that it may be off by anything.)
    """
    off = [distance(cached_logits(model, row[:-1], row[-1:])[0], full_logits(model, row)) for row in rows]
    return min(max(TOLERANCE, 2 * max(off)), 3 * TOLERANCE)


def test_every_family_has_a_case():
    assert CASES.keys() == STOCK_MODELS.keys()
    narrow = {f"lapcli_{name}" for name in ("kimi_linear", "bailing_hybrid")}
    assert {
        name.removesuffix("_text") for name in PLANS.keys() - TRANSFORMERS.keys()
    } == CASES.keys() - BY_THE_LIBRARY | narrow


def test_logits_of_one_pass(models):
    """Unequal prompts in one batch, steps, a row that leaves, one in its slot, pieces, and NaN in free slots."""
    name, reference, model = models
    engine = Engine(model, max_rows=4, max_length=64)
    assert engine.path.name == ("eager" if name in BY_THE_LIBRARY else "fused")
    rows = prompts_of(1, 7, 19)
    bound = tolerance(reference, [*rows[1:], prompts_of(30)[0]])
    done = engine.prefill_rows(rows)
    slots = [found.slot for found in done]

    def check(prefilled, count):
        """Steps, then the logits of prefills and of all steps against one pass over each row."""
        found = [prefilled]
        for step in range(count):
            for row in rows:
                row.append(3 + (step * 37 + len(row)) % 250)
            found.append(list(engine.step([row[-1] for row in rows], slots).clone()))
        for number, row in enumerate(rows):
            ours = torch.stack([logits[number] for logits in found if logits[number] is not None])
            for mine, wanted in zip(ours, full_logits(reference, row, len(ours)), strict=True):
                assert distance(mine, wanted) < bound

    check([found.logits for found in done], 4)
    engine.release(slots[1])
    spoil(engine, {slots[0], slots[2]})
    rows[1] = prompts_of(10, seed=3)[0]
    slots[1], second = engine.prefill(rows[1], piece=4)
    rows[0] += prompts_of(5, seed=4)[0]
    check([engine.prefill(rows[0][-5:], slots[0]).logits, second, None], 2)


def test_samples_do_not_depend_on_the_batch(models):
    """Rows that share steps with others, in a batch with padding, draw what they draw alone."""
    name, _, model = models
    if name in BY_THE_LIBRARY:
        pytest.skip("rows never share a step there")
    settings = GenerationSettings(max_new_tokens=5, temperature=1.0, seed=3)
    prompts, found = prompts_of(3, 6, 4), []
    for together in ([0], [1], [2], [0, 1, 2]):
        engine = Engine(model, max_rows=4, max_length=16)
        batch = Batch(engine)
        for row in together:
            batch.add(prompts[row], settings)
        tokens = {}
        while batch.unfinished:
            for event in batch.advance():
                tokens.setdefault(event.row, []).extend(event.tokens)
        found.append(tokens)
    assert [found[3][row] for row in range(3)] == [found[row][0] for row in range(3)]


def test_few_rows_within_products(models, monkeypatch):
    """Norms and sums done by the products of a part, wherever it has such: the same logits."""
    name, reference, model = models
    calls = []
    for module in (lapcli.runtime.layers, lapcli.runtime.mamba):
        plain = module.thin_linear
        monkeypatch.setattr(module, "thin_linear", lambda *a, f=plain, **k: calls.append(1) or f(*a, **k))
    engine = Engine(model, max_rows=3, max_length=64, thin=2)
    if name in BY_THE_LIBRARY:
        return
    _three_rows_and_two(engine, reference, calls)
    direct = sum(isinstance(sub.part, DirectPart) and sub.after is None for sub in engine.plan.sublayers)
    assert len(calls) == 2 * direct + 1


def _three_rows_and_two(engine, reference, calls):
    """A step of three rows, more than there are such calls for, and one of two: logits of whole prompts."""
    rows = prompts_of(4, 9, 2)
    bound = tolerance(reference, rows)
    slots = [found.slot for found in engine.prefill_rows(rows)]
    engine.step([5, 6, 7], slots)
    assert not calls
    found = engine.step([8, 9], slots[:2])
    for row, taken, logits in zip(rows, ((5, 8), (6, 9)), found, strict=False):
        assert distance(logits, full_logits(reference, [*row, *taken])) < bound


def _gated_mlps(part):
    """How many of them a part is or has, among its own parts."""
    if isinstance(part, Sum):
        return sum(_gated_mlps(each) for _, each, _ in part.parts)
    return isinstance(part, GatedMlp)


def test_products_of_few_rows(models, few_products):
    """By kernels of their own, sums left to what reads them, whatever that is: the same logits."""
    name, reference, model = models
    engine = Engine(model, max_rows=3, max_length=64, few=2)
    if name in BY_THE_LIBRARY:
        return
    _three_rows_and_two(engine, reference, few_products)
    split = sum(isinstance(sub.part, SplitPart) and sub.after is None for sub in engine.plan.sublayers)
    assert few_products.count(True) == split
    # Parts within others, or with a norm behind them, leave no sum.
    assert len(few_products) >= 2 * split + 1
    parts = [sub.part for sub in engine.plan.sublayers]
    assert few_products.count("gated") == sum(map(_gated_mlps, parts))


@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid", "qwen3_next", "mamba2"])
def test_slices(tmp_path, name):
    """Models with their key width cut, KDA's with code of their own among them."""
    base = resolve_model(str(tiny_stock_model(name, tmp_path / "base")))
    source = sliced_by(base, random_kept(base, 12), tmp_path)
    reference, engine = load_model(source), Engine(load_model(source), max_length=32)
    assert engine.path.name == "fused"
    (row,) = prompts_of(9)
    bound = tolerance(reference, [row])
    slot = engine.prefill(row).slot
    for _ in range(4):
        row.append(row[-2])
        assert distance(engine.step(row[-1:], [slot])[0], full_logits(reference, row)) < bound


def test_a_row_ends_where_an_attention_layer_is_full(tmp_path):
    source = resolve_model(str(tiny_stock_model("qwen3_5", tmp_path / "m")))
    engine = Engine(load_model(source), max_length=8)
    with pytest.raises(ModelError, match="a row of 9 tokens; the attention layers have room for 8"):
        engine.prefill(list(range(3, 12)))
    (row,) = prompts_of(6)
    events = list(engine.generate([row], GenerationSettings(max_new_tokens=20)))
    # Tokens 6 and 7 are taken in; what follows them is shown, and has no room.
    assert [event.reason for event in events] == [None, None, "full"]
    slot = engine.prefill(row).slot
    engine.step([1], [slot])
    engine.step([1], [slot])
    with pytest.raises(ModelError, match="9 tokens"):
        engine.step([1], [slot])


def test_an_engine_from_a_stock_config():
    config = {
        "model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    engine = Engine.from_config(config, dtype=torch.bfloat16, max_rows=2, max_length=40)
    slots = engine.occupy(2, 30)
    assert engine.decode([1, 2], 5, slots).shape == (5, 2)
    found = engine.nbytes()
    # Two pages of 64 tokens, one head of 16, keys and values in bf16; three layers of 2 x 16 x 16 in fp32.
    assert found["attention"] == 2 * 64 * 16 * 2 * 2
    assert found["states"] == 3 * 2 * 2 * 16 * 16 * 4
