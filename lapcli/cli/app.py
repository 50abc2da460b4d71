"""The application, and the one boundary where errors become text and exit codes."""

import os
import signal
import sys
from types import FrameType

import typer

from lapcli.cli import bench, calibrate, eval_, inspect_, list_, prune, run, select_, slice_
from lapcli.errors import LapcliError

app = typer.Typer(
    name="lapcli",
    help="Cut the key/query channels that a recurrent-state language model can do without, and prove what it cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (prune, calibrate, select_, slice_, eval_, run, inspect_, list_, bench):
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


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise _Interrupted


def main() -> None:
    """Run the command line; exit 0 done, 1 failed, 2 usage, 3 a check does not hold, 130 interrupted."""
    # Before torch starts its threads: idle ones that spin slow small LAPACK calls a hundredfold on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except LapcliError as error:
        from lapcli.cli.display import failure

        failure(error)
        sys.exit(error.exit_code)
    except _Interrupted:
        from lapcli.cli.display import closing

        closing("interrupted; every finished artifact is whole, and the same command goes on from there")
        sys.exit(130)
