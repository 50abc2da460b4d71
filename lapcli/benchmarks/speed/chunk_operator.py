"""One layer's recurrence over whole sequences: every implementation present, beside what must move or be multiplied."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lapcli.benchmarks.speed.decode import DecodeSettings, failed
from lapcli.benchmarks.speed.gate import Verdict, compare
from lapcli.benchmarks.speed.layers import Shape, cell_of_layer, worst
from lapcli.benchmarks.speed.results import Cell, Results, Row
from lapkernels.timing import free, measure, peak_memory

WAYS = ("lapcli", "triton", "fla", "FlashQLA", "FlashQLA padded", "chunked")
"""`lapcli`: what `auto` takes; `triton`: lapcli's kernels and `chunked`: PyTorch, where `auto` takes another; `fla`:
its chunked kernels; `FlashQLA`: takes K = V = 128 alone; `padded`: the same for a smaller K, filled up with zeros."""
GATE_TOKENS = 130
"""Tokens that are compared: two chunks and a rest."""


def why_not_chunks(way: str, shape: Shape, device: torch.device, dtype: torch.dtype, backward: bool) -> str | None:
    """Why a prefill operator cannot run here, or `None`."""
    from lapkernels.delta_rule import IMPLEMENTATIONS, select_impl, why_not

    call: dict[str, Any] = {"key_width": shape.key_width, "gated": True, "needs_gradient": backward}
    chosen = select_impl(device, dtype, time=GATE_TOKENS, value_width=shape.value_width, **call).name
    if way in ("triton", "chunked") and chosen == way:
        return "lapcli takes it by itself"
    if way in IMPLEMENTATIONS:
        return why_not(way, device, dtype, **call)
    if way.startswith("FlashQLA"):
        if device.type != "cuda":
            return "FlashQLA needs a GPU"
        if any(importlib.util.find_spec(name) is None for name in ("flash_qla", "tilelang")):
            return "FlashQLA is not installed, or without tilelang"
        if shape.value_width != 128 or shape.key_width > 128:
            return "FlashQLA takes K = V = 128"
        if way == "FlashQLA" and shape.key_width != 128:
            return "FlashQLA takes K = V = 128"
        if way == "FlashQLA padded" and shape.key_width == 128:
            return "nothing to pad"
    return None


def _chunks(way: str) -> Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]:
    """What computes the gated delta rule over whole sequences: arguments of `delta_rule` to output and final state."""
    if way.startswith("FlashQLA"):
        return lambda inputs: _flash_qla(inputs, padded=way.endswith("padded"))

    from lapkernels.delta_rule import delta_rule

    impl = {"lapcli": "auto"}.get(way, way)

    def run(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        arguments: dict[str, Any] = dict(inputs)
        found = delta_rule(**arguments, output_final_state=True, qk_l2norm=True, impl=impl)
        assert found.final_state is not None
        return found.output, found.final_state

    return run


def _flash_qla(inputs: dict[str, Tensor], *, padded: bool) -> tuple[Tensor, Tensor]:
    """As fla calls it (`fla/ops/gated_delta_rule/backends/flash_qla.py` of release 0.6)."""
    import flash_qla  # pyright: ignore[reportMissingImports] -- not at hand

    q, k = inputs["q"], inputs["k"]
    scale = q.shape[-1] ** -0.5
    if padded:
        more = 128 - q.shape[-1]
        q, k = (torch.nn.functional.pad(x, (0, more)) for x in (q, k))
    output, state = flash_qla.chunk_gated_delta_rule(
        q=q, k=k, v=inputs["v"], g=inputs["g"], beta=inputs["beta"], scale=scale, initial_state=None,
        output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=False, cu_seqlens=None, auto_cp=True,
    )  # fmt: skip
    return output, state[..., : inputs["q"].shape[-1], :]


def chunk_operator_benchmark(
    shapes: Sequence[Shape],
    sizes: Sequence[tuple[int, int]],
    results: Results,
    device: torch.device,
    dtype: torch.dtype,
    *,
    backward: Sequence[bool] = (False,),
    ways: Sequence[str] = WAYS,
    settings: DecodeSettings | None = None,
) -> None:
    """Measure one layer's recurrence over whole sequences, forward or forward and backward.

    Args:
        shapes: layers.
        sizes: rows and tokens.
        results: where rows go.
        device: where.
        dtype: of the inputs.
        backward: whether gradients are computed too.
        ways: which.
        settings: how much is measured.
    """
    settings = settings or DecodeSettings()
    said: set[str] = set()
    for with_gradients in backward:
        for batch, tokens in sizes:
            for shape in shapes:
                for way in ways:
                    cell = cell_of_layer("prefill operator", shape, way, batch, tokens, torch.float32, with_gradients)
                    if results.budget.left <= 0:
                        results.add(Row(cell, "no time"))
                        continue
                    why = why_not_chunks(way, shape, device, dtype, with_gradients)
                    if why is not None:
                        if way + why not in said:
                            said.add(way + why)
                            results.add(Row(cell, "not here", why))
                        continue
                    try:
                        results.add(_chunk_row(cell, shape, results, device, dtype, settings))
                    except Exception as error:
                        results.add(failed(cell, error))
                    finally:
                        free(device)


def _chunk_row(
    cell: Cell, shape: Shape, results: Results, device: torch.device, dtype: torch.dtype, settings: DecodeSettings
) -> Row:
    inputs = _sequence(shape, cell.batch, cell.tokens, dtype, device)
    run = _chunks(cell.way)
    verdict = _judge_chunks(run, shape, inputs, cell.backward)
    if not verdict.right:
        return Row(cell, "wrong", verdict.text, error_share=verdict.share)
    call = _with_gradients(run, inputs) if cell.backward else lambda: _without_gradients(run, inputs)
    call()
    peak = peak_memory(call, device)
    timing = measure(
        call, device, warmup=min(settings.warmup, 3), repeats=min(settings.repeats, 30), trials=settings.trials,
        limit=settings.limit,
    )  # fmt: skip
    detail = ""
    if cell.way == "lapcli":
        from lapkernels.delta_rule import select_impl

        detail = (
            "kernel: "
            + select_impl(
                device,
                dtype,
                key_width=shape.key_width,
                time=cell.tokens,
                gated=True,
                needs_gradient=cell.backward,
                value_width=shape.value_width,
            ).name
        )
    moved = _chunk_bytes(shape, cell.batch, cell.tokens, dtype) * (3 if cell.backward else 1)
    flop = _chunk_flop(shape, cell.batch, cell.tokens) * (3 if cell.backward else 1)
    return Row.timed(
        cell,
        timing,
        floor=max(moved / results.machine["copy_bytes"], flop / results.machine["product_flops"]),
        share=verdict.share,
        detail=detail,
        peak_bytes=peak,
        more={"tokens_per_second": cell.batch * cell.tokens / timing.seconds},
    )


def _sequence(shape: Shape, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)

    heads, values = shape.key_heads, shape.value_heads
    chance = torch.rand(batch, tokens, values, generator=generator, device=device)
    return {
        "q": normal(batch, tokens, heads, shape.key_width),
        "k": normal(batch, tokens, heads, shape.key_width),
        "v": normal(batch, tokens, values, shape.value_width),
        "beta": chance.to(dtype),
        "g": -0.3 * torch.rand(batch, tokens, values, generator=generator, device=device),
    }


def _without_gradients(
    run: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]], inputs: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return run(inputs)


def _with_gradients(
    run: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]], inputs: dict[str, Tensor]
) -> Callable[[], Any]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    cotangent = torch.ones_like(inputs["v"])

    def call() -> Any:
        output, _state = run(leaves)
        return torch.autograd.grad(output, list(leaves.values()), cotangent)

    return call


def _judge_chunks(
    run: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
    shape: Shape,
    inputs: dict[str, Tensor],
    backward: bool,
) -> Verdict:
    """Two chunks and a rest of the first row, output, state and gradients; and the same tokens of the whole call."""
    from lapkernels.delta_rule import l2_normalise
    from lapkernels.testing import DeltaRuleInputs, transition_recurrence

    tokens = min(GATE_TOKENS, inputs["q"].shape[1])
    dtype = inputs["q"].dtype
    short = {name: x[:1, :tokens].contiguous() for name, x in inputs.items()}
    names = list(short)

    def results(
        compute: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]], given: dict[str, Tensor]
    ) -> list[Tensor]:
        given = {name: x.detach().requires_grad_(backward) for name, x in given.items()}
        output, state = compute(given)
        if not backward:
            return [output.detach(), state.detach()]
        gradients = torch.autograd.grad(output, [given[name] for name in names], torch.ones_like(output))
        return [output.detach(), state.detach(), *gradients]

    def recurrence(rounding: torch.dtype | None) -> Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]:
        def compute(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            q, k = l2_normalise(given["q"].double()), l2_normalise(given["k"].double())
            rest = {name: given[name].double() for name in ("v", "beta", "g")}
            return transition_recurrence(DeltaRuleInputs(q, k, **rest), rounding=rounding)

        return compute

    exact = {name: x.double() for name, x in short.items()}
    truth, plain, found = results(recurrence(None), exact), results(recurrence(dtype), exact), results(run, short)
    # Chunked products have as many summands as a chunk is long, where the recurrence rounds each step; in fp32 sums
    # over the key axis round too.
    terms = 64 * (shape.key_width if dtype == torch.float32 else 1)
    verdicts = [compare(a, t, p, dtype, terms) for a, t, p in zip(found, truth, plain, strict=True)]
    with torch.no_grad():
        whole = run(inputs)[0]
    # What comes later cannot change what was: the timed call's own first tokens, and nothing that is not finite.
    verdicts.append(compare(whole[:1, :tokens], truth[0], plain[0], dtype, terms))
    if not bool(whole.isfinite().all()):
        return Verdict(float("inf"), "a result is not finite")
    return worst(*verdicts)


def _chunk_bytes(shape: Shape, batch: int, tokens: int, dtype: torch.dtype) -> float:
    """q, k, v and gates read, the output written, each once."""
    item = torch.finfo(dtype).bits // 8
    each = 2 * shape.key_heads * shape.key_width + 2 * shape.value_heads * shape.value_width + shape.value_heads
    return batch * tokens * (each * item + 4 * shape.value_heads)


def _chunk_flop(shape: Shape, batch: int, tokens: int, chunk: int = 64) -> float:
    """As `configs.recurrence_flop` counts a layer."""
    key, value, shared = shape.key_width, shape.value_width, shape.key_heads / shape.value_heads
    products = 2 * chunk * key * shared + chunk**2 / 2 + chunk * (2 * value + key) + 3 * key * value
    return 2.0 * batch * tokens * shape.value_heads * products
