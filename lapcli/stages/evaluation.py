"""Evaluation as a stage: models and tasks in, `evaluation.json` out. The measuring is `lapcli.evaluation`'s."""

import json
from collections.abc import Sequence
from pathlib import Path

from lapcli.artifacts import RunDirectory, atomic_file
from lapcli.evaluation.results import Evaluation
from lapcli.evaluation.run import evaluate
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.families.source import ModelSource, resolve_model
from lapcli.machine import Machine
from lapcli.reporting import Reporter


def models_of(run: RunDirectory, base: ModelSource) -> list[tuple[str, ModelSource]]:
    """The models of a run with their labels, the base first.

    Raises:
        ModelError: one of them is damaged.
    """
    made = [(label, folder) for label, folder in (("sliced", run.sliced), ("recovered", run.recovered))]
    return [("base", base), *((label, resolve_model(str(folder))) for label, folder in made if folder.is_dir())]


def evaluate_into(
    output: Path,
    models: Sequence[tuple[str, ModelSource]],
    tasks: Sequence[str],
    settings: EvaluationSettings,
    *,
    options: EvaluationOptions,
    machine: Machine,
    reporter: Reporter,
) -> Evaluation:
    """Measure models on tasks and write the result.

    Args:
        output: the JSON file to write; an older one is replaced when the new one is whole.
        models: label and source of each; the first is the base of the differences.
        tasks: task names.
        settings: what the numbers depend on.
        options: what they do not.
        machine: where it runs.
        reporter: where progress goes.

    Raises:
        LapcliError: see `lapcli.evaluation.run.evaluate`.
    """
    evaluation = evaluate(
        models,
        tasks,
        settings,
        options=options,
        device=machine.torch_device(),
        dtype=machine.torch_dtype(models[0][1].config),
        kernel=machine.kernel,
        trust_remote_code=machine.trust_remote_code,
        reporter=reporter,
    )
    with atomic_file(output) as temporary:
        temporary.write_text(json.dumps(evaluation.to_json(), indent=1, ensure_ascii=False) + "\n")
    return evaluation
