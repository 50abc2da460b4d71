"""Slicing as a stage: what is there is kept, mended or refused. What a slice computes, the families' contract tests."""

import shutil

import pytest
import torch

from lapcli.artifacts import Lineage, write_artifact
from lapcli.errors import ArtifactError
from lapcli.families.gated_deltanet import expand_v_for
from lapcli.families.registry import family_for
from lapcli.families.source import resolve_model
from lapcli.reporting import SilentReporter
from lapcli.stages.planning import plan_ratio
from lapcli.stages.slicing import plan_slicing, slice_into, slice_model
from lapcli.testing.slices import random_kept, selection_of


@pytest.fixture
def selection(model, tmp_path):
    layers = family_for(model.config).layers(model.config)
    tensors = {f"layers.{layer.index}.kept": torch.arange(16).repeat(layer.heads, 1) for layer in layers}
    lineage = Lineage("selection", model.describe(), "any", {"method": "by hand", "kept_width": 16})
    return write_artifact(tmp_path / "run" / "selection.safetensors", lineage, tensors)


def into(model, selection, output, **options):
    return slice_into(model, selection, output, **{"overwrite": False, "reporter": SilentReporter(), **options})[1]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_slice_is_made_again(model, selection, tmp_path, name):
    output = tmp_path / "sliced"
    assert into(model, selection, output)
    whole = (output / name).read_bytes()
    assert not into(model, selection, output)
    (output / name).unlink()
    assert into(model, selection, output)
    assert (output / name).read_bytes() == whole
    if name == "model.safetensors":
        (output / name).write_bytes(whole[:-50])
        reporter = SilentReporter()
        assert into(model, selection, output, reporter=reporter)
        assert "damaged" in reporter.warnings[0]
        assert (output / name).read_bytes() == whole


def test_a_flipped_byte_of_the_weights_is_mended(model, selection, tmp_path):
    weights, reporter = tmp_path / "sliced" / "model.safetensors", SilentReporter()
    into(model, selection, tmp_path / "sliced")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert into(model, selection, tmp_path / "sliced", reporter=reporter)
    assert "damaged" in reporter.warnings[0]
    assert weights.read_bytes() == whole


def test_a_slice_follows_the_files_of_its_base(model, selection, tmp_path):
    base, output, reporter = tmp_path / "base", tmp_path / "sliced", SilentReporter()
    shutil.copytree(model.path, base)
    into(resolve_model(str(base)), selection, output)
    (base / "tokenizer_config.json").write_text("{}")
    assert into(resolve_model(str(base)), selection, output, reporter=reporter)
    assert "another tokenizer_config.json" in reporter.warnings[0]
    assert (output / "tokenizer_config.json").read_text() == "{}"
    assert not into(resolve_model(str(base)), selection, output)


def test_what_is_copied_along(model, selection, tmp_path):
    base, output = tmp_path / "base", tmp_path / "sliced"
    shutil.copytree(model.path, base)
    copied = ["additional_chat_templates/rag.jinja", "chat_template.jinja", "generation_config.json", "LICENSE"]
    left = ["pytorch_model.bin.index.json", "consolidated.safetensors.index.json", "consolidated.00.pth", ".gitignore"]
    for name in copied + left:
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("{}")
    into(resolve_model(str(base)), selection, output)
    assert [name for name in copied + left if (output / name).is_file()] == copied
    (output / copied[0]).unlink()
    assert into(resolve_model(str(base)), selection, output)
    assert (output / copied[0]).is_file()


@pytest.mark.parametrize("damage", [None, "{", "[]"])
def test_a_lost_lineage_is_mended_where_all_else_is_the_slice(model, selection, tmp_path, damage):
    output, reporter = tmp_path / "sliced", SilentReporter()
    into(model, selection, output)
    lineage = output / "lapcli.json"
    whole = {path.name: path.read_bytes() for path in output.iterdir()}

    def lose():
        lineage.unlink() if damage is None else lineage.write_text(damage)

    lose()
    assert into(model, selection, output, reporter=reporter)
    assert "lapcli.json" in reporter.warnings[0]
    assert {path.name: path.read_bytes() for path in output.iterdir()} == whole
    # Somebody else's model of that shape says so in its card.
    lose()
    (output / "README.md").write_text("# A model of mine\n")
    for overwrite in (False, True):
        with pytest.raises(ArtifactError):
            into(model, selection, output, overwrite=overwrite)
    assert (output / "README.md").is_file()


def test_overwrite_never_removes_what_is_not_ours(model, selection, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for output in (mine, tmp_path / "file", selection.path.parent, tmp_path):
        with pytest.raises(ArtifactError):
            into(model, selection, output, overwrite=True)
    assert (mine / "thesis.txt").read_text() == "years of work"
    assert selection.path.is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.flip(1), "not ascending"),
        (lambda rows: rows.clamp(max=3), "not ascending"),
        (lambda rows: rows + 20, "within 0..31"),
        (lambda rows: rows[:1], "key heads"),
    ],
    ids=["unsorted", "repeated", "out-of-range", "a-head-missing"],
)
def test_kept_sets_that_cannot_be_are_refused(model, selection, tmp_path, change, message):
    tensors = {name: change(rows) for name, rows in selection.tensors().items()}
    bad = write_artifact(tmp_path / "bad.safetensors", selection.lineage, tensors)
    with pytest.raises(ArtifactError, match=message):
        plan_slicing(model, bad)
    with pytest.raises(ArtifactError, match=message):
        slice_model(model, bad, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("value_width", [64, 128, 256, 512])
def test_expand_v_gives_back_the_value_width_in_flas_own_arithmetic(value_width):
    assert all(int(width * expand_v_for(value_width, width)) == value_width for width in range(1, 257))
    # Plain division would not.
    assert value_width == 64 or any(int(w * (value_width / w)) != value_width for w in range(1, 257))


@pytest.mark.parametrize("kept", [31, 16, 1])
def test_the_plan_and_the_slice_count_the_same_cuts(model, tmp_path, kept):
    wanted = plan_slicing(model, selection_of(model, random_kept(model, kept), tmp_path))
    plan = plan_ratio(model, keep=kept)
    assert (plan.cut_tensors, plan.weight_bytes.after) == (wanted.cut_tensors, wanted.bytes_after)
