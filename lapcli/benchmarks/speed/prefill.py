"""Prompts through whole models, beside the arithmetic that they must take."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lapcli.benchmarks.speed.configs import Subject, attention_flop, recurrence_flop
from lapcli.benchmarks.speed.decode import (
    DecodeSettings,
    Models,
    attempt,
    cell_of,
    failed,
    forget_peak,
    most_held,
    sequence_bytes,
)
from lapcli.benchmarks.speed.gate import compare
from lapcli.benchmarks.speed.library import why_no_fla
from lapcli.benchmarks.speed.models import CHUNK, STEPS, Model
from lapcli.benchmarks.speed.results import Cell, Results, Row
from lapcli.families.dual_state import has_states, set_kernel
from lapcli.families.library_kernels import let_lapkernels_stand_in
from lapcli.families.taps import CACHES
from lapcli.models.cache import RecurrentCache
from lapcli.runtime.pieces import Pieces
from lapcli.runtime.prefill import cache_argument
from lapkernels.dual_state import select_impl as select_states
from lapkernels.timing import measure

WAYS = ("lapcli", "triton", "fla", "library", "pytorch")
"""`lapcli`: the prefill of lapcli's engine, with the kernel that `auto` takes; `triton` and `pytorch`: the same with
lapcli's kernels, or the chunked form in PyTorch, where `auto` takes another; `fla`: fla's model; `library`: a model of
transformers, without lapkernels in it."""
_KERNELS = {"triton": "triton", "pytorch": "chunked"}
GATE_TOKENS = 130
"""Tokens that are compared before any prompt is timed: two chunks and a rest."""


def prefill_floor(model: Model, batch: int, tokens: int, product_flops: float) -> float:
    """Seconds that the products of a prompt take: all matrices for each token, the recurrences, the head once a row.

    And once a row whatever in lapcli's own models comes behind the last state.
    """
    head, last = model.ours.get_output_embeddings().weight.numel(), model.last_weights()
    each = 2 * model.product_weights() + recurrence_flop(model.subject) + attention_flop(model.subject, tokens)
    return (batch * tokens * each + 2 * batch * head - 2 * batch * (tokens - 1) * last) / product_flops


def why_not_way(way: str, model: Model) -> str | None:
    """Why a way cannot run a prompt of a model here, or `None`."""
    if way == "fla":
        return why_no_fla(model.subject.config["model_type"], model.device)
    if way == "library" and model.is_own:
        return "lapcli and fla have this model, transformers has not"
    if way == "library" and model.subject.share is not None:
        return "prompts of Transformers go through transformers' own pass: `lapcli` is it"
    if way in _KERNELS and has_states(model.subject.config):
        if way == "triton":
            return "chunks of gated states have no Triton kernel of lapcli's"
        choice = select_states(model.device, model.dtype, time=GATE_TOKENS).name
        return "lapcli takes it by itself" if choice == _KERNELS[way] else None
    if way in _KERNELS and not model.is_own:
        return "transformers' model is `library`" if model.subject.share is None else "there is no state yet"
    if way in _KERNELS:
        from lapkernels.delta_rule import select_impl, why_not

        mixer = model.ours.mixers()[0]
        call: dict[str, Any] = {"key_width": model.subject.key_width, "gated": mixer.gated, "erasing": mixer.erasing}
        choice = select_impl(model.device, model.dtype, time=GATE_TOKENS, value_width=mixer.shape.value_width, **call)
        if choice.name == _KERNELS[way]:
            return "lapcli takes it by itself"
        return why_not(_KERNELS[way], model.device, model.dtype, **call)
    return None


def prefill_of(way: str, model: Model) -> Callable[[Tensor], Tensor]:
    """What runs prompts `[B, T]` and returns the last logits, keeping the state as a generation would."""
    kernel = _KERNELS.get(way, "auto")
    ours: Any = model.fla if way == "fla" else model.ours
    if not model.is_own:
        let_lapkernels_stand_in(ours, way != "library")
    argument = cache_argument(ours.forward)
    own = way != "fla" and model.is_own
    # As the engine runs a prompt of one row.
    pieces = Pieces(ours, capture=True) if own and model.device.type == "cuda" else None

    @torch.no_grad()
    def run(prompts: Tensor) -> Tensor:
        if own:
            # Other ways of the same model choose for themselves in between.
            model.ours.set_kernel(kernel)
        elif has_states(model.subject.config):
            set_kernel(model.ours, kernel, model.device)
        if pieces is not None and len(prompts) == 1:
            return pieces.run(prompts, RecurrentCache())
        found = ours(input_ids=prompts, use_cache=True, logits_to_keep=1, **{argument: None})
        assert any(found.get(name) is not None for name in CACHES), "the model kept no state"
        return found.logits[:, -1]

    return run


def prefill_benchmark(
    subjects: Sequence[Subject],
    shapes: Sequence[tuple[int, int]],
    results: Results,
    models: Models,
    *,
    ways: Sequence[str] = WAYS,
    settings: DecodeSettings | None = None,
) -> None:
    """Measure prompts: for each shape all subjects, each by all ways.

    Args:
        subjects: the base first, then what it is compared with.
        shapes: rows and tokens of a row, the most telling first.
        results: where rows go.
        models: makes the models.
        ways: which.
        settings: how much is measured.
    """
    settings = settings or DecodeSettings()
    said: set[str] = set()
    judged: dict[tuple[str, float, str, bool], tuple[float, str]] = {}
    for batch, tokens in shapes:
        for subject in subjects:
            for way in ways:
                cell = cell_of(subject, "prefill", way, batch, tokens)
                if results.budget.left <= 0:
                    results.add(Row(cell, "no time"))
                    continue
                try:
                    model = models.get(subject)
                    if (why := why_not_way(way, model)) is not None:
                        if way not in said:
                            said.add(way)
                            results.add(Row(cell, "not here", why))
                        continue
                except Exception as error:
                    results.add(failed(cell, error))
                    continue

                def measured(model: Model, cell: Cell = cell) -> Row:
                    return _row(cell, model, results, settings, judged)

                results.add(attempt(cell, subject, models, measured))


def _row(
    cell: Cell,
    model: Model,
    results: Results,
    settings: DecodeSettings,
    judged: dict[tuple[str, float, str, bool], tuple[float, str]],
) -> Row:
    run = prefill_of(cell.way, model)
    key = (cell.model, cell.ratio, cell.way, cell.batch == 1)
    if key not in judged:
        judged[key] = _judge(run, model, alone=cell.batch == 1)
    share, text = judged[key]
    if share > 1:
        return Row(cell, "wrong", text, error_share=share)
    prompts = model.tokens(cell.batch, cell.tokens)
    forget_peak(model.device)
    timing = measure(
        lambda: run(prompts), model.device, warmup=min(settings.warmup, 3), repeats=min(settings.repeats, 20),
        trials=settings.trials, limit=settings.limit,
    )  # fmt: skip
    kernel = model.ours.kernel_choice(cell.tokens).name if model.is_own and cell.way != "fla" else ""
    if has_states(model.subject.config):
        chosen = _KERNELS.get(cell.way, "auto")
        kernel = select_states(model.device, model.dtype, time=cell.tokens).name if chosen == "auto" else chosen
    return Row.timed(
        cell,
        timing,
        floor=prefill_floor(model, cell.batch, cell.tokens, results.machine["product_flops"]),
        share=share,
        detail=f"kernel: {kernel}" if kernel else "",
        peak_bytes=most_held(model.device),
        more={
            "tokens_per_second": cell.batch * cell.tokens / timing.seconds,
            **sequence_bytes(model, cell.tokens),
        },
    )


def _judge(run: Callable[[Tensor], Tensor], model: Model, *, alone: bool) -> tuple[float, str]:
    """The last logits of prefixes: of two chunks and a rest, and one token less, so that a state that is off shows.

    Args:
        run: see `prefill_of`.
        model: whose.
        alone: whether rows go through one by one, which may be another way.
    """
    truth = model.truth(GATE_TOKENS)
    found = []
    for number in range(STEPS + 1):
        rows = truth.tokens[:, : GATE_TOKENS + number]
        found.append(torch.cat([run(row) for row in rows.split(1)]) if alone else run(rows))
    # Kernels that work in chunks round as many summands as those are long.
    verdict = compare(torch.stack(found, 1), truth.exact, truth.plain, model.dtype, terms=CHUNK)
    return verdict.share, verdict.text
