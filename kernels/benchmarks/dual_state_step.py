"""Check and time the decode step of gated states that share keys and values: all states of a layer in one launch.

`python kernels/benchmarks/dual_state_step.py --output rows.jsonl` on a GPU; as `delta_step.py` beside it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from _steps import COMPUTE, DTYPES, Case, parser, run

from lapkernels.decoding.configs import StepConfig, choose_config, power_of_two
from lapkernels.dual_state_step import allocate_state, dual_state_step
from lapkernels.testing_dual import DualStateInputs, check_dual_step, dual_step_inputs

LAYERS = {"llama2 32 heads": (32, 1, 128), "llama3 8 of 32": (8, 4, 128), "smollm2 3 of 9": (3, 3, 64)}
"""Key heads, query heads for each, and K = V: Llama2-7B's, Llama3-8B's, SmolLM2-135M's."""

BATCHES, STATES, COUNTS = [64, 256, 1, 16], ["fp32", "bf16"], [2, 1, 4]


@dataclass(frozen=True)
class DualCase(Case):
    """One measurement's shape; `value_heads` counts the states of all heads.

    Attributes:
        readers: query heads of a key head.
        count: states of a head.
    """

    readers: int = 1
    count: int = 2

    def moved(self, per_head: int, taps: int = 4) -> int:
        """Bytes that must move: states twice; q, k, v, gates and output once."""
        heads, width = self.key_heads, self.key_width
        numbers = heads * ((self.readers + 1 + self.count) * width + (self.readers + 1) * self.value_width)
        return 2 * self.state_bytes + COMPUTE.itemsize * self.batch * numbers


def inputs_of(case: Any) -> DualStateInputs:
    """One token of each row."""
    return dual_step_inputs(
        batch=case.batch, time=1, heads=case.key_heads, query_heads=case.key_heads * case.readers, states=case.count,
        key_width=case.key_width, value_width=case.value_width,
    )  # fmt: skip


def our_calls(case: Any, inputs: DualStateInputs, copies: int, device: torch.device) -> Callable[..., list[Any]]:
    """Our step on states of its own for each copy."""
    position = torch.full((case.batch,), 512, dtype=torch.int64, device=device)
    shape = (case.batch, case.count, case.key_heads, case.key_width, case.value_width)
    pools = [allocate_state(*shape, dtype=DTYPES[case.state], device=device) for _ in range(copies)]
    for pool in pools:
        # Not zeros: they are faster than real numbers.
        pool.normal_(std=0.1)
    gate = inputs.g.to(inputs.q.dtype)

    def make(config: StepConfig) -> list[Any]:
        def call(pool: torch.Tensor) -> Any:
            return lambda: dual_state_step(
                inputs.q, inputs.k, inputs.v, pool, gate=gate, mixture=inputs.mixture, position=position,
                config=config, impl="triton",
            )  # fmt: skip

        return [call(pool) for pool in pools]

    return make


def calls(case: Any, device: torch.device, copies: int) -> Iterator[tuple[str, Any]]:
    """Our step, and fla's recurrence of GLA with the states as one of all their channels, where fla is."""
    inputs = inputs_of(case).to(COMPUTE, device)
    yield "triton", our_calls(case, inputs, copies, device)
    if ARGUMENTS.no_baselines or device.type != "cuda":
        return
    with suppress(ImportError):
        from fla.ops.gla import fused_recurrent_gla

        yield "fla", lambda config: [fla_call(fused_recurrent_gla, case, inputs) for _ in range(copies)]


def fla_call(step: Any, case: Any, inputs: DualStateInputs) -> Any:
    """A step of fla's, which has a state for each query head and writes a new one beside the old."""
    readers, count = case.readers, case.count
    q = inputs.q.repeat(1, 1, 1, count)
    k = inputs.k.repeat(1, 1, 1, count).repeat_interleave(readers, 2)
    v = inputs.v.repeat_interleave(readers, 2)
    gates = inputs.g.transpose(2, 3).flatten(3).clamp(max=0).to(q.dtype).repeat_interleave(readers, 2)
    shape = (case.batch, q.shape[2], count * case.key_width, case.value_width)
    state = torch.randn(shape, device=q.device) * 0.1
    return lambda: step(q, k, v, gk=gates, initial_state=state, output_final_state=True)


def build(case: Any, config: StepConfig) -> None:
    """One launch with operands of two rows on the CPU."""
    small = replace(case, batch=2)
    our_calls(small, inputs_of(small).to(COMPUTE), 1, torch.device("cpu"))(config)[0]()


def gate(case: Any, config: StepConfig, device: torch.device) -> None:
    """Three tokens of two rows against the fp64 oracle."""
    check_dual_step(
        "triton", COMPUTE, device, state_dtype=DTYPES[case.state], config=config, time=3, heads=case.key_heads,
        query_heads=case.key_heads * case.readers, states=case.count, key_width=case.key_width,
        value_width=case.value_width,
    )  # fmt: skip


def chosen(case: Any, device: torch.device) -> StepConfig:
    """The table's choice."""
    size = DTYPES[case.state].itemsize
    return choose_config(case.key_width, case.value_width, case.batch * case.key_heads, size, device)


def variants(case: Any) -> list[StepConfig]:
    """The grid: tiles and warps."""
    if ARGUMENTS.configs is not None:
        return ARGUMENTS.configs
    rows, size, found = power_of_two(case.key_width), DTYPES[case.state].itemsize, []
    for tile in (128, 64, 32, 16):
        for warps in (8, 4, 2, 1):
            if 8 <= rows * tile / (32 * warps) <= 128 and tile * size >= 32 and tile <= 2 * case.value_width:
                found.append(StepConfig(tile, warps, -(-case.value_width // tile)))
    return found


def cases() -> list[Case]:
    """The most telling first."""
    if ARGUMENTS.toy:
        return [DualCase("toy", 1, 2, 4, 4, 1, "bf16", readers=2, count=2)]
    found: list[Case] = []
    for batch in ARGUMENTS.batches or BATCHES:
        for state in ARGUMENTS.states or STATES:
            for layer in ARGUMENTS.layers or LAYERS:
                heads, readers, width = LAYERS[layer]
                for count in COUNTS if batch == 64 else COUNTS[:1]:
                    for key_width in ARGUMENTS.widths or [width]:
                        name = layer if count == COUNTS[0] else f"{layer}, {count} states"
                        found.append(
                            DualCase(name, heads, count * heads, key_width, width, batch, state, readers, count)
                        )
    return found


def main() -> int:
    """Run the benchmark."""
    return run(ARGUMENTS, cases(), variants, chosen, build, gate, calls, per_head=0)


# Read by the processes that compile ahead as well, which import this file under another name.
ARGUMENTS = parser(__doc__).parse_args()

if __name__ == "__main__":
    sys.exit(main())
