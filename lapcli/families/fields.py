"""Fields of a `config.json`, read with their types checked: whatever a user's file says, an error names the field."""

import math
from collections.abc import Mapping
from typing import Any

from lapcli.errors import ModelError

_HINT = "put config.json right, or download the model again"
_ABSENT = object()


def bad_field(field: str, found: Any, wanted: str) -> ModelError:
    """The error that names a field, what it holds and what it should."""
    return ModelError(f"config.json has {field} = {found!r}; {wanted} is wanted", _HINT)


def _refused(config: Mapping[str, Any], field: str, wanted: str) -> ModelError:
    if field not in config:
        return ModelError(f"config.json has no {field}; {wanted} is wanted", _HINT)
    return bad_field(field, config[field], wanted)


def positive_integer(config: Mapping[str, Any], field: str) -> int:
    """A count or a width.

    Raises:
        ModelError: it is missing, no integer, or below 1.
    """
    value = config.get(field, _ABSENT)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refused(config, field, "a whole number above 0")
    return value


def optional_integer(config: Mapping[str, Any], field: str, default: int) -> int:
    """A count or a width that may be missing or null, which means `default`.

    Raises:
        ModelError: it is there, and no integer or below 1.
    """
    return default if config.get(field) is None else positive_integer(config, field)


def positive_number(config: Mapping[str, Any], field: str) -> float:
    """A factor.

    Raises:
        ModelError: it is missing, no number, not finite, or not above 0.
    """
    value = config.get(field, _ABSENT)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise _refused(config, field, "a number above 0")
    return value


def optional_fraction(config: Mapping[str, Any], field: str) -> float | None:
    """A number in [0, 1] that may be missing or null.

    Raises:
        ModelError: it is there, and no such number.
    """
    value = config.get(field)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise _refused(config, field, "a number in [0, 1]")
    return value


def switch(config: Mapping[str, Any], field: str, default: bool) -> bool:
    """A truth value that may be missing.

    Raises:
        ModelError: it is there, and neither true nor false.
    """
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise _refused(config, field, "true or false")
    return value
