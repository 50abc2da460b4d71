"""What a conversion to dual-state attention is to do, and where it keeps what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.errors import ArtifactError
from lapcli.families.source import ModelSource
from lapcli.linearising.settings import LinearisingSettings

if TYPE_CHECKING:
    from lapcli.families.remote.lapcli_dual_state import DualStateSettings

SUMMARY_FILE = "conversion.json"
_KV_BYTES = 2


@dataclass(frozen=True)
class Place:
    """What lies where in the directory of a conversion.

    Attributes:
        root: the directory.
    """

    root: Path

    @property
    def base(self) -> Path:
        """The teacher."""
        return self.root / "base"

    @property
    def sensitivity(self) -> Path:
        """What was measured of its layers."""
        return self.root / "sensitivity.safetensors"

    @property
    def prefixes(self) -> Path:
        """The converted layers."""
        return self.root / "prefixes"

    @property
    def summary(self) -> Path:
        """The numbers of all prefixes."""
        return self.root / SUMMARY_FILE

    def training(self, number: int, layer: int) -> Path:
        """Curve and checkpoints of one training."""
        return self.root / "training" / f"{number:03d}-layer-{layer:03d}"

    def prefix(self, number: int, layer: int) -> Path:
        """The layer that was converted as the `number`-th."""
        return self.prefixes / f"{number:03d}-layer-{layer:03d}.safetensors"

    def model(self, number: int, count: int) -> Path:
        """Where the model of a prefix is written if nobody says."""
        return self.root / "models" / f"{number}-of-{count}"


def holds_conversion(root: str | Path) -> bool:
    """Whether a directory is one of `lapcli convert --to dsla`, and no model.

    Raises:
        ArtifactError: it is one, but the model that was converted is missing from it.
    """
    place = Place(Path(root))
    if (place.root / "config.json").exists():
        return False
    teacher = place.base / "config.json"
    if not teacher.is_file() and any(place.prefixes.glob("*.safetensors")):
        from lapcli.linearising.command import convert_command  # which reads what lies here

        raise ArtifactError(
            f"{root} holds converted layers, but not the model that they are of: there is no {teacher}",
            f"put it back, or have it made again from where it came: {convert_command(root)}",
        )
    return teacher.is_file()


@dataclass(frozen=True)
class Shape:
    """The attention of a teacher, from its config.

    Attributes:
        layers: how many.
        heads: key heads.
        head_width: of keys and of values.
    """

    layers: int
    heads: int
    head_width: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """From the fields that all teachers have."""
        readers = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // readers
        return cls(config["num_hidden_layers"], config.get("num_key_value_heads") or readers, width)

    def token_bytes(self, layers: int, itemsize: int = _KV_BYTES) -> int:
        """Keys and values of one token (in bf16 unless told), of so many layers."""
        return 2 * layers * self.heads * self.head_width * itemsize


@dataclass(frozen=True)
class LinearisingPlan:
    """What a conversion will do.

    Attributes:
        source: the teacher.
        settings: of the conversion.
        shape: of its attention.
        number: layers to convert.
        place: the directory.
        done: layers that are converted already.
        measured: what was measured of the layers already.
        output: where the model goes.
        overwrite: whether an earlier conversion gives way.
    """

    source: ModelSource
    settings: LinearisingSettings
    shape: Shape
    number: int
    place: Place
    done: int
    measured: tuple[str, ...]
    output: Path
    overwrite: bool = False

    def state_bytes(self) -> int:
        """What a converted layer keeps of a sequence."""
        layer, shape = self.settings.layer, self.shape
        if layer.window is not None:
            return (self.window() + layer.sinks) * shape.token_bytes(1)
        return layer.states * layer.width * shape.heads * shape.head_width**2 * 4

    def window(self) -> int:
        """Tokens that a window sees beside its sinks."""
        from lapcli.families.remote.lapcli_dual_state_window import equal_memory_window

        layer, width = self.settings.layer, self.shape.head_width
        if layer.window != "equal":
            assert layer.window is not None
            return layer.window
        return equal_memory_window(layer.states, width, width, width=layer.width, kv_bytes=_KV_BYTES) - layer.sinks

    def layer_settings(self, layers: Sequence[int] = ()) -> "DualStateSettings":
        """What the model's code is told of the converted layers."""
        from lapcli.families.remote.lapcli_dual_state import DualStateSettings

        layer = self.settings.layer
        return DualStateSettings(
            layers=tuple(layers),
            states=layer.states,
            start=layer.start,
            width=layer.width,
            window=None if layer.window is None else self.window(),
            sinks=layer.sinks,
        )

    def document(self) -> dict[str, Any]:
        """The plan, JSON-able."""
        distillation, kept = self.settings.distillation, self.shape.layers - self.number
        return {
            "model": self.source.name,
            "to": "dsla",
            "layers": self.shape.layers,
            "converts": self.number,
            "converted_already": self.done,
            "order": self.settings.order,
            "measured_already": list(self.measured),
            "tokens_a_layer": distillation.tokens,
            "steps_a_layer": distillation.steps,
            "kv_bytes_a_token": {
                "before": self.shape.token_bytes(self.shape.layers),
                "after": self.shape.token_bytes(kept),
            },
            "state_bytes": self.number * self.state_bytes(),
            "writes": [str(self.place.root), str(self.output)],
        }
