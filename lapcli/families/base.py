"""What lapcli must know of a model family: where the key axis lives. Declarations only; slicing is generic.

Nothing here imports torch, so that a plan or an inspection answers at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.utils.hooks import RemovableHandle

Role = Literal[
    "key projection",
    "query projection",
    "key projection bias",
    "query projection bias",
    "key convolution",
    "query convolution",
    "key convolution bias",
    "query convolution bias",
    "gate projection",
    "gate bias",
    "key channels",
]
"""`key` and `query` are B and C in Mamba-2; a gate is a member where it decays each key channel by itself. The
`key channels` are the numbers of those that a head still has, where the model picks them out of wider projections."""

Sizes = tuple[tuple[str, int], ...]
"""A tensor's shape, axis by axis: what of the config gives the length, and the length."""


@dataclass(frozen=True)
class Member:
    """A tensor that carries the key axis of a layer, by its name on disk.

    Head `h` owns the `K` consecutive entries of `axis` from `offset + h * stride` on. Where a tensor holds each head
    more than once, each copy is a member of its own.

    Attributes:
        tensor: name in the checkpoint.
        role: what it does, which is how statistics find the projections.
        axis: the axis that holds the channels.
        offset: where the first head's channels begin along it (packed projections).
        stride: distance from one head's channels to the next one's; the key width where heads lie side by side.
        partial: whether the tensor holds only some of the entries, further tensors of the same role the others; what
            lies outside of it, `offset` below 0 included, is then theirs.
        factor: by which the model multiplies the projection's output, all of this role alike, so that it computes as
            with a weight that is larger by so much.
        stays: whether slicing leaves it alone, though its channels are those of the key axis: the model picks the kept
            ones out of its output (rotary embeddings turn channels in pairs, so none of the rows can go).
    """

    tensor: str
    role: Role
    stride: int
    axis: int = 0
    offset: int = 0
    partial: bool = False
    factor: float = 1.0
    stays: bool = False

    def rows(self, heads: int, width: int) -> list[range]:
        """By head, where its channels are along the axis; of a part of a tensor perhaps outside of it."""
        firsts = [self.offset + head * self.stride for head in range(heads)]
        return [range(first, first + width) for first in firsts]


@dataclass(frozen=True)
class PredictionHead:
    """A head of a checkpoint that predicts further tokens (MTP); transformers does not load it with the model.

    Attributes:
        tensors: its tensors on disk.
        stateful: those of them that belong to mixers with a state, which slicing cannot leave at the old width.
    """

    tensors: frozenset[str]
    stateful: frozenset[str]


@dataclass(frozen=True)
class Tap:
    """Where keys or queries of a layer can be taken in memory: a projection, and the short convolution after it.

    Head `h` owns the `K` consecutive channels from `offset + h * stride` on, in the projection's output and, with its
    own numbers, in the convolution's channels. A head may be there more than once: several query heads that read one
    key head, several keys that one token writes.

    Attributes:
        projection: name of the linear module.
        stride: in its output, from one head to the next.
        offset: of the first head in its output.
        convolution: name of the module with a depthwise `weight` `[channels, 1, taps]` and maybe a `bias`; `None` where
            there is none.
        convolution_stride: likewise among its channels.
        convolution_offset: likewise.
        activation: transformers' name of what follows the convolution (or the projection). It has no default: most
            libraries read a field of the config there.
        feature_map: transformers' name of an elementwise map after that.
        copies: how often each head is there.
        copy_stride: from one copy of a head to the next, in both.
    """

    projection: str
    stride: int
    offset: int = 0
    convolution: str | None = None
    convolution_stride: int = 0
    convolution_offset: int = 0
    activation: str = field(kw_only=True)
    feature_map: str = "linear"
    copies: int = 1
    copy_stride: int = 0


@dataclass(frozen=True)
class Convolution:
    """The short convolution of a layer, all parts together.

    Attributes:
        channels: all of them, values too.
        taps: its length; a sequence keeps that many inputs of each channel.
    """

    channels: int
    taps: int


@dataclass(frozen=True)
class StatefulLayer:
    """A layer that keeps a state, with the coupled group of its key axis.

    Attributes:
        index: number of the layer in the model.
        mixer: name of the module in memory that keeps the state.
        heads: key heads `H`; groups in Mamba-2.
        value_heads: value heads `HV`, each with a state; value head `j` reads key head `j // (HV // H)`.
        key_width: `K`; the state size in Mamba-2.
        value_width: `V`; the head width in Mamba-2.
        members: all tensors that must be cut together.
        gated: whether the state decays.
        erasing: whether queries have a part in what is erased (query feedback).
        l2_normalised: whether the model divides keys and queries by their length before the state gets them.
        convolution: the short convolution, or `None`.
        keys: where the keys can be taken in memory; `None` where the family takes them in a way of its own.
        queries: likewise.
        states: how many states each key and value is written to; those of a key head lie side by side as value heads.
    """

    index: int
    mixer: str
    heads: int
    value_heads: int
    key_width: int
    value_width: int
    members: tuple[Member, ...]
    gated: bool = True
    erasing: bool = False
    l2_normalised: bool = False
    convolution: Convolution | None = None
    keys: Tap | None = None
    queries: Tap | None = None
    states: int = 1

    def state_bytes(self, key_width: int | None = None, itemsize: int = 4) -> int:
        """Size of the layer's state for one sequence, in bytes (fp32 unless told)."""
        width = self.key_width if key_width is None else key_width
        return self.value_heads * width * self.value_width * itemsize

    def convolution_bytes(self, key_width: int | None = None, itemsize: int = 2) -> int:
        """Size of the inputs that the short convolution keeps for one sequence, in bytes (bf16 unless told)."""
        if self.convolution is None:
            return 0
        cut = 0 if key_width is None else self.key_width - key_width
        roles = [member.role for member in self.members]
        # Filters that a head's channels share are no members, but the inputs that they keep are still one a channel.
        keys_and_queries = sum(role in ("key convolution", "query convolution") for role in roles) or sum(
            role in ("key projection", "query projection") for role in roles
        )
        return (self.convolution.channels - keys_and_queries * self.heads * cut) * self.convolution.taps * itemsize


@dataclass(frozen=True)
class ModelCode:
    """Code of lapcli's own, for checkpoints that the library's classes of the family cannot load; it lies beside them.

    Attributes:
        module: name of the module in `lapcli.families.remote`.
        imports: names of the modules there that it imports.
        config: name of the config's class.
        model: name of the model's class.
        auto_classes: transformers' `Auto` classes that are to find the model.
    """

    module: str
    imports: tuple[str, ...]
    config: str
    model: str
    auto_classes: tuple[str, ...] = ("AutoModelForCausalLM",)

    def files(self) -> dict[str, Path]:
        """The packaged files by the names that they have in a checkpoint."""
        folder = Path(__file__).parent / "remote"
        return {f"{name}.py": folder / f"{name}.py" for name in (self.module, *self.imports)}

    def missing(self, folder: Path) -> list[str]:
        """The names of files that a checkpoint's folder lacks or has with other contents."""
        return [
            name
            for name, packaged in self.files().items()
            if not (folder / name).is_file() or (folder / name).read_bytes() != packaged.read_bytes()
        ]

    def auto_map(self) -> dict[str, str]:
        """What a config says so that transformers finds the classes."""
        models = dict.fromkeys(self.auto_classes, f"{self.module}.{self.model}")
        return {"AutoConfig": f"{self.module}.{self.config}", **models}


class Observer(Protocol):
    """Who looks at the activations of one stateful layer during a forward pass."""

    def mixer_input(self, hidden: "Tensor") -> None:
        """See the mixer's input `[B, T, D]`."""
        ...

    def queries_keys(self, q: "Tensor", k: "Tensor") -> "tuple[Tensor, Tensor] | None":
        """See q and k `[B, T, H, K]` after convolution and activation, before any norm.

        Where a head has copies, they are `[B, T, copies, H, K]`.
        What is returned replaces them in lapcli's own models; stock models go on with theirs.
        """
        ...


class Family(ABC):
    """One model family. Each member's sentence is its contract; `docs/add-a-family.md` shows how to write one."""

    name: ClassVar[str]
    """What artifacts and messages call it."""

    model_types: ClassVar[tuple[str, ...]]
    """The config's `model_type`s that it answers for."""

    tested: ClassVar[str]
    """What its slicing was tested against, for `lapcli list families`."""

    library: ClassVar[str | None] = None
    """The package whose classes alone run its models, on a CUDA device; `None` where lapcli's or transformers' do."""

    @abstractmethod
    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the stateful layers of a model with this config, in order.

        Raises:
            ModelError: a field has no usable value.
        """

    def tensors(self, config: Mapping[str, Any]) -> dict[str, Sizes]:
        """Declare tensors that a checkpoint with this config must have, with their shapes, in the model's order.

        By default none but the members of the coupled groups is known, and those are looked at where they are cut.
        """
        return {}

    def undeclared(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """How the names of further tensors may begin, of which the family says nothing; by default in any way."""
        return ("",)

    def members(self, layer: StatefulLayer, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Member, ...]:
        """The coupled group of a layer as a checkpoint with tensors of these shapes holds it; by default as declared.

        A family says more where checkpoints of the same config come with more than one set of names.
        """
        return layer.members

    def mtp(self, config: Mapping[str, Any], names: Collection[str]) -> PredictionHead | None:
        """The MTP head among a checkpoint's tensors, or `None`; by default all under `mtp`.

        Its mixers with a state are those of the name that the model's have. A family says more where the head lies
        elsewhere, or where softmax layers call theirs the same.
        """
        head = frozenset(name for name in names if name.startswith(("mtp.", "model.mtp.")))
        mixers = {layer.mixer.rpartition(".")[2] for layer in self.layers(config)}
        stateful = frozenset(name for name in head if not mixers.isdisjoint(name.split(".")))
        return PredictionHead(head, stateful) if head else None

    @abstractmethod
    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Return the config that says the new truth, also in the library's own float arithmetic."""

    def model_code(self, config: Mapping[str, Any]) -> ModelCode | None:
        """The code that a checkpoint with this config needs beside it; by default the library's own is enough."""
        return None

    def attach(self, model: "Module", layer: StatefulLayer, observer: Observer) -> "list[RemovableHandle]":
        """Let `observer` see the layer's activations until the handles are removed; by default through its taps."""
        from lapcli.families.taps import attach_taps

        return attach_taps(model, layer, observer)

    def parameter(self, model: "Module", layer: StatefulLayer, member: Member) -> "Parameter":
        """The parameter in memory that holds a projection, in the layout it has on disk."""
        tap = layer.keys if member.role == "key projection" else layer.queries
        assert tap is not None
        return model.get_parameter(f"{tap.projection}.weight")


def key_axis_members(prefix: str, parts: Sequence[tuple[str, Role]], key_width: int) -> tuple[Member, ...]:
    """Members whose first axis holds the heads side by side, as most checkpoints have them."""
    return tuple(Member(tensor=f"{prefix}.{name}", role=role, stride=key_width) for name, role in parts)
