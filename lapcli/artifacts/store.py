# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# (safetensors ships no types)
"""One artifact: a safetensors file whose header holds one JSON document.

The document says what the file is (`kind`, `schema`), what made it (`lapcli`, `settings`, `seed`), from what
(`model`, `parents`), and what its tensors' axes mean. `docs/artifacts.md` is the reference.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lapcli
from lapcli.artifacts.atomic import atomic_file
from lapcli.artifacts.digest import digest_document
from lapcli.artifacts.header import read_header
from lapcli.errors import ArtifactError

if TYPE_CHECKING:
    import torch

# torch and safetensors are imported where tensors are touched, so that a header can be looked at without them.

SCHEMA = 1
"""The schema version that this lapcli writes, and the newest that it reads."""

_KEY = "lapcli"
_MAKERS = {
    "calibration": "`lapcli calibrate` or `lapcli prune`",
    "selection": "`lapcli select` or `lapcli prune`",
    "analysis": "`lapcli analyze`",
}
"""What writes an artifact, by its kind."""


@dataclass(frozen=True)
class Lineage:
    """What an artifact is and where it comes from.

    Attributes:
        kind: "calibration", "selection", "model", "evaluation".
        model: name, revision and digest of the base model.
        family: the adapter's name.
        settings: every setting the numbers depend on.
        parents: digest of each artifact it was made from, by kind.
        axes: for each tensor name pattern, the names of its axes.
        record: what was found on the way (token counts, corpus digest, bounds); not part of the identity.
    """

    kind: str
    model: dict[str, Any]
    family: str
    settings: dict[str, Any]
    parents: dict[str, str] = field(default_factory=dict[str, str])
    axes: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    record: dict[str, Any] = field(default_factory=dict[str, Any])

    def identity(self) -> str:
        """The digest of what determines the content: kind, model, settings and parents."""
        return digest_document(
            {
                "kind": self.kind,
                "model": self.model.get("digest"),
                "settings": self.settings,
                "parents": self.parents,
            }
        )

    def differences(self, other: "Lineage") -> list[str]:
        """What keeps `other` from standing in for this one, a phrase each (this one's value first)."""
        found: list[str] = []
        if self.kind != other.kind:
            found.append(f"kind: {self.kind} wanted, {other.kind} found")
        if self.model.get("digest") != other.model.get("digest"):
            mine, theirs = (
                f"{lineage.model.get('name')} ({str(lineage.model.get('digest'))[:12]})" for lineage in (self, other)
            )
            found.append(f"model: {mine} wanted, {theirs} found")
        for name, mine_all, theirs_all in (
            ("", self.settings, other.settings),
            ("made from ", self.parents, other.parents),
        ):
            for key in sorted(mine_all.keys() | theirs_all.keys()):
                if mine_all.get(key) != theirs_all.get(key):
                    # What came to the settings later stands there only where it is not the default.
                    unsaid = "none" if name else "the default"
                    mine, theirs = (_short(every[key]) if key in every else unsaid for every in (mine_all, theirs_all))
                    found.append(f"{name}{key}: {mine} wanted, {theirs} found")
        return found


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"


@dataclass(frozen=True)
class Artifact:
    """An artifact on disk: its lineage, and its tensors on demand.

    Attributes:
        path: the file.
        lineage: what it is and where it comes from.
        names: its tensors' names, sorted.
    """

    path: Path
    lineage: Lineage
    names: tuple[str, ...]

    def tensor(self, name: str) -> "torch.Tensor":
        """Read one tensor (CPU), unchecked: only all tensors together have a digest.

        Raises:
            ArtifactError: there is no tensor of that name.
        """
        if name not in self.names:
            raise ArtifactError(f"{self.path} holds no tensor {name!r}; it holds {', '.join(self.names[:6])} …")
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as handle:
            return handle.get_tensor(name)

    def tensors(self) -> "dict[str, torch.Tensor]":
        """Read all tensors (CPU) and check them against the digest that was stored with them.

        Raises:
            ArtifactError: they are not those that were written.
        """
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in self.names}
        wanted = _parse(read_header(self.path).metadata, self.path).get("content")
        found = content_digest(tensors)
        if found != wanted:
            maker = _MAKERS.get(self.lineage.kind, "run the command that wrote it")
            raise ArtifactError(
                f"{self.path} is damaged: its tensors have the digest {found[:12]}, but {str(wanted)[:12]} was stored",
                f"make it again: {maker}, as before, but with --overwrite",
            )
        return tensors


def _document(lineage: Lineage, content: "Mapping[str, torch.Tensor]") -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "lapcli": lapcli.__version__,
        "identity": lineage.identity(),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in content.values()}),
        "content": content_digest(content),
        **asdict(lineage),
    }


def content_digest(tensors: "Mapping[str, torch.Tensor]") -> str:
    """The sha256 of tensors: names, dtypes, shapes and bytes, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        # Viewed as bytes, since numpy has no bfloat16.
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_artifact(path: Path, lineage: Lineage, tensors: "Mapping[str, torch.Tensor]") -> Artifact:
    """Write an artifact under a temporary name, sync it, and give it its final name.

    Tensors are stored contiguous, on their own storage: a view would drag its whole base along.

    Raises:
        ArtifactError: it cannot be written; nothing is left behind then.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    metadata = {_KEY: json.dumps(_document(lineage, stored), ensure_ascii=False, allow_nan=False)}
    with atomic_file(path) as temporary:
        try:
            save_file(stored, temporary, metadata=metadata)
        except SafetensorError as error:
            # Which says it in words alone; the commonest reason is a full disk.
            full = "No space left" in str(error)
            raise ArtifactError(
                f"{path} could not be written: {error}",
                "free some room, or name another place" if full else None,
            ) from error
    return Artifact(path, lineage, tuple(sorted(stored)))


def _lineage(document: Any, path: Path, kind: str | None) -> Lineage:
    if not isinstance(document, dict):
        raise ArtifactError(f"{path} holds no JSON object; it was not written by lapcli")
    schema = document.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise ArtifactError(
            f"{path} has schema {schema} (written by lapcli {document.get('lapcli')}); "
            f"this lapcli {lapcli.__version__} reads up to {SCHEMA}",
            "update lapcli, or make the file again with this version",
        )
    if kind is not None and document.get("kind") != kind:
        raise ArtifactError(f"{path} is a {document.get('kind')}, but a {kind} is wanted here")
    fields = Lineage.__dataclass_fields__
    try:
        lineage = Lineage(**{name: document[name] for name in fields})
    except KeyError as error:
        raise ArtifactError(f"{path} lacks {error} in its header; it was not written by lapcli") from error
    for name in ("model", "settings", "parents", "axes", "record"):
        if not isinstance(getattr(lineage, name), dict):
            raise ArtifactError(f"{path} has a {name} that is no JSON object; it was not written by lapcli")
    return lineage


def read_artifact(path: Path, kind: str | None = None) -> Artifact:
    """Open an artifact and check what can be checked without reading its tensors.

    Args:
        path: the file.
        kind: the kind wanted, or `None` for any.

    Raises:
        ArtifactError: it is missing, truncated, foreign, of another kind or of a newer schema.
    """
    if not path.is_file():
        maker = _MAKERS.get(kind or "")
        raise ArtifactError(f"there is no {kind or 'artifact'} at {path}", maker and f"make one with {maker}")
    header = read_header(path)
    document = _parse(header.metadata, path)
    return Artifact(path, _lineage(document, path, kind), tuple(sorted(header.tensors)))


def _parse(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    if _KEY not in metadata:
        raise ArtifactError(f"{path} is a safetensors file, but no lapcli artifact (its header has no '{_KEY}' entry)")
    try:
        return json.loads(metadata[_KEY])
    except json.JSONDecodeError as error:
        raise ArtifactError(f"{path} has a header that is no JSON: {error}") from error


def is_marked(path: Path, mark: bytes) -> bool:
    """Whether what a command writes stands at the beginning of a file."""
    try:
        with path.open("rb") as file:
            return mark in file.read(200)
    except OSError:
        return False


def refuse_unmarked(path: Path, mark: bytes, command: str) -> None:
    """Refuse a folder, and a file whose place the results of a command would take though it did not write it.

    Args:
        path: where results are to go.
        mark: that stands at the beginning of a file of results.
        command: that writes them, with an `--output`.

    Raises:
        ArtifactError: naming it.
    """
    hint = "name another file with --output"
    if path.is_dir():
        raise ArtifactError(f"{path} is a folder", hint)
    if path.exists() and not is_marked(path, mark):
        raise ArtifactError(f"{path} is there, but `{command}` did not write it", hint)


def refuse_foreign(path: Path) -> None:
    """Refuse to replace a file that lapcli cannot have written; a damaged artifact of its own may go.

    Raises:
        ArtifactError: the file is no safetensors file by its name, or a whole one without lapcli's header.
    """
    foreign = path.suffix != ".safetensors"
    if not foreign:
        try:
            foreign = _KEY not in read_header(path).metadata
        except ArtifactError:
            return
    if foreign:
        raise ArtifactError(f"{path} is there, but lapcli did not write it", "remove it, or name another with --output")


def artifact_digest(artifact: Artifact) -> str:
    """The digest of an artifact's identity and content, which its children record as their parent."""
    document = _parse(read_header(artifact.path).metadata, artifact.path)
    return digest_document({"identity": document["identity"], "content": document["content"]})


def write_document(path: Path, lineage: Lineage) -> None:
    """Write a lineage alone, as JSON (the `lapcli.json` of a model directory)."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(_document(lineage, {}), indent=1, ensure_ascii=False) + "\n")


def read_document(path: Path, kind: str | None = None) -> Lineage:
    """Read a lineage that `write_document` wrote.

    Raises:
        ArtifactError: it is missing, no JSON, of another kind or of a newer schema.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ArtifactError(f"there is no {path}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} is no JSON: {error}") from error
    return _lineage(document, path, kind)
