"""Selection as a stage: what is stored is what the selector chose, for every method and side."""

from itertools import combinations

import pytest
import torch

from lapcli.artifacts import read_artifact
from lapcli.errors import ArtifactError
from lapcli.families.registry import family_for
from lapcli.machine import Machine
from lapcli.recipe import SelectionSettings
from lapcli.selectors.base import HeadStatistics
from lapcli.selectors.registry import CHANNEL_SELECTORS, SELECTORS, select_layer
from lapcli.stages.calibration import calibrate
from lapcli.stages.selection import select
from lapcli.stages.slicing import plan_slicing


@pytest.fixture(scope="module")
def calibration(model, settings, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "calibration.safetensors"
    return calibrate(model, settings, path, machine=Machine(device="cpu"), saliency=True)[0]


def kept(artifact, index):
    return artifact.tensor(f"layers.{index}.kept")


@pytest.mark.parametrize("score_from", ["both", "key", "query"])
def test_every_method_chooses_for_itself(calibration, model, tmp_path, score_from):
    chosen = {}
    for method in CHANNEL_SELECTORS:
        request = SelectionSettings(method=method, ratio="0.5", score_from=score_from, seed=3)
        artifact, worked = select(calibration, request, tmp_path / f"{method}.safetensors")
        assert worked
        for layer in family_for(model.config).layers(model.config):
            names = SELECTORS[method].needs(score_from) or {"magnitude_key"}
            statistics = HeadStatistics(
                **{name: calibration.tensor(f"layers.{layer.index}.{name}") for name in names}, tokens=1
            )
            wanted = select_layer(method, statistics, 16, score_from=score_from, seed=3, layer=layer.index)
            assert torch.equal(kept(artifact, layer.index), wanted.kept)
            assert not torch.equal(wanted.kept[0], torch.arange(16))
        chosen[method] = kept(artifact, 0)
    for one, other in combinations(chosen, 2):
        assert not torch.equal(chosen[one], chosen[other]), (one, other)


def test_f_and_method_are_part_of_its_identity(calibration, tmp_path):
    path = tmp_path / "s.safetensors"
    select(calibration, SelectionSettings(ratio="0.5"), path)
    assert not select(calibration, SelectionSettings(keep=16), path)[1]
    for other in (SelectionSettings(ratio="0.5", f=2.0), SelectionSettings(ratio="0.5", method="l1")):
        with pytest.raises(ArtifactError, match="made with other inputs"):
            select(calibration, other, path)


@pytest.mark.parametrize("name", ["notes.txt", "weights.safetensors"])
def test_overwrite_never_replaces_what_is_not_ours(calibration, model, tmp_path, name):
    path = tmp_path / name
    path.write_bytes((model.path / "model.safetensors").read_bytes() if name.endswith("s") else b"my notes")
    before = path.read_bytes()
    with pytest.raises(ArtifactError):
        select(calibration, SelectionSettings(ratio="0.5"), path, overwrite=True)
    assert path.read_bytes() == before


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_in_the_calibration_is_refused(calibration, tmp_path):
    copy = tmp_path / "c.safetensors"
    copy.write_bytes(calibration.path.read_bytes())
    flip_a_byte(copy)
    with pytest.raises(ArtifactError, match=r"(?s)c\.safetensors is damaged.*lapcli calibrate"):
        select(read_artifact(copy), SelectionSettings(ratio="0.5"), tmp_path / "s.safetensors")


def test_a_flipped_byte_in_the_selection_is_refused_and_mended(calibration, model, tmp_path):
    settings, path = SelectionSettings(ratio="0.5"), tmp_path / "s.safetensors"
    selection, _ = select(calibration, settings, path)
    before = path.read_bytes()
    flip_a_byte(path)
    with pytest.raises(ArtifactError, match=r"(?s)s\.safetensors is damaged.*lapcli select"):
        plan_slicing(model, selection)
    assert select(calibration, settings, path, overwrite=True)[1]
    assert path.read_bytes() == before
