"""The file of an evaluation: read, written whole, kept true when a model it speaks of is made anew; without torch."""

import json
from dataclasses import replace
from pathlib import Path

from lapcli.artifacts import atomic_file
from lapcli.errors import ArtifactError
from lapcli.evaluation.results import Evaluation
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


def forget_stale(output: Path, made: str, digest: str, reporter: Reporter) -> None:
    """Take the scores of a model that is no more out of an evaluation; a copy of it stays.

    Args:
        output: the JSON file; it need not be there.
        made: the label of the model that was made anew.
        digest: of that model now.
        reporter: told what was done.
    """
    try:
        earlier = read_evaluation(output)
    except ArtifactError:
        set_aside(output, reporter)
        output.unlink()
        return
    if earlier is None or all(model.label != made or model.digest == digest for model in earlier.models):
        return
    set_aside(output, reporter)
    rest = tuple(model for model in earlier.models if model.label != made)
    if rest:
        write_evaluation(replace(earlier, models=rest), output)
    else:
        output.unlink()


def set_aside(evaluation: Path, reporter: Reporter) -> None:
    """Keep a copy of an evaluation that is about to lose scores, as `evaluation.previous.json`, and say so."""
    aside = evaluation.with_name(f"{evaluation.stem}.previous{evaluation.suffix}")
    with atomic_file(aside) as temporary:
        temporary.write_bytes(evaluation.read_bytes())
    reporter.notice(f"{evaluation} has scores of models or versions that are no more; a copy of it is {aside}")


def write_evaluation(evaluation: Evaluation, output: Path) -> None:
    """Write an evaluation, whole or not at all."""
    with atomic_file(output) as temporary:
        temporary.write_text(json.dumps(evaluation.to_json(), indent=1, ensure_ascii=False) + "\n")
