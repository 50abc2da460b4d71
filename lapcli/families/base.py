"""What lapcli must know of a model family: where the key axis lives. Declarations only; slicing is generic.

Nothing here imports torch, so that a plan or an inspection answers at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.utils.hooks import RemovableHandle

Role = Literal["key projection", "query projection", "key convolution", "query convolution"]

Sizes = tuple[tuple[str, int], ...]
"""A tensor's shape, axis by axis: what of the config gives the length, and the length."""


@dataclass(frozen=True)
class Member:
    """A tensor that carries the key axis of a layer, by its name on disk.

    Head `h` owns the `K` consecutive entries of `axis` from `offset + h * stride` on.

    Attributes:
        tensor: name in the checkpoint.
        role: what it does, which is how statistics find the projections.
        axis: the axis that holds the channels.
        offset: where the first head's channels begin along it (packed projections).
        stride: distance from one head's channels to the next one's; the key width where heads lie side by side.
    """

    tensor: str
    role: Role
    stride: int
    axis: int = 0
    offset: int = 0


@dataclass(frozen=True)
class StatefulLayer:
    """A layer that keeps a state, with the coupled group of its key axis.

    Attributes:
        index: number of the layer in the model.
        mixer: name of the module in memory that keeps the state.
        heads: key heads `H`.
        value_heads: value heads `HV`.
        key_width: `K`.
        value_width: `V`.
        members: all tensors that must be cut together.
        gated: whether the state decays.
    """

    index: int
    mixer: str
    heads: int
    value_heads: int
    key_width: int
    value_width: int
    members: tuple[Member, ...]
    gated: bool = True

    def state_bytes(self, key_width: int | None = None, itemsize: int = 4) -> int:
        """Size of the layer's state for one sequence, in bytes (fp32 unless told)."""
        width = self.key_width if key_width is None else key_width
        return self.value_heads * width * self.value_width * itemsize


class Observer(Protocol):
    """Who looks at the activations of one stateful layer during a forward pass."""

    def mixer_input(self, hidden: "Tensor") -> None:
        """See the mixer's input `[B, T, D]`."""
        ...

    def queries_keys(self, q: "Tensor", k: "Tensor") -> "tuple[Tensor, Tensor] | None":
        """See q and k `[B, T, H, K]` after convolution and activation, before any norm; may replace them."""
        ...


class Family(ABC):
    """One model family. Each member's sentence is its contract."""

    name: ClassVar[str]
    """What artifacts and messages call it."""

    model_types: ClassVar[tuple[str, ...]]
    """The config's `model_type`s that it answers for."""

    tested: ClassVar[str]
    """What its slicing was tested against, for `lapcli list families`."""

    @abstractmethod
    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the stateful layers of a model with this config, in order.

        Raises:
            ModelError: a field has no usable value.
        """

    @abstractmethod
    def tensors(self, config: Mapping[str, Any]) -> dict[str, Sizes]:
        """Declare every tensor that a checkpoint with this config has, in the model's order."""

    @abstractmethod
    def undeclared(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """How the names of further tensors may begin, of which the family says nothing."""

    @abstractmethod
    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Return the config that says the new truth, also in the library's own float arithmetic."""

    @abstractmethod
    def attach(self, model: "Module", layer: StatefulLayer, observer: Observer) -> "list[RemovableHandle]":
        """Let `observer` see the layer's activations until the handles are removed."""

    @abstractmethod
    def parameter(self, model: "Module", layer: StatefulLayer, member: Member) -> "Parameter":
        """The parameter in memory that holds a member, in the layout it has on disk."""

    @abstractmethod
    def pin_read_scale(self, model: "Module", layer: StatefulLayer, scale: float) -> None:
        """Make the layer read with `scale` whatever its key width; the masked oracle needs it."""


def key_axis_members(prefix: str, parts: Sequence[tuple[str, Role]], key_width: int) -> tuple[Member, ...]:
    """Members whose first axis holds the heads side by side, as most checkpoints have them."""
    return tuple(Member(tensor=f"{prefix}.{name}", role=role, stride=key_width) for name, role in parts)
