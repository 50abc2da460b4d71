"""What stands at a pad, or in another document of a packed row, reaches no gradient; NaN shows it best."""

import pytest
import torch

from lapkernels.testing import relative_error

# fp64 through two layers and back.
EXACT = 1e-10

NAN = pytest.param(torch.nan, id="nan")

MASK = torch.tensor([[0, 0, 0, 0, 0, *[1] * 10], [1] * 15])


def results(model, embeddings, labels, **layout):
    """Loss and logits, with the gradients of the embeddings and of all parameters but the embedding table."""
    embeddings = embeddings.detach().requires_grad_()
    output = model(inputs_embeds=embeddings, labels=labels, **layout)
    # Last of all: a tied head has its gradient from the logits alone, since the embeddings come from outside.
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if "embeddings" not in n), strict=True)
    found = torch.autograd.grad(output.loss, [embeddings, *parameters])
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), "embeddings": found[0]}, dict(
        zip(names, found[1:], strict=True)
    )


def at_pads(model, ids, value):
    embeddings = model.get_input_embeddings()(ids).detach()
    embeddings[0, MASK[0] == 0] = value
    return embeddings


@pytest.fixture
def left_padded(model, tokens):
    ids = tokens(2, 15)
    plain = results(model, at_pads(model, ids, 0.5), ids, attention_mask=MASK)
    return ids, plain


@pytest.mark.parametrize("value", [pytest.param(1e150, id="huge"), NAN])
def test_pads_reach_no_real_tokens_gradient(model, left_padded, value):
    """Case 7, backward: loss, logits and the tokens' own gradients are those of other pads, to the bit."""
    ids, (plain, _) = left_padded
    found, _ = results(model, at_pads(model, ids, value), ids, attention_mask=MASK)
    real = MASK.bool()
    assert torch.equal(found["loss"], plain["loss"])
    assert torch.equal(found["logits"][real], plain["logits"][real])
    assert torch.equal(found["embeddings"][real], plain["embeddings"][real])
    # All but the last token of a row predict something, so all of these have a gradient.
    assert plain["embeddings"][:, :-1][real[:, :-1]].abs().amax(-1).min() > 0
    assert plain["embeddings"][~real].abs().max() == 0


@pytest.mark.parametrize("value", [pytest.param(1e3, id="garbage"), NAN])
def test_pads_reach_no_parameters_gradient(model, left_padded, value):
    ids, (_, plain) = left_padded
    _, found = results(model, at_pads(model, ids, value), ids, attention_mask=MASK)
    for name, wanted in plain.items():
        assert torch.equal(found[name], wanted), name


def test_padded_gradients_are_those_of_the_rows_alone(model, tokens):
    """Both rows' losses weigh their own tokens, so the sums of gradients add up."""
    ids = tokens(2, 15)
    embeddings = model.get_input_embeddings()(ids).detach()
    padded, gradients = results(model, embeddings, ids, attention_mask=MASK)
    real = MASK[0].bool()
    first, first_gradients = results(model, embeddings[:1, real], ids[:1, real])
    second, second_gradients = results(model, embeddings[1:], ids[1:])
    predicted = (9, 14)

    def mean(a, b):
        return (predicted[0] * a + predicted[1] * b) / sum(predicted)

    assert relative_error(padded["loss"], mean(first["loss"], second["loss"])) < EXACT
    for name, gradient in gradients.items():
        assert relative_error(gradient, mean(first_gradients[name], second_gradients[name])) < EXACT, name
    alone = torch.cat([9 / 23 * first["embeddings"][0], 14 / 23 * second["embeddings"][0]])
    assert relative_error(torch.cat([padded["embeddings"][0, real], padded["embeddings"][1]]), alone) < EXACT


@pytest.mark.parametrize("spoilt", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_packed_document_of_nan_stays_its_own(model, tokens, spoilt):
    """Loss over the other documents: their logits and their embeddings' gradients keep every bit."""
    bounds = [0, 4, 11, 19]
    ids = tokens(1, 19)
    place = slice(bounds[spoilt], bounds[spoilt + 1])
    others = torch.ones(19, dtype=torch.bool)
    others[place] = False
    labels = torch.where(others, ids, -100)
    clean = model.get_input_embeddings()(ids).detach()
    poisoned = clean.clone()
    poisoned[:, place] = torch.nan
    (wanted, _), (found, _) = (results(model, x, labels, cu_seqlens=torch.tensor(bounds)) for x in (clean, poisoned))
    assert torch.equal(found["loss"], wanted["loss"])
    for name in ("logits", "embeddings"):
        assert torch.equal(found[name][:, others], wanted[name][:, others]), name
    assert found["logits"][:, place].isnan().all()
