"""Every selector on every family of transformers: what calibration measures is enough for it, and it chooses by it."""

from itertools import combinations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lapcli.families.source import resolve_model
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.selectors.registry import CHANNEL_SELECTORS
from lapcli.stages.calibration import calibrate
from lapcli.stages.selection import select
from lapcli.testing.slices import layers_of
from lapcli.testing.stock_models import STOCK_MODELS, tiny_stock_model

SETTINGS = CalibrationSettings(data="builtin", samples=2, seq_len=96)
WIDTH, KEPT = 32, 16


def with_unequal_inputs(path):
    """Scale the columns of the embedding apart: S-Wanda is L1 where all inputs of a mixer are as large."""
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    tensors[name] *= 2 ** torch.linspace(-3, 3, tensors[name].shape[1])
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("model_type", [name for name in STOCK_MODELS if name in CONFIG_MAPPING])
def test_every_selector_chooses_for_itself(model_type, tmp_path):
    folder = tiny_stock_model(model_type, tmp_path / "base")
    with_unequal_inputs(folder / "model.safetensors")
    source = resolve_model(str(folder))
    calibration, _worked = calibrate(
        source, SETTINGS, tmp_path / "calibration.safetensors", machine=Machine(device="cpu"), saliency=True
    )
    layers, chosen = layers_of(source), {}
    for method in CHANNEL_SELECTORS:
        request = SelectionSettings(method=method, keep=KEPT, seed=3)
        selection, _worked = select(calibration, request, tmp_path / f"{method}.safetensors")
        masks = []
        for layer in layers:
            kept = selection.tensor(f"layers.{layer.index}.kept")
            assert kept.shape == (layer.heads, KEPT)
            assert (kept.diff(dim=1) > 0).all()
            assert kept.min() >= 0
            assert kept.max() < WIDTH
            masks.append(torch.zeros(layer.heads, WIDTH).scatter_(1, kept, 1.0))
        chosen[method] = torch.cat(masks)
    for one, other in combinations(chosen, 2):
        shared = (chosen[one] * chosen[other]).sum(1).mean() / KEPT
        assert shared < 0.95, (one, other)
