"""The short convolution over prompts and its gradients, against torch's own in fp64."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from lapkernels.errors import InvalidInput, KernelUnavailable
from lapkernels.short_conv import select_impl, short_conv, why_not
from lapkernels.testing import assert_as_precise, poisoned

SHAPES = {"one step": (2, 1, 5, 4), "odd": (3, 70, 9, 4), "two taps": (1, 33, 130, 2), "one tap": (1, 4, 3, 1)}
"""B, T, C and W."""
LARGE = {"of a model": (4, 1024, 384, 4), "odd and long": (2, 2051, 257, 3)}
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CASES = ((False, False, False), (False, True, True), (True, False, True), (True, True, False))
"""A state or none, SiLU or none, packed or not: every two of them meet."""


def formula(x, weight, state, bounds, silu):
    """torch's own, of each sequence by itself; without a state from zeros."""
    spans = [(row, 0, x.shape[1]) for row in range(len(x))]
    spans = spans if bounds is None else [(0, *span) for span in itertools.pairwise(bounds)]
    before = x.new_zeros(len(spans), weight.shape[1] - 1, x.shape[2]) if state is None else state
    ends = [torch.cat((old, x[row, a:b])).t() for old, (row, a, b) in zip(before, spans, strict=True)]
    parts = [F.conv1d(each[None], weight.unsqueeze(1), groups=len(weight))[0].t() for each in ends]
    y = torch.stack(parts) if bounds is None else torch.cat(parts).unsqueeze(0)
    return F.silu(y) if silu else y


def draw_case(shape, dtype, carried, packed):
    """x, weight (fp32 beside narrow inputs, as masters are), state, boundaries and the output's gradient.

    All but the weight, which is laid by tap, are views into NaN, as into another's part of a fused projection.
    """
    rows, time, channels, width = (SHAPES | LARGE)[shape]
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        around = torch.full((size[0], size[1] + 4, size[2] + 3), torch.nan, dtype=dtype)
        around[:, 2 : size[1] + 2, : size[2]] = torch.randn(*size, generator=generator, dtype=torch.float64)
        return around[:, 2 : size[1] + 2, : size[2]]

    wide = torch.promote_types(dtype, torch.float32)
    weight = torch.randn(width, channels, generator=generator, dtype=torch.float64).to(wide).t()
    bounds = sorted({0, 1, min(3, time), -(-time // 2), time}) if packed else None
    rows, states = (1, len(bounds) - 1) if bounds else (rows, rows)
    x, d = draw(rows, time, channels), draw(rows, time, channels)
    return x, weight, draw(states, width - 1, channels) if carried else None, bounds, d


def results(run, given, d):
    """The output, and the gradients of the arguments that there are, by name."""
    # Leaves keep their strides.
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
    output = run(**{"state": None, **leaves})
    gradients = torch.autograd.grad(output, list(leaves.values()), d)
    return {"output": output, **{f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}}


def check(shape, impl, dtype, device="cpu", cases=CASES):
    _, _, _, width = (SHAPES | LARGE)[shape]
    for carried, silu, packed in cases:
        x, weight, state, bounds, d = draw_case(shape, dtype, carried and width > 1, packed)
        cu_seqlens = None if bounds is None else torch.tensor(bounds)

        def run(x, weight, state, impl=impl, silu=silu, cu_seqlens=cu_seqlens):
            where = None if cu_seqlens is None else cu_seqlens.to(x.device)
            return short_conv(x, weight, state, cu_seqlens=where, silu=silu, impl=impl)

        given = {"x": x, "weight": weight, "state": state}
        exact = {name: None if each is None else each.double() for name, each in given.items()}
        truth = results(lambda x, weight, state, b=bounds, s=silu: formula(x, weight, state, b, s), exact, d.double())
        moved = {name: each if each is None else on(each, device) for name, each in given.items()}
        with poisoned():
            found = results(run, moved, on(d, device))
            with torch.no_grad():
                assert torch.equal(run(**moved), found["output"])
        for name, each in given.items():
            assert each is None or found[f"d{name}"].dtype == each.dtype
        assert found["output"].dtype == dtype

        # A sum of `width` products in fp32 or wider, an exponential, and the result rounded once.
        wide = torch.promote_types(dtype, torch.float32)
        joined = x if state is None else torch.cat((x.flatten(0, 1), state.flatten(0, 1)))
        size = (joined.double().abs().amax() * weight.double().abs().sum(1).amax()).item()
        wanted = truth["output"]
        allowed = torch.finfo(dtype).eps * wanted.abs() + 4 * width * torch.finfo(wide).eps * size
        assert bool(((found["output"].cpu().double() - wanted).abs() <= allowed).all())
        # Gradients: as near as those of the reference, and one rounding, or in fp32 those of two sums over the taps.
        plain = dict(truth) if dtype == torch.float64 else results(lambda **k: run(**k, impl="reference"), given, d)
        terms = 2 * width if dtype == wide else 1
        of_weight = [{"dweight": each.pop("dweight")} for each in (found, truth, plain)]
        for each in (found, truth, plain):
            del each["output"]
        assert_as_precise(found, truth, plain, dtype, terms)
        # The weight's, in fp32 or wider, adds up every token's, of which each is rounded, and the sums it comes of too.
        terms = 2 * width * x.shape[0] * x.shape[1]
        assert_as_precise(*of_weight, wide, terms, {"dweight": summands(**exact, bounds=bounds, silu=silu, d=d)})


def summands(x, weight, state, bounds, silu, d):
    """How large what the weight's gradient adds up is, in quadrature: sums are linear in the weight."""
    weight = weight.requires_grad_()
    sums, d = formula(x, weight, state, bounds, False), d.double()
    d = torch.autograd.grad(F.silu(sums), sums, d)[0] if silu else d
    squares = formula(x.square(), weight, None if state is None else state.square(), bounds, False)
    return torch.autograd.grad(squares, weight, d.square())[0].sqrt()


def on(x, device):
    """There, with its strides and its neighbours."""
    if device == "cpu":
        return x
    around = torch.full(x._base.shape if x._base is not None else x.shape, torch.nan, dtype=x.dtype, device=device)
    around = around.as_strided(x.shape, x.stride(), x.storage_offset())
    return around.copy_(x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_reference(shape, dtype):
    check(shape, "reference", dtype)


def test_the_kernel_interpreted():
    """In a process of its own: triton reads the variable once."""
    program = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from lapkernels.testing_interpreter import quicken\nquicken()\n"
        "import torch\nfrom test_short_conv import SHAPES, check\n"
        "for shape in SHAPES:\n    check(shape, 'triton', torch.float32)\n"
        "check('odd', 'triton', torch.float16, cases=[(True, True, True)])\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("shape", SHAPES | LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel(shape, dtype):
    check(shape, "triton", dtype, "cuda")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("shape", [(1, 2**21 + 70, 1040), (3, 2**20, 1040)], ids=["a long row", "rows"])
def test_offsets_beyond_31_bits(shape):
    """The end of the last row is, to the bit, what it is alone after what came before it."""
    rows, time, channels = shape
    x = torch.randn(2**16, dtype=torch.bfloat16, device="cuda").repeat(-(-rows * time * channels // 2**16))
    x = x[: rows * time * channels].view(shape).requires_grad_()
    weight = torch.randn(channels, 4, device="cuda")
    d = torch.ones_like(x)
    found = short_conv(x, weight, impl="triton")
    (d_x,) = torch.autograd.grad(found, x, d)
    end = x.detach()[-1:, -100:].clone().requires_grad_()
    wanted = short_conv(end, weight, x.detach()[-1:, -103:-100], impl="triton")
    assert torch.equal(found[-1:, -100:], wanted)
    assert torch.equal(d_x[-1:, -100:], torch.autograd.grad(wanted, end, d[-1:, -100:])[0])


@pytest.mark.gpu
@NEEDS_GPU
def test_more_rows_than_a_grid_axis_counts():
    """Case 16: the last of 70001 rows has what it has alone, forward and backward."""
    x, state = torch.randn(70001, 2, 8, device="cuda"), torch.randn(70001, 3, 8, device="cuda")
    weight, d = torch.randn(8, 4, device="cuda"), torch.randn(70001, 2, 8, device="cuda")
    found = results(lambda **given: short_conv(**given, impl="triton"), {"x": x, "weight": weight, "state": state}, d)
    end = {"x": x[-1:], "weight": weight, "state": state[-1:]}
    alone = results(lambda **given: short_conv(**given, impl="triton"), end, d[-1:])
    for name in found.keys() - {"dweight"}:
        assert torch.equal(found[name][-1:], alone[name]), name


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=[pytest.mark.gpu, NEEDS_GPU])])
def test_a_weight_that_is_frozen_gets_no_gradient(impl):
    device = "cuda" if impl == "triton" else "cpu"
    x, weight = torch.ones(1, 5, 3, requires_grad=True, device=device), torch.ones(3, 4, device=device)
    short_conv(x, weight, silu=False, impl=impl).sum().backward()
    assert weight.grad is None
    assert x.grad[0, :, 0].tolist() == [4, 4, 3, 2, 1]


def test_what_lies_around_does_not_reach_the_result():
    x = torch.full((1, 6, 4), torch.nan)
    x[:, 2:5] = 1.0
    found = short_conv(x[:, 2:5], torch.ones(4, 4), torch.zeros(1, 3, 4), silu=False)
    assert found[0, :, 0].tolist() == [1.0, 2.0, 3.0]


def test_what_is_refused():
    x, weight = torch.ones(2, 5, 4), torch.ones(4, 3)
    for arguments, word in (
        ((x[0], weight), "x has shape"),
        ((x, weight[:3]), "weight"),
        ((x, torch.ones(4)), "weight has shape"),
        ((x, weight, torch.ones(2, 3, 4)), "state has shape"),
        ((x.transpose(1, 2), torch.ones(5, 3)), "x"),
    ):
        with pytest.raises(InvalidInput, match=word):
            short_conv(*arguments)
    for cu_seqlens, word in (
        (torch.tensor([0, 5]), "B = 2"),
        (torch.tensor([0.0, 5.0]), "int32 or int64"),
        (torch.tensor([0, 4]), "from 0 to T = 5"),
        (torch.tensor([0, 3, 3, 5]), "sequence 1"),
        (torch.tensor([0, 9, 9, 5])[::3], "make it contiguous"),
    ):
        with pytest.raises(InvalidInput, match=word):
            short_conv(x if word == "B = 2" else x[:1], weight, cu_seqlens=cu_seqlens)
    with pytest.raises(InvalidInput, match="state has shape"):
        short_conv(x[:1], weight, torch.ones(1, 2, 4), cu_seqlens=torch.tensor([0, 2, 5]))
    with pytest.raises(InvalidInput, match="magic"):
        short_conv(x, weight, impl="magic")
    with pytest.raises(KernelUnavailable, match="CUDA device"):
        short_conv(x, weight, impl="triton")
    assert "fp64" in str(why_not("triton", "cuda", torch.float64))
    assert select_impl("cpu", torch.float32).name == "reference"
