"""The run directory: one chain of artifacts, one process at a time."""

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lapcli.artifacts.atomic import atomic_file
from lapcli.errors import ArtifactError

RECOVERY_FILE = "recovery.json"
"""What came of a recovery, in its folder."""

CURVE_FILE = "curve.jsonl"
"""Its training's curve, there too."""

TRAINING_FILE = "training.json"
"""What came of a training of a whole model, in its folder."""

ANALYSIS_FILE = "analysis.safetensors"
"""What `lapcli analyze` found, in its folder."""


@dataclass(frozen=True)
class RunDirectory:
    """Where one chain finds its inputs and leaves its outputs.

    Attributes:
        path: the directory; it is made when something is first written.
    """

    path: Path

    @property
    def calibration(self) -> Path:
        """The calibration artifact."""
        return self.path / "calibration.safetensors"

    @property
    def selection(self) -> Path:
        """The selection artifact."""
        return self.path / "selection.safetensors"

    @property
    def sliced(self) -> Path:
        """The sliced model's directory."""
        return self.path / "sliced"

    @property
    def recovered(self) -> Path:
        """The recovered model's directory."""
        return self.path / "recovered"

    @property
    def recovery(self) -> Path:
        """What recovery keeps beside the model: checkpoints, curve, adapter, and what came of it."""
        return self.path / "recovery"

    @property
    def control(self) -> Path:
        """The directory of the unpruned model that got the same training."""
        return self.path / "control"

    @property
    def control_recovery(self) -> Path:
        """As `recovery`, of the control."""
        return self.path / "recovery-control"

    @property
    def trained(self) -> Path:
        """The directory of a model that was trained from a recipe."""
        return self.path / "trained"

    @property
    def training(self) -> Path:
        """What that training keeps beside it: checkpoints, curve, and what came of it."""
        return self.path / "training"

    @property
    def analysis(self) -> Path:
        """What `lapcli analyze` writes of the run: its artifact, tables and pictures."""
        return self.path / "analysis"

    @property
    def evaluation(self) -> Path:
        """The evaluation's JSON document."""
        return self.path / "evaluation.json"

    @property
    def record(self) -> Path:
        """`run.json`: the base model and the commands so far."""
        return self.path / "run.json"

    def read_record(self) -> dict[str, Any] | None:
        """The content of `run.json`, or `None` where there is no run.

        Raises:
            ArtifactError: it is there, but no JSON.
        """
        hint = "delete it; the artifacts beside it stay valid"
        try:
            record = json.loads(self.record.read_text())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArtifactError(f"{self.path} is no run directory: {error.strerror}", "name another") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{self.record} is no JSON: {error}", hint) from error
        if not isinstance(record, dict) or "model" not in record or "commands" not in record:
            raise ArtifactError(f"{self.record} is no record of a run", hint)
        return cast(dict[str, Any], record)

    def note(self, model: dict[str, Any], command: str, result: dict[str, Any]) -> None:
        """Add a finished command to `run.json`; the same command with the same result is noted once."""
        before = self.read_record()
        record: dict[str, Any] = {"commands": [], **(before or {}), "model": model}
        entry = {"command": command, **result}
        if entry not in record["commands"]:
            record["commands"] = [*record["commands"], entry]
        if record == before:
            return
        with atomic_file(self.record) as temporary:
            temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    @contextmanager
    def lock(self) -> Generator[None]:
        """Hold the directory for this process; the kernel lets go of it when the process ends, however it ends.

        Raises:
            ArtifactError: another process holds it (its number is named), or the place cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = (self.path / ".lock").open("a+")
        except OSError as error:
            raise ArtifactError(
                f"the directory {self.path} cannot be written: {error.strerror}", "name another"
            ) from error
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                handle.seek(0)
                holder = handle.read().strip() or "unknown"
                raise ArtifactError(
                    f"another lapcli (process {holder}) is at work in {self.path}",
                    "wait for it, or give this command a directory of its own",
                ) from error
            # Who holds it is for people to know; on a full disk nobody will, and the lock holds all the same.
            with suppress(OSError):
                handle.truncate(0)
                os.write(handle.fileno(), str(os.getpid()).encode())
            try:
                yield
            finally:
                self._leave()

    def _leave(self) -> None:
        """Remove a directory in which nothing was left, so that a command that was refused leaves no trace."""
        if [file.name for file in self.path.iterdir()] == [".lock"]:
            with suppress(OSError):
                (self.path / ".lock").unlink()
                self.path.rmdir()
