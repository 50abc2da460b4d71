"""What a converted layer is trained by: by hand, by token, by document, and whom its gradient reaches."""

import copy
from functools import partial

import pytest
import torch

from lapcli.families.remote.lapcli_dual_state import gate_similarity
from lapcli.linearising.objective import LayerObjective
from lapcli.linearising.settings import DistillationSettings
from lapcli.linearising.start import fit_scale, fold_scale, output_variance, scaled
from lapcli.linearising.watching import attention_of, watched
from lapcli.models.loss import IGNORED
from lapcli.testing.dual_state import converted, tiny_teacher
from lapcli.training.packing import PackedBatch
from lapcli.training.stream import PackedSequence

F64 = torch.float64
IDS = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))


def settings(**change):
    return DistillationSettings(**{"data": "builtin", "seq_len": 40, "steps": 1, **change})


def batch_of(ids, starts=(0,)):
    return PackedBatch.of([PackedSequence(row, starts, "test") for row in ids])


@pytest.fixture
def models():
    teacher = tiny_teacher("llama", dtype=F64)
    student = converted(copy.deepcopy(teacher), 2)
    student.requires_grad_(False)
    converted(student, 1, seed=4)
    attention_of(student, 1).requires_grad_(True)
    return teacher.requires_grad_(False), student


def objective(models, **change):
    teacher, student = models
    return LayerObjective(student, teacher, layer=1, variance=0.7, distillation=settings(**change))


def by_hand(models, ids):
    """Outputs of the layer, gates and final logits, of one call."""
    found = []
    for model in models:
        with watched(model, 1) as seen:
            logits = model(input_ids=ids, use_cache=False).logits
        found.append((seen.outputs[0][:, :-1], logits[:, :-1]))
    layer = attention_of(models[1], 1)
    return *found, layer.log_decays(seen.inputs[0])[:, :-1]


def test_each_part_is_a_sum_over_the_tokens_that_count(models):
    found = objective(models).sums(batch_of(IDS))
    (wanted, guide), (made, logits), decays = by_hand(models, IDS)
    assert int(found.tokens) == 2 * 39
    assert found.alignment.item() == pytest.approx((made - wanted).square().mean(-1).sum().item() / 0.7)
    kl = (guide.softmax(-1) * (guide.log_softmax(-1) - logits.log_softmax(-1))).sum()
    assert found.kl.item() == pytest.approx(kl.item())
    assert found.similarity.item() == pytest.approx(gate_similarity(decays).item() * 78)
    entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum")
    assert found.cross_entropy.item() == pytest.approx(entropy.item())


def test_the_paper_s_letter(models):
    """KL(student || teacher) of softmax over features."""
    found = objective(models, align="kl").sums(batch_of(IDS)).alignment
    (wanted, _), (made, _), _ = by_hand(models, IDS)
    p, q = made.softmax(-1), wanted.softmax(-1)
    assert found.item() == pytest.approx((p * (p / q).log()).sum().item())


def test_the_loss_weighs_its_parts(models):
    parts = objective(models).sums(batch_of(IDS))
    own, kl, tokens = objective(models, align_weight=3.0, penalty=0.5)(batch_of(IDS))
    assert own.item() == pytest.approx((3 * parts.alignment + 0.5 * parts.similarity).item())
    assert kl.item() == pytest.approx(parts.kl.item())
    assert int(tokens) == 78


@pytest.mark.parametrize("part", ["alignment", "similarity", "kl"])
def test_gradients_reach_the_new_layer_alone(models, part):
    """The release computes its losses where no gradient flows: that of the converted layer is zero."""
    teacher, student = models
    getattr(objective(models).sums(batch_of(IDS)), part).backward()
    got = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert got
    assert all(name.startswith("model.layers.1.self_attn.") for name in got)
    gate = attention_of(student, 1).forget_proj
    assert gate.weight.grad.abs().max() > 0
    assert gate.bias.grad.abs().max() > 0
    if part != "similarity":
        assert attention_of(student, 1).mixture.grad.abs().max() > 0
        assert attention_of(student, 1).q_proj.weight.grad.abs().max() > 0
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert attention_of(student, 2).forget_proj.weight.grad is None


def test_what_a_token_costs_does_not_grow_with_length(models):
    """`batchmean` over rows would: a sequence twice as long, of the same document twice, costs the same a token."""
    once = objective(models).sums(batch_of(IDS[:1]))
    twice = objective(models).sums(batch_of(torch.cat((IDS[:1], IDS[:1]), 1), starts=(0, 40)))
    assert int(twice.tokens) == 2 * int(once.tokens)
    for name, value in once.means(int(once.tokens)).items():
        assert twice.means(int(twice.tokens))[name] == pytest.approx(value, rel=1e-9), name


def test_packed_documents_are_as_alone(models):
    """Case 9: no part sees another document, teacher and student alike."""
    packed = objective(models).sums(batch_of(IDS[:1], starts=(0, 13)))
    alone = [objective(models).sums(batch_of(IDS[:1, a:b])) for a, b in ((0, 13), (13, 40))]
    for name in ("alignment", "similarity", "kl", "cross_entropy", "tokens"):
        assert getattr(packed, name).item() == pytest.approx(sum(getattr(each, name).item() for each in alone)), name


def test_nothing_counts_where_no_token_does(models):
    from dataclasses import replace

    batch = batch_of(IDS)
    found = objective(models).sums(replace(batch, labels=torch.full_like(batch.labels, IGNORED)))
    assert found.alignment == found.kl == found.similarity == found.tokens == 0


def test_a_window_has_no_gates_to_compare():
    teacher = tiny_teacher("llama", dtype=F64)
    student = converted(copy.deepcopy(teacher), 1, window=7, sinks=2)
    found = LayerObjective(student, teacher, layer=1, variance=1.0, distillation=settings()).sums(batch_of(IDS))
    assert found.similarity == 0
    assert found.alignment > 0


def test_sizes_of_heads_are_fitted_by_least_squares():
    teacher = tiny_teacher("llama", dtype=F64)
    student = converted(copy.deepcopy(teacher), 1)
    run = partial(lambda model: model(input_ids=IDS, use_cache=False))
    with torch.no_grad(), watched(teacher, 1) as theirs:
        run(teacher)
    with torch.no_grad(), watched(student, 1) as mine:
        run(student)
    layer = attention_of(student, 1)
    weight, bias = layer.o_proj.weight.clone(), layer.o_proj.bias.clone()
    heads = mine.heads[0].flatten(0, 1).unflatten(1, (4, 8))
    columns = torch.einsum("nhv,dhv->ndh", heads, weight.unflatten(1, (4, 8))).flatten(0, 1)
    target = (theirs.outputs[0].flatten(0, 1) - bias).flatten()
    expected = torch.linalg.lstsq(columns, target.unsqueeze(1)).solution.squeeze(1)
    factors = fit_scale(layer, mine.heads, theirs.outputs)
    # The ridge, a millionth of a head's size.
    torch.testing.assert_close(factors, expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad(), scaled(layer, factors), watched(student, 1) as trained:
        run(student)
    assert torch.equal(layer.o_proj.weight, weight)
    fold_scale(layer, factors)
    torch.testing.assert_close(layer.o_proj.weight, weight * factors.repeat_interleave(8))
    with torch.no_grad(), watched(student, 1) as fitted:
        run(student)
    torch.testing.assert_close(trained.outputs[0], fitted.outputs[0])
    errors = [(seen.outputs[0] - theirs.outputs[0]).square().sum() for seen in (fitted, mine)]
    assert errors[0] < errors[1]


def test_a_head_that_gives_nothing_counts_nothing():
    teacher = tiny_teacher("llama", dtype=F64)
    layer = attention_of(converted(copy.deepcopy(teacher), 1), 1)
    given = torch.randn(1, 30, 32, dtype=F64)
    given[..., :8] = 0
    factors = fit_scale(layer, [given], [torch.randn(1, 30, 32, dtype=F64)])
    assert factors[0] == 0
    assert factors.isfinite().all()


def test_variance_is_over_tokens():
    outputs = [torch.randn(2, 5, 3, dtype=F64) + 100, torch.randn(1, 4, 3, dtype=F64) + 100]
    rows = torch.cat([x.flatten(0, 1) for x in outputs])
    assert output_variance(outputs) == pytest.approx(rows.var(0, correction=0).mean().item())
