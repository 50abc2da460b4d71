"""Digests that name a document, a file or a checkpoint."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_BLOCK = 1 << 20
_SAMPLE = 4096
_SAMPLES_PER_FILE = 4096
_WHOLE_UP_TO = 4 << 30


def digest_document(document: Any) -> str:
    """The sha256 of a JSON-able document in canonical form (sorted keys, no spaces)."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_file(path: Path) -> str:
    """The sha256 of a whole file."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def digest_weights(files: Iterable[Path], extra: Any = None) -> str:
    """Name a checkpoint.

    Up to 4 GiB of weights are hashed whole. Of larger ones, each file's name, size, first mebibyte (the safetensors
    header lies there) and 4096 evenly spaced blocks of 4 KiB are: training changes weights everywhere, so a
    fine-tuned copy cannot keep the digest, but an edit of single tensors by hand may.

    Args:
        files: the weight files, in any order.
        extra: a JSON-able document hashed along (the config, the index).
    """
    paths = sorted(files, key=lambda file: file.name)
    sizes = [path.stat().st_size for path in paths]
    digest = hashlib.sha256(digest_document(extra).encode())
    for path, size in zip(paths, sizes, strict=True):
        digest.update(f"{path.name}:{size}".encode())
        if sum(sizes) <= _WHOLE_UP_TO:
            digest.update(digest_file(path).encode())
        else:
            _sample(path, size, digest.update)
    return digest.hexdigest()


def _sample(path: Path, size: int, update: Callable[[bytes], None]) -> None:
    with path.open("rb") as handle:
        update(handle.read(_BLOCK))
        for offset in range(_BLOCK, size, max(1, (size - _SAMPLE) // _SAMPLES_PER_FILE)):
            handle.seek(offset)
            update(handle.read(_SAMPLE))
