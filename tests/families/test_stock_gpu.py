"""Stock transformers models on a GPU, with the library's fast kernels where they are installed, against the CPU.

The GPU machine has fla, but neither causal_conv1d nor mamba_ssm: Qwen's and Kimi's recurrences run in fla's chunked
kernels, everything of Mamba-2 in transformers' PyTorch functions on the device.
"""

import pytest
import torch

from lapcli.families.library_kernels import kernels_of
from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings
from lapcli.stages.calibration import calibrate
from lapcli.testing.oracle import masked, relative_error
from lapcli.testing.slices import layers_of, random_kept, sliced_by
from lapcli.testing.stock_models import tiny_stock_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # fla, triton and transformers warn about themselves.
    pytest.mark.filterwarnings("ignore"),
]

# Two fp32 evaluations in another order of sums, as prefill against cached decode.
FP32 = 2e-5
# fla's chunked kernels multiply fp32 in TF32, which rounds a factor by 2^-11 at most. Three layers with a state, each
# with some five products in a row (keys with keys, their inverse, the state, the read): as if every rounding were the
# largest, and all of one sign.
TF32 = 3 * 5 * 2**-11
CASES = {
    "qwen3_5": ({}, TF32, "fla"),
    "kimi_linear": ({}, TF32, "fla"),
    "mamba2": ({"n_groups": 2}, FP32, "PyTorch"),
}
IDS = torch.randint(3, 259, (2, 108), generator=torch.Generator().manual_seed(1))
KEPT = 16


@pytest.fixture(autouse=True)
def matrices_in_fp32(monkeypatch):
    """cuDNN's convolutions are in TF32 by default, torch's matrix products are not."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """The tiny model, its slice, its bound, and what must run its recurrence on a GPU."""
    config, bound, package = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    base = resolve_model(str(tiny_stock_model(request.param, folder / "base", **config)))
    return base, sliced_by(base, random_kept(base, KEPT), folder), bound, package


def logits(source, device):
    model = load_model(source, device=device)
    with torch.no_grad():
        return model(input_ids=IDS.to(device), use_cache=False).logits


def test_the_fast_kernels_are_those_that_run(case):
    base, _sliced, _bound, package = case
    fast, slow = load_model(base, device="cuda"), load_model(base, device="cpu")
    found = kernels_of(fast)
    chunked = ("chunk_gated", "chunk_scan", "chunk_kda")
    assert {runs for name, runs in found.items() if any(part in name for part in chunked)} == {package}
    # Before transformers' PyTorch function for decays of key channels goes lapkernels' chunked form.
    before = {"chunk_kda": "lapkernels"} if "chunk_kda" in found else {}
    assert kernels_of(slow) == dict.fromkeys(found, "PyTorch") | before


@pytest.mark.parametrize("which", ["unsliced", "sliced"])
def test_logits_are_those_of_the_cpu(case, which):
    base, sliced, bound, _package = case
    source = base if which == "unsliced" else sliced
    wanted = logits(source, "cpu")
    assert relative_error(logits(source, "cuda"), wanted) < bound


def test_sliced_equals_masked(case):
    base, sliced, bound, _package = case
    found = logits(sliced, "cuda")
    whole, layers = load_model(base, device="cuda"), layers_of(base)
    with torch.no_grad(), masked(whole, family_for(base.config), layers, random_kept(base, KEPT)):
        wanted = whole(input_ids=IDS.cuda(), use_cache=False).logits
    # The same kernels, but over other widths, so other roundings.
    assert relative_error(found, wanted) < bound
    assert relative_error(logits(base, "cuda"), wanted) > 2 * TF32  # the cut is larger than what is allowed


def test_calibration_sums_are_those_of_the_cpu(case, tmp_path):
    base, _sliced, bound, _package = case
    settings = CalibrationSettings(data="builtin", samples=4, seq_len=108)
    sums = {}
    for device in ("cpu", "cuda"):
        machine = Machine(device=device, dtype="float32")
        calibration, worked = calibrate(base, settings, tmp_path / device, machine=machine)
        assert worked
        sums[device] = calibration
    for name in sums["cpu"].names:
        # Squares: twice the relative error of what they are made of. What a later layer gets has passed the kernels of
        # all before it; what is read of the weights alone is the same.
        allowed = 0 if "magnitude" in name else 2 * bound
        assert relative_error(sums["cuda"].tensor(name), sums["cpu"].tensor(name)) <= allowed, name
