"""The short convolution against torch's own, and its memory."""

import pytest
import torch

from lapcli.models.convolution import ShortConvolution
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
