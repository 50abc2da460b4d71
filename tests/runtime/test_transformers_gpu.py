"""Transformers and converted ones on a GPU: graphs give what eager steps give, and both what the library gives."""

import copy

import pytest
import torch

from lapcli.families.remote.lapcli_dual_state import dual_state_layers
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.testing.decoding import cached_logits, distance, full_logits, held_tensors, prompts_of
from lapcli.testing.dual_state import converted, tiny_teacher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # fla, triton and transformers warn about themselves.
    pytest.mark.filterwarnings("ignore"),
]

BF16 = torch.bfloat16
# Two fp32 evaluations in another order of sums, with the GPU's own exponentials, over three layers.
FP32 = 3e-5
CASES = {
    "llama": ("llama", (), {}),
    "mistral, window": ("mistral", (), {}),
    "qwen3": ("qwen3", (), {}),
    "phi": ("phi", (), {}),
    "phi3": ("phi3", (), {}),
    "llama, two layers": ("llama", (2, 0), {}),
    "qwen2, three states": ("qwen2", (1,), {"states": 3}),
    "qwen3, all": ("qwen3", (1, 0, 2), {}),
    "smollm3, one wide state": ("smollm3", (0, 1), {"states": 1, "width": 2}),
    "phi, all": ("phi", (0, 1, 2), {}),
    "phi3, cut": ("phi3", (2, 1), {"key_width": 24}),
}


@pytest.fixture(autouse=True)
def products_in_fp32():
    assert not torch.backends.cuda.matmul.allow_tf32


def made(name, dtype=torch.float32, device="cuda"):
    """The library's model of a case, of 128 numbers a token, heads of 32 (48 where they have a width of their own)."""
    kind, layers, settings = CASES[name]
    change = {"hidden_size": 128, "intermediate_size": 192}
    change |= {"head_dim": 48} if kind in ("mistral", "qwen3") else {}
    change |= {"sliding_window": 6} if name.endswith("window") else {}
    model = tiny_teacher(kind, dtype=dtype, **change)
    if layers:
        model = converted(model, *layers, **settings)
        model.config.model_type = f"lapcli_dual_state_{kind}"
        for layer in dual_state_layers(model).values():
            # The same whatever else is there: chunks in PyTorch, since fla multiplies fp32 in TF32.
            layer.kernel = "chunked" if dtype == torch.float32 else "auto"
    return model.to(device)


@pytest.mark.parametrize("name", CASES)
def test_fp32_against_the_librarys_pass_on_the_cpu(name):
    reference, engine = made(name, device="cpu"), Engine(made(name), max_rows=4, max_length=64)
    assert engine.path.fast, str(engine.path)
    rows = prompts_of(1, 7, 30, high=60)
    done = engine.prefill_rows(rows)
    for row, found in zip(rows, done, strict=True):
        assert distance(found.logits.cpu(), full_logits(reference, row)) < FP32
    for step in range(6):
        for row in rows:
            row.append(3 + (step * 37 + len(row)) % 57)
        logits = engine.step([row[-1] for row in rows], [found.slot for found in done]).cpu()
        for row, found in zip(rows, logits, strict=True):
            assert distance(found, full_logits(reference, row)) < FP32
    assert engine.path.fast, str(engine.path)


@pytest.mark.parametrize("settings", [{}, {"thin": 0, "few": 2}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_bf16_is_as_near_as_the_librarys_decoding(name, settings):
    reference, engine = made(name, device="cpu"), Engine(made(name, BF16), max_rows=2, max_length=64, **settings)
    plain, (prompt,), further = made(name, BF16), prompts_of(20, high=60), [4, 5, 6, 7]
    slot = engine.prefill(prompt).slot
    found = [engine.step([token], [slot])[0].float().cpu() for token in further]
    truths = full_logits(reference, [*prompt, *further], len(further))
    allowed = max(map(distance, cached_logits(plain, prompt, further).float().cpu(), truths))
    assert max(map(distance, found, truths)) < 2 * allowed + 2**-8
    assert engine.path.fast, str(engine.path)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "thin", "few"), [(torch.float32, 4, 0), (BF16, 4, 0), (BF16, 0, 0), (BF16, 0, 4)])
def test_a_graph_is_its_steps(name, dtype, thin, few):
    """To the bit: the same kernels over as many rows, two of them padding."""
    model = made(name, dtype)
    captured, eager = (
        Engine(copy.deepcopy(model), max_rows=4, max_length=99, graphs=graphs, thin=thin, few=few)
        for graphs in (True, False)
    )
    # The longer one gets its second page on the way.
    rows, found = prompts_of(5, 62, high=60), []
    for engine in (captured, eager):
        slots = [done.slot for done in engine.prefill_rows(rows)]
        engine.reserve(slots, 66)
        engine.steps.set_rows([7, 9], slots, [engine.slots.positions[slot] for slot in slots])
        logits = [engine.steps.run(4, "greedy")[:2].clone() for _ in range(4)]
        found.append([*logits, engine.steps.tokens[:2].clone(), engine.steps.positions.clone()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    for tensor, other in zip(held_tensors(captured), held_tensors(eager), strict=True):
        assert torch.equal(tensor, other)
    assert captured.path.graph, str(captured.path)
    assert not eager.path.graph


@pytest.mark.parametrize("name", ["llama", "llama, two layers", "phi, all"])
def test_rows_join_and_leave_without_a_new_capture(name):
    engine, reference = Engine(made(name), max_rows=8, max_length=64), made(name, device="cpu")
    engine.warm_up([1, 2, 4, 8], GenerationSettings())
    graphs = set(engine.steps._graphs)
    batch, prompts = Batch(engine), prompts_of(3, 9, 1, 30, 4, 4, 17, 2, 5, 6, high=60)
    counts = [5, 9, 14, 3, 7, 1, 12, 8, 10, 2]
    for prompt, count in zip(prompts, counts, strict=True):
        batch.add(prompt, GenerationSettings(max_new_tokens=count))
    found = {}
    while batch.unfinished:
        for event in batch.advance():
            found.setdefault(event.row, []).extend(event.tokens)
    assert set(engine.steps._graphs) == graphs
    for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        assert len(found[row]) == count
        tokens = [*prompt, *found[row]]
        for token, logits in zip(found[row], full_logits(reference, tokens[:-1], count), strict=True):
            # The likeliest, or as good as: two may be nearer than fp32 tells apart.
            assert logits[token] >= logits.max() - 2 * FP32 * logits.abs().max()


def test_nothing_of_a_slot_remains_for_its_next_row():
    for name in ("llama", "llama, two layers", "qwen3, all"):
        engine, (row,) = Engine(made(name), max_rows=2, max_length=32), prompts_of(6, high=60)
        slot = engine.prefill(row).slot
        wanted = [engine.step([token], [slot]).clone() for token in (4, 5, 6)]
        engine.release(slot)
        for tensor in held_tensors(engine):
            tensor.fill_(float("nan"))
        assert engine.prefill(row).slot == slot
        assert all(torch.equal(engine.step([t], [slot]), logits) for t, logits in zip((4, 5, 6), wanted, strict=True))


def test_decoding_waits_for_nothing():
    """Steps after the first may not synchronise with the host."""
    for name in ("llama", "llama, two layers", "phi, all"):
        engine = Engine(made(name, BF16), max_rows=4, max_length=200)
        slots = engine.occupy(4, 100)
        engine.decode([1, 2, 3, 4], 2, slots)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.steps.run(4, "greedy")
            engine.steps.run(4, "greedy")
        finally:
            torch.cuda.set_sync_debug_mode("default")
