"""What a GPU measures by taking all matrices at once is what a CPU measures one state after the other."""

import re

import pytest
import torch

from lapcli.analysis import measuring, walking
from lapcli.analysis.findings import LayerFindings
from lapcli.analysis.measuring import OnDevice, OnHost
from lapcli.analysis.states import Walker
from lapcli.analysis.walking import walk
from lapcli.errors import ModelError
from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.stock_models import tiny_stock_model

IDS = torch.randint(3, 259, (3, 60), generator=torch.Generator().manual_seed(3))
POSITIONS = [8, 24, 40, 56]


def on_a_gpu(test):
    """Where there is one; fla and triton warn about themselves."""
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
        test = pytest.mark.filterwarnings(f"ignore::{kind}")(test)
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test))


def walker_of(folder, device="cpu", dtype=torch.float64):
    source = resolve_model(str(folder))
    family = family_for(source.config)
    return Walker(load_model(source, device=device, dtype=dtype), family, family.layers(source.config))


def assert_same(found, wanted, rtol=1e-12):
    """Effective ranks to `rtol`; what has a condition number in it as far as a Gram matrix in fp64 tells."""
    assert found.keys() == wanted.keys()
    for label, layers in wanted.items():
        for index, layer in layers.items():
            mine = found[label][index]
            assert mine.floored == layer.floored
            torch.testing.assert_close(mine.rank, layer.rank, rtol=rtol, atol=0)
            torch.testing.assert_close(mine.spectrum, layer.spectrum, rtol=0, atol=1e-6 * layer.rank[..., 0].numel())
            for name in ("kappa", "key_kappa", "key_margin"):
                torch.testing.assert_close(
                    getattr(mine, name), getattr(layer, name), rtol=max(1e-3, rtol), atol=0, equal_nan=True
                )
            if layer.squares:
                for inputs in ("own", "base"):
                    assert mine.error(inputs) == pytest.approx(layer.error(inputs), rel=max(1e-12, rtol))


def gathering(monkeypatch, **sizes):
    for name, value in sizes.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(walking, "measurer_for", lambda _device, findings: OnDevice(findings))


@pytest.mark.parametrize("values", [1 << 22, 1500, 1], ids=["all", "some", "each"])
def test_gathered_over_positions_it_is_the_same(tmp_path, monkeypatch, values):
    # More value heads than key heads, V unlike K, a model of another key width beside it, batches of 2 and of 1.
    folder = tiny_gated_deltanet(tmp_path / "model", num_v_heads=4, expand_v=0.5)
    other = tiny_gated_deltanet(tmp_path / "other", num_v_heads=4, expand_v=1.0, head_dim=16, seed=4)
    walkers = {"base": walker_of(folder), "other": walker_of(other)}
    assert walkers["base"].layers[0].key_width != walkers["other"].layers[0].key_width
    wanted = walk(walkers, IDS, POSITIONS, batch=2)
    gathering(monkeypatch, _GATHERED_VALUES=values, _MATRIX_BYTES=1 << 16)
    assert_same(walk(walkers, IDS, POSITIONS, batch=2), wanted)


def test_of_a_stock_model_too(tmp_path, monkeypatch):
    walkers = {"base": walker_of(tiny_stock_model("mamba2", tmp_path / "model", n_groups=2))}
    wanted = walk(walkers, IDS, POSITIONS, batch=3)
    gathering(monkeypatch)
    assert_same(walk(walkers, IDS, POSITIONS, batch=3), wanted)


def test_a_state_of_zeros_has_no_rank(tmp_path, monkeypatch):
    walker = walker_of(tiny_gated_deltanet(tmp_path / "model"))
    with torch.no_grad():
        walker.model.get_submodule(walker.layers[0].mixer).v_proj.weight.zero_()
    gathering(monkeypatch)
    found = walk({"base": walker}, IDS, POSITIONS, batch=3)["base"][0]
    assert not found.rank.any()
    assert found.floored == found.rank.numel()
    assert found.key_margin.isnan().all()


def test_a_state_that_is_not_finite_is_named_there_too(tmp_path, monkeypatch):
    walker = walker_of(tiny_gated_deltanet(tmp_path / "model"))
    with torch.no_grad():
        walker.model.get_submodule(walker.layers[1].mixer).v_proj.weight[0, 0] = torch.nan
    gathering(monkeypatch)
    with pytest.raises(ModelError, match=r"layer 1 \(model\.layers\.1\.attn\) of base"):
        walk({"base": walker}, IDS, POSITIONS, batch=3)


def test_short_stretches_change_nothing_and_progress_says_where_the_time_goes(tmp_path):
    class Progress:
        done, said = 0, ""

        def advance(self, amount=1):
            self.done += amount

        def note(self, text):
            self.said = text

    walkers = {label: walker_of(tiny_gated_deltanet(tmp_path / label)) for label in ("base", "other")}
    progress = Progress()
    found = walk(walkers, IDS, POSITIONS, batch=2, longest=5, progress=progress)
    assert_same(found, walk(walkers, IDS, POSITIONS, batch=2), rtol=1e-9)
    assert progress.done == 2 * 3 * POSITIONS[-1]
    assert re.fullmatch(r"\d+ s reading, \d+ s measuring, after 56 tokens of 3 of 3 samples", progress.said)


class _OnCpu:
    """A walker's states and keys, on the CPU."""

    def __init__(self, walker):
        self._walker, self.layers = walker, walker.layers

    def state(self, layer):
        return self._walker.state(layer).cpu()

    def gram(self, layer):
        return self._walker.gram(layer).cpu()


class _Both:
    """Measures on the device, and the same states on the CPU."""

    def __init__(self, findings, beside):
        self._device, self._host = OnDevice(findings), OnHost(beside)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self._host.__exit__(None, None, None)

    def measure(self, label, walker, rows, position):
        self._device.measure(label, walker, rows, position)
        self._host.measure(label, _OnCpu(walker), rows, position)

    def finish(self):
        self._device.finish()


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_measures_its_states_as_a_cpu_would(tmp_path, monkeypatch, dtype):
    folder = tiny_gated_deltanet(tmp_path / "model", num_v_heads=4)
    other = tiny_gated_deltanet(tmp_path / "other", num_v_heads=4, head_dim=16, expand_v=2.0)
    walkers = {"base": walker_of(folder, "cuda", dtype), "other": walker_of(other, "cuda", dtype)}
    wanted = {
        label: {layer.index: LayerFindings.of(layer, len(IDS), len(POSITIONS)) for layer in walker.layers}
        for label, walker in walkers.items()
    }
    monkeypatch.setattr(walking, "measurer_for", lambda _device, findings: _Both(findings, wanted))
    assert_same(walk(walkers, IDS, POSITIONS, batch=2, longest=16), wanted)


@on_a_gpu
def test_a_gpu_finds_in_fp64_what_a_cpu_finds(tmp_path):
    folder = tiny_gated_deltanet(tmp_path / "model", num_v_heads=4, expand_v=0.5)
    other = tiny_gated_deltanet(tmp_path / "other", num_v_heads=4, expand_v=0.5, seed=4)
    places = {"base": folder, "other": other}
    wanted = walk({label: walker_of(each) for label, each in places.items()}, IDS, POSITIONS, batch=2)
    found = walk(
        {label: walker_of(each, "cuda") for label, each in places.items()}, IDS, POSITIONS, batch=3, longest=16
    )
    # The models' own sums have another order.
    assert_same(found, wanted, rtol=1e-9)
