"""API keys: from the environment or a file, compared in constant time, never shown."""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from lapcli.errors import UsageError

VARIABLE = "LAPCLI_API_KEY"
"""The environment variable that holds a key."""
_SHORTEST = 8


class ApiKeys:
    """The keys of a server.

    Args:
        keys: each; none lets everybody in.

    Raises:
        UsageError: one is too short, or has a character that no header carries.
    """

    def __init__(self, keys: list[str]):
        for number, key in enumerate(keys, 1):
            if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError(
                    f"API key {number} of {len(keys)} has fewer than {_SHORTEST} characters, or others than printable "
                    "ASCII without spaces",
                    "make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
                )
        # Of one length, so that a comparison tells nothing of a key's.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def client(self, authorization: str | None) -> str | None:
        """Whose request it is.

        Args:
            authorization: the header of that name, if there is one.

        Returns:
            `key-1` for the first key, and so on; `None` where none fits.
        """
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode(errors="replace")).digest()
        # All are compared, whichever fits.
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        return f"key-{fits.index(True) + 1}" if any(fits) and scheme.lower() == "bearer" else None


def read_keys(environment: Mapping[str, str], file: Path | None) -> ApiKeys:
    """The keys of `LAPCLI_API_KEY` and of a file, one a line; empty lines and lines with `#` are passed over.

    Raises:
        UsageError: the file cannot be read or holds none, or a key is none.
    """
    keys = [environment[VARIABLE]] if environment.get(VARIABLE) else []
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UsageError(f"--api-key-file {file}: {why}", "name a file with one key a line") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise UsageError(f"--api-key-file {file} holds no key", "write one a line")
        keys += found
    return ApiKeys(keys)
