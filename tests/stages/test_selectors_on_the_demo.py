"""Every selector on the model that ships."""

from itertools import combinations

import pytest
import torch

from lapcli.families.loading import resolve_model
from lapcli.families.registry import family_for
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.selectors.registry import CHANNEL_SELECTORS
from lapcli.stages.calibration import calibrate
from lapcli.stages.selection import select


@pytest.fixture(scope="module")
def demo():
    return resolve_model("demo:gdn")


@pytest.fixture(scope="module")
def of_the_demo(demo, tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "calibration.safetensors"
    settings = CalibrationSettings(data="builtin", samples=8, seq_len=256)
    return calibrate(demo, settings, path, machine=Machine(device="cpu"), saliency=True)[0]


def test_every_selector_chooses_for_itself_on_the_demo_model(demo, of_the_demo, tmp_path):
    """Case 28: in every layer and head, other channels than the first K', and than any other selector's."""
    kept = {}
    for method in CHANNEL_SELECTORS:
        artifact, _worked = select(of_the_demo, SelectionSettings(method=method, ratio="0.5"), tmp_path / method)
        kept[method] = {
            layer.index: artifact.tensor(f"layers.{layer.index}.kept")
            for layer in family_for(demo.config).layers(demo.config)
        }
    for method, layers in kept.items():
        for index, rows in layers.items():
            first = torch.arange(rows.shape[1])
            assert not any(torch.equal(row, first) for row in rows), (method, index)
    for one, other in combinations(kept, 2):
        for index in kept[one]:
            assert not torch.equal(kept[one][index], kept[other][index]), (one, other, index)
