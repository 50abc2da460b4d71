"""The thin layer's kernel, compiled."""

import pytest
import torch

from lapkernels.testing_thin import SHAPES, check
from lapkernels.thin_linear import Normed, thin_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_kinds(shape, dtype):
    check(shape, "triton", dtype, "cuda")


@pytest.mark.parametrize("rows", [1, 4])
def test_a_matrix_of_more_than_two_billion_numbers(rows):
    weight = torch.ones(300_000, 8192, dtype=torch.bfloat16, device="cuda")
    weight[-1] = 2.0
    x = torch.full((rows, 8192), 2**-13, dtype=torch.bfloat16, device="cuda")
    found = thin_linear(x, weight, norm=None)
    assert found[:, 0].tolist() == [1.0] * rows
    assert found[:, -1].tolist() == [2.0] * rows
    normed = thin_linear(x, weight, norm=Normed(torch.ones(8192, device="cuda"), 0.0))
    assert normed[:, -1].tolist() == [16384.0] * rows


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [2048, 2560, 5632])
def test_what_is_ready_is_read_early_and_nothing_else(width, rows):
    """To the bit what it gives later, with kernels before it that write its input and its residual."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    weight, gain, bias = (torch.randn(s, device=device).to(dtype) for s in ((3000, width), width, 3000))
    weight *= width**-0.5
    first, x = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
    back = (torch.randn(width, width, device=device) * width**-0.5).to(dtype)
    norm = Normed(gain, 1e-6, 1.0)

    def chain(ready: bool) -> list[torch.Tensor]:
        # Kernels that let the next one begin: the last two write what this one reads.
        stream = thin_linear(x, back, residual=first, ready=ready)
        mixed = thin_linear(stream, back, residual=stream, ready=ready)
        found = thin_linear(mixed, weight, bias, norm=norm, ready=ready)
        return [
            mixed,
            found,
            thin_linear(mixed, weight[:width], residual=stream[:, : len(weight[:width])], ready=ready),
        ]

    wanted = chain(False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    chain(True)
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(10):
        for each in found:
            each.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, found, wanted))
