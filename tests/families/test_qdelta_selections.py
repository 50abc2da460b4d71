"""Q-Delta pruned by every selector: what is cut is what masking gives, the erase direction with it."""

import pytest
import torch

from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.selectors.registry import CHANNEL_SELECTORS
from lapcli.stages.calibration import calibrate
from lapcli.stages.selection import select
from lapcli.stages.slicing import slice_model
from lapcli.testing.models import tiny_qdelta
from lapcli.testing.oracle import masked, relative_error

KEPT = 12
FP32 = 1e-5  # the oracle's bound
IDS = torch.randint(3, 259, (2, 90), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return resolve_model(str(tiny_qdelta(tmp_path_factory.mktemp("qdelta") / "base", num_v_heads=4, lamb_bias=-1.0)))


@pytest.fixture(scope="module")
def calibration(base, tmp_path_factory):
    settings = CalibrationSettings(data="builtin", samples=2, seq_len=96)
    path = tmp_path_factory.mktemp("calibration") / "calibration.safetensors"
    return calibrate(base, settings, path, machine=Machine(device="cpu"), saliency=True)[0]


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("method", CHANNEL_SELECTORS)
def test_a_slice_is_the_masked_model(base, calibration, method, tmp_path):
    request = SelectionSettings(method=method, keep=KEPT, align=1)
    selection, _worked = select(calibration, request, tmp_path / "selection.safetensors")
    slice_model(base, selection, tmp_path / "sliced")
    family = family_for(base.config)
    layers = family.layers(base.config)
    kept = {layer.index: selection.tensor(f"layers.{layer.index}.kept") for layer in layers}
    whole = load_model(base)
    with masked(whole, family, layers, kept):
        wanted = logits(whole)
    assert relative_error(logits(load_model(resolve_model(str(tmp_path / "sliced")))), wanted) < FP32
    assert relative_error(logits(whole), wanted) > 1e-3
