"""What keeps a calibration from standing in for another: the model's tokenizer and the text, as their files are now."""

import shutil

import pytest
import torch

from lapcli.artifacts import RunDirectory, write_artifact
from lapcli.errors import ArtifactError
from lapcli.families.source import resolve_model
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.stages.lineage import calibration_lineage
from lapcli.stages.pruning import plan_pruning


def differences(source, settings, change):
    """What a change of files does to the lineage of a calibration of this model."""
    before = calibration_lineage(source, settings)
    change()
    return calibration_lineage(resolve_model(str(source.path)), settings).differences(before)


@pytest.fixture
def own(model, tmp_path):
    return resolve_model(str(shutil.copytree(model.path, tmp_path / "model")))


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "additional_chat_templates/rag.jinja",
        "tokenization_own.py",
    ],
)
def test_a_calibration_is_of_one_tokenizer(own, settings, name):
    file = own.path / name
    file.parent.mkdir(exist_ok=True)
    (found,) = differences(own, settings, lambda: file.write_text("{}"))
    assert found.startswith("made from tokenizer: ")


def test_other_files_are_no_tokenizer(own, settings):
    assert not differences(own, settings, lambda: (own.path / "generation_config.json").write_text('{"top_k": 3}'))


def test_a_calibration_is_of_one_text(own, tmp_path):
    path, run = tmp_path / "t.txt", RunDirectory(tmp_path / "run")
    path.write_text("One text of a few words.")
    settings = CalibrationSettings(data=str(path), samples=4, seq_len=64)
    write_artifact(run.calibration, calibration_lineage(own, settings), {"x": torch.zeros(1)})
    assert plan_pruning(own, settings, SelectionSettings(method="l1", ratio="0.5"), run).calibration_ready
    path.write_text("One text of a few turns.")
    with pytest.raises(ArtifactError, match=rf"calibration\.safetensors .* made from {path}: .* wanted"):
        plan_pruning(own, settings, SelectionSettings(method="l1", ratio="0.25"), run)
