"""The short convolution over prompts, against torch's own in fp64."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from lapkernels.errors import InvalidInput, KernelUnavailable
from lapkernels.short_conv import select_impl, short_conv, why_not

SHAPES = {"one step": (2, 1, 5, 4), "odd": (3, 70, 9, 4), "two taps": (1, 33, 130, 2), "one tap": (1, 4, 3, 1)}
"""B, T, C and W."""


def check(shape, impl, dtype, device="cpu"):
    rows, time, channels, width = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype)

    # Views, as of a fused projection and of a filter laid by tap.
    x, weight = draw(rows, time, channels + 3)[..., :channels], draw(width, channels).t()
    for state in (None, draw(rows, width - 1, channels + 1)[..., :channels] if width > 1 else None):
        for silu in (True, False):
            found = short_conv(x, weight, state, silu=silu, impl=impl)
            past = torch.zeros(rows, width - 1, channels, dtype=dtype, device=device) if state is None else state
            joined = torch.cat((past, x), dim=1).double()
            wanted = F.conv1d(joined.transpose(1, 2), weight.double().unsqueeze(1), groups=channels).transpose(1, 2)
            wanted = F.silu(wanted) if silu else wanted
            assert found.dtype == dtype
            # A sum of `width` products in fp32 or wider, an exponential, and the result rounded once.
            size = (joined.abs().amax() * weight.double().abs().sum(1).amax()).item()
            own, wide = (torch.finfo(each).eps for each in (dtype, torch.promote_types(dtype, torch.float32)))
            allowed = own * wanted.abs() + 4 * width * wide * size
            assert bool(((found.double() - wanted).abs() <= allowed).all())


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
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel(shape, dtype):
    check(shape, "triton", dtype, "cuda")


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
        ((x, weight, torch.ones(2, 3, 4)), "state"),
        ((x.transpose(1, 2), torch.ones(5, 3)), "x"),
    ):
        with pytest.raises(InvalidInput, match=word):
            short_conv(*arguments)
    with pytest.raises(InvalidInput, match="magic"):
        short_conv(x, weight, impl="magic")
    with pytest.raises(KernelUnavailable, match="CUDA device"):
        short_conv(x, weight, impl="triton")
    assert "fp64" in str(why_not("triton", "cuda", torch.float64))
    assert select_impl("cpu", torch.float32).name == "reference"
