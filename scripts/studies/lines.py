"""Results as JSON lines: one for each finished piece of work, so that what different days made adds up."""

import fcntl
import json
import os
import platform
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lapcli.errors import DataError

Line = dict[str, Any]
_NAMED = 4
"""Missing fields and damaged lines that are named; more are counted."""


class _Fault(NamedTuple):
    """What is wrong with a line: its number, from 1, and what it is; whether it is an end cut off in writing."""

    number: int
    what: str
    cut: bool = False


@dataclass(frozen=True)
class Lines:
    """What the lines of a study are of.

    Attributes:
        needs: fields that a line must have, by its kind.
        made_by: the command that writes such lines.
        unsaid: the kind of a line that does not say its own.
    """

    needs: Mapping[str, Collection[str]]
    made_by: str
    unsaid: str | None = None

    def kind_of(self, line: Line) -> Any:
        """What a line is of."""
        return line.get("kind", self.unsaid)

    def read(self, files: Iterable[Path], kind: str | None = None) -> list[Line]:
        """All lines of files, or those of one kind, for tables and pictures, which must not lose one.

        An end that was cut off while it was written is no line yet: it is named on stderr.

        Args:
            files: that hold lines of this study and nothing else.
            kind: which; `None` for all.

        Raises:
            DataError: a file is missing, or a line is damaged or none of this study.
        """
        found: list[Line] = []
        for path in files:
            lines, faults = self._parsed(path)
            damaged = [fault for fault in faults if not fault.cut]
            if damaged:
                raise DataError(
                    f"{path}, {_listed(damaged)}",
                    f"lines that {self.made_by} writes are wanted: mend or remove that line, or name another file",
                )
            _warn(path, faults, "it is left out")
            found += lines
        return self._of(found, kind)

    def there(self, output: Path, known: Sequence[Path] = (), kind: str | None = None) -> list[Line]:
        """What was done already, for a command that adds lines; what is damaged is named on stderr, and done again.

        Args:
            output: the file that lines are added to, which need not be there yet.
            known: more files, which must be there.
            kind: which lines; `None` for all.

        Raises:
            DataError: a file that must be there is missing, or cannot be read.
        """
        found: list[Line] = []
        for path in (*([output] if output.exists() else []), *known):
            lines, faults = self._parsed(path)
            _warn(path, faults, "what it was of counts as not done")
            found += lines
        return self._of(found, kind)

    def _of(self, lines: Iterable[Line], kind: str | None) -> list[Line]:
        return [line for line in lines if kind in (None, self.kind_of(line))]

    def _parsed(self, path: Path) -> tuple[list[Line], list[_Fault]]:
        """The lines of a file, and what is wrong with others."""
        try:
            rows = path.read_bytes().split(b"\n")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", f"make it with: {self.made_by}") from error
        found: list[Line] = []
        faults: list[_Fault] = []
        for number, row in enumerate(rows, 1):
            if not row.strip():
                continue
            try:
                line = json.loads(row)
            except ValueError:
                # Whoever writes a line ends it: without an end it was cut off.
                cut = number == len(rows)
                faults.append(_Fault(number, "cut off while it was written" if cut else "no JSON", cut))
                continue
            if what := self._wrong(line):
                faults.append(_Fault(number, what))
            else:
                found.append(line)
        return found, faults

    def _wrong(self, line: Any) -> str | None:
        """What keeps a line from being one of this study."""
        if not isinstance(line, dict):
            return f"a {type(line).__name__}, not an object"
        kind = self.kind_of(line)
        if not isinstance(kind, str) or kind not in self.needs:
            said = "says no kind" if kind is None else f"is of kind {kind!r}"
            return f"{said}, not {' or '.join(map(repr, self.needs))}"
        missing = [name for name in self.needs[kind] if name not in line]
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            return f"lacks {', '.join(missing[:_NAMED])}{more}"
        return None


def add_line(path: Path, line: Line) -> None:
    """Add a line to a file, in the place of an end that a process which was killed left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        # What another process is writing is no end that was cut off.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        whole, _, rest = file.read().rpartition(b"\n")
        if rest and not _is_json(rest):
            file.truncate(len(whole) + 1 if whole else 0)
            rest = b""
        file.write((b"\n" if rest else b"") + json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def machine() -> str:
    """Device, torch and Python."""
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _listed(faults: Sequence[_Fault]) -> str:
    """The first of some faults, and where others are."""
    first, others = faults[0], [str(fault.number) for fault in faults[1:]]
    if not others:
        return f"line {first.number}: {first.what}"
    shown = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
    return f"line {first.number}: {first.what} (and so on: line {shown})"


def _warn(path: Path, faults: Sequence[_Fault], so: str) -> None:
    if faults:
        sys.stderr.write(f"warning: {path}, {_listed(faults)}; {so}\n")
