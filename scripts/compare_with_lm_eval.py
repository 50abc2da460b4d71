"""Compare what lapcli computes for lm-eval's tasks with what lm-eval computes by itself, number by number.

python scripts/compare_with_lm_eval.py MODEL wikitext lambada zeroshot8 squad --task-data DIR --items 500

Both are given the same task objects and the same model in memory: lapcli scores and writes with its own code, lm-eval
with its own `HFLM`. An item is one log-likelihood (of a choice, of a passage's last word, of a window of a page) or one
written text. Of each name as many first documents are taken as give `--items` items; a group's items are dealt out to
its members. Prints a table and ends with code 1 where a log-likelihood, a text or a value differs by more than rounding
does.
"""

import argparse
import datetime
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
import transformers

from lapcli.evaluation.harness import HarnessTask, load_task, run_harness
from lapcli.evaluation.scoring import LoadedModel
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.evaluation.tasks import TASKS, expand
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.reporting import SilentReporter

# Logits in fp32 differ by some 1e-5 of their size where batches are put together otherwise.
TOLERANCE = 1e-4

Answers = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, bool]]
"""From a context and its continuation, in tokens, to the log-likelihood and whether it is the greedy one."""


class Compared(NamedTuple):
    """One task, both ways.

    Attributes:
        task: its name.
        documents: how many were taken.
        items: log-likelihoods or written texts that were compared.
        relative: the largest difference of two log-likelihoods, over the larger of 1 and their size.
        unlike: texts, or marks of the greedy continuation, that are not the same.
        value: the largest difference of two of the task's metrics, over the larger of 1 and their size.
        seconds: that lapcli took, and lm-eval.
    """

    task: str
    documents: int
    items: int
    relative: float
    unlike: int
    value: float
    seconds: tuple[float, float]

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than rounding does."""
        return self.relative <= TOLERANCE and self.value <= TOLERANCE and not self.unlike


def compare(
    loaded: LoadedModel, name: str, task_data: Path | None, items: int, max_length: int, batch_size: int
) -> Compared:
    """Measure a task by lapcli and by lm-eval alone.

    Args:
        loaded: the model.
        name: of the task, no group.
        task_data: where its data lies.
        items: that are to be compared, at least, as far as there are documents.
        max_length: most tokens of a request.
        batch_size: rows a pass, of both.
    """
    harness_name = TASKS[name].harness_name or name
    task = load_task(name, harness_name, task_data)
    (part_name, part), *others = task.loaded["tasks"].items()
    if others:
        raise SystemExit(f"{name} is a group of lm-eval's; name its members")
    documents = _documents(part, loaded.tokenizer, items, max_length)

    from lapcli.evaluation.harness_model import InMemoryModel

    start = time.perf_counter()
    with _recording(InMemoryModel) as ours:
        found, _ = run_harness(
            task, loaded, EvaluationSettings(limit=documents),
            max_length=max_length, batch_size=batch_size, reporter=SilentReporter(),
        )  # fmt: skip
    middle = time.perf_counter()
    alone, theirs = _by_lm_eval(task, loaded, documents, max_length, batch_size)
    seconds = middle - start, time.perf_counter() - middle
    if ours.keys() != theirs.keys():
        raise SystemExit(f"{name}: not the same was asked for: {len(ours.keys() ^ theirs.keys())} requests differ")
    unlike = sum(ours[key][1] != theirs[key][1] for key in ours)
    texts = _texts(found["samples"][part_name]), _texts(alone["samples"][part_name])
    unlike += sum(mine != other for mine, other in zip(*texts, strict=True))
    values = [
        (value, alone["results"][part_name][metric])
        for metric, value in found["results"][part_name].items()
        if "_stderr" not in metric and isinstance(value, float)
    ]
    relative = max((_apart(ours[key][0], theirs[key][0]) for key in ours), default=0.0)
    value = max(_apart(*pair) for pair in values)
    return Compared(name, documents, len(ours) + len(texts[0]), relative, unlike, value, seconds)


def _apart(mine: float, other: float) -> float:
    found = abs(mine - other) / max(1.0, abs(mine), abs(other))
    return math.inf if math.isnan(found) else found


def _documents(task: Any, tokenizer: Any, items: int, max_length: int) -> int:
    """How many first documents give so many items, or all of them."""
    there = len(task.eval_docs)
    low, high = 0, 1  # too few; enough, once the steps are done
    while high < there and _items(task, high, tokenizer, max_length) < items:
        low, high = high, min(there, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _items(task, middle, tokenizer, max_length) >= items else (middle, high)
    return high


def _items(task: Any, documents: int, tokenizer: Any, max_length: int) -> int:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        task.build_all_requests(limit=documents, rank=0, world_size=1)
    if task.OUTPUT_TYPE != "loglikelihood_rolling":
        return len(task.instances)
    texts = [instance.args[0] for instance in task.instances]
    return sum(math.ceil(len(tokenizer(text, verbose=False).input_ids) / max_length) for text in texts)


def _by_lm_eval(
    task: HarnessTask, loaded: LoadedModel, documents: int, max_length: int, batch_size: int
) -> tuple[Any, Answers]:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    stock: Any = HFLM
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), _recording(stock) as answers:
        model = stock(
            pretrained=loaded.model, tokenizer=loaded.tokenizer, backend="causal",
            max_length=max_length, batch_size=batch_size,
        )  # fmt: skip
        loaded_tasks: Any = task.loaded
        found = evaluate(lm=model, task_dict=loaded_tasks, limit=documents, bootstrap_iters=0, log_samples=True)
    return found, answers


@contextmanager
def _recording(model: Any) -> Iterator[Answers]:
    """Keeps what a class of models answers to requests for log-likelihoods."""
    answers: Answers = {}
    original = model.__dict__["_loglikelihood_tokens"]

    def record(self: Any, requests: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        found = original(self, requests, *args, **kwargs)
        for (_, context, continuation), (total, greedy) in zip(requests, found, strict=True):
            answers[tuple(context), tuple(continuation)] = float(total), bool(greedy)
        return found

    model._loglikelihood_tokens = record
    try:
        yield answers
    finally:
        model._loglikelihood_tokens = original


def _texts(samples: Sequence[Any]) -> list[str]:
    """What was written, in the order of the documents; nothing where log-likelihoods were asked for."""
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    answers = [answer for sample in ordered for request in sample["resps"] for answer in request]
    return [answer for answer in answers if isinstance(answer, str)]


def _shares(names: Sequence[str], items: int) -> dict[str, int]:
    """Items of each task: those of a name, or its part of a group's; the most that any name asks for."""
    found: dict[str, int] = {}
    for name in names:
        if name not in TASKS:
            raise SystemExit(f"{name} is none of lapcli's names: {', '.join(TASKS)}")
        members = [info.name for info in expand([TASKS[name]])]
        for member in members:
            found[member] = max(found.get(member, 0), math.ceil(items / len(members)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tasks", nargs="+", help="names of lapcli's that lm-eval defines, or groups of them")
    parser.add_argument("--task-data", type=Path, help="as for lapcli eval")
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    chosen = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    source = resolve_model(chosen.model)
    loaded = LoadedModel(load_model(source, dtype=torch.float32), load_tokenizer(source), source.name)
    print(
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} thread(s), fp32, "
        + ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers", "lm_eval"))
        + f", windows of {chosen.max_length}, batches of {chosen.batch_size}\n"
    )
    print("| task | documents | items | largest difference | unlike | of the values | seconds, lapcli and lm-eval |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    wrong: list[str] = []
    for name, items in _shares(chosen.tasks, chosen.items).items():
        found = compare(loaded, name, chosen.task_data, items, chosen.max_length, chosen.batch_size)
        seconds = " and ".join(f"{part:.0f}" for part in found.seconds)
        print(
            f"| `{name}` | {found.documents} | {found.items} | {found.relative:.1e} | {found.unlike} | "
            f"{found.value:.1e} | {seconds} |",
            flush=True,
        )
        wrong += [] if found.agrees else [name]
    if wrong:
        print(f"\nthey differ on {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
