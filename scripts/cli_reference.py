"""Write docs/cli-reference.md from the commands themselves; with --check, fail when it is stale.

python scripts/cli_reference.py [--check]
"""

import sys
from pathlib import Path
from typing import Any

import typer.main

from lapcli.cli.app import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli-reference.md"
_EXIT_CODES = (
    "Exit codes: 0 done, 1 a failure with a message, 2 usage, 3 the result is there but a check that was asked for "
    "does not hold, 130 interrupted.\nProgress, tables and messages go to stderr; with `--json` the result goes to "
    "stdout, alone, and not into tables. `--quiet` silences progress and notices, with `--json` and without."
)


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    default = parameter.default
    shown = "" if default in (None, False, "") or callable(default) else f" Default: `{default}`."
    text = (parameter.help or "").replace("|", "\\|")
    if shown and "Default:" in text:
        shown = ""
    return f"| {names} | {text}{shown} |"


def _command(name: str, command: Any) -> list[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    shown = " ".join(
        (argument.metavar or argument.name.upper()) if argument.required else f"[{argument.name.upper()}]"
        for argument in arguments
    )
    lines = [f"## `{f'lapcli {name} {shown}'.strip()}`", ""]
    lines += [command.help or "", ""]
    rows = [
        f"| `{argument.name.upper()}` | {(argument.help or '').replace('|', chr(92) + '|')} |" for argument in arguments
    ]
    rows += [_option(option) for option in options if "--help" not in option.opts]
    return [*lines, "| | |", "| --- | --- |", *rows, ""]


def reference() -> str:
    """The page."""
    group: Any = typer.main.get_command(app)
    lines = ["# Command line", "", "Made by `scripts/cli_reference.py`; do not edit.", "", _EXIT_CODES, ""]
    for name, command in group.commands.items():
        lines += _command(name, command)
    return "\n".join(lines)


def main() -> None:
    """Write or check."""
    if "--check" not in sys.argv:
        PAGE.write_text(reference())
    elif PAGE.read_text() != reference():
        sys.exit(f"{PAGE} is stale: run python scripts/cli_reference.py")


if __name__ == "__main__":
    main()
