"""Slices by hand: any kept channels or directions, without calibration or a selector."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lapcli.artifacts import Artifact, Lineage, write_artifact
from lapcli.families.base import StatefulLayer
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource, resolve_model
from lapcli.stages.slicing import slice_model


def layers_of(source: ModelSource) -> tuple[StatefulLayer, ...]:
    """The stateful layers that a model's config declares."""
    return family_for(source.config).layers(source.config)


def random_kept(source: ModelSource, width: int, seed: int = 0) -> dict[int, Tensor]:
    """By layer, the kept channels of each head, `[H, K']`, ascending and at random."""
    generator = torch.Generator().manual_seed(seed)
    return {
        layer.index: torch.stack(
            [torch.randperm(layer.key_width, generator=generator)[:width].sort().values for _ in range(layer.heads)]
        )
        for layer in layers_of(source)
    }


def random_bases(source: ModelSource, width: int, seed: int = 0) -> dict[int, Tensor]:
    """By layer, for each head orthonormal directions at random, fp64 `[H, K', K]`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        layer.index: torch.linalg.qr(
            torch.randn(layer.heads, layer.key_width, width, generator=generator, dtype=torch.float64)
        ).Q.mT.contiguous()
        for layer in layers_of(source)
    }


def selection_of(source: ModelSource, kept: Mapping[int, Tensor], folder: Path) -> Artifact:
    """A selection of these channels `[H, K']`, or directions `[H, K', K]`, written into a folder."""
    lineage = Lineage("selection", source.describe(), "any", {"method": "by hand", "kept_width": 0})
    tensors = {f"layers.{index}.{'basis' if rows.ndim == 3 else 'kept'}": rows for index, rows in kept.items()}
    return write_artifact(folder / "selection.safetensors", lineage, tensors)


def sliced_by(source: ModelSource, kept: Mapping[int, Tensor], folder: Path) -> ModelSource:
    """The slice that keeps these channels or directions, in `folder / "sliced"`."""
    slice_model(source, selection_of(source, kept, folder), folder / "sliced")
    return resolve_model(str(folder / "sliced"))
