"""Checkpoints are whole or not there, damaged ones are passed over, and old ones outlive a crash in the new one."""

import os
import shutil

import pytest
import torch

from lapcli.artifacts import Lineage
from lapcli.errors import ArtifactError
from lapcli.reporting import SilentReporter
from lapcli.training import checkpoints
from lapcli.training.checkpoints import STATE_FILE, TENSORS_FILE, Checkpoints

LINEAGE = Lineage("checkpoint", {"name": "m", "digest": "d"}, "any", {"lr": 0.1, "steps": 5}, {"teacher": "t"})


def values(step):
    return {"parameter/a": torch.full((3,), float(step)), "rng/0/cpu": torch.arange(4, dtype=torch.uint8)}


@pytest.fixture
def kept(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", LINEAGE)


def save(kept, *steps, good=True):
    for step in steps:
        kept.save(step, {"place": [step]}, values(step), good=good)


def names(kept):
    return sorted(path.name for path in kept.folder.iterdir())


def again(kept, **options):
    """As another process would see them."""
    return Checkpoints(kept.folder, LINEAGE, **options)


def test_what_was_saved_comes_back(kept):
    assert kept.newest() is None
    save(kept, 3, 10)
    found = again(kept).newest()
    assert (found.step, found.good, found.state) == (10, True, {"place": [10]})
    assert found.tensors.keys() == values(10).keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in values(10).items())
    assert names(kept) == ["step-10", "step-3"]
    assert names_in(kept.folder / "step-10") == [STATE_FILE, TENSORS_FILE]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_remain_and_the_newest_good_one(kept):
    save(kept, 1, 2, 3)
    assert names(kept) == ["step-2", "step-3"]
    save(kept, 4, 5, 6, good=False)
    assert names(kept) == ["step-3", "step-5", "step-6"]
    assert again(kept).newest().step == 6
    assert again(kept).newest(good=True).step == 3
    save(kept, 7)
    assert names(kept) == ["step-6", "step-7"]


@pytest.mark.parametrize("where", ["write_artifact", "write_document"])
def test_a_crash_while_writing_leaves_the_old_ones(kept, where, monkeypatch):
    save(kept, 1, 2)

    def crash(*_arguments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, where, crash)
        with pytest.raises(MemoryError):
            save(kept, 3)
    assert names(kept) == ["step-1", "step-2"]
    assert again(kept).newest().step == 2


def test_nothing_is_removed_before_the_new_one_has_its_name(kept, monkeypatch):
    save(kept, 1, 2)
    seen = []
    replace = os.replace

    def crash(source, target):
        seen.append(names(kept))
        if os.path.basename(target) == "step-3":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        save(kept, 3)
    assert seen
    assert all({"step-1", "step-2"} <= set(there) for there in seen)
    assert names(kept) == ["step-1", "step-2"]


def test_a_crash_before_the_old_ones_go_leaves_all(kept, monkeypatch):
    save(kept, 1, 2)

    def crash(_self, _new):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_prune", crash)
        with pytest.raises(KeyboardInterrupt):
            save(kept, 3)
    assert names(kept) == ["step-1", "step-2", "step-3"]
    assert again(kept).newest().step == 3


def test_what_a_killed_process_left_is_not_read_and_goes_with_the_next(kept):
    save(kept, 1)
    shutil.copytree(kept.folder / "step-1", kept.folder / ".step-2.partial-99")
    shutil.copytree(kept.folder / "step-1", kept.folder / ".step-0.removed")
    assert again(kept).newest().step == 1
    save(again(kept), 2)
    assert names(kept) == ["step-1", "step-2"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def turn_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "tensors-cut": lambda folder: cut(folder / TENSORS_FILE),
    "tensors-changed": lambda folder: turn_a_bit(folder / TENSORS_FILE),
    "tensors-missing": lambda folder: (folder / TENSORS_FILE).unlink(),
    "state-cut": lambda folder: cut(folder / STATE_FILE),
    "state-empty": lambda folder: (folder / STATE_FILE).write_text("[]"),
    "state-missing": lambda folder: (folder / STATE_FILE).unlink(),
    "state-of-another": lambda folder: shutil.copy(folder.with_name("step-1") / STATE_FILE, folder / STATE_FILE),
    "empty": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_one_is_passed_over_with_a_notice(kept, damage):
    save(kept, 1, 2)
    DAMAGES[damage](kept.folder / "step-2")
    reporter = SilentReporter()
    later = again(kept, reporter=reporter)
    assert later.newest().step == 1
    assert later.newest(good=True).step == 1
    assert len(reporter.notices) == 1
    assert "step-2 is damaged and is passed over" in reporter.notices[0]
    # Neither does it count among those that are kept, nor does it stand in the way of a new one.
    save(later, 3)
    assert names(kept) == ["step-1", "step-3"]
    save(kept, 4)
    DAMAGES[damage](kept.folder / "step-4") if damage != "state-of-another" else turn_a_bit(
        kept.folder / "step-4" / TENSORS_FILE
    )
    later = again(kept)
    assert later.newest().step == 3
    save(later, 4)
    assert again(kept).newest().step == 4


def test_only_damaged_ones_are_no_reason_to_begin_anew(kept):
    save(kept, 1, 2)
    for step in (1, 2):
        turn_a_bit(kept.folder / f"step-{step}" / TENSORS_FILE)
    with pytest.raises(ArtifactError, match="none of the 2 checkpoints") as refused:
        again(kept).newest()
    assert "--restart" in refused.value.hint
    assert names(kept) == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": {"lr": 0.2, "steps": 5}}, "lr: 0.2 wanted, 0.1 found"),
        ({"parents": {}}, "made from teacher: none wanted, t found"),
        ({"model": {"name": "n", "digest": "e"}}, "model: n (e) wanted, m (d) found"),
    ],
    ids=["settings", "teacher", "model"],
)
def test_another_training_is_refused_with_what_differs(kept, change, named):
    save(kept, 1)
    other = Lineage(**{**vars(LINEAGE), **change})
    with pytest.raises(ArtifactError) as refused:
        Checkpoints(kept.folder, other).newest()
    assert named in refused.value.message
    assert "--run DIR" in refused.value.hint
    assert names(kept) == ["step-1"]


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(tmp_path, LINEAGE, keep=0)
