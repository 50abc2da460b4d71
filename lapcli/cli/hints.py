"""What a command may suggest: options that it has, or those of commands that it names."""

import re
from collections.abc import Collection, Mapping

_PARTS = re.compile(r"lapcli (?P<command>[a-z]+)|(?<![\w-])(?P<option>--[a-z][a-z0-9-]*)|(?P<end>[;`)]|, or |[.] )")
"""The names of commands and options, and where what is said of a command ends."""


def foreign_options(text: str, command: str, known: Mapping[str, Collection[str]]) -> list[str]:
    """Options that a text suggests to whoever typed a command, and that it does not have.

    What stands behind `lapcli OTHER`, up to the end of the clause, is for that command. What no command has is for
    other programs.

    Args:
        text: a hint.
        command: that failed.
        known: the options of each command.
    """
    options = set[str]().union(*known.values())
    found: list[str] = []
    meant = command
    for part in _PARTS.finditer(text):
        if part["command"] in known:
            meant = part["command"]
        elif part["end"]:
            meant = command
        elif part["option"] in options.difference(known[meant], found):
            found.append(part["option"])
    return found


def own_hint(hint: str | None, command: str, known: Mapping[str, Collection[str]]) -> str | None:
    """A hint that says so where it names options of other commands: what many commands share suggests for any."""
    foreign = [] if hint is None or command not in known else foreign_options(hint, command, known)
    if not foreign:
        return hint
    names = foreign[0] if len(foreign) == 1 else f"{', '.join(foreign[:-1])} or {foreign[-1]}"
    return f"{hint} (lapcli {command} has no {names})"
