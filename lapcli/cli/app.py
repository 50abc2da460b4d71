"""The application, and the one boundary where errors become text and exit codes."""

import os
import signal
import sys
from types import FrameType
from typing import Any

import typer

from lapcli.cli import (
    analyze,
    bench,
    calibrate,
    convert,
    doctor,
    eval_,
    generate,
    inspect_,
    list_,
    plan,
    prune,
    recover,
    replay,
    report,
    run,
    select_,
    serve,
    slice_,
    sweep,
    train,
)
from lapcli.cli.hints import own_hint
from lapcli.errors import LapcliError

app = typer.Typer(
    name="lapcli",
    help="Cut the key/query channels that a recurrent-state language model can do without, and prove what it cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    prune,
    plan,
    calibrate,
    select_,
    slice_,
    recover,
    convert,
    eval_,
    generate,
    serve,
    replay,
    analyze,
    run,
    train,
    sweep,
    report,
    inspect_,
    list_,
    bench,
    doctor,
):
    module.register(app)


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    """Print the version when asked."""
    if show:
        from lapcli import __version__

        sys.stdout.write(f"lapcli {__version__}\n")
        raise typer.Exit


class _Interrupted(BaseException):
    """Ctrl-C or SIGTERM; no KeyboardInterrupt, which the command parser would answer by an exit code of its own."""


class _Interrupts:
    """Raises `_Interrupted` at a signal, and remembers it: a library's import may catch it and raise another error."""

    def __init__(self) -> None:
        self.seen = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._raise)

    def ignore(self) -> None:
        """Take no more of them: what is left is to say that there was one, and to end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _raise(self, _signal: int, _frame: FrameType | None) -> None:
        self.seen = True
        raise _Interrupted


def _without_room(error: OSError) -> Exception:
    """What a person should hear of a write that found no room, to stdout mostly: artifacts have errors of their own."""
    from lapcli.artifacts.atomic import FULL

    if error.errno not in FULL:
        return error
    # Python writes what is left once more when it ends, and would complain again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return LapcliError(f"{error.filename or 'the output'} could not be written: {error.strerror}", "free some room")


_GOES_ON = "every finished artifact is whole, and the same command goes on from there"
_KEPT = {
    "bench": "what was measured before is in the file of --output, if one was named",
    "replay": "nothing of the replay is kept, and the same command begins anew, but for step costs that were measured",
    "serve": "what was under way has ended",
    **dict.fromkeys(("doctor", "generate", "inspect", "list", "plan"), "nothing is kept"),
}
"""What an interruption leaves, by command, where it is not the usual."""


def _typed_command() -> str:
    return next((word for word in sys.argv[1:] if not word.startswith("-")), "")


def command_options() -> dict[str, set[str]]:
    """The options of each command."""
    commands: Any = getattr(typer.main.get_command(app), "commands", {})
    return {
        name: {"--help"}.union(*([*parameter.opts, *parameter.secondary_opts] for parameter in command.params))
        for name, command in commands.items()
    }


def main() -> None:
    """Run the command line; exit 0 done, 1 failed, 2 usage, 3 a check does not hold, 130 interrupted."""
    # Before torch starts its threads: idle ones that spin slow small LAPACK calls a hundredfold on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    interrupts = _Interrupts()
    try:
        app()
    except (Exception, _Interrupted) as error:
        if interrupts.seen:
            interrupts.ignore()
        from lapcli.cli import display

        if interrupts.seen:
            display.closing(f"interrupted; {_KEPT.get(_typed_command(), _GOES_ON)}")
            sys.exit(130)
        if isinstance(error, OSError):
            error = _without_room(error)
        if isinstance(error, LapcliError):
            error.hint = own_hint(error.hint, _typed_command(), command_options())
            display.failure(error)
            sys.exit(error.exit_code)
        raise
