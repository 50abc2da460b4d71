"""The engine on a GPU: graphs give what eager steps give, and both what the library gives."""

import copy

import pytest
import torch

from lapcli.benchmarks.speed.configs import CONFIGS
from lapcli.families.loading import load_model, resolve_model
from lapcli.models.cache import RecurrentCache
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.runtime.pieces import Pieces
from lapcli.runtime.random_models import random_model
from lapcli.testing.decoding import cached_logits, distance, full_logits, held_tensors, prompts_of
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet, tiny_qdelta
from lapcli.testing.stock_models import tiny_stock_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # fla, triton and transformers warn about themselves.
    pytest.mark.filterwarnings("ignore"),
]

BF16 = torch.bfloat16
# Two fp32 evaluations in another order of sums, with the GPU's own exponentials, over up to five layers.
FP32 = 3e-5
OWN = {
    "gdn": (tiny_gated_deltanet, {"hidden_size": 128, "head_dim": 48, "expand_v": 64 / 48, "num_v_heads": 4}),
    "gdn, negative eigenvalues": (tiny_gated_deltanet, {"allow_neg_eigval": True, "use_gate": False}),
    "delta net": (tiny_delta_net, {"use_gate": True}),
    "q-delta": (tiny_qdelta, {"hidden_size": 128, "num_v_heads": 4, "lamb_bias": -0.5}),
}
STOCK = {
    "qwen3_5": {},
    "olmo_hybrid": {},
    "kimi_linear": {"mlp_layer_types": ["dense", "dense", "dense"]},
    "mamba2": {},
    "bamba": {},
    "falcon_h1": {},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "mlp"],
    },
    "zamba2": {},
}
EXPERTS = {"qwen3_next": {}, "qwen3_5_moe": {}, "granitemoehybrid": {}, "nemotron_h": {}}


@pytest.fixture(autouse=True)
def matrices_in_fp32(monkeypatch):
    """cuDNN's convolutions are in TF32 by default, torch's matrix products are not."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models by name, each made once."""
    root, made = tmp_path_factory.mktemp("gpu"), {}

    def of(name, experts=False):
        key = (name, experts)
        if key not in made:
            folder = root / f"{len(made)}"
            if name in OWN:
                make, config = OWN[name]
                made[key] = make(folder, **config)
            else:
                made[key] = tiny_stock_model(name, folder, **(EXPERTS if experts else STOCK)[name])
        return resolve_model(str(made[key]))

    return of


def loaded(source, dtype):
    return load_model(source, device="cuda", dtype=dtype)


@pytest.mark.parametrize("name", OWN)
def test_own_models_in_fp32_against_the_cpu(folders, name):
    source = folders(name)
    reference, engine = load_model(source), Engine(loaded(source, torch.float32), max_rows=4)
    assert engine.path.fast, str(engine.path)
    rows = prompts_of(1, 7, 70)
    done = engine.prefill_rows(rows)
    for row, found in zip(rows, done, strict=True):
        assert distance(found.logits.cpu(), full_logits(reference, row)) < FP32
    for step in range(6):
        for row in rows:
            row.append(3 + (step * 37 + len(row)) % 250)
        logits = engine.step([row[-1] for row in rows], [found.slot for found in done]).cpu()
        for row, found in zip(rows, logits, strict=True):
            assert distance(found, full_logits(reference, row)) < FP32


@pytest.mark.parametrize("name", STOCK)
def test_stock_models_in_fp32_against_the_librarys_decoding(folders, name):
    """From one prefill, since fla multiplies fp32 in TF32 there; Mamba-2's limits do not bind in these models."""
    source = folders(name)
    engine = Engine(loaded(source, torch.float32), max_rows=3, max_length=64)
    assert engine.path.fast, str(engine.path)
    prompts, further = prompts_of(12, 30), [9, 8, 7, 100, 4]
    slots = [found.slot for found in engine.prefill_rows(prompts)]
    found = torch.stack([engine.step([token, token], slots).clone() for token in further], dim=1)
    assert engine.path.fast, str(engine.path)
    model = loaded(source, torch.float32)
    for prompt, ours in zip(prompts, found, strict=True):
        for mine, wanted in zip(ours, cached_logits(model, prompt, further), strict=True):
            assert distance(mine, wanted) < FP32


@pytest.mark.parametrize("name", [*OWN, *STOCK])
@pytest.mark.parametrize(("dtype", "thin", "few"), [(torch.float32, 4, 0), (BF16, 4, 0), (BF16, 0, 0), (BF16, 0, 4)])
def test_a_graph_is_its_steps(folders, name, dtype, thin, few):
    """To the bit: the same kernels over as many rows, two of them padding."""
    source = folders(name)
    captured, eager = (
        Engine(loaded(source, dtype), max_rows=4, max_length=99, graphs=graphs, thin=thin, few=few)
        for graphs in (True, False)
    )
    # The longer one gets its second page on the way.
    rows = prompts_of(5, 62)
    slots = [[found.slot for found in engine.prefill_rows(rows)] for engine in (captured, eager)]
    assert slots[0] == slots[1]
    # A captured prompt is filled up to the length of its graph: other products, other rounding. The steps begin alike.
    for tensor, other in zip(held_tensors(captured), held_tensors(eager), strict=True):
        other.copy_(tensor)
    for engine in (captured, eager):
        engine.reserve(slots[0], 80)
        engine.steps.choices.temperature.fill_(0.8)
        engine.steps.choices.seed.copy_(torch.arange(4, device="cuda"))
    for mode in ("greedy", "draw", "filtered", "greedy"):
        found = []
        for engine in (captured, eager):
            engine.steps.choices.top_k.fill_(20)
            engine.steps.set_rows([7, 9], slots[0], [engine.slots.positions[slot] for slot in slots[0]])
            # Four rows, as the bucket of the graph would have.
            logits = [engine.steps.run(4, mode)[:2].clone() for _ in range(3)]
            found.append((torch.stack(logits), engine.steps.tokens[:2].clone(), engine.steps.positions.clone()))
            for slot in slots[0]:
                engine.slots.positions[slot] += 3
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
    for tensor, other in zip(held_tensors(captured), held_tensors(eager), strict=True):
        assert torch.equal(tensor, other)
    assert captured.path.graph, str(captured.path)
    assert not eager.path.graph


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", OWN)
def test_a_captured_prompt_is_its_passes(folders, name, dtype):
    """To the bit, in pieces that are full and that are not, on from nothing and from a row that is there."""
    source = folders(name)
    captured, eager = (Pieces(loaded(source, dtype), capture=capture, lengths=(64, 256)) for capture in (True, False))
    for first, second in ((1, 64), (65, 700), (300, 5), (256, 256)):
        found = []
        for runner in (captured, eager):
            cache = RecurrentCache()
            logits = [runner.run(torch.tensor([row], device="cuda"), cache) for row in prompts_of(first, second)]
            found.append([*logits, *(tensor for state in cache.layers for tensor in state.tensors())])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert captured.failure is None
    assert len(captured._graphs) == 4


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_in_bf16(folders, name):
    """The library's grouped products inside the graph; near the fp32 model as the library's own bf16 pass is."""
    source = folders(name, experts=True)
    (row,), further = prompts_of(20), [4, 5, 6, 7]
    # The CPU's passes first: transformers' functions are those of the device that a model was last loaded for.
    reference = load_model(source)
    truths = [full_logits(reference, [*row, *further[: count + 1]]) for count in range(len(further))]
    own, engine = loaded(source, BF16), Engine(loaded(source, BF16), max_rows=4, max_length=64)
    slot = engine.prefill(row).slot
    off, allowed = [], []
    for token, truth in zip(further, truths, strict=True):
        row.append(token)
        off.append(distance(engine.step([token], [slot])[0].float().cpu(), truth))
        allowed.append(distance(full_logits(own, row).float().cpu(), truth))
    # A rounding may send a token to another expert, in either; so over all steps, and not one by one.
    assert max(off) < 2 * max(allowed) + 2**-7
    assert engine.path.graph, str(engine.path)


def test_rows_join_and_leave_without_a_new_capture(folders):
    source = folders("gdn")
    engine, reference = Engine(loaded(source, torch.float32), max_rows=8), load_model(source)
    engine.warm_up([1, 2, 4, 8], GenerationSettings())
    graphs = set(engine.steps._graphs)
    assert {key[0] for key in graphs} == {1, 2, 4, 8}
    batch, prompts = Batch(engine), prompts_of(3, 9, 1, 30, 4, 4, 17, 2, 5, 6)
    counts = [5, 9, 14, 3, 7, 1, 12, 8, 10, 2]
    for prompt, count in zip(prompts, counts, strict=True):
        batch.add(prompt, GenerationSettings(max_new_tokens=count))
    found = {}
    while batch.unfinished:
        for event in batch.advance():
            found.setdefault(event.row, []).extend(event.tokens)
    assert set(engine.steps._graphs) == graphs
    for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        tokens = list(prompt)
        assert len(found[row]) == count
        for token in found[row]:
            logits = full_logits(reference, tokens)
            # The likeliest, or as good as: two may be nearer than fp32 tells apart.
            assert logits[token] >= logits.max() - 2 * FP32 * logits.abs().max()
            tokens.append(token)


def test_samples_do_not_depend_on_the_batch(folders):
    source, prompts = folders("gdn"), prompts_of(5, 8, 2, 13)
    settings = [GenerationSettings(max_new_tokens=10, temperature=1.0, seed=seed, top_k=seed * 9) for seed in range(4)]
    found = []
    for together in ([0], [1], [2], [3], [0, 1, 2, 3]):
        batch = Batch(Engine(loaded(source, torch.float32), max_rows=4))
        for row in together:
            batch.add(prompts[row], settings[row])
        tokens = {}
        while batch.unfinished:
            for event in batch.advance():
                tokens.setdefault(event.row, []).extend(event.tokens)
        found.append(tokens)
    assert [found[4][row] for row in range(4)] == [found[row][0] for row in range(4)]


def test_nothing_of_a_slot_remains_for_its_next_row(folders):
    for name in ("gdn", "qwen3_5", "zamba2"):
        engine = Engine(loaded(folders(name), torch.float32), max_rows=2, max_length=32)
        (row,) = prompts_of(6)
        slot = engine.prefill(row).slot
        wanted = [engine.step([token], [slot]).clone() for token in (4, 5, 6)]
        engine.release(slot)
        for tensor in held_tensors(engine):
            tensor.fill_(float("nan"))
        again = engine.prefill(row).slot
        assert again == slot
        assert all(torch.equal(engine.step([t], [slot]), logits) for t, logits in zip((4, 5, 6), wanted, strict=True))


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_so(folders):
    engine = Engine(loaded(folders("gdn"), torch.float32), max_rows=2)
    part = engine.plan.sublayers[1].part

    class Waits:
        def __call__(self, hidden, rows):
            # The host reads a value, which no graph can hold.
            return part(hidden, rows) * (1.0 if hidden.sum().item() > -1e30 else 0.0)

    engine.plan.sublayers[1].part = Waits()
    (row,) = prompts_of(6)
    slot = engine.prefill(row).slot
    found = engine.step([5], [slot])
    assert distance(found[0].cpu(), full_logits(load_model(folders("gdn")), [*row, 5])) < FP32
    assert not engine.path.graph
    assert "could not be captured" in str(engine.path)


def test_bf16_states_and_triton_by_name(folders):
    source = folders("gdn")
    engine = Engine(loaded(source, BF16), max_rows=2, state_dtype=BF16, kernel="triton")
    reference, (row,) = load_model(source), prompts_of(20)
    own, slot = loaded(source, BF16), engine.prefill(row).slot
    for _ in range(5):
        row.append(row[-3])
        truth = full_logits(reference, row)
        allowed = distance(full_logits(own, row).float().cpu(), truth)
        # A step rounds the state by 2^-9 of its values, and there were six roundings.
        assert distance(engine.step(row[-1:], [slot])[0].float().cpu(), truth) < 2 * allowed + 7 * 2**-9


@pytest.mark.parametrize("name", [*OWN, "qwen3_5", "olmo_hybrid", "kimi_linear", "bamba", "falcon_h1"])
def test_products_of_few_rows_in_bf16(folders, name):
    """As near to fp32 as torch's products are, whatever reads the sums that are left."""
    source = folders(name)
    reference, prompt = load_model(source), prompts_of(20)[0]
    further, found = [4, 5, 6, 7], []
    for few in (0, 2):
        engine = Engine(loaded(source, BF16), max_rows=2, max_length=64, thin=0, few=few)
        slot = engine.prefill(prompt).slot
        found.append([engine.step([token], [slot])[0].float().cpu() for token in further])
        assert engine.path.fast, str(engine.path)
    truths = full_logits(reference, [*prompt, *further], len(further))
    plain, own = (max(map(distance, logits, truths)) for logits in found)
    assert own < 2 * plain + 2**-8


@pytest.mark.parametrize("rows", [16, 40, 64])
def test_products_of_the_size_of_a_model(rows):
    """What is chosen at this size, by two blocks of the model that figures are of, against torch's and fp32."""
    config = {**CONFIGS["gdn"], "num_hidden_layers": 2, "head_dim": 128, "expand_v": 4.0}
    model = random_model(config, device=torch.device("cuda"), dtype=BF16, seed=0)
    made, tokens = {}, list(range(rows))
    for key, dtype, few in (("fp32", torch.float32, 0), ("torch", BF16, 0), ("ours", BF16, None)):
        engine = Engine(copy.deepcopy(model).to(dtype), max_rows=64, few=few)
        slots = engine.occupy(rows, 3)
        engine.step(tokens, slots)
        made[key] = engine.step(tokens, slots).float().clone()
        assert engine.path.graph, str(engine.path)
    plain, own = (distance(made[key], made["fp32"]) for key in ("torch", "ours"))
    assert own < 1.5 * plain
    if torch.cuda.get_device_capability()[0] == 9:
        # The two are not the same, or nothing was chosen.
        assert not torch.equal(made["torch"], made["ours"])


def test_decoding_waits_for_nothing(folders):
    """Steps after the first may not synchronise with the host."""
    engine = Engine(loaded(folders("gdn"), BF16), max_rows=4)
    slots = engine.occupy(4, 100)
    engine.decode([1, 2, 3, 4], 2, slots)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.steps.run(4, "greedy")
        engine.steps.run(4, "greedy")
    finally:
        torch.cuda.set_sync_debug_mode("default")
