"""How library code tells its caller what is going on, without printing.

A stage takes a `Reporter`; the command line passes one that draws (`lapcli.cli.display`), a notebook or a test
passes nothing and gets `SilentReporter`.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol


class Task(Protocol):
    """One piece of work under way."""

    def advance(self, amount: float = 1) -> None:
        """Say that `amount` more units are done."""
        ...

    def note(self, text: str) -> None:
        """Say in a few words where the work stands; a later note takes the place of an earlier one."""
        ...


class Reporter(Protocol):
    """Where progress and remarks go."""

    @contextmanager
    def task(self, description: str, total: float | None = None, unit: str = "") -> Generator[Task]:
        """Announce work of `total` units (`None`: unknown) and yield the handle to advance it."""
        ...

    def notice(self, text: str) -> None:
        """Say something that the user should know but need not act on."""
        ...

    def warn(self, text: str) -> None:
        """Say something that the user should look at."""
        ...


class _SilentTask:
    def advance(self, amount: float = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class SilentReporter:
    """Says nothing, and keeps the remarks for whoever looks.

    Attributes:
        notices: the notices so far.
        warnings: the warnings so far.
    """

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.warnings: list[str] = []

    @contextmanager
    def task(self, description: str, total: float | None = None, unit: str = "") -> Generator[Task]:
        """Yield a handle that ignores what it is told."""
        yield _SilentTask()

    def notice(self, text: str) -> None:
        """Keep the notice."""
        self.notices.append(text)

    def warn(self, text: str) -> None:
        """Keep the warning."""
        self.warnings.append(text)
