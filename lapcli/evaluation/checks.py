"""Checks that a result must pass: `TASK.METRIC OP VALUE` says when it fails. Imports nothing heavy."""

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lapcli.errors import UsageError
from lapcli.evaluation.results import Evaluation, Row
from lapcli.evaluation.table import format_value
from lapcli.evaluation.tasks import TaskInfo, expand

_FORM = re.compile(r"\s*(?P<what>.+?)\s*(?P<sign><=|>=|<|>)\s*(?P<value>[^<>=\s]+?)(?P<relative>x?)\s*")
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True)
class Check:
    """A condition under which a result fails.

    Attributes:
        text: as typed.
        task: a task or group.
        metric: one of its metrics; "ppl" for the first of its perplexities.
        sign: `>`, `>=`, `<` or `<=`.
        value: what the metric is held against.
        relative: whether the value is a factor of the base's.
    """

    text: str
    task: str
    metric: str
    sign: str
    value: float
    relative: bool

    def fails(self, found: float, base: float | None) -> bool:
        """Whether a value fails; what is not a number fails every check."""
        limit = self.value
        if self.relative:
            assert base is not None
            limit *= base
        return math.isnan(found) or math.isnan(limit) or _SIGNS[self.sign](found, limit)


def parse_check(text: str) -> Check:
    """Read a check such as `wikitext.word_perplexity > 1.1x` or `zeroshot.mean < 0.45`.

    Args:
        text: task, point, metric, sign, number; an `x` after the number makes it a factor of the base's value.

    Raises:
        UsageError: it is not of that form, or a factor is negative.
    """
    form = _FORM.fullmatch(text)
    task, point, metric = form["what"].rpartition(".") if form else ("", "", "")
    try:
        value = float(form["value"]) if form else math.nan
    except ValueError:
        value = math.nan
    if form is None or not (task and point and metric) or not math.isfinite(value):
        raise UsageError(
            f"--fail-if {text!r} is no check",
            'write TASK.METRIC, one of > >= < <=, and a number: "wikitext.word_perplexity > 1.1x" '
            '(1.1 times the base\'s value) or "zeroshot.mean < 0.45"',
        )
    relative = bool(form["relative"])
    if relative and value < 0:
        raise UsageError(
            f"--fail-if {text!r}: {form['value']} is no factor of a base's value",
            "give a factor of 0 or more, as 1.1x, or a plain number without the x",
        )
    return Check(text.strip(), task, metric, form["sign"], value, relative)


def check_checks(
    checks: Sequence[Check],
    infos: Sequence[TaskInfo],
    *,
    models: int,
    metrics_of: Callable[[TaskInfo], tuple[str, ...] | None],
) -> None:
    """Refuse checks of tasks that are not measured, of metrics that they do not have, or of a base that is not there.

    Args:
        checks: to be made.
        infos: the tasks and groups asked for.
        models: how many are measured.
        metrics_of: a task's metrics; `None` where they are known only once it has run.

    Raises:
        UsageError: names the nearest task or metric.
    """
    tasks = {info.name: info for info in (*infos, *expand(infos))}
    for check in checks:
        if check.task not in tasks:
            raise UsageError(
                f"--fail-if {check.text!r}: {check.task!r} is none of the tasks asked for",
                _nearest(check.task, list(tasks), "tasks"),
            )
        metrics = metrics_of(tasks[check.task])
        if metrics is not None and _metric(check, metrics) is None:
            raise _unknown_metric(check, metrics)
        if check.relative and models < 2:
            raise UsageError(
                f"--fail-if {check.text!r} compares with a base, and only one model is measured",
                "name the base with --baseline, or give a plain number",
            )


def failures(
    evaluation: Evaluation, checks: Sequence[Check], lengths: Mapping[str, Sequence[int]] | None = None
) -> list[str]:
    """The checks that the last model fails, each in a sentence; of a task with several lengths each length is checked.

    A control, which was never pruned, is the last model only where there is nothing else to compare with the base.

    Args:
        evaluation: what was measured.
        checks: to be made.
        lengths: for tasks that have several, those that were asked for: one that was not measured fails the check.

    Raises:
        UsageError: a task turned out not to have a metric.
    """
    base, *others = evaluation.models
    last = [model for model in others if model.label != "control"] or others
    judged = replace(evaluation, models=(base, *last[-1:]))
    rows = judged.rows()
    labels = [model.label for model in judged.models]
    found: list[str] = []
    for check in checks:
        of_task = [row for row in rows if row.task == check.task]
        metrics = tuple(dict.fromkeys(row.metric for row in of_task))
        metric = _metric(check, metrics)
        of_metric = [row for row in of_task if row.metric == metric]
        if not of_task:
            found.append(_nothing_there(check))
        elif not of_metric:
            raise _unknown_metric(check, metrics)
        found += [sentence for row in of_metric if (sentence := _failure(check, row, labels))]
        measured = {row.length for row in of_metric}
        asked = (lengths or {}).get(check.task, ()) if of_metric else ()
        found += [_nothing_there(check, length) for length in dict.fromkeys(asked) if length not in measured]
    return found


def _failure(check: Check, row: Row, labels: Sequence[str]) -> str | None:
    base, last = row.scores[0], row.scores[-1]
    if last is None or (check.relative and base is None):
        return _nothing_there(check, row.length)
    against = base.estimate.value if base is not None else None
    if check.relative and row.refusals:
        return f"{check.text}: {row.refusals[-1]}"
    if not check.fails(last.estimate.value, against):
        return None
    at = "" if row.length is None else f" at {row.length}"
    held = f", {labels[0]}'s is {format_value(against, None)}" if check.relative and against is not None else ""
    return f"{check.text}: {labels[-1]}'s{at} is {format_value(last.estimate.value, last.estimate.stderr)}{held}"


def _metric(check: Check, metrics: Sequence[str]) -> str | None:
    """The metric that a check means, of those that its task has."""
    if check.metric in metrics:
        return check.metric
    perplexities = (metric for metric in metrics if "perplexity" in metric)
    return next(perplexities, None) if check.metric == "ppl" else None


def _nothing_there(check: Check, length: int | None = None) -> str:
    return f"{check.text}: there is no score to check" + ("" if length is None else f" at {length}")


def _unknown_metric(check: Check, metrics: Sequence[str]) -> UsageError:
    return UsageError(
        f"--fail-if {check.text!r}: {check.task} has no metric {check.metric!r}",
        _nearest(check.metric, metrics, "metrics"),
    )


def _nearest(name: str, known: Sequence[str], kind: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"{kind}: {', '.join(known) or 'none'}"
