"""One tiny model and a short text for the stages' tests."""

import pytest

from lapcli.families.loading import resolve_model
from lapcli.recipe import CalibrationSettings
from lapcli.testing.models import tiny_gated_deltanet


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return resolve_model(str(tiny_gated_deltanet(tmp_path_factory.mktemp("model") / "tiny", num_v_heads=4)))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = [f"Line {i} of a text that says little, {i * i % 97} times over." for i in range(400)]
    path.write_text("\n\n".join(lines))
    return path


@pytest.fixture(scope="session")
def settings(text):
    return CalibrationSettings(data=str(text), samples=12, seq_len=128)
