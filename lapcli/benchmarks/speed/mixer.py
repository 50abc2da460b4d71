"""One layer's mixer: projections, convolution, recurrence, norm, gate and output projection, without the MLP."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapcli.benchmarks.speed.configs import Subject, recurrence_flop
from lapcli.benchmarks.speed.decode import DecodeSettings, EngineDecode, cell_of, failed
from lapcli.benchmarks.speed.gate import compare
from lapcli.benchmarks.speed.library import SHORT, LibraryDecode, cache_states, why_no_fla
from lapcli.benchmarks.speed.models import CHUNK, DISTINCT, Model, true_products
from lapcli.benchmarks.speed.results import Cell, Results, Row
from lapkernels.timing import copies, free, measure, peak_memory

WAYS = ("lapcli", "fla")
STEPS = 5
"""Tokens that are compared before a decode step is timed."""
GATE_TOKENS = 130
"""Likewise before a prompt is."""
_MOST_LAYERS = 16


def mixer_benchmark(
    subjects: Sequence[Subject],
    shapes: Sequence[tuple[int, int]],
    results: Results,
    device: torch.device,
    dtype: torch.dtype,
    *,
    decode: bool,
    ways: Sequence[str] = WAYS,
    settings: DecodeSettings | None = None,
) -> None:
    """Measure the mixers of lapcli's own architectures.

    A decode step takes as many layers in turn as overflow the device's last cache; prompts overflow it by themselves.

    Args:
        subjects: the base first, then what it is compared with.
        shapes: rows and tokens: of a row in a prompt, seen before a decode step.
        results: where rows go.
        device: where.
        dtype: of weights and activations.
        decode: whether decode steps are measured, not prompts.
        ways: which.
        settings: how much is measured.
    """
    settings = settings or DecodeSettings()
    said: set[str] = set()
    for batch, tokens in shapes:
        for subject in subjects:
            model = _model(subject, batch, device, dtype) if decode else _layers(subject, 1, device, dtype)
            for way in ways:
                cell = cell_of(subject, "decode mixer" if decode else "prefill mixer", way, batch, tokens)
                if results.budget.left <= 0:
                    results.add(Row(cell, "no time"))
                    continue
                why = why_no_fla(subject.config["model_type"], device) if way == "fla" else None
                why = why if model.is_own else f"{subject.config['model_type']} is no architecture of lapcli's own"
                if why is not None:
                    if way not in said:
                        said.add(way)
                        results.add(Row(cell, "not here", why))
                    continue
                try:
                    make = _decode_row if decode else _prefill_row
                    results.add(make(cell, model, results, settings))
                except Exception as error:
                    results.add(failed(cell, error))
                finally:
                    free(device)
            del model
            free(device)


def _layers(subject: Subject, count: int, device: torch.device, dtype: torch.dtype) -> Model:
    config = {**subject.config, "num_hidden_layers": count}
    return Model(replace(subject, config=config, layers=count), device, dtype)


def _model(subject: Subject, batch: int, device: torch.device, dtype: torch.dtype) -> Model:
    one = _layers(subject, 1, device, dtype)
    if not one.is_own:
        return one
    count = copies(_weights(one) + batch * one.subject.state_bytes(), device)
    return _layers(subject, min(_MOST_LAYERS, count), device, dtype)


def _weights(model: Model) -> int:
    """Bytes of one mixer."""
    return sum(value.nbytes for value in model.ours.model.layers[0].attn.parameters())


def _hidden(model: Model, rows: int, tokens: int) -> Tensor:
    """What a norm would hand on: `[rows, tokens, D]`."""
    generator = torch.Generator().manual_seed(model.seed + 2)
    width = model.ours.config.hidden_size
    return torch.randn(rows, tokens, width, generator=generator).to(model.device, model.dtype)


@torch.no_grad()
def _truth(model: Model, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The first layer's mixer over `[R, T, D]`: from a wider dtype by the recurrence, and in its own in chunks."""
    mixer = model.ours.model.layers[0].attn
    mixer.kernel = "chunked"
    plain = mixer(hidden)
    wider = torch.float64 if model.dtype == torch.float32 else torch.float32
    exact = copy.deepcopy(mixer).to(wider)
    exact.kernel = "reference"
    with true_products():
        return exact(hidden.to(wider)), plain


def _decode_row(cell: Cell, model: Model, results: Results, settings: DecodeSettings) -> Row:
    hidden = _hidden(model, min(cell.batch, DISTINCT), STEPS)
    exact, plain = _truth(model, hidden)
    index = torch.arange(cell.batch, device=model.device) % hidden.shape[0]
    if cell.way == "lapcli":
        calls, found = _engine_steps(model, cell, settings, hidden, index)
    else:
        calls, found = _fla_steps(model, cell, hidden, index)
    verdict = compare(found, exact, plain, model.dtype)
    if not verdict.right:
        return Row(cell, "wrong", verdict.text, error_share=verdict.share)
    timing = measure(
        calls, model.device, warmup=settings.warmup, repeats=settings.repeats, trials=settings.trials, graph=True,
        limit=settings.limit,
    )  # fmt: skip
    moved = _weights(model) + 2 * cell.batch * model.subject.state_bytes() / model.subject.layers
    return Row.timed(
        cell, timing, floor=moved / results.machine["copy_bytes"], share=verdict.share, more={"sets": len(calls)}
    )


@torch.no_grad()
def _engine_steps(
    model: Model, cell: Cell, settings: DecodeSettings, hidden: Tensor, index: Tensor
) -> tuple[list[Callable[[], Any]], Tensor]:
    """The parts of the engine's plan that are mixers, each on its own pool."""
    from lapcli.runtime.layers import Rows

    way = EngineDecode(model.ours, cell.batch, cell.tokens + STEPS, settings.state_dtype)
    plan: Any = way.engine.plan
    parts = [sub.part for sub in plan.sublayers[::2]]
    # As many tokens as the last step, below, lets them have.
    taken = way.engine.occupy(cell.batch, max(cell.tokens + 1, STEPS))
    slots = torch.tensor(taken, dtype=torch.int32, device=model.device)

    def rows(position: int) -> Rows:
        return Rows(slots, torch.full((cell.batch,), position, dtype=torch.int64, device=model.device))

    found = [parts[0](hidden[index, step].contiguous(), rows(step)).clone() for step in range(STEPS)]
    later, given = rows(cell.tokens), hidden[index, 0].contiguous()

    def call(part: Any) -> Callable[[], Any]:
        @torch.no_grad()
        def run() -> Any:
            return part(given, later)

        return run

    return [call(part) for part in parts], torch.stack(found, 1)


@torch.no_grad()
def _fla_steps(model: Model, cell: Cell, hidden: Tensor, index: Tensor) -> tuple[list[Callable[[], Any]], Tensor]:
    """The mixers of fla's layers, each from the state that a short prompt left; new states are not carried over."""
    mixers = [block.attn for block in model.fla.model.layers]
    found = mixers[0](hidden_states=hidden[index].contiguous())[0]
    way = LibraryDecode(model.fla, piece=SHORT)
    way.start(model.tokens(cell.batch, SHORT))
    held, given = cache_states(way.held), hidden[index, :1].contiguous()

    def call(mixer: Any, state: dict[str, Any]) -> Callable[[], Any]:
        before = dict(state)

        @torch.no_grad()
        def run() -> Any:
            state.update(before)
            return mixer(hidden_states=given, past_key_values=way.held, use_cache=True)[0]

        return run

    return [call(mixer, state) for mixer, state in zip(mixers, held, strict=True)], found


def _prefill_row(cell: Cell, model: Model, results: Results, settings: DecodeSettings) -> Row:
    run = _prompt_mixer(cell.way, model)
    hidden = _hidden(model, DISTINCT, min(GATE_TOKENS, cell.tokens))
    exact, plain = _truth(model, hidden)
    # The kernel that a user gets.
    model.ours.set_kernel("auto")
    # Kernels that work in chunks round as many summands as those are long.
    verdict = compare(run(hidden), exact, plain, model.dtype, terms=CHUNK)
    if not verdict.right:
        return Row(cell, "wrong", verdict.text, error_share=verdict.share)
    given = _hidden(model, 1, cell.tokens).expand(cell.batch, -1, -1).contiguous()
    run(given)
    peak = peak_memory(lambda: run(given), model.device)
    timing = measure(
        lambda: run(given), model.device, warmup=min(settings.warmup, 3), repeats=min(settings.repeats, 30),
        trials=settings.trials, limit=settings.limit,
    )  # fmt: skip
    weights = sum(value.numel() for value in model.ours.model.layers[0].attn.parameters() if value.ndim > 1)
    flop = cell.batch * cell.tokens * (2 * weights + recurrence_flop(model.subject))
    return Row.timed(
        cell,
        timing,
        floor=flop / results.machine["product_flops"],
        share=verdict.share,
        peak_bytes=peak,
        more={"tokens_per_second": cell.batch * cell.tokens / timing.seconds},
    )


def _prompt_mixer(way: str, model: Model) -> Callable[[Tensor], Tensor]:
    mixer = (model.fla if way == "fla" else model.ours).model.layers[0].attn

    @torch.no_grad()
    def run(hidden: Tensor) -> Tensor:
        return mixer(hidden_states=hidden)[0] if way == "fla" else mixer(hidden)

    return run
