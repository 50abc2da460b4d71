"""Programs in which Triton interprets kernels on the CPU: processes of their own, since it decides so at its import."""

import json
import os
import subprocess
import sys

# A program of the interpreter is as slow with large blocks as with small ones, and every configuration computes the
# same: the one with the largest blocks counts as the fastest.
_UNTUNED = """
import math, warnings
import triton.runtime.autotuner as autotuner
warnings.simplefilter("ignore")
from lapkernels.testing_interpreter import quicken
quicken()
autotuner.Autotuner._bench = lambda self, *_, config, **__: [
    1 / math.prod(size for size in config.kwargs.values() if isinstance(size, int))
] * 3
"""


def run_interpreted(program: str, *arguments: str, given: object) -> str:
    """Run a program, and give what it wrote to stdout. It costs what its kernels' programs are many, not wide.

    Args:
        program: Python source; nothing of lapcli's is imported before it.
        arguments: its `sys.argv[1:]`.
        given: what it reads from stdin, JSON.

    Raises:
        AssertionError: it failed; with the end of what it said.
    """
    # Threads that wait for each other by spinning would take the core that other tests need.
    around = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _UNTUNED + program, *arguments],
        input=json.dumps(given), capture_output=True, text=True, check=False, env={**os.environ, **around},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
