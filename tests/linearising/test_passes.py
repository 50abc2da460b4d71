"""Student and teacher over packed text: what they share, to the bit; documents by ranks, as by positions."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lapcli.families.remote.lapcli_dual_state import Layout
from lapcli.families.remote.lapcli_dual_state_window import attention_mask
from lapcli.linearising.captured import gradients_of
from lapcli.linearising.objective import LayerObjective
from lapcli.linearising.passes import Pair, Text, draws, why_not_by_ranks
from lapcli.linearising.settings import DistillationSettings
from lapcli.linearising.start import scaled
from lapcli.linearising.watching import attention_of
from lapcli.testing.dual_state import converted, tiny_pair, tiny_teacher
from lapcli.testing.oracle import relative_error
from lapcli.training.packing import PackedBatch
from lapcli.training.stream import PackedSequence

F64 = torch.float64
IDS = torch.randint(3, 60, (3, 41), generator=torch.Generator().manual_seed(0))
STARTS = ((0, 1, 2, 19, 40), (0,), (0, 17, 33))
"""Documents of one token at either end of a row, one that is the row, ends within chunks of 16 and at their ends."""
BATCH = PackedBatch.of([PackedSequence(row, starts, "test") for row, starts in zip(IDS, STARTS, strict=True)])
# By one step after the other nothing is computed in another way, up to sums of some hundred terms in fp64. Chunks lie
# elsewhere: roundings of fp64 become roundings of fp32 in the library's norms, 2^-24, which further layers and
# gradients take a hundred times as far (as they do a change of 1e-10 in a weight).
EXACT = {"reference": 1e-12, "chunked": 100 * 2**-24}
VARIANTS = {
    "two states": {},
    "one wide state": {"states": 1, "width": 2},
    "a window": {"window": 7, "sinks": 2},
    "a window without sinks": {"window": 5, "sinks": 0},
}


def settings(**change):
    return DistillationSettings(**{"data": "builtin", "seq_len": 41, "steps": 1, **change})


def models(model_type="llama", dtype=F64, **options):
    return tiny_pair(model_type, teacher={"dtype": dtype}, **options)


def objective(pair, layer=1, **change):
    student, teacher = pair
    by_ranks = change.pop("by_ranks", False)
    return LayerObjective(
        student, teacher, layer=layer, variance=0.7, distillation=settings(**change), by_ranks=by_ranks
    )


@pytest.mark.parametrize("by_ranks", [False, True], ids=["by positions", "by ranks"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi", "phi3"])
def test_what_lies_below_the_converted_layers_is_computed_once_to_the_same_bits(model_type, by_ranks):
    pair = models(model_type, torch.float32)
    step = objective(pair, by_ranks=by_ranks)
    assert step._pair.first() == 1
    ran = []
    handle = pair[0].model.layers[0].mlp.register_forward_hook(lambda *_: ran.append(0))
    shared = gradients_of(step, step.read(BATCH))
    assert not ran
    whole = objective(pair, by_ranks=by_ranks)
    whole._pair._alike = 0
    apart = gradients_of(whole, whole.read(BATCH))
    assert len(ran) == 1
    handle.remove()
    assert all(torch.equal(one, other) for one, other in zip(shared, apart, strict=True))
    # The blocks are themselves again.
    assert "forward" not in vars(pair[0].model.layers[0])


def test_what_is_not_the_teacher_s_is_not_taken_from_it():
    student, teacher = models(before=())
    assert Pair(student, teacher, 1).first() == 1
    with torch.no_grad():
        student.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-9
    assert Pair(student, teacher, 1).first() == 0
    student, teacher = models(before=(0,), window=3)
    # A window has the teacher's tensors, and is no attention of its.
    assert Pair(student, teacher, 1).first() == 0
    student, teacher = models("phi", before=(), layer=2)
    assert Pair(student, teacher, 2).first() == 2
    student.model.layers[1].resid_dropout.p = 0.1
    assert draws(student)
    assert Pair(student, teacher, 2).first() == 0
    student, teacher = models(before=(), layer=2)
    student.model.embed_tokens = copy.deepcopy(student.model.embed_tokens)
    with torch.no_grad():
        student.model.embed_tokens.weight[5] += 1
    assert Pair(student, teacher, 2).first() == 0


def test_layers_that_are_put_in_place_later_are_the_student_s():
    """As when layers are trained one by one and measured together."""
    student, teacher = models(before=(), layer=2)
    pair = Pair(student, teacher, 2)
    assert pair.first() == 2
    converted(student, 1)
    assert pair.first() == 1


@pytest.mark.parametrize("kernel", EXACT)
@pytest.mark.parametrize("variant", VARIANTS)
def test_documents_by_ranks_are_those_by_positions(variant, kernel):
    pair = models(before=(0, 2), kernel=kernel, **VARIANTS[variant])
    align = "kl" if variant == "one wide state" else "mse"
    by_ranks, by_positions = (objective(pair, align=align, by_ranks=each) for each in (True, False))
    wanted = gradients_of(by_positions, BATCH)
    for one, other in zip(gradients_of(by_ranks, by_ranks.read(BATCH)), wanted, strict=True):
        assert relative_error(one, other) < EXACT[kernel]
    for name, value in vars(by_positions.sums(BATCH)).items():
        bound = EXACT[kernel]
        assert getattr(by_ranks.sums(BATCH), name).item() == pytest.approx(value.item(), rel=bound, abs=bound), name


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3", "smollm3", "phi", "phi3"])
def test_documents_by_ranks_in_every_kind_of_decoder(model_type):
    pair = models(model_type, kernel="reference")
    found, wanted = (
        gradients_of(step, step.read(BATCH)) for step in (objective(pair, by_ranks=each) for each in (True, False))
    )
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < EXACT["reference"]


@pytest.mark.parametrize("variant", ["two states", "a window"])
def test_by_ranks_nothing_of_another_document_is_left(variant):
    """Not even a rounding: the last document's gradients by what came before it are zero, whatever stands there."""
    student, _ = models(dtype=torch.float32, before=(0, 2), kernel="reference", **VARIANTS[variant])
    text = Text.of(BATCH, torch.device("cpu"))
    embeds = student.model.embed_tokens(text.ids).detach().requires_grad_()
    hidden = student.model(
        inputs_embeds=embeds,
        position_ids=text.ranks,
        attention_mask=attention_mask(text.ranks, torch.float32),
        dual_state_layout=Layout(ranks=text.ranks),
        use_cache=False,
    ).last_hidden_state
    # The document of row 0 from 19 on, and row 2's last.
    hidden[0, 19:40].sum().backward(retain_graph=True)
    hidden[2, 33:].sum().backward()
    touched = embeds.grad.abs().sum(-1) > 0
    assert touched.nonzero().tolist() == [[0, at] for at in range(19, 40)] + [[2, at] for at in range(33, 41)]


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device, or makes shapes of what lies in a tensor."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "item"):
            self.found.append(name)
        # A boolean index has a shape that depends on it.
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        self.found += [name for each in indices if each is not None and each.dtype == torch.bool]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_by_ranks_a_step_waits_for_nothing(variant):
    """Which a CUDA graph needs; what leaves each head is scaled, as in training."""
    pair = models(before=(0, 2), **VARIANTS[variant])
    step = objective(pair, by_ranks=True)
    text = step.read(BATCH)
    step._pair.first()
    with scaled(attention_of(pair[0], 1), torch.full((4,), 0.5)), Waits() as waits:
        gradients_of(step, text)
    assert waits.found == []
    with Waits() as waits:
        gradients_of(objective(pair), BATCH)
    # So the counter sees what there is.
    assert waits.found


def test_a_text_takes_another_batch_in_its_place():
    text = Text.of(BATCH, torch.device("cpu"))
    places = [tensor.data_ptr() for tensor in (text.ids, text.ranks, text.labels)]
    assert text.ids.data_ptr() != BATCH.ids.data_ptr()
    other = PackedBatch.of([PackedSequence(row, (0, 7), "test") for row in IDS.flip(0)])
    assert text.fits(other)
    text.hold(other)
    assert torch.equal(text.ids, other.ids)
    assert torch.equal(text.ranks, other.position_ids)
    assert torch.equal(text.labels, other.labels)
    assert [tensor.data_ptr() for tensor in (text.ids, text.ranks, text.labels)] == places
    assert not text.fits(PackedBatch.of([PackedSequence(IDS[0], (0,), "test")]))


def test_the_mask_is_what_pytorch_makes_of_truth_values():
    """To the bit, so that nothing changes but how often it is made."""
    q, k, v = torch.randn(3, 3, 2, 41, 8, generator=torch.Generator().manual_seed(1))
    ranks = BATCH.position_ids
    sequence = torch.tensor([[sum(at >= start for start in starts) for at in range(41)] for starts in STARTS])
    seen = (sequence[:, :, None] == sequence[:, None, :]) & torch.ones(41, 41, dtype=torch.bool).tril()
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(q, k, v, attention_mask(ranks, q.dtype)), attend(q, k, v, seen.unsqueeze(1)))


def test_where_documents_cannot_be_told_by_ranks():
    assert why_not_by_ranks(tiny_teacher("llama"), 41) is None
    slides = tiny_teacher("mistral", sliding_window=16)
    assert why_not_by_ranks(slides, 16) is None
    assert "16 tokens" in (why_not_by_ranks(slides, 17) or "")
    eager = tiny_teacher("llama")
    eager.config._attn_implementation = "eager"
    assert "eager" in (why_not_by_ranks(eager, 41) or "")
