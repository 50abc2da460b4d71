"""One layer's decode step: every implementation present, beside the bytes of its states."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lapcli.benchmarks.speed.decode import DecodeSettings, failed
from lapcli.benchmarks.speed.gate import Verdict, compare
from lapcli.benchmarks.speed.layers import Shape, cell_of_layer, worst
from lapcli.benchmarks.speed.results import Cell, Results, Row
from lapkernels.timing import copies, free, measure

WAYS = ("lapcli", "fla", "FlashInfer", "pytorch")
"""`lapcli`: `delta_step`, convolution, norms and gates fused in; `fla`: its recurrent kernel, which does none of these
but the norms of q and k; `FlashInfer`: its decode kernel; `pytorch`: the definition."""
JUDGED_ROWS = 4
TAPS = 4
SEEN = 512
"""Tokens that each row has had."""


class StepCase:
    """Rows of a layer in mid-sequence: raw projections, a state each, convolution inputs.

    Args:
        shape: of the layer.
        batch: rows.
        dtype: of what is projected.
        state_dtype: of the states.
        device: where.
        seed: of all of it.
    """

    def __init__(
        self,
        shape: Shape,
        batch: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ):
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device, dtype=torch.float32).to(kind)

        self.shape, self.batch, self.dtype, self.device = shape, batch, dtype, device
        heads, values, key, value = shape.key_heads, shape.value_heads, shape.key_width, shape.value_width
        sizes = (heads * key, heads * key, values * value, values * value, values, values)
        # One projection's output, of which the operator takes views.
        self.projected = normal(batch, 1, sum(sizes))
        q, k, v, gate, b, a = self.projected.split(sizes, dim=-1)
        self.q, self.k = q.unflatten(-1, (heads, key)), k.unflatten(-1, (heads, key))
        self.v, self.gate = v.unflatten(-1, (values, value)), gate.unflatten(-1, (values, value))
        self.a, self.b = a, b
        self.A_log = torch.rand(values, generator=generator, device=device).mul_(16).add_(1e-3).log_()
        self.dt_bias = normal(values, kind=torch.float32) - 4
        self.norm_weight = 1 + 0.1 * normal(value)
        channels = sum(sizes[:3])
        self.filter = normal(channels, TAPS) / TAPS**0.5
        self.inputs = normal(batch, TAPS, channels)
        self.position = torch.full((batch,), SEEN, dtype=torch.int64, device=device)
        self.slots = torch.arange(batch, dtype=torch.int32, device=device)
        # A tenth: what many tokens leave behind, and no row like another.
        self.state = torch.empty(batch, values, key, value, dtype=state_dtype, device=device)
        for first in range(0, batch, 16):
            part = self.state[first : first + 16]
            part.copy_(0.1 * normal(*part.shape, kind=torch.float32))

    def nbytes(self) -> int:
        """Of states: what fills a cache."""
        return self.state.nbytes

    def step(self, impl: str, rows: Tensor | None = None, kind: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The whole step, of some rows, in another dtype: output and new states; the case keeps its own.

        Args:
            impl: which implementation.
            rows: which rows; default all.
            kind: of everything; default as it is.
        """
        from lapkernels.delta_step import ConvState, delta_step

        rows = torch.arange(self.batch, device=self.device) if rows is None else rows
        wide = torch.float64 if kind == torch.float64 else torch.float32

        def cut(x: Tensor) -> Tensor:
            return x[rows].to(kind) if kind is not None else x[rows]

        state = self.state[rows].to(wide if kind == torch.float64 else self.state.dtype)
        conv = ConvState(self.filter.to(kind or self.dtype), None, cut(self.inputs).clone())
        output = delta_step(
            cut(self.q), cut(self.k), cut(self.v), state,
            b=cut(self.b), a=cut(self.a), A_log=self.A_log.to(wide), dt_bias=self.dt_bias.to(wide), conv=conv,
            position=self.position[rows], gate=cut(self.gate), norm_weight=self.norm_weight.to(kind or self.dtype),
            norm_eps=1e-6, impl=impl,
        )  # fmt: skip
        return output, state

    def call(self, impl: str) -> Callable[[], Tensor]:
        """The step in place, to be timed."""
        from lapkernels.delta_step import ConvState, delta_step

        conv = ConvState(self.filter, None, self.inputs)

        def run() -> Tensor:
            return delta_step(
                self.q, self.k, self.v, self.state, b=self.b, a=self.a, A_log=self.A_log, dt_bias=self.dt_bias,
                conv=conv, position=self.position, slots=self.slots, gate=self.gate, norm_weight=self.norm_weight,
                norm_eps=1e-6, impl=impl,
            )  # fmt: skip

        return run

    def judge(self, impl: str) -> Verdict:
        """The timed implementation over all rows, against the definition in fp64 for the first and the last of them."""
        count = min(self.batch, JUDGED_ROWS)
        rows = torch.cat([torch.arange(count), torch.arange(self.batch - count, self.batch)]).unique().to(self.device)
        kept = self.state[rows].clone(), self.inputs.clone()
        try:
            output = self.call(impl)()
            found = output[rows], self.state[rows].clone()
        finally:
            self.state[rows] = kept[0]
            self.inputs.copy_(kept[1])
        truth, plain = self.step("reference", rows, torch.float64), self.step("reference", rows)
        return worst(
            compare(found[0], truth[0], plain[0], self.dtype), compare(found[1], truth[1], plain[1], self.state.dtype)
        )

    def after_convolution(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as the recurrence of a library gets them: filtered, activated, not yet normalised."""
        shape = self.shape
        line = torch.cat([x.flatten(2) for x in (self.q, self.k, self.v)], -1).squeeze(1)
        window = torch.stack([self.inputs[:, (SEEN - back) % TAPS] for back in range(TAPS - 1, 0, -1)] + [line], 1)
        filtered = torch.nn.functional.silu((window.float() * self.filter.T.float()).sum(1)).to(self.dtype)
        keys = shape.key_heads * shape.key_width
        q, k, v = filtered.split((keys, keys, shape.value_heads * shape.value_width), -1)
        return (
            q.reshape(self.batch, 1, shape.key_heads, -1),
            k.reshape(self.batch, 1, shape.key_heads, -1),
            v.reshape(self.batch, 1, shape.value_heads, -1),
        )


def why_not_step(way: str, shape: Shape, state_dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a decode operator cannot run here, or `None`."""
    if way == "fla":
        if importlib.util.find_spec("fla") is None or device.type != "cuda":
            return "fla is not installed" if device.type == "cuda" else "fla needs a GPU"
        return None if state_dtype == torch.float32 else "fla keeps states in fp32"
    if way == "FlashInfer":
        if importlib.util.find_spec("flashinfer") is None or device.type != "cuda":
            return "FlashInfer is not installed" if device.type == "cuda" else "FlashInfer needs a GPU"
        square = shape.key_width == shape.value_width == 128
        large = shape.key_width >= 128 and shape.value_width >= 128 and state_dtype == torch.float32
        return None if square or large else "FlashInfer takes K and V from 128 on, with a bf16 state 128 alone"
    return None


def _bare_step(way: str, case: StepCase) -> tuple[Callable[[], Any], Callable[[], Verdict]]:
    """A library's recurrence alone, without convolution, output norm and gate, and what it should give."""
    from lapkernels.delta_rule import delta_rule

    q, k, v = case.after_convolution()
    log_decay = -case.A_log.exp() * torch.nn.functional.softplus(case.a.float() + case.dt_bias)
    beta = case.b.float().sigmoid()
    if way == "fla":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as kernel

        def run() -> Any:
            return kernel(
                q=q, k=k, v=v, g=log_decay, beta=beta, initial_state=case.state, output_final_state=True,
                use_qk_l2norm_in_kernel=True, state_v_first=False,
            )  # fmt: skip

        def judged() -> tuple[Tensor, Tensor]:
            output, state = run()
            return output, state
    else:
        from flashinfer.gdn_decode import (  # pyright: ignore[reportMissingImports] -- not at hand
            gated_delta_rule_decode_pretranspose as kernel,
        )

        states = case.state.transpose(-1, -2).contiguous()
        a, b = case.a.contiguous(), case.b.contiguous()

        def run() -> Any:
            return kernel(
                q=q, k=k, v=v, state=states, A_log=case.A_log, a=a, dt_bias=case.dt_bias, b=b, use_qk_l2norm=True,
            )  # fmt: skip

        def judged() -> tuple[Tensor, Tensor]:
            kept = states.clone()
            output = run()[0]
            state = states.transpose(-1, -2).clone()
            states.copy_(kept)
            return output, state

    def judge() -> Verdict:
        count = min(case.batch, JUDGED_ROWS)
        rows = torch.arange(count, device=case.device)
        output, state = judged()

        def of(kind: torch.dtype) -> tuple[Tensor, Tensor]:
            found = delta_rule(
                q[rows].to(kind), k[rows].to(kind), v[rows].to(kind), beta[rows], log_decay[rows],
                initial_state=case.state[rows].to(torch.float64 if kind == torch.float64 else torch.float32),
                output_final_state=True, qk_l2norm=True, impl="reference",
            )  # fmt: skip
            assert found.final_state is not None
            return found.output, found.final_state

        truth, plain = of(torch.float64), of(case.dtype)
        # A kernel that multiplies in the dtype of its inputs rounds unit vectors to it, which the definition does not.
        return worst(
            compare(output[rows], truth[0], plain[0], case.dtype),
            compare(state[rows], truth[1], plain[1], case.dtype),
        )

    return run, judge


def step_operator_benchmark(
    shapes: Sequence[Shape],
    batches: Sequence[int],
    results: Results,
    device: torch.device,
    dtype: torch.dtype,
    *,
    state_dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    ways: Sequence[str] = WAYS,
    settings: DecodeSettings | None = None,
) -> None:
    """Measure one layer's decode step, as many layers' states in turn as it takes to overflow the last cache.

    Args:
        shapes: layers.
        batches: rows, the most telling first.
        results: where rows go.
        device: where.
        dtype: of what is projected.
        state_dtypes: of states.
        ways: which.
        settings: how much is measured.
    """
    settings = settings or DecodeSettings()
    said: set[str] = set()
    for batch in batches:
        for state_dtype in state_dtypes:
            for shape in shapes:
                for way in ways:
                    cell = cell_of_layer("decode operator", shape, way, batch, 1, state_dtype)
                    if results.budget.left <= 0:
                        results.add(Row(cell, "no time"))
                        continue
                    why = why_not_step(way, shape, state_dtype, device)
                    if why is not None:
                        if way + why not in said:
                            said.add(way + why)
                            results.add(Row(cell, "not here", why))
                        continue
                    try:
                        results.add(_step_row(cell, shape, state_dtype, results, device, dtype, settings))
                    except Exception as error:
                        results.add(failed(cell, error))
                    finally:
                        free(device)


def _step_row(
    cell: Cell,
    shape: Shape,
    state_dtype: torch.dtype,
    results: Results,
    device: torch.device,
    dtype: torch.dtype,
    settings: DecodeSettings,
) -> Row:
    itemsize = torch.finfo(state_dtype).bits // 8
    sets = copies(cell.batch * shape.state_bytes(itemsize), device)
    cases = [StepCase(shape, cell.batch, dtype, state_dtype, device, seed) for seed in range(sets)]
    if cell.way in ("lapcli", "pytorch"):
        impl = "auto" if cell.way == "lapcli" else "reference"
        verdict = cases[0].judge(impl)
        calls = [case.call(impl) for case in cases]
    else:
        made = [_bare_step(cell.way, case) for case in cases]
        verdict = made[0][1]()
        calls = [run for run, _judge in made]
    if not verdict.right:
        return Row(cell, "wrong", verdict.text, error_share=verdict.share)
    # The definition reads on the host which rows have a slot, so it cannot be captured.
    timing = measure(
        calls, device, warmup=settings.warmup, repeats=settings.repeats, trials=settings.trials,
        graph=cell.way != "pytorch", limit=settings.limit,
    )  # fmt: skip
    moved = 2 * cell.batch * shape.state_bytes(itemsize)
    detail = "" if cell.way in ("lapcli", "pytorch") else "without convolution, output norm and gate"
    return Row.timed(
        cell,
        timing,
        floor=moved / results.machine["copy_bytes"],
        share=verdict.share,
        detail=detail,
        more={"bytes_per_second": moved / timing.seconds, "sets": sets},
    )
