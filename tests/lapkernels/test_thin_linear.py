"""A linear layer over few rows, with what comes before and behind it, against the layers apart in fp64."""

import os
import subprocess
import sys

import pytest
import torch

from lapkernels.errors import InvalidInput, KernelUnavailable
from lapkernels.testing_thin import SHAPES, check
from lapkernels.thin_linear import Normed, select_impl, thin_linear, why_not


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_reference(shape, dtype):
    check(shape, "reference", dtype)


def test_the_kernel_interpreted():
    """In a process of its own: triton reads the variable once. An interpreter that is quickened gives the same bits."""
    program = (
        "import torch\nfrom lapkernels.testing_thin import SHAPES, check\n"
        "from lapkernels.testing_interpreter import quicken\nfrom lapkernels.thin_linear import thin_linear\n"
        "x, weight = (torch.randn(*size) for size in ((3, 70), (5, 70)))\n"
        "wanted = thin_linear(x, weight, impl='triton')\n"
        "quicken()\n"
        "assert torch.equal(thin_linear(x, weight, impl='triton'), wanted)\n"
        "for shape in SHAPES:\n    check(shape, 'triton', torch.float32)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_residual_of_a_wider_dtype_stays_wide():
    x, weight = torch.ones(1, 4, dtype=torch.bfloat16), torch.full((2, 4), 2**-10, dtype=torch.bfloat16)
    found = thin_linear(x, weight, residual=torch.ones(1, 2))
    assert found.dtype == torch.float32
    assert found.tolist() == [[1 + 2**-8] * 2]


def test_what_is_refused():
    x, weight = torch.ones(9, 4), torch.ones(3, 4)
    for arguments, word in (
        ({"norm": Normed(torch.ones(4), 1e-6), "gated": True}, "one of them"),
        ({"gated": True}, "x has shape"),
        ({"bias": torch.ones(4)}, "bias"),
        ({"residual": torch.ones(9, 4)}, "residual"),
        ({"impl": "magic"}, "magic"),
    ):
        with pytest.raises(InvalidInput, match=word):
            thin_linear(x, weight, **arguments)
    with pytest.raises(KernelUnavailable, match="8 rows at most"):
        thin_linear(x, weight, impl="triton")
    assert "fp64" in why_not("triton", "cuda", torch.float64)
    assert select_impl("cpu", torch.float32).name == "reference"
