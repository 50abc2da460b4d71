"""Falcon-H1's multipliers belong to its weights: which of the two says the scale changes no selection."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lapcli.errors import ModelError
from lapcli.families.loading import load_model
from lapcli.families.source import resolve_model
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.stages.calibration import calibrate
from lapcli.stages.selection import select
from lapcli.testing.slices import layers_of
from lapcli.testing.stock_models import tiny_stock_model

SETTINGS = CalibrationSettings(data="builtin", samples=2, seq_len=64)
# Powers of two, so that folding them in rounds nothing.
MULTIPLIERS = [0.5, 0.8, 4.0, 0.25, 1.2]
INNER, SIDE = 96, 2 * 32


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A model with multipliers of B and C in its config, and the same model with them in its weights."""
    root = tmp_path_factory.mktemp("twins")
    told = tiny_stock_model("falcon_h1", root / "told", mamba_n_groups=2, ssm_multipliers=MULTIPLIERS)
    folded = shutil.copytree(told, root / "folded")
    tensors = load_file(folded / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("mamba.in_proj.weight"):
            weight[2 * INNER : 2 * INNER + SIDE] *= MULTIPLIERS[2]
            weight[2 * INNER + SIDE : 2 * INNER + 2 * SIDE] *= MULTIPLIERS[3]
    save_file(tensors, folded / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folded / "config.json").read_text())
    config["ssm_multipliers"] = [0.5, 0.8, 1.0, 1.0, 1.2]
    (folded / "config.json").write_text(json.dumps(config))
    return [resolve_model(str(folder)) for folder in (told, folded)]


def test_multipliers_in_config_or_weights_choose_the_same(twins, tmp_path):
    ids = torch.arange(3, 43).view(1, -1)
    with torch.no_grad():
        assert torch.equal(*(load_model(source)(input_ids=ids).logits for source in twins))
    calibrations = [
        calibrate(
            source, SETTINGS, tmp_path / f"{source.path.name}.safetensors", machine=Machine(device="cpu"), saliency=True
        )[0]
        for source in twins
    ]
    for name, tensor in calibrations[0].tensors().items():
        torch.testing.assert_close(tensor, calibrations[1].tensor(name), rtol=1e-5, atol=0, msg=name)
    for method in ("l1", "s-wanda", "grad", "drrqr"):
        chosen = [
            select(calibration, SelectionSettings(method=method, ratio="0.5"), tmp_path / f"{method}-{number}")[0]
            for number, calibration in enumerate(calibrations)
        ]
        for layer in layers_of(twins[0]):
            name = f"layers.{layer.index}.kept"
            assert torch.equal(chosen[0].tensor(name), chosen[1].tensor(name)), (method, name)


@pytest.mark.parametrize("found", [2.0, [1.0, 1.0], ["1", 1, 1, 1, 1]], ids=["number", "two", "text"])
def test_unusable_multipliers_are_named(twins, found):
    twins[0].config["ssm_multipliers"], before = found, twins[0].config["ssm_multipliers"]
    try:
        with pytest.raises(ModelError, match="ssm_multipliers"):
            layers_of(twins[0])
    finally:
        twins[0].config["ssm_multipliers"] = before
