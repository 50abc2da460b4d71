"""Artifacts: whole or not at all, and never mistaken for another."""

import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lapcli.artifacts import (
    Lineage,
    RunDirectory,
    artifact_digest,
    atomic_directory,
    atomic_file,
    digest_weights,
    read_artifact,
    read_header,
    write_artifact,
    write_document,
)
from lapcli.errors import ArtifactError


def lineage(**changes):
    values = {"kind": "selection", "model": {"name": "m", "digest": "aa"}, "family": "f", "settings": {"ratio": "0.5"}}
    return Lineage(**(values | changes))


@pytest.fixture
def written(tmp_path):
    return write_artifact(tmp_path / "a.safetensors", lineage(), {"x": torch.arange(6).reshape(2, 3)})


def test_round_trip(written):
    read = read_artifact(written.path, "selection")
    assert read.lineage == lineage()
    assert read.names == ("x",)
    assert torch.equal(read.tensor("x"), torch.arange(6).reshape(2, 3))


def test_a_view_does_not_drag_its_storage_along(tmp_path):
    base = torch.zeros(1000, 1000)
    artifact = write_artifact(tmp_path / "v.safetensors", lineage(), {"x": base[:2, :2]})
    assert artifact.path.stat().st_size < 4096


def test_digest_follows_identity_and_content(tmp_path):
    def digest(name, value, **changes):
        return artifact_digest(write_artifact(tmp_path / name, lineage(**changes), {"x": torch.tensor([value])}))

    first = digest("1", 1)
    assert digest("2", 1) == first
    assert digest("3", 2) != first
    assert digest("4", 1, settings={"ratio": "0.25"}) != first
    # What was merely found on the way does not change what it is.
    assert digest("5", 1, record={"tokens": 3}) == first


def test_every_difference_is_named():
    other = lineage(
        model={"name": "n", "digest": "bb"}, settings={"ratio": "0.25", "seed": 1}, parents={"calibration": "c"}
    )
    text = "; ".join(lineage().differences(other))
    for part in (
        "m (aa) wanted, n (bb) found",
        "ratio: 0.5 wanted, 0.25 found",
        "seed: the default wanted",
        "calibration",
    ):
        assert part in text


@pytest.mark.parametrize("cut", [1, 100, -1], ids=["header", "inside", "last-byte"])
def test_truncated_files_are_refused(written, cut):
    data = written.path.read_bytes()
    written.path.write_bytes(data[: cut if cut > 0 else len(data) - 1])
    with pytest.raises(ArtifactError, match="truncated"):
        read_artifact(written.path)


def test_foreign_and_mistaken_files_are_refused(tmp_path, written):
    save_file({"x": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ArtifactError, match="no lapcli artifact"):
        read_artifact(tmp_path / "foreign.safetensors")
    with pytest.raises(ArtifactError, match="is a selection, but a calibration is wanted"):
        read_artifact(written.path, "calibration")
    with pytest.raises(ArtifactError, match="there is no calibration"):
        read_artifact(tmp_path / "none.safetensors", "calibration")
    (tmp_path / "text").write_text("hello, this is no tensor file")
    with pytest.raises(ArtifactError, match="truncated or no safetensors"):
        read_artifact(tmp_path / "text")


def test_newer_schema_names_both_versions(tmp_path, written):
    header = read_header(written.path)
    document = json.loads(header.metadata["lapcli"]) | {"schema": 99, "lapcli": "9.9"}
    save_file({"x": torch.zeros(1)}, tmp_path / "new.safetensors", metadata={"lapcli": json.dumps(document)})
    with pytest.raises(ArtifactError, match=r"schema 99 \(written by lapcli 9\.9\).*reads up to 1"):
        read_artifact(tmp_path / "new.safetensors")


def test_header_agrees_with_the_library(tmp_path):
    tensors = {"b": torch.zeros(3, 2, dtype=torch.bfloat16), "a": torch.ones(5)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "m.safetensors")
    assert header.metadata == {"format": "pt"}
    data = (tmp_path / "m.safetensors").read_bytes()
    entry = header.tensors["a"]
    assert struct.unpack("<5f", data[entry.start : entry.start + entry.nbytes]) == (1.0,) * 5
    assert header.tensors["b"].dtype == "BF16"
    assert header.tensors["b"].shape == (3, 2)


def test_a_failed_write_leaves_nothing(tmp_path):
    def file_then_fail():
        with atomic_file(tmp_path / "x") as temporary:
            temporary.write_text("half")
            raise ValueError("boom")

    def directory_then_fail():
        with atomic_directory(tmp_path / "d") as folder:
            (folder / "x").write_text("half")
            raise ValueError("boom")

    for fail in (file_then_fail, directory_then_fail):
        with pytest.raises(ValueError, match="boom"):
            fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o027], ids=oct)
def test_files_have_the_mode_that_umask_gives(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_artifact(tmp_path / "a.safetensors", lineage(), {"x": torch.zeros(1)})
        write_document(tmp_path / "lapcli.json", lineage())
    finally:
        os.umask(before)
    for name in ("a.safetensors", "lapcli.json"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~umask, name


def test_a_directory_gives_way_only_when_told(tmp_path):
    with atomic_directory(tmp_path / "d") as folder:
        (folder / "x").write_text("1")
    with pytest.raises(ArtifactError, match="exists already"), atomic_directory(tmp_path / "d"):
        pass
    with atomic_directory(tmp_path / "d", replace=True) as folder:
        (folder / "y").write_text("2")
    assert [file.name for file in (tmp_path / "d").iterdir()] == ["y"]


def test_a_place_that_is_none_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "deep" / "a", Path("/proc/nowhere/a")):
        with pytest.raises(ArtifactError, match="could not be written") as raised, atomic_file(path):
            pass
        assert "free some room" not in str(raised.value)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArtifactError, match="could not be written"), atomic_file(tmp_path / "folder") as temporary:
        temporary.write_text("x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_what_a_killed_process_left_is_cleared(tmp_path):
    """A slice that was killed half-way may be gigabytes; what another process still writes is left alone."""
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom lapcli.artifacts import atomic_directory, atomic_file\n"
        "with atomic_file(Path('a.[1]')) as file, atomic_directory(Path('b')) as folder:\n"
        "    file.write_text('half')\n    (folder / 'x').write_text('half')\n"
        "    print('here', flush=True)\n    sys.stdin.readline()\n    os.kill(os.getpid(), 9)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"

        def write():
            with atomic_file(tmp_path / "a.[1]") as file, atomic_directory(tmp_path / "b", replace=True) as folder:
                file.write_text("whole")
                (folder / "x").write_text("whole")

        write()
        assert len(list(tmp_path.iterdir())) == 4
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == -9
    write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.[1]", "b"]


def test_a_lock_holds_on_a_full_disk(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lapcli.artifacts.run.os.write", full)
    run = RunDirectory(tmp_path / "run")
    with run.lock(), pytest.raises(ArtifactError, match="another lapcli"), run.lock():
        pass


def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lapcli.artifacts.atomic.os.replace", full)
    with pytest.raises(ArtifactError, match=r"No space left on device.*nothing was left behind"):
        write_artifact(tmp_path / "a.safetensors", lineage(), {"x": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []


def test_model_digest_sees_a_change_anywhere(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = torch.randn(2_000_000)
    save_file({"w": weights}, path)
    before = digest_weights([path], {"a": 1})
    assert digest_weights([path], {"a": 1}) == before
    assert digest_weights([path], {"a": 2}) != before
    weights[1_234_567] += 1
    save_file({"w": weights}, path)
    assert digest_weights([path], {"a": 1}) != before


def test_one_process_at_a_time(tmp_path):
    run = RunDirectory(tmp_path / "run")
    program = (
        "import sys; from pathlib import Path; from lapcli.artifacts import RunDirectory\n"
        f"with RunDirectory(Path({str(run.path)!r})).lock(): pass"
    )
    with run.lock():
        second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert f"another lapcli (process {os.getpid()})" in second.stderr
    third = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert third.returncode == 0, third.stderr


def test_headers_are_read_without_torch():
    program = (
        "import sys, lapcli.artifacts, lapcli.families.registry, lapcli.stages.lineage, lapcli.cli.app\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_refused_command_leaves_no_directory(tmp_path):
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(ValueError, match="refused"), run.lock():
        raise ValueError("refused")
    assert not run.path.exists()
    with run.lock():
        run.evaluation.write_text("{}")
    assert run.evaluation.is_file()
