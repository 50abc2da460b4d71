"""What an evaluation found: scores with their settings, comparable only where the settings are alike, as JSON."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from lapcli.errors import ArtifactError, UsageError
from lapcli.evaluation.estimates import Estimate, Gap, gap

KIND = "evaluation"
SCHEMA = 1


@dataclass(frozen=True)
class Score:
    """One number of one model.

    Attributes:
        task: as named on the command line, or the lm-eval task within a group.
        metric: what is measured.
        length: tokens of the prompt, where a task has several lengths.
        higher_is_better: the direction; `None` where lm-eval does not say.
        estimate: the value and its standard error.
        settings: everything the number depends on but the model: window, stride, BOS, seed, digests of data and
            tokenizer. Flat and JSON-able.
        counts: what was counted (`tokens`, `words`, `bytes`), for the reader.
        request: digest of what was asked for (`lapcli.evaluation.request`).
        notes: what a reader must know of the data.
        of: the requests of the scores that this one is the mean of.
    """

    task: str
    metric: str
    higher_is_better: bool | None
    estimate: Estimate
    settings: Mapping[str, Any]
    length: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    request: str | None = field(default=None, compare=False)
    notes: tuple[str, ...] = ()
    of: tuple[str, ...] = field(default=(), compare=False)

    @property
    def key(self) -> tuple[str, str, int | None]:
        """Names the row it belongs to."""
        return self.task, self.metric, self.length


@dataclass(frozen=True)
class Difference:
    """Two scores compared.

    Attributes:
        gap: other minus base, with its standard error.
        ratio: other over base; `None` where base is 0.
        better: whether other is better, by the metric's direction; `None` where equal or without direction.
    """

    gap: Gap
    ratio: float | None
    better: bool | None


@dataclass(frozen=True)
class ModelScores:
    """One model and its scores.

    Attributes:
        label: what tables call it (`base`, `sliced`).
        name: directory, hub id or demo name.
        revision: the hub's commit, if any.
        digest: names config and weights; `None` for a model handed over in memory.
        dtype: of the weights as they ran.
        kernel: which implementation of the recurrence was asked for.
        parameters: how many.
        scores: in task order.
        tokenizer: digest of the tokenizer's files; `None` for a model handed over in memory.
    """

    label: str
    name: str
    revision: str | None
    digest: str | None
    dtype: str
    kernel: str
    parameters: int
    scores: tuple[Score, ...]
    tokenizer: str | None = None

    def is_same(self, other: "ModelScores") -> bool:
        """Whether both are scores of the same weights and tokenizer, run in the same way."""
        mine, theirs = (
            (scores.digest, scores.tokenizer, scores.dtype, scores.kernel, scores.parameters)
            for scores in (self, other)
        )
        return self.digest is not None and mine == theirs


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        task: as in `Score`.
        metric: as in `Score`.
        length: as in `Score`.
        scores: one a model, in the models' order; `None` where a model has no such score.
        differences: against the first model, from the second on; `None` where there is nothing to compare or the
            settings differ.
        refusals: why, one sentence for each difference that was refused.
    """

    task: str
    metric: str
    length: int | None
    scores: tuple[Score | None, ...]
    differences: tuple[Difference | None, ...]
    refusals: tuple[str, ...]

    @property
    def higher_is_better(self) -> bool | None:
        """The direction of the metric."""
        return next((score.higher_is_better for score in self.scores if score is not None), None)


class Measured(Protocol):
    """Whatever can tell what was measured before."""

    def measured(
        self, digest: str | None, tokenizer: str | None, dtype: str, kernel: str, requests: Collection[str]
    ) -> ModelScores | None:
        """The scores of a model with those weights and that tokenizer, run in that way, that answer those requests.

        `None` where there are none.
        """
        ...


@dataclass(frozen=True)
class Evaluation:
    """The scores of one or more models; the first is the base of the differences.

    Attributes:
        models: each with its scores.
        versions: of the programs that took part, and the type of the device.
    """

    models: tuple[ModelScores, ...]
    versions: Mapping[str, str]

    def rows(self) -> list[Row]:
        """The scores side by side, in the order in which they were measured."""
        tables = [{score.key: score for score in model.scores} for model in self.models]
        keys = dict.fromkeys(score.key for model in self.models for score in model.scores)
        return [self._row(key, [table.get(key) for table in tables]) for key in keys]

    def _row(self, key: tuple[str, str, int | None], scores: list[Score | None]) -> Row:
        base = scores[0]
        differences: list[Difference | None] = []
        refusals: list[str] = []
        for model, other in zip(self.models[1:], scores[1:], strict=True):
            difference = None
            if base is not None and other is not None:
                try:
                    difference = compare(base, other)
                except UsageError as error:
                    refusals.append(f"{self.models[0].label} and {model.label}: {error.message}")
            differences.append(difference)
        return Row(*key, scores=tuple(scores), differences=tuple(differences), refusals=tuple(refusals))

    def measured(
        self, digest: str | None, tokenizer: str | None, dtype: str, kernel: str, requests: Collection[str]
    ) -> ModelScores | None:
        """As `Measured.measured`."""
        wanted = (digest, tokenizer, dtype, kernel)
        of_models = (model for model in self.models if digest is not None)
        found = next(
            (model for model in of_models if (model.digest, model.tokenizer, model.dtype, model.kernel) == wanted), None
        )
        scores = () if found is None else tuple(score for score in found.scores if score.request in requests)
        return replace(found, scores=scores) if found is not None and scores else None

    def merged_with(self, older: "Evaluation") -> "tuple[Evaluation, bool]":
        """These scores, and from an older evaluation those of other tasks, lengths and models.

        Returns:
            The evaluation, and whether everything of the older one is in it, but for scores measured anew. Nothing is
            where the base is another, or versions of the programs differ; of a label, only the same model's scores are.
        """
        bases = [found.models[0] for found in (self, older) if found.models and found.models[0].label == "base"]
        if dict(self.versions) != dict(older.versions) or (len(bases) == 2 and not bases[0].is_same(bases[1])):
            return self, False
        theirs = {model.label: model for model in older.models}
        merged: list[ModelScores] = []
        whole = True
        for model in self.models:
            other = theirs.pop(model.label, None)
            if other is not None and not model.is_same(other):
                whole = False
            elif other is not None:
                scores = {score.key: score for score in (*other.scores, *model.scores)}
                model = replace(model, scores=_without_orphans(scores.values()))
            merged.append(model)
        merged += theirs.values()
        merged.sort(key=lambda model: model.label != "base")  # the rest keeps its order
        return Evaluation(models=tuple(merged), versions=self.versions), whole

    def to_json(self) -> dict[str, Any]:
        """The document to write: models with every score, and the rows with differences for whoever reads it."""
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "versions": dict(self.versions),
            "rows": [_row_json(row, [model.label for model in self.models]) for row in self.rows()],
            "models": [
                {**_fields(model, "scores"), "scores": [_score_json(score) for score in model.scores]}
                for model in self.models
            ],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Evaluation":
        """Read what `to_json` wrote; the rows are made again from the scores.

        Raises:
            ArtifactError: it is no evaluation, or of a newer schema.
        """
        if document.get("kind") != KIND:
            raise ArtifactError(f"this is no evaluation (kind {document.get('kind')!r})", "run `lapcli eval` again")
        if document.get("schema") != SCHEMA:
            raise ArtifactError(
                f"the evaluation has schema {document.get('schema')!r}; this lapcli reads {SCHEMA}",
                "upgrade lapcli, or run `lapcli eval` again",
            )
        try:
            models = tuple(
                ModelScores(**{**model, "scores": tuple(_score(score) for score in model["scores"])})
                for model in document["models"]
            )
            return cls(models=models, versions=dict(document["versions"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"the evaluation is damaged: {error!r}", "run `lapcli eval` again") from error


def compare(base: Score, other: Score) -> Difference:
    """What the other score has more than the base.

    Raises:
        UsageError: they are scores of different things, or were measured with unlike settings (window length,
            stride, BOS, data, tokenizer, ...), so that their difference says nothing about the models.
    """
    if base.key != other.key:
        raise UsageError(f"{_name(base)} and {_name(other)} are different measures")
    unlike = [
        f"{name} {base.settings.get(name)!r} and {other.settings.get(name)!r}"
        for name in sorted({*base.settings, *other.settings})
        if base.settings.get(name) != other.settings.get(name)
    ]
    if unlike:
        raise UsageError(
            f"{_name(base)} was measured with unlike settings: {'; '.join(unlike)}",
            "evaluate both models in one `lapcli eval`",
        )
    found = gap(base.estimate, other.estimate)
    better = None
    if base.higher_is_better is not None and found.value != 0 and not math.isnan(found.value):
        better = (found.value > 0) == base.higher_is_better
    return Difference(
        gap=found,
        ratio=other.estimate.value / base.estimate.value if base.estimate.value else None,
        better=better,
    )


def _without_orphans(scores: Iterable[Score]) -> tuple[Score, ...]:
    """The scores but for means of scores that are no more: they would not be the means of what stands beside them."""
    scores = list(scores)
    there = {score.request for score in scores}
    return tuple(score for score in scores if there.issuperset(score.of))


def _name(score: Score) -> str:
    return f"{score.task} {score.metric}" + ("" if score.length is None else f" at {score.length}")


def _fields(record: Any, *without: str) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in without}


def _number(value: float | None) -> float | str | None:
    """JSON has no infinity; a perplexity may be one."""
    return value if value is None or math.isfinite(value) else str(value)


def _score_json(score: Score) -> dict[str, Any]:
    estimate = score.estimate
    return {
        **_fields(score, "estimate"),
        "settings": dict(score.settings),
        "counts": dict(score.counts),
        "estimate": {
            **asdict(estimate),
            "value": _number(estimate.value),
        },
    }


def _score(document: Mapping[str, Any]) -> Score:
    estimate = dict(document["estimate"])
    estimate["value"] = float(estimate["value"])
    estimate["influences"] = tuple(estimate["influences"])
    lists = {name: tuple(document[name]) for name in ("notes", "of") if name in document}
    interval = estimate["interval"]
    estimate["interval"] = None if interval is None else (interval[0], interval[1])
    return Score(**{**document, **lists, "estimate": Estimate(**estimate)})


def _row_json(row: Row, labels: list[str]) -> dict[str, Any]:
    return {
        "task": row.task,
        "metric": row.metric,
        "length": row.length,
        "higher_is_better": row.higher_is_better,
        "values": {
            label: None
            if score is None
            else {
                "value": _number(score.estimate.value),
                "stderr": score.estimate.stderr,
                "n": score.estimate.n,
                "interval": score.estimate.interval,
            }
            for label, score in zip(labels, row.scores, strict=True)
        },
        "differences": {
            label: None
            if difference is None
            else {
                "value": _number(difference.gap.value),
                "stderr": difference.gap.stderr,
                "paired": difference.gap.paired,
                "ratio": _number(difference.ratio),
                "better": difference.better,
            }
            for label, difference in zip(labels[1:], row.differences, strict=True)
        },
        "refused": list(row.refusals),
    }
