"""Reading and writing everything that lapcli leaves on disk: one schema, one parentage, whole or not at all."""

from lapcli.artifacts.atomic import atomic_directory, atomic_file
from lapcli.artifacts.digest import digest_document, digest_file, digest_weights
from lapcli.artifacts.header import SafetensorsHeader, TensorEntry, encode_header, read_header
from lapcli.artifacts.run import ANALYSIS_FILE, CURVE_FILE, RECOVERY_FILE, TRAINING_FILE, RunDirectory
from lapcli.artifacts.store import (
    SCHEMA,
    Artifact,
    Lineage,
    artifact_digest,
    is_marked,
    read_artifact,
    read_document,
    refuse_foreign,
    refuse_unmarked,
    write_artifact,
    write_document,
)
from lapcli.artifacts.taken import is_conversion, taken

__all__ = [
    "ANALYSIS_FILE",
    "CURVE_FILE",
    "RECOVERY_FILE",
    "TRAINING_FILE",
    "SCHEMA",
    "Artifact",
    "Lineage",
    "RunDirectory",
    "SafetensorsHeader",
    "TensorEntry",
    "artifact_digest",
    "atomic_directory",
    "atomic_file",
    "digest_document",
    "digest_file",
    "digest_weights",
    "encode_header",
    "is_conversion",
    "is_marked",
    "read_artifact",
    "read_document",
    "read_header",
    "refuse_foreign",
    "refuse_unmarked",
    "taken",
    "write_artifact",
    "write_document",
]
