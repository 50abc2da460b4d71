"""The decode step of gated states: reference against the sum over all pairs of tokens; the kernel interpreted."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from lapkernels import InvalidInput, KernelUnavailable
from lapkernels.dual_state_step import allocate_state, dual_state_step, select_impl
from lapkernels.testing_dual import check_dual_step, dual_step_inputs

ROOT = Path(__file__).resolve().parents[2]
F64 = torch.float64


def run(*command: str, interpreted: bool) -> str:
    """In a process of its own, since triton reads the variable once."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | (
        {"TRITON_INTERPRET": "1"} if interpreted else {}
    )
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("at_once", [1, 3], ids="T{}".format)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("states", [1, 2, 4], ids="states{}".format)
@pytest.mark.parametrize("query_heads", [2, 6], ids=["HQ=H", "HQ=3H"])
def test_steps_are_whole_sequences(query_heads, states, dtype, at_once):
    check_dual_step("reference", dtype, at_once=at_once, states=states, query_heads=query_heads)


def test_a_narrow_state():
    check_dual_step("reference", torch.float32, state_dtype=torch.bfloat16)


def test_the_kernel_interpreted():
    program = """
        from lapkernels.testing_interpreter import quicken
        quicken()
        import torch
        from lapkernels.dual_state_step import StepConfig
        from lapkernels.testing_dual import check_dual_step
        f32 = torch.float32
        check_dual_step("triton", f32, batch=1, query_heads=6, config=StepConfig(8, 1, 1))
        check_dual_step("triton", f32, batch=2, states=1, key_width=6, value_width=5, config=StepConfig(2, 1, 3))
        check_dual_step("triton", f32, batch=1, states=3, heads=1, query_heads=2, at_once=3, time=5)
        check_dual_step("triton", torch.float16, batch=1, time=3)
        check_dual_step("triton", f32, batch=1, states=8, heads=1, state_dtype=torch.bfloat16, time=3)
        """
    run("-c", textwrap.dedent(program), interpreted=True)


def test_what_the_table_chooses_compiles():
    """Registers and spills of large and small batches, of grouped query heads and of a draft."""
    program = """
        import json, torch
        from lapkernels.offline import compile_only, resources
        from lapkernels.dual_state_step import dual_state_step, allocate_state
        compiled = compile_only(90)
        found = []
        for batch, readers, states, width, time in ((512, 4, 2, 128, 1), (1, 3, 2, 64, 1), (64, 2, 4, 96, 2)):
            make = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
            dual_state_step(
                make(batch, time, readers, width), make(batch, time, 1, width), make(batch, time, 1, width),
                allocate_state(batch, states, 1, width, width), gate=make(batch, time, states, 1, width),
                mixture=torch.zeros(states), position=torch.ones(batch, dtype=torch.int64), impl="triton",
            )
            found.append(resources(compiled[-1]))
        print(json.dumps(found))
        """
    found = json.loads(run("-c", textwrap.dedent(program), interpreted=False))
    for registers, spilled, shared, _ in found:
        assert registers <= 255
        assert spilled <= 128, found
        assert shared <= 100 * 1024


def test_it_runs_without_triton():
    program = """
        import sys
        blocked = ("triton", "fla", "transformers", "lapcli")
        for name in blocked:
            sys.modules[name] = None
        import torch
        from lapkernels.dual_state import dual_state
        from lapkernels.testing_dual import check_dual_step, dual_state_inputs
        check_dual_step("auto", torch.float32)
        dual_state(**dual_state_inputs().tensors())
        assert not any(sys.modules.get(name) for name in blocked)
        """
    run("-c", textwrap.dedent(program), interpreted=False)


def arguments() -> dict[str, torch.Tensor]:
    case = dual_step_inputs(time=1, query_heads=4)
    return {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "gate": case.g,
        "mixture": case.mixture,
        "state": allocate_state(2, 2, 2, 8, 6, dtype=F64),
    }


BAD = {
    "axes": ({"q": torch.zeros(2, 4, 8, dtype=F64)}, "four axes"),
    "heads": ({"q": torch.zeros(2, 1, 3, 8, dtype=F64)}, "no multiple of the 2 heads"),
    "gate": ({"gate": torch.zeros(2, 1, 1, 2, 8, dtype=F64)}, "gate has shape"),
    "mixture": ({"mixture": torch.zeros(2, 1, dtype=F64)}, "mixture has shape"),
    "dtypes": ({"k": torch.zeros(2, 1, 2, 8)}, "share a dtype"),
    "state": ({"state": torch.zeros(2, 2, 8, 6, dtype=F64)}, r"\[slots, 2, 2, 8, 6\]"),
    "turned": ({"state": torch.zeros(2, 2, 2, 6, 8, dtype=F64).mT}, "contiguous"),
    "few slots": ({"state": allocate_state(1, 2, 2, 8, 6, dtype=F64)}, "1 slots for B = 2"),
    "normaliser": ({"normaliser": 0.0}, "normaliser is 0.0"),
    "position": ({"position": torch.zeros(2)}, "position has shape"),
    "impl": ({"impl": "magic"}, "magic"),
    "strided": ({"v": torch.zeros(2, 1, 2, 12, dtype=F64)[..., ::2]}, "last axis should be contiguous"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    change, message = BAD[name]
    with pytest.raises(InvalidInput, match=message):
        dual_state_step(**(arguments() | change))


def test_what_runs_and_why():
    assert select_impl("cpu", torch.float32).name == "reference"
    with pytest.raises(KernelUnavailable, match="fp64"):
        dual_state_step(**arguments(), impl="triton")
    assert allocate_state(3, 2, 1, 4, 5, dtype=torch.bfloat16).nbytes == 3 * 2 * 20 * 2


def test_the_benchmark_runs(tmp_path):
    output = tmp_path / "rows.jsonl"
    script = str(ROOT / "kernels" / "benchmarks" / "dual_state_step.py")
    options = ["--toy", "--repeats", "1", "--trials", "1", "--configs", "no", "--output", str(output)]
    shown = run(script, *options, interpreted=True)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    ours = next(row for row in rows if row.get("impl") == "triton")
    assert ours["us"] > 0
    # One row: two bf16 states of 4 x 4, there and back; q of two heads, k, two gates, v, and two outputs.
    assert ours["bytes"] == 2 * 2 * 16 * 2 + 2 * (2 * 4 + 4 + 2 * 4 + 4 + 2 * 4)
    assert "table's choice" in shown
