"""The engine on lapcli's own models: logits of the one full pass, whatever came before in a slot or lies beside it."""

import pytest
import torch

from lapcli.errors import ModelError, UsageError
from lapcli.families.loading import load_model, resolve_model
from lapcli.runtime import Engine
from lapcli.runtime.layers import DeltaMixer, GatedMlp
from lapcli.runtime.llama_models import Mixer
from lapcli.testing.decoding import distance, full_logits, held_tensors, prompts_of
from lapcli.testing.dual_state import converted, tiny_teacher
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet, tiny_qdelta

# Sums of some hundred fp32 products in another order, over a few layers.
TOLERANCE = 1e-5

MODELS = {
    "gdn": (tiny_gated_deltanet, {}),
    "grouped values, K 12 and V 24": (
        tiny_gated_deltanet,
        {"num_v_heads": 4, "head_dim": 12, "expand_v": 2.0, "hidden_size": 48},
    ),
    "negative eigenvalues, sigmoid gate": (
        tiny_gated_deltanet,
        {"allow_neg_eigval": True, "output_gate_activation": "sigmoid"},
    ),
    "no gate, tied": (tiny_gated_deltanet, {"use_gate": False, "tie_word_embeddings": True}),
    "no convolution": (tiny_gated_deltanet, {"use_short_conv": False}),
    "two taps": (tiny_gated_deltanet, {"conv_size": 2}),
    "delta net": (tiny_delta_net, {}),
    "delta net, gated, constant strength, linear keys": (
        tiny_delta_net,
        {"use_gate": True, "use_beta": False, "qk_activation": "identity", "expand_k": 0.5},
    ),
    "q-delta": (tiny_qdelta, {"num_v_heads": 4, "lamb_bias": -0.5}),
    "q-delta, gain, negative eigenvalues": (tiny_qdelta, {"lamb_gain": True, "allow_neg_eigval": True}),
    "q-delta, fixed, no decay, no gate": (tiny_qdelta, {"lamb_fixed": 0.8, "use_decay": False, "use_gate": False}),
    "delta net, by the library's pass": (tiny_delta_net, {"qk_activation": "elu", "qk_norm": "sum"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_steps_give_the_logits_of_one_pass(tmp_path, name):
    """Prompts of 1, 2, 7 and 19 tokens in one batch: shorter than the convolution and longer."""
    make, config = MODELS[name]
    source = resolve_model(str(make(tmp_path / "m", **config)))
    reference, engine = load_model(source), Engine(load_model(source), max_rows=5)
    assert engine.path.name == ("eager" if "library" in name else "fused")
    rows = prompts_of(1, 2, 7, 19)
    done = engine.prefill_rows(rows)
    for row, found in zip(rows, done, strict=True):
        assert distance(found.logits, full_logits(reference, row)) < TOLERANCE
    for step in range(6):
        for row in rows:
            row.append(3 + (step * 37 + len(row)) % 250)
        logits = engine.step([row[-1] for row in rows], [found.slot for found in done])
        for row, found in zip(rows, logits, strict=True):
            assert distance(found, full_logits(reference, row)) < TOLERANCE


def test_pieces_then_several_tokens_then_one(engine, reference):
    """100 tokens in pieces of 33, 7 at once, then one: the logits of one pass over 108."""
    (tokens,) = prompts_of(108)
    slot, _ = engine.prefill(tokens[:100], piece=33)
    assert distance(engine.prefill(tokens[100:107], slot).logits, full_logits(reference, tokens[:107])) < TOLERANCE
    assert distance(engine.step(tokens[107:], [slot])[0], full_logits(reference, tokens)) < TOLERANCE


def test_rows_that_join_and_leave_do_not_touch_others(engine, reference):
    first, second, third = prompts_of(5, 9, 3)
    a, b = (engine.prefill(row).slot for row in (first, second))
    engine.step([first[0], second[0]], [a, b])
    engine.release(a)
    c = engine.prefill(third).slot
    assert c == a
    logits = engine.step([third[0], second[1]], [c, b])
    assert distance(logits[0], full_logits(reference, [*third, third[0]])) < TOLERANCE
    assert distance(logits[1], full_logits(reference, [*second, *second[:2]])) < TOLERANCE
    # Any order, and not all of them.
    assert distance(engine.step([7], [b])[0], full_logits(reference, [*second, *second[:2], 7])) < TOLERANCE


@pytest.mark.parametrize("length", [1, 3, 30])
def test_nothing_of_a_slot_remains_for_its_next_row(engine, reference, length):
    slots = [engine.prefill(row).slot for row in prompts_of(9, 9, 9, 9)]
    for slot in slots:
        engine.release(slot)
    for tensor in held_tensors(engine):
        tensor.fill_(float("nan"))
    (row,) = prompts_of(length, seed=1)
    slot, logits = engine.prefill(row)
    assert distance(logits, full_logits(reference, row)) < TOLERANCE
    for _ in range(5):
        row.append(row[0])
        assert distance(engine.step(row[-1:], [slot])[0], full_logits(reference, row)) < TOLERANCE


def test_padding_rows_change_nothing(engine, reference):
    """As a bucket of a graph has them: rows with a negative slot, whose state is nobody's."""
    (row,) = prompts_of(6)
    slot = engine.prefill(row).slot
    before = [tensor.clone() for tensor in held_tensors(engine)]
    engine.steps.set_rows([row[0]], [slot], [len(row)])
    logits = engine.steps.run(4)
    assert distance(logits[0], full_logits(reference, [*row, row[0]])) < TOLERANCE
    others = [other for other in range(4) if other != slot]
    *recurrent, _ = zip(held_tensors(engine), before, strict=True)
    assert recurrent
    assert all(torch.equal(tensor[others], old[others]) for tensor, old in recurrent)


@pytest.mark.parametrize("name", MODELS)
def test_few_rows_within_products(tmp_path, name):
    """Norms and sums done by the products of a part: the same logits."""
    make, config = MODELS[name]
    source = resolve_model(str(make(tmp_path / "m", **config)))
    reference, engine, rows = load_model(source), Engine(load_model(source), max_rows=2, thin=2), prompts_of(2, 9)
    slots = [found.slot for found in engine.prefill_rows(rows)]
    for token in (5, 6, 7):
        for row in rows:
            row.append(token)
        for row, logits in zip(rows, engine.step([token, token], slots), strict=True):
            assert distance(logits, full_logits(reference, row)) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_products_of_few_rows(tmp_path, name, few_products):
    """By kernels of their own, sums left to the norms behind them: the same logits."""
    make, config = MODELS[name]
    source = resolve_model(str(make(tmp_path / "m", **config)))
    reference, engine, rows = load_model(source), Engine(load_model(source), max_rows=3, few=2), prompts_of(2, 9, 4)
    slots = [found.slot for found in engine.prefill_rows(rows)]
    for count in (2, 3, 2):
        for row in rows[:count]:
            row.append(5)
        for row, logits in zip(rows, engine.step([5] * count, slots[:count]), strict=False):
            assert distance(logits, full_logits(reference, row)) < TOLERANCE
        # Three rows are not few, here.
        few_products.append(count)
    block = [False, True, "gated", True] * len(reference.model.layers) + [False]
    assert few_products == ([2, 3, 2] if "library" in name else [*block, 2, 3, *block, 2])


def test_what_is_faster_is_asked_of_each_product(source, monkeypatch, few_products):
    """Unless rows are said: of each of its own, of those that leave a sum, and of gate and up twice if not together."""
    asked = []

    def faster(x, weight, apart=False, gated=False):
        asked.append((len(x), apart, gated))
        return apart

    monkeypatch.setattr("lapcli.runtime.layers.is_faster", faster)
    engine = Engine(load_model(source), max_rows=2)
    slots = [found.slot for found in engine.prefill_rows(prompts_of(2, 9))]
    engine.step([5, 6], slots)
    layers = len(engine.plan.recurrent)
    whole, apart, gated = (2, False, False), (2, True, False), (2, False, True)
    assert asked == [whole, apart, gated, whole, apart] * layers + [whole]
    products = 4 * layers + 1
    assert few_products == [True] * (products // 2)
    for few, count in ((0, 0), (2, products)):
        few_products.clear()
        engine.plan.few = few
        engine.step([5, 6], slots)
        assert len(few_products) == count
    assert len(asked) == 5 * layers + 1
    engine.plan.few = None
    monkeypatch.setattr("lapcli.runtime.layers.is_faster", lambda *_, gated=False, **__: gated)
    few_products.clear()
    engine.step([5, 6], slots)
    assert few_products == ["gated"] * layers


def test_many_steps_at_once_are_the_steps_one_by_one(source, engine):
    rows = prompts_of(4, 8)
    other = Engine(load_model(source), max_rows=2)
    slots, twins = ([each.prefill(row).slot for row in rows] for each in (engine, other))
    found = engine.decode([5, 6], 7, slots)
    tokens = torch.tensor([5, 6])
    for step in range(7):
        tokens = other.step(tokens, twins).argmax(dim=-1)
        assert torch.equal(found[step], tokens)
    assert engine.slots.positions == {slot: len(row) + 7 for slot, row in zip(slots, rows, strict=True)}


def test_bfloat16_is_as_near_as_bfloat16_gets(source, reference):
    """Not further from the fp32 model than twice what the model's own bf16 pass is, and one rounding of a logit."""
    own, model = (load_model(source, dtype=torch.bfloat16) for _ in range(2))
    engine, rows = Engine(model, max_rows=3), prompts_of(5, 12, 40)
    slots = [engine.prefill(row).slot for row in rows]
    for step in range(4):
        for row in rows:
            row.append(10 + 50 * step)
        logits = engine.step([row[-1] for row in rows], slots)
        for row, found in zip(rows, logits, strict=True):
            truth = full_logits(reference, row)
            assert distance(found, truth) < 2 * distance(full_logits(own, row), truth) + 2**-8


def test_a_bfloat16_state_is_half_as_large_and_close(source, reference):
    engine = Engine(load_model(source), state_dtype=torch.bfloat16)
    assert engine.nbytes()["states"] * 2 == Engine(load_model(source)).nbytes()["states"]
    (row,) = prompts_of(20)
    slot = engine.prefill(row).slot
    for _ in range(5):
        row.append(row[-3])
        # Each step rounds the state by 2**-9 of its values at most, and a row has had six roundings.
        assert distance(engine.step(row[-1:], [slot])[0], full_logits(reference, row)) < 6 * 2**-9


def test_fused_projections_are_no_second_copy(source):
    model = load_model(source)
    weights = sum(tensor.nbytes for tensor in model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = Engine(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    # But for the rows that pad a fused projection.
    assert weights <= engine.nbytes()["weights"] < 1.3 * weights


def test_an_engine_from_a_config_alone(source):
    config = {**source.config, "num_hidden_layers": 1}
    one, same, other = (Engine.from_config(config, seed=seed, max_rows=3) for seed in (1, 1, 2))
    slots = one.occupy(3, 512)
    assert one.slots.positions == dict.fromkeys(slots, 512)
    assert one.decode([1, 2, 3], 4).shape == (4, 3)
    logits = [each.prefill([3, 4]).logits for each in (same, other)]
    assert not torch.equal(*logits)
    for slot in slots:
        one.release(slot)
    assert torch.equal(one.prefill([3, 4]).logits, logits[0])
    with pytest.raises(ModelError, match="no model_type"):
        Engine.from_config({"hidden_size": 8})
    with pytest.raises(ModelError, match="'nonsense'"):
        Engine.from_config({"model_type": "nonsense"})


def test_what_is_refused(engine, source):
    slot = engine.prefill([5, 6]).slot
    for tokens in ([], [5, 259], [-1]):
        with pytest.raises(UsageError):
            engine.prefill(tokens)
    assert engine.slots.free == 3
    with pytest.raises(ModelError, match="slot 3 holds no row"):
        engine.step([1], [3])
    with pytest.raises(UsageError, match="twice"):
        engine.step([1, 2], [slot, slot])
    with pytest.raises(UsageError, match="2 tokens for 1 rows"):
        engine.step([1, 2], [slot])
    with pytest.raises(UsageError, match="chooses tokens"):
        engine.decode([1], 2, mode="logits")
    with pytest.raises(ModelError, match="3 of 4 slots are free"):
        engine.prefill_rows(prompts_of(1, 2, 3, 4))
    engine.release(slot)
    with pytest.raises(ModelError, match="holds no row"):
        engine.release(slot)
    with pytest.raises(UsageError, match="1 row at least"):
        Engine(engine.model, max_rows=0)
    with pytest.raises(UsageError, match="CUDA graphs need a CUDA device"):
        Engine(engine.model, graphs=True)
    with pytest.raises(ModelError, match="--kernel triton"):
        Engine(load_model(source), kernel="triton")


def test_a_failed_prefill_gives_its_slots_back(engine, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of something")

    monkeypatch.setattr(engine.plan.prefiller, "forward", fails)
    with pytest.raises(RuntimeError, match="out of something"):
        engine.prefill_rows([[1, 2], [3, 4]])
    assert engine.slots.free == 4


@pytest.mark.parametrize("kind", ["gdn", "llama", "qwen2", "dual states"])
def test_a_second_engine_of_a_model_takes_no_more_weights(kind, tmp_path):
    """Fused projections stay where they are; before, each engine wrote them anew beside those of the last one."""
    if kind == "gdn":
        model = load_model(resolve_model(str(tiny_gated_deltanet(tmp_path / "gdn"))))
    else:
        model = tiny_teacher("llama" if kind == "dual states" else kind)
    if kind == "dual states":
        model = converted(model, 0, 2)
    prompt, found, places = [5, 6, 7], [], []
    for _ in range(3):
        engine = Engine(model, max_rows=2, max_length=16)
        slot = engine.prefill(prompt).slot
        found.append(engine.step([9], [slot]))
        fused = [
            sub.part.weight for sub in engine.plan.sublayers if isinstance(sub.part, DeltaMixer | Mixer | GatedMlp)
        ]
        places.append([weight.data_ptr() for weight in fused])
    assert len(fused) == len(engine.plan.sublayers)
    assert places[0] == places[1] == places[2]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    # What is not as it was left is fused anew.
    with torch.no_grad():
        for linear in (each for each in model.modules() if isinstance(each, torch.nn.Linear)):
            linear.weight.data = linear.weight.data.clone()
    again = Engine(model, max_rows=2, max_length=16)
    assert torch.equal(again.step([9], [again.prefill(prompt).slot]), found[0])
