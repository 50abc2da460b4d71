"""Calibration: the sums are those of the activations, whatever the batches, and a kill costs nothing."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from lapcli.artifacts import read_artifact
from lapcli.data import token_blocks
from lapcli.errors import ArtifactError, DataError, FamilyError, ModelError, UsageError
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.families.registry import family_for
from lapcli.machine import Machine
from lapcli.reporting import SilentReporter
from lapcli.stages import calibration as module
from lapcli.stages.calibration import calibrate, has_saliency
from lapcli.stages.observation import _picks
from lapcli.testing.models import tiny_delta_net, tiny_gated_deltanet
from lapcli.testing.processes import run_forked
from lapcli.testing.stock_models import tiny_stock_model

CPU = Machine(device="cpu")


@pytest.fixture(scope="module", params=[256, 4096], ids=["six-batches", "one-batch"])
def calibrated(request, model, settings, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "calibration.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module._TOKENS_PER_BATCH, "cpu", request.param)
        artifact, worked = calibrate(model, settings, path, machine=CPU, saliency=True)
    assert worked
    return artifact


class Keep:
    """Keeps what passes, in fp64."""

    def __init__(self):
        self.q, self.k, self.x = [], [], []

    def mixer_input(self, hidden):
        self.x.append(hidden.double())

    def queries_keys(self, q, k):
        self.q.append(q.double())
        self.k.append(k.double())


def blocks_of(model, settings):
    return token_blocks(
        settings.data,
        load_tokenizer(model),
        samples=settings.samples,
        seq_len=settings.seq_len,
        seed=settings.seed,
        reporter=SilentReporter(),
    )


@pytest.fixture(scope="module")
def activations(model, settings):
    """Queries, keys and inputs of all tokens by layer, from passes of one row each."""
    family = family_for(model.config)
    network = load_model(model)
    kept = {}
    for layer in family.layers(model.config):
        keep = Keep()
        handles = family.attach(network, layer, keep)
        with torch.no_grad():
            for row in blocks_of(model, settings).ids:
                network(input_ids=row[None])
        for handle in handles:
            handle.remove()
        kept[layer.index] = {name: torch.cat(getattr(keep, name)).flatten(0, 1) for name in ("q", "k", "x")}
    return kept


def test_sums_are_those_of_the_activations(calibrated, activations):
    for index, kept in activations.items():
        for name, rows in (("gram_query", kept["q"]), ("gram_key", kept["k"])):
            wanted = torch.einsum("nhi,nhj->hij", rows, rows)
            found = calibrated.tensor(f"layers.{index}.{name}")
            assert found.dtype == torch.float64
            # Both sum the same fp32 activations in fp64; the activations differ by the fp32 rounding of another batch.
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
        wanted = kept["x"].square().sum(0)
        torch.testing.assert_close(calibrated.tensor(f"layers.{index}.input_sq"), wanted, rtol=1e-5, atol=0)


def test_weight_statistics_are_sums_over_rows(calibrated, model, activations):
    network = load_model(model)
    for index, kept in activations.items():
        for side in ("key", "query"):
            weight = network.get_parameter(f"model.layers.{index}.attn.{side[0]}_proj.weight").detach().double()
            rows = weight.view(2, 32, -1).abs()
            magnitude = calibrated.tensor(f"layers.{index}.magnitude_{side}")
            torch.testing.assert_close(magnitude, rows.sum(-1), rtol=1e-12, atol=0)
            wanted = (rows * kept["x"].square().sum(0).sqrt()).sum(-1)
            torch.testing.assert_close(calibrated.tensor(f"layers.{index}.wanda_{side}"), wanted, rtol=1e-5, atol=0)


def test_saliency_is_weight_times_gradient_of_the_mean_loss(calibrated, model, settings):
    network = load_model(model).train(False)
    ids = blocks_of(model, settings).ids
    network(input_ids=ids, labels=ids).loss.backward()
    for index in (0, 1):
        for side in ("key", "query"):
            weight = network.get_parameter(f"model.layers.{index}.attn.{side[0]}_proj.weight")
            wanted = (weight * weight.grad).detach().double().abs().view(2, 32, -1).sum(-1)
            found = calibrated.tensor(f"layers.{index}.saliency_{side}")
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * wanted.max().item())


def test_a_second_run_does_no_work(calibrated, model, settings, monkeypatch):
    monkeypatch.setattr(module, "load_model", None)
    artifact, worked = calibrate(model, settings, calibrated.path, machine=CPU, saliency=True)
    assert not worked
    assert artifact.names == calibrated.names


@pytest.mark.parametrize("saliency", [False, True])
def test_gradients_are_taken_where_they_are_right(model, settings, tmp_path, monkeypatch, saliency):
    """What recovery asks of a library's model on a GPU, calibration asks of it where it needs gradients."""
    asked = []
    monkeypatch.setattr(module, "use_right_gradients", lambda network, *_: asked.append(type(network).__name__))
    calibrate(model, settings, tmp_path / "found.safetensors", machine=CPU, saliency=saliency)
    assert bool(asked) == saliency


def test_saliency_extends_and_keeps_the_sums(model, settings, tmp_path):
    at_once, _ = calibrate(model, settings, tmp_path / "at-once.safetensors", machine=CPU, saliency=True)
    path = tmp_path / "c.safetensors"
    first, _ = calibrate(model, settings, path, machine=CPU)
    assert not has_saliency(first)
    sums = first.tensors()
    second, worked = calibrate(model, settings, path, machine=CPU, saliency=True)
    assert worked
    assert has_saliency(second)
    for name, tensor in second.tensors().items():
        assert torch.equal(tensor, sums.get(name, at_once.tensor(name))), name


def test_another_text_is_stale_and_says_so(model, settings, calibrated):
    other = settings.model_copy(update={"samples": 8})
    with pytest.raises(ArtifactError, match="samples: 8 wanted, 12 found"):
        calibrate(model, other, calibrated.path, machine=CPU)


def test_memory_does_not_grow_with_the_text(model, settings, calibrated, tmp_path):
    few, _ = calibrate(model, settings.model_copy(update={"samples": 2}), tmp_path / "few.safetensors", machine=CPU)
    sizes = [sum(t.nbytes for n, t in a.tensors().items() if "saliency" not in n) for a in (few, calibrated)]
    assert sizes[0] == sizes[1]


def test_exact_triangles_are_roots_of_the_gram_matrices(model, settings, activations, tmp_path):
    exact, _ = calibrate(
        model, settings.model_copy(update={"exact": True}), tmp_path / "exact.safetensors", machine=CPU
    )
    for name, rows in (("query", activations[0]["q"]), ("key", activations[0]["k"])):
        triangle = exact.tensor(f"layers.0.triangle_{name}")
        assert torch.equal(triangle, triangle.triu())
        gram = exact.tensor(f"layers.0.gram_{name}")
        torch.testing.assert_close(triangle.mT @ triangle, gram, rtol=1e-10, atol=1e-10 * gram.abs().max().item())
        # Singular values of the rows themselves, which share nothing with either sum; the bound is the fp32
        # rounding of the activations, which came through another batch.
        wanted = torch.linalg.svdvals(rows.transpose(0, 1))
        found = torch.linalg.svdvals(triangle)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6 * wanted.max().item())


def test_rows_draws_that_many(model, settings, activations, tmp_path):
    drawn, _ = calibrate(model, settings.model_copy(update={"rows": 40}), tmp_path / "rows.safetensors", machine=CPU)
    (layer, *_rest) = family_for(model.config).layers(model.config)
    queries, keys = _picks(settings.model_copy(update={"rows": 40}), layer)
    assert len(queries) == len(keys) == 40
    assert not torch.equal(queries, keys)
    for name, rows in (("query", activations[0]["q"][queries]), ("key", activations[0]["k"][keys])):
        wanted = torch.einsum("nhi,nhj->hij", rows, rows)
        found = drawn.tensor(f"layers.0.gram_{name}")
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def test_normalized_rows_have_length_one(model, settings, tmp_path):
    changed = settings.model_copy(update={"normalized": True})
    unit, _ = calibrate(model, changed, tmp_path / "unit.safetensors", machine=CPU)
    trace = unit.tensor("layers.0.gram_query").diagonal(dim1=-2, dim2=-1).sum(-1)
    tokens = settings.samples * settings.seq_len
    # The 1e-6 under the root shortens small vectors a little.
    assert (trace <= tokens).all()
    assert (trace > 0.99 * tokens).all()


@pytest.mark.parametrize(
    "build",
    [
        lambda folder: tiny_delta_net(folder, qk_norm="sum"),
        lambda folder: tiny_stock_model("mamba2", folder),
        lambda folder: tiny_stock_model("nemotron_h", folder),
    ],
    ids=["delta-net-sum", "mamba2", "hybrid"],
)
def test_normalized_is_refused_where_the_model_does_not_normalise(build, settings, tmp_path):
    source = resolve_model(str(build(tmp_path / "m")))
    module.check_calibration(source, settings, SilentReporter())
    with pytest.raises(UsageError, match="without L2 normalisation"):
        module.check_calibration(source, settings.model_copy(update={"normalized": True}), SilentReporter())


KILLED = """
import os, signal, sys
from pathlib import Path
from lapcli.families.loading import resolve_model
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings
from lapcli.stages import calibration as module

module._TOKENS_PER_BATCH["cpu"] = 256
saved = module._Partial.save
left = int(sys.argv[4])

def save(self, done, tensors):
    global left
    saved(self, done, tensors)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

module._Partial.save = save
settings = CalibrationSettings(data=sys.argv[2], samples=12, seq_len=128)
module.calibrate(resolve_model(sys.argv[1]), settings, Path(sys.argv[3]), machine=Machine(device="cpu"),
                 saliency=True, checkpoint_seconds=0.0)
"""


@pytest.mark.parametrize(
    ("batches", "notice"),
    [(2, "after 4 of 12 samples of earlier sums"), (8, "after 4 of 12 samples of an earlier saliency pass")],
    ids=["in-the-sums", "in-the-saliency"],
)
def test_killed_and_started_again_it_is_bit_equal(model, settings, tmp_path, monkeypatch, batches, notice):
    monkeypatch.setitem(module._TOKENS_PER_BATCH, "cpu", 256)
    unbroken, _ = calibrate(model, settings, tmp_path / "unbroken.safetensors", machine=CPU, saliency=True)
    path = tmp_path / "killed.safetensors"
    killed = run_forked(model.path, settings.data, path, batches, program=KILLED, threads=torch.get_num_threads())
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # The sums are whole before the saliency pass begins.
    assert path.exists() == ("saliency" in notice)
    reporter = SilentReporter()
    with pytest.MonkeyPatch.context() as patch:
        if path.exists():
            assert not has_saliency(read_artifact(path, "calibration"))
            patch.setattr(module, "_gram_pass", None)
        resumed, _ = calibrate(model, settings, path, machine=CPU, saliency=True, reporter=reporter)
    assert any(notice in said for said in reporter.notices), reporter.notices
    assert resumed.names == unbroken.names
    for name, tensor in resumed.tensors().items():
        assert torch.equal(tensor, unbroken.tensor(name)), name
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".killed")] == []


def test_a_damaged_calibration_is_refused_unless_told(model, settings, tmp_path):
    path = tmp_path / "c.safetensors"
    path.write_bytes(b"half a file")
    with pytest.raises(ArtifactError, match="truncated"):
        calibrate(model, settings, path, machine=CPU)
    calibrate(model, settings, path, machine=CPU, overwrite=True)
    read_artifact(path, "calibration")


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_noticed_and_mended(model, settings, tmp_path):
    path = tmp_path / "c.safetensors"
    whole, _ = calibrate(model, settings, path, machine=CPU)
    bytes_before = path.read_bytes()
    flip_a_byte(path)
    with pytest.raises(ArtifactError, match=r"(?s)is damaged.*lapcli calibrate.*--overwrite"):
        calibrate(model, settings, path, machine=CPU, saliency=True)
    again, worked = calibrate(model, settings, path, machine=CPU, overwrite=True)
    assert worked
    assert path.read_bytes() == bytes_before
    assert not calibrate(model, settings, path, machine=CPU, overwrite=True)[1]
    assert again.names == whole.names


def test_another_dtype_is_stale_only_when_asked_for(model, settings, tmp_path):
    path = tmp_path / "c.safetensors"
    wide = Machine(device="cpu", dtype="float64")
    calibrate(model, settings, path, machine=wide)
    assert not calibrate(model, settings, path, machine=CPU)[1]
    assert not calibrate(model, settings, path, machine=wide)[1]
    narrow = Machine(device="cpu", dtype="float32")
    with pytest.raises(ArtifactError, match=r"(?s)computed in float64, but --dtype float32 .*--overwrite"):
        calibrate(model, settings, path, machine=narrow)
    extended, _ = calibrate(model, settings, path, machine=CPU, saliency=True)
    assert extended.lineage.record["dtype"] == "float64"
    replaced, worked = calibrate(model, settings, path, machine=narrow, overwrite=True)
    assert worked
    assert replaced.lineage.record["dtype"] == "float32"


def test_nan_statistics_name_the_layer(settings, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_gated_deltanet(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.attn.k_proj.weight"][3, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"keys of layer 1 \(model\.layers\.1\.attn\)"):
        calibrate(resolve_model(str(folder)), settings, tmp_path / "c.safetensors", machine=CPU)
    assert not (tmp_path / "c.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 1, "seq_len": 16}, "16 tokens cannot span the 32 key channels"),
        ({"rows": 8}, "8 tokens cannot span the 32 key channels"),
        ({"seq_len": 4096}, "longer than the 2048 tokens"),
    ],
    ids=["few-tokens", "few-rows", "long"],
)
def test_hopeless_requests_are_refused_before_any_work(model, settings, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(module, "load_tokenizer", None)
    with pytest.raises(DataError, match=message):
        calibrate(model, settings.model_copy(update=changes), tmp_path / "c.safetensors", machine=CPU)


def test_unknown_family_lists_the_known(model, settings, tmp_path):
    import json

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "m" / "model.safetensors").write_bytes((model.path / "model.safetensors").read_bytes())
    with pytest.raises(FamilyError, match=r"delta_net, .*gated_deltanet"):
        calibrate(resolve_model(str(tmp_path / "m")), settings, tmp_path / "c.safetensors", machine=CPU)


def test_softmax_layers_are_skipped_with_a_word(settings, tmp_path):
    source = resolve_model(str(tiny_delta_net(tmp_path / "m")))
    source.config["attn"] = {"layers": [1], "num_heads": 2}
    reporter = SilentReporter()
    layers = module.check_calibration(source, settings, reporter)
    assert [layer.index for layer in layers] == [0]
    assert "1 layer keeps no state and is skipped" in reporter.notices[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_cuda_is_a_usage_error():
    with pytest.raises(UsageError, match="there are 0 CUDA devices here"):
        Machine(device="cuda").torch_device()


def test_require_fast_fails_where_nothing_is_fast(model, settings, tmp_path):
    reporter = SilentReporter()
    calibrate(model, settings, tmp_path / "c.safetensors", machine=CPU, reporter=reporter)
    assert sum(notice.startswith("kernel: chunked") for notice in reporter.notices) == 1
    fast = Machine(device="cpu", require_fast=True)
    with pytest.raises(ModelError, match="--require-fast: the chunked kernel would run"):
        calibrate(model, settings, tmp_path / "d.safetensors", machine=fast)


@pytest.mark.parametrize("delay", [0.0, 0.3], ids=["at-the-lock", "importing"])
def test_sigterm_before_the_work_began_leaves_nothing(model, tmp_path, delay):
    """The command, stopped at any moment, says so and exits 130."""
    run = tmp_path / "run"
    # `recall` is endless, so this many samples outlast the test on any machine.
    arguments = [sys.executable, "-m", "lapcli", "calibrate", str(model.path), "--data", "recall"]
    arguments += ["--samples", "1000000", "--seq-len", "128", "--run", str(run)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (run / ".lock").exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    _out, err = process.communicate()
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert not (run / "calibration.safetensors").exists()
