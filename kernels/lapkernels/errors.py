"""What an operator raises when it cannot do what it was asked to."""


class InvalidInput(ValueError):
    """A tensor or setting that breaks the operator's contract, found before any arithmetic."""


class KernelUnavailable(RuntimeError):
    """An implementation that was asked for by name, and cannot run here or is known to be wrong here."""
