"""The attention step against attention over each row alone, in fp64; its kernel in triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from lapkernels.attend_step import attend_step, select_impl, why_not
from lapkernels.attend_step.triton_attend import shares_of, tokens_of
from lapkernels.errors import InvalidInput, KernelUnavailable
from lapkernels.testing_attend import CASES, case, check


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_reference(name, dtype):
    check(name, "reference", dtype)


def test_the_kernel_interpreted():
    """In a process of its own: triton reads the variable once. bf16 products are wrong in the interpreter."""
    program = (
        "import torch\nfrom lapkernels.testing_attend import CASES, check\n"
        "for name in CASES:\n    check(name, 'triton', torch.float32)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_longest_changes_nothing():
    new, pools, where = case("grouped heads, a padding row")
    other = [pool.clone() for pool in pools]
    assert torch.equal(attend_step(*new, *pools, **where), attend_step(*new, *other, **where, longest=200))


def test_shares_depend_on_shapes_alone_and_fill_a_gpu():
    assert shares_of(1, 64) == 1
    assert shares_of(1, 128) == 2
    assert shares_of(8, 65536) == 64
    assert shares_of(64, 65536) == 8
    assert shares_of(1024, 65536) == 1


def test_tiles_fit_small_shared_memories():
    """Two of them with a query's beside, in 100 KB."""
    assert tokens_of(128, 128, 2) == 64
    assert tokens_of(256, 256, 2) == 32
    assert tokens_of(256, 256, 4) == 16
    assert all(2 * tokens_of(k, v, 4) * (k + v) * 4 < 100_000 for k in (16, 64, 256) for v in (16, 128, 256))


def test_what_is_refused():
    new, pools, where = case("grouped heads, a padding row")
    for change, word in (
        ({"window": 0}, "window = 0"),
        ({"slots": where["slots"].float()}, "slots"),
        ({"position": where["position"][:2]}, "position"),
        ({"impl": "magic"}, "magic"),
    ):
        with pytest.raises(InvalidInput, match=word):
            attend_step(*new, *pools, **{**where, **change})
    with pytest.raises(InvalidInput, match="7 query heads"):
        attend_step(new[0][:, :7], *new[1:], *pools, **where)
    with pytest.raises(InvalidInput, match="value has shape"):
        attend_step(*new[:2], new[2][..., :3], *pools, **where)
    with pytest.raises(KernelUnavailable, match="fp64"):
        attend_step(*new, *pools, **where, impl="triton")
    assert why_not("reference", "cpu", torch.float64) is None
    assert select_impl("cpu", torch.float32).name == "reference"
