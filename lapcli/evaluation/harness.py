"""Tasks of lm-eval, run by lm-eval's own definitions on a model in memory, with data from the hub or from local copies.

lm-eval is imported where it is used: it takes seconds, and a machine without it can do the rest. What it prints is kept
from the terminal.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lapcli.errors import DataError, LapcliError, ModelError, UsageError
from lapcli.evaluation.estimates import Estimate, bits, jackknife, mean, perplexity
from lapcli.evaluation.local_data import LOCAL_TASKS, describe_layouts, find_hub_copy, find_local
from lapcli.evaluation.results import Score
from lapcli.evaluation.scoring import LoadedModel
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.evaluation.tasks import unknown_task
from lapcli.evaluation.tokenization import adds_bos, tokenizer_digest
from lapcli.reporting import Reporter

_NOISY_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "httpx", "fsspec", "evaluate", "transformers")
_PROBE_SECONDS = 3.0


@dataclass(frozen=True)
class HarnessTask:
    """An lm-eval task, group or tag with its data loaded.

    Attributes:
        name: as typed here.
        loaded: what `TaskManager.load` returned.
    """

    name: str
    loaded: Mapping[str, Any]


def check_names(names: Sequence[str]) -> None:
    """Refuse names that lm-eval does not know. Those that lapcli has local layouts for need no look.

    Raises:
        UsageError: a name is unknown; the nearest is named.
        ModelError: lm-eval is not installed.
    """
    others = [name for name in names if name not in LOCAL_TASKS]
    if not others:
        require_lm_eval()
        return
    if not _installed():
        # Most likely a slip in one of our own names; the hint lists them.
        raise unknown_task(others[0])
    known = _manager(others).all_tasks
    for name in others:
        if name not in known:
            raise unknown_task(name, known)


def require_lm_eval() -> None:
    """Raise unless lm-eval can be imported.

    Raises:
        ModelError: it cannot; says what to install.
    """
    if not _installed():
        raise ModelError("this task runs through lm-eval, which is not installed", "pip install lm-eval")


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
    local: dict[str, Any] | None = None
    if task_data is not None:
        local = _local_override(harness_name, data_sets, task_data)
        if local is None and harness_name in LOCAL_TASKS:
            raise DataError(
                f"{name}: {task_data} holds no copy of its data",
                f"looked for {describe_layouts(harness_name, next(iter(data_sets), None))} (DIR is --task-data)",
            )
    spec = harness_name if local is None else _with_override(manager, harness_name, local)
    with _quiet(), contextlib.nullcontext() if local else _offline_without_network():
        try:
            loaded = manager.load([spec])
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
    return HarnessTask(name=name, loaded=loaded)


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
    with _quiet() as quiet:
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
    shared = {
        "max_length": max_length,
        "bos": settings.bos,
        "adds_bos": adds_bos(loaded.tokenizer) if settings.bos == "auto" else settings.bos == "always",
        "start_token": str(loaded.tokenizer.convert_ids_to_tokens(model.prefix_token_id)),
        "limit": settings.limit,
        "tokenizer": tokenizer_digest(loaded.tokenizer),
    }
    scores: list[Score] = []
    names = list(task.loaded["tasks"])
    for name, part in task.loaded["tasks"].items():
        shown = task.name if names == [name] else name
        scores += _scores(shown, name, part, found, shared, settings.seed)
    for name in task.loaded.get("groups", {}):
        scores += _group_scores(name, found, shared)
    return scores


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


def _group_scores(name: str, found: Mapping[str, Any], shared: Mapping[str, Any]) -> list[Score]:
    """The means that lm-eval gives a group; their parts have the standard errors."""
    directions = found["higher_is_better"].get(name) or {}
    parts = found["group_subtasks"].get(name, [])
    n = sum(found["n-samples"][part]["effective"] for part in parts if part in found["n-samples"])
    return [
        Score(
            task=name,
            metric=entry.partition(",")[0],
            higher_is_better=directions.get(entry.partition(",")[0]),
            estimate=Estimate(value=float(value), stderr=None, n=n, method="mean"),
            settings={**shared, "version": str(found["versions"].get(name)), "parts": ", ".join(parts)},
        )
        for entry, value in found["results"].get(name, {}).items()
        if "," in entry and "_stderr" not in entry and isinstance(value, int | float)
    ]


def _estimate(value: float, items: Sequence[Any], aggregation: Any) -> Estimate:
    from lm_eval.api import metrics

    if not items:
        return Estimate(value=value, stderr=None, n=0, method="mean")
    if aggregation is metrics.weighted_perplexity:
        return perplexity(*zip(*items, strict=True))
    if aggregation is metrics.bits_per_byte:
        return bits(*zip(*items, strict=True))
    if aggregation is metrics.perplexity:
        return perplexity(items, [1] * len(items))
    if aggregation is metrics.mean or aggregation is None:
        return mean([float(item) for item in items])
    return jackknife(items, aggregation)


def _samples_digest(samples: Sequence[Mapping[str, Any]]) -> str:
    """Names what was asked: documents, prompts and targets, in order, whatever they were loaded from."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample[part] for part in ("doc_hash", "prompt_hash", "target_hash")]).encode())
    return digest.hexdigest()


def _manager(names: Sequence[str]) -> Any:
    """A task manager that knows the names; the whole index takes seven seconds, two folders none."""
    with _quiet():
        import lm_eval.tasks

        if all(name in LOCAL_TASKS for name in names):
            root = Path(lm_eval.tasks.__file__).parent
            folders: list[str | Path] = [root / folder for folder in ("wikitext", "lambada")]
            return lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
        global _whole_index
        if _whole_index is None:
            _whole_index = lm_eval.tasks.TaskManager()
        return _whole_index


_whole_index: Any = None


def _data_sets(manager: Any, name: str) -> list[str]:
    """The hub data sets that the task names; empty for a group."""
    data_set = (getattr(manager.task_index.get(name), "cfg", None) or {}).get("dataset_path")
    return [data_set] if isinstance(data_set, str) and data_set else []


def _local_override(name: str, data_sets: Sequence[str], folder: Path) -> dict[str, Any] | None:
    """The part of the task's configuration that reads local data in place of the hub's."""
    found = find_local(name, folder)
    if found is not None:
        path, local = found
        records = local.read(path)

        def build(**_: Any) -> dict[str, Any]:
            from datasets import Dataset

            return {local.split: Dataset.from_list(records)}

        # The other splits are not there, and these tasks ask none of them.
        return {"custom_dataset": build, "training_split": None, "validation_split": None, "num_fewshot": 0}
    for data_set in data_sets:
        copy = find_hub_copy(data_set, folder)
        if copy is not None:
            return {"dataset_path": str(copy)}
    return None


def _with_override(manager: Any, name: str, override: Mapping[str, Any]) -> dict[str, Any]:
    # A group given as a dictionary may override the configuration of its members: lm-eval's own way to change one.
    return {"group": f"lapcli {name}", "task": [{"task": name, **override}]}


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


def _installed() -> bool:
    from importlib.util import find_spec

    return find_spec("lm_eval") is not None


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
