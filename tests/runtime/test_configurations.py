"""Rows of several configurations in one engine: each gets what the exported model of its own gives it alone."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from lapcli.errors import ArtifactError, ModelError, UsageError
from lapcli.families.loading import load_model, resolve_model
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.runtime.configurations import Convertible, load_convertible
from lapcli.runtime.either import Either
from lapcli.runtime.offload import Offload
from lapcli.stages.linearising import export_prefix
from lapcli.testing.decoding import distance, full_logits, prompts_of, spoil
from lapcli.testing.dual_state import tiny_conversion

# As for other models: fp32 sums in another order.
FP32 = 1e-5
CASES = {
    "llama": {},
    "llama, stored as bf16": {"teacher": {"dtype": torch.bfloat16}},
    "mistral, window": {"model_type": "mistral", "order": (1, 2), "teacher": {"sliding_window": 6}},
    "phi": {"model_type": "phi", "order": (0, 1, 2)},
    "phi3, three states": {"model_type": "phi3", "states": 3},
    # Its last layer has no rotary embedding.
    "smollm3, one wide state": {
        "model_type": "smollm3", "states": 1, "width": 2, "teacher": {"no_rope_layers": [1, 1, 0]}
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Gives a case's directory, and the library's model of each of its configurations as it is exported."""
    found = {}

    def make(name):
        if name not in found:
            case = CASES[name]
            root = tiny_conversion(tmp_path_factory.mktemp("conversion") / "dir", **case)
            models = [load_model(resolve_model(str(root / "base")))]
            for number in range(1, len(case.get("order", (2, 0, 1))) + 1):
                export_prefix(root, number, root.parent / str(number))
                models.append(load_model(resolve_model(str(root.parent / str(number)))))
            found[name] = root, models
        return found[name]

    return make


def parts(engine):
    """The layers that can be either, in order."""
    inner = [getattr(sub.part, "parts", ((1.0, sub.part, 1.0),)) for sub in engine.plan.sublayers]
    return [part for each in inner for _, part, _ in each if isinstance(part, Either)]


WAYS = {
    "gathered": {},
    "as padding": {"by_index": False},
    "norms and sums within products": {"thin": 8},
    "both": {"by_index": False, "thin": 8},
    "offloaded": {"offload": True},
    "products of few rows": {"few": 8},
    "products of few rows, offloaded": {"few": 8, "offload": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_exported_models(made, name, way):
    """Unequal rows of all configurations in one batch, one that leaves, one in its slot, pieces, NaN in free slots."""
    root, models = made(name)
    options = dict(WAYS[way])
    by_index = options.pop("by_index", True)
    engine = Engine.load(root, max_rows=6, max_length=64, **options)
    assert [each.converted for each in engine.configurations] == list(range(len(models)))
    assert len(parts(engine)) == len(models) - 1
    for part in parts(engine):
        part.by_index = by_index
    rows = prompts_of(1, 7, 19, 7, 4, high=250)
    numbers = [row % len(models) for row in range(5)]
    done = engine.prefill_rows(rows, configurations=[engine.configurations[number].name for number in numbers])
    slots = [found.slot for found in done]

    def check(prefilled, count, chosen):
        found = [prefilled]
        for step in range(count):
            for row in chosen:
                rows[row].append(3 + (step * 37 + len(rows[row])) % 57)
            logits = engine.step([rows[row][-1] for row in chosen], [slots[row] for row in chosen]).clone()
            found.append(list(logits))
        for place, row in enumerate(chosen):
            ours = torch.stack([logits[place] for logits in found if logits[place] is not None])
            wanted = full_logits(models[numbers[row]], rows[row], len(ours))
            assert max(map(distance, ours, wanted)) < FP32

    check([found.logits for found in done], 3, range(5))
    engine.release(slots[1])
    spoil(engine, engine.slots.positions)
    # A row of another configuration in its slot, in pieces; and more tokens for one that is there.
    numbers[1], rows[1] = len(models) - 1, prompts_of(10, seed=3, high=250)[0]
    slots[1], second = engine.prefill(rows[1], piece=4, configuration=engine.configurations[-1].name)
    rows[0] += prompts_of(5, seed=4, high=250)[0]
    check([engine.prefill(rows[0][-5:], slots[0]).logits, second, None, None, None], 2, range(5))
    # Some of the rows, in another order; and rows that agree.
    check([None, None], 2, [3, 0])
    check([None], 2, [2])


@pytest.mark.parametrize("name", CASES)
def test_prompts_of_unlike_lengths_in_one_pass_are_of_the_first_configuration(made, name):
    root, models = made(name)
    engine = Engine.load(root, max_rows=4, max_length=64)
    # What the model was left as is another one.
    engine.prefill(prompts_of(5)[0], configuration=engine.configurations[-1].name)
    rows = prompts_of(1, 7, 19, high=250)
    for row, found in zip(rows, engine.prefill_together(rows), strict=True):
        assert distance(found.logits, full_logits(models[0], row)) < FP32


def test_weights_are_there_once(made):
    root, models = made("llama")
    nbytes = Engine.load(root, max_length=64).nbytes()
    each = [sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()}) for model in models]
    attention = [
        sum(tensor.nbytes for tensor in block.self_attn.state_dict().values()) for block in models[-1].model.layers
    ]
    # Fused projections are filled up to 64 rows, of 32 numbers: at most so many for each of the nine.
    assert 0 <= nbytes["weights"] - (each[0] + sum(attention)) <= 9 * 64 * 32 * 4
    assert "offloaded" not in nbytes
    some = Engine.load(root, max_length=64, configurations=[2, 3])
    assert [each.name for each in some.configurations] == ["2-of-3", "3-of-3"]
    assert len(parts(some)) == 1
    # The first two layers are never attention.
    assert (len(some.plan.recurrent), len(some.plan.attention)) == (3, 1)
    assert some.nbytes()["weights"] < nbytes["weights"]


def test_what_a_configuration_takes_and_what_it_is_worth(made):
    root, _ = made("llama")
    found = Engine.load(root, max_length=64).configurations
    assert [each.name for each in found] == ["0-of-3", "1-of-3", "2-of-3", "3-of-3"]
    assert {each.layers for each in found} == {3}
    # Two heads of keys and values of 8 fp32 numbers a layer; two states of two heads of 8 x 8 take a page of 64 tokens.
    assert [each.token_bytes for each in found] == [3 * 128, 2 * 128, 128, 0]
    assert [each.fixed_bytes for each in found] == [0, 64 * 128, 2 * 64 * 128, 3 * 64 * 128]
    assert [each.quality["cross_entropy"] for each in found] == pytest.approx([2.0, 2.1, 2.2, 2.3])
    increases = [each.quality["perplexity"] / found[0].quality["perplexity"] - 1 for each in found]
    assert [each.quality["increase"] for each in found] == pytest.approx(increases)


def test_a_model_in_one_configuration_has_one(made):
    root, models = made("llama")
    engine = Engine(models[2], max_rows=2, max_length=32)
    (only,) = engine.configurations
    assert (only.name, only.token_bytes, only.fixed_bytes, only.quality) == ("base", 128, 2048, {})
    batch = Batch(engine)
    row = batch.add([5, 6, 7], GenerationSettings(max_new_tokens=2), "base")
    assert batch.configuration_of(row) == "base"
    with pytest.raises(UsageError, match="no configuration '2-of-3'; there are base"):
        batch.add([5], GenerationSettings(), "2-of-3")
    batch.advance()
    assert engine.steps.span is None
    assert not batch.switch(row, "base")
    with pytest.raises(UsageError, match="is one model"):
        Engine.load(root.parent / "2", configurations=[0])


def drain(batch, tokens=None):
    """All that comes of a batch: tokens by row, and their scores."""
    tokens, scores = {} if tokens is None else tokens, {}
    while batch.unfinished:
        for event in batch.advance():
            tokens.setdefault(event.row, []).extend(event.tokens)
            scores.setdefault(event.row, []).extend(event.scores)
    return tokens, scores


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("piece", [None, 5])
def test_a_row_that_was_switched_goes_on_as_a_fresh_one(made, piece, offload):
    """To the bit: tokens, and log-probabilities of all that could have come; up and down, and twice."""
    root, _ = made("llama")
    engine = Engine.load(root, max_rows=2, max_length=64, offload=offload)
    settings = GenerationSettings(max_new_tokens=20, temperature=1.0, seed=3, logprobs=300)
    (prompt,) = prompts_of(11, high=250)
    batch = Batch(engine, piece=piece)
    row = batch.add(prompt, settings, "1-of-3")
    came, scores, switched = [], [], []
    while batch.unfinished:
        for event in batch.advance():
            came += event.tokens
            scores += event.scores
        if len(came) in (4, 9) and len(came) not in switched:
            switched.append(len(came))
            assert batch.switch(row, {4: "3-of-3", 9: "0-of-3"}[len(came)])
    assert (len(came), batch.switches) == (20, 2)
    for begin, end, name in ((4, 9, "3-of-3"), (9, 20, "0-of-3")):
        fresh = Batch(Engine.load(root, max_rows=2, max_length=64), piece=piece)
        fresh.add([*prompt, *came[:begin]], GenerationSettings(end - begin, 1.0, seed=3, logprobs=300), name)
        tokens, alone = drain(fresh)
        assert tokens[0] == came[begin:end]
        assert alone[0] == scores[begin:end]


def test_switches_among_other_rows_change_nothing_for_them(made):
    """Nine rows of all configurations, room for four; rows are switched while they wait, begin and run."""
    root, _ = made("phi3, three states")
    prompts, names = prompts_of(3, 6, 14, 9, 1, 5, 8, 2, 17, high=250), [f"{row % 4}-of-3" for row in range(9)]
    settings = [GenerationSettings(max_new_tokens=6 + row % 4, temperature=0.8, seed=row) for row in range(9)]
    engine = Engine.load(root, max_rows=4, max_length=64)
    batch, tokens = Batch(engine, piece=4), {}
    for prompt, each, name in zip(prompts, settings, names, strict=True):
        batch.add(prompt, each, name)
    switched = {}
    for step, row in enumerate((8, 0, 2, 1, 6, 3, 7)):
        for _ in range(2):
            for event in batch.advance():
                tokens.setdefault(event.row, []).extend(event.tokens)
        before = list(tokens.get(row, ()))
        if batch.switch(row, f"{step % 4}-of-3"):
            assert batch.configuration_of(row) == f"{step % 4}-of-3"
            switched[row] = before
    assert len(switched) >= 4
    assert 0 < batch.switches < len(switched)
    drain(batch, tokens)
    assert batch.mixed_steps > 0
    for row, (prompt, each, name) in enumerate(zip(prompts, settings, names, strict=True)):
        assert len(tokens[row]) == each.max_new_tokens
        steps = [(tokens[row], [], name)]
        if row in switched:
            before = switched[row]
            steps = [(before, [], name), (tokens[row][len(before) :], before, None)]
        for wanted, before, own in steps:
            if wanted:
                alone = Batch(Engine.load(root, max_rows=1, max_length=64), piece=4)
                target = own or f"{(8, 0, 2, 1, 6, 3, 7).index(row) % 4}-of-3"
                alone.add([*prompt, *before], GenerationSettings(len(wanted), 0.8, seed=row), target)
                assert drain(alone)[0][0] == wanted


def test_what_cannot_be_switched(made):
    root, _ = made("llama")
    batch = Batch(Engine.load(root, max_rows=1, max_length=64), piece=4)
    first, second = (batch.add(prompt, GenerationSettings(max_new_tokens=3)) for prompt in prompts_of(9, 5, high=250))
    assert batch.configuration_of(first) == "0-of-3"
    with pytest.raises(UsageError, match="no configuration '4-of-3'; there are 0-of-3, 1-of-3, 2-of-3, 3-of-3"):
        batch.switch(first, "4-of-3")
    assert not batch.switch(first, "0-of-3")
    assert not batch.switch(77, "1-of-3")
    # One that waits has nothing to replay.
    assert batch.switch(second, "3-of-3")
    assert batch.switches == 0
    # One whose prompt is on its way begins anew.
    batch.advance()
    assert batch.engine.slots.free == 0
    assert batch.switch(first, "2-of-3")
    assert (batch.switches, batch.engine.slots.free, batch.first_waiting) == (1, 1, first)
    assert [event.reason for event in batch.cancel(second)] == ["cancelled"]
    assert not batch.switch(second, "1-of-3")
    tokens, _ = drain(batch)
    assert len(tokens[first]) == 3
    assert batch.configuration_of(first) is None
    assert not batch.switch(first, "1-of-3")


def test_offloading_brings_what_is_needed_and_survives_a_pass_that_failed(made, monkeypatch):
    root, models = made("llama")
    resident, engine = (Engine.load(root, max_rows=3, max_length=64, offload=offload) for offload in (False, True))
    saved = resident.nbytes()["weights"] - engine.nbytes()["weights"]
    # Of three layers' projections of 64 x 32 and 32 x 32, two places remain on the device.
    one = 4 * (64 * 32 + 64 + 32 * 32 + 32)
    assert (saved, engine.nbytes()["offloaded"]) == (one, 3 * one)
    convertible: Any = engine._convertible
    offload = convertible.offload
    brought = []
    start = offload._start
    monkeypatch.setattr(offload, "_start", lambda place: start(place) or brought.extend(offload._under_way))
    (prompt,) = prompts_of(6, high=250)
    slots = [engine.prefill(prompt, configuration=f"{number}-of-3").slot for number in (3, 2, 0)]
    brought.clear()
    engine.step([5], slots[:1])
    assert not brought
    engine.step([5], slots[1:2])
    assert set(brought) == {1}
    brought.clear()
    engine.step([5], slots[2:])
    assert set(brought) == {0, 1, 2}

    def fail(*_):
        raise RuntimeError("of the test")

    row = [*prompt, 5]
    for layer in (1, 2):
        attention: Any = parts(engine)[layer].attention
        mix = attention.mix
        attention.mix = fail
        with pytest.raises(RuntimeError, match="of the test"):
            engine.step([7], slots[2:])
        attention.mix = mix
        # As the batch does: what the row has is taken in anew.
        engine.release(slots[2])
        slots[2], logits = engine.prefill(row, configuration="0-of-3")
        assert distance(logits, full_logits(models[0], row)) < FP32
        row.append(8)
        found = engine.step([8], slots[2:])[0]
        assert distance(found, full_logits(models[0], row)) < FP32


def test_passes_that_fail_anywhere_leave_no_wrong_weights():
    """Passes of random configurations, half of which stop within a layer: what is used is always the layer's own."""
    generator = random.Random(0)
    for _ in range(60):
        offload, ranks = Offload(torch.device("cpu")), generator.sample(range(4), 4)
        for layer, rank in enumerate(ranks):
            inputs, output = [nn.Linear(2, 3), nn.Linear(2, 2)], nn.Linear(3, 2)
            for linear in (*inputs, output):
                for parameter in linear.requires_grad_(False).parameters():
                    parameter.fill_(float(layer))
            offload.keep(layer, rank, inputs, output)
        for _ in range(40):
            converted = generator.randrange(5)
            needed = [layer for layer, rank in enumerate(ranks) if rank >= converted]
            fails = generator.choice([*needed, *[None] * len(needed)]) if needed else None
            for layer in needed:
                offload.use(layer, converted)
                place = offload.place(layer)
                assert place.bias is not None
                # Behind the rows of the layers lies padding.
                for tensor in (place.weight[:5], place.bias[:5], place.output, place.output_bias):
                    assert tensor is not None
                    assert tensor.eq(layer).all()
                if layer == fails:
                    break
                offload.done(layer)


def test_two_engines_one_after_the_other_on_one_model(made):
    """A server asks an engine of one row what rows take, before it makes the one that it uses."""
    root, models = made("phi")
    for offload in (False, True):
        convertible = load_convertible(root, offload=offload)
        assert isinstance(convertible, Convertible)
        nbytes = [Engine(convertible, max_rows=1, max_length=32).nbytes()]
        engine = Engine(convertible, max_rows=2, max_length=32)
        nbytes.append(engine.nbytes())
        assert nbytes[0]["weights"] == nbytes[1]["weights"]
        (row,) = prompts_of(5, high=250)
        slots = [engine.prefill(row, configuration=f"{number}-of-3").slot for number in (0, 2)]
        for logits, number in zip(engine.step([9, 9], slots), (0, 2), strict=True):
            assert distance(logits, full_logits(models[number], [*row, 9])) < FP32


@pytest.mark.parametrize(
    ("conversion", "configurations", "error", "said"),
    [
        ({}, [], UsageError, "numbers of converted layers are wanted"),
        ({}, [-1, 0], UsageError, "numbers of converted layers are wanted"),
        ({}, [0, 3], ArtifactError, "holds 2 converted layers, and a configuration of 3"),
        ({"window": 8}, None, ModelError, "a window with sinks, a control"),
        (
            {"teacher": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}},
            None,
            ModelError,
            "need fused steps: its rotary embedding",
        ),
    ],
    ids=["none", "negative", "more than there are", "windows", "no fused steps"],
)
def test_what_is_refused(tmp_path, conversion, configurations, error, said):
    root = tiny_conversion(tmp_path / "dir", order=(2, 0), **conversion)
    with pytest.raises(error, match=said):
        Engine.load(root, configurations=configurations)


def test_a_conversion_that_has_only_begun_is_its_base(tmp_path):
    root = tiny_conversion(tmp_path / "dir", order=())
    engine = Engine.load(root, max_length=64)
    assert [each.name for each in engine.configurations] == ["0-of-3"]
    (row,) = prompts_of(6, high=250)
    assert distance(engine.prefill(row).logits, full_logits(load_model(resolve_model(str(root / "base"))), row)) < FP32


def test_of_a_conversion_to_windows_there_is_the_base(tmp_path):
    root = tiny_conversion(tmp_path / "dir", order=(2, 0), window=8)
    engine = Engine.load(root, configurations=[0], max_length=64)
    assert [each.name for each in engine.configurations] == ["0-of-3"]
    (row,) = prompts_of(20, high=250)
    assert distance(engine.prefill(row).logits, full_logits(load_model(resolve_model(str(root / "base"))), row)) < FP32
