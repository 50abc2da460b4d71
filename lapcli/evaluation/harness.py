"""Tasks of lm-eval, run by lm-eval's own definitions on a model in memory, with data from the hub or from local copies.

lm-eval is imported where it is used: it takes seconds, and a machine without it can do the rest. What it prints is kept
from the terminal.
"""

import contextlib
import functools
import hashlib
import importlib
import io
import json
import logging
import math
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lapcli.artifacts.digest import digest_document
from lapcli.errors import DataError, LapcliError, ModelError, UsageError
from lapcli.evaluation.estimates import Estimate, average, bits, jackknife, mean, perplexity
from lapcli.evaluation.local_data import LOCAL_TASKS, describe_layouts, find_hub_copy, find_local
from lapcli.evaluation.results import Score
from lapcli.evaluation.scoring import LoadedModel
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.evaluation.summaries import XSUM, XSUM_DATA, xsum_task
from lapcli.evaluation.tasks import TASKS, TaskInfo, unknown_tasks
from lapcli.evaluation.tokenization import adds_bos
from lapcli.reporting import Reporter

_NOISY_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "httpx", "fsspec", "evaluate", "transformers")
_PROBE_SECONDS = 3.0

# Where lm-eval defines the tasks that we have names for: reading these folders takes none of the seven seconds of all.
_FOLDERS = {
    "wikitext": "wikitext",
    "lambada_openai": "lambada",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "hellaswag": "hellaswag",
    "piqa": "piqa",
    "winogrande": "winogrande",
    "boolq": "super_glue/boolq",
    "openbookqa": "openbookqa",
    "mmlu": "mmlu/default",
    "logiqa": "logiqa",
    "squad_completion": "squad_completion",
    "swde": "swde",
    "fda": "fda",
    "cnn_dailymail_abisee": "cnn_dailymail",
    **dict.fromkeys(TASKS["longbench"].members, "longbench"),
}

# Tasks that are classes, which read no configuration: their data can be changed in a subclass alone.
_CLASSES = {
    "squad_completion": ("lm_eval.tasks.squad_completion.task", "SQUADCompletion"),
    "swde": ("lm_eval.tasks.swde.task", "SWDE"),
    "fda": ("lm_eval.tasks.fda.task", "FDA"),
}


@dataclass(frozen=True)
class HarnessTask:
    """An lm-eval task, group or tag with its data loaded.

    Attributes:
        name: as typed here.
        loaded: what `TaskManager.load` returned.
        notes: what a local copy lacks of the hub's data.
    """

    name: str
    loaded: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def check_names(names: Sequence[str]) -> None:
    """Refuse names that lm-eval does not know. Those that lapcli names itself need no look; no names need no lm-eval.

    Raises:
        UsageError: names are unknown; all of them are named, each with the nearest that is known.
        ModelError: lm-eval is not installed.
    """
    others = [name for name in names if not _named_here(name)]
    if not others:
        if names:
            require_lm_eval()
        return
    if not _installed():
        # Most likely slips in our own names; the hint lists them.
        raise unknown_tasks(others)
    known = _manager(others).all_tasks
    unknown = [name for name in others if name not in known]
    if unknown:
        raise unknown_tasks(unknown, known)


def check_packages(infos: Sequence[TaskInfo]) -> None:
    """Refuse tasks that need packages that are not installed.

    Raises:
        ModelError: says what to install.
    """
    for info in infos:
        missing = [package for package in info.packages if not _installed(package)]
        if missing:
            raise ModelError(
                f"{info.name} needs packages that are not installed: {', '.join(missing)}",
                f"pip install {' '.join(missing)}",
            )


def metrics_of(info: TaskInfo) -> tuple[str, ...] | None:
    """The metrics that a task will give, as far as that can be known before it is run.

    Returns:
        Their names; `None` where lm-eval's definition does not list them.
    """
    if info.metrics or info.harness_name is None:
        return info.metrics
    if not _installed():
        return None
    entry = _manager([info.harness_name]).task_index.get(info.harness_name)
    config = getattr(entry, "cfg", None) or {}
    listed = config.get("metric_list") or config.get("aggregate_metric_list")
    # Filters add to the names, and process_results gives metrics of its own.
    if not listed or config.get("filter_list") or config.get("process_results"):
        return None
    return tuple(metric["metric"] for metric in listed)


def require_lm_eval() -> None:
    """Raise unless lm-eval can be imported.

    Raises:
        ModelError: it cannot; says what to install.
    """
    if not _installed():
        raise ModelError("this task runs through lm-eval, which is not installed", "pip install lm-eval")


def lies_here(harness_name: str, task_data: Path | None) -> bool:
    """Whether all data of a task lies in a folder, so that nothing of it would be fetched.

    Args:
        harness_name: lm-eval's name.
        task_data: the folder with local copies, if there is one.
    """
    if task_data is None:
        return False
    if find_local(harness_name, task_data) is not None:
        return True
    data_sets = _data_sets(_manager([harness_name]), harness_name)
    return bool(data_sets) and all(find_hub_copy(data_set, task_data) is not None for data_set in data_sets)


def no_copy(name: str, harness_name: str, task_data: Path) -> DataError:
    """The error for a folder that holds no copy of a task's data.

    Args:
        name: what scores call the task.
        harness_name: lm-eval's name.
        task_data: the folder.
    """
    data_sets = _data_sets(_manager([harness_name]), harness_name)
    return DataError(
        f"{name}: {task_data} holds no copy of its data",
        f"looked for {describe_layouts(harness_name, next(iter(data_sets), None))} (DIR is --task-data)",
    )


def load_task(name: str, harness_name: str, task_data: Path | None) -> HarnessTask:
    """Build a task from lm-eval's definition and load its data.

    Args:
        name: what scores call it.
        harness_name: lm-eval's name.
        task_data: the folder with local copies; `None`: the hub, or its cache on this machine.

    Raises:
        DataError: the data is neither in the folder nor to be had from the hub.
    """
    require_lm_eval()
    manager = _manager([harness_name])
    data_sets = _data_sets(manager, harness_name)
    override: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    copies: dict[str, Path] = {}
    if task_data is not None:
        override, notes = _local_override(harness_name, task_data)
        found = {data_set: find_hub_copy(data_set, task_data) for data_set in data_sets}
        copies = {data_set: copy for data_set, copy in found.items() if copy is not None}
        if not override and not copies and harness_name in LOCAL_TASKS:
            raise no_copy(name, harness_name, task_data)
    here = bool(override) or (bool(data_sets) and len(copies) == len(data_sets))
    online = contextlib.nullcontext() if here else _offline_without_network()
    with _quiet(), _doing_once(), _reading_copies(copies), online:
        try:
            loaded = manager.load([_spec(harness_name, override)])
        except LapcliError:
            raise
        except ImportError as error:
            raise ModelError(
                f"{name} needs a package that is not installed ({_first_line(error)})", "install it beside lm-eval"
            ) from error
        # Data sets fail in as many ways as they have builders; each means that the data is not to be had.
        except Exception as error:
            raise _unavailable(name, harness_name, data_sets, error) from error
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False):
            raise UsageError(f"{name} runs code that the model writes; lapcli does not run it")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        if harness_name in _CLASSES:
            # Each of them says "until a newline, 48 tokens at most" of what is not set, and lm-eval's defaults for all
            # tasks set both (a blank line, 256 tokens). The task's own word is taken.
            greedy = {"do_sample": False, "temperature": 0.0}
            task.set_config(key="generation_kwargs", value=greedy)
    return HarnessTask(name=name, loaded=loaded, notes=notes)


def measure_harness(
    task: HarnessTask,
    loaded: LoadedModel,
    settings: EvaluationSettings,
    *,
    max_length: int,
    batch_size: int | None,
    reporter: Reporter,
) -> list[Score]:
    """Run a task through lm-eval.

    Values are lm-eval's. Standard errors are taken from the scores of the documents: a mean's as lm-eval takes it, a
    perplexity's by the delta method over documents, anything else's by the jackknife.

    Args:
        task: with its data.
        loaded: the model.
        settings: `bos`, `limit` (the first documents) and the seed of few-shot draws are read.
        max_length: most tokens of a request.
        batch_size: rows per pass, `None` for automatic.
        reporter: progress goes here.

    Raises:
        ModelError: the model gives logits that are not numbers, or memory runs out.
    """
    found, model = run_harness(task, loaded, settings, max_length=max_length, batch_size=batch_size, reporter=reporter)
    shared = {
        "max_length": max_length,
        "bos": settings.bos,
        "adds_bos": adds_bos(loaded.tokenizer) if settings.bos == "auto" else settings.bos == "always",
        "start_token": str(loaded.tokenizer.convert_ids_to_tokens(model.prefix_token_id)),
        "limit": settings.limit,
        "tokenizer": loaded.tokenizer_digest,
    }
    scores: list[Score] = []
    names = list(task.loaded["tasks"])
    for name, part in task.loaded["tasks"].items():
        shown = task.name if names == [name] else name
        scores += _scores(shown, name, part, found, shared, settings.seed)
    for name, group in task.loaded.get("groups", {}).items():
        scores += _group_scores(name, group, found, shared, scores)
    return [replace(score, notes=task.notes) for score in scores]


def run_harness(
    task: HarnessTask,
    loaded: LoadedModel,
    settings: EvaluationSettings,
    *,
    max_length: int,
    batch_size: int | None,
    reporter: Reporter,
) -> tuple[dict[str, Any], Any]:
    """What `measure_harness` takes its scores from.

    Returns:
        What lm-eval's `evaluate` found, with its samples, and lm-eval's view of the model.

    Raises:
        ModelError: as `measure_harness`.
    """
    with _quiet() as quiet, _doing_once():
        from lm_eval.defaults import DEFAULT_OTHER_SEED
        from lm_eval.evaluator import evaluate as run

        from lapcli.evaluation.harness_model import make_model

        for part in task.loaded["tasks"].values():
            # Seed 0 draws lm-eval's own default examples.
            part.set_fewshot_seed(seed=DEFAULT_OTHER_SEED + settings.seed)
        model = make_model(
            loaded,
            task.name,
            max_length=max_length,
            bos=settings.bos,
            batch_size=batch_size,
            reporter=reporter,
            audible=quiet.audible,
        )
        loaded_tasks: Any = task.loaded
        found: Any = run(lm=model, task_dict=loaded_tasks, limit=settings.limit, bootstrap_iters=0, log_samples=True)
    assert found is not None
    return found, model


def _scores(
    shown: str, name: str, task: Any, found: Mapping[str, Any], shared: Mapping[str, Any], seed: int
) -> list[Score]:
    samples = found["samples"][name]
    settings = {
        **shared,
        "data": _samples_digest(samples),
        "version": str(found["versions"].get(name)),
        "num_fewshot": task.get_config("num_fewshot"),
        "seed": seed if task.get_config("num_fewshot") else None,
    }
    calls = (call for sample in samples for call in sample["arguments"])
    # Requests for text have settings of their own beside the prompt.
    generation = {json.dumps(call[1], sort_keys=True) for call in calls if isinstance(call[-1], dict)}
    if generation:
        settings["generation"] = "; ".join(sorted(generation))
    scores: list[Score] = []
    for entry, value in found["results"][name].items():
        metric, _, rule = entry.partition(",")
        if not rule or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        items = [sample[metric] for sample in samples if sample["filter"] == rule and metric in sample]
        scores.append(
            Score(
                task=shown,
                metric=metric if rule == "none" else f"{metric} ({rule})",
                higher_is_better=task.higher_is_better().get(metric),
                estimate=_estimate(float(value), items, task.aggregation().get(metric)),
                settings=settings,
                counts={"documents": len(items)},
            )
        )
    return scores


def _group_scores(
    name: str, group: Any, found: Mapping[str, Any], shared: Mapping[str, Any], parts: Sequence[Score]
) -> list[Score]:
    """The means that lm-eval gives a group, with the standard errors that follow from its tasks'."""
    directions = found["higher_is_better"].get(name) or {}
    leaves = [task.task_name for task in group.get_all_tasks()]
    by_size = {entry.metric: entry.weight_by_size for entry in group.aggregate_metric_list or ()}
    scores: list[Score] = []
    for entry, value in found["results"].get(name, {}).items():
        metric, _, rule = entry.partition(",")
        if not rule or "_stderr" in entry or not isinstance(value, int | float):
            continue
        shown = metric if rule == "none" else f"{metric} ({rule})"
        members = [score for score in parts if score.task in leaves and score.metric == shown]
        estimates = [score.estimate for score in members]
        weights = [estimate.n for estimate in estimates] if by_size.get(metric) else None
        ours = average(estimates, weights) if estimates and all(estimate.n for estimate in estimates) else None
        if ours is None or not math.isclose(ours.value, value, rel_tol=1e-9, abs_tol=1e-12):
            ours = Estimate(value=float(value), stderr=None, n=sum(estimate.n for estimate in estimates), method="mean")
        scores.append(
            Score(
                task=name,
                metric=shown,
                # lm-eval gives a group of groups no direction.
                higher_is_better=directions.get(metric, members[0].higher_is_better if members else None),
                estimate=ours,
                settings={
                    **shared,
                    "version": str(found["versions"].get(name)),
                    "parts": ", ".join(leaves),
                    "data": digest_document([score.settings["data"] for score in members]),
                },
            )
        )
    return scores


def _estimate(value: float, items: Sequence[Any], aggregation: Any) -> Estimate:
    import numpy
    from lm_eval.api import metrics

    if not items:
        return Estimate(value=value, stderr=None, n=0, method="mean")
    if aggregation is metrics.weighted_perplexity:
        return perplexity(*zip(*items, strict=True))
    if aggregation is metrics.bits_per_byte:
        return bits(*zip(*items, strict=True))
    if aggregation is metrics.perplexity:
        return perplexity(items, [1] * len(items))
    # Classes of tasks take numpy's mean.
    if aggregation in (metrics.mean, numpy.mean, None):
        return mean([float(item) for item in items])
    return jackknife(items, aggregation)


def _samples_digest(samples: Sequence[Mapping[str, Any]]) -> str:
    """Names what was asked: documents, prompts and targets, in order, whatever they were loaded from."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample[part] for part in ("doc_hash", "prompt_hash", "target_hash")]).encode())
    return digest.hexdigest()


def _named_here(name: str) -> bool:
    return name in _FOLDERS or name == XSUM


def _manager(names: Sequence[str]) -> Any:
    """A task manager that knows the names; the whole index takes seven seconds, a few folders none."""
    with _quiet():
        import lm_eval.tasks

        if all(map(_named_here, names)):
            root = Path(lm_eval.tasks.__file__).parent
            folders: list[str | Path] = [root / _FOLDERS[name] for name in names if name in _FOLDERS]
            return lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
        global _whole_index
        if _whole_index is None:
            _whole_index = lm_eval.tasks.TaskManager()
        return _whole_index


_whole_index: Any = None


def _data_sets(manager: Any, name: str) -> list[str]:
    """The hub data sets that the task, or the members of the group, name."""
    if name == XSUM:
        return [XSUM_DATA]
    if name in _CLASSES:
        return [_class(name).DATASET_PATH]
    entry = manager.task_index.get(name)
    config = getattr(entry, "cfg", None) or {}
    members = config.get("task") if isinstance(config.get("task"), list) else []
    if entry is not None and entry.kind.name == "TAG":
        members = sorted(entry.tags)  # the tasks that bear it
    if members:
        names = [member if isinstance(member, str) else member.get("task") for member in members]
        return list(dict.fromkeys(data for part in names if part for data in _data_sets(manager, part)))
    data_set = config.get("dataset_path")
    return [data_set] if isinstance(data_set, str) and data_set else []


def _local_override(name: str, folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The part of the task's configuration that reads a local file, and what the file lacks; empty without one."""
    found = find_local(name, folder)
    if found is None:
        return {}, ()
    path, local = found
    records = local.read(path)

    def build(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {local.split: Dataset.from_list(records)}

    # The other splits are not there, and these tasks ask none of them.
    splits = {f"{split}_split": None for split in ("training", "validation", "test") if split != local.split}
    note = local.note(records)
    return {"custom_dataset": build, **splits, "num_fewshot": 0}, () if note is None else (note,)


@contextlib.contextmanager
def _reading_copies(copies: Mapping[str, Path]) -> Iterator[None]:
    """Have data sets of the hub read from folders: lm-eval passes no other way through groups, tags and classes."""
    if not copies:
        yield
        return
    import datasets

    original = datasets.load_dataset

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        return original(str(copies.get(path, path)), *args, **kwargs)

    datasets.load_dataset = load  # pyright: ignore[reportAttributeAccessIssue] -- as it is called by lm-eval
    try:
        yield
    finally:
        datasets.load_dataset = original


def _spec(name: str, override: Mapping[str, Any]) -> Any:
    """What `TaskManager.load` takes for a task with a part of its configuration replaced."""
    if name == XSUM:
        return xsum_task(**override)
    if not override:
        return name
    if name in _CLASSES:
        task = _reading(_class(name), override["custom_dataset"])()
        task.config.task = name
        return task
    # A group given as a dictionary may override the configuration of its members: lm-eval's own way to change one.
    return {"group": f"lapcli {name}", "task": [{"task": name, **override}]}


def _class(name: str) -> Any:
    module, found = _CLASSES[name]
    return getattr(importlib.import_module(module), found)


def _reading(task: Any, build: Callable[[], dict[str, Any]]) -> Any:
    """A task of the same class that reads other data."""

    def download(self: Any, dataset_kwargs: Any = None, **_: Any) -> None:
        self.dataset = build()

    return type(task.__name__, (task,), {"download": download})


def _unavailable(name: str, harness_name: str, data_sets: Sequence[str], error: Exception) -> DataError:
    layouts = describe_layouts(harness_name, next(iter(data_sets), None))
    # What a library says offline is that it is so, which the user did not ask for.
    reason = "the hub cannot be reached" if isinstance(error, ConnectionError) else _first_line(error)
    return DataError(
        f"the data of {name} could not be loaded ({reason})",
        f"give a local copy with --task-data DIR: {layouts}; or run with a network"
        if layouts
        else "it needs a network: the hub serves its data sets",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _installed(package: str = "lm_eval") -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


class _Quiet:
    """Keeps what a library writes from the terminal, and lets us write in between."""

    def __init__(self, stdout: Any, stderr: Any):
        self._stdout = stdout
        self._stderr = stderr

    @contextlib.contextmanager
    def audible(self) -> Iterator[None]:
        """The terminal as it was, for our own progress."""
        with contextlib.redirect_stdout(self._stdout), contextlib.redirect_stderr(self._stderr):
            yield


@contextlib.contextmanager
def _quiet() -> Iterator[_Quiet]:
    import sys

    quiet = _Quiet(sys.stdout, sys.stderr)
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    saved = [(logger, logger.propagate, list(logger.handlers)) for logger in loggers]
    try:
        for logger in loggers:
            # Raising its level would not do: a logger below it may have one of its own.
            logger.handlers = [logging.NullHandler()]
            logger.propagate = False
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield quiet
    finally:
        for logger, propagate, handlers in saved:
            logger.propagate, logger.handlers = propagate, handlers


_SPLITS = ("training_docs", "validation_docs", "test_docs")


@contextlib.contextmanager
def _doing_once() -> Iterator[None]:
    """Have lm-eval compile each template once, and make a task's documents once, which it does at every use.

    A hundred questions are asked in seconds, of which templates would take half; HellaSwag's ten thousand documents,
    made five times, as many again.
    """
    import lm_eval.utils
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    originals = {name: getattr(ConfigurableTask, name) for name in _SPLITS}
    environment: Any = lm_eval.utils.env

    def kept(name: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def documents(task: Any) -> Any:
            made = vars(task).setdefault("_lapcli_documents", {})
            if name in made:
                return made[name]
            found = make(task)
            # Anything else may be read once only.
            if isinstance(found, Dataset):
                made[name] = found
            return found

        return documents

    environment.from_string = functools.cache(type(environment).from_string.__get__(environment))
    for name, make in originals.items():
        setattr(ConfigurableTask, name, kept(name, make))
    try:
        yield
    finally:
        del environment.from_string
        for name, make in originals.items():
            setattr(ConfigurableTask, name, make)


@contextlib.contextmanager
def _offline_without_network() -> Iterator[None]:
    """Look only into the hub's cache where the hub cannot be reached: asking it would take half a minute to fail."""
    if _hub_answers():
        yield
        return
    import datasets.config
    import huggingface_hub.constants

    places = [(huggingface_hub.constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    places = [(module, field) for module, field in places if hasattr(module, field)]
    saved = [getattr(module, field) for module, field in places]
    try:
        for module, field in places:
            setattr(module, field, True)
        yield
    finally:
        for (module, field), value in zip(places, saved, strict=True):
            setattr(module, field, value)


def _hub_answers() -> bool:
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True  # only the proxy knows
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True
