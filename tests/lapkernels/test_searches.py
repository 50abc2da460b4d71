"""Autotuners that compile what they will time side by side; nothing is launched."""

import os
import subprocess
import sys
import textwrap

import pytest

from lapkernels._triton import quick_searches, triton_version

pytestmark = pytest.mark.skipif(triton_version() is None, reason="triton is not installed")

PROGRAM = """
import threading

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from lapkernels._triton import quick_searches
from lapkernels.offline import compile_only

kernels = compile_only(90)
threads, timed, chosen = [], [], []
place = Autotuner.__dict__["do_bench"], Autotuner._bench
compiled = JITFunction.create_binder


def binder(self):
    found = compiled(self)
    plain = self.compile

    def compile(*args, **named):
        threads.append(threading.current_thread().name)
        return plain(*args, **named)

    self.compile = compile
    return found


JITFunction.create_binder = binder


def benchmarker(call, quantiles, warmup, rep):
    assert (warmup, rep) == (5, 20)
    call()
    # All were compiled before the first of them is timed.
    timed.append(len(threads))
    return [float(abs(len(timed) - 3))] * 3


driver.active.get_benchmarker = lambda: benchmarker


@triton.autotune(
    configs=[triton.Config({"B": b}, num_warps=w) for b in (16, 32, 64) for w in (1, 2)],
    key=["n"],
    prune_configs_by={"early_config_prune": lambda configs, named, **_: [c for c in configs if c.kwargs["B"] < 64]},
)
@triton.jit
def double(x, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.autotune(configs=[triton.Config({"B": b}) for b in (16, 24)], key=["n"])
@triton.jit
def fails(x, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


x, y = torch.zeros(100), torch.zeros(100)
with quick_searches(threads=2):
    double[(1,)](x, y, 100)
    assert timed == [4] * 4, timed
    assert double.best_config.kwargs == {"B": 32} and double.best_config.num_warps == 1, double.best_config
    assert not any(name == "MainThread" for name in threads) and len(set(threads)) == 2, threads
    # What is known is not searched again; another key is.
    double[(1,)](x, y, 100)
    assert len(timed) == 4
    double[(1,)](x, y, 99)
    assert len(timed) == 8
    # 24 is no power of two: said when it would be launched, which is when it is timed.
    del kernels[:]
    fails[(1,)](x, y, 100)
    wrong = []
    for kernel in kernels:
        try:
            assert kernel.launch_metadata
        except Exception as error:
            wrong.append(str(error))
    assert wrong and all("power of 2" in each for each in wrong), wrong
assert place == (Autotuner.__dict__["do_bench"], Autotuner._bench)
"""


def test_configurations_are_compiled_together_and_chosen_as_ever(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, file],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_it_is_as_before_when_the_context_is_left(monkeypatch):
    from triton.runtime.autotuner import Autotuner

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = Autotuner.__dict__["do_bench"], Autotuner._bench
    with pytest.raises(ZeroDivisionError), quick_searches():
        raise ZeroDivisionError(Autotuner._bench)
    assert before == (Autotuner.__dict__["do_bench"], Autotuner._bench)
