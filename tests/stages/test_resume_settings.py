"""A calibration that was stopped and is taken up with other settings of the machine, or on another text.

Sums of other batches, another dtype or another kind of device round otherwise. They are not mixed: the calibration
starts again and is, bit for bit, the unbroken one of the settings it ends with.
"""

import shutil
from dataclasses import replace

import pytest
import torch

from lapcli.artifacts import read_artifact, write_artifact
from lapcli.machine import Machine
from lapcli.reporting import SilentReporter
from lapcli.stages import calibration as module
from lapcli.stages.calibration import calibrate

CPU = Machine(device="cpu")


class Stopped(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.fixture
def batch_tokens(monkeypatch):
    """Sets the tokens of a batch."""
    return lambda tokens: monkeypatch.setitem(module._TOKENS_PER_BATCH, "cpu", tokens)


@pytest.fixture
def stop_after(model, monkeypatch):
    """Runs a calibration that stops after some batches of a pass, its sums on disk."""

    def run(batches, settings, path, part="sums", **options):
        save, left = module._Partial.save, [batches]

        def saving(self, done, tensors):
            save(self, done, tensors)
            left[0] -= self.path.name.endswith(f".{part}")
            if left[0] == 0:
                raise Stopped

        with monkeypatch.context() as patch:
            patch.setattr(module._Partial, "save", saving)
            with pytest.raises(Stopped):
                calibrate(model, settings, path, checkpoint_seconds=0.0, **{"machine": CPU, **options})
        partial = path.with_name(f".{path.name}.{part}")
        assert partial.is_file()
        return partial

    return run


def finished(model, settings, path, **options):
    """A calibration, and what was said of earlier sums."""
    reporter = SilentReporter()
    artifact, worked = calibrate(model, settings, path, reporter=reporter, **{"machine": CPU, **options})
    assert worked
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(f".{path.name}")] == []
    return artifact, [notice for notice in reporter.notices if "going on" in notice]


def assert_bit_equal(found, wanted):
    assert found.names == wanted.names
    for name, tensor in wanted.tensors().items():
        assert torch.equal(found.tensor(name), tensor), name


def test_other_batches_start_again_and_differ_by_the_order_of_sums_alone(
    model, settings, tmp_path, batch_tokens, stop_after
):
    batch_tokens(256)
    before, _ = finished(model, settings, tmp_path / "before.safetensors")
    path = tmp_path / "c.safetensors"
    stop_after(2, settings, path)
    batch_tokens(512)
    unbroken, _ = finished(model, settings, tmp_path / "unbroken.safetensors")
    found, notices = finished(model, settings, path)
    assert not notices
    assert_bit_equal(found, unbroken)
    for name, tensor in before.tensors().items():
        # fp32 activations of another batch, summed in fp64.
        torch.testing.assert_close(
            found.tensor(name), tensor, rtol=1e-5, atol=1e-5 * tensor.abs().max().item(), msg=name
        )


def test_a_saliency_pass_of_other_batches_starts_again(model, settings, tmp_path, batch_tokens, stop_after):
    """The finished sums stay what they are; the gradients are those of the batches it ends with."""
    batch_tokens(256)
    path, unbroken = tmp_path / "c.safetensors", tmp_path / "unbroken.safetensors"
    sums, _ = finished(model, settings, path)
    shutil.copyfile(path, unbroken)
    stored = sums.tensors()
    stop_after(2, settings, path, part="gradients", saliency=True)
    batch_tokens(512)
    wanted, _ = finished(model, settings, unbroken, saliency=True)
    found, notices = finished(model, settings, path, saliency=True)
    assert not notices
    assert_bit_equal(found, wanted)
    for name, tensor in stored.items():
        assert torch.equal(found.tensor(name), tensor), name


@pytest.mark.parametrize(("first", "then"), [("bfloat16", "float32"), ("float32", "float64")])
def test_another_dtype_starts_again(model, settings, tmp_path, batch_tokens, stop_after, first, then):
    """No file holds sums of two dtypes under the name of one."""
    batch_tokens(256)
    path = tmp_path / "c.safetensors"
    stop_after(2, settings, path, machine=replace(CPU, dtype=first))
    unbroken, _ = finished(model, settings, tmp_path / "unbroken.safetensors", machine=replace(CPU, dtype=then))
    found, notices = finished(model, settings, path, machine=replace(CPU, dtype=then))
    assert found.lineage.record["dtype"] == then
    assert not notices
    assert_bit_equal(found, unbroken)


def test_another_kernel_starts_again_and_changes_the_sums_by_its_rounding_alone(
    model, settings, tmp_path, batch_tokens, stop_after
):
    batch_tokens(256)
    path = tmp_path / "c.safetensors"
    before, _ = finished(model, settings, tmp_path / "before.safetensors", machine=replace(CPU, kernel="reference"))
    stop_after(2, settings, path, machine=replace(CPU, kernel="reference"))
    unbroken, _ = finished(model, settings, tmp_path / "unbroken.safetensors", machine=replace(CPU, kernel="chunked"))
    found, notices = finished(model, settings, path, machine=replace(CPU, kernel="chunked"))
    assert not notices
    assert_bit_equal(found, unbroken)
    for name, tensor in before.tensors().items():
        torch.testing.assert_close(
            found.tensor(name), tensor, rtol=1e-5, atol=1e-5 * tensor.abs().max().item(), msg=name
        )


def test_a_kernel_asked_for_by_the_name_that_auto_has_goes_on(model, settings, tmp_path, batch_tokens, stop_after):
    batch_tokens(256)
    path = tmp_path / "c.safetensors"
    unbroken, _ = finished(model, settings, tmp_path / "unbroken.safetensors")
    stop_after(2, settings, path)
    found, notices = finished(model, settings, path, machine=replace(CPU, kernel="chunked"))
    assert notices == ["going on after 4 of 12 samples of earlier sums"]
    assert_bit_equal(found, unbroken)


def test_a_text_that_changed_meanwhile_starts_again(model, settings, text, tmp_path, batch_tokens, stop_after):
    batch_tokens(256)
    mine = tmp_path / "text.txt"
    mine.write_text(text.read_text())
    settings = settings.model_copy(update={"data": str(mine)})
    path = tmp_path / "c.safetensors"
    stop_after(2, settings, path)
    mine.write_text(text.read_text().replace("Line", "Verse"))
    unbroken, _ = finished(model, settings, tmp_path / "unbroken.safetensors")
    found, notices = finished(model, settings, path)
    assert not notices
    assert_bit_equal(found, unbroken)


@pytest.mark.parametrize(
    ("changes", "goes_on"),
    [
        ({}, True),
        ({"device": "cuda"}, False),
        ({"batch": 1}, False),
        ({"kernel": "reference"}, False),
        ({"corpus": "0" * 64}, False),
    ],
    ids=["nothing-else", "device", "batch", "kernel", "corpus"],
)
def test_sums_of_another_device_batch_or_text_are_not_taken_up(
    model, settings, tmp_path, batch_tokens, stop_after, changes, goes_on
):
    """The sums on disk are doubled, so that whoever takes them up shows it; with nothing else changed they are."""
    batch_tokens(256)
    unbroken, _ = finished(model, settings, tmp_path / "unbroken.safetensors")
    path = tmp_path / "c.safetensors"
    partial = stop_after(2, settings, path)
    stored = read_artifact(partial)
    assert changes.keys() <= stored.lineage.record["key"].keys()
    record = {**stored.lineage.record, "key": stored.lineage.record["key"] | changes}
    doubled = {name: 2 * tensor for name, tensor in stored.tensors().items()}
    write_artifact(partial, replace(stored.lineage, record=record), doubled)
    found, notices = finished(model, settings, path)
    if goes_on:
        assert notices == ["going on after 4 of 12 samples of earlier sums"]
        assert not torch.equal(found.tensor("layers.0.gram_key"), unbroken.tensor("layers.0.gram_key"))
    else:
        assert not notices
        assert_bit_equal(found, unbroken)


def test_sums_cut_short_on_disk_are_not_taken_up(model, settings, tmp_path, batch_tokens, stop_after):
    batch_tokens(256)
    unbroken, _ = finished(model, settings, tmp_path / "unbroken.safetensors")
    path = tmp_path / "c.safetensors"
    partial = stop_after(2, settings, path)
    partial.write_bytes(partial.read_bytes()[:-10])
    found, notices = finished(model, settings, path)
    assert not notices
    assert_bit_equal(found, unbroken)
