"""Files and directories that appear under their final name whole, or not at all."""

import errno
import os
import platform
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from lapcli.errors import ArtifactError


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mine() -> str:
    """Ends the temporary names of this process: its number, and whose number that is."""
    return f"{os.getpid()}@{_host()}"


def _host() -> str:
    return re.sub(r"[^\w-]+", "_", platform.node()) or "here"


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial-{_mine()}")


def _clear_leftovers(path: Path) -> None:
    """Remove what processes of this machine that were killed left half-written beside `path`."""
    kinds = ("partial", "replaced") if path.exists() else ("partial",)
    for kind in kinds:
        for left in path.parent.glob(f".{escape(path.name)}.{kind}-*@{escape(_host())}"):
            number = left.name.rpartition(f".{kind}-")[2].partition("@")[0]
            if not number.isdigit() or _alive(int(number)):
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that say that there is no room."""


def _unwritable(path: Path, error: OSError) -> ArtifactError:
    said, hint = f"{path} could not be written: {error.strerror or error}", "name another place"
    if error.errno in FULL:
        with suppress(OSError):
            said += f" ({shutil.disk_usage(path.parent).free / 2**20:.0f} MiB free)"
        hint = f"free some room, or {hint}"
    return ArtifactError(f"{said}; nothing was left behind", hint)


@contextmanager
def atomic_file(path: Path) -> Generator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and takes the final name.

    Raises:
        ArtifactError: the disk is full or the place cannot be written; the temporary file is gone by then.
    """
    temporary = _temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(path)
        # safetensors puts a private file (mode 0600) in place of this one, whose mode is the one that umask gives.
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
        _fsync_directory(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        # Where its folder is none, there is nothing to remove, and the error that counts is on its way.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Generator[Path]:
    """Yield a temporary directory beside `path`; on success its files are synced and it takes the final name.

    Args:
        path: the final name.
        replace: whether a directory that is there already gives way (after the new one is whole).

    Raises:
        ArtifactError: `path` exists and `replace` is false, or the disk is full.
    """
    if path.exists() and not replace:
        raise ArtifactError(
            f"{path} exists already",
            "remove it, name another, or pass --overwrite",
        )
    temporary = _temporary_name(path)
    old = path.with_name(f".{path.name}.replaced-{_mine()}")
    try:
        _clear_leftovers(path)
        temporary.mkdir(parents=True)
        yield temporary
        for written in temporary.rglob("*"):
            if written.is_file():
                with written.open("rb") as handle:
                    os.fsync(handle.fileno())
        _fsync_directory(temporary)
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        _fsync_directory(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
