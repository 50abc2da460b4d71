"""The kernels for products of few rows, compiled."""

import pytest
import torch

from lapkernels.few_linear import few_linear, few_swiglu, is_faster, select_impl, why_not
from lapkernels.norm import rms_norm, swiglu
from lapkernels.testing import poisoned
from lapkernels.testing_few import SHAPES, check, check_gated

BF16 = torch.bfloat16
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LAYERS = {
    "output": (2048, 3072, True), "down": (2048, 5632, True), "in": (7744, 2048, False), "up": (11264, 2048, False),
    "head": (32000, 2048, False),
}  # fmt: skip
"""N, D, and whether the sum is left to the reader."""


@pytest.fixture(params=["triton", "gluon"])
def impl(request):
    if why := why_not(request.param, "cuda", BF16):
        pytest.skip(why)
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_products(impl, shape, dtype):
    check(shape, impl, dtype, "cuda")
    check_gated(shape, impl, dtype, "cuda")


@pytest.mark.parametrize("rows", [16, 32, 48, 64])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_a_model(impl, layer, rows):
    """All numbers of each, against fp64, with a kernel before and one behind that read and write the same memory."""
    (outputs, width, apart), device = LAYERS[layer], torch.device("cuda")
    generator = torch.Generator(device).manual_seed(rows)
    first, x = (torch.randn(rows, width, generator=generator, device=device).to(BF16) for _ in range(2))
    weight = (torch.randn(outputs, width, generator=generator, device=device) * width**-0.5).to(BF16)
    wanted = x.double() @ weight.double().t()
    gain, zeros = torch.ones(outputs, device=device, dtype=BF16), torch.zeros(rows, outputs, device=device)
    held = first.clone()
    with poisoned():
        few_linear(held, weight, apart=apart, ready=True, impl=impl)
    for _ in range(20):
        held.copy_(first)
        held.copy_(x)
        found = few_linear(held, weight, apart=apart, ready=True, impl=impl)
        total = rms_norm(found, gain, residual=zeros, shares=True).residual if apart else found
        held.fill_(torch.nan)
        error = (total.double() - wanted).abs().max()
        assert float(error) <= 10 * 2**-23 * width**0.5 * 6 + (0 if apart else 2**-8 * float(wanted.abs().max()))


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64])
@pytest.mark.parametrize("inner", [5632, 5600, 3000, 1001, 64, 8])
def test_gate_and_up_are_the_two_kernels_to_the_bit(impl, inner, rows):
    """Widths that are no multiple of a tile, with NaN behind the matrix, and kernels before and behind as above."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(inner + rows)
    first, x = (torch.randn(rows, 2048, generator=generator, device=device).to(BF16) for _ in range(2))
    whole = torch.full((2 * inner + 64, 2048), torch.nan, device=device, dtype=BF16)
    weight = whole[: 2 * inner]
    # Gates and ups from where SiLU is 0 to where it is its argument, and some that overflow an exponential.
    weight.copy_(torch.randn(2 * inner, 2048, generator=generator, device=device))
    weight *= (torch.rand(2 * inner, 1, generator=generator, device=device) * 5).exp() * 2048**-0.5
    bias = torch.randn(2 * inner, generator=generator, device=device).to(BF16)
    for added in (None, bias):
        wanted = swiglu(few_linear(x, weight, added, impl=impl), impl="triton")
        gate, up = few_linear(x, weight, added, impl="reference").chunk(2, 1)
        assert bool(wanted.isfinite().all())
        held = first.clone()
        with poisoned():
            few_swiglu(held, weight, added, ready=True, impl=impl)
        for _ in range(5):
            held.copy_(first)
            held.copy_(x)
            with poisoned():
                found = few_swiglu(held, weight, added, ready=True, impl=impl)
            held.fill_(torch.nan)
            assert torch.equal(found, wanted)
        # And those are right: each of gate and up may have been rounded to the other side.
        off = 2**-7 * (gate.abs() + up.abs()).float() + 2**-6
        plain = torch.nn.functional.silu(gate.float()) * up.float()
        assert bool(((found.float() - plain).abs() <= off * (1.1 + gate.abs() + up.abs()).float()).all())


def test_a_graph_is_its_launches(impl):
    """A chain of products and norms, to the bit, replayed with other numbers."""
    device = torch.device("cuda")
    weight, back, gain = (torch.randn(s, device=device, dtype=BF16) * 0.02 for s in ((6144, 2048), (2048, 3072), 2048))
    x = torch.randn(64, 2048, device=device, dtype=BF16)

    def chain() -> torch.Tensor:
        stream = x.clone()
        normed = rms_norm(stream, gain).output
        for _ in range(4):
            for part in (few_linear(normed, weight, ready=True, impl=impl)[:, :3072], None):
                inner = few_swiglu(normed, weight, ready=True, impl=impl) if part is None else part
                shares = few_linear(inner, back, apart=True, ready=True, impl=impl)
                normed, stream = rms_norm(shares, gain, residual=stream, shares=True, dtype=BF16, ready=True)
        return stream

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(found, chain())
        assert bool(found.isfinite().all())


def test_a_matrix_of_more_than_two_billion_numbers(impl):
    weight = torch.ones(300_000, 8192, dtype=BF16, device="cuda")
    weight[-1] = 2.0
    x = torch.full((17, 8192), 2**-13, dtype=BF16, device="cuda")
    found = few_linear(x, weight, impl=impl)
    assert found[:, 0].tolist() == [1.0] * 17
    assert found[:, -1].tolist() == [2.0] * 17
    # Gates of 1, ups of 1 but the last.
    found, one = few_swiglu(x, weight, impl=impl), torch.sigmoid(torch.ones(1)).to(BF16).item()
    assert found[:, 0].tolist() == [one] * 17
    assert found[:, -1].tolist() == [2 * one] * 17


def test_the_choice():
    """What is chosen on a Hopper; elsewhere torch's product."""
    x, weight = (torch.ones(n, 2048, dtype=BF16, device="cuda") for n in (64, 7744))
    chosen = select_impl("cuda", BF16).name
    assert is_faster(x, weight) == (chosen != "reference")
    assert is_faster(x, weight, gated=True) == (chosen == "gluon")
    assert not is_faster(x[:8], weight)
    assert not is_faster(x.float(), weight.float())
    if torch.cuda.get_device_capability()[0] == 9:
        assert chosen in ("triton", "gluon")


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 64])
def test_the_norm_of_shares(splits, rows):
    device = torch.device("cuda")
    shares, gain = torch.randn(splits, rows, 2048, device=device), torch.randn(2048, device=device).to(BF16)
    residual = torch.randn(rows, 2048, device=device).to(BF16)
    found = rms_norm(shares, gain, residual=residual, shares=True, dtype=BF16, impl="triton")
    early = rms_norm(shares, gain, residual=residual, shares=True, dtype=BF16, ready=True, impl="triton")
    assert all(map(torch.equal, found, early))
    wanted = residual.double() + shares.double().sum(0)
    assert found.output.dtype == found.residual.dtype == BF16
    # One rounding, of at most 2^-8 of the sum, beside those of fp32 in making it.
    summands = residual.double().abs() + shares.double().abs().sum(0)
    assert bool(
        ((found.residual.double() - wanted).abs() <= 2**-8 * wanted.abs() + (splits + 1) * 2**-24 * summands).all()
    )
    # More warps add up in another order, so that what is rounded may fall on the other side.
    again = rms_norm(found.residual, gain, impl="triton").output
    assert bool(((found.output.float() - again.float()).abs() <= 2**-7 * again.float().abs()).all())
