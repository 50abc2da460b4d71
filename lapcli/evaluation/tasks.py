"""The tasks by name. Imports nothing heavy, so that a misspelled task is refused before a model is loaded."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lapcli.errors import DataError, UsageError

TEXT_PREFIX = "text:"
NOISE_TASK = "niah_noise"

Kind = Literal["perplexity", "niah", "ruler", "harness", "group"]


@dataclass(frozen=True)
class TaskInfo:
    """What a task is, for lists and help.

    Attributes:
        name: as typed.
        kind: what runs it: our windows of text, our needle generator, our RULER, lm-eval, or nothing but the tasks it
            is made of.
        metrics: what it gives.
        summary: one line.
        source: the definition it follows.
        harness_name: lm-eval's name for it.
        means: of a group, its metrics: each the mean of these metrics of these tasks.
        packages: that it needs beside lm-eval, as pip calls them.
    """

    name: str
    kind: Kind
    metrics: tuple[str, ...]
    summary: str
    source: str
    harness_name: str | None = None
    means: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        """The tasks that a group is made of, each once."""
        return tuple(dict.fromkeys(task for parts in self.means.values() for task, _ in parts))


_ZEROSHOT = (
    ("arc_easy", "acc_norm"),
    ("arc_challenge", "acc_norm"),
    ("hellaswag", "acc_norm"),
    ("piqa", "acc_norm"),
    ("winogrande", "acc"),
    ("lambada", "acc"),
)
_LONGBENCH = ("hotpotqa", "2wikimqa", "lcc", "repobench-p", "trec", "samsum", "triviaqa")
_LONGBENCH_PACKAGES = ("jieba", "fuzzywuzzy", "rouge")
_ROUGE = ("rouge1", "rougeL")
_ROUGE_PACKAGES = ("rouge_score",)


_RULER = {
    "niah_single_1": "a number in RULER's repeated sentences (S-NIAH-1), asked for in writing",
    "niah_single_2": "a number in running text (S-NIAH-2)",
    "niah_single_3": "a UUID in running text (S-NIAH-3)",
    "niah_multikey_1": "one of four numbers in running text (MK-NIAH-1)",
    "niah_multikey_2": "a number among nothing but others (MK-NIAH-2)",
    "niah_multikey_3": "a UUID under a UUID, among nothing but others (MK-NIAH-3)",
    "niah_multivalue": "four numbers under one key in running text (MV-NIAH)",
    "niah_multiquery": "four numbers under four keys in running text (MQ-NIAH)",
    "ruler_vt": "the five variables that one value is handed on to (variable tracking)",
    "ruler_cwe": "the ten words that come most often in a list (common words extraction)",
    "ruler_fwe": "the three words that come most often in a coded text (frequent words extraction)",
}


def _harness(
    name: str,
    metrics: tuple[str, ...],
    summary: str,
    source: str,
    *,
    harness_name: str | None = None,
    packages: tuple[str, ...] = (),
) -> TaskInfo:
    """A task of lm-eval, which mostly has the same name for it."""
    theirs = harness_name or name
    full = f"lm-eval task {theirs} ({source})"
    return TaskInfo(name, "harness", metrics, summary, full, harness_name=theirs, packages=packages)


TASKS: dict[str, TaskInfo] = {
    "builtin": TaskInfo(
        name="builtin",
        kind="perplexity",
        metrics=("token_perplexity", "word_perplexity"),
        summary="the held-out tenth of Python's own documentation; needs no data and no network",
        source="rolling windows as in lm-eval's loglikelihood_rolling",
    ),
    "wikitext": _harness(
        "wikitext",
        ("word_perplexity", "byte_perplexity", "bits_per_byte"),
        "WikiText-2 test, raw and detokenised, one page a document",
        "Merity et al. 2016",
    ),
    "lambada": _harness(
        "lambada",
        ("perplexity", "acc"),
        "the last word of 5153 passages, OpenAI's processing",
        "Paperno et al. 2016",
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
    "ruler": TaskInfo(
        name="ruler",
        kind="group",
        metrics=("mean",),
        summary="the eleven tasks below, written answers at several lengths; their mean at each length",
        source="mean of RULER's tasks without its two of question answering (Hsieh et al. 2024, arXiv 2404.06654)",
        means={"mean": tuple((name, "string_match") for name in _RULER)},
    ),
    **{
        name: TaskInfo(name, "ruler", ("string_match",), summary, "RULER (Hsieh et al. 2024, arXiv 2404.06654)")
        for name, summary in _RULER.items()
    },
    "zeroshot": TaskInfo(
        name="zeroshot",
        kind="group",
        metrics=("mean",),
        summary="ARC-E, ARC-C, HellaSwag, PIQA (acc_norm), WinoGrande, LAMBADA (acc), and their mean",
        source="mean of six tasks of lm-eval, each counting the same",
        means={"mean": _ZEROSHOT},
    ),
    "zeroshot8": TaskInfo(
        name="zeroshot8",
        kind="group",
        metrics=("mean",),
        summary="zeroshot with BoolQ (acc) and OpenBookQA (acc_norm), and the mean of the eight",
        source="mean of eight tasks of lm-eval, each counting the same",
        means={"mean": (*_ZEROSHOT, ("boolq", "acc"), ("openbookqa", "acc_norm"))},
    ),
    "arc_easy": _harness("arc_easy", ("acc", "acc_norm"), "2376 easy school questions", "Clark et al. 2018"),
    "arc_challenge": _harness("arc_challenge", ("acc", "acc_norm"), "1172 hard school questions", "Clark et al. 2018"),
    "hellaswag": _harness("hellaswag", ("acc", "acc_norm"), "10042 stories to be continued", "Zellers et al. 2019"),
    "piqa": _harness("piqa", ("acc", "acc_norm"), "1838 practical problems with two solutions", "Bisk et al. 2020"),
    "winogrande": _harness("winogrande", ("acc",), "1267 pronouns with two readings", "Sakaguchi et al. 2020"),
    "boolq": _harness("boolq", ("acc",), "3270 questions of yes or no about a passage", "Clark et al. 2019"),
    "openbookqa": _harness("openbookqa", ("acc", "acc_norm"), "500 questions of science", "Mihaylov et al. 2018"),
    "mmlu": TaskInfo(
        name="mmlu",
        kind="harness",
        metrics=("acc",),
        summary="57 subjects, four choices, without examples in the prompt, and means weighted by questions",
        source="lm-eval group mmlu (Hendrycks et al. 2021)",
        harness_name="mmlu",
    ),
    "logiqa": _harness("logiqa", ("acc", "acc_norm"), "questions of logic from an examination", "Liu et al. 2020"),
    "squad": _harness(
        "squad",
        ("contains",),
        "answers found in a passage: the share of continuations that contain them",
        "Arora et al. 2024, arXiv 2402.18668",
        harness_name="squad_completion",
    ),
    "swde": _harness("swde", ("contains",), "facts found in web pages", "Arora et al. 2024"),
    "fda": _harness("fda", ("contains",), "facts found in reports on medical devices", "Arora et al. 2024"),
    "longbench": TaskInfo(
        name="longbench",
        kind="group",
        metrics=("mean",),
        summary="seven tasks of LongBench: questions over passages, code, few examples; give a long --max-length",
        source="mean of seven lm-eval tasks longbench_* (Bai et al. 2024), those of DSLA (arXiv 2506.09316, table 1)",
        means={"mean": tuple((f"longbench_{name}", "score") for name in _LONGBENCH)},
        packages=_LONGBENCH_PACKAGES,
    ),
    "summarize": TaskInfo(
        name="summarize",
        kind="group",
        metrics=_ROUGE,
        summary="ROUGE-1 and ROUGE-L of summaries of CNN/DailyMail and XSum, and the means of both",
        source="the tasks cnn_dailymail and xsum, those of DSLA (arXiv 2506.09316, table 2)",
        means={metric: (("cnn_dailymail", metric), ("xsum", metric)) for metric in _ROUGE},
        packages=_ROUGE_PACKAGES,
    ),
    "cnn_dailymail": _harness(
        "cnn_dailymail",
        ("rouge1", "rouge2", "rougeL", "summary_length"),
        "news articles to be summarised",
        "See et al. 2017",
        harness_name="cnn_dailymail_abisee",
        packages=_ROUGE_PACKAGES,
    ),
    "xsum": TaskInfo(
        name="xsum",
        kind="harness",
        metrics=("rouge1", "rouge2", "rougeL"),
        summary="news articles to be summarised in a sentence",
        source="ours: the prompt, length and scores of lm-eval's cnn_dailymail_abisee (Narayan et al. 2018)",
        harness_name="lapcli_xsum",
        packages=_ROUGE_PACKAGES,
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

    Those are checked by `names.check_spelling`, as far as that can be done at once, and by `harness.check_names`, which
    needs lm-eval.

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


def expand(infos: Sequence[TaskInfo]) -> list[TaskInfo]:
    """The tasks that are measured: groups give way to their members, and each is there once."""
    found: dict[str, TaskInfo] = {}
    for info in infos:
        for part in [_parse(name) for name in info.members] or [info]:
            found.setdefault(part.name, part)
    return list(found.values())


def unknown_task(name: str, known: Sequence[str] = ()) -> UsageError:
    """The error for a name that nobody knows, with the nearest that somebody does.

    Args:
        name: as typed.
        known: lm-eval's names, where they are known.
    """
    return unknown_tasks([name], known)


def unknown_tasks(names: Sequence[str], known: Sequence[str] = ()) -> UsageError:
    """The error for names that nobody knows, each with the nearest that somebody does.

    Args:
        names: as typed, one or more.
        known: lm-eval's names, where they are known.
    """
    near = {name: _nearest(name, known) for name in names}
    if len(names) == 1:
        message, hints = f"no task is called {names[0]!r}", [f"did you mean {each}?" for each in near.values() if each]
    else:
        message = f"no tasks are called {', '.join(map(repr, names))}"
        hints = [f"{name!r}: did you mean {each}?" for name, each in near.items() if each]
    if not all(near.values()):
        hints.append(f"tasks: {', '.join([*TASKS, TEXT_TASK.name])}, or any lm-eval task")
    return UsageError(message, " ".join(hints))


def _nearest(name: str, known: Sequence[str]) -> str | None:
    ours = [*TASKS, TEXT_TASK.name]
    # Ours first: among lm-eval's thousands something is always near.
    near = difflib.get_close_matches(name, ours, n=1, cutoff=0.7) or difflib.get_close_matches(
        name, list(known), n=1, cutoff=0.5
    )
    return near[0] if near else None


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
    packages = _LONGBENCH_PACKAGES if name.startswith("longbench_") else ()
    return TaskInfo(
        name=name,
        kind="harness",
        metrics=("score",) if packages else (),
        summary="",
        source=f"lm-eval task {name}",
        harness_name=name,
        packages=packages,
    )
