"""Training steps as CUDA graphs: sums and gradients over batches with boundaries of their own, on real kernels."""

import copy

import pytest
import torch

from lapcli.linearising import captured as subject
from lapcli.linearising.captured import APART, Capturing, gradients_of
from lapcli.linearising.objective import LayerObjective
from lapcli.linearising.settings import DistillationSettings, LayerSettings, LinearisingSettings, SensitivitySettings
from lapcli.machine import Machine
from lapcli.reporting import SilentReporter
from lapcli.stages.linearising import linearise_into, plan_linearising
from lapcli.testing.dual_state import tiny_pair, tiny_source
from lapcli.testing.oracle import relative_error
from lapcli.training.packing import PackedBatch
from lapcli.training.stream import PackedSequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

T = 192
CUTS = ((0, 5, 6, 30, 100), (0,), (0, 1, 64, 65, 190), (0, 191), (0, 63, 128), (0, 2, 4, 6, 8, 10, 12))
TEACHER = {
    "dtype": torch.bfloat16, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 300,
}  # fmt: skip
VARIANTS = {
    "first layer": {"before": ()},
    "behind others": {"before": (0, 3)},
    "one wide state": {"before": (3,), "states": 1, "width": 2},
    "window": {"before": (3,), "window": 30, "sinks": 2},
}


def batch_of(number, rows=4):
    draw = torch.Generator().manual_seed(number)
    return PackedBatch.of(
        [
            PackedSequence(torch.randint(3, 300, (T,), generator=draw), CUTS[(number + row) % len(CUTS)], "test")
            for row in range(rows)
        ]
    )


BATCHES = [batch_of(number) for number in range(6)]


def models(**options):
    student, teacher = tiny_pair(teacher=TEACHER, **options)
    return student.cuda(), teacher.cuda()


def objective(pair, *, by_ranks=True, capturing=None, autocast=True):
    distillation = DistillationSettings(data="builtin", seq_len=T, steps=1)
    return LayerObjective(
        *pair, layer=1, variance=0.7, distillation=distillation, by_ranks=by_ranks, capturing=capturing,
        autocast=autocast,
    )  # fmt: skip


def truth(pair, batch):
    """In fp32 by positions, states as products in PyTorch."""
    pair = [copy.deepcopy(model).float() for model in pair]
    for layer in pair[0].model.layers:
        if hasattr(layer.self_attn, "kernel"):
            layer.self_attn.kernel = "chunked"
    return gradients_of(objective(pair, by_ranks=False, autocast=False), batch)


def as_near(found, other, wanted):
    """As near to the truth as what is known to be right, up to twice its rounding, by the worst tensor of each."""
    assert all(each.isfinite().all() for each in found)
    off, known = ([relative_error(*each) for each in zip(part, wanted, strict=True)] for part in (found, other))
    # bf16 rounds by 2^-9 at most.
    assert max(off) < 2 * max(known) + 2**-8, (off, known)


def step(pair, run, batch, rate=1e-3):
    """The sums of a step and its gradients; the parameters take a step by them."""
    parameters = [each for each in pair[0].parameters() if each.requires_grad]
    for each in parameters:
        each.grad = None
    own, kl, tokens = run(batch)
    (own + kl).backward()
    found = [own.detach().clone(), kl.detach().clone(), tokens.clone(), *(each.grad.clone() for each in parameters)]
    with torch.no_grad():
        for each in parameters:
            each -= rate * each.grad / tokens
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_documents_by_ranks_are_as_near_the_truth_as_by_positions(variant):
    pair = models(**VARIANTS[variant])
    for batch in BATCHES[:3]:
        by_ranks, by_positions = (objective(pair, by_ranks=each) for each in (True, False))
        found, right = gradients_of(by_ranks, by_ranks.read(batch)), gradients_of(by_positions, batch)
        as_near(found, right, truth(pair, batch))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_captured_step_is_the_step(variant):
    """Over batches with other boundaries, while parameters change; each beside the same kernels launched one by one."""
    pair = models(**VARIANTS[variant])
    apart = []
    with Capturing() as capturing:
        captured = objective(pair, capturing=capturing)
        for batch in BATCHES:
            plain = gradients_of(objective(pair), objective(pair).read(batch))
            exact = truth(pair, batch)
            found = step(pair, captured, batch)
            as_near(found, plain, exact)
            apart += [relative_error(one, other) for one, other in zip(found[3:], plain[3:], strict=True)]
        assert capturing.failure is None
        assert capturing.steps == len(BATCHES)
    # So that APART, which refuses graphs, is far from what is right; another batch is far from it, too.
    assert max(apart) < APART / 4
    other = gradients_of(objective(pair), objective(pair).read(BATCHES[0]))
    assert max(relative_error(one, right) for one, right in zip(other[3:], found[3:], strict=True)) > 2 * APART


def test_a_captured_step_waits_for_nothing_and_gives_its_memory_back():
    pair = models(before=(0, 3))
    torch.cuda.empty_cache()
    with Capturing() as capturing:
        captured = objective(pair, capturing=capturing)
        step(pair, captured, BATCHES[0])
        assert capturing.failure is None
        held = torch.cuda.memory_reserved()
        with subject._refusing_to_wait():
            own, kl, _tokens = captured(BATCHES[1])
            (own + kl).backward()
        with torch.no_grad():
            validated = captured(BATCHES[1])
        assert torch.equal(validated[0], own)
        assert torch.equal(validated[1], kl)
        del own, kl, _tokens, validated
    assert torch.cuda.memory_reserved() < held


def test_what_waits_for_the_device_is_not_captured():
    def waits(_module, _args, output):
        assert output.sum().item() < float("inf")

    pair = models(before=())
    handle = pair[0].model.layers[2].mlp.register_forward_hook(waits)
    with Capturing() as capturing:
        found = step(pair, objective(pair, capturing=capturing), BATCHES[0])
        assert capturing.failure is not None
    handle.remove()
    # Nothing of the attempt is left: that step was the one without a graph, and the next one is captured.
    fresh = models(before=())
    as_near(found, gradients_of(objective(fresh), objective(fresh).read(BATCHES[0])), truth(fresh, BATCHES[0]))
    with Capturing() as capturing:
        step(pair, objective(pair, capturing=capturing), BATCHES[1])
        assert capturing.failure is None


def test_a_graph_of_other_weights_is_refused(monkeypatch):
    """A copy of a weight in bf16, as autocast might keep it from before the capture."""
    pair = models(before=())
    layer = pair[0].model.layers[1].self_attn.o_proj
    kept = []

    def stale(_module, args, _output):
        if not kept:
            kept.append(layer.weight.detach().clone())
        return torch.nn.functional.linear(args[0].float(), kept[0] + 0 * layer.weight).to(_output.dtype)

    record = subject.record_cuda_graph

    def recorded(call, device):
        handle = layer.register_forward_hook(stale)
        try:
            return record(call, device)
        finally:
            handle.remove()

    with Capturing(recorded) as capturing:
        objective(pair, capturing=capturing)(BATCHES[0])
        assert "wrong" in (capturing.failure or "")


class Told(SilentReporter):
    def __init__(self):
        self.notices = []

    def notice(self, text):
        self.notices.append(text)


def test_a_conversion_from_graphs_is_the_conversion(tmp_path):
    source = tiny_source("llama", tmp_path / "model", hidden_size=128, intermediate_size=192)
    text = tmp_path / "text.txt"
    words = ["the", "state", "forgets", "slowly", "what", "a", "window", "never", "sees", "and", "reads", "again"]
    picks = torch.randint(0, len(words), (900, 12), generator=torch.Generator().manual_seed(0))
    text.write_text("\n\n".join(" ".join(words[i] for i in row) for row in picks.tolist()))
    chosen = LinearisingSettings(
        layer=LayerSettings(),
        order="first",
        sensitivity=SensitivitySettings(data=str(text), samples=3, seq_len=96),
        distillation=DistillationSettings(
            data=str(text), seq_len=96, steps=12, batch=4, validation=4, lr=5e-3, lr_min=1e-3
        ),
    )
    found = {}
    for graphs in (True, False):
        told = Told()
        plan = plan_linearising(source, chosen, "0.7", tmp_path / str(graphs))
        result = linearise_into(
            plan, machine=Machine("cuda", "bfloat16"), micro_batch=4, cuda_graphs=graphs, reporter=told
        )
        found[graphs] = result.prefixes
        assert any("training steps are CUDA graphs" in each for each in told.notices) == graphs, told.notices
        assert not any("launched" in each or "the host tells" in each for each in told.notices), told.notices
    for one, other in zip(found[True], found[False], strict=True):
        assert one["alignment"]["before"] == other["alignment"]["before"]
        # Twelve steps of gradients that differ by a hundredth at most leave losses that do so by less.
        for got, want in ((one["alignment"]["after"], other["alignment"]["after"]), (one["kl"], other["kl"])):
            assert got == pytest.approx(want, rel=0.02)
