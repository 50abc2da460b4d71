"""Check and time the decode step of a Mamba-2 layer, whole: convolution, state, gate and norm.

`python kernels/benchmarks/ssd_step.py --output rows.jsonl` on a GPU; as `delta_step.py` beside it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from _steps import COMPUTE, DTYPES, Case, parser, run

from lapkernels.decoding.configs import StepConfig, choose_config, key_parts
from lapkernels.ssd_step import ssd_step
from lapkernels.testing_steps import check_ssd, ssd_step_case

LAYERS = {"mamba2 80 heads": (1, 80, 64), "8 groups 64 heads": (8, 64, 64), "falcon 24 heads": (1, 24, 128)}
"""Groups, heads and P: Mamba-2 2.7B, Nemotron-H's and Codestral-Mamba's kind, Falcon-H1's."""

WIDTHS, BATCHES, STATES = ([128, 64, 256], [32, 96, 16]), [64, 256, 1, 16], ["fp32", "bf16"]


def shape(case: Case) -> dict[str, Any]:
    """The arguments of `ssd_step_case` that a case sets."""
    return {
        "groups": case.key_heads,
        "heads": case.value_heads,
        "state_width": case.key_width,
        "head_width": case.value_width,
        "norm_groups": case.key_heads,
        "padding": -(case.channels + case.value_heads * (case.value_width + 1)) % 16,
    }


def our_calls(case: Case, inputs: Any, copies: int, device: torch.device) -> Callable[[StepConfig], list[Any]]:
    """Our step on operands of its own for each copy."""
    rows = torch.arange(case.batch, dtype=torch.int32, device=device)
    position = torch.full((case.batch,), 512, dtype=torch.int64, device=device)
    sets = []
    for _ in range(copies):
        pool = inputs.state(case.batch, DTYPES[case.state], value_major=False)
        conv = inputs.conv(case.batch)
        # Not zeros: they are faster than real numbers.
        pool.normal_(std=0.1)
        conv.inputs.normal_()
        sets.append((pool, conv))

    def make(config: StepConfig) -> list[Any]:
        def call(pool: Any, conv: Any) -> Any:
            return lambda: ssd_step(
                **inputs.tokens(0, 1), **inputs.constants(), state=pool, conv=conv, position=position, slots=rows,
                config=config, impl="triton",
            )  # fmt: skip

        return [call(*one) for one in sets]

    return make


def calls(case: Case, device: torch.device, copies: int) -> Iterator[tuple[str, Any]]:
    """Our step, and that of mamba-ssm where it is: the state alone, with the gate and without convolution and norm."""
    inputs = ssd_step_case(batch=case.batch, tokens=1, **shape(case)).to(COMPUTE, device)
    yield "triton", our_calls(case, inputs, copies, device)
    if ARGUMENTS.no_baselines or device.type != "cuda":
        return
    with suppress(ImportError):
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update  # pyright: ignore[reportMissingImports]

        given = {name: x.squeeze(1).contiguous() for name, x in inputs.tokens(0, 1).items() if x is not None}
        yield "mamba", lambda config: [mamba_call(selective_state_update, case, given, device) for _ in range(copies)]


def mamba_call(step: Any, case: Case, given: dict[str, Any], device: torch.device) -> Any:
    """The step of mamba-ssm on a state of its own."""
    heads, head_width, state_width = case.value_heads, case.value_width, case.key_width
    state = torch.randn(case.batch, heads, head_width, state_width, device=device) * 0.1
    state = state.to(DTYPES[case.state])
    A = -torch.ones(heads, device=device)[:, None, None].expand(-1, head_width, state_width)
    D = torch.ones(heads, device=device)[:, None].expand(-1, head_width)
    dt = given["dt"][:, :, None].expand(-1, -1, head_width)
    bias = torch.zeros(heads, device=device)[:, None].expand(-1, head_width)
    return lambda: step(
        state, given["x"], dt, A, given["B"], given["C"], D, z=given["gate"], dt_bias=bias, dt_softplus=True
    )


def build(case: Case, config: StepConfig) -> None:
    """One launch with operands of two rows on the CPU."""
    small = replace(case, batch=2)
    inputs = ssd_step_case(batch=2, tokens=1, **shape(case)).to(COMPUTE)
    our_calls(small, inputs, 1, torch.device("cpu"))(config)[0]()


def gate(case: Case, config: StepConfig, device: torch.device) -> None:
    """Three tokens of two rows against the fp64 oracle."""
    check_ssd(
        "as in Mamba-2", "triton", COMPUTE, device, state_dtype=DTYPES[case.state], config=config, **shape(case),
        tokens=3,
    )  # fmt: skip


def chosen(case: Case, device: torch.device) -> StepConfig:
    """The table's choice."""
    heads = case.batch * case.value_heads
    return choose_config(case.key_width, case.value_width, heads, DTYPES[case.state].itemsize, device)


def variants(case: Case) -> list[StepConfig]:
    """The grid: tiles, warps, registers, and states that pass the cache by."""
    if ARGUMENTS.configs is not None:
        return ARGUMENTS.configs
    rows, size, found = sum(key_parts(case.key_width)), DTYPES[case.state].itemsize, []
    for tile in (128, 64, 32, 16):
        for warps in (8, 4, 2, 1):
            held = rows * tile / (32 * warps)
            if not 16 <= held <= 128 or tile * size < 64 or tile > 2 * case.value_width:
                continue
            registers = {True: 128, False: 168 if size == 2 or held <= 96 else None}[held <= 64]
            splits = -(-case.value_width // tile)
            found.append(StepConfig(tile, warps, splits, "", registers))
            if case.batch >= 64 and tile >= 32:
                found.append(StepConfig(tile, warps, splits, "evict_first", registers))
                found.append(StepConfig(tile, warps, splits, "", None))
    return list(dict.fromkeys(found))


def cases() -> list[Case]:
    """The most telling first."""
    if ARGUMENTS.toy:
        return [Case("toy", 1, 1, 4, 4, 1, "bf16")]
    found = []
    for widths in [ARGUMENTS.widths] if ARGUMENTS.widths else WIDTHS:
        for batch in ARGUMENTS.batches or BATCHES:
            for state in ARGUMENTS.states or STATES:
                for layer in ARGUMENTS.layers or LAYERS:
                    groups, heads, head_width = LAYERS[layer]
                    found += [Case(layer, groups, heads, width, head_width, batch, state) for width in widths]
    return found


def main() -> int:
    """Run the benchmark."""
    return run(ARGUMENTS, cases(), variants, chosen, build, gate, calls, per_head=1)


# Read by the processes that compile ahead as well, which import this file under another name.
ARGUMENTS = parser(__doc__).parse_args()

if __name__ == "__main__":
    sys.exit(main())
