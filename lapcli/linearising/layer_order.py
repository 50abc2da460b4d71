"""The order in which layers are converted, by what is measured of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lapcli.artifacts import Artifact, write_artifact
from lapcli.data import token_blocks
from lapcli.families.loading import load_model, load_tokenizer
from lapcli.linearising.plan import LinearisingPlan
from lapcli.linearising.record import measured, sensitivity_lineage
from lapcli.linearising.sensitivity import look_at_attention, mean_loss, one_by_one, order_of, rank_correlations
from lapcli.machine import Machine
from lapcli.reporting import Reporter

_SHARED = 8
"""Windows of text on which the size of a layer's output is fitted."""


def layer_order(plan: LinearisingPlan, machine: Machine, reporter: Reporter) -> tuple[list[int], Artifact | None]:
    """The order of the layers, from what was measured or is measured now."""
    if plan.settings.order == "first":
        return list(range(plan.shape.layers)), measured(plan)
    name = plan.settings.order
    found = measured(plan)
    if found is None or name not in found.names:
        found = measure_layers(plan, found, machine, reporter)
    values = found.tensors()[name]
    return order_of(values.mean(-1) if values.ndim == 2 else values), found


def measure_layers(plan: LinearisingPlan, there: Artifact | None, machine: Machine, reporter: Reporter) -> Artifact:
    """Measure what the order asks for, and write it beside what was measured before."""
    source, settings, wanted = plan.source, plan.settings.sensitivity, plan.settings.order
    tokenizer = load_tokenizer(source)
    blocks = token_blocks(
        settings.data, tokenizer, samples=settings.samples, seq_len=settings.seq_len, seed=settings.seed,
        reporter=reporter,
    )  # fmt: skip
    model = load_model(source, device=machine.torch_device(), dtype=machine.torch_dtype(source.config))
    tensors = {} if there is None else there.tensors()
    record = {} if there is None else dict(there.lineage.record)
    batch = max(1, 4096 // settings.seq_len)
    if "entropy" not in tensors:
        tensors |= look_at_attention(model, blocks.ids, rows=settings.rows, batch=batch, reporter=reporter)
    if wanted not in tensors:
        measure: Callable[[Any], float] = partial(mean_loss, ids=blocks.ids, batch=batch)
        if wanted.startswith("task:"):
            measure = _task_measure(wanted.removeprefix("task:"), tokenizer, settings.samples)
        values, whole = one_by_one(
            model, measure, plan.layer_settings(), blocks.ids[:_SHARED], seed=settings.seed,
            title=f"layers by {wanted}", kernel=machine.kernel, reporter=reporter,
        )  # fmt: skip
        tensors[wanted] = values - whole
        record[f"{wanted} of the teacher"] = whole
    by_layer = {name: values.mean(-1) if values.ndim == 2 else values for name, values in tensors.items()}
    found = rank_correlations(by_layer)
    # JSON knows no NaN.
    record["rank_correlations"] = {name: value if math.isfinite(value) else None for name, value in found.items()}
    record |= {"tokens": blocks.tokens, "corpus": blocks.digest, "text": blocks.description}
    return write_artifact(plan.place.sensitivity, replace(sensitivity_lineage(plan), record=record), tensors)


def _task_measure(task: str, tokenizer: Any, samples: int) -> Callable[[Any], float]:
    """How bad a model is at a task: its first score, turned so that more is worse."""
    from lapcli.evaluation.run import evaluate_model
    from lapcli.evaluation.settings import EvaluationSettings

    def measure(model: Any) -> float:
        score = evaluate_model(model, tokenizer, [task], EvaluationSettings(limit=samples)).models[0].scores[0]
        return -score.estimate.value if score.higher_is_better else score.estimate.value

    return measure
