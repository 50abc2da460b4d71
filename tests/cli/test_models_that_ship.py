"""A model put into lapcli/demo is found by its name wherever models are named; one that is not there nowhere."""

import json
import shutil

import pytest

from lapcli.families import source
from lapcli.families.source import DEFAULT_MODEL, demo_models
from lapcli.testing.models import tiny_qdelta


@pytest.fixture
def dropped(tmp_path, monkeypatch):
    """A folder of shipped models with one more, `demo:qdelta`, and a link to the one that ships."""
    root = tmp_path / "package"
    shipped = demo_models()[DEFAULT_MODEL]
    (root / "demo").mkdir(parents=True)
    (root / "demo" / "gdn").symlink_to(shipped)
    made = tiny_qdelta(root / "demo" / "qdelta")
    assert json.loads((made / "config.json").read_text())["model_type"] == "qdelta"
    (root / "demo" / ".qdelta.partial").mkdir()
    monkeypatch.setattr(source.resources, "files", lambda _package: root)
    return made


def test_it_is_listed_planned_pruned_measured_and_a_config(lapcli, dropped, tmp_path):
    code, out, err = lapcli("list", "models", "--json")
    assert code == 0, err
    listed = {each["model"]: each for each in json.loads(out)}
    assert list(listed) == ["demo:gdn", "demo:qdelta"]
    assert listed["demo:qdelta"]["type"] == "qdelta"
    assert listed["demo:qdelta"]["directory"] == str(dropped)
    for command in (("plan", "demo:qdelta", "--ratio", "0.5"), ("inspect", "demo:qdelta"),
                    ("prune", "demo:qdelta", "--ratio", "0.5", "--dry-run"),
                    ("bench", "prefill", "--config", "demo:qdelta", "--ratio", "0", "--dry-run")):  # fmt: skip
        code, out, err = lapcli(*command, "--json")
        assert code == 0, err
        assert "qdelta" in out
    # A demo's defaults: text that ships, few samples.
    code, out, err = lapcli("prune", "demo:qdelta", "--ratio", "0.5", "--dry-run", "--json")
    assert json.loads(out)["tokens"] == 64 * 1024


def test_its_absence_is_said_with_what_there_is(lapcli, dropped):
    shutil.rmtree(dropped)
    for command in (
        ("inspect", "demo:qdelta"),
        ("plan", "demo:qdelta"),
        ("bench", "prefill", "--config", "demo:qdelta"),
    ):
        code, _out, err = lapcli(*command)
        assert code == 1
        assert "'demo:qdelta'" in err
        assert "there is: demo:gdn" in err
    code, _out, err = lapcli("bench", "prefill", "--config", "nothing")
    assert code == 1
    assert "(demo:gdn)" in err
