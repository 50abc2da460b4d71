"""What becomes of a checkpoint's tensors when channels of its key heads go: by names and shapes, without weights.

Neither torch nor numpy is imported here, so that a plan comes at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lapcli.artifacts import TensorEntry
from lapcli.errors import FamilyError
from lapcli.families.base import Member, StatefulLayer
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource

Mtp = Literal["passes through", "dropped"]


@dataclass(frozen=True)
class Cut:
    """Which entries of one axis of one tensor go.

    Attributes:
        axis: the axis.
        length: how many entries it has.
        gone: those that go.
    """

    axis: int
    length: int
    gone: set[int]


@dataclass(frozen=True)
class Cutting:
    """What is cut out of a checkpoint.

    Attributes:
        cuts: by tensor; all others stay as they are.
        dropped: tensors that are left out.
        cut_tensors: how many become smaller.
        bytes_before: size of all tensors.
        bytes_after: size of those that are left.
        mtp: what becomes of the head that predicts further tokens: softmax heads pass through, heads with a state are
            dropped; `None` where the checkpoint has none.
    """

    cuts: Mapping[str, Cut]
    dropped: frozenset[str]
    cut_tensors: int
    bytes_before: int
    bytes_after: int
    mtp: Mtp | None

    def written(self, entries: Iterable[TensorEntry]) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Name, dtype, shape and size of what comes of tensors."""
        return [_sliced_entry(entry, self.cuts.get(entry.name)) for entry in entries if entry.name not in self.dropped]


def cutting(
    source: ModelSource, layers: Sequence[StatefulLayer], gone: Mapping[int, Sequence[Iterable[int]]]
) -> Cutting:
    """Follow the channels that go through every tensor that carries them.

    Args:
        source: the base; its headers are read.
        layers: its stateful layers.
        gone: by layer and head, the channels that go.

    Raises:
        FamilyError: the family declares channels that the checkpoint does not have.
    """
    family = family_for(source.config)
    entries = [entry for _header, entry in source.tensors.values()]
    shapes = {entry.name: entry.shape for entry in entries}
    cuts: dict[str, Cut] = {}
    for layer in layers:
        for member in family.members(layer, shapes):
            entry = _entry(source, member, layer)
            if member.stays:
                continue
            cut = cuts.setdefault(member.tensor, Cut(member.axis, entry.shape[member.axis], set()))
            if cut.axis != member.axis:
                raise FamilyError(f"{member.tensor} is declared on axes {cut.axis} and {member.axis}")
            for rows, channels in zip(member.rows(layer.heads, layer.key_width), gone[layer.index], strict=True):
                places = (rows[channel] for channel in channels)
                cut.gone.update((p for p in places if 0 <= p < cut.length) if member.partial else places)
    mtp, further = mtp_of(source)
    dropped = further if mtp == "dropped" else frozenset[str]()
    return Cutting(
        cuts=cuts,
        dropped=dropped,
        cut_tensors=sum(bool(cut.gone) for cut in cuts.values()),
        bytes_before=sum(entry.nbytes for entry in entries),
        bytes_after=sum(_sliced_entry(e, cuts.get(e.name))[3] for e in entries if e.name not in dropped),
        mtp=mtp,
    )


def mtp_of(source: ModelSource) -> tuple[Mtp | None, frozenset[str]]:
    """What becomes of the head that predicts further tokens, and its tensors; `None` and none where there is none."""
    further = family_for(source.config).mtp(source.config, source.tensors.keys())
    if further is None:
        return None, frozenset()
    # The width that a mixer of the head is built with is the model's, and no kept channels were chosen for it.
    return "dropped" if further.stateful else "passes through", further.tensors


def _entry(source: ModelSource, member: Member, layer: StatefulLayer) -> TensorEntry:
    if member.tensor not in source.tensors:
        parent = member.tensor.removesuffix(".weight").rpartition(".")[0] + "."
        found = sorted(name.removeprefix(parent) for name in source.tensors if name.startswith(parent))
        raise FamilyError(
            f"{source.name} has no tensor {member.tensor}, which its family declares for layer {layer.index} of a "
            f"{source.config.get('model_type')}",
            "the checkpoint does not fit its config" + (f"; there it has {', '.join(found)}" if found else ""),
        )
    entry = source.tensors[member.tensor][1]
    if member.partial:
        return entry
    needed = member.rows(layer.heads, layer.key_width)[-1].stop
    found = entry.shape[member.axis] if member.axis < len(entry.shape) else 0
    if found < needed:
        raise FamilyError(
            f"{member.tensor} has {found} channels on axis {member.axis}; {layer.heads} heads of {layer.key_width} "
            f"need {needed}",
            "the checkpoint does not fit its config",
        )
    return entry


def _sliced_entry(entry: TensorEntry, cut: Cut | None) -> tuple[str, str, tuple[int, ...], int]:
    if cut is None:
        return entry.name, entry.dtype, entry.shape, entry.nbytes
    shape = list(entry.shape)
    remaining = cut.length - len(cut.gone)
    nbytes = entry.nbytes // shape[cut.axis] * remaining
    shape[cut.axis] = remaining
    return entry.name, entry.dtype, tuple(shape), nbytes
