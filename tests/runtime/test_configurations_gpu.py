"""Rows of several configurations on a GPU: graphs give what eager steps give, and both what exported models give."""

import pytest
import torch

from lapcli.families.loading import load_model, resolve_model
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.stages.linearising import export_prefix
from lapcli.testing.decoding import distance, full_logits, prompts_of
from lapcli.testing.dual_state import tiny_conversion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # fla, triton and transformers warn about themselves.
    pytest.mark.filterwarnings("ignore"),
]

# Two fp32 evaluations in another order of sums, with the GPU's own exponentials, over three layers.
FP32 = 3e-5
KINDS = ("llama", "phi", "qwen3")
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def products_in_fp32():
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Gives a kind's directory, and the library's models of its configurations on the CPU."""
    found = {}

    def make(kind):
        if kind not in found:
            sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 48 if kind == "qwen3" else 32}
            root = tiny_conversion(tmp_path_factory.mktemp("conversion") / "dir", kind, teacher=sizes)
            models = [load_model(resolve_model(str(root / "base")))]
            for number in (1, 2, 3):
                export_prefix(root, number, root.parent / str(number))
                models.append(load_model(resolve_model(str(root.parent / str(number)))))
            found[kind] = root, models
        return found[kind]

    return make


def loaded(root, dtype=torch.float32, **options):
    # Chunks in PyTorch, since fla multiplies fp32 in TF32.
    kernel = "chunked" if dtype == torch.float32 else "auto"
    return Engine.load(root, DEVICE, dtype, kernel, max_length=128, **options)


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_against_the_exported_models_on_the_cpu(made, kind, offload):
    root, models = made(kind)
    engine = loaded(root, max_rows=8, offload=offload)
    assert engine.path.fast, str(engine.path)
    rows, numbers = prompts_of(1, 7, 30, 70, 9, high=250), [0, 1, 2, 3, 1]
    done = engine.prefill_rows(rows, configurations=[f"{number}-of-3" for number in numbers])
    for row, number, found in zip(rows, numbers, done, strict=True):
        assert distance(found.logits.cpu(), full_logits(models[number], row)) < FP32
    # All, some that differ, some that agree, one.
    for step, chosen in enumerate(([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [3, 0], [1, 4], [2], [0], [4, 2, 1])):
        for row in chosen:
            rows[row].append(3 + (step * 37 + len(rows[row])) % 57)
        logits = engine.step([rows[row][-1] for row in chosen], [done[row].slot for row in chosen]).cpu()
        for row, found in zip(chosen, logits, strict=True):
            assert distance(found, full_logits(models[numbers[row]], rows[row])) < FP32
    assert engine.path.fast, str(engine.path)


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_is_its_steps(made, dtype, offload):
    """To the bit: the same kernels over as many rows, one of them padding; and offloaded weights are the weights."""
    root, _ = made("llama")
    engines = [
        loaded(root, dtype, max_rows=4, graphs=graphs, offload=brought)
        for graphs, brought in ((True, offload), (False, False))
    ]
    rows, found = prompts_of(5, 33, 12, high=250), []
    for engine in engines:
        done = engine.prefill_rows(rows, configurations=["0-of-3", "2-of-3", "3-of-3"])
        engine.set_rows([7, 9, 11], [each.slot for each in done])
        logits = [engine.steps.run(4, "greedy")[:3].clone() for _ in range(4)]
        found.append([*(each.logits for each in done), *logits, engine.steps.tokens[:3].clone()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert engines[0].path.graph, str(engines[0].path)
    assert not engines[1].path.graph


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
def test_rows_are_switched_while_steps_are_under_way(made, offload):
    root, models = made("llama")
    engine = loaded(root, max_rows=4, offload=offload)
    batch, prompts = Batch(engine, piece=16), prompts_of(3, 9, 1, 30, 4, 50, 17, high=250)
    for row, prompt in enumerate(prompts):
        batch.add(prompt, GenerationSettings(max_new_tokens=12), f"{row % 4}-of-3")
    tokens = {row: [] for row in range(len(prompts))}
    # What each row ran as, from which of its tokens on.
    ran = {row: [(0, row % 4)] for row in range(len(prompts))}
    steps = 0
    while batch.unfinished:
        for event in batch.advance():
            tokens[event.row] += event.tokens
        steps += 1
        if steps % 3 == 0:
            row, number = steps % len(prompts), (steps // 3) % 4
            held = batch._row(row)
            if held is not None and batch.switch(row, f"{number}-of-3"):
                # A step that was under way is of the old configuration.
                ran[row].append((len(held.tokens), number))
    assert batch.switches > 2
    assert batch.mixed_steps > 0
    for row, prompt in enumerate(prompts):
        assert len(tokens[row]) == 12
        for place, token in enumerate(tokens[row]):
            number = next(number for begin, number in reversed(ran[row]) if begin <= place)
            logits = full_logits(models[number], [*prompt, *tokens[row][:place]])
            # The likeliest, or as good as: two may be nearer than fp32 tells apart.
            assert logits[token] >= logits.max() - 2 * FP32 * logits.abs().max()
    assert engine.path.fast, str(engine.path)


def test_what_was_warmed_up_is_not_captured_again(made):
    root, _ = made("llama")
    engine = loaded(root, max_rows=4)
    engine.warm_up([1, 2, 4], GenerationSettings())
    graphs = set(engine.steps._graphs)
    # Each configuration at each size, and all together where there are two rows or more.
    assert len(graphs) == 3 * 4 + 2
    for numbers in ((0,), (3,), (1, 1), (0, 3), (3, 2, 0)):
        batch = Batch(engine)
        for number in numbers:
            batch.add([5, 6, 7], GenerationSettings(max_new_tokens=3), f"{number}-of-3")
        while batch.unfinished:
            batch.advance()
    assert set(engine.steps._graphs) == graphs


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
def test_decoding_waits_for_nothing(made, offload):
    """Steps after the first may not synchronise with the host."""
    root, _ = made("phi")
    engine = loaded(root, torch.bfloat16, max_rows=4, offload=offload)
    slots = [engine.occupy(1, 100, f"{number}-of-3")[0] for number in (0, 1, 3, 3)]
    engine.decode([1, 2, 3, 4], 2, slots)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.steps.run(4, "greedy")
        engine.steps.run(4, "greedy")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offloaded_projections_take_no_memory_of_the_device(made):
    root, _ = made("llama")
    taken = []
    # The first one makes libraries take workspaces.
    for offload in (False, False, True):
        before = torch.cuda.memory_allocated()
        engine = loaded(root, max_rows=1, offload=offload)
        taken.append((torch.cuda.memory_allocated() - before, engine.nbytes()))
        del engine
    _, (there, resident), (left, offloaded) = taken
    saved = resident["weights"] - offloaded["weights"]
    # Three layers have projections there, and two places are left on the device; allocations round up to 512 bytes.
    assert saved * 3 == offloaded["offloaded"]
    assert there - left == pytest.approx(saved, abs=64 * 512)
