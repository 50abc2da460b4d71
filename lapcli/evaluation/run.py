"""Evaluate models on tasks: the one entry of the package."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lapcli
from lapcli.data.builtin import heldout_builtin_text
from lapcli.data.documents import Document
from lapcli.errors import DataError, UsageError
from lapcli.evaluation.groups import group_scores
from lapcli.evaluation.harness import check_names, check_packages, load_task, measure_harness
from lapcli.evaluation.local_data import read_documents
from lapcli.evaluation.niah import check_lengths, measure_niah, noise_documents
from lapcli.evaluation.perplexity import measure_perplexity
from lapcli.evaluation.request import request_digest
from lapcli.evaluation.results import Evaluation, ModelScores, Score
from lapcli.evaluation.scoring import LoadedModel
from lapcli.evaluation.settings import DEFAULT_MAX_LENGTH, EvaluationOptions, EvaluationSettings
from lapcli.evaluation.tasks import NOISE_TASK, TEXT_PREFIX, TaskInfo, expand, parse_tasks
from lapcli.reporting import Reporter, SilentReporter

if TYPE_CHECKING:
    from lapcli.families.loading import ModelSource

_KERNEL_PACKAGES = ("flash-linear-attention", "fla-core", "triton", "causal-conv1d", "mamba-ssm", "kernels")
"""Whose functions run in a model where they are installed."""

Measure = Callable[[LoadedModel], list[Score]]


@dataclass(frozen=True)
class EvaluationPlan:
    """What an evaluation will do.

    Attributes:
        tasks: those that are measured, in order: groups are there as their members.
        groups: those that were asked for.
        max_length: tokens of a window.
        requests: for each model's label the digest of each task's request, by name.
        known: for each model's label the scores that are there already, by request.
    """

    tasks: tuple[TaskInfo, ...]
    groups: tuple[TaskInfo, ...]
    max_length: int
    requests: Mapping[str, Mapping[str, str]]
    known: Mapping[str, Mapping[str, tuple[Score, ...]]]

    def missing(self, label: str) -> list[TaskInfo]:
        """The tasks that a model has still to be measured on."""
        return [info for info in self.tasks if self.requests[label][info.name] not in self.known[label]]

    def there(self, label: str) -> list[str]:
        """The names of the tasks that a model has been measured on already."""
        return [info.name for info in self.tasks if self.requests[label][info.name] in self.known[label]]

    def to_measure(self) -> list[TaskInfo]:
        """The tasks that some model has still to be measured on."""
        names = {info.name for label in self.known for info in self.missing(label)}
        return [info for info in self.tasks if info.name in names]


def plan_evaluation(
    models: Sequence[tuple[str, "ModelSource"]],
    tasks: Sequence[str],
    settings: EvaluationSettings,
    options: EvaluationOptions,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    kernel: str,
    earlier: Evaluation | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> EvaluationPlan:
    """Look at names, settings, tokenizers and what was measured before, without loading a model or fetching data.

    Raises:
        LapcliError: as `evaluate`.
    """
    from lapcli.families.loading import load_tokenizer, packaged_class

    labels = [label for label, _ in models]
    if not labels or len(set(labels)) < len(labels):
        raise UsageError(f"the models to evaluate are labelled {labels}; each needs a label of its own")
    max_length = resolve_max_length(settings, [source.config for _, source in models], reporter or SilentReporter())
    asked = parse_tasks(tasks)
    infos = expand(asked)
    ran = versions(device)
    # Models that were made of one another share a tokenizer: the data is read once for all of them.
    by_tokenizer = {
        tokenizer: {info.name: request_digest(info, settings, options, max_length, ran, tokenizer) for info in infos}
        for tokenizer in {source.tokenizer_digest for _, source in models}
    }
    requests = {label: by_tokenizer[source.tokenizer_digest] for label, source in models}
    known: dict[str, dict[str, tuple[Score, ...]]] = {}
    for label, source in models:
        found = _found(earlier, source, dtype, kernel)
        scores = found.scores if found else ()
        known[label] = {
            request: tuple(score for score in scores if score.request == request)
            for request in requests[label].values()
            if any(score.request == request for score in scores)
        }
    groups = tuple(info for info in asked if info.kind == "group")
    plan = EvaluationPlan(tuple(infos), groups, max_length, requests, known)
    _check_names(plan.to_measure())
    for label, source in models:
        assert source.headers  # raises where the weights are damaged or do not fit the config
        packaged_class(source, trust_remote_code)  # raises where code that must not run would be needed
        if any(info.kind == "niah" for info in plan.missing(label)):
            limit = _position_limit(source.config)
            beyond = [str(length) for length in settings.niah_lengths if limit is not None and length > limit]
            if beyond and reporter is not None:
                reporter.warn(f"niah at {', '.join(beyond)} is beyond the {limit} positions that {label} was made for")
            check_lengths(settings, load_tokenizer(source, trust_remote_code=trust_remote_code))
    return plan


def read_local_data(plan: EvaluationPlan, settings: EvaluationSettings, options: EvaluationOptions) -> None:
    """Read the data of the tasks to be measured, but for what would be fetched from the hub.

    Raises:
        DataError: data that is missing or cannot be read.
    """
    for info in plan.to_measure():
        if info.kind != "harness" or options.task_data is not None:
            _prepare(info, settings, options, plan.max_length, SilentReporter())


def evaluate(
    models: Sequence[tuple[str, "ModelSource"]],
    tasks: Sequence[str],
    settings: EvaluationSettings | None = None,
    *,
    options: EvaluationOptions | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    kernel: str = "auto",
    trust_remote_code: bool = False,
    earlier: Evaluation | None = None,
    keep: Callable[[Evaluation], None] | None = None,
    reporter: Reporter | None = None,
) -> Evaluation:
    """Measure models on tasks, one model in memory at a time.

    Names, data and settings are looked at before the first model is loaded.

    Args:
        models: label and source of each; the first is the base of the differences.
        tasks: names (see `lapcli.evaluation.tasks`).
        settings: what the numbers depend on.
        options: what they do not.
        device: where models run.
        dtype: of their weights.
        kernel: which implementation of the recurrence runs.
        trust_remote_code: whether code in a model's directory may run.
        earlier: scores in it of the same model and request are taken from there.
        keep: called with what there is after each task of each model.
        reporter: progress and remarks.

    Raises:
        UsageError: no model, a label given twice, an unknown task, a setting that cannot be met.
        DataError: data that is missing or cannot be read.
        ModelError: a model that cannot be loaded or run, or lm-eval is not installed.
    """
    from lapcli.families.loading import load_model, load_tokenizer

    settings = settings or EvaluationSettings()
    options = options or EvaluationOptions()
    reporter = reporter or SilentReporter()
    plan = plan_evaluation(
        models, tasks, settings, options,
        device=device, dtype=dtype, kernel=kernel, earlier=earlier, trust_remote_code=trust_remote_code,
        reporter=reporter,
    )  # fmt: skip
    measures = {info.name: _prepare(info, settings, options, plan.max_length, reporter) for info in plan.to_measure()}
    measured: list[ModelScores] = []
    for label, source in models:
        scores = dict(plan.known[label])
        missing = plan.missing(label)
        if not missing:
            found = _found(earlier, source, dtype, kernel)
            assert found is not None
            ordered = _in_order(plan, label, scores)
            measured.append(replace(found, label=label, name=source.name, scores=ordered))
            continue
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
        model = load_model(source, device=device, dtype=dtype, kernel=kernel, trust_remote_code=trust_remote_code)
        loaded = LoadedModel(model=model, tokenizer=tokenizer, name=label, processes=options.processes)
        measured.append(
            ModelScores(
                label=label,
                name=source.name,
                revision=source.revision,
                digest=source.digest,
                tokenizer=source.tokenizer_digest,
                dtype=_dtype_name(model),
                kernel=kernel,
                parameters=_parameters(model),
                scores=_in_order(plan, label, scores),
            )
        )
        for info in missing:
            request = plan.requests[label][info.name]
            scores[request] = tuple(replace(score, request=request) for score in measures[info.name](loaded))
            measured[-1] = replace(measured[-1], scores=_in_order(plan, label, scores))
            if keep is not None:
                keep(Evaluation(models=tuple(measured), versions=versions(device)))
        # The next model must find the memory free.
        del model, loaded
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return Evaluation(models=tuple(measured), versions=versions(device))


def evaluate_model(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    settings: EvaluationSettings | None = None,
    *,
    options: EvaluationOptions | None = None,
    label: str = "model",
    reporter: Reporter | None = None,
) -> Evaluation:
    """Measure a model that is in memory already.

    Args:
        model: a causal language model; put into eval mode, and back.
        tokenizer: its tokenizer.
        tasks: names (see `lapcli.evaluation.tasks`).
        settings: what the numbers depend on.
        options: what they do not.
        label: what the result calls it.
        reporter: progress and remarks.

    Raises:
        LapcliError: as `evaluate`.
    """
    settings = settings or EvaluationSettings()
    reporter = reporter or SilentReporter()
    max_length = resolve_max_length(settings, [model.config.to_dict()], reporter)
    measures = prepare(tasks, settings, options or EvaluationOptions(), max_length, reporter)
    loaded = LoadedModel(model=model, tokenizer=tokenizer, name=label)
    training = model.training
    model.eval()
    try:
        scores = tuple(score for measure in measures for score in measure(loaded))
        scores += group_scores(parse_tasks(tasks), scores)
    finally:
        model.train(training)
    mixers = model.mixers() if hasattr(model, "mixers") else []
    measured = ModelScores(
        label=label,
        name=str(getattr(model, "name_or_path", "") or label),
        revision=None,
        digest=None,
        dtype=_dtype_name(model),
        kernel=mixers[0].kernel if mixers else "auto",
        parameters=_parameters(model),
        scores=scores,
    )
    return Evaluation(models=(measured,), versions=versions(model.device))


def prepare(
    tasks: Sequence[str],
    settings: EvaluationSettings,
    options: EvaluationOptions,
    max_length: int,
    reporter: Reporter,
) -> list[Measure]:
    """Read what the tasks need, once for all models, and return what measures one model on each.

    Raises:
        LapcliError: as `evaluate`.
    """
    infos = expand(parse_tasks(tasks))
    _check_names(infos)
    return [_prepare(info, settings, options, max_length, reporter) for info in infos]


def resolve_max_length(settings: EvaluationSettings, configs: Sequence[Mapping[str, Any]], reporter: Reporter) -> int:
    """Tokens of a window: as set, else 2048 or what the shortest model was made for.

    Args:
        settings: `max_length` is read.
        configs: of all models that are to be compared.
        reporter: told when a window is longer than a model was made for.
    """
    limits = [limit for limit in map(_position_limit, configs) if limit is not None]
    shortest = min(limits, default=None)
    if settings.max_length is None:
        return DEFAULT_MAX_LENGTH if shortest is None else min(DEFAULT_MAX_LENGTH, shortest)
    if shortest is not None and settings.max_length > shortest:
        reporter.notice(f"--max-length {settings.max_length} is beyond the {shortest} positions a model was made for")
    return settings.max_length


def versions(device: torch.device | str) -> dict[str, str]:
    """The programs that numbers may depend on, as far as they are installed, and the type of the device.

    Together with the kernel that is asked for they settle which implementation runs, so that this need not be found out
    from a loaded model.
    """
    found = {"lapcli": lapcli.__version__, "python": platform.python_version(), "device": torch.device(device).type}
    for package in ("torch", "transformers", "lm_eval", *_KERNEL_PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _check_names(infos: Sequence[TaskInfo]) -> None:
    names = [info.harness_name for info in infos if info.harness_name is not None]
    if names:
        check_names(names)
    check_packages(infos)


def _found(earlier: Evaluation | None, source: "ModelSource", dtype: torch.dtype, kernel: str) -> ModelScores | None:
    return earlier.measured(source.digest, source.tokenizer_digest, _name_of(dtype), kernel) if earlier else None


def _in_order(plan: EvaluationPlan, label: str, scores: Mapping[str, tuple[Score, ...]]) -> tuple[Score, ...]:
    parts = tuple(score for info in plan.tasks for score in scores.get(plan.requests[label][info.name], ()))
    return (*parts, *group_scores(plan.groups, parts))


def _prepare(
    info: TaskInfo,
    settings: EvaluationSettings,
    options: EvaluationOptions,
    max_length: int,
    reporter: Reporter,
) -> Measure:
    batch_size = options.batch_size
    if info.kind == "harness":
        assert info.harness_name is not None
        task = load_task(info.name, info.harness_name, options.task_data)
        return lambda loaded: measure_harness(
            task, loaded, settings, max_length=max_length, batch_size=batch_size, reporter=reporter
        )
    if info.kind == "niah":
        noise = info.name == NOISE_TASK
        haystack = noise_documents() if noise else _documents(settings.niah_haystack)
        joiner = "\n" if noise else " "
        return lambda loaded: measure_niah(
            haystack, loaded, settings, batch_size=batch_size, reporter=reporter, task=info.name, joiner=joiner
        )
    path = info.name.removeprefix(TEXT_PREFIX) if info.name.startswith(TEXT_PREFIX) else None
    documents = _documents(path)
    return lambda loaded: measure_perplexity(
        info.name,
        documents,
        loaded,
        settings,
        max_length=max_length,
        batch_size=batch_size,
        reporter=reporter,
    )


def _documents(path: Path | str | None) -> list[Document]:
    if path is None:
        return heldout_builtin_text()
    if not Path(path).is_file():
        raise DataError(f"{path} is no file")
    return read_documents(Path(path))


def _position_limit(config: Mapping[str, Any]) -> int | None:
    for part in (config, config.get("text_config") or {}):
        for field in ("max_position_embeddings", "n_positions"):
            limit = part.get(field)
            if isinstance(limit, int) and limit > 1:
                return limit
    return None


def _dtype_name(model: Any) -> str:
    return _name_of(model.dtype)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
