"""The file of an evaluation: read, written whole, kept true when a model it speaks of is made anew; without torch.

It shows one setting of each task. Beside it, in `evaluations/`, lies all that was measured, a file for each model
and request, so that no score is lost when another takes its place there, and going back to it is no work.
"""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from lapcli.artifacts import atomic_file, digest_document
from lapcli.errors import ArtifactError
from lapcli.evaluation.results import Evaluation, ModelScores, Score
from lapcli.reporting import Reporter


def read_evaluation(path: Path) -> Evaluation | None:
    """The evaluation that is there, or `None`.

    Raises:
        ArtifactError: it is damaged, or of a newer schema.
    """
    hint = f"delete {path}, or pass --overwrite"
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}", "name another with --run") from error
    except ValueError as error:
        raise ArtifactError(f"{path} is no JSON: {error}", hint) from error
    try:
        return Evaluation.from_json(document)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error.message}", f"{error.hint}; or {hint}" if error.hint else hint) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged: {error!r}", hint) from error


class KeptScores:
    """Everything that was measured into a run: what its evaluation shows, and what lies beside it.

    Args:
        output: the evaluation's file.
        shown: its content, if it is there.
    """

    def __init__(self, output: Path, shown: Evaluation | None):
        self.folder = output.with_name(f"{output.stem}s")
        self._shown = shown
        self._anew: set[Path] = set()

    def measured(
        self, digest: str | None, tokenizer: str | None, dtype: str, kernel: str, requests: Collection[str]
    ) -> ModelScores | None:
        """As `lapcli.evaluation.results.Measured.measured`.

        Raises:
            ArtifactError: a file that should hold such scores is damaged.
        """
        model = (digest, tokenizer, dtype, kernel)
        shown = None if self._shown is None else self._shown.measured(*model, requests)
        missing = set(requests) - {score.request for score in (shown.scores if shown else ())}
        parts = [] if shown is None else [shown]
        for request in sorted(missing) if digest is not None else ():
            path = self._path(model, request)
            kept = read_evaluation(path)
            if kept is None:
                continue
            part = kept.measured(*model, {request})
            if part is None:
                raise ArtifactError(f"{path} holds other scores than it should", f"delete {path}, or pass --overwrite")
            parts.append(part)
        if not parts:
            return None
        return replace(parts[0], scores=tuple(score for part in parts for score in part.scores))

    def store(self, evaluation: Evaluation, *, anew: bool = False) -> None:
        """Keep all scores of an evaluation that answer a request; means of tasks follow from them.

        Args:
            evaluation: the scores.
            anew: whether they take the place of those of the same model and request; of one object of this class once.
        """
        for model in evaluation.models:
            if model.digest is None:
                continue
            by_request: dict[str, list[Score]] = {}
            for score in model.scores:
                if score.request is not None:
                    by_request.setdefault(score.request, []).append(score)
            for request, scores in by_request.items():
                path = self._path((model.digest, model.tokenizer, model.dtype, model.kernel), request)
                if path in self._anew or (path.exists() and not anew):
                    continue
                write_evaluation(Evaluation((replace(model, scores=tuple(scores)),), evaluation.versions), path)
                if anew:
                    self._anew.add(path)

    def _path(self, model: tuple[str | None, str | None, str, str], request: str) -> Path:
        return self.folder / f"{digest_document({'model': list(model), 'request': request})[:32]}.json"


def what_left(before: Evaluation, after: Evaluation) -> list[str]:
    """What an evaluation shows no more, each in a few words; scores that were measured anew do not count."""
    names = sorted({*before.versions, *after.versions})
    changed = [name for name in names if before.versions.get(name) != after.versions.get(name)]
    if changed:
        was = ", ".join(f"{name} {before.versions.get(name, 'absent')}" for name in changed)
        return [f"all scores of other versions ({was})"]
    left: dict[str, None] = {}
    now = {model.label: model for model in after.models}
    for model in before.models:
        same = now.get(model.label)
        if same is None or not same.is_same(model):
            ran = f", {model.dtype}, kernel {model.kernel}" if same is not None and same.digest == model.digest else ""
            left[f"{model.label} ({model.name}{ran})"] = None
            continue
        requests = {score.request for score in same.scores}
        gone = dict.fromkeys(score.task for score in model.scores if score.request not in requests)
        left |= dict.fromkeys(f"{task} of other settings" for task in gone)
    return list(left)


def forget_stale(output: Path, made: str, digest: str, reporter: Reporter) -> None:
    """Take the scores of a model that is no more out of an evaluation; they stay in `evaluations/`, and a copy of it.

    Args:
        output: the JSON file; it need not be there.
        made: the label of the model that was made anew.
        digest: of that model now.
        reporter: told what was done.
    """
    try:
        earlier = read_evaluation(output)
    except ArtifactError:
        set_aside(output)
        reporter.notice(f"{output} is damaged; it is now {previous(output)}")
        output.unlink()
        return
    if earlier is None or all(model.label != made or model.digest == digest for model in earlier.models):
        return
    KeptScores(output, earlier).store(earlier)
    set_aside(output)
    reporter.notice(f"{output} has scores of a {made} model that is no more; a copy of it is {previous(output)}")
    rest = tuple(model for model in earlier.models if model.label != made)
    if rest:
        write_evaluation(replace(earlier, models=rest), output)
    else:
        output.unlink()


def previous(evaluation: Path) -> Path:
    """Where `set_aside` puts an evaluation."""
    return evaluation.with_name(f"{evaluation.stem}.previous{evaluation.suffix}")


def set_aside(evaluation: Path) -> None:
    """Keep a copy of an evaluation that is about to lose models, as `evaluation.previous.json`."""
    with atomic_file(previous(evaluation)) as temporary:
        temporary.write_bytes(evaluation.read_bytes())


def write_evaluation(evaluation: Evaluation, output: Path) -> None:
    """Write an evaluation, whole or not at all."""
    with atomic_file(output) as temporary:
        temporary.write_text(json.dumps(evaluation.to_json(), indent=1, ensure_ascii=False) + "\n")
