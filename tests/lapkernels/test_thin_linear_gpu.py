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
