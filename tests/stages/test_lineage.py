"""What keeps a calibration from standing in for another: the model's tokenizer and the text, as their files are now."""

import shutil

import pytest

from lapcli.families.source import resolve_model
from lapcli.stages.lineage import calibration_lineage


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
