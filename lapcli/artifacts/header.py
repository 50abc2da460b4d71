"""The header of a safetensors file, read without torch: names, dtypes, shapes and byte ranges."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapcli.errors import ArtifactError

_LENGTH = struct.Struct("<Q")
# The format's own limit; a larger figure means that the file is something else.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file.

    Attributes:
        name: its name.
        dtype: the format's name of its dtype ("BF16", "F32", …).
        shape: its shape.
        start: offset of its first byte in the file.
        nbytes: its size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """What the header of one file says.

    Attributes:
        path: the file.
        metadata: the string-to-string map of the header.
        tensors: the tensors by name, in the order of their bytes.
    """

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Raises:
        ArtifactError: the file is missing, no safetensors file, or shorter than its header promises.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            (length,) = _LENGTH.unpack(handle.read(_LENGTH.size))
            if length > min(size, _LONGEST_HEADER):
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(handle.read(length))
        metadata: dict[str, str] = header.pop("__metadata__", {})
        base = _LENGTH.size + length
        entries = [
            TensorEntry(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=base + entry["data_offsets"][0],
                nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        ]
    except FileNotFoundError as error:
        raise ArtifactError(f"there is no {path}") from error
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "delete it and run the command that makes it again, or download it again"
        raise ArtifactError(
            f"{path} is truncated or no safetensors file ({error})", hint if path.suffix == ".safetensors" else None
        ) from error
    entries.sort(key=lambda entry: entry.start)
    end = max((entry.start + entry.nbytes for entry in entries), default=base)
    if end != size:
        raise ArtifactError(
            f"{path} has {size} bytes, but its header promises {end}: it is truncated or damaged",
            "delete it and run the command that makes it again, or download it again",
        )
    return SafetensorsHeader(path, metadata, {entry.name: entry for entry in entries})


def encode_header(entries: list[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]) -> bytes:
    """The bytes in front of the tensors' own: length and JSON, padded to eight.

    Args:
        entries: name, dtype, shape and size in bytes of each tensor, in the order in which they will be written.
        metadata: the string-to-string map.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, nbytes in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text
