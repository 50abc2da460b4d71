"""The small operators: residual sum with RMS norm, SwiGLU."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from lapkernels._triton import triton_version
from lapkernels.errors import InvalidInput, KernelUnavailable
from lapkernels.norm import rms_norm, select_impl, swiglu
from lapkernels.testing_norm import CASES, check_norm_gradients, check_swiglu_gradients

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
ON_GPU = pytest.param("cuda", marks=GPU)


def test_the_norm_by_its_formula():
    x, weight, residual = torch.randn(2, 3, 7, dtype=F64), torch.randn(7, dtype=F64), torch.randn(2, 3, 7, dtype=F64)
    found = rms_norm(x, weight, 1e-5, residual=residual, offset=1.0)
    assert torch.equal(found.residual, x + residual)
    mean = sum((x + residual)[..., i] ** 2 for i in range(7)) / 7
    torch.testing.assert_close(found.output, (x + residual) / (mean + 1e-5).sqrt()[..., None] * (weight + 1))
    assert rms_norm(x, weight).residual is x


def test_the_sum_is_rounded_before_it_is_normed():
    x, residual, weight = torch.randn(4, 64).to(BF16), torch.randn(4, 64).to(BF16), torch.ones(64, dtype=BF16)
    found = rms_norm(x, weight, residual=residual)
    assert found.residual.dtype == BF16
    assert torch.equal(found.residual, x + residual)
    assert torch.equal(found.output, rms_norm(x + residual, weight).output)
    wide = rms_norm(x, weight, residual=residual.float())
    assert wide.residual.dtype == torch.float32
    assert wide.output.dtype == BF16


def test_shares_of_a_product_are_summed_before_the_residual():
    shares, weight = torch.randn(3, 2, 5, 7, dtype=F64), torch.randn(7, dtype=F64)
    residual = torch.randn(2, 5, 7, dtype=F64)
    found = rms_norm(shares, weight, residual=residual, shares=True)
    whole = rms_norm(shares[0] + shares[1] + shares[2], weight, residual=residual)
    torch.testing.assert_close(found.output, whole.output)
    torch.testing.assert_close(found.residual, whole.residual)
    # Rounded once, as it is kept: half a step of bf16 at 1, and one in a hundred of a step above, go up.
    shares, ones = torch.tensor([2**-8, 2**-8 / 100]).view(2, 1, 1), torch.ones(1)
    found = rms_norm(shares, ones, residual=torch.ones(1, 1, dtype=BF16), shares=True, dtype=BF16)
    assert found.residual.dtype == found.output.dtype == BF16
    assert found.residual.item() == 1 + 2**-7
    # One share is not rounded either.
    found = rms_norm(shares.sum(0, keepdim=True), ones, residual=torch.ones(1, 1, dtype=BF16), shares=True)
    assert found.residual.item() == 1 + 2**-7
    assert found.output.dtype == torch.float32


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_as_the_library_norms(offset):
    from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    norm = Qwen3NextRMSNorm(16) if offset else Mamba2RMSNorm(16)
    with torch.no_grad():
        norm.weight.normal_()
        x = torch.randn(3, 16)
        torch.testing.assert_close(rms_norm(x, norm.weight, 1e-6, offset=offset).output, norm(x))


def test_rows_of_zeros():
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8)).output.any()


def test_swiglu_by_its_formula():
    x = torch.randn(3, 2, 10, dtype=F64)
    gate, up = x[..., :5], x[..., 5:]
    torch.testing.assert_close(swiglu(x), gate / (1 + (-gate).exp()) * up)
    assert swiglu(x.to(BF16)).dtype == BF16


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_a_gated_norm_by_its_formula(activation):
    x, weight, gate = torch.randn(2, 3, 7, dtype=F64), torch.randn(7, dtype=F64), torch.randn(2, 3, 7, dtype=F64)
    opened = 1 / (1 + (-gate).exp())
    wanted = (
        x
        / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt()
        * weight
        * (opened if activation == "sigmoid" else gate * opened)
    )
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, gate=gate, gate_activation=activation).output, wanted)


def test_swiglu_of_two_tensors_is_that_of_one():
    x = torch.randn(3, 2, 10)
    assert torch.equal(swiglu(x[..., :5], x[..., 5:]), swiglu(x))
    assert torch.equal(swiglu(x[..., :5].contiguous(), x[..., 5:].contiguous()), swiglu(x))


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_norms(case, dtype, device):
    if device == "cuda" and dtype == F64:
        pytest.skip("no kernel takes fp64")
    impl = "triton" if device == "cuda" else "reference"
    check_norm_gradients(case, 3, 37, impl, dtype, device)
    check_norm_gradients(case, 2, 300, impl, dtype, device, frozen=True)
    if device == "cuda":
        # Heads and hidden sizes of models, and rows for which programs take several tiles each.
        for rows, width in ((20011, 96), (5003, 256), (700, 2048), (130, 5120), (65, 8192)):
            check_norm_gradients(case, rows, width, impl, dtype, device)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_gradients_of_swiglu(dtype, device):
    if device == "cuda" and dtype == F64:
        pytest.skip("no kernel takes fp64")
    check_swiglu_gradients(3, 37, "triton" if device == "cuda" else "reference", dtype, device)
    if device == "cuda":
        check_swiglu_gradients(3001, 1408, "triton", dtype, device)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_shares_have_the_gradient_of_their_sum(device):
    impl = "triton" if device == "cuda" else "reference"
    shares = torch.randn(3, 2, 7, device=device).requires_grad_()
    residual, weight = torch.randn(2, 7, device=device), torch.ones(7, device=device)
    rms_norm(shares, weight, residual=residual, shares=True, impl=impl).output.square().sum().backward()
    whole = shares.detach().sum(0).requires_grad_()
    rms_norm(whole, weight, residual=residual).output.square().sum().backward()
    for share in shares.grad:
        torch.testing.assert_close(share, whole.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gradients_of_rows_beyond_31_bits():
    """The last rows of more than 2^31 numbers are, to the bit, what they are alone."""
    rows, width = 2**21 + 77, 1030
    x = torch.randn(2**16, dtype=BF16, device="cuda").repeat(-(-rows * width // 2**16))[: rows * width]
    x, weight = x.view(rows, width).requires_grad_(), torch.randn(width, device="cuda")
    found, activated = rms_norm(x, weight, gate=x, impl="triton").output, swiglu(x, impl="triton")
    (d_x,) = torch.autograd.grad(found, x, x.detach())
    (d_gated,) = torch.autograd.grad(activated, x, activated.detach())
    end = x.detach()[-77:].clone().requires_grad_()
    last, activated_last = rms_norm(end, weight, gate=end, impl="triton").output, swiglu(end, impl="triton")
    assert torch.equal(found[-77:], last)
    assert torch.equal(activated[-77:], activated_last)
    assert torch.equal(d_x[-77:], torch.autograd.grad(last, end, end.detach())[0])
    assert torch.equal(d_gated[-77:], torch.autograd.grad(activated_last, end, activated_last.detach())[0])


def test_what_is_refused():
    x = torch.zeros(2, 8)
    for call, word in (
        (lambda: rms_norm(x, torch.ones(7)), "weight has shape"),
        (lambda: rms_norm(x, torch.ones(8), residual=torch.zeros(8)), "residual has shape"),
        (lambda: rms_norm(torch.zeros(8, 2).t(), torch.ones(8)), "x has strides"),
        (lambda: rms_norm(x.long(), torch.ones(8)), "dtype"),
        (lambda: rms_norm(x, torch.ones(8), gate=torch.zeros(2, 7)), "gate has shape"),
        (lambda: rms_norm(x, torch.ones(8), gate=x, gate_activation="relu"), "relu"),
        (lambda: rms_norm(x, torch.ones(8), shares=True), "no residual"),
        (lambda: rms_norm(x, torch.ones(8), residual=x, shares=True), "residual has shape"),
        (lambda: rms_norm(x[0], torch.ones(8), residual=x, shares=True), "x has shape"),
        (lambda: swiglu(torch.zeros(2, 7)), "gate and up"),
        (lambda: swiglu(x, torch.zeros(2, 7)), "up has shape"),
        (lambda: swiglu(x, impl="magic"), "magic"),
    ):
        with pytest.raises(InvalidInput, match=word):
            call()
    with pytest.raises(KernelUnavailable, match="fp64"):
        swiglu(x.double(), impl="triton")
    assert select_impl("cpu", torch.float32).name == "reference"


@pytest.mark.skipif(triton_version() is None, reason="triton is not installed")
def test_few_programs_have_registers_for_all_that_they_read(tmp_path):
    """Eight shares of a row, eight numbers of each to a thread: fewer registers, and some would be asked for later."""
    program = """
        import torch
        from lapkernels.norm import rms_norm
        from lapkernels.offline import compile_only, resources
        compiled = compile_only(90)
        for width in (2048, 2560, 4096):
            residual, weight = torch.empty(64, width), torch.empty(width)
            rms_norm(torch.empty(8, 64, width), weight, residual=residual, shares=True, ready=True, impl="triton")
            took = resources(compiled[-1])
            assert took.spilled == 0 and took.registers >= 8 * 8, took
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
