"""The kernels of decode steps without a GPU: interpreted, compiled for GPUs that are absent, in their benchmarks."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lapkernels.decoding.configs import StepConfig, choose_apart, choose_config, key_parts

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, interpreted: bool) -> str:
    """In a process of its own, since triton reads the variable once."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | (
        {"TRITON_INTERPRET": "1"} if interpreted else {}
    )
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


WIDTHS = [(32, 512), (48, 256), (64, 128), (80, 64), (96, 512), (112, 128), (128, 256), (192, 64), (256, 128)]
"""K and V: whole ones and what pruning leaves, heads of one tile and of many."""

INTERPRETED = {
    "delta": """
        # Tiles, warps and splits in turn: all of a head at once, tile after tile, programs that meet.
        configs = [StepConfig(8, 1, 1), StepConfig(4, 1, 1), StepConfig(4, 2, 2), StepConfig(2, 2, 2)]
        for number, name in enumerate(DELTA_CASES):
            check_delta(name, "triton", torch.float32, batch=1, tokens=3, at_once=1 + number % 2,
                        config=configs[number % 4], value_major=number % 3 == 2,
                        state_dtype=torch.bfloat16 if number % 5 == 3 else None)
        """,
    "delta in three kernels": """
        # Whole heads and tiles, several rows a program and more than there are, words of two numbers, odd rows.
        configs = [StepConfig(*cut, apart=True) for cut in ((8, 1, 1), (4, 1, 1), (2, 2, 1))]
        for number, name in enumerate(DELTA_CASES):
            for turn in range(2):
                config = configs[(number + turn) % 3]
                check_delta(name, "triton", torch.float32, batch=1 + turn, tokens=2, config=config,
                            value_major=number % 4 == 3 - turn,
                            state_dtype=torch.bfloat16 if (number + turn) % 2 else None)
        """,
    "what large batches get": """
        for number, (key_width, value_width) in enumerate(WIDTHS):
            dtype, name = (torch.float32, torch.bfloat16)[number % 2], list(DELTA_CASES)[number % len(DELTA_CASES)]
            check_delta(name, "triton", torch.float32, batch=1, tokens=2, state_dtype=dtype, terms=2 * key_width,
                        config=choose_apart(key_width, value_width, 100000, dtype.itemsize), key_width=key_width,
                        value_width=min(value_width, 100), key_heads=1, value_heads=1)
        """,
    "ssd": """
        configs = [StepConfig(8, 1, 1), StepConfig(4, 2, 2)]
        for number, name in enumerate(SSD_CASES):
            check_ssd(name, "triton", torch.float32, batch=1, tokens=3, at_once=2 - number % 2,
                      config=configs[number % 2], value_major=number % 3 == 2,
                      state_dtype=torch.bfloat16 if number == 3 else None)
        """,
    "the rest": """
        # Rounding at random gives the bits that the reference gives.
        from lapkernels.delta_step import delta_step
        from lapkernels.ssd_step import ssd_step
        for step, case in ((delta_step, delta_step_case(batch=1, key_heads=1, value_heads=2, key_width=6)),
                           (ssd_step, ssd_step_case(batch=1, groups=1, heads=2, norm_groups=1, state_width=6))):
            case = case.to(torch.float32)
            states = {}
            ways = [("reference", None), ("triton", None)]
            if step is delta_step:
                ways.append(("three kernels", StepConfig(4, 1, 1, apart=True)))
            for impl, config in ways:
                state, conv = torch.ones_like(case.state(3), dtype=torch.bfloat16), case.conv(3)
                conv.inputs.zero_()
                step(**case.tokens(0, 1), **case.constants(), state=state, conv=conv, config=config,
                     impl="reference" if impl == "reference" else "triton", position=torch.tensor([9]),
                     slots=torch.tensor([2]), rounding_seed=torch.tensor([77]))
                states[impl] = state
            # Sums in another order may fall on another side of a boundary, once in a while.
            for impl in states:
                same = (states["reference"] == states[impl]).float().mean()
                assert same > 0.98, (impl, same)
            assert len(states["triton"][2].unique()) > 2

        # A workspace of one's own serves, and one that is too small is refused.
        from lapkernels.errors import InvalidInput
        from lapkernels.decoding.workspace import Workspace, shared_workspace
        case = delta_step_case(batch=1, tokens=1, key_heads=1, value_heads=1, key_width=4, taps=None).to(torch.float32)
        given = {**case.tokens(0, 1), **case.constants(), "position": torch.zeros(1, dtype=torch.int32)}
        given |= {"impl": "triton", "config": StepConfig(4, 1, 2)}
        mine = Workspace.allocate(1, 8, "cpu")
        mine.scratch.fill_(torch.nan)
        first = delta_step(**given, state=case.state(1), workspace=mine)
        assert not mine.counters.any() and mine.scratch.isfinite().all()
        assert torch.equal(first, delta_step(**given, state=case.state(1)))
        assert not shared_workspace(1, 1, torch.device("cpu")).counters.any()
        try:
            delta_step(**given, state=case.state(1), workspace=Workspace.allocate(1, 7, "cpu"))
        except InvalidInput as error:
            assert "7 numbers" in str(error)
        else:
            raise AssertionError("a workspace that is too small was taken")

        # fp16 is rounded in the interpreter as on a GPU; bf16 is cut off there.
        from lapkernels.norm import rms_norm, swiglu
        x, residual, weight = torch.randn(3, 2, 37).half(), torch.randn(3, 2, 37), torch.randn(37)
        for held in (None, residual, residual.half()):
            found, wanted = (rms_norm(x, weight, residual=held, offset=1.0, impl=i) for i in ("triton", "reference"))
            torch.testing.assert_close(found.output, wanted.output, rtol=2**-10, atol=0)
            assert torch.equal(found.residual, wanted.residual)
        shares = torch.randn(4, 3, 2, 37)
        for held, count in ((residual, 4), (residual.half(), 4), (residual, 1), (residual.half()[:1, :1], 3)):
            given = {"residual": held, "shares": True, "dtype": torch.float16}
            x_shares = shares[:count, :len(held), :held.shape[1]].contiguous()
            found, wanted = (rms_norm(x_shares, weight, impl=i, **given) for i in ("triton", "reference"))
            assert found.output.dtype == torch.float16 and found.residual.dtype == held.dtype
            again = rms_norm(x_shares, weight, impl="triton", ready=True, **given)
            assert torch.equal(found.output, again.output) and torch.equal(found.residual, again.residual)
            step = torch.finfo(held.dtype).eps
            torch.testing.assert_close(found.residual, wanted.residual, rtol=2 * step, atol=2**-21)
            torch.testing.assert_close(found.output, wanted.output, rtol=2**-8, atol=2**-20)
        for f in ("silu", "sigmoid"):
            gate = torch.randn(3, 2, 50)[..., :37]
            found, wanted = (rms_norm(x, weight, gate=gate, gate_activation=f, impl=i) for i in ("triton", "reference"))
            torch.testing.assert_close(found.output, wanted.output, rtol=2**-10, atol=2**-24)
        y = torch.randn(3, 80)[:, :74]
        torch.testing.assert_close(swiglu(y, impl="triton"), swiglu(y), rtol=1e-6, atol=1e-7)
        assert torch.equal(swiglu(y[:, :37], y[:, 37:], impl="triton"), swiglu(y, impl="triton"))
        # Rows that share a program, the last of which is not full: to the bit what each gives alone.
        import lapkernels.norm.triton_norm as kernels
        alone = rms_norm(x[:, 0], weight, gate=gate[:, 0], impl="triton").output
        kernels._MANY = 1
        together = rms_norm(x[:, 0], weight, gate=gate[:, 0], impl="triton").output
        torch.testing.assert_close(together, alone, rtol=2**-10, atol=2**-24)

        import lapkernels.norm.triton_autograd as kernels
        from lapkernels.testing_norm import CASES, check_norm_gradients, check_swiglu_gradients
        for case in CASES:
            check_norm_gradients(case, 3, 37, "triton", torch.float32)
        check_norm_gradients("a wide sum", 3, 37, "triton", torch.float16)
        check_norm_gradients("a gated sum", 1, 1300, "triton", torch.float32, frozen=True)
        # Programs that take several tiles each, some fewer than others, the last of which is not full.
        kernels._AT_ONCE = 4096
        check_norm_gradients("SiLU", 600, 5, "triton", torch.float32)
        check_swiglu_gradients(2, 1100, "triton", torch.float32)
        """,
}


@pytest.mark.parametrize("part", INTERPRETED)
def test_the_kernels_interpreted(part):
    head = """
        from lapkernels.testing_interpreter import quicken
        quicken()
        import torch
        from lapkernels.decoding.configs import StepConfig, choose_apart
        from lapkernels.testing_steps import *
        """
    head += f"WIDTHS = {WIDTHS}\n"
    run("-c", textwrap.dedent(head) + textwrap.dedent(INTERPRETED[part]), interpreted=True)


def test_all_of_it_runs_without_triton():
    program = """
        import sys
        blocked = ("triton", "fla", "transformers", "lapcli")
        for name in blocked:
            sys.modules[name] = None
        import torch
        from lapkernels.norm import rms_norm, swiglu
        from lapkernels.testing_steps import *
        check_delta("as in Gated DeltaNet", "auto", torch.float32)
        check_ssd("as in Mamba-2", "auto", torch.float32)
        assert swiglu(rms_norm(torch.ones(2, 8), torch.ones(8)).output).shape == (2, 4)
        assert not any(sys.modules.get(name) for name in blocked)
        """
    run("-c", textwrap.dedent(program), interpreted=False)


@pytest.mark.parametrize(("capability", "count"), [(80, 1), (90, 4)], ids=["sm80", "sm90"])
def test_what_the_table_chooses_compiles(capability, count):
    """Case 15: registers, spills and shared memory of what large and small batches get, 100 KB of it at most."""
    program = f"""
        import json, torch
        from lapkernels.offline import compile_only, resources
        from lapkernels.decoding.configs import StepConfig, choose_config
        from lapkernels.testing_steps import *
        compiled = compile_only({capability})
        found = []
        cases = (
            (delta_step, delta_step_case(batch=1, tokens=1, key_width=256, value_width=512), torch.float32, 4096),
            (delta_step, delta_step_case(batch=1, tokens=1, key_width=96, value_width=128), torch.bfloat16, 4096),
            (delta_step, delta_step_case(batch=1, tokens=1, key_width=100, value_width=128), torch.float32, 8),
            (ssd_step, ssd_step_case(batch=1, tokens=1, state_width=128, head_width=64), torch.float32, 4096),
        )
        for step, case, dtype, heads in cases[:{count}]:
            case = case.to(torch.bfloat16)
            config = choose_config(case.shape[2], case.shape[3], heads, dtype.itemsize, "cpu")
            step(**case.tokens(0, 1), **case.constants(), state=case.state(1, dtype, value_major=False),
                 conv=case.conv(1), position=torch.tensor([3]), slots=torch.tensor([0]), config=config, impl="triton")
            found.append([config, resources(compiled[-1])])
        # What the table seldom chooses, tile after tile among it: seen to compile.
        case = delta_step_case(batch=1, tokens=1, key_width=32, value_width=64).to(torch.bfloat16)
        for config in ((16, 1, 1), (16, 2, 1), (16, 1, 4), (8, 1, 1, "", None, True),
                       (64, 2, 1, "", None, True)):
            delta_step(**case.tokens(0, 1), **case.constants(), state=case.state(1, torch.float32, value_major=False),
                 conv=case.conv(1), position=torch.tensor([3]), slots=torch.tensor([0]), config=StepConfig(*config),
                 impl="triton")
        assert len(compiled) == len(found) + 9
        print(json.dumps(found))
        """
    found = json.loads(run("-c", textwrap.dedent(program), interpreted=False))
    assert len(found) == count
    for config, (registers, spilled, shared, warps) in found:
        assert warps == config[1]
        assert shared <= 100 * 1024
        assert registers <= (config[4] or 255)
        # A few addresses of what is used once; state that does not fit would be hundreds of bytes.
        assert spilled <= 128, (config, spilled)


CHOSEN = f"""
    import json, torch
    from lapkernels.decoding.configs import choose_apart
    from lapkernels.delta_step import triton_launch
    from lapkernels.offline import compile_only, resources
    from lapkernels.testing_steps import *

    class Nothing:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    triton_launch.delta_inputs_kernel = triton_launch.delta_outputs_kernel = Nothing()
    compiled, found = compile_only(90), []
    for key_width, value_width in {WIDTHS}:
        for dtype in (torch.bfloat16, torch.float32)[: 1 + (key_width in (48, 256))]:
            case = delta_step_case(batch=1, tokens=1, key_width=key_width, value_width=value_width, padding=8)
            case, config = case.to(torch.bfloat16), choose_apart(key_width, value_width, 100000, dtype.itemsize)
            delta_step(**case.tokens(0, 1), **case.constants(), state=case.state(1, dtype), conv=case.conv(1),
                       position=torch.tensor([3]), slots=torch.tensor([0]), config=config, impl="triton")
            taken = resources(compiled[-1])
            found.append([key_width, dtype.itemsize, config, taken, taken.programs()])
    assert len(compiled) == len(found)
    print(json.dumps(found))
    """


def test_what_large_batches_get_compiles_without_spills():
    found = json.loads(run("-c", textwrap.dedent(CHOSEN), interpreted=False))
    assert len(found) == len(WIDTHS) + 2
    for key_width, size, config, (_, spilled, shared, warps), programs in found:
        assert not spilled, (key_width, size, config, spilled)
        assert warps == config[1]
        assert shared <= 8 * 1024
        # At the narrowest by how many programs a multiprocessor takes; at all others by their registers.
        assert programs * key_width * config[0] * size >= 64 * 1024, (key_width, size, config, programs)


def test_what_large_batches_get():
    """As measured; and at every width a program of 32 KB and four warps at most, whose threads have enough to do."""

    def cut(key_width, size, value_width=128):
        config = choose_apart(key_width, value_width, 100000, size)
        assert config is not None
        return config.tile, config.warps, config.registers

    assert [cut(width, 4) for width in (64, 96, 128)] == [(64, 2, None), (64, 4, None), (64, 4, None)]
    assert [cut(width, 2) for width in (64, 96, 128)] == [(64, 2, 80), (64, 2, 120), (64, 4, 80)]
    assert choose_apart(128, 128, 511, 2) is None
    assert choose_apart(128, 128, 512, 2) is not None
    for key_width in range(16, 257):
        for value_width in (16, 24, 64, 128, 512):
            for size in (2, 4):
                tile, warps, registers = cut(key_width, size, value_width)
                held = key_width * tile / (32 * warps)
                assert tile == 64 or tile >= value_width or key_width * tile * size > 16 * 1024
                assert key_width * tile * size <= 32 * 1024
                assert held <= (64 if size == 4 else 128)
                assert warps == 1 or (warps in (2, 4) and held >= {2: 64, 4: 32}[size])
                assert (registers is None) == (size == 4 or warps == 1)


LATE = """
    import json, re, subprocess, sys, tempfile, torch
    from pathlib import Path
    import triton.backends.nvidia
    from lapkernels.offline import compile_only, resources
    from lapkernels.decoding.configs import choose_apart
    from lapkernels.testing_steps import *
    compiled = compile_only(90)
    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"

    def late(kernel):
        "Registers of state loaded before the wait, and the loads that come only after the state is first needed."
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        lines = [re.sub(r"^@!?U?P[0-9T]+ ", "", line) for line in re.findall(r"/\\*[0-9a-f]{4,}\\*/ +([^;]+) ;", text)]
        wait = next(at for at, line in enumerate(lines) if line.startswith("ACQBULK"))
        first = [re.match(r"LDG[.]E[.]128[.\\w]* R(\\d+)", line) for line in lines[:wait]]
        held = {int(each[1]) + word for each in first if each for word in range(4)}
        for at in range(wait + 1, len(lines)):
            operation, _, operands = lines[at].partition(" ")
            read = operands if operation.startswith(("STG", "STS")) else operands.partition(",")[2]
            if held & {int(number) for number in re.findall(r"\\bR(\\d+)", read)}:
                return len(held), [line for line in lines[at:] if line.startswith("LDG")]
        raise AssertionError("the state is never needed")

    for dtype in (torch.float32, torch.bfloat16):
        config = choose_apart(96, 128, 4096, dtype.itemsize)
        case = delta_step_case(batch=1, tokens=1, key_width=96, value_width=128, padding=8).to(torch.bfloat16)
        delta_step(**case.tokens(0, 1), **case.constants(), state=case.state(1, dtype), conv=case.conv(1),
                   position=torch.tensor([3]), slots=torch.tensor([0]), impl="triton",
                   config=config)
        held, found = late(compiled[-2])
        # 96 x tile numbers, by 32 threads a warp and four bytes a register.
        assert held == 96 * config.tile * dtype.itemsize // (4 * 32 * config.warps), held
        assert not found, (config, found)
        taken = resources(compiled[-2])
        assert not taken.spilled
        # What a multiprocessor holds of states: well above what its bandwidth times the life of a program comes to.
        assert taken.programs() * 96 * config.tile * dtype.itemsize >= 72 * 1024, taken
    """


def test_the_states_kernel_waits_twice():
    """Whatever the assembler makes of it: nothing else is asked for once the state has to be there."""
    run("-c", textwrap.dedent(LATE), interpreted=False)


def test_blocks_of_rows():
    """Threads cover a block with 16 bytes each; a narrow tile, or few channels, takes what there is."""
    assert StepConfig(32, 2, 1).block(128, 4) == 8
    assert StepConfig(64, 2, 1).block(128, 2) == 8
    assert StepConfig(2, 1, 1).block(128, 4) == 32
    assert StepConfig(8, 4, 1).block(12, 4) == 16


def test_the_table_covers_every_width():
    """K = 96 costs 96 channels, no configuration is above a program's means, and every shape has one."""
    assert key_parts(96) == (64, 32, 0)
    assert key_parts(112) == (64, 32, 16)
    assert key_parts(60) == (64, 0, 0)
    for key_width in range(1, 257):
        parts = key_parts(key_width)
        assert key_width <= sum(parts) <= key_width * 8 / 7 + 4
        assert sum(parts) == key_width or key_width % 16 or key_width == 240
        assert sum(parts[:2]) < key_width or parts[2] == 0
        for value_width in (1, 24, 64, 128, 512):
            for size in (2, 4):
                for heads in (1, 100, 100000):
                    config = choose_config(key_width, value_width, heads, size, "cpu")
                    assert config.tile * config.splits >= value_width
                    assert config.tile & (config.tile - 1) == 0
                    assert sum(parts) * config.tile <= 128 * 32 * config.warps


@pytest.mark.parametrize("name", ["delta_step", "ssd_step"])
def test_the_benchmarks_run(name, tmp_path):
    output = tmp_path / "rows.jsonl"
    script = str(ROOT / "kernels" / "benchmarks" / f"{name}.py")
    configs = {"delta_step": "4:1:1::80:apart,2:1:1:::apart"}.get(name, "no")
    options = ["--toy", "--repeats", "1", "--trials", "1", "--configs", configs, "--output", str(output)]
    shown = run(script, *options, interpreted=True)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    ours = next(row for row in rows if row.get("impl") == "triton")
    assert ours["us"] > 0
    asked = [row["config"] for row in rows if row.get("impl") == "triton" and not row["chosen"]]
    assert asked == ([] if configs == "no" else ["4:1:1::80:apart", "2:1:1:::apart"])
    assert ours["floor_us"] == pytest.approx(ours["bytes"] / 4.3e12 * 1e6)
    assert "table's choice" in shown
