"""`lapcli calibrate`, stopped by SIGTERM at each of its moments: the same command then ends as if never stopped."""

import sys

import pytest
import torch

from lapcli.artifacts import read_artifact
from lapcli.cli.app import main
from lapcli.stages.calibration import has_saliency
from lapcli.testing.processes import run_forked

STOPPED = """
import os, signal, sys
from lapcli.cli.app import main
from lapcli.stages import calibration

moment = sys.argv.pop(1)
token_blocks, replace, save = calibration.token_blocks, os.replace, calibration._Partial.save
passes = {"sums": 0, "gradients": 0}

def stop():
    os.kill(os.getpid(), signal.SIGTERM)

def reading(*arguments, **options):
    blocks = token_blocks(*arguments, **options)
    if moment == "reading":
        stop()
    return blocks

def renaming(source, target):
    if moment == "writing" and os.path.basename(target) == "calibration.safetensors":
        stop()
    replace(source, target)

def saving(self, done, tensors):
    self.every_seconds = 0.0
    save(self, done, tensors)
    name = self.path.name.rsplit(".", 1)[-1]
    passes[name] += 1
    if moment == name and passes[name] == 2:
        stop()

calibration.token_blocks, os.replace, calibration._Partial.save = reading, renaming, saving
main()
"""


@pytest.fixture
def command(model, text, tmp_path):
    """Three batches of 4096 tokens on a CPU."""

    def arguments(run):
        sizes = ["--samples", "96", "--seq-len", "128", "--device", "cpu"]
        return ["calibrate", str(model.path), "--data", str(text), *sizes, "--grad", "--run", str(tmp_path / run)]

    return arguments


@pytest.fixture
def lapcli(monkeypatch, capsys):
    """Run a command in this process; gives what it said."""

    def run(arguments):
        monkeypatch.setattr(sys, "argv", ["lapcli", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        err = capsys.readouterr().err
        assert not done.value.code, err
        return " ".join(err.split())

    return run


@pytest.mark.parametrize(
    ("moment", "going_on"),
    [
        ("reading", None),
        ("sums", "going on after 64 of 96 samples of earlier sums"),
        ("gradients", "going on after 64 of 96 samples of an earlier saliency pass"),
        ("writing", None),
    ],
    ids=["reading-the-text", "in-the-sums", "in-the-saliency", "writing"],
)
def test_stopped_and_run_again_it_is_the_unbroken_file(command, lapcli, tmp_path, moment, going_on):
    lapcli(command("unbroken"))
    stopped = run_forked(moment, *command("run"), program=STOPPED, threads=torch.get_num_threads())
    assert stopped.returncode == 130, stopped.stderr
    assert "interrupted" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    run = tmp_path / "run"
    # A run in which nothing was left is gone.
    assert not list(run.glob(".*partial-*"))
    assert not list(run.glob("*.partial-*"))
    final = run / "calibration.safetensors"
    if final.exists():
        # Sums that were finished before the saliency pass may be there already, whole.
        assert moment == "gradients"
        assert not has_saliency(read_artifact(final, "calibration"))

    said = lapcli(command("run"))
    assert going_on is None or going_on in said
    assert final.read_bytes() == (tmp_path / "unbroken" / "calibration.safetensors").read_bytes()
    names = {file.name for file in run.iterdir()}
    assert names == {file.name for file in (tmp_path / "unbroken").iterdir()}
    assert {file for file in names if file.startswith(".")} <= {".lock"}
