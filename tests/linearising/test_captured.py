"""Training steps as graphs: the same sums and gradients, or none at all where a graph keeps what it should not."""

import inspect
from functools import partial
from itertools import pairwise

import pytest
import torch

from lapcli.families.remote.lapcli_dual_state import dual_state_layers
from lapcli.linearising import captured as subject
from lapcli.linearising.captured import Capturing, disagreement, gradients_of
from lapcli.linearising.objective import LayerObjective
from lapcli.linearising.settings import DistillationSettings
from lapcli.testing.dual_state import converted, recorded, tiny_pair, tiny_teacher
from lapcli.testing.oracle import relative_error
from lapcli.training.distillation import Sums, total
from lapcli.training.packing import PackedBatch
from lapcli.training.stream import PackedSequence

T = 41
CUTS = ((0, 5, 6, 30), (0,), (0, 1, 17), (0, 40), (0, 16, 32, 33))


def batch_of(number, rows=2, time=T, vocabulary=60):
    """A batch with boundaries of its own."""
    draw = torch.Generator().manual_seed(number)
    return PackedBatch.of(
        [
            PackedSequence(
                torch.randint(3, vocabulary, (time,), generator=draw), CUTS[(number + row) % len(CUTS)], "test"
            )
            for row in range(rows)
        ]
    )


# The loss is divided by a step's tokens before the way back or after it, and the library's norms round to fp32.
ROUNDED = 100 * 2**-24
BATCHES = [batch_of(number) for number in range(5)]


def objective(pair, capturing=None, **options):
    student, teacher = pair
    distillation = DistillationSettings(data="builtin", seq_len=T, steps=1, kl_weight=0.6)
    return LayerObjective(
        student, teacher,
        **{"layer": 1, "variance": 0.7, "distillation": distillation, "by_ranks": True, "capturing": capturing,
           "temperature": 1.5, **options},
    )  # fmt: skip


def trained(pair):
    return {name: each for name, each in pair[0].named_parameters() if each.requires_grad}


def train(pair, step, batches=BATCHES, rate=0.02):
    """Losses and gradients of some steps, as the engine takes them: two parts each, gradients added up."""
    found = []
    for first, second in pairwise(batches):
        for each in trained(pair).values():
            each.grad = None
        losses = []
        for part in (first, second):
            sums = Sums(*step(part))
            loss = total(sums, 150, weight=0.6, temperature=1.5)
            loss.backward()
            losses.append(torch.stack((sums.cross_entropy.detach(), sums.kl.detach(), loss.detach(), sums.tokens)))
        gradients = {name: each.grad.clone() for name, each in trained(pair).items()}
        found.append((torch.stack(losses), gradients))
        with torch.no_grad():
            for each in trained(pair).values():
                each -= rate * each.grad
    return found


@pytest.mark.parametrize("variant", [{}, {"window": 7, "sinks": 2}], ids=["states", "window"])
def test_steps_from_a_graph_are_the_steps(variant):
    """Over batches with boundaries of their own, while the parameters change."""
    with Capturing(recorded) as capturing:
        pair = tiny_pair(before=(2,), **variant)
        found = train(pair, objective(pair, capturing))
        assert capturing.failure is None
        assert capturing.steps == 8
    pair = tiny_pair(before=(2,), **variant)
    true = train(pair, objective(pair))
    assert torch.equal(found[0][0], true[0][0])
    for (losses, gradients), (true_losses, true_gradients) in zip(found, true, strict=True):
        assert relative_error(losses, true_losses) < ROUNDED
        for name, gradient in gradients.items():
            assert relative_error(gradient, true_gradients[name]) < ROUNDED, name


def test_validation_comes_from_the_graph_once_there_is_one():
    pair = tiny_pair()
    with Capturing(recorded) as capturing:
        step = objective(pair, capturing)
        with torch.no_grad():
            assert capturing.sums(step, BATCHES[0]) is None
        step(BATCHES[0])
        with torch.no_grad():
            found = capturing.sums(step, BATCHES[1])
            assert found is not None
            assert [each.requires_grad for each in found] == [False] * 3
            again = capturing.sums(step, BATCHES[2])
            assert not torch.equal(found[0], again[0])
            for one, other in zip(found, step.parts(step.read(BATCHES[1])), strict=True):
                assert torch.equal(one, other)
        assert capturing.steps == 1
        # Of another shape than that of the first step.
        assert capturing.sums(step, batch_of(0, rows=1)) is None
        assert step(batch_of(0, rows=1))[0].requires_grad
        assert capturing.failure is None


def keeping(what):
    """A recorder whose graph keeps something of the time when it was made."""

    def wrong(call, _device, *, pair):
        text = inspect.getclosurevars(call).nonlocals["text"]
        kept = {
            "the whole step": None,
            "the weights": list(trained(pair).values()),
            "the boundaries": [text.ranks],
            "the text": [text.ids, text.labels],
        }[what]
        values = None if kept is None else [each.detach().clone() for each in kept]
        found = [each.clone() for each in call()]

        def replay():
            if kept is None:
                return
            now = [each.detach().clone() for each in kept]
            with torch.no_grad():
                for each, value in zip(kept, values, strict=True):
                    each.copy_(value)
            for place, value in zip(found, call(), strict=True):
                place.copy_(value)
            with torch.no_grad():
                for each, value in zip(kept, now, strict=True):
                    each.copy_(value)

        return replay, found

    return wrong


@pytest.mark.parametrize("what", ["the whole step", "the weights", "the boundaries", "the text"])
def test_a_graph_that_keeps_something_is_not_used(what):
    pair = tiny_pair()
    before = {name: each.detach().clone() for name, each in trained(pair).items()}
    with Capturing(partial(keeping(what), pair=pair)) as capturing:
        step = objective(pair, capturing)
        found = step(BATCHES[0])
        assert "wrong" in (capturing.failure or "")
        assert capturing.steps == 0
    # The parameters are what they were, to the bit, and the step is computed without a graph.
    assert all(torch.equal(before[name], each) for name, each in trained(pair).items())
    for one, other in zip(found, objective(pair)(BATCHES[0]), strict=True):
        assert torch.equal(one, other)
    torch.autograd.grad(found[1], list(trained(pair).values()))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("operation not permitted when stream is capturing\nCompile with"), "operation not permitted"),
        (torch.OutOfMemoryError("much"), "more memory"),
    ],
    ids=["waits", "memory"],
)
def test_what_cannot_be_captured_runs_without(error, said):
    pair = tiny_pair()
    before = {name: each.detach().clone() for name, each in trained(pair).items()}

    def fails(call, device):
        call()
        raise error

    with Capturing(fails) as capturing:
        step = objective(pair, capturing)
        assert step(BATCHES[0])[1].requires_grad
        assert said in (capturing.failure or "")
        assert "\n" not in (capturing.failure or "")
        # Not tried again.
        step(BATCHES[1])
    assert all(torch.equal(before[name], each) for name, each in trained(pair).items())


def test_parameters_that_moved_are_not_read_where_they_were():
    pair = tiny_pair()
    with Capturing(recorded) as capturing:
        step = objective(pair, capturing)
        step(BATCHES[0])
        gate = pair[0].model.layers[1].self_attn.forget_proj
        gate.weight.data = gate.weight.data.clone()
        found = step(BATCHES[1])
        assert capturing.failure == "trained parameters moved"
    assert found[1].requires_grad


def test_what_is_known_not_to_be_right_is_not_captured():
    student, _ = tiny_pair()
    assert subject.why_not_captured(student) is None
    dual_state_layers(student)[1].kernel = "reference"
    assert "layer 1" in (subject.why_not_captured(student) or "")
    student = converted(tiny_teacher("llama", attention_dropout=0.1), 1)
    assert "at random" in (subject.why_not_captured(student) or "")


def test_what_counts_as_apart():
    wanted = [torch.tensor(50.0), torch.tensor(10.0), torch.tensor(100), torch.full((3,), 2.0), torch.ones(2)]

    def changed(place, value):
        return [value if number == place else each for number, each in enumerate(wanted)]

    assert disagreement(wanted, wanted) is None
    assert disagreement(changed(0, torch.tensor(55.0)), wanted) is None
    assert "own loss" in (disagreement(changed(0, torch.tensor(60.0)), wanted) or "")
    # A KL of nearly nothing may be another of nearly nothing, not a real one.
    none = [wanted[0], torch.tensor(0.01), *wanted[2:]]
    assert disagreement([wanted[0], torch.tensor(0.15), *wanted[2:]], none) is None
    assert "KL" in (disagreement(changed(1, torch.tensor(1.0)), none) or "")
    assert "99 tokens" in (disagreement(changed(2, torch.tensor(99)), wanted) or "")
    assert disagreement(changed(3, torch.full((3,), 2.1)), wanted) is None
    assert "tensor 0" in (disagreement(changed(3, torch.full((3,), 2.5)), wanted) or "")
    # Of each tensor, however large others are, unless it is next to nothing.
    for size, noticed in ((0.1, True), (0.0001, False)):
        one, other = ([*wanted[:4], torch.full((2,), factor * size)] for factor in (1.3, 1))
        assert ("tensor 1" in (disagreement(one, other) or "")) == noticed
    assert disagreement([*wanted[:3], torch.zeros(3)], [*wanted[:3], torch.zeros(3)]) is None
    assert disagreement([*wanted[:3], torch.ones(3)], [*wanted[:3], torch.zeros(3)]) is not None
    for place in (0, 1, 3):
        assert disagreement(changed(place, wanted[place] * torch.nan), wanted) is not None


def test_gradients_leave_nothing_behind():
    pair = tiny_pair()
    found = gradients_of(objective(pair), objective(pair).read(BATCHES[0]))
    assert all(each.grad is None for each in trained(pair).values())
    assert [each.shape for each in found[3:]] == [each.shape for each in trained(pair).values()]
    own, kl, _ = objective(pair)(BATCHES[0])
    total(Sums(own, kl, own), 1, weight=0.6, temperature=1.5).backward()
    for gradient, each in zip(found[3:], trained(pair).values(), strict=True):
        assert relative_error(gradient, each.grad) < ROUNDED
