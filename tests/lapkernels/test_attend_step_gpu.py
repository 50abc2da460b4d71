"""The attention step's kernel, compiled."""

import pytest
import torch

from lapkernels.attend_step import attend_step
from lapkernels.testing_attend import CASES, check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_compiled(name, dtype):
    check(name, "triton", dtype, "cuda")


def test_the_kernel_with_many_long_rows():
    """Where all shares are used, and offsets pass 2^31 elements."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    keys, values = draw(40960, 8, 64, 128), draw(40960, 8, 64, 128)
    pages = torch.randperm(40960, device="cuda", generator=generator).int().view(40, 1024)
    position = torch.tensor([65535, 3, 40000], device="cuda")
    slots = torch.tensor([39, 20, 0], device="cuda")
    new = draw(3, 32, 128), draw(3, 8, 128), draw(3, 8, 128)
    found = attend_step(*new, keys, values, pages=pages, position=position, slots=slots)
    for row in range(3):
        held = [
            pool[pages[slots[row]].long()].transpose(0, 1).flatten(1, 2)[None, :, : position[row] + 1]
            for pool in (keys, values)
        ]
        wanted = torch.nn.functional.scaled_dot_product_attention(
            new[0][row].float().view(1, 32, 1, 128), *(x.float() for x in held), enable_gqa=True
        )
        assert (found[row].float() - wanted.view(32, 128)).abs().max() < 16 * 2**-8
