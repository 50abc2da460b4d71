"""Folders of an earlier training that give way to a new one: set aside whole, and back where nothing replaced them."""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from lapcli.artifacts import Lineage, read_document, taken
from lapcli.errors import ArtifactError
from lapcli.reporting import Reporter
from lapcli.stages.lineage import refuse_stale
from lapcli.training.checkpoints import latest_step
from lapcli.training.engine import CHECKPOINTS


def aside(folder: Path) -> Path:
    """Where a folder lies while another takes its place."""
    return folder.with_name(f".{folder.name}.before-restart")


def set_aside(folder: Path) -> None:
    """Give way. What lies aside already was finished; what came after it was not, and goes."""
    if not folder.exists():
        return
    if aside(folder).exists():
        shutil.rmtree(folder)
    else:
        folder.rename(aside(folder))


def bring_back(folder: Path) -> None:
    """Put what was set aside in its place again."""
    if aside(folder).exists():
        shutil.rmtree(folder, ignore_errors=True)
        aside(folder).rename(folder)


def forget_aside(folder: Path) -> None:
    """Remove what was set aside, once its successor is whole."""
    shutil.rmtree(aside(folder), ignore_errors=True)


def check_ours(folder: Path, ours: Collection[str]) -> None:
    """See that a folder that will be written into, or give way, holds what an earlier training left, or nothing.

    Args:
        folder: which need not exist.
        ours: names of files and folders, one of which a training leaves.

    Raises:
        ArtifactError: the folder holds something else, or is none.
    """
    if not folder.exists():
        return
    there = {entry.name for entry in folder.iterdir()} if folder.is_dir() else {folder.name}
    if there and not set(ours) & there:
        raise taken(folder, "pass another --run DIR")


def left_before(
    summary: Path, kind: str, wanted: Callable[[], Lineage], mend: str, reporter: Reporter
) -> Lineage | None:
    """What an earlier training of the same inputs says that it left.

    Args:
        summary: the document that it ends with, beside its checkpoints.
        kind: of the document.
        wanted: makes the lineage of the inputs; called where there is a document.
        mend: what to do about one of other inputs, or that cannot be read.
        reporter: told when it has to be made again.

    Returns:
        `None` where there is none, or none that can be read while a checkpoint can say more.

    Raises:
        ArtifactError: it was of other inputs; or it cannot be read, and no checkpoint can say more.
    """
    if not summary.is_file():
        return None
    try:
        found = read_document(summary, kind)
    except ArtifactError as error:
        if error.hint is not None or latest_step(summary.parent / CHECKPOINTS) is None:
            raise ArtifactError(error.message, error.hint or mend) from error
        reporter.warn(f"{error.message}; it is made again from the last checkpoint")
        return None
    refuse_stale(wanted(), found, summary, mend)
    return found
