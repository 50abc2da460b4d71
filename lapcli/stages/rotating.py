"""Rotating: what becomes of the tensors of a key axis when directions are kept, and not channels.

With T, `[K', K]` with orthonormal rows, in each key head, keys and queries are to be `T k` and `T q`. Projections and
biases become `T W` and `T b`, exactly. A convolution with a filter for each channel would become a dense one; what is
taken is the nearest that is still one filter a channel, `(T o T) w` for each tap (arXiv 2602.04852, App. B.3-B.5).
What follows (SiLU, another feature map, a norm that is not of length) does not commute with T at all: a rotated model
computes something else, which is the finding that this is here to show. Exact, with K' = K, are models without filters
for each channel and without an activation on keys and queries.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from lapcli.artifacts import TensorEntry
from lapcli.errors import ArtifactError, FamilyError, ModelError
from lapcli.families.base import Role, StatefulLayer
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource

Bases = Mapping[int, NDArray[np.float64]]
"""By layer, T of each key head, `[H, K', K]`."""

_COPY_BLOCK = 16 << 20
_FILTERS: Mapping[Role, bool] = {
    "key projection": False,
    "query projection": False,
    "key projection bias": False,
    "query projection bias": False,
    "key convolution": True,
    "query convolution": True,
    "key convolution bias": False,
    "query convolution bias": False,
}
"""Roles that can be rotated, and whether their rows are filters."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Turn:
    """Rows of a tensor, the channels of a key head, that T takes to fewer.

    Attributes:
        first: of the K rows.
        basis: T `[K', K]`.
        filters: whether they are filters, a channel each.
    """

    first: int
    basis: NDArray[np.float64]
    filters: bool

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """`[K, ...]` to `[K', ...]`, in fp64, rounded once to the rows' own dtype."""
        basis = torch.from_numpy(self.basis)
        wide = rows.reshape(rows.shape[0], -1).double()
        return ((basis.square() if self.filters else basis) @ wide).to(rows.dtype)


def refuse_unturnable(source: ModelSource, layers: Sequence[StatefulLayer]) -> None:
    """Refuse a model whose key channels must stay apart.

    Raises:
        FamilyError: naming the tensor that keeps them apart.
    """
    for layer in layers:
        for member in layer.members:
            if member.role not in _FILTERS:
                raise FamilyError(
                    f"{source.name} ({family_for(source.config).name}) cannot be rotated: {member.tensor} is the "
                    f"{member.role} of each key channel by itself, which a rotation would mix",
                    "take a method that keeps channels, such as --method drrqr",
                )


def turns_of(source: ModelSource, layers: Sequence[StatefulLayer], bases: Bases) -> dict[str, tuple[Turn, ...]]:
    """By tensor, the rows that are rotated, in their order.

    Args:
        source: the base; its headers are read.
        layers: its stateful layers.
        bases: T of each head.

    Raises:
        FamilyError: the family's channels must stay apart, or a head lies in two tensors.
        ModelError: a tensor's dtype is none of floats of 16 bits or more.
    """
    refuse_unturnable(source, layers)
    family = family_for(source.config)
    shapes = {name: entry.shape for name, (_header, entry) in source.tensors.items()}
    found: dict[str, list[Turn]] = {}
    for layer in layers:
        for member in family.members(layer, shapes):
            entry = source.tensors[member.tensor][1]
            if member.axis != 0:
                raise FamilyError(f"{member.tensor} has its key channels on axis {member.axis}; only rows are rotated")
            if entry.dtype not in _DTYPES:
                raise ModelError(f"{member.tensor} is {entry.dtype}, which is not rotated: {', '.join(_DTYPES)} are")
            for rows, basis in zip(member.rows(layer.heads, layer.key_width), bases[layer.index], strict=True):
                inside = max(0, min(rows.stop, entry.shape[0]) - max(rows.start, 0))
                if inside == layer.key_width:
                    turn = Turn(rows.start, basis, _FILTERS[member.role])
                    found.setdefault(member.tensor, []).append(turn)
                elif inside:
                    raise FamilyError(f"{member.tensor} holds {inside} of the {layer.key_width} channels of a key head")
    return {name: tuple(sorted(turns, key=lambda turn: turn.first)) for name, turns in found.items()}


def rotated(source: BinaryIO, entry: TensorEntry, turns: Sequence[Turn]) -> Iterator[bytes]:
    """The bytes of a tensor with some rows rotated, one head or a few mebibytes at a time.

    Args:
        source: the file that holds it.
        entry: where.
        turns: as `turns_of` gives them.

    Raises:
        ArtifactError: the file ends inside the tensor.
    """
    width = entry.nbytes // entry.shape[0]
    source.seek(entry.start)

    def read(nbytes: int) -> bytes:
        block = source.read(nbytes)
        if len(block) != nbytes:
            raise ArtifactError(f"{source.name} ended inside {entry.name}", "download the model again")
        return block

    def copied(rows: int) -> Iterator[bytes]:
        left = rows * width
        while left:
            yield read(min(left, _COPY_BLOCK))
            left -= min(left, _COPY_BLOCK)

    row = 0
    for turn in turns:
        yield from copied(turn.first - row)
        channels = turn.basis.shape[1]
        head = torch.frombuffer(bytearray(read(channels * width)), dtype=_DTYPES[entry.dtype])
        yield turn.of(head.reshape(channels, -1)).contiguous().view(torch.uint8).numpy().tobytes()
        row = turn.first + channels
    yield from copied(entry.shape[0] - row)
