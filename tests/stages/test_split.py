"""Models larger than a device, and what a calibration holds in memory: one layer's keys and queries, no logits."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lapcli.cli.app import main
from lapcli.errors import ModelError
from lapcli.families import loading
from lapcli.families.source import resolve_model
from lapcli.machine import Machine
from lapcli.reporting import SilentReporter
from lapcli.stages import calibration, observation
from lapcli.stages.calibration import calibrate
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.stock_models import tiny_stock_model

# It is looked whether models go.
pytestmark = pytest.mark.usefixtures("older_objects_left_alone")

SPLIT = Machine(device="split", dtype="float32")


@pytest.fixture(scope="module", params=["gated_deltanet", "qwen3_next", "mamba2"])
def any_model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("split") / request.param
    if request.param == "gated_deltanet":
        return resolve_model(str(tiny_gated_deltanet(folder, num_hidden_layers=4)))
    return resolve_model(str(tiny_stock_model(request.param, folder)))


@pytest.fixture
def small_memory(monkeypatch, tmp_path):
    """Room for some of the model's weights; the rest goes to disk."""

    def room(source, part):
        weights = sum(path.stat().st_size for path in source.path.glob("*.safetensors"))
        monkeypatch.setattr(loading, "_room", lambda: {"cpu": int(weights * part)})

    monkeypatch.setattr(loading.tempfile, "tempdir", str(tmp_path))
    return room


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be spread over the GPUs")
@pytest.mark.parametrize("part", [2.0, 0.6, 0.0], ids=["all-fits", "some-on-disk", "all-on-disk"])
def test_a_model_on_disk_gives_the_same_sums(any_model, settings, small_memory, tmp_path, part):
    wanted, _ = calibrate(any_model, settings, tmp_path / "whole.safetensors", machine=Machine(device="cpu"))
    small_memory(any_model, part)
    reporter = SilentReporter()
    found, _ = calibrate(any_model, settings, tmp_path / "split.safetensors", machine=SPLIT, reporter=reporter)
    assert any("float32 on " in notice and ("disk" in notice) == (part < 1) for notice in reporter.notices)
    assert found.names == wanted.names
    for name, tensor in wanted.tensors().items():
        assert torch.equal(found.tensor(name), tensor), name
    gc.collect()
    assert not list(tmp_path.glob("lapcli-split-*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be spread over the GPUs")
def test_gradients_need_weights_that_stay(any_model, settings, small_memory, tmp_path):
    small_memory(any_model, 0.6)
    with pytest.raises(ModelError, match=r"--grad needs the weights of .* to stay where they compute"):
        calibrate(any_model, settings, tmp_path / "c.safetensors", machine=SPLIT, saliency=True)
    assert not (tmp_path / "c.safetensors").exists()
    small_memory(any_model, 2.0)
    wanted, _ = calibrate(
        any_model, settings, tmp_path / "whole.safetensors", machine=Machine(device="cpu"), saliency=True
    )
    found, _ = calibrate(any_model, settings, tmp_path / "c.safetensors", machine=SPLIT, saliency=True)
    for name, tensor in wanted.tensors().items():
        assert torch.equal(found.tensor(name), tensor), name


def test_a_split_model_keeps_the_dtype_of_its_checkpoint():
    assert Machine(device="split").torch_dtype({"dtype": "bfloat16"}) == torch.bfloat16


def test_other_stages_refuse_it(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lapcli", "bench", "calibration", "--device", "split"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    assert "--device split is for calibrate and prune" in capsys.readouterr().err


def test_a_pass_holds_one_layer_of_keys_and_queries_and_no_logits(any_model, settings, tmp_path, monkeypatch):
    """No storage that taps hand out, and no input of a mixer, outlives the layer."""
    earlier: dict[int, list[StorageWeakRef]] = {}
    alive: list[int] = []
    original = {name: getattr(observation._Sums, name) for name in ("mixer_input", "queries_keys")}

    def remembering(name):
        def look(self, *tensors):
            refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
            mine = self.layer.index
            alive.append(sum(not ref.expired() for layer, old in earlier.items() if layer != mine for ref in old))
            earlier.setdefault(mine, []).extend(refs)
            return original[name](self, *tensors)

        return look

    for name in original:
        monkeypatch.setattr(observation._Sums, name, remembering(name))
    logits: list[int] = []
    load = calibration.load_model

    def watched(*arguments, **options):
        network = load(*arguments, **options)
        network.get_output_embeddings().register_forward_hook(lambda *_: logits.append(1))
        return network

    monkeypatch.setattr(calibration, "load_model", watched)
    monkeypatch.setitem(calibration._TOKENS_PER_BATCH, "cpu", 512)
    calibrate(any_model, settings, tmp_path / "c.safetensors", machine=Machine(device="cpu"))
    layers, batches = len(earlier), 3
    assert layers > 1
    assert len(alive) == 2 * layers * batches
    assert max(alive) == 0
    assert not logits


def test_the_folder_of_a_model_that_is_refused_is_gone(small_memory, tmp_path, monkeypatch):
    def refuse(_source, _loaded):
        assert len(list(tmp_path.glob("lapcli-split-*"))) == 1
        raise ModelError("refused")

    source = resolve_model(str(tiny_gated_deltanet(tmp_path / "m")))
    small_memory(source, 0.0)
    monkeypatch.setattr(loading, "_refuse_partial", refuse)
    with pytest.raises(ModelError, match="refused"):
        loading.load_model(source, split=True)
    gc.collect()
    assert not list(tmp_path.glob("lapcli-split-*"))
