"""The training curve, shown by TensorBoard or Weights & Biases beside lapcli's own file.

Both are optional packages, imported only when asked for. What they show is a copy: `curve.jsonl` is what counts.
"""

import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from lapcli.artifacts import atomic_file
from lapcli.errors import UsageError

WANDB_ID = "wandb-run-id"
"""The file that keeps the run's id."""

_SECRET_NAME = re.compile(
    r"(^|[_-])(auth|authorization|credentials?|passw(or)?d|secret|token|(access|api|private|secret)[_-]?key)$", re.I
)
_SECRET_VALUE = re.compile(r"://[^/@\s]+@|\bhf_[A-Za-z0-9]{16,}")
_HIDDEN = "(not shown)"


class Tracker(Protocol):
    """Where a curve is shown."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Show numbers of a step.

        Args:
            step: how many are done; never less than in an earlier call.
            values: numbers by name. A mapping is a group: `{"validation": {"loss": 2.5}}` is `validation/loss`.
        """
        ...

    def close(self) -> None:
        """Write out what is waiting; nothing is shown after."""
        ...


def check_trackers(kinds: Sequence[str]) -> None:
    """Refuse, before any work, what cannot show a curve here.

    Raises:
        UsageError: there is no such kind, or its package is missing.
    """
    for kind in kinds:
        if kind not in TRACKERS:
            raise UsageError(f"the curve cannot be shown by {kind!r}", f"name some of {', '.join(TRACKERS)}")
        if sys.modules.get(kind) is None and find_spec(kind) is None:
            raise UsageError(f"showing the curve in {kind} needs the package `{kind}`", f"pip install {kind}")


def open_tracker(kinds: Sequence[str], folder: Path, config: Mapping[str, Any], name: str) -> Tracker:
    """Get ready to show the curve of a training, or of one that goes on.

    The first step that is shown tells where training goes on. What TensorBoard had from there on goes out of sight,
    since it is trained again. W&B keeps the values it has of such steps, and adds to the same run. Of several processes
    one shows the curve.

    Args:
        kinds: of `TRACKERS`; none for nothing.
        folder: of the training; gets `tensorboard/`, `wandb/` and the id of W&B's run.
        config: settings, shown beside the curve. Those whose names or values look like secrets are masked.
        name: of the run.

    Raises:
        UsageError: there is no such kind, its package is missing, or W&B refuses to begin.
    """
    check_trackers(kinds)
    shown = _without_secrets(config)
    opened = _Trackers()
    try:
        for kind in dict.fromkeys(kinds):
            opened.trackers.append(TRACKERS[kind](folder, shown, name))
    except BaseException:
        opened.close()
        raise
    return opened


class _Trackers:
    """Several as one."""

    def __init__(self) -> None:
        self.trackers: list[Tracker] = []

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(step, values)

    def close(self) -> None:
        while self.trackers:
            self.trackers.pop().close()


class TensorBoard:
    """Event files in `tensorboard/NAME` of the folder, for `tensorboard --logdir`.

    Args:
        folder: of the training.
        config: without secrets.
        name: of the run; what a file's name should not have becomes `-`.

    Raises:
        UsageError: the package is missing.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], name: str):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "showing the curve in TensorBoard needs the package `tensorboard`.", "pip install tensorboard"
            ) from error
        self._make, self._writer = SummaryWriter, None
        self._folder, self._config = folder / "tensorboard" / (re.sub(r"[^\w-]+", "-", name) or "run"), config

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write them; files reach the disk within half a minute."""
        writer = self._writer
        if writer is None:
            writer = self._writer = self._make(str(self._folder), purge_step=step, flush_secs=30)
            lines = [f"    {key}: {value}" for key, value in _flat(self._config)]
            writer.add_text("settings", "\n".join(lines), step)
        for key, value in _flat(values):
            writer.add_scalar(key, float(value), step)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """A run of W&B that goes on under the id kept in the folder.

    `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_ENTITY` and W&B's other variables count as ever; the project is `lapcli` where
    none is set. Neither code, command line, git remote nor what is printed is sent. Runs made offline carry the same id
    and are sent with `wandb sync`.

    Args:
        folder: of the training.
        config: without secrets.
        name: of the run.

    Raises:
        UsageError: the package is missing, or W&B refuses to begin (no login, no network).
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], name: str):
        try:
            import wandb  # pyright: ignore[reportMissingImports] -- optional
        except ImportError as error:
            raise UsageError(
                "showing the curve in Weights & Biases needs the package `wandb`.", "pip install wandb"
            ) from error
        try:
            self._run: Any = wandb.init(
                id=_kept_id(folder / WANDB_ID),
                resume="allow",
                name=name,
                project=os.environ.get("WANDB_PROJECT") or "lapcli",
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(save_code=False, disable_git=True, x_disable_meta=True, console="off"),
            )
        except wandb.Error as error:
            raise UsageError(
                f"Weights & Biases refuses to begin: {error}", "log in with `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand them to W&B, which sends them in the background."""
        self._run.log({key: float(value) for key, value in _flat(values)}, step=step)

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()


TRACKERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""What can show a curve, by the name of its package."""


def _kept_id(path: Path) -> str:
    """The id in a file, made where there is none."""
    kept = path.read_text().strip() if path.is_file() else ""
    if not kept:
        kept = secrets.token_hex(8)
        with atomic_file(path) as temporary:
            temporary.write_text(kept + "\n")
    return kept


def _flat(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{group}{key}/")
        else:
            yield f"{group}{key}", value


def _without_secrets(value: Any, name: str = "") -> Any:
    if _SECRET_NAME.search(name):
        return _HIDDEN
    if isinstance(value, Mapping):
        return {key: _without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(inner) for inner in value]
    return _HIDDEN if isinstance(value, str) and _SECRET_VALUE.search(value) else value
