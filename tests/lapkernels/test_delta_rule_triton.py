"""The chunked Triton kernels in triton's interpreter, and what is said of them where they cannot run."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from lapkernels import KernelUnavailable
from lapkernels.delta_rule import delta_rule, select_impl, why_not
from lapkernels.testing import delta_rule_inputs

PARTS = {
    "cases": "for name in list(t.CASES)[{half}::2]: t.check(name, {dtype})",
    "packed": "t.check_packed({dtype})",
    "properties": (
        "t.check_norm(96, {dtype}); t.check_norm(16, torch.float16); t.check_zeros({dtype}); "
        "t.check_strong_decay({dtype}); t.check_repeated_keys({dtype})"
    ),
    "tiles": (
        "t.check_tiles(t.Tiles(16, 4, 1), {dtype}); t.check_tiles(t.Tiles(16, 4, 1), torch.float16); "
        "t.check_tiles(t.Tiles(16, 4, 1, q_late=True), {dtype})"
    ),
    # Case 1's widths: two blocks of K and a masked one.
    "neighbours": "for width in (20, 60, 96, 100): t.check_poisoned(torch.float32, key_width=width)",
    "rows": "t.check_many_rows(3, {dtype})",
    "channels": (
        "for name in t.CHANNEL_CASES: t.check_channels(name, {dtype})\n"
        "t.check_packed({dtype}, by_channel=True)\n"
        "for width in (16, 48): t.check_norm(width, {dtype}, by_channel=True)\n"
        "t.check_strong_decay_of_channels({dtype}); t.check_strong_decay_of_channels(torch.float16)\n"
        "t.check_equal_channels({dtype}); t.check_poisoned({dtype}, by_channel=True)\n"
        "for name in t.CHANNEL_GATES: t.check_raw_gates(name, {dtype})"
    ),
    "gates": "for name in t.RAW_GATES: t.check_raw_gates(name, {dtype})",
}

QUICKLY = "from lapkernels.testing_interpreter import quicken\nquicken()\n"


def interpreted(program: str) -> None:
    """In a process of its own: triton reads the variable once. bf16 products are wrong in the interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", QUICKLY + f"import torch\nimport lapkernels.testing_chunks as t\n{program}"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("part", "dtype", "half"),
    [
        ("cases", "torch.float32", 0),
        ("cases", "torch.float32", 1),
        ("cases", "torch.float16", 1),
        # Half precision has a walk of its own.
        ("packed gates", "torch.float16", 0),
        # One process for what is left: most of each would be imports, and a traceback names the part.
        (" ".join(part for part in PARTS if part not in ("cases", "channels")), "torch.float32", 0),
        ("channels", "torch.float32", 0),
    ],
)
def test_the_kernels_interpreted(part, dtype, half):
    interpreted("\n".join(PARTS[each].format(dtype=dtype, half=half) for each in part.split()))


def test_they_compile_for_hopper():
    """All of them, forward and backward, without a GPU: what the interpreter takes, the compiler may refuse."""
    program = """
        import torch
        from lapkernels.offline import compile_only
        from lapkernels.testing import delta_rule_inputs, output_state_and_gradients
        from lapkernels.testing_chunks import run
        compiled = compile_only(90)
        for by_channel in (False, True):
            inputs = delta_rule_inputs(
                time=70, key_width=16, value_width=16, state=True, gate=0.1, by_channel=by_channel
            )
            output_state_and_gradients(run, inputs.to(torch.bfloat16))
            assert len({kernel.metadata.name for kernel in compiled}) == (10 if by_channel else 6), compiled
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_where_they_cannot_run():
    inputs = delta_rule_inputs().to(torch.float32)
    with pytest.raises(KernelUnavailable, match="need a GPU"):
        delta_rule(**inputs.tensors(), impl="triton")
    assert "need a GPU" in str(why_not("triton", "cpu", torch.float32, key_width=64, gated=True))
    assert select_impl("cpu", torch.float32, key_width=64, time=100, gated=True).name == "chunked"
