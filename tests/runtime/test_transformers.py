"""Transformers built like Llama, and converted ones, in the engine: logits of the library's own pass over each row."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lapcli.runtime.layers
import lapcli.runtime.llama_models
from lapcli.errors import ModelError
from lapcli.families.dual_state import TEACHERS
from lapcli.families.loading import load_model
from lapcli.families.remote.lapcli_dual_state import dual_state_layers
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.runtime.llama_models import TRANSFORMERS
from lapcli.testing.decoding import distance, full_logits, held_tensors, prompts_of, spoil
from lapcli.testing.dual_state import converted, converted_source, tiny_source, tiny_teacher
from lapkernels.attend_step import attend_step

# As for other models: fp32 sums in another order.
FP32 = 1e-5
# The library's RMS norms are in fp32 even in an fp64 model; LayerNorms are not.
FP64 = {"phi": 1e-13}
CASES = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, (), {}),
    "mistral, window": ("mistral", {"sliding_window": 6}, (), {}),
    "qwen2, windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        (),
        {},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}, (), {}),
    "smollm3": ("smollm3", {}, (), {}),
    "phi": ("phi", {}, (), {}),
    "phi3, window": ("phi3", {"sliding_window": 7}, (), {}),
    "phi3, half of a head turns": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        (),
        {},
    ),
    "llama, two layers": ("llama", {}, (2, 0), {}),
    "mistral, one layer, window": ("mistral", {"sliding_window": 6}, (0,), {}),
    "qwen2, three states": ("qwen2", {}, (1,), {"states": 3}),
    "qwen3, all": ("qwen3", {}, (1, 0, 2), {}),
    "smollm3, one wide state": ("smollm3", {}, (0, 1), {"states": 1, "width": 2}),
    "phi, all": ("phi", {}, (0, 1, 2), {}),
    "phi3, cut": ("phi3", {}, (2, 1), {"key_width": 5}),
    "llama, cut, wide": ("llama", {}, (0,), {"key_width": 3, "width": 2}),
}


def made(name, dtype=torch.float32):
    """The library's model of a case."""
    kind, change, layers, settings = CASES[name]
    model = tiny_teacher(kind, dtype=dtype, **change)
    if layers:
        model = converted(model, *layers, **settings)
        model.config.model_type = f"lapcli_dual_state_{kind}"
        for layer in dual_state_layers(model).values():
            if layer.settings.key_width is not None:
                # Which channels are left differs from head to head.
                generator = torch.Generator().manual_seed(layer.layer_idx)
                kept = [torch.randperm(layer.head_dim, generator=generator) for _ in range(layer.key_heads)]
                channels: Any = layer.key_channels
                channels.copy_(torch.cat([order[: layer.settings.key_width] for order in kept]))
    return model


def test_every_type_has_a_case():
    assert {kind for kind, _, layers, _ in CASES.values() if not layers} == TEACHERS.keys()
    assert {kind for kind, _, layers, _ in CASES.values() if layers} == TEACHERS.keys()
    assert TRANSFORMERS.keys() == {prefix + kind for kind in TEACHERS for prefix in ("", "lapcli_dual_state_")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_logits_of_one_pass(name, dtype):
    """Unequal prompts in one batch, steps, a row that leaves, one in its slot, pieces, and NaN in free slots."""
    reference = made(name, dtype)
    engine = Engine(copy.deepcopy(reference), max_rows=4, max_length=64, thin=2)
    assert engine.path.name == "fused"
    kind, _, layers, _ = CASES[name]
    assert list(engine.plan.recurrent) == sorted(layers)
    assert list(engine.plan.attention) == sorted({0, 1, 2} - set(layers))
    bound = FP32 if dtype == torch.float32 else FP64.get(kind, 1e-6)
    rows = prompts_of(1, 7, 19, high=60)
    done = engine.prefill_rows(rows)
    slots = [found.slot for found in done]

    def check(prefilled, count):
        """Steps, then the logits of prefills and of all steps against one pass over each row."""
        found = [prefilled]
        for step in range(count):
            for row in rows:
                row.append(3 + (step * 37 + len(row)) % 57)
            found.append(list(engine.step([row[-1] for row in rows], slots).clone()))
        for number, row in enumerate(rows):
            ours = torch.stack([logits[number] for logits in found if logits[number] is not None])
            for mine, wanted in zip(ours, full_logits(reference, row, len(ours)), strict=True):
                assert distance(mine, wanted) < bound

    check([found.logits for found in done], 3)
    engine.release(slots[1])
    spoil(engine, {slots[0], slots[2]})
    rows[1] = prompts_of(10, seed=3, high=60)[0]
    slots[1], second = engine.prefill(rows[1], piece=4)
    rows[0] += prompts_of(5, seed=4, high=60)[0]
    check([engine.prefill(rows[0][-5:], slots[0]).logits, second, None], 2)
    # Few rows: norms and sums within products, where blocks have RMS norms.
    assert distance(engine.step([5], slots[2:])[0], full_logits(reference, [*rows[2], 5])) < bound


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3, cut", "phi"])
def test_few_rows_do_norms_and_sums_within_products(name, monkeypatch):
    calls = []
    for module in (lapcli.runtime.layers, lapcli.runtime.llama_models):
        plain = module.thin_linear
        monkeypatch.setattr(module, "thin_linear", lambda *a, f=plain, **k: calls.append(1) or f(*a, **k))
    engine = Engine(made(name), max_rows=2, max_length=8, thin=1)
    slots = [found.slot for found in engine.prefill_rows(prompts_of(4, 3, high=60))]
    engine.step([5, 6], slots)
    assert not calls
    engine.step([5], slots[:1])
    # Two of each mixer, two of each MLP, the head; Phi's parts share a LayerNorm, which no product has.
    assert len(calls) == (0 if name == "phi" else 3 * 4 + 1)


@pytest.mark.parametrize("name", ["llama", "qwen2, windows", "qwen3", "phi3, cut", "phi"])
def test_products_of_few_rows(name, few_products):
    """By kernels of their own, with biases where there are such, sums left to the norms: the same logits."""
    reference = made(name)
    engine = Engine(copy.deepcopy(reference), max_rows=3, max_length=32, few=3)
    rows = prompts_of(4, 3, 9, high=60)
    slots = [found.slot for found in engine.prefill_rows(rows)]
    for logits, row in zip(engine.step([5, 6, 7], slots), rows, strict=True):
        assert distance(logits, full_logits(reference, [*row, 5 + rows.index(row)])) < FP32
    # Two of each mixer, two of each MLP, the head; Phi's mixers leave no sum, and its MLPs are the library's.
    assert few_products == ([False] * (3 * 2 + 1) if name == "phi" else [False, True, "gated", True] * 3 + [False])


def test_samples_do_not_depend_on_the_batch():
    """Rows that share steps with others, join late and leave early, in a batch with padding."""
    for name in ("llama", "llama, two layers", "phi, all"):
        model, prompts = made(name), prompts_of(3, 6, 4, 9, high=60)
        settings = [GenerationSettings(max_new_tokens=count, temperature=1.0, seed=count) for count in (9, 3, 6, 5)]
        found = []
        for together in ([0], [1], [2], [3], [0, 1, 2, 3]):
            engine = Engine(model, max_rows=3, max_length=20)
            batch, tokens = Batch(engine), {}
            for row in together:
                batch.add(prompts[row], settings[row])
            while batch.unfinished:
                for event in batch.advance():
                    tokens.setdefault(event.row, []).extend(event.tokens)
            found.append(tokens)
        assert [found[4][row] for row in range(4)] == [found[row][0] for row in range(4)]


def test_padding_rows_read_and_write_nothing():
    for name in ("llama", "llama, two layers"):
        engine = Engine(made(name), max_rows=3, max_length=16)
        (row,) = prompts_of(5, high=60)
        slot = engine.prefill(row).slot
        spoil(engine, {slot})
        *before, pages = [tensor.isnan() for tensor in held_tensors(engine)]
        engine.steps.set_rows([7], [slot], [5])
        logits = engine.steps.run(3)
        assert distance(logits[0], full_logits(made(name), [*row, 7])) < FP32
        *after, pages_after = [tensor.isnan() for tensor in held_tensors(engine)]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        # One more token of each attention layer, of two key heads with keys and values of 8 numbers.
        assert int(pages.sum() - pages_after.sum()) == len(engine.plan.attention) * 2 * (8 + 8)
        assert all(not x.isnan().any() for pool in engine.plan.attention.values() for x in pool.read(slot, 6))


def test_a_checkpoint_with_its_code(tmp_path):
    """From disk, as `generate` loads it: converted layers run their own step, the others attention's."""
    source, reference = converted_source(tiny_source("llama", tmp_path / "base"), tmp_path / "dsla")
    engine = Engine.load(source, max_rows=2, max_length=40)
    assert engine.path.reason.startswith("2 layers with a state, 1 attention layer")
    (row,) = prompts_of(12)
    slot = engine.prefill(row).slot
    for token in (7, 8, 9):
        row.append(token)
        assert distance(engine.step([token], [slot])[0], full_logits(reference, row)) < FP32
    held = engine.nbytes()
    # Two layers of two states of two heads; one of a page of 64 tokens for each of two slots.
    assert held["states"] == 2 * 2 * 2 * 2 * 8 * 8 * 4
    assert held["attention"] == 2 * 64 * 2 * (8 + 8) * 4


def test_a_fully_converted_model_has_no_longest_row(tmp_path):
    source, reference = converted_source(tiny_source("llama", tmp_path / "base"), tmp_path / "dsla", (2, 0, 1))
    engine = Engine.load(source, max_length=8)
    (row,) = prompts_of(30)
    slot = engine.prefill(row).slot
    assert not engine.limited
    assert distance(engine.step([4], [slot])[0], full_logits(reference, [*row, 4])) < FP32


def test_states_in_half_precision_are_near():
    engine = Engine(made("qwen3, all"), max_rows=2, state_dtype=torch.bfloat16)
    (row,) = prompts_of(9, high=60)
    slot = engine.prefill(row).slot
    reference = made("qwen3, all")
    for step in range(5):
        row.append(5 + step)
        # Each of the roundings is 2^-9 of a state; their errors add up over steps and layers.
        assert distance(engine.step(row[-1:], [slot])[0], full_logits(reference, row)) < 3 * 6 * 2**-9


def test_bf16_logits_are_as_near_as_the_librarys(tmp_path):
    for name in ("qwen2, windows", "llama, two layers", "qwen3, all"):
        truth, plain = made(name), made(name).to(torch.bfloat16)
        engine = Engine(made(name).to(torch.bfloat16), max_length=32)
        (row,) = prompts_of(12, high=60)
        slot, off, allowed = engine.prefill(row).slot, [], []
        for token in (4, 9, 20):
            row.append(token)
            wanted = full_logits(truth, row)
            off.append(distance(engine.step([token], [slot])[0].float(), wanted))
            allowed.append(distance(full_logits(plain, row).float(), wanted))
        assert max(off) < 2 * max(allowed) + 2**-8


def test_what_does_not_fit_runs_by_the_library_and_says_why():
    windowed = converted(tiny_teacher("llama"), 1, window=6)
    windowed.config.model_type = "lapcli_dual_state_llama"

    class Factored(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.weight, self.inner = linear.weight, linear

        def forward(self, x):
            return self.inner(x)

    adapted = tiny_teacher("qwen2")
    adapted.model.layers[1].self_attn.k_proj = Factored(adapted.model.layers[1].self_attn.k_proj)
    stretched = tiny_teacher("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    for model, why in (
        (windowed, "window with sinks"),
        (adapted, "a projection of layer 1 is a Factored"),
        (stretched, "depends on the row's length"),
    ):
        reference = copy.deepcopy(model)
        engine = Engine(model)
        assert engine.path.name == "eager"
        assert why in engine.path.reason
        (row,) = prompts_of(8, high=60)
        slot = engine.prefill(row).slot
        assert distance(engine.step([4], [slot])[0], full_logits(reference, [*row, 4])) < FP32


def test_an_mlp_with_another_activation_stays_the_librarys():
    for kind in ("llama", "phi3"):
        reference = tiny_teacher(kind, hidden_act="gelu")
        engine = Engine(copy.deepcopy(reference), thin=1)
        (row,) = prompts_of(8, high=60)
        slot = engine.prefill(row).slot
        assert engine.path.name == "fused"
        assert distance(engine.step([4], [slot])[0], full_logits(reference, [*row, 4])) < FP32


def test_two_engines_of_one_model():
    """Projections become views once more; the library's pass still reads the same."""
    model = made("phi3, cut")
    first, (row,) = Engine(model, max_length=16), prompts_of(6, high=60)
    wanted = full_logits(made("phi3, cut"), [*row, 5])
    second = Engine(model, max_length=16)
    for engine in (first, second):
        assert distance(engine.step([5], [engine.prefill(row).slot])[0], wanted) < FP32
    assert distance(full_logits(model, [*row, 5]), wanted) < FP32


def test_a_row_ends_where_attention_has_no_more_room():
    engine = Engine(made("llama"), max_length=8)
    with pytest.raises(ModelError, match="a row of 9 tokens; the attention layers have room for 8"):
        engine.prefill(list(range(3, 12)))


def test_a_window_is_the_layers_own(monkeypatch):
    """Kernels are told of windows layer by layer."""
    seen = []
    monkeypatch.setattr(
        lapcli.runtime.llama_models, "attend_step", lambda *a, **k: seen.append(k["window"]) or attend_step(*a, **k)
    )
    for name in ("llama", "mistral, window", "qwen2, windows", "phi3, window"):
        engine = Engine(made(name), max_length=16)
        engine.step([5], [engine.prefill([4, 5, 6]).slot])
    assert seen == [None, None, None, 6, 6, 6, None, 5, None, 7, 7, 7]


def test_loading_a_teacher_from_disk(tmp_path):
    for kind in ("phi", "mistral"):
        source = tiny_source(kind, tmp_path / kind)
        engine, (row,) = Engine.load(source, max_length=16), prompts_of(6)
        assert engine.path.reason.startswith("3 attention layers")
        assert (
            distance(engine.step([5], [engine.prefill(row).slot])[0], full_logits(load_model(source), [*row, 5])) < FP32
        )
