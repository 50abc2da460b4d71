"""Prompts of unlike lengths in one padded pass: the logits of a pass over each alone, then and in later steps."""

import pytest
import torch

from lapcli.errors import ModelError, UsageError
from lapcli.families.loading import load_model, resolve_model
from lapcli.runtime import Engine
from lapcli.runtime.prefill import OwnPrefiller
from lapcli.testing.decoding import cached_logits, distance, full_logits, held_tensors, prompts_of
from lapcli.testing.dual_state import converted_source, tiny_source
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet, tiny_qdelta
from lapcli.testing.stock_models import tiny_stock_model

pytestmark = pytest.mark.filterwarnings("ignore")

# As for prompts that go through alone: fp32 sums in another order, more of them where experts make rounding grow.
TOLERANCE = 1e-5
OWN = {
    "gdn": (tiny_gated_deltanet, {}),
    "no convolution": (tiny_gated_deltanet, {"use_short_conv": False}),
    "six taps": (tiny_gated_deltanet, {"conv_size": 6}),
    "delta net": (tiny_delta_net, {}),
    "q-delta": (tiny_qdelta, {"num_v_heads": 4}),
}
TEACHERS = {
    "llama": ("llama", {}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "phi": ("phi", {}),
}
STOCK = ("qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "mamba2", "nemotron_h", "zamba2")
ALL = [*OWN, *TEACHERS, "dual states", *STOCK]
# Shorter than any convolution, around a chunk of 16 and one of 64, and two alike.
LENGTHS = (19, 1, 2, 70, 3, 16, 17, 64, 65, 3)


def source_of(name, folder):
    if name in OWN:
        make, config = OWN[name]
        return resolve_model(str(make(folder, **config)))
    if name in TEACHERS:
        kind, config = TEACHERS[name]
        return tiny_source(kind, folder, **config)
    if name == "dual states":
        return converted_source(tiny_source("llama", folder / "teacher"), folder / "converted", (1,))[0]
    return resolve_model(str(tiny_stock_model(name, folder)))


def bound(model, rows):
    """`TOLERANCE`, or what the library's own steps are off where that is more; never more than three times it."""
    off = [distance(cached_logits(model, row[:-1], row[-1:])[0], full_logits(model, row)) for row in rows]
    return min(max(TOLERANCE, 2 * max(off)), 3 * TOLERANCE)


@pytest.mark.parametrize("name", ALL)
def test_rows_give_the_logits_of_one_pass_over_each(tmp_path, name):
    """In an engine whose slots held rows before, and in the steps that follow."""
    source = source_of(name, tmp_path / "m")
    reference = load_model(source)
    engine = Engine(load_model(source), max_rows=len(LENGTHS), max_length=96)
    rows = prompts_of(*LENGTHS)
    tolerance = bound(reference, [row for row in rows if len(row) > 16])
    for found in engine.prefill_rows(prompts_of(*[9] * len(LENGTHS), seed=4)):
        engine.release(found.slot)
    if engine.path.name == "fused":
        for tensor in held_tensors(engine):
            tensor.fill_(torch.nan)
    done = engine.prefill_together(rows)
    assert sorted(found.slot for found in done) == list(range(len(LENGTHS)))
    for row, found in zip(rows, done, strict=True):
        assert distance(found.logits, full_logits(reference, row)) < tolerance
    # Through the longest convolution.
    for step in range(6):
        for row in rows:
            row.append(3 + (step * 37 + len(row)) % 250)
        logits = engine.step([row[-1] for row in rows], [found.slot for found in done])
        if step in (0, 1, 5):
            for row, found in zip(rows, logits, strict=True):
                assert distance(found, full_logits(reference, row)) < tolerance


@pytest.mark.parametrize("name", ["gdn", "llama"])
def test_every_length_up_to_70(tmp_path, name):
    """With rows under way beside them, all lengths in one pass are what each is alone, and go on alike."""
    source = source_of(name, tmp_path / "m")
    alone, together = (Engine(load_model(source), max_rows=72, max_length=96) for _ in range(2))
    rows = prompts_of(*range(1, 71), seed=2)
    (before,) = prompts_of(11, seed=3)
    found = [alone.prefill(before), *alone.prefill_rows(rows)]
    others = [together.prefill(before), *together.prefill_together(rows)]
    for one, other in zip(found, others, strict=True):
        assert distance(other.logits, one.logits) < TOLERANCE
    tokens = [int(each.logits.argmax()) for each in found]
    for _ in range(4):
        wanted = alone.step(tokens, [each.slot for each in found])
        logits = together.step(tokens, [each.slot for each in others])
        for one, other in zip(wanted, logits, strict=True):
            assert distance(other, one) < TOLERANCE
        tokens = wanted.argmax(dim=1).tolist()


@pytest.mark.parametrize("name", ["gdn", "llama"])
def test_one_pass_is_one_pass(tmp_path, name):
    source = source_of(name, tmp_path / "m")
    model = load_model(source)
    engine = Engine(model, max_rows=8, max_length=96)
    seen = []
    hook = model.model.register_forward_pre_hook(lambda *_: seen.append(1))
    assert len(engine.prefill_together(prompts_of(5, 9, 1))) == 3
    hook.remove()
    assert len(seen) == 1
    assert engine.prefill_together([]) == []


@pytest.mark.parametrize("name", ["gdn", "llama"])
def test_what_fails_gives_its_slots_up(tmp_path, name, monkeypatch):
    source = source_of(name, tmp_path / "m")
    reference = load_model(source)
    engine = Engine(load_model(source), max_rows=4, max_length=40)
    free = engine.pages.free
    kept = engine.prefill(prompts_of(6)[0])
    held = engine.pages.free

    def refused(prompts, error, match):
        with pytest.raises(error, match=match):
            engine.prefill_together(prompts)
        assert list(engine.slots.positions) == [kept.slot]
        assert (engine.slots.free, engine.pages.free) == (3, held)

    refused(prompts_of(3, 4, 5, 6), ModelError, "4")
    refused([[5, 6], []], UsageError, "without a token")
    refused([[5, 6], [7, 10_000]], UsageError, "token ids")
    if engine.limited:
        refused(prompts_of(4, 41), ModelError, "a row of 41 tokens")

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    prefiller = type(engine.plan.prefiller_of(0))
    assert name != "gdn" or prefiller is OwnPrefiller
    for part in ("forward_together", "store_rows"):
        with monkeypatch.context() as patch:
            patch.setattr(prefiller, part, out_of_memory)
            refused(prompts_of(3, 9), torch.OutOfMemoryError, "out of memory")
    # And what comes next finds all as it should be.
    rows = prompts_of(3, 30, 9, seed=5)
    for row, found in zip(rows, engine.prefill_together(rows), strict=True):
        assert distance(found.logits, full_logits(reference, row)) < TOLERANCE
        assert distance(engine.step([7], [found.slot])[0], full_logits(reference, [*row, 7])) < TOLERANCE
    for slot in list(engine.slots.positions):
        engine.release(slot)
    assert (engine.slots.free, engine.pages.free) == (4, free)


@pytest.mark.parametrize("name", ["gdn", "llama"])
def test_decode_shows_the_logits_of_each_step(tmp_path, name):
    """Of the rows alone, however many the step was run for; and other rows are not touched."""
    source = source_of(name, tmp_path / "m")
    reference, engine = load_model(source), Engine(load_model(source), max_rows=6, max_length=96)
    rows = prompts_of(5, 20, 9)
    done = engine.prefill_together(rows)
    seen = []
    first = [int(found.logits.argmax()) for found in done[:2]]
    slots = [found.slot for found in done]
    tokens = engine.decode(
        first, 5, slots[:2], watch=lambda logits, chosen: seen.append((logits.clone(), chosen.clone())), at_least=4
    )
    assert tokens.shape == (5, 2)
    assert [logits.shape[0] for logits, _ in seen] == [2] * 5
    for number, row in enumerate(rows[:2]):
        row.append(first[number])
        for step, (logits, chosen) in enumerate(seen):
            assert distance(logits[number], full_logits(reference, row)) < TOLERANCE
            assert int(logits[number].argmax()) == int(chosen[number]) == int(tokens[step, number])
            row.append(int(chosen[number]))
    assert distance(engine.step([7], slots[2:])[0], full_logits(reference, [*rows[2], 7])) < TOLERANCE
