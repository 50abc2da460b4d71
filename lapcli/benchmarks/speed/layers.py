"""One layer of a model, for its operator and its mixer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lapcli.benchmarks.speed.gate import Verdict
from lapcli.benchmarks.speed.results import Cell


@dataclass(frozen=True)
class Shape:
    """A layer.

    Attributes:
        name: what it is called.
        key_heads: H.
        value_heads: HV.
        key_width: K.
        value_width: V.
    """

    name: str
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    def state_bytes(self, itemsize: int) -> int:
        """Of one row."""
        return self.value_heads * self.key_width * self.value_width * itemsize


LAYERS = {
    "gdn": Shape("gdn", 6, 6, 256, 512),
    "qwen3.5": Shape("qwen3.5", 16, 32, 128, 128),
    "toy": Shape("toy", 2, 4, 32, 32),
}
"""Layers by name, unpruned."""
WIDTHS = (256, 192, 128, 96, 64, 48, 32)
"""Key widths that are measured, as far as they do not exceed a layer's own."""


def shapes_of(name: str, widths: Sequence[int] | None = None) -> list[Shape]:
    """A layer at several key widths, the widest first."""
    whole = LAYERS[name]
    kept = [width for width in (widths or (whole.key_width, *WIDTHS)) if width <= whole.key_width]
    return [replace(whole, key_width=width) for width in sorted(set(kept), reverse=True)]


def cell_of_layer(
    what: str, shape: Shape, way: str, batch: int, tokens: int, state_dtype: torch.dtype, backward: bool = False
) -> Cell:
    """The cell of a layer."""
    whole = LAYERS[shape.name].key_width if shape.name in LAYERS else shape.key_width
    return Cell(
        what, shape.name, 1 - shape.key_width / whole, way, batch, tokens, shape.key_heads, shape.value_heads,
        shape.key_width, shape.value_width, str(state_dtype).removeprefix("torch."), backward,
    )  # fmt: skip


def worst(*verdicts: Verdict) -> Verdict:
    """The one that allows least."""
    return max(verdicts, key=lambda verdict: verdict.share)
