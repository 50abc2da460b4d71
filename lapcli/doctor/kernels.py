"""Every kernel of lapkernels against a recurrence in fp64 that shares no line with it, on one device.

Each check says what a plain computation in the same dtype may be off by, and by how much the kernel is; nothing is set
by hand (`lapkernels.testing.precisions`).
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lapcli.reporting import Reporter, SilentReporter
from lapkernels import verdicts
from lapkernels._triton import first_configurations
from lapkernels.testing import (
    DeltaRuleInputs,
    Precision,
    delta_rule_inputs,
    output_state_and_gradients,
    precisions,
    transition_recurrence,
)
from lapkernels.testing_gates import raw_gate_precisions
from lapkernels.timing import free, out_of_memory
from lapkernels.verdicts import Verdict

Way = Literal["forward", "backward", "decode"]
Status = Literal["right", "wrong", "failed", "not here", "not checked"]

CHUNK = 64
LENGTH = 2 * CHUNK + 2
"""Tokens of a chunked check: two chunks and a rest."""
SHORT = 8
"""Tokens of a decode check: a step at a time."""
WIDTHS = ((64, 128),)
MORE_WIDTHS = ((32, 128), (64, 128), (96, 128), (100, 64), (128, 128))
_WORST = 1e6
_AS_PROJECTED = {"gated": "all of it", "decay by channel": "a decay of each channel"}
"""Layers whose gates the delta rule activates, by the variant that they are of."""
STEP_WIDTHS = (48, 64)
"""K and V of a decode step's check: K no power of two."""


@dataclass(frozen=True)
class Check:
    """One kernel, compared.

    Attributes:
        operator: such as `delta_rule`.
        impl: the implementation.
        variant: of the operator, such as `gated`.
        way: `forward`, `backward` (its gradients) or `decode` (a step at a time).
        dtype: of its inputs.
        status: `right`, `wrong`, `failed` (it raised), `not here` (it cannot run here, or is known to be wrong, and is
            not taken) or `not checked` (no time or memory was left).
        share: the largest error over what is allowed of it; above 1 is wrong, and 1e6 is all that is worse.
        detail: which result that is and by how much, or why there is none.
        seconds: what the check took, compilation included.
    """

    operator: str
    impl: str
    variant: str
    way: Way
    dtype: str
    status: Status
    share: float | None
    detail: str
    seconds: float

    @property
    def bad(self) -> bool:
        """Whether the kernel ran here and should not have."""
        return self.status in ("wrong", "failed")


@dataclass(frozen=True)
class Trial:
    """A check to be made.

    Attributes:
        operator: as in `Check`.
        impl: likewise.
        variant: likewise.
        way: likewise.
        dtype: of the inputs.
        why_not: why it cannot be made here, or `None`.
        run: makes it.
        cost: later ones are made later: 0 for what compiles in no time, 2 for what may compile for a minute.
    """

    operator: str
    impl: str
    variant: str
    way: Way
    dtype: torch.dtype
    why_not: str | None
    run: Callable[[], Sequence[Precision]]
    cost: int = 0

    def checked(self, status: Status, detail: str, seconds: float = 0.0, share: float | None = None) -> Check:
        """What came of it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return Check(self.operator, self.impl, self.variant, self.way, dtype, status, share, detail, seconds)


def trials(device: torch.device, *, thorough: bool = False) -> list[Trial]:
    """All checks for a device, those that take longest last.

    Args:
        device: where the kernels run.
        thorough: at more widths.
    """
    # Here, since it takes this module's types.
    from lapcli.doctor.dual_states import dual_state_step_trials, dual_state_trials

    found = [
        *_delta_rule(device, thorough),
        *dual_state_trials(device),
        *_delta_step(device),
        *_ssd_step(device),
        *dual_state_step_trials(device),
        *_attend_step(device),
        *_norm(device),
        *_thin_linear(device),
        *_few_linear(device),
        *_greedy_token(device),
        *_short_conv(device),
    ]
    return sorted(found, key=lambda trial: trial.cost)


def check_kernels(
    device: torch.device,
    *,
    thorough: bool = False,
    limit: float | None = None,
    reporter: Reporter | None = None,
) -> list[Check]:
    """Compare every kernel with the truth.

    Args:
        device: where.
        thorough: at more widths, and with every autotuner searching as it does in use; otherwise each keeps its first
            configuration that runs, since fla's searches take minutes.
        limit: seconds after which no further check begins.
        reporter: told of the progress.
    """
    reporter = reporter or SilentReporter()
    started, found = time.perf_counter(), []
    precision = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        stack.enter_context(verdicts.ignored())
        planned = trials(device, thorough=thorough)
        if not thorough:
            stack.enter_context(first_configurations())
        # fla and triton warn of deprecations of their own.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(torch.set_float32_matmul_precision, precision)
        torch.set_float32_matmul_precision("highest")
        task = stack.enter_context(reporter.task("kernels against fp64", total=len(planned), unit="checks"))
        for trial in planned:
            task.note(f"{trial.operator} {trial.impl}, {trial.variant}, {trial.way}")
            late = limit is not None and time.perf_counter() - started > limit
            found.append(trial.checked("not checked", "no time was left") if late else _checked(trial, device))
            task.advance()
    return found


def _checked(trial: Trial, device: torch.device) -> Check:
    if trial.why_not is not None:
        return trial.checked("not here", trial.why_not)
    started = time.perf_counter()
    try:
        found = trial.run()
    except Exception as error:
        # Whatever a kernel raises here it would raise in use.
        seconds = time.perf_counter() - started
        if out_of_memory(error):
            free(device)
            return trial.checked("not checked", "the device has no memory left", seconds)
        said = (str(error).strip().splitlines() or [""])[0]
        return trial.checked("failed", f"{type(error).__name__}: {said}", seconds)
    seconds = time.perf_counter() - started
    worst = max(found, key=_share)
    return trial.checked("right" if worst.holds else "wrong", str(worst), seconds, _share(worst))


def _share(found: Precision) -> float:
    if found.allowed > 0:
        return min(found.error / found.allowed, _WORST)
    return 0.0 if found.holds else _WORST


def verdicts_of(checks: Sequence[Check]) -> list[Verdict]:
    """What `lapkernels` should remember: the implementations that ran and were wrong."""
    today = date.today().isoformat()
    found: list[Verdict] = []
    for check in checks:
        if check.bad and check.impl != "reference":
            verdict = Verdict(check.operator, check.impl, check.way == "backward", check.variant, check.detail, today)
            if verdict not in found:
                found.append(verdict)
    return found


def _delta_rule(device: torch.device, thorough: bool) -> Iterator[Trial]:
    from lapkernels.delta_rule import IMPLEMENTATIONS, delta_rule, why_not
    from lapkernels.delta_rule.fla_backend import variant_of

    gpu = device.type == "cuda"
    for impl in IMPLEMENTATIONS:
        if impl == "auto":
            continue
        # What multiplies in the dtype of its inputs is used with bf16, which triton's interpreter does not know.
        rounding = impl not in ("reference", "chunked")
        dtype = torch.bfloat16 if rounding and not (impl == "triton" and device.type == "cpu") else torch.float32
        # Query feedback is the erase direction that models have; those with decays by channel have none.
        for gate, feedback, by_channel in (
            (0.3, False, False), (None, False, False), (0.3, True, False), (0.3, False, True)
        ):  # fmt: skip
            variant = variant_of(gated=gate is not None, erasing=feedback, by_channel=by_channel)
            for way in ("forward", "backward", "decode"):
                if impl == "reference" and way == "decode":
                    continue  # it takes a step at a time whatever it is given

                def run(
                    impl: str = impl,
                    gate: Any = gate,
                    feedback: bool = feedback,
                    by_channel: bool = by_channel,
                    way: Way = way,
                    variant: str = variant,
                    dtype: torch.dtype = dtype,
                    rounding: bool = rounding,
                ) -> list[Precision]:
                    def call(inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
                        arguments: dict[str, Any] = dict(inputs.tensors())
                        return delta_rule(**arguments, output_final_state=True, impl=impl)

                    found: list[Precision] = []
                    for key_width, value_width in MORE_WIDTHS if thorough else WIDTHS:
                        # Small where a CPU takes the recurrence's steps.
                        width = (
                            (key_width, value_width) if device.type == "cuda" else (key_width // 2, value_width // 4)
                        )
                        case = _recurrence(way, gate, feedback, by_channel, *width, dtype)
                        # A chunk's products have as many summands as the chunk is long, where the recurrence rounds
                        # each step; sums in fp32 round each term on the key axis too, those of half precision do not.
                        terms = (SHORT if way == "decode" else CHUNK) * (1 if rounding else width[0])
                        results = _results(call, case.inputs.to(device=device), way)
                        found += precisions(results, case.truth, case.yardstick, case.inputs.q.dtype, terms)
                    if variant in _AS_PROJECTED and (way == "forward" or (way == "backward" and (thorough or not gpu))):
                        # As models hand their gates over. Backward a GPU's kernels are compiled once more for it.
                        raw = raw_gate_precisions(_AS_PROJECTED[variant], dtype, device, impl)
                        found += [each for each in raw if each.name.startswith("d") == (way == "backward")]
                    return found

                why = why_not(
                    impl, device, dtype, key_width=64, gated=gate is not None, erasing=feedback,
                    needs_gradient=way == "backward", by_channel=by_channel,
                )  # fmt: skip
                cost = 0 if not rounding else 2 if impl == "fla" and way == "backward" else 1
                yield Trial("delta_rule", impl, variant, way, dtype, why, run, cost)


class _Recurrence(NamedTuple):
    """Inputs of the delta rule in their dtype, what comes of them, and of a recurrence that rounds its operands."""

    inputs: DeltaRuleInputs
    truth: dict[str, Tensor]
    yardstick: dict[str, Tensor]


@cache
def _recurrence(
    way: Way,
    gate: float | None,
    feedback: bool,
    by_channel: bool,
    key_width: int,
    value_width: int,
    dtype: torch.dtype,
) -> _Recurrence:
    """Once for all implementations."""
    inputs = delta_rule_inputs(
        batch=1, time=SHORT if way == "decode" else LENGTH, value_heads=4, key_width=key_width,
        value_width=value_width, gate=gate, by_channel=by_channel, feedback=feedback, state=True,
    ).to(dtype)  # fmt: skip
    exact = inputs.to(torch.float64)
    truth = _results(transition_recurrence, exact, way)
    return _Recurrence(inputs, truth, _results(lambda x: transition_recurrence(x, rounding=dtype), exact, way))


def _results(
    run: Callable[[DeltaRuleInputs], tuple[Tensor, Tensor | None]], inputs: DeltaRuleInputs, way: Way
) -> dict[str, Tensor]:
    if way == "backward":
        named = output_state_and_gradients(run, inputs)
        return {name: tensor for name, tensor in named.items() if name.startswith("d")}
    with torch.no_grad():
        output, state = run(inputs)
    assert state is not None
    return {"output": output, "final_state": state}


def _delta_step(device: torch.device) -> Iterator[Trial]:
    from lapkernels.delta_step import IMPLEMENTATIONS, delta_step, why_not
    from lapkernels.testing_steps import delta_oracle, delta_step_case

    variants: dict[str, dict[str, Any]] = {
        "gated": {},
        "plain": {"decay": None},
        "with query feedback": {"feedback": True},
        "decay by channel": {"decay": "channel"},
    }
    sizes = {"tokens": SHORT, "key_width": STEP_WIDTHS[0], "value_width": STEP_WIDTHS[1]}
    yield from _steps(
        "delta_step", delta_step, {name: delta_step_case(**sizes, **options) for name, options in variants.items()},
        delta_oracle, IMPLEMENTATIONS, why_not, device,
    )  # fmt: skip


def _ssd_step(device: torch.device) -> Iterator[Trial]:
    from lapkernels.ssd_step import IMPLEMENTATIONS, ssd_step, why_not
    from lapkernels.testing_steps import ssd_oracle, ssd_step_case

    variants: dict[str, dict[str, Any]] = {"gate first": {}, "norm first": {"gate_first": False}}
    sizes = {"tokens": SHORT, "state_width": STEP_WIDTHS[0], "head_width": STEP_WIDTHS[1]}
    yield from _steps(
        "ssd_step", ssd_step, {name: ssd_step_case(**sizes, **options) for name, options in variants.items()},
        ssd_oracle, IMPLEMENTATIONS, why_not, device,
    )  # fmt: skip


def _each(implementations: Sequence[str], device: torch.device) -> Iterator[tuple[str, torch.dtype]]:
    """Each of them by its name, and the dtype that it is checked in: a GPU's kernels are used with bf16."""
    for impl in implementations:
        if impl != "auto":
            yield impl, torch.bfloat16 if impl != "reference" and device.type == "cuda" else torch.float32


def _steps(
    operator: str,
    step: Any,
    cases: dict[str, Any],
    oracle: Any,
    implementations: Sequence[str],
    why_not: Any,
    device: torch.device,
) -> Iterator[Trial]:
    """Of a decode step: every token's output and the state at the end, against an oracle over whole sequences.

    Args:
        operator: its name.
        step: its function.
        cases: sequences, by variant; the first with a bf16 state too.
        oracle: of outputs and states, from a case.
        implementations: of the operator.
        why_not: why one of them cannot run.
        device: where.
    """
    from lapkernels.testing_steps import follow

    first = next(iter(cases))
    for impl, dtype in _each(implementations, device):
        for variant, whole in cases.items():
            more = (torch.bfloat16,) if impl != "reference" and variant == first else ()
            for state_dtype in (torch.float32, *more):

                def run(
                    impl: str = impl, whole: Any = whole, dtype: torch.dtype = dtype, kept: torch.dtype = state_dtype
                ) -> list[Precision]:
                    case = whole.to(dtype)
                    outputs, states = oracle(case)
                    truth = {"output": outputs, "state": states[-1]}
                    actual = follow(step, case.to(device=device), impl, kept, False, 1, None)
                    if impl == "reference":
                        # The definition itself: off by what sums over the key axis round, token by token.
                        return precisions(actual, truth, truth, dtype, terms=STEP_WIDTHS[0] * SHORT)
                    yardstick = follow(step, case, "reference", kept, False, 1, None)
                    found: list[Precision] = []
                    for name, rounding in (("output", dtype), ("state", kept)):
                        one = [{name: values[name]} for values in (actual, truth, yardstick)]
                        # Rounded a token, in another order.
                        found += precisions(one[0], one[1], one[2], rounding, SHORT)
                    return found

                name = variant if state_dtype == torch.float32 else f"{variant}, bf16 state"
                why = why_not(impl, device, dtype)
                if why is None and state_dtype == torch.bfloat16 and device.type == "cpu":
                    why = "triton's interpreter cuts numbers off where a GPU rounds them to bf16"
                yield Trial(operator, impl, name, "decode", dtype, why, run)


def _attend_step(device: torch.device) -> Iterator[Trial]:
    from lapkernels.attend_step import IMPLEMENTATIONS, attend_step, why_not
    from lapkernels.testing_attend import case, oracle

    for impl, dtype in _each(IMPLEMENTATIONS, device):
        for variant in ("grouped heads, a padding row", "a window"):

            def run(impl: str = impl, variant: str = variant, dtype: torch.dtype = dtype) -> list[Precision]:
                def output(impl: str, place: str) -> dict[str, Tensor]:
                    new, pools, where = case(variant, dtype, place)
                    tensors: Any = (*new, *pools)
                    return {"output": attend_step(*tensors, **where, impl=impl)}

                new, pools, where = case(variant, dtype)
                # The definition is as good as sums over the key axis are.
                terms = new[0].shape[-1] if impl == "reference" else 1
                truth = {"output": oracle(new, pools, where)}
                yardstick = truth if impl == "reference" else output("reference", "cpu")
                return precisions(output(impl, str(device)), truth, yardstick, dtype, terms)

            yield Trial("attend_step", impl, variant, "decode", dtype, why_not(impl, device, dtype), run)


def _norm(device: torch.device) -> Iterator[Trial]:
    """RMS norms with a residual sum and with a gate, and SwiGLU, against their formulas in fp64, and gradients."""
    from lapkernels.norm import IMPLEMENTATIONS, rms_norm, swiglu, why_not

    eps, rows, width = 1e-6, 5, 96

    def formulas(x: Tensor, residual: Tensor, weight: Tensor) -> dict[str, Tensor]:
        # The sum is rounded to the residual's dtype before it is normed.
        x, total, weight = x.double(), (x + residual).double(), weight.double()
        gate, up = x.chunk(2, dim=-1)
        opened = residual.double() / (1 + (-residual.double()).exp())
        return {
            "residual": total,
            "output": total / (total.square().mean(-1, keepdim=True) + eps).sqrt() * weight,
            "gated": x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight * opened,
            "swiglu": gate / (1 + (-gate).exp()) * up,
        }

    for impl, dtype in _each(IMPLEMENTATIONS, device):

        def call(x: Tensor, residual: Tensor, weight: Tensor, impl: str = impl) -> dict[str, Tensor]:
            normed = rms_norm(x, weight, eps, residual=residual, impl=impl)
            gated = rms_norm(x, weight, eps, gate=residual, impl=impl).output
            swished = swiglu(x, impl=impl)
            return {"residual": normed.residual, "output": normed.output, "gated": gated, "swiglu": swished}

        for way in ("forward", "backward"):

            def run(call: Any = call, dtype: torch.dtype = dtype, way: Way = way) -> list[Precision]:
                sizes = {"x": (rows, width), "residual": (rows, width), "weight": (width,)}
                drawn = _drawn(sizes, {"x": dtype})
                # What a plain computation rounds: its result, and in fp32 the sums over a row and over rows too.
                return _ways(call, formulas, drawn, way, dtype, device, width if dtype == torch.float32 else 1, rows)

            why = why_not(impl, device, dtype, needs_gradient=way == "backward")
            yield Trial("norm", impl, "residual, gate, SwiGLU", way, dtype, why, run)


def _thin_linear(device: torch.device) -> Iterator[Trial]:
    """A norm or SwiGLU, a product of few rows, and the residual sum, against their formulas in fp64."""
    from lapkernels.thin_linear import IMPLEMENTATIONS, Normed, thin_linear, why_not

    eps, rows, width, outputs = 1e-6, 3, 300, 65

    def draw(dtype: torch.dtype) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "x": (rows, width), "pair": (rows, 2 * width), "norm": (width,), "weight": (outputs, width),
            "bias": (outputs,), "residual": (rows, outputs),
        }  # fmt: skip
        drawn = {name: torch.randn(*s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}
        drawn["weight"] *= width**-0.5
        return {name: value.to(dtype) for name, value in drawn.items()}

    def formulas(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """With what goes into the product rounded to `dtype`."""
        x, pair, norm, weight, bias, residual = (value.double() for value in given.values())
        normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (norm + 1)
        gate, up = pair.chunk(2, dim=-1)
        gated = gate / (1 + (-gate).exp()) * up
        product, gated_product = (inner.to(dtype).double() @ weight.t() for inner in (normed, gated))
        return {"normed": product, "gated": residual + 0.5 * (gated_product + bias)}

    for impl, dtype in _each(IMPLEMENTATIONS, device):

        def run(impl: str = impl, dtype: torch.dtype = dtype) -> list[Precision]:
            given = draw(dtype)
            there = {name: value.to(device) for name, value in given.items()}
            actual = {
                "normed": thin_linear(
                    there["x"], there["weight"], norm=Normed(there["norm"], eps, offset=1.0), impl=impl
                ),
                "gated": thin_linear(
                    there["pair"], there["weight"], there["bias"], gated=True, residual=there["residual"], scale=0.5,
                    impl=impl,
                ),
            }  # fmt: skip
            truth = formulas(given, torch.float64)
            # What a plain computation rounds: what goes into the product and what comes out, in fp32 the sums too.
            plain = {name: value.to(dtype) for name, value in formulas(given, dtype).items()}
            return precisions(actual, truth, plain, dtype, width if dtype == torch.float32 else 1)

        why = why_not(impl, device, dtype, rows)
        yield Trial("thin_linear", impl, "norm, SwiGLU, residual", "forward", dtype, why, run)


def _few_linear(device: torch.device) -> Iterator[Trial]:
    """A product of few rows, whole, in parts that a norm adds up, or gate and up with SwiGLU, against fp64."""
    from lapkernels.few_linear import IMPLEMENTATIONS, few_linear, few_swiglu, why_not
    from lapkernels.norm import rms_norm

    rows, width, outputs = 33, 1352, 200

    def draw(dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        x, weight, bias, residual = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((rows, width), (outputs, width), (outputs,), (rows, outputs))
        )
        return [value.to(dtype) for value in (x, weight * width**-0.5, bias, residual)]

    def gated(product: Tensor) -> Tensor:
        gate, up = product.chunk(2, dim=-1)
        return gate / (1 + (-gate).exp()) * up

    for impl, dtype in _each(IMPLEMENTATIONS, device):

        def run(impl: str = impl, dtype: torch.dtype = dtype) -> list[Precision]:
            given = draw(dtype)
            x, weight, bias, residual = (value.to(device) for value in given)
            parts = few_linear(x, weight, bias, scale=0.5, apart=True, impl=impl)
            actual = {
                "whole": few_linear(x, weight, bias, scale=0.5, impl=impl),
                "summed by a norm": rms_norm(parts, residual[0], residual=residual, shares=True).residual,
                "activated": few_swiglu(x, weight, bias, impl=impl),
            }
            wide = [value.double() for value in given]
            product = wide[0] @ wide[1].t() + wide[2]
            truth = {"whole": 0.5 * product, "summed by a norm": wide[3] + 0.5 * product, "activated": gated(product)}
            # What a plain computation rounds: its result, gate and up, and in fp32 the sums too.
            plain = {name: value.to(dtype) for name, value in truth.items()}
            plain["activated"] = gated(product.to(dtype).double()).to(dtype)
            return precisions(actual, truth, plain, dtype, width if dtype == torch.float32 else 1)

        why = why_not(impl, device, dtype, rows, width)
        yield Trial("few_linear", impl, "whole, in parts, SwiGLU", "forward", dtype, why, run)


def _greedy_token(device: torch.device) -> Iterator[Trial]:
    """The likeliest token of rows where that is easily mistaken, against a search over Python's numbers."""
    from lapkernels.greedy_token import IMPLEMENTATIONS, greedy_token, why_not
    from lapkernels.testing_greedy import first_largest, rows_of

    for impl, dtype in _each(IMPLEMENTATIONS, device):

        def run(impl: str = impl, dtype: torch.dtype = dtype) -> list[Precision]:
            logits = rows_of(1000, dtype, str(device))
            slots = torch.arange(len(logits), dtype=torch.int32, device=device) - 1
            tokens, positions = (torch.zeros(len(logits), dtype=torch.int64, device=device) for _ in range(2))
            greedy_token(logits, tokens, positions, slots, impl=impl)
            wanted = [first_largest(row) for row in logits.tolist()]
            truth = {
                "tokens": torch.tensor(wanted, dtype=torch.float64),
                "positions": (slots >= 0).double(),
            }
            # Whole numbers, none of which is as large as where fp32 rounds them.
            return precisions({"tokens": tokens, "positions": positions}, truth, truth, torch.float32)

        why = why_not(impl, device, dtype)
        yield Trial("greedy_token", impl, "equal logits, NaN, infinities", "decode", dtype, why, run)


def _short_conv(device: torch.device) -> Iterator[Trial]:
    """A convolution over a prompt that goes on from another, against torch's own in fp64, and gradients."""
    from lapkernels.short_conv import IMPLEMENTATIONS, short_conv, why_not

    rows, time, channels, taps = 2, 70, 130, 4

    def formula(x: Tensor, state: Tensor, weight: Tensor) -> dict[str, Tensor]:
        joined, weight = torch.cat((state, x), dim=1).double().transpose(1, 2), weight.double().unsqueeze(1)
        sums = torch.nn.functional.conv1d(joined, weight, groups=channels).transpose(1, 2)
        return {"output": sums / (1 + (-sums).exp())}

    for impl, dtype in _each(IMPLEMENTATIONS, device):

        def call(x: Tensor, state: Tensor, weight: Tensor, impl: str = impl) -> dict[str, Tensor]:
            return {"output": short_conv(x, weight, state, impl=impl)}

        for way in ("forward", "backward"):

            def run(call: Any = call, dtype: torch.dtype = dtype, way: Way = way) -> list[Precision]:
                sizes = {"x": (rows, time, channels), "state": (rows, taps - 1, channels), "weight": (channels, taps)}
                drawn = _drawn(sizes, {"x": dtype, "state": dtype})
                # What a plain computation rounds: its result, and in fp32 the sums over the taps, of which those of a
                # gradient add up what comes of others, too.
                terms = 1 if dtype != torch.float32 else taps if way == "forward" else taps**2
                return _ways(call, formula, drawn, way, dtype, device, terms, rows * time)

            why = why_not(impl, device, dtype, needs_gradient=way == "backward")
            yield Trial("short_conv", impl, "SiLU, a state before", way, dtype, why, run)


def _drawn(sizes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Random tensors by name, in fp32 where no dtype is named."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(*size, generator=generator, dtype=torch.float64).to(dtypes.get(name, torch.float32))
        for name, size in sizes.items()
    }


def _ways(
    call: Callable[..., dict[str, Tensor]],
    formulas: Callable[..., dict[str, Tensor]],
    given: dict[str, Tensor],
    way: Way,
    dtype: torch.dtype,
    device: torch.device,
    terms: int,
    summed: int,
) -> list[Precision]:
    """Results, or gradients, of what has a `weight` in fp32 among its arguments, against formulas in fp64.

    Args:
        call: what is checked.
        formulas: the same in fp64.
        given: the arguments.
        way: `forward` or `backward`.
        dtype: of the results.
        device: where.
        terms: summands that a result's rounding has.
        summed: numbers whose products the weight's gradient adds up, in fp32 whatever the dtype.
    """
    there = {name: value.to(device) for name, value in given.items()}
    if way == "forward":
        truth, actual = formulas(**given), call(**there)
        plain = {name: value.to(dtype) for name, value in truth.items()}
        return precisions(actual, truth, plain, dtype, terms)

    generator = torch.Generator().manual_seed(1)

    def gradients(run: Callable[..., dict[str, Tensor]], given: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
        outputs = run(**leaves)
        upstream = [slopes[name].to(value) for name, value in outputs.items()]
        found = torch.autograd.grad(list(outputs.values()), list(leaves.values()), upstream)
        return {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}

    slopes = {
        # Numbers that every dtype holds.
        name: torch.randn(value.shape, generator=generator).to(torch.bfloat16)
        for name, value in formulas(**given).items()
    }
    truth = gradients(formulas, {name: value.double() for name, value in given.items()})
    actual, found = gradients(call, there), []
    for name, right in truth.items():
        rounding = torch.float32 if name == "dweight" else dtype
        count = terms * summed if name == "dweight" else terms
        one = [{name: each} for each in (actual[name], right, right.to(rounding))]
        found += precisions(one[0], one[1], one[2], rounding, count)
    return found
