"""The teacher that a conversion keeps beside its layers, so that it stands alone: put there, checked, restored."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Literal

from lapcli.artifacts import Artifact, atomic_directory
from lapcli.errors import ArtifactError, LapcliError
from lapcli.families.source import INDEX_FILE, ModelSource, companions, lost_companions, resolve_model
from lapcli.linearising.command import convert_command
from lapcli.linearising.plan import LinearisingPlan, Place
from lapcli.linearising.record import MEND, stored
from lapcli.reporting import Reporter

State = Literal["missing", "whole", "damaged"]


def kept_teacher(place: Place) -> ModelSource:
    """The teacher in a conversion, with all its weights.

    Raises:
        ArtifactError: it is damaged; the command that restores it is said.
    """
    try:
        base = resolve_model(str(place.base))
        assert base.headers  # raises where there are none, or damaged ones
    except LapcliError as error:
        raise ArtifactError(
            f"the model whose layers {place.root} holds is damaged there: {error.message}", _restoring(place)
        ) from error
    return base


def checked(place: Place, base: ModelSource) -> list[Artifact]:
    """The layers that are there, if they are of the model that lies beside them.

    Raises:
        ArtifactError: it has changed since.
    """
    found = stored(place)
    if any(each.lineage.model.get("digest") != base.digest for each in found):
        raise ArtifactError(
            f"{place.base} is not the model whose layers lie in {place.prefixes}: it has changed since",
            _restoring(place),
        )
    return found


def state_of_teacher(plan: LinearisingPlan) -> State:
    """Whether the teacher lies in the conversion.

    Raises:
        ArtifactError: another one does.
    """
    place, source = plan.place, plan.source
    if not place.base.is_dir():
        return "missing"
    try:
        base = resolve_model(str(place.base))
        same = bool(base.headers) and base.digest == source.digest
        if same:
            return "damaged" if lost_companions(source, base.path) else "whole"
        readable = True
    except LapcliError:
        readable = False
    theirs = {artifact.lineage.model.get("digest") for artifact in stored(place)}
    # Layers that were made of the very model that is to be kept say that what lies there has changed.
    if theirs == {source.digest} or not (readable or theirs):
        return "damaged"
    raise ArtifactError(f"{place.base} is not {source.name}, which is to be converted there", MEND)


def keep_teacher(plan: LinearisingPlan, reporter: Reporter) -> bool:
    """Put the teacher into the directory: links where the file system has them, copies elsewhere.

    A shipped model is copied: who writes into a link would alter it.

    Returns:
        Whether it was not there, whole.

    Raises:
        ArtifactError: another one is there; or the disk is full.
    """
    state, source, base = state_of_teacher(plan), plan.source, plan.place.base
    if state == "whole":
        return False
    if state == "damaged":
        reporter.warn(f"{base} is damaged; it is made again from {source.name}")
    names = {"config.json", "README.md", INDEX_FILE, *(path.name for path in source.shards), *companions(source)}
    files = [source.path / name for name in sorted(names) if (source.path / name).is_file()]
    with (
        atomic_directory(base, replace=True) as folder,
        reporter.task(f"keeping {source.name}", total=len(files), unit="files") as task,
    ):
        for path in files:
            target = folder / path.relative_to(source.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, target, link=not source.is_demo)
            task.advance()
    return True


def _link_or_copy(path: Path, target: Path, *, link: bool) -> None:
    if link:
        with contextlib.suppress(OSError):
            os.link(path.resolve(), target)
            return
    shutil.copyfile(path, target)


def _restoring(place: Place) -> str:
    return f"put it back, or have it made again from where it came: {convert_command(place.root)}"
