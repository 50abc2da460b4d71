"""How each task of an evaluation was measured, and the commands that measure it again.

Scores hold the settings that they depend on. Which folder a task's data came from is in none of them; that it came from
the hub, or from a folder that is known, shows in the digest of the request: it is made again with each in turn.
"""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from lapcli import __version__
from lapcli.data.builtin import heldout_builtin_text
from lapcli.errors import LapcliError
from lapcli.evaluation.request import request_digest
from lapcli.evaluation.results import Evaluation, ModelScores, Score
from lapcli.evaluation.ruler_texts import RULER_TASKS, Material
from lapcli.evaluation.settings import EvaluationOptions, EvaluationSettings
from lapcli.evaluation.tasks import NOISE_TASK, TASKS, TEXT_PREFIX, Kind, TaskInfo

UNKNOWN_FOLDER = "DIR"
"""Stands in a command for a folder with local copies whose name is not known."""

UNKNOWN_FILE = "FILE"
"""Stands in a command for a haystack whose name is not known."""

_PROMPTS = 25
"""Prompts of a length where no limit is set."""


@dataclass(frozen=True)
class Measured:
    """A task as it was measured.

    Attributes:
        task: as it is typed.
        kind: as in `TaskInfo`.
        items: windows, documents, or prompts of a length.
        limits: what `--limit` may have been; `None` in it: not given. Empty: not noted.
        max_length: tokens of a window or a request, where that matters.
        stride: tokens that a window scores anew, of texts.
        lengths: of prompts.
        bos: as in `EvaluationSettings`.
        seed: where one was drawn with.
        digest: of what was asked.
        origin: where the data came from, in words.
        folder: of local copies; `UNKNOWN_FOLDER` where its name is not known, `None` where there was none.
        haystack: whether needles were hidden in a file of the user's.
        requests: of the scores.
    """

    task: str
    kind: Kind
    items: int
    limits: frozenset[int | None] = frozenset()
    max_length: int | None = None
    stride: int | None = None
    lengths: tuple[int, ...] = ()
    bos: str | None = None
    seed: int | None = None
    digest: str | None = None
    origin: str = "not noted"
    folder: str | None = None
    haystack: bool = False
    requests: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def said_items(self) -> str:
        """The items with their unit."""
        unit = {"perplexity": "window", "niah": "prompt", "ruler": "prompt"}.get(self.kind, "document")
        return f"{self.items:,} {unit}{'' if self.items == 1 else 's'}{' a length' if unit == 'prompt' else ''}"

    @property
    def said_limit(self) -> str:
        """The limit for a reader."""
        if not self.limits:
            return "not noted"
        return "none" if None in self.limits else str(next(iter(self.limits)))

    def options(self) -> dict[str, str | None]:
        """Options of `lapcli eval` that its numbers depend on, but the limit; `None`: it must not be given."""
        found: dict[str, str | None] = {}
        if self.bos is not None:
            found["bos"] = None if self.bos == "auto" else self.bos
        if self.seed is not None:
            found["seed"] = str(self.seed) if self.seed else None
        if self.max_length is not None:
            found["max-length"] = str(self.max_length)
        if self.kind == "perplexity" and self.stride is not None:
            found["stride"] = None if self.stride == self.max_length else str(self.stride)
        if self.kind in ("niah", "ruler"):
            if self.lengths:
                found[f"{self.kind}-lengths"] = ",".join(map(str, self.lengths))
            if self.task != NOISE_TASK:
                found["niah-haystack"] = UNKNOWN_FILE if self.haystack else None
        if self.kind == "harness":
            found["task-data"] = self.folder
        return found


def measured(evaluation: Evaluation, folders: Iterable[Path] = ()) -> list[Measured]:
    """The tasks of an evaluation, each once for each way in which it was measured, in the order of the scores.

    Args:
        evaluation: the scores.
        folders: with local copies of task data, that may have been used.
    """
    found: dict[Measured, Measured] = {}
    known = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    for model in evaluation.models:
        context = _Context.of(model, dict(evaluation.versions), known)
        for scores in _by_request(model.scores):
            each = _one(scores, context)
            same = replace(each, lengths=())
            there = found.get(same)
            if there is not None:
                each = replace(
                    there,
                    lengths=tuple(dict.fromkeys((*there.lengths, *each.lengths))),
                    requests=there.requests | each.requests,
                )
            found[same] = each
    return _with_lengths_of_groups(list(found.values()), evaluation)


def commands(evaluation: Evaluation, folders: Iterable[Path] = (), *, alone: bool = False) -> list[list[str]]:
    """Arguments of `lapcli` that measure the same, a command for tasks that share their settings.

    Args:
        evaluation: the scores.
        folders: as of `measured`.
        alone: whether it lies in no run, so that models have to be named: the last, and the first as its baseline.
    """
    lines: list[_Line] = []
    for each in measured(evaluation, folders):
        if not any(line.takes(each) for line in lines):
            lines.append(_Line([each.task], each.options(), each.limits))
    groups = {
        score.task: None
        for model in evaluation.models
        for score in model.scores
        if score.task in TASKS and TASKS[score.task].kind == "group"
    }
    kernels = {model.kernel for model in evaluation.models} - {"auto"}
    kernel = ["--kernel", kernels.pop()] if len(kernels) == 1 else []
    return [[*line.words(groups), *_models(evaluation, alone), *kernel] for line in lines]


@dataclass(frozen=True)
class _Context:
    """What may have been asked of a model.

    Attributes:
        model: with all its scores.
        versions: that ran.
        folders: that task data may have come from.
        seeds: of any of its tasks; tasks that draw nothing do not store it.
        heldout: digests of lapcli's own text.
        ruler_lengths: of any of RULER's tasks: one that has no room at a length was asked for there too.
    """

    model: ModelScores
    versions: dict[str, str]
    folders: Sequence[Path]
    seeds: Sequence[int]
    heldout: frozenset[Any]
    ruler_lengths: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelScores, versions: dict[str, str], folders: Sequence[Path]) -> "_Context":
        seeds = {score.settings["seed"] for score in model.scores if score.settings.get("seed") is not None}
        heldout = {score.settings.get("data") for score in model.scores if score.task == "builtin"} - {None}
        ruler = [score for score in model.scores if score.task in TASKS and TASKS[score.task].kind == "ruler"]
        lengths = tuple(sorted({score.length for score in ruler if score.length is not None}))
        return cls(model, versions, folders, [0, *sorted(seeds - {0})], frozenset(heldout), lengths)

    def asked(self, found: Measured, folder: Path | None) -> bool:
        """Whether the request is one that these would make."""
        ruler = dict.fromkeys((found.lengths, self.ruler_lengths)) if found.kind == "ruler" else (found.lengths,)
        return any(
            self._digest(found, limit, seed, folder, lengths) in found.requests
            for limit in found.limits
            for seed in (self.seeds if found.seed is None else [found.seed])
            for lengths in ruler
        )

    def _digest(
        self, found: Measured, limit: int | None, seed: int, folder: Path | None, lengths: tuple[int, ...]
    ) -> str | None:
        info = TASKS.get(found.task) or TaskInfo(
            found.task, found.kind, metrics=(), summary="", source="", harness_name=found.task
        )
        try:
            settings = EvaluationSettings(
                bos=found.bos or "auto",  # pyright: ignore[reportArgumentType] -- checked there
                limit=limit,
                seed=seed,
                niah_lengths=lengths or (512,),
                ruler_lengths=lengths or None,
            )
            options = EvaluationOptions(task_data=folder)
            length, tokenizer = found.max_length or 0, self.model.tokenizer or ""
            return request_digest(info, settings, options, length, self.versions, tokenizer)
        except (LapcliError, OSError):
            return None


@dataclass
class _Line:
    """A command as it grows."""

    tasks: list[str]
    options: dict[str, str | None]
    limits: frozenset[int | None]

    def takes(self, each: Measured) -> bool:
        """Take a task in where its settings are these, or none of these matters to it."""
        limits = self.limits & each.limits if self.limits and each.limits else self.limits or each.limits
        options = each.options()
        if (self.limits and each.limits and not limits) or each.task in self.tasks:
            return False
        if any(self.options.get(name, value) != value for name, value in options.items()):
            return False
        self.tasks.append(each.task)
        self.options |= options
        self.limits = limits
        return True

    def words(self, groups: Iterable[str]) -> list[str]:
        """The command, with the name of a group in the place of all of its members."""
        tasks = list(self.tasks)
        for group in groups:
            members = TASKS[group].members
            if set(members) <= set(tasks):
                at = min(tasks.index(name) for name in members)
                tasks = [*tasks[:at], group, *(name for name in tasks[at:] if name not in members)]
        limit = [] if not self.limits or None in self.limits else ["--limit", str(next(iter(self.limits)))]
        given = [part for name, value in self.options.items() if value is not None for part in (f"--{name}", value)]
        return ["eval", *tasks, *limit, *given]


def _models(evaluation: Evaluation, alone: bool) -> list[str]:
    """Which models: those of the run, unless others were named."""
    names = {model.label: model.name for model in evaluation.models}
    if "model" not in names and not alone:
        return []
    label = "model" if "model" in names else list(names)[-1]
    return ["--model", names[label], *(["--baseline", names["base"]] if "base" in names and label != "base" else [])]


def _by_request(scores: Iterable[Score]) -> list[list[Score]]:
    """Scores that one task gave, together; means of several tasks are left out."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        if not score.of and not (score.task in TASKS and TASKS[score.task].kind == "group"):
            found.setdefault(score.request or f"task {score.task}", []).append(score)
    return list(found.values())


def _name(scores: Sequence[Score]) -> str:
    """What was typed: of a group of lm-eval's the name of the group, which has the most parts."""
    ours = [score.task for score in scores if score.task in TASKS]
    parts = [(len(str(score.settings.get("parts", "")).split(", ")), score.task) for score in scores]
    return ours[0] if ours else max(parts, key=lambda each: each[0])[1]


def _one(scores: Sequence[Score], context: _Context) -> Measured:
    name = _name(scores)
    kind: Kind = TASKS[name].kind if name in TASKS else "perplexity" if name.startswith(TEXT_PREFIX) else "harness"
    first = next((score for score in scores if score.task == name), scores[0])
    settings = first.settings
    lengths = tuple(dict.fromkeys(score.length for score in scores if score.length is not None))
    limits: frozenset[int | None] = frozenset()
    if "limit" in settings:
        limits = frozenset({settings["limit"]})
    elif "samples" in settings:
        samples = settings["samples"]
        limits = frozenset({None, samples} if samples == _PROMPTS else {samples})
    found = Measured(
        name,
        kind,
        max(score.estimate.n for score in scores),
        limits,
        settings.get("max_length"),
        settings.get("stride"),
        lengths,
        settings.get("bos"),
        settings.get("seed"),
        settings.get("data"),
        requests=frozenset({first.request} if first.request else ()),
    )
    noted = [note for score in scores for note in score.notes if "copy" in note]
    return _with_origin(found, context, copied=bool(noted))


@cache
def own_text_digest(task: str) -> str | None:
    """The digest of what a task with needles, or one of RULER's, hides its answers in where nothing else is named."""
    material = Material(heldout_builtin_text())
    return RULER_TASKS[task].data(material) if task in RULER_TASKS else material.digest


def _with_origin(found: Measured, context: _Context, *, copied: bool) -> Measured:
    """What the request tells of where the data came from."""
    if found.kind == "perplexity":
        path = found.task.removeprefix(TEXT_PREFIX)
        return replace(found, origin="this Python's documentation" if path == found.task else f"file {path}")
    if found.kind in ("niah", "ruler"):
        if found.digest is None or found.task == NOISE_TASK:
            return replace(found, origin="generated from the seed")
        if found.digest in context.heldout or context.asked(found, None):
            return replace(found, origin="generated from the seed, in lapcli's own text")
        # Scores of other lengths of the same request may have been replaced. The text tells, under the same Python.
        if context.versions.get("python") != platform.python_version():
            return found
        if found.digest == own_text_digest(found.task):
            return replace(found, origin="generated from the seed, in lapcli's own text")
        return replace(found, origin="generated from the seed, in a file whose name is not noted", haystack=True)
    for folder in context.folders:
        if context.asked(found, folder):
            return replace(found, origin=f"local folder {folder}", folder=str(folder))
    if not copied and context.asked(found, None):
        return replace(found, origin="the hub, or its cache")
    # Another version may have made its requests otherwise.
    if not copied and (context.versions.get("lapcli") != __version__ or not found.requests):
        return found
    return replace(found, origin="a local copy; its folder is not noted", folder=UNKNOWN_FOLDER)


def _with_lengths_of_groups(found: list[Measured], evaluation: Evaluation) -> list[Measured]:
    """Tasks of a group were asked for at the same lengths; one without room at some gets the others' all the same."""
    scores = [score for model in evaluation.models for score in model.scores if score.of]
    for group in dict.fromkeys(score.task for score in scores):
        requests = {request for score in scores if score.task == group for request in score.of}
        inside = [each for each in found if each.kind == "ruler" and each.requests & requests]
        lengths = tuple(sorted({length for each in inside for length in each.lengths}))
        found = [replace(each, lengths=lengths) if each in inside else each for each in found]
    return found
