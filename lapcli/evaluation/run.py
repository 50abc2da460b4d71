"""Evaluate models on tasks: the one entry of the package."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lapcli
from lapcli.data.builtin import heldout_builtin_text
from lapcli.data.documents import Document
from lapcli.errors import DataError, UsageError
from lapcli.evaluation.groups import group_scores
from lapcli.evaluation.harness import check_names, check_packages, lies_here, load_task, measure_harness, no_copy
from lapcli.evaluation.lengths import Asked, look_at_lengths, resolve_max_length, resolve_ruler_lengths
from lapcli.evaluation.local_data import LOCAL_TASKS, read_documents
from lapcli.evaluation.made import Made
from lapcli.evaluation.names import check_spelling
from lapcli.evaluation.niah import measure_niah, noise_documents
from lapcli.evaluation.perplexity import measure_perplexity
from lapcli.evaluation.request import request_digest
from lapcli.evaluation.results import Evaluation, Measured, ModelScores, Score
from lapcli.evaluation.ruler import measure_ruler
from lapcli.evaluation.ruler_texts import Material
from lapcli.evaluation.scoring import LoadedModel
from lapcli.evaluation.settings import DEFAULT_RULER_LENGTHS, EvaluationOptions, EvaluationSettings
from lapcli.evaluation.tasks import NOISE_TASK, TEXT_PREFIX, TaskInfo, expand, parse_tasks
from lapcli.machine import Machine
from lapcli.reporting import Reporter, SilentReporter

if TYPE_CHECKING:
    from lapcli.evaluation.captured import CapturedWriter
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
        measured: by label what is there of a model, where there is anything.
        lengths: for tasks and groups that are measured at several, those that were asked for, by name.
        left_out: for each model's label the tasks that none of the lengths has room for.
        remarks: what there is to say of lengths.
        fetched: the tasks whose data is looked for on the hub or in its cache, once `read_local_data` has told.
    """

    tasks: tuple[TaskInfo, ...]
    groups: tuple[TaskInfo, ...]
    max_length: int
    requests: Mapping[str, Mapping[str, str]]
    known: Mapping[str, Mapping[str, tuple[Score, ...]]]
    measured: Mapping[str, ModelScores] = field(default_factory=dict)
    lengths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    left_out: Mapping[str, frozenset[str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    fetched: tuple[str, ...] = ()

    def missing(self, label: str) -> list[TaskInfo]:
        """The tasks that a model has still to be measured on, but for those that no length has room for."""
        out = self.left_out.get(label, frozenset())
        asked = [info for info in self.tasks if info.name not in out]
        return [info for info in asked if self.requests[label][info.name] not in self.known[label]]

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
    earlier: Measured | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> EvaluationPlan:
    """Look at names, settings, tokenizers and what was measured before, without loading a model or fetching data.

    Raises:
        LapcliError: as `evaluate`.
    """
    from lapcli.families.loading import packaged_class

    labels = [label for label, _ in models]
    if not labels or len(set(labels)) < len(labels):
        raise UsageError(f"the models to evaluate are labelled {labels}; each needs a label of its own")
    configs = [source.config for _, source in models]
    settings = resolve_ruler_lengths(settings, configs)
    max_length = resolve_max_length(settings, configs, reporter or SilentReporter())
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
    measured: dict[str, ModelScores] = {}
    for label, source in models:
        wanted = (source.digest, source.tokenizer_digest, _name_of(dtype), kernel, set(requests[label].values()))
        there = None if earlier is None else earlier.measured(*wanted)
        if there is not None:
            measured[label] = there
        scores = there.scores if there else ()
        known[label] = {
            request: tuple(score for score in scores if score.request == request)
            for request in requests[label].values()
            if any(score.request == request for score in scores)
        }
    groups = tuple(info for info in asked if info.kind == "group")
    lengths = {info.name: each for info in (*infos, *groups) if (each := _lengths(info, settings))}
    plan = EvaluationPlan(tuple(infos), groups, max_length, requests, known, measured, lengths)
    _check_names(plan.to_measure())
    for _label, source in models:
        assert source.headers  # raises where the weights are damaged or do not fit the config
        packaged_class(source, trust_remote_code)  # raises where code that must not run would be needed
    missing = [Asked(label, source, plan.missing(label), bool(known[label])) for label, source in models]
    found = look_at_lengths(missing, settings, lambda: _material(settings), trust_remote_code)
    if reporter is not None:
        for remark in found.remarks:
            reporter.warn(remark)
    return replace(plan, left_out=found.left_out, remarks=found.remarks)


def read_local_data(plan: EvaluationPlan, settings: EvaluationSettings, options: EvaluationOptions) -> tuple[str, ...]:
    """Read the data of the tasks to be measured, but for what would be fetched from the hub, or read from its cache.

    Returns:
        The tasks whose data was not looked at for that reason.

    Raises:
        DataError: data that is missing or cannot be read.
    """
    fetched: list[str] = []
    for info in plan.to_measure():
        if info.harness_name is not None and not lies_here(info.harness_name, options.task_data):
            # Of a folder that is named, what it should hold must be there.
            if options.task_data is not None and info.harness_name in LOCAL_TASKS:
                raise no_copy(info.name, info.harness_name, options.task_data)
            fetched.append(info.name)
        else:
            _prepare(info, settings, options, plan.max_length, SilentReporter())
    return tuple(fetched)


def evaluate(
    models: Sequence[tuple[str, "ModelSource"]],
    tasks: Sequence[str],
    settings: EvaluationSettings | None = None,
    *,
    options: EvaluationOptions | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    kernel: str = "auto",
    require_fast: bool = False,
    trust_remote_code: bool = False,
    earlier: Measured | None = None,
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
        require_fast: whether it is an error when no kernel made for a GPU runs.
        trust_remote_code: whether code in a model's directory may run.
        earlier: its scores of the same model and request are taken from there.
        keep: called with what there is after each task of each model.
        reporter: progress and remarks.

    Raises:
        UsageError: no model, a label given twice, an unknown task, a setting that cannot be met.
        DataError: data that is missing or cannot be read.
        ModelError: a model that cannot be loaded or run, or lm-eval is not installed.
    """
    from lapcli.families.loading import load_model, load_tokenizer

    settings = resolve_ruler_lengths(settings or EvaluationSettings(), [source.config for _, source in models])
    options = options or EvaluationOptions()
    reporter = reporter or SilentReporter()
    plan = plan_evaluation(
        models, tasks, settings, options,
        device=device, dtype=dtype, kernel=kernel, earlier=earlier, trust_remote_code=trust_remote_code,
        reporter=reporter,
    )  # fmt: skip
    made = Made(wanted=sum(bool(plan.missing(label)) for label, _ in models) > 1)
    measures = {
        info.name: _prepare(info, settings, options, plan.max_length, reporter, made) for info in plan.to_measure()
    }
    measured: list[ModelScores] = []
    for label, source in models:
        scores = dict(plan.known[label])
        missing = plan.missing(label)
        if not missing:
            ordered = _in_order(plan, label, scores)
            measured.append(replace(plan.measured[label], label=label, name=source.name, scores=ordered))
            continue
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
        model = load_model(source, device=device, dtype=dtype, kernel=kernel, trust_remote_code=trust_remote_code)
        Machine(kernel=kernel, require_fast=require_fast).announce(model, reporter)
        loaded = LoadedModel(
            model=model,
            tokenizer=tokenizer,
            name=label,
            processes=options.processes,
            writer=_writer(model, kernel, missing, settings, plan.max_length),
        )
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
    configs = [model.config.to_dict()]
    settings = resolve_ruler_lengths(settings or EvaluationSettings(), configs)
    reporter = reporter or SilentReporter()
    max_length = resolve_max_length(settings, configs, reporter)
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
    check_spelling(infos)  # spares lm-eval's index where names are certainly none
    check_names([info.harness_name for info in infos if info.harness_name is not None])
    check_packages(infos)


def _lengths(info: TaskInfo, settings: EvaluationSettings) -> tuple[int, ...]:
    """The lengths that a task, or all members of a group, are measured at; none where a task has no lengths."""
    kinds = {part.kind for part in expand([info])}
    return {
        frozenset({"niah"}): settings.niah_lengths,
        frozenset({"ruler"}): settings.ruler_lengths or (),
    }.get(frozenset(kinds), ())


def _writer(
    model: Any, kernel: str, tasks: Sequence[TaskInfo], settings: EvaluationSettings, max_length: int
) -> "CapturedWriter | None":
    """What continues prompts by captured steps, where tasks may have the model write, on a GPU."""
    kinds = {info.kind for info in tasks}
    ruler = (settings.ruler_lengths or DEFAULT_RULER_LENGTHS) if "ruler" in kinds else ()
    lengths: list[int] = [*ruler, *([max_length] if "harness" in kinds else [])]
    longest = max(lengths, default=0)
    if not longest or model.device.type != "cuda":
        return None
    from lapcli.evaluation.captured import CapturedWriter

    return CapturedWriter.of(model, kernel, longest)


def _in_order(plan: EvaluationPlan, label: str, scores: Mapping[str, tuple[Score, ...]]) -> tuple[Score, ...]:
    parts = tuple(score for info in plan.tasks for score in scores.get(plan.requests[label][info.name], ()))
    return (*parts, *group_scores(plan.groups, parts))


def _prepare(
    info: TaskInfo,
    settings: EvaluationSettings,
    options: EvaluationOptions,
    max_length: int,
    reporter: Reporter,
    made: Made | None = None,
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
            haystack, loaded, settings,
            batch_size=batch_size, reporter=reporter, task=info.name, joiner=joiner, made=made,
        )  # fmt: skip
    if info.kind == "ruler":
        material = _material(settings)
        return lambda loaded: measure_ruler(
            info.name, material, loaded, settings, batch_size=batch_size, reporter=reporter, made=made
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


def _material(settings: EvaluationSettings) -> Material:
    return Material(_documents(settings.niah_haystack))


def _documents(path: Path | str | None) -> list[Document]:
    if path is None:
        return heldout_builtin_text()
    if not Path(path).is_file():
        raise DataError(f"{path} is no file")
    return read_documents(Path(path))


def _dtype_name(model: Any) -> str:
    return _name_of(model.dtype)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
