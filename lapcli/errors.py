"""The errors a user can mend: what is wrong, what was wanted, and the command that goes on from there.

`lapcli.cli.app` turns a `LapcliError` into one screen of text and its exit code; everything else keeps its
traceback, because it is a defect of ours.
"""


class LapcliError(Exception):
    """A failure that the user can mend.

    Args:
        message: the thing, the value found and the value wanted.
        hint: what to do next, preferably a command line.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"


class UsageError(LapcliError):
    """Arguments that contradict each other or cannot be met, found before any work."""

    exit_code = 2


class CheckFailed(LapcliError):
    """The result is there, but a check that the user asked for does not hold."""

    exit_code = 3


class ArtifactError(LapcliError):
    """An artifact that is missing, truncated, foreign, stale or from a newer schema."""


class DataError(LapcliError):
    """A text source that cannot be read, or holds too little."""


class FamilyError(LapcliError):
    """A model whose family is unknown, or whose checkpoint does not say what its family promises."""


class ModelError(LapcliError):
    """A model that cannot be found, loaded or run here."""


class RecipeError(LapcliError):
    """A recipe or a setting that is not valid."""
