"""What lies where a command is to write: whoever is told to make room should know what it would cost."""

from pathlib import Path

from lapcli.artifacts.run import CURVE_FILE, RECOVERY_FILE, TRAINING_FILE, RunDirectory
from lapcli.artifacts.store import read_artifact, read_document
from lapcli.errors import ArtifactError

_LINEAGE = "lapcli.json"
_MODELS = {
    "slicing": "a pruned model",
    "recovery": "a recovered model",
    "training": "a model that was trained",
    "conversion": "a model that was converted to qdelta",
    "linearising": "a model of a conversion to dsla",
}
"""What a model directory holds, by the stage that its lineage names."""


def is_conversion(path: Path) -> bool:
    """Whether a directory is one of `lapcli convert --to dsla` that has measured or converted a layer."""
    if (path / "config.json").exists():
        return False
    return any(path.glob("prefixes/*.safetensors")) or (
        (path / "base" / "config.json").is_file() and (path / "sensitivity.safetensors").is_file()
    )


def made_there(path: Path) -> str | None:
    """What of lapcli's a file or directory is, in words; `None` where it is nothing of lapcli's, or not known."""
    if path.is_file():
        try:
            return f"an artifact of lapcli's ({read_artifact(path).lineage.kind})"
        except ArtifactError:
            return None
    if is_conversion(path):
        layers = len(list(path.glob("prefixes/*.safetensors")))
        return f"a whole conversion to dsla, with {layers} converted layers"
    if (path / _LINEAGE).is_file():
        try:
            lineage = read_document(path / _LINEAGE)
        except ArtifactError:
            return "a model that lapcli made"
        return _MODELS.get(str(lineage.settings.get("stage")), f"{lineage.kind} that lapcli made")
    if (path / "sweep.json").is_file():
        return "a sweep"
    run = RunDirectory(path)
    if run.record.is_file() or run.calibration.is_file():
        return "a run directory, with all that its commands left"
    if any((path / name).is_file() for name in (RECOVERY_FILE, TRAINING_FILE, CURVE_FILE)):
        return "what a training keeps beside its model"
    return None


def taken(path: Path, mend: str = "name another place") -> ArtifactError:
    """The error for a place that something else would have to leave, which no option makes it do.

    Args:
        path: the place.
        mend: what to do instead.
    """
    made = made_there(path)
    if made is None:
        return ArtifactError(f"{path} is there, but lapcli did not write it", f"remove it, or {mend}")
    return ArtifactError(f"{path} is there: {made}; nothing else is written in its place", mend)
