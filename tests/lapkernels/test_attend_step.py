"""The attention step against attention over each row alone, in fp64; its kernel in triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from lapkernels.attend_step import attend_step, read_tokens, select_impl, why_not, write_tokens
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
        "from lapkernels.testing_interpreter import quicken\nquicken()\n"
        "import torch\nfrom lapkernels.testing_attend import CASES, check\n"
        "for name in CASES:\n    check(name, 'triton', torch.float32)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_longest_changes_nothing_but_the_order_of_sums():
    """200 tokens, or all 256 that four pages hold, of which the last are never there."""
    new, pools, where = case("grouped heads, a padding row")
    other = [pool.clone() for pool in pools]
    found = attend_step(*new, *pools, **where), attend_step(*new, *other, **where, longest=200)
    # Weights sum to 1 and values are 4 at most.
    assert (found[0] - found[1]).abs().max() <= 4 * 256 * torch.finfo(torch.float64).eps


def test_tokens_are_read_as_they_were_written():
    """One after the other, into pages of any order, with padding beside."""
    pages = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    pools = torch.full((6, 2, 16, 3), torch.nan), torch.full((6, 2, 16, 5), torch.nan)
    tokens = torch.randn(40, 2, 3), torch.randn(40, 2, 5)
    for at in range(40):
        new = [torch.stack((x[at], torch.full_like(x[at], torch.nan))) for x in tokens]
        write_tokens(pools, new, pages, torch.tensor([at, 99]), torch.tensor([1, -1]))
    for pool, wanted in zip(pools, tokens, strict=True):
        found = read_tokens(pool, pages, torch.tensor([1, -1]), 40)
        assert torch.equal(found[0], wanted.transpose(0, 1))
        assert pool[[5, 0, 3]].isnan().all()
        assert pool[2, :, 8:].isnan().all()


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
        ({"pages": where["pages"].long()}, "pages has"),
        ({"pages": where["pages"][:, :0]}, "pages has"),
        ({"impl": "magic"}, "magic"),
    ):
        with pytest.raises(InvalidInput, match=word):
            attend_step(*new, *pools, **{**where, **change})
    with pytest.raises(InvalidInput, match="7 query heads"):
        attend_step(new[0][:, :7], *new[1:], *pools, **where)
    with pytest.raises(InvalidInput, match="value has shape"):
        attend_step(*new[:2], new[2][..., :3], *pools, **where)
    with pytest.raises(InvalidInput, match="pages of 48 tokens"):
        attend_step(*new, *(pool[:, :, :48] for pool in pools), **where)
    with pytest.raises(KernelUnavailable, match="fp64"):
        attend_step(*new, *pools, **where, impl="triton")
    assert why_not("reference", "cpu", torch.float64) is None
    assert select_impl("cpu", torch.float32).name == "reference"
