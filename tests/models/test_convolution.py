"""The short convolution against torch's own, and its memory."""

import pytest
import torch

from lapcli.models.convolution import ShortConvolution, convolve
from lapcli.models.tokens import Packing, Padding
from lapkernels.testing import relative_error

EXACT = 1e-13


@pytest.fixture(params=[1, 2, 4], ids="W{}".format)
def convolution(request):
    torch.manual_seed(0)
    layer = ShortConvolution(5, request.param, silu=True).double()
    torch.nn.init.normal_(layer.weight)
    return layer


def by_torch(layer: ShortConvolution, x: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(x.mT, (layer.width - 1, 0))
    return torch.nn.functional.silu(torch.nn.functional.conv1d(padded, layer.weight, groups=5)).mT


@pytest.mark.parametrize("time", range(1, 9), ids="T{}".format)
def test_output_has_the_length_of_the_input(convolution, time):
    """Case 24."""
    x = torch.randn(2, time, 5, dtype=torch.float64)
    y, state = convolution(x)
    assert y.shape == x.shape
    assert state.shape == (2, convolution.width - 1, 5)
    assert relative_error(y, by_torch(convolution, x)) < EXACT


def test_a_filter_shared_by_a_head_is_one_for_each_of_its_channels():
    torch.manual_seed(0)
    shared, apart = ShortConvolution(6, 3, True, heads=2).double(), ShortConvolution(6, 3, True).double()
    torch.nn.init.normal_(shared.weight)
    apart.weight.data = torch.stack([shared.weight[channel // 3] for channel in range(6)]).detach()
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    (one, one_state), (other, other_state) = shared(x), apart(x)
    assert torch.equal(one, other)
    assert torch.equal(one_state, other_state)
    one.square().sum().backward()
    other.square().sum().backward()
    summed = torch.stack([apart.weight.grad[:3].sum(0), apart.weight.grad[3:].sum(0)])
    assert relative_error(shared.weight.grad, summed) < EXACT


def test_parts_with_the_carried_state_are_one_run(convolution):
    x = torch.randn(2, 11, 5, dtype=torch.float64)
    state, parts = None, []
    for part in x.split([1, 2, 1, 5, 2], dim=1):
        y, state = convolution(part, state)
        parts.append(y)
    assert relative_error(torch.cat(parts, 1), by_torch(convolution, x)) < EXACT
    assert torch.equal(state, x[:, 11 - (convolution.width - 1) :])


def test_the_state_does_not_keep_the_inputs_alive(convolution):
    _, state = convolution(torch.randn(1, 500, 5, dtype=torch.float64))
    assert state.untyped_storage().nbytes() == state.nbytes


def test_padding_is_passed_over(convolution):
    x = torch.randn(2, 9, 5, dtype=torch.float64)
    padding = Padding.of(torch.tensor([[0, 1, 0, 0, 1, 1, 0, 1, 0], [1] * 9]), 9)
    y, state = convolution(padding.keep(x), padding=padding)
    real = padding.is_token[0]
    assert relative_error(y[0, real], by_torch(convolution, x[:1, real])[0]) < EXACT
    assert torch.equal(state[0], x[0, real][4 - (convolution.width - 1) :])


def test_packed_sequences_do_not_see_one_another(convolution):
    x = torch.randn(1, 9, 5, dtype=torch.float64)
    before = torch.randn(3, convolution.width - 1, 5, dtype=torch.float64)
    packing = Packing.of(torch.tensor([0, 1, 7, 9]), None, 1, 9)
    y, state = convolution(x, before, packing=packing)
    for n, (start, stop) in enumerate(((0, 1), (1, 7), (7, 9))):
        alone, last = convolution(x[:, start:stop], before[n : n + 1])
        assert relative_error(y[:, start:stop], alone) < EXACT
        assert torch.equal(state[n : n + 1], last)


def test_sums_are_fp32_and_the_output_is_bf16(convolution):
    """Rounded once: half a unit in the last place from the fp64 result of the same rounded inputs."""
    layer, x = convolution.bfloat16(), torch.randn(2, 9, 5).bfloat16()
    y, state = layer(x)
    assert y.dtype == state.dtype == torch.bfloat16
    exact = by_torch(layer.double(), x.double())
    assert relative_error(y, exact) < 0.51 * torch.finfo(torch.bfloat16).eps


def test_a_mask_of_ones_is_no_padding():
    assert Padding.of(torch.ones(2, 9), 4) is None
    assert Padding.of(None, 4) is None
    later = Padding.of(torch.tensor([[0, 0, 1, 1, 1]]), 2)
    assert later is None


@pytest.mark.parametrize("bounds", [None, [0, 1, 7, 9]], ids=["rows", "packed"])
@pytest.mark.parametrize("carried", [False, True], ids=["no_state", "carried_state"])
def test_joined_convolutions_are_the_separate_ones(convolution, bounds, carried):
    """Outputs, states and every gradient, against torch's own convolution of each sequence by itself."""
    layers = (convolution, ShortConvolution(3, convolution.width, silu=True).double())
    torch.nn.init.normal_(layers[1].weight)
    rows, time, past = (2, 9, convolution.width - 1) if bounds is None else (3, 9, convolution.width - 1)
    inputs = [torch.randn(2 if bounds is None else 1, time, n, dtype=torch.float64) for n in (5, 3)]
    before = [torch.randn(rows, past, n, dtype=torch.float64) * carried for n in (5, 3)]
    leaves = [*(x.requires_grad_() for x in (*inputs, *before)), *(layer.weight for layer in layers)]
    packing = None if bounds is None else Packing.of(torch.tensor(bounds), None, 1, 9)
    outputs, states = convolve(layers, inputs, before if carried else None, packing=packing)

    wanted, last = [], []
    for layer, x, old in zip(layers, inputs, before, strict=True):
        parts = x.unbind(0) if bounds is None else x[0].split([1, 6, 2])
        extended = [torch.cat((o, part)) for o, part in zip(old, parts, strict=True)]
        alone = [
            torch.nn.functional.silu(torch.nn.functional.conv1d(e.mT, layer.weight, groups=layer.channels)).mT
            for e in extended
        ]
        wanted.append(torch.stack(alone) if bounds is None else torch.cat(alone).unsqueeze(0))
        last.append(torch.stack([e[len(e) - past :] for e in extended]))
    weights = [torch.randn_like(y) for y in (*wanted, *last)]

    def gradients(found):
        return torch.autograd.grad(found, leaves, weights, materialize_grads=True)

    for found, right in zip((*outputs, *states), (*wanted, *last), strict=True):
        assert found.shape == right.shape
        assert torch.allclose(found, right, rtol=0, atol=EXACT * 10)
    for leaf, found, right in zip(leaves, gradients([*outputs, *states]), gradients([*wanted, *last]), strict=True):
        if carried or not any(leaf is x for x in before):
            assert torch.allclose(found, right, rtol=0, atol=EXACT * 100), leaf.shape


def test_states_that_are_not_wanted_are_not_made(convolution):
    _, states = convolve((convolution,), (torch.randn(2, 9, 5, dtype=torch.float64),), keep_states=False)
    assert states == ()


@pytest.mark.parametrize("carried", [False, True], ids=["from zeros", "from a state"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_without_gradients_it_is_the_same(convolution, padded, carried, monkeypatch):
    """What a GPU runs then, by its definition."""
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    states = [torch.randn(2, convolution.width - 1, 5, dtype=torch.float64)] if carried else None
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [1] * 7]) if padded else None
    found = []
    for fused in (False, True):
        monkeypatch.setattr("lapcli.models.convolution.by_one_kernel", lambda *_, fused=fused: fused)
        with torch.no_grad():
            found.append(convolve((convolution,), (x,), states, Padding.of(mask, 7)))
    for (ours,), (theirs,) in zip(*found, strict=True):
        there = slice(None) if mask is None or ours.shape[1] != 7 else mask.bool()
        assert relative_error(ours[there], theirs[there]) < EXACT
