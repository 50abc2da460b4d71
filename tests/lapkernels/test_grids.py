"""More rows than the second and third axis of a CUDA grid count, through every kernel's launcher (case 16)."""

import os
import subprocess
import sys
import textwrap

LAUNCHES = """
    import torch
    from triton.runtime.jit import JITFunction

    from lapkernels._triton import set_compiling_only

    set_compiling_only(90)
    grids = {}

    def record(self, *args, grid, warmup, **options):
        grids.setdefault(self.__name__, []).append(grid)

    JITFunction.run = record

    from lapkernels.attend_step import attend_step
    from lapkernels.decoding.configs import StepConfig
    from lapkernels.delta_rule import delta_rule
    from lapkernels.delta_step import delta_step
    from lapkernels.dual_state_step import dual_state_step
    from lapkernels.greedy_token import greedy_token
    from lapkernels.norm import rms_norm, swiglu
    from lapkernels.short_conv import short_conv
    from lapkernels.ssd_step import ssd_step
    from lapkernels.testing_steps import delta_step_case, ssd_step_case

    ROWS, half = 70001, torch.bfloat16

    def many(*shape, dtype=half):
        # One row for all: nothing is computed here.
        return torch.zeros(1, *shape, dtype=dtype).expand(ROWS, *shape)

    for step, case in ((delta_step, delta_step_case(batch=1, tokens=1, taps=None)),
                       (ssd_step, ssd_step_case(batch=1, tokens=1, taps=None))):
        case = case.to(half)
        given = {name: None if x is None else x.expand(ROWS, *x.shape[1:]) for name, x in case.tokens(0, 1).items()}
        state = case.state(1, torch.float32)
        pool = torch.empty_strided((ROWS, *state.shape[1:]), state.stride(), dtype=state.dtype)
        for config in (None, StepConfig(4, 1, 2)) + ((StepConfig(4, 1, 1, apart=True),) if step is delta_step else ()):
            step(**given, **case.constants(), state=pool, config=config, impl="triton")
    dual_state_step(many(1, 2, 8), many(1, 1, 8), many(1, 1, 8), torch.empty(ROWS, 2, 1, 8, 8),
                    gate=many(1, 2, 1, 8), mixture=torch.zeros(2), impl="triton")
    attend_step(many(2, 8), many(1, 8), many(1, 8), *(torch.zeros(2, 1, 16, 8, dtype=half) for _ in "kv"),
                pages=torch.zeros(ROWS, 1, dtype=torch.int32), position=torch.zeros(ROWS, dtype=torch.int64),
                slots=torch.arange(ROWS), impl="triton")
    greedy_token(many(9), *(torch.zeros(ROWS, dtype=torch.int64) for _ in range(3)), impl="triton")

    def trained(*shape):
        return many(*shape).requires_grad_()

    def both_ways(output):
        output.sum().backward()

    rms_norm(many(8), torch.ones(8), impl="triton")
    swiglu(many(8), impl="triton")
    short_conv(many(1, 8), torch.ones(8, 4), impl="triton")
    both_ways(rms_norm(trained(8), torch.ones(8, requires_grad=True), impl="triton").output)
    both_ways(swiglu(trained(8), impl="triton"))
    both_ways(short_conv(trained(1, 8), torch.ones(8, 4, requires_grad=True), trained(3, 8), impl="triton"))
    q, k, v, beta = trained(1, 1, 16), trained(1, 1, 16), trained(1, 1, 16), trained(1, 1)
    both_ways(delta_rule(q, k, v, beta, many(1, 1, dtype=torch.float32), impl="triton").output)

    for name, found in grids.items():
        for grid in found:
            assert grid[0] < 2**31 and max((0, *grid[1:])) <= 65535, (name, grid)
            # Up to 32 rows a program; weights' gradients have as many programs as a GPU has places for them.
            assert grid[0] >= ROWS // 32 or name == "_rms_norm_back", (name, grid)
    print(*sorted(grids))
    """

KERNELS = {
    "_attend_shares", "_conv_back", "_greedy_kernel", "_join_shares", "_rms_norm_back", "_rms_norm_kernel",
    "_short_conv_kernel", "_state_back", "_swiglu_back", "_swiglu_kernel", "channel_gradients",
    "delta_inputs_kernel", "delta_outputs_kernel", "delta_states_kernel", "delta_step_kernel",
    "dual_state_step_kernel", "gate_gradients", "pair_gradients", "prepare", "ssd_step_kernel", "walk", "walk_back",
}  # fmt: skip


def test_rows_lie_along_the_axis_that_has_room_for_them():
    """Launches are recorded, not run: an axis above 65535 would be refused by the driver, at the first such call."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LAUNCHES)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == KERNELS
