"""Calibration on two GPUs: by two processes, and of a model spread over both; against one GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from lapcli.artifacts import read_artifact
from lapcli.families import loading
from lapcli.families.source import resolve_model
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.reporting import SilentReporter
from lapcli.stages.calibration import calibrate
from lapcli.stages.selection import select
from lapcli.testing.stock_models import tiny_stock_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
    # fla, triton and inductor warn about themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# fp64, so that only the order of summation differs; without fla, whose autotuning would take minutes.
OPTIONS = {"dtype": "float64", "kernel": "chunked"}
SETTINGS = CalibrationSettings(data="builtin", samples=7, seq_len=256, exact=True)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The calibration of one GPU."""
    path = tmp_path_factory.mktemp("one") / "c.safetensors"
    machine = Machine(device="cuda:0", **OPTIONS)
    return calibrate(resolve_model("demo:gdn"), SETTINGS, path, machine=machine, saliency=True)[0]


def assert_the_same(found, wanted, rtol=1e-10):
    assert found.names == wanted.names
    for name, tensor in wanted.tensors().items():
        mine = found.tensor(name)
        if "triangle" in name:
            # Unique up to the signs of its rows.
            mine, tensor = (triangle.mT @ triangle for triangle in (mine, tensor))
        # Gradients are summed in fp32.
        bound = max(rtol, 1e-5) if "saliency" in name else rtol
        torch.testing.assert_close(mine, tensor, rtol=bound, atol=bound * tensor.abs().max().item(), msg=name)


def assert_the_same_channels(found, wanted, tmp_path):
    for method in ("drrqr", "grad", "s-wanda"):
        chosen = SelectionSettings(method=method, ratio=0.5)
        first, second = (
            select(calibration, chosen, tmp_path / f"{name}-{method}.safetensors")[0]
            for name, calibration in (("found", found), ("wanted", wanted))
        )
        for name in first.names:
            if name.endswith(".kept"):
                assert torch.equal(first.tensor(name), second.tensor(name)), (method, name)


def test_two_processes_on_two_gpus(one, tmp_path):
    output = tmp_path / "two.safetensors"
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--",
            "lapcli", "calibrate", "demo:gdn", "--data", "builtin", "--samples", "7", "--seq-len", "256",
            "--dtype", "float64", "--kernel", "chunked", "--exact", "--grad", "--json",
            "--output", output, "--run", tmp_path / "run",
        ],
        capture_output=True, text=True, check=False, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["worked"]
    found = read_artifact(output, "calibration")
    assert found.lineage.record["device"] == "cuda"
    assert_the_same(found, one)
    assert_the_same_channels(found, one, tmp_path)


@pytest.fixture
def room(monkeypatch):
    return lambda places: monkeypatch.setattr(loading, "_room", lambda: places)


def test_a_model_spread_over_two_gpus(one, room, tmp_path):
    # The model takes 53 MB in fp64.
    room({0: 60_000_000, 1: 60_000_000, "cpu": 10**9})
    reporter = SilentReporter()
    machine = Machine(device="split", **OPTIONS)
    source = resolve_model("demo:gdn")
    found, _ = calibrate(
        source, SETTINGS, tmp_path / "c.safetensors", machine=machine, saliency=True, reporter=reporter
    )
    assert any("float64 on cuda:0, cuda:1" in notice for notice in reporter.notices), reporter.notices
    assert_the_same(found, one)
    assert_the_same_channels(found, one, tmp_path)


def test_a_model_larger_than_its_gpu_lies_in_memory(one, room, tmp_path):
    room({0: 40_000_000, "cpu": 10**9})
    reporter = SilentReporter()
    machine = Machine(device="split", **OPTIONS)
    source = resolve_model("demo:gdn")
    found, _ = calibrate(source, SETTINGS, tmp_path / "c.safetensors", machine=machine, reporter=reporter)
    assert any("float64 on cuda:0, cpu" in notice for notice in reporter.notices), reporter.notices
    wanted = {name: tensor for name, tensor in one.tensors().items() if "saliency" not in name}
    assert set(found.names) == set(wanted)
    for name, tensor in wanted.items():
        if "triangle" not in name:
            torch.testing.assert_close(
                found.tensor(name), tensor, rtol=1e-10, atol=1e-10 * tensor.abs().max().item(), msg=name
            )


def test_a_stock_model_spread_over_two_gpus(room, tmp_path):
    source = resolve_model(str(tiny_stock_model("mamba2", tmp_path / "m", num_hidden_layers=6)))
    settings = SETTINGS.model_copy(update={"exact": False})
    wanted, _ = calibrate(source, settings, tmp_path / "one.safetensors", machine=Machine("cuda:0", "float32"))
    size = sum(path.stat().st_size for path in source.path.glob("*.safetensors"))
    room({0: int(size * 0.7), 1: size * 2, "cpu": 10**9})
    reporter = SilentReporter()
    found, _ = calibrate(
        source, settings, tmp_path / "two.safetensors", machine=Machine("split", "float32"), reporter=reporter
    )
    assert any("cuda:0, cuda:1" in notice for notice in reporter.notices), reporter.notices
    # fp32 activations of the same batches on equal devices.
    assert_the_same(found, wanted, rtol=1e-5)
