"""`sweep.json`: the cells of a sweep, their state, scores and failures; written whole after every change."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lapcli.artifacts import RunDirectory, atomic_file
from lapcli.errors import ArtifactError

KIND = "sweep"
SCHEMA = 1
FILE = "sweep.json"


@dataclass(frozen=True)
class SweepDirectory:
    """Where a sweep lies.

    Attributes:
        path: the directory.
    """

    path: Path

    @property
    def record(self) -> Path:
        """`sweep.json`."""
        return self.path / FILE

    @property
    def base(self) -> RunDirectory:
        """Where the unpruned model's evaluation lies."""
        return RunDirectory(self.path / "base")

    def cell(self, name: str) -> RunDirectory:
        """The run directory of a cell."""
        return RunDirectory(self.path / "cells" / name)

    def calibration(self, name: str) -> RunDirectory:
        """The run directory of a calibration."""
        return RunDirectory(self.path / "calibrations" / name)

    @property
    def logs(self) -> Path:
        """What the workers' libraries print."""
        return self.path / "logs"


@dataclass
class SweepRecord:
    """What is known of a sweep; the content of `sweep.json`.

    Attributes:
        model: name, revision and digest of the base model.
        evaluation: tasks and limit.
        sessions: a dict for each time that it was worked on: command, begun, ended, versions, machine.
        base: state of the base's evaluation, its scores.
        calibrations: by name: settings, state (waiting, running, done or failed), tokens, seconds.
        cells: by name: axes, settings, state, sizes, scores, seconds, failure.
    """

    model: dict[str, Any]
    evaluation: dict[str, Any] | None = None
    sessions: list[dict[str, Any]] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)
    calibrations: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The record, JSON-able."""
        return {"kind": KIND, "schema": SCHEMA, **vars(self)}

    def write(self, directory: SweepDirectory) -> None:
        """Write the record, whole or not at all."""
        with atomic_file(directory.record) as temporary:
            temporary.write_text(json.dumps(self.document(), indent=1, ensure_ascii=False) + "\n")

    def failed(self) -> dict[str, dict[str, Any]]:
        """What failed, by name: the base and calibrations too."""
        base = {"base": self.base} if self.base.get("state") == "failed" else {}
        calibrations = {f"calibration {name}": entry for name, entry in self.calibrations.items()}
        every = {**base, **calibrations, **self.cells}
        return {name: entry for name, entry in every.items() if entry.get("state") == "failed"}


def read_sweep(directory: SweepDirectory) -> SweepRecord | None:
    """The record that is there, or `None`.

    Raises:
        ArtifactError: it is damaged, or of another schema.
    """
    path = directory.record
    hint = f"delete {path}; the cells beside it stay valid, and the same sweep finds them again"
    try:
        document = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} is no JSON: {error}", hint) from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ArtifactError(f"{path} is no record of a sweep", hint)
    if document.get("schema") != SCHEMA:
        raise ArtifactError(f"{path} has schema {document.get('schema')!r}; this lapcli reads {SCHEMA}", hint)
    fields = {name: value for name, value in document.items() if name not in ("kind", "schema")}
    try:
        record = SweepRecord(**fields)
        missing = [
            name
            for name, entry in (record.cells | record.calibrations).items()
            if not {"state", "settings"} <= entry.keys()
        ]
        if missing:
            raise KeyError(missing[0])
    except (TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged: {error!r}", hint) from error
    return record
