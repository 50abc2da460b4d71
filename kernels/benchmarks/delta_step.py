"""Check and time the decode step of a delta-family layer, whole: convolution, norms, gates, state.

`python kernels/benchmarks/delta_step.py --output rows.jsonl` on a GPU. Every variant is first compared with an fp64
oracle. Times are medians of trials of 100 replays of a CUDA graph after 10, over states that no cache holds. Beside
them stand the floor (bytes that must move over 4.3 TB/s) and what a plain step without convolution, norms and gate
takes. `--plan default` times, within a minute of a GPU, three kernels as the table cuts them and as its neighbours do,
for the layers, widths, batches and states that large batches are judged by, `--plan wide` for the widths around those;
`--kernels` tells what each kernel of a step takes instead.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from _steps import COMPUTE, DTYPES, Case, device_of_run, parser, run

from lapkernels.decoding.configs import (
    APART_REGISTERS,
    StepConfig,
    choose_apart,
    choose_config,
    key_parts,
    power_of_two,
)
from lapkernels.delta_step import delta_step
from lapkernels.testing import assert_as_precise
from lapkernels.testing_steps import DELTA_CASES, delta_oracle, delta_step_case, delta_summands, follow
from lapkernels.timing import copies, free

LAYERS = {"16/32 heads": (16, 32, 128), "6 heads": (6, 6, 512)}
"""Key heads, value heads and V: a Qwen3.5 layer, and a Gated DeltaNet of hidden size 2048."""

PLANS = {"default": (128, 96, 64), "wide": (256, 192, 112, 80, 48, 32)}
"""Widths of each plan, the most telling first: what large batches are judged by, and what lies around it."""

WIDTHS, BATCHES, STATES = ([128, 64, 32, 256, 96, 192], [48, 80, 112]), [64, 256, 16, 1], ["fp32", "bf16"]


@triton.jit
def plain_kernel(q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, state_ptr, out_ptr, H: tl.constexpr, HV: tl.constexpr,
                 K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """What serving engines do: a tile of BV x K a program, gate and strength fused, the rest left to others."""
    tile, head, row = tl.program_id(0), tl.program_id(1) % HV, (tl.program_id(1) // HV).to(tl.int64)
    keys, values = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    at = row * H * K + head // (HV // H) * K + keys
    q = tl.load(q_ptr + at, mask=keys < K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + at, mask=keys < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + (row * HV + head) * V + values, mask=values < V, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * K**-0.5
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    decay = tl.exp(-tl.log(1 + tl.exp(tl.load(a_ptr + row * HV + head).to(tl.float32))))
    beta = 1 / (1 + tl.exp(-tl.load(b_ptr + row * HV + head).to(tl.float32)))
    place = state_ptr + (row * HV + head) * K * V + values[:, None] * K + keys[None, :]
    mask = (values < V)[:, None] & (keys < K)[None, :]
    state = tl.load(place, mask=mask, other=0.0).to(tl.float32) * decay
    state += (beta * (v - tl.sum(state * k[None, :], 1)))[:, None] * k[None, :]
    tl.store(out_ptr + (row * HV + head) * V + values, tl.sum(state * q[None, :], 1), mask=values < V)
    tl.store(place, state, mask=mask)


def layer_case(case: Case, batch: int, tokens: int) -> Any:
    """Random inputs and parameters, rows of the projection aligned as a model's are."""
    return delta_step_case(batch=batch, tokens=tokens, **shape(case))


def shape(case: Case) -> dict[str, Any]:
    """The arguments of `delta_step_case` that a case sets."""
    return {
        "key_heads": case.key_heads,
        "value_heads": case.value_heads,
        "key_width": case.key_width,
        "value_width": case.value_width,
        "padding": -(case.channels + case.value_heads * (case.value_width + 2)) % 16,
    }


def our_calls(case: Case, inputs: Any, copies: int, device: torch.device) -> Callable[[StepConfig], list[Any]]:
    """Our step on operands of its own for each copy."""
    state, rows = DTYPES[case.state], torch.arange(case.batch, dtype=torch.int32, device=device)
    position = torch.full((case.batch,), 512, dtype=torch.int64, device=device)
    sets = []
    for _ in range(copies):
        pool, conv = inputs.state(case.batch, state), inputs.conv(case.batch)
        # Not zeros: they are faster than real numbers.
        pool.normal_(std=0.1)
        conv.inputs.normal_()
        sets.append((pool, conv))

    def make(config: StepConfig) -> list[Any]:
        def call(pool: Any, conv: Any) -> Any:
            return lambda: delta_step(
                **inputs.tokens(0, 1), **inputs.constants(), state=pool, conv=conv, position=position, slots=rows,
                config=config, impl="triton",
            )  # fmt: skip

        return [call(*one) for one in sets]

    return make


def calls(case: Case, device: torch.device, copies: int) -> Iterator[tuple[str, Any]]:
    """Our step and what there is beside it."""
    inputs = layer_case(case, case.batch, 1).to(COMPUTE, device)
    yield "triton", our_calls(case, inputs, copies, device)
    if ARGUMENTS.no_baselines:
        return
    given = {name: x.squeeze(1).contiguous() for name, x in inputs.tokens(0, 1).items() if x is not None}
    yield "plain", lambda config: [plain_call(case, given, device) for _ in range(copies)]
    if device.type == "cuda" and case.state == "fp32" and not ARGUMENTS.plan:
        with suppress(ImportError):
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as fla_step

            yield "fla", lambda config: [fla_call(fla_step, case, given, device) for _ in range(copies)]


def plain_call(case: Case, given: dict[str, Any], device: torch.device) -> Any:
    """The plain step on a state of its own."""
    state = torch.randn(case.batch, case.value_heads, case.value_width, case.key_width, device=device) * 0.1
    state = state.to(DTYPES[case.state])
    out = torch.empty_like(given["v"])
    wide = power_of_two(case.key_width)
    tile = min(32, power_of_two(case.value_width))
    launch: Any = plain_kernel[(-(-case.value_width // tile), case.batch * case.value_heads)]
    tensors = [given[name] for name in ("q", "k", "v", "a", "b")]
    return lambda: launch(
        *tensors, state, out, H=case.key_heads, HV=case.value_heads, K=case.key_width, V=case.value_width, BK=wide,
        BV=tile, num_warps=1,
    )  # fmt: skip


def fla_call(step: Any, case: Case, given: dict[str, Any], device: torch.device) -> Any:
    """The step of fla, which writes another state than it reads; gates are made beforehand."""
    state = torch.randn(case.batch, case.value_heads, case.key_width, case.value_width, device=device) * 0.1
    q, k, v = (given[name].unsqueeze(1) for name in ("q", "k", "v"))
    g, beta = -torch.nn.functional.softplus(given["a"].float()).unsqueeze(1), given["b"].sigmoid().unsqueeze(1)
    return lambda: step(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def build(case: Case, config: StepConfig) -> None:
    """One launch with operands of two rows on the CPU."""
    small = replace(case, batch=2)
    our_calls(small, layer_case(small, 2, 1).to(COMPUTE), 1, torch.device("cpu"))(config)[0]()


@cache
def truth(name: str, state: str, **shape: int) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Three tokens of two rows of a layer; of them what an fp64 oracle gives, what the reference, and the summands."""
    sequences = delta_step_case(**{"batch": 2, "tokens": 3, **DELTA_CASES[name], **shape}).to(COMPUTE)
    output, states = delta_oracle(sequences)
    yardstick = follow(delta_step, sequences, "reference", DTYPES[state], False, 1, None)
    # Rounded as the state is, not as outputs are.
    finer = torch.finfo(DTYPES[state]).eps / torch.finfo(COMPUTE).eps
    summands = {name: size * finer for name, size in delta_summands(sequences, states).items()}
    return sequences, {"output": output, "state": states[-1]}, yardstick, summands


def gate(case: Case, config: StepConfig, device: torch.device) -> None:
    """The kernel against the oracle, which is asked once for all configurations."""
    sequences, wanted, yardstick, summands = truth("as in Gated DeltaNet", case.state, **shape(case))
    found = follow(delta_step, sequences.to(device=device), "triton", DTYPES[case.state], False, 1, config)
    assert_as_precise(found, wanted, yardstick, COMPUTE, terms=3, summands=summands)


def chosen(case: Case, device: torch.device) -> StepConfig:
    """The table's choice."""
    heads, size = case.batch * case.value_heads, DTYPES[case.state].itemsize
    apart = choose_apart(case.key_width, case.value_width, heads, size)
    return apart or choose_config(case.key_width, case.value_width, heads, size, device)


def variants(case: Case) -> list[StepConfig]:
    """The grid: tiles, warps, splits, registers, and states that pass the cache by."""
    if ARGUMENTS.configs is not None:
        return ARGUMENTS.configs
    if ARGUMENTS.plan:
        return planned(case)
    rows, found = sum(key_parts(case.key_width)), []
    size = DTYPES[case.state].itemsize
    # Three kernels, the second of them small programs: the most telling first.
    for tile, warps in ((32, 2), (32, 1), (64, 4), (64, 2), (128, 8), (128, 4), (16, 1)):
        if rows * tile <= 160 * 32 * warps:
            found.append(StepConfig(tile, warps, 1, "", None, True))
    for tile in (128, 64, 32, 16):
        splits = -(-case.value_width // tile)
        for warps in (8, 4, 2, 1):
            held = rows * tile / (32 * warps)
            if not 48 <= held <= 128 or tile * size < 64:
                continue
            registers = {True: 128, False: 168 if size == 2 or held <= 96 else None}[held <= 64]
            found.append(StepConfig(tile, warps, splits, "", registers))
            if case.batch >= 64 and tile >= 32:
                found.append(StepConfig(tile, warps, splits, "evict_first", registers))
                found.append(StepConfig(tile, warps, splits, "", None))
            if splits > 1 and case.batch >= 64:
                # All tiles of a head in one program: q and k are made once, and nothing is waited for.
                found.append(StepConfig(tile, warps, 1, "", None))
    return list(dict.fromkeys(found))


def planned(case: Case) -> list[StepConfig]:
    """Beside the choice, what differs from it by one step: half and twice the warps, half and twice the tile."""
    usual, size, found = chosen(case, torch.device("cpu")), DTYPES[case.state].itemsize, []
    steps = ((1, 0.5), (1, 2), (2, 2), (0.5, 0.5))
    for tile, warps in ((int(usual.tile * tile), int(usual.warps * warps)) for tile, warps in steps):
        held = case.key_width * tile / (32 * max(1, warps))
        # Pieces of rows below a line of memory were slow at every width, and so were wide ones of many rows.
        wide = min(case.value_width, 64 if case.key_width >= 64 else 128)
        if usual.apart and 1 <= warps <= 8 and 128 // size <= tile <= wide and 32 <= held <= 128:
            found.append(StepConfig(tile, warps, 1, "", _registers(case, warps, held), True))
    return found


def _registers(case: Case, warps: int, held: float) -> int | None:
    """What a thread may have without spilling much, found by compiling; `None` where the compiler takes no more."""
    if case.state == "fp32" or warps == 1:
        return None
    return 64 if held <= 48 else next(most for numbers, most in APART_REGISTERS if held <= numbers)


def cases() -> list[Case]:
    """The most telling first."""
    if ARGUMENTS.toy:
        return [Case("toy", 1, 1, 4, 4, 1, "bf16")]
    found = []
    if ARGUMENTS.plan:
        for width in ARGUMENTS.widths or PLANS[ARGUMENTS.plan]:
            for layer in ARGUMENTS.layers or LAYERS:
                for state in ARGUMENTS.states or ("bf16", "fp32"):
                    for batch in ARGUMENTS.batches or (64, 256):
                        key_heads, value_heads, value_width = LAYERS[layer]
                        found.append(Case(layer, key_heads, value_heads, width, value_width, batch, state))
        return found
    for widths in [ARGUMENTS.widths] if ARGUMENTS.widths else WIDTHS:
        for batch in ARGUMENTS.batches or BATCHES:
            for state in ARGUMENTS.states or STATES:
                for layer in ARGUMENTS.layers or LAYERS:
                    key_heads, value_heads, value_width = LAYERS[layer]
                    for width in widths:
                        if width <= 128 or layer == "6 heads" or ARGUMENTS.widths:
                            found.append(Case(layer, key_heads, value_heads, width, value_width, batch, state))
    return found


def kernels() -> int:
    """Print what each kernel of a step takes, for the table's choice and the configurations given."""
    device = device_of_run()
    if device.type != "cuda":
        sys.exit("--kernels asks a GPU's profiler, and there is none; leave it out")
    for case in cases():
        inputs = layer_case(case, case.batch, 1).to(COMPUTE, device)
        make = our_calls(case, inputs, copies(case.state_bytes, device), device)
        for config in [chosen(case, device), *(ARGUMENTS.configs or [])]:
            steps = make(config)
            steps[0]()
            rounds = -(-20 // len(steps))
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities, acc_events=True) as profile:
                for _ in range(rounds):
                    for step in steps:
                        step()
                torch.cuda.synchronize(device)
            print(f"{case.name():44s} {config}")
            for event in profile.key_averages():
                taken = event.self_device_time_total / (rounds * len(steps))
                print(f"    {event.key[:40]:40s} {taken:8.2f} us")
        free(device)
    return 0


def main() -> int:
    """Run the benchmark."""
    return kernels() if ARGUMENTS.kernels else run(ARGUMENTS, cases(), variants, chosen, build, gate, calls)


def options() -> Any:
    """Those of the command line."""
    found = parser(__doc__)
    found.add_argument("--plan", choices=PLANS, help="cases and variants that a short time on a GPU suffices for")
    found.add_argument("--kernels", action="store_true", help="what each kernel of a step takes, by the profiler")
    return found.parse_args()


# Read by the processes that compile ahead as well, which import this file under another name.
ARGUMENTS = options()

if __name__ == "__main__":
    sys.exit(main())
