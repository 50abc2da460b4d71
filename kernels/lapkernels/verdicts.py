"""Implementations that were measured to be wrong on this machine, remembered from one process to the next.

Whoever compares implementations with the truth (`lapcli doctor`) writes here what he found; the operators' choice reads
it: an implementation that was found wrong is an error when it is asked for by name, and `auto` takes another. A verdict
holds for one device, driver and set of versions, so an update of any of them ends it.
"""

import importlib.metadata
import json
import os
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lapkernels._triton import is_interpreted

FILE_VARIABLE = "LAPKERNELS_VERDICTS"
"""Names the file, where it is not to lie in the user's cache folder."""

_SCHEMA = 1
_PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core", "tilelang", "flash-qla")
_ignored = False


@dataclass(frozen=True)
class Verdict:
    """An implementation that is wrong here.

    Attributes:
        operator: such as `delta_rule`.
        impl: the implementation, as its operator names it.
        backward: whether its gradients are wrong, and its results right.
        variant: the operator's variant that was tried, such as `gated`.
        finding: how wrong, in a few words.
        date: of the measurement, as `2026-11-30`.
    """

    operator: str
    impl: str
    backward: bool
    variant: str
    finding: str
    date: str


def why_wrong(
    operator: str, impl: str, device: torch.device, *, variant: str | None = None, needs_gradient: bool = False
) -> str | None:
    """Why an implementation was found to be wrong on this device, or `None`.

    Args:
        operator: such as `delta_rule`.
        impl: the implementation.
        device: where the tensors lie.
        variant: of the operator; `None` for any, where one kernel computes them all.
        needs_gradient: whether a backward pass will follow; without one, wrong gradients are no matter.
    """
    # Files and versions have no place in a compiled graph.
    if _ignored or torch.compiler.is_compiling():
        return None
    for verdict in remembered(device):
        if (
            (verdict.operator, verdict.impl) == (operator, impl)
            and variant in (None, verdict.variant)
            and (needs_gradient or not verdict.backward)
        ):
            return f"measured here on {verdict.date} and found wrong: {verdict.finding}"
    return None


def remembered(device: torch.device) -> tuple[Verdict, ...]:
    """What was found wrong on a device."""
    return _remembered(os.environ.get(FILE_VARIABLE), os.environ.get("XDG_CACHE_HOME"), fingerprint(device))


def remember(device: torch.device, verdicts: Iterable[Verdict]) -> Path | None:
    """Write what is wrong on a device now, in place of what was before.

    Returns:
        The file, or `None` where nothing is wrong and nothing was.

    Raises:
        OSError: it cannot be written.
    """
    path, found = verdicts_file(), [asdict(verdict) for verdict in verdicts]
    machines = _read(path)
    here = fingerprint(device)
    if machines.get(here, []) == found:
        return path if found else None
    machines[here] = found
    document = {"schema": _SCHEMA, "machines": {name: rows for name, rows in machines.items() if rows}}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(document, file, indent=1)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
    _remembered.cache_clear()
    return path


@contextmanager
def ignored() -> Generator[None]:
    """Let every implementation run that can, to be measured again. Not for several threads."""
    global _ignored
    before, _ignored = _ignored, True
    try:
        yield
    finally:
        _ignored = before


def verdicts_file() -> Path:
    """Where verdicts lie: `$LAPKERNELS_VERDICTS`, else `lapkernels/verdicts.json` in the user's cache folder."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path("~/.cache").expanduser()) / "lapkernels" / "verdicts.json"


def fingerprint(device: torch.device) -> str:
    """What a verdict depends on: the device, and the versions of all that makes or compiles kernels."""
    return _fingerprint(device.type, device.index or 0, is_interpreted())


@cache
def _fingerprint(kind: str, index: int, interpreted: bool) -> str:
    name = torch.cuda.get_device_name(index) if kind == "cuda" and torch.cuda.is_available() else kind
    parts = [name, f"cuda {torch.version.cuda}"]
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join([*parts, "interpreted"] if interpreted else parts)


@cache
def _remembered(_named: str | None, _folder: str | None, here: str) -> tuple[Verdict, ...]:
    """Read once a process and place: the choice of an implementation is made at every call."""
    found: list[Verdict] = []
    for row in _read(verdicts_file()).get(here, []):
        # Another version's fields: a cache that cannot be read says nothing.
        with suppress(TypeError):
            found.append(Verdict(**row))
    return tuple(found)


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        return {}
    machines = document.get("machines")
    return machines if isinstance(machines, dict) else {}
