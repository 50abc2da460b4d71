"""The choice of the likeliest token, and the kernel in Triton's interpreter."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from lapkernels._triton import triton_version
from lapkernels.errors import InvalidInput, KernelUnavailable
from lapkernels.greedy_token import greedy_token, select_impl, why_not
from lapkernels.testing_greedy import check_greedy

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, BF16], ids=str)
def test_the_reference(dtype):
    for width in (1, 7, 300):
        check_greedy(width, "reference", dtype)


def _run(program: str, **environment: str) -> None:
    """In a process of its own: triton reads its variables once, and what compiles only launches nothing any more."""
    without = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**without, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(triton_version() is None, reason="triton is not installed")
def test_the_kernel_interpreted():
    """In one block, and in several."""
    program = """
        import torch
        import lapkernels.greedy_token.triton_greedy as kernel
        from lapkernels.greedy_token import greedy_token
        from lapkernels.testing_greedy import check_greedy
        check_greedy(37, "triton", torch.bfloat16)
        check_greedy(1, "triton", torch.float16)
        kernel.BLOCK = 16
        check_greedy(37, "triton", torch.float32)
        check_greedy(48, "triton", torch.bfloat16)
        none = torch.zeros(0, dtype=torch.int64)
        greedy_token(torch.zeros(0, 3), none, none, none, impl="triton")
        """
    _run(program, TRITON_INTERPRET="1")


@pytest.mark.skipif(triton_version() is None, reason="triton is not installed")
def test_the_kernel_compiles_without_spills(tmp_path):
    program = """
        import torch
        from lapkernels.offline import compile_only, resources
        compiled = compile_only(90)
        from lapkernels.greedy_token import greedy_token
        for width, dtype in ((32000, torch.bfloat16), (151936, torch.float32), (50257, torch.bfloat16)):
            rows = torch.zeros(64, dtype=torch.int64)
            greedy_token(torch.empty(64, width, dtype=dtype), rows, rows.clone(), rows.int(), impl="triton")
            assert resources(compiled[-1]).spilled == 0
        assert len(compiled) == 3
        """
    _run(program, TRITON_CACHE_DIR=str(tmp_path))


def test_what_is_refused():
    logits, rows = torch.ones(3, 5), torch.zeros(3, dtype=torch.int64)
    for arguments, word in (
        ((logits[0], rows, rows, rows), "logits have shape"),
        ((logits[:, :0], rows, rows, rows), "a token at least"),
        ((logits.long(), rows, rows, rows), "logits has dtype"),
        ((logits.t().contiguous().t(), rows, rows, rows), "logits has strides"),
        ((logits, rows[:2], rows, rows), "tokens has shape"),
        ((logits, rows.int(), rows, rows), "int64"),
        ((logits, rows, rows.int(), rows), "positions has shape"),
        ((logits, rows, rows, rows.float()), "int32 or int64"),
        ((logits, torch.zeros(6, dtype=torch.int64)[::2], rows, rows), "make it contiguous"),
        ((logits, rows, rows, rows.to("meta")), "slots is on meta"),
    ):
        with pytest.raises(InvalidInput, match=word):
            greedy_token(*arguments)
    with pytest.raises(InvalidInput, match="magic"):
        greedy_token(logits, rows, rows, rows, impl="magic")
    with pytest.raises(KernelUnavailable, match="fp64"):
        greedy_token(logits.double(), rows, rows, rows, impl="triton")
    assert "CUDA device" in str(why_not("triton", "cpu", torch.float32))
    assert select_impl("cpu", torch.float32).name == "reference"
