"""The tasks by name. Imports nothing heavy, so that a misspelled task is refused before a model is loaded."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lapcli.errors import DataError, UsageError

TEXT_PREFIX = "text:"
NOISE_TASK = "niah_noise"

Kind = Literal["perplexity", "niah", "harness"]


@dataclass(frozen=True)
class TaskInfo:
    """What a task is, for lists and help.

    Attributes:
        name: as typed.
        kind: what runs it: our windows of text, our needle generator, or lm-eval.
        metrics: what it gives.
        summary: one line.
        source: the definition it follows.
        harness_name: lm-eval's name for it.
    """

    name: str
    kind: Kind
    metrics: tuple[str, ...]
    summary: str
    source: str
    harness_name: str | None = None


TASKS: dict[str, TaskInfo] = {
    "builtin": TaskInfo(
        name="builtin",
        kind="perplexity",
        metrics=("token_perplexity", "word_perplexity"),
        summary="the held-out tenth of Python's own documentation; needs no data and no network",
        source="rolling windows as in lm-eval's loglikelihood_rolling",
    ),
    "wikitext": TaskInfo(
        name="wikitext",
        kind="harness",
        metrics=("word_perplexity", "byte_perplexity", "bits_per_byte"),
        summary="WikiText-2 test, raw and detokenised, one page a document",
        source="lm-eval task wikitext (Merity et al. 2016)",
        harness_name="wikitext",
    ),
    "lambada": TaskInfo(
        name="lambada",
        kind="harness",
        metrics=("perplexity", "acc"),
        summary="the last word of 5153 passages, OpenAI's processing",
        source="lm-eval task lambada_openai (Paperno et al. 2016)",
        harness_name="lambada_openai",
    ),
    "niah": TaskInfo(
        name="niah",
        kind="niah",
        metrics=("exact_match",),
        summary="a 7-digit number hidden in running text, at several lengths; generated from the seed",
        source="S-NIAH of RULER (Hsieh et al. 2024, arXiv 2404.06654)",
    ),
    NOISE_TASK: TaskInfo(
        name=NOISE_TASK,
        kind="niah",
        metrics=("exact_match",),
        summary="the same hidden in RULER's five repeated sentences, which is easier",
        source="S-NIAH-1 of RULER (Hsieh et al. 2024, arXiv 2404.06654)",
    ),
}

TEXT_TASK = TaskInfo(
    name="text:PATH",
    kind="perplexity",
    metrics=("token_perplexity", "word_perplexity"),
    summary="any .txt or .jsonl file, also .xz, .gz or .bz2",
    source="rolling windows as in lm-eval's loglikelihood_rolling",
)


def parse_tasks(names: Sequence[str]) -> list[TaskInfo]:
    """Look up task names; a name that is neither ours nor `text:PATH` is taken for one of lm-eval's.

    Those are checked by `harness.check_names`, which needs lm-eval.

    Args:
        names: as typed; repeated names are taken once.

    Raises:
        UsageError: there are no names.
        DataError: the file of a `text:PATH` does not exist.
    """
    if not names:
        raise UsageError(
            "no task named", f"name one or more: {', '.join([*TASKS, TEXT_TASK.name])}, or any lm-eval task"
        )
    return [_parse(name) for name in dict.fromkeys(names)]


def unknown_task(name: str, known: Sequence[str] = ()) -> UsageError:
    """The error for a name that nobody knows, with the nearest that somebody does.

    Args:
        name: as typed.
        known: lm-eval's names, where they are known.
    """
    ours = [*TASKS, TEXT_TASK.name]
    # Ours first: among lm-eval's thousands something is always near.
    near = difflib.get_close_matches(name, ours, n=1, cutoff=0.7) or difflib.get_close_matches(
        name, list(known), n=1, cutoff=0.5
    )
    hint = f"did you mean {near[0]}?" if near else f"tasks: {', '.join(ours)}, or any lm-eval task"
    return UsageError(f"no task is called {name!r}", hint)


def _parse(name: str) -> TaskInfo:
    if name in TASKS:
        return TASKS[name]
    if name.startswith(TEXT_PREFIX):
        path = Path(name.removeprefix(TEXT_PREFIX))
        if not path.is_file():
            raise DataError(f"{name}: {path} is no file")
        return TaskInfo(
            name=name, kind="perplexity", metrics=TEXT_TASK.metrics, summary=TEXT_TASK.summary, source=TEXT_TASK.source
        )
    return TaskInfo(name=name, kind="harness", metrics=(), summary="", source=f"lm-eval task {name}", harness_name=name)
