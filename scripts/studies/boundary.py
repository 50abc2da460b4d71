"""The one boundary where what goes wrong in a study becomes text and an exit code, as `lapcli.cli.app` has it."""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from lapcli.errors import LapcliError, UsageError

_OPTION = re.compile(r"^ +(?:-\w, )?(--[a-z][a-z0-9-]*)", re.MULTILINE)
"""Where the help of a command lists one."""


def answer(
    parser: argparse.ArgumentParser,
    commands: Any | None,
    do: Callable[[argparse.Namespace], object],
    arguments: Iterable[str] | None = None,
) -> None:
    """Read the arguments and run; errors that a user can mend are one message on stderr, others keep their traceback.

    Ends the process with code 0 or 1 where `do` returns whether all was finished, by code 2 for wrong arguments.

    Args:
        parser: of the script.
        commands: its subparsers, which write the name of one to `command`; `None` where it has none.
        do: runs a command; returns whether all was finished, or `None`.
        arguments: of the command line; those of the process where none are named.
    """
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        finished = do(options)
    except LapcliError as error:
        mine = parser if commands is None else commands.choices[options.command]
        _end(error.message, _own_hint(error.hint, mine), error.exit_code)
    except OSError as error:
        # Without a file it is no place that the user named.
        if error.filename is None:
            raise
        _end(f"{error.filename}: {error.strerror}", "name another place")
    if finished is not None:
        sys.exit(0 if finished else 1)


def data_files(files: list[Any]) -> tuple[list[Any], Any]:
    """The files of lines that `write` was given, and the page that may come last, which ends in `.md`.

    Raises:
        UsageError: there is a page alone.
    """
    page = files[-1] if files[-1].suffix == ".md" else None
    lines = files[:-1] if page is not None else files
    if not lines:
        raise UsageError(f"there is nothing to put in {page}", f"name the JSON lines before {page}")
    return lines, page


def _own_hint(hint: str | None, parser: argparse.ArgumentParser) -> str | None:
    """A hint that says so where it names options of lapcli's that the command of the study does not have."""
    if hint is None:
        return None
    from lapcli.cli.app import command_options
    from lapcli.cli.hints import foreign_options

    # As one of lapcli's commands, under a name that no hint can hold.
    mine = parser.prog
    foreign = foreign_options(hint, mine, {**command_options(), mine: set(_OPTION.findall(parser.format_help()))})
    return f"{hint} ({mine} has no {' and no '.join(foreign)})" if foreign else hint


def _end(message: str, hint: str | None, code: int = 1) -> NoReturn:
    text = f"error: {message}\n{hint}" if hint else f"error: {message}"
    if code == 1:
        # Python writes it to stderr, and its code is 1.
        raise SystemExit(text)
    sys.stderr.write(f"{text}\n")
    raise SystemExit(code)
