"""From weights to selection: channels that are dead or copies are not kept."""

import pytest
from safetensors.torch import load_file, save_file

from lapcli.families.loading import resolve_model
from lapcli.machine import Machine
from lapcli.recipe import SelectionSettings
from lapcli.stages.calibration import calibrate
from lapcli.stages.selection import select
from lapcli.testing.models import tiny_gated_deltanet


@pytest.mark.parametrize("score_from", ["both", "key", "query"])
def test_a_models_dead_and_copied_channels_are_never_kept(settings, tmp_path, score_from):
    """Case 26, from weights to artifact: channel 0 of every head is always zero, 1 is exactly a copy of 30."""
    folder = tiny_gated_deltanet(tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if any(f".{side}_{part}" in name for side in "qk" for part in ("proj", "conv1d")):
            heads = tensor.unflatten(0, (2, 32))
            heads[:, 0] = 0
            heads[:, 1] = heads[:, 30]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    base = resolve_model(str(folder))
    calibration, _ = calibrate(base, settings, tmp_path / "c.safetensors", machine=Machine(device="cpu"))
    for keep in (8, 16, 30):
        artifact, _ = select(
            calibration, SelectionSettings(keep=keep, score_from=score_from), tmp_path / f"{keep}.safetensors"
        )
        for index in (0, 1):
            for row in artifact.tensor(f"layers.{index}.kept").tolist():
                assert 0 not in row
                assert len({1, 30} & set(row)) <= 1
            assert artifact.tensor(f"layers.{index}.rank").tolist() == [30, 30]
    artifact, _ = select(calibration, SelectionSettings(keep=31, score_from=score_from), tmp_path / "31.safetensors")
    for row in artifact.tensor("layers.0.kept").tolist():
        assert set(range(2, 30)) | {31} <= set(row)
