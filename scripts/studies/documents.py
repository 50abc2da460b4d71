"""JSON files that studies read, whole or by an error that says what is wrong."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lapcli.errors import ArtifactError


def read_object(path: Path, names: Sequence[str] = (), hint: str | None = None) -> dict[str, Any]:
    """The object that a file holds.

    Args:
        path: of the file.
        names: that must be in it.
        hint: how to make such a file.

    Raises:
        ArtifactError: it is missing, no JSON, no object, or lacks a name.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}", hint) from error
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged or no JSON: {error}", hint) from error
    missing = [name for name in names if not isinstance(found, dict) or name not in found]
    if missing or not isinstance(found, dict):
        raise ArtifactError(f"{path} has no {missing[0]}" if missing else f"{path} holds no object", hint)
    return found
