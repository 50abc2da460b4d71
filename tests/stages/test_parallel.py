"""Calibration by several processes, by torchrun or `--gpus`: what one makes, one voice, one end, going on again."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lapcli.artifacts import read_artifact
from lapcli.errors import UsageError
from lapcli.machine import Machine
from lapcli.parallel import Processes
from lapcli.recipe import SelectionSettings
from lapcli.reporting import SilentReporter
from lapcli.selectors.registry import CHANNEL_SELECTORS
from lapcli.stages import calibration
from lapcli.stages.calibration import calibrate
from lapcli.stages.selection import select
from lapcli.testing.processes import launch_together, run_together

WIDE = Machine(device="cpu", dtype="float64")
SIZES = ["--samples", "11", "--seq-len", "128", "--dtype", "float64", "--device", "cpu"]


@pytest.fixture
def wanted_settings(settings):
    return settings.model_copy(update={"samples": 11})


def assert_close(found, wanted):
    """The same numbers up to the order of their summation in fp64."""
    assert found.names == wanted.names
    for name, tensor in wanted.tensors().items():
        mine = found.tensor(name)
        if "triangle" in name:
            # Unique up to the signs of its rows.
            mine, tensor = (triangle.mT @ triangle for triangle in (mine, tensor))
        # Gradients are summed in fp32.
        rtol = 1e-5 if "saliency" in name else 1e-11
        torch.testing.assert_close(mine, tensor, rtol=rtol, atol=rtol * tensor.abs().max().item(), msg=name)


@pytest.mark.slow
def test_two_processes_make_what_one_makes(model, text, wanted_settings, tmp_path):
    settings = wanted_settings.model_copy(update={"exact": True, "rows": 700})
    wanted, _ = calibrate(model, settings, tmp_path / "one.safetensors", machine=WIDE, saliency=True)
    two = tmp_path / "two.safetensors"
    done = run_together(
        2, "calibrate", model.path, "--data", text, *SIZES,
        "--grad", "--exact", "--rows", "700", "--output", two, "--run", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("calibrated: ") == done.stderr.count("calibrating: ") == 1
    found = read_artifact(two, "calibration")
    assert_close(found, wanted)
    assert found.lineage.record == wanted.lineage.record
    for method in CHANNEL_SELECTORS:
        chosen = SelectionSettings(method=method, ratio=0.5)
        kept = [
            select(artifact, chosen, tmp_path / f"{name}-{method}.safetensors")[0]
            for name, artifact in (("one", wanted), ("two", found))
        ]
        for name in kept[0].names:
            if name.endswith(".kept"):
                assert torch.equal(kept[0].tensor(name), kept[1].tensor(name)), (method, name)


@pytest.mark.slow
def test_the_leader_alone_writes_and_prints(model, text, wanted_settings, tmp_path):
    wanted, _ = calibrate(model, wanted_settings, tmp_path / "one.safetensors", machine=WIDE)
    job = ["prune", model.path, "--data", text, *SIZES, "--run", tmp_path / "run", "--json"]
    done = launch_together(2, *job)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["worked"] == {"calibration": True, "selection": True, "slicing": True}
    assert_close(read_artifact(tmp_path / "run" / "calibration.safetensors"), wanted)
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {".lock", "calibration.safetensors", "selection.safetensors", "sliced", "run.json"}
    again = launch_together(2, *job)
    assert again.returncode == 0, again.stderr
    assert not any(json.loads(again.stdout)["worked"].values())


PROGRAM = """
import os, signal, sys
from lapcli.cli.app import main
from lapcli.errors import ModelError
from lapcli.stages import calibration

moment = sys.argv.pop(1)
follower = os.environ["RANK"] == "1"
calibration._TOKENS_PER_BATCH["cpu"] = 256
saved, saves = calibration._Partial.save, 0

def save(self, done, tensors):
    global saves
    self.every_seconds = 0.0
    saved(self, done, tensors)
    saves += 1
    if saves == 2 and follower and moment == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if saves == 2 and follower and moment == "fails":
        raise ModelError("no room on this device")

calibration._Partial.save = save
main()
"""


@pytest.fixture
def job(model, text, tmp_path):
    return lambda run: ["calibrate", model.path, "--data", text, *SIZES, "--run", tmp_path / run]


@pytest.mark.slow
def test_an_error_of_one_process_is_said_once_and_ends_all(job, tmp_path):
    """By torchrun itself, which the others do without: its start takes longer than their work."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    done = subprocess.run(
        [*map(str, [*torchrun, program, "fails", *job("run")])],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240,
    )  # fmt: skip
    assert done.returncode not in (0, None)
    assert done.stderr.count("error: no room on this device") == 1
    assert "another process of this run" not in done.stderr
    assert not (tmp_path / "run" / "calibration.safetensors").exists()


@pytest.mark.slow
def test_after_a_kill_as_many_processes_go_on_and_others_start_again(
    model, wanted_settings, job, tmp_path, monkeypatch
):
    monkeypatch.setitem(calibration._TOKENS_PER_BATCH, "cpu", 256)
    wanted, _ = calibrate(model, wanted_settings, tmp_path / "one.safetensors", machine=WIDE)
    killed = run_together(2, "killed", *job("run"), program=PROGRAM)
    assert killed.returncode not in (0, None)
    final = tmp_path / "run" / "calibration.safetensors"
    partial = final.with_name(f".{final.name}.sums")
    follower = partial.with_name(f"{partial.name}.1")
    assert read_artifact(follower).lineage.record["samples_done"] == 4
    alone = tmp_path / "alone.safetensors"
    for path in (partial, follower):
        (tmp_path / path.name.replace("calibration", "alone")).write_bytes(path.read_bytes())

    again = run_together(2, "runs", *job("run"), program=PROGRAM)
    assert again.returncode == 0, again.stderr
    assert "of 5 samples of earlier sums" in again.stderr
    assert_close(read_artifact(final, "calibration"), wanted)

    reporter = SilentReporter()
    one, _ = calibrate(model, wanted_settings, alone, machine=WIDE, reporter=reporter)
    assert not any("going on" in notice for notice in reporter.notices)
    for name, tensor in wanted.tensors().items():
        assert torch.equal(one.tensor(name), tensor), name
    for folder in (tmp_path, final.parent):
        assert not [path.name for path in folder.iterdir() if ".sums" in path.name]


def test_shares_are_neighbours_and_cover_all():
    for count in (2, 7, 128):
        for size in (1, 2, 3):
            shares = [list(Processes(rank, size).share(count)) for rank in range(size)]
            assert [index for share in shares for index in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_processes_than_samples_are_refused(model, wanted_settings, tmp_path):
    with pytest.raises(UsageError, match="12 processes cannot share 11 samples"):
        calibrate(
            model, wanted_settings, tmp_path / "c.safetensors", machine=WIDE, processes=replace(Processes(), size=12)
        )


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda:0", "gives each of its processes a GPU of its own"), ("split", "torchrun starts several")],
)
def test_a_device_for_one_process_is_refused_for_several(monkeypatch, device, message):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        Machine(device=device).first_device()
