"""What TensorBoard's own reader finds in the files, and what W&B's library is told."""

import json
import subprocess
import sys
import types

import pytest

from lapcli.errors import UsageError
from lapcli.training.trackers import open_tracker

CONFIG = {"lr": 1e-4, "hub": {"api_key": "abcdef", "tokens": 5}, "data": ["https://me:pw@host/x", "hf_" + "a" * 30]}


def read_back(folder):
    """Steps and values by tag, and all texts, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    scalars = {
        tag: [(event.step, round(event.value, 4)) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }
    texts = [
        text.decode()
        for tag in found.Tags()["tensors"]
        for event in found.Tensors(tag)
        for text in event.tensor_proto.string_val
    ]
    return scalars, texts


def test_tensorboard_shows_no_step_twice_after_going_on(tmp_path):
    first = open_tracker(["tensorboard"], tmp_path, CONFIG, "demo:gdn / a")
    first.log(0, {"validation": {"loss": 4}})
    for step in range(1, 9):
        first.log(step, {"loss": step, "tokens": 10 * step})
    first.close()
    again = open_tracker(["tensorboard"], tmp_path, CONFIG, "demo:gdn / a")
    for step in range(7, 11):
        again.log(step, {"loss": step + 0.5, "tokens": 10 * step})
    again.close()
    (folder,) = (tmp_path / "tensorboard").iterdir()
    assert folder.name == "demo-gdn-a"
    scalars, _texts = read_back(folder)
    assert scalars["loss"] == [(step, step + 0.5 * (step >= 7)) for step in range(1, 11)]
    assert scalars["validation/loss"] == [(0, 4.0)]
    assert [step for step, _tokens in scalars["tokens"]] == list(range(1, 11))


def test_tensorboard_is_told_settings_and_no_secrets(tmp_path):
    tracker = open_tracker(["tensorboard"], tmp_path, CONFIG, "a")
    tracker.log(1, {"loss": 1})
    tracker.close()
    written = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard" / "a").iterdir())
    assert not any(secret in written for secret in (b"abcdef", b"pw@", b"hf_aaa"))
    _scalars, texts = read_back(tmp_path / "tensorboard" / "a")
    assert "lr: 0.0001" in texts[0]
    assert "hub/tokens: 5" in texts[0]


class Wandb(types.ModuleType):
    """Notes what it is told."""

    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.logged, self.finished = [], [], 0
        self.refusal = None

    def Settings(self, **settings):
        return settings

    def init(self, **arguments):
        if self.refusal:
            raise self.Error(self.refusal)
        self.begun.append(arguments)
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_wandb_goes_on_under_the_same_id(tmp_path, wandb):
    for first in (1, 7):
        tracker = open_tracker(["wandb"], tmp_path / "one", CONFIG, "a run")
        tracker.log(first, {"loss": 2, "validation": {"kl": 1}})
        tracker.close()
    open_tracker(["wandb"], tmp_path / "other", CONFIG, "a run").close()
    one, again, other = wandb.begun
    assert one == again
    assert one["resume"] == "allow"
    assert one["id"] != other["id"]
    assert wandb.logged == [(step, {"loss": 2.0, "validation/kl": 1.0}) for step in (1, 7)]
    assert wandb.finished == 3


def test_wandb_gets_no_secrets_and_keeps_to_the_environment(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    open_tracker(["wandb"], tmp_path, CONFIG, "a").close()
    (told,) = wandb.begun
    assert told["project"] == "mine"
    assert "mode" not in told
    assert "mode" not in told["settings"]
    assert told["config"]["lr"] == 1e-4
    assert told["config"]["hub"]["tokens"] == 5
    assert not any(secret in json.dumps(told) for secret in ("abcdef", "pw@", "hf_aaa"))


def test_wandbs_refusal_is_an_error_of_ours(tmp_path, wandb):
    wandb.refusal = "no API key"
    with pytest.raises(UsageError, match="no API key"):
        open_tracker(["wandb"], tmp_path, {}, "a")


def test_what_was_opened_is_closed_where_another_cannot_open(tmp_path, wandb, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError):
        open_tracker(["wandb", "tensorboard"], tmp_path, {}, "a")
    assert wandb.finished == 1


@pytest.mark.parametrize(("kind", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_named(kind, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError) as raised:
        open_tracker([kind], tmp_path, {}, "a")
    assert f"pip install {kind}" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_unknown_kinds_are_refused_and_none_shows_nothing(tmp_path):
    with pytest.raises(UsageError, match="mlflow") as raised:
        open_tracker(["tensorboard", "mlflow"], tmp_path, {}, "a")
    assert "tensorboard, wandb" in str(raised.value)
    tracker = open_tracker([], tmp_path, {}, "a")
    tracker.log(1, {"loss": 1})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_importing_the_module_imports_neither_package():
    code = (
        "import sys, lapcli.training.trackers\n"
        "loaded = {'tensorboard', 'wandb', 'torch.utils.tensorboard'} & sys.modules.keys()\nassert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
