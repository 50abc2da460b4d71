"""Training on GPUs: stopped and gone on with on one; on two, by DDP what one trains, and by FSDP2 what DDP trains."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lapcli.parallel import ALONE, jointly, local_rank, processes
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.training.distributed import local

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # fla, triton and inductor warn about themselves.
    pytest.mark.filterwarnings("ignore"),
]

# fp32 sums of the same terms in another order, relative to their size, in a loss that a few updates have spread it to.
ROUNDING = 1e-4
SHORT, LONG = 5, 50


def bench(folder, mine, device, steps, weights):
    """The bench of the engine's tests, which is no package to import from; without fla, whose tuning takes minutes."""
    specification = importlib.util.spec_from_file_location(
        "lapcli_test_engine", Path(__file__).with_name("test_engine.py")
    )
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    load = {"device": device, "kernel": "chunked", "weights": weights}
    return module.Bench(folder, processes=mine, load=load, steps=steps, length=128), module


def train(folder, run, mine, device, *, steps=SHORT, stop=None, weights="on device", **execution):
    """A training from its beginning or from where it was left, perhaps stopped after a step; what was measured."""
    made, module = bench(folder, mine, device, steps, weights)
    seen = []

    def hear(done):
        seen.append(done)
        if done.step == stop:
            raise module.Killed

    try:
        made.run(run, on_step=hear, **{"micro_batch": 1, "save_every": 2, "autocast": False, **execution})
    except module.Killed:
        mine.wait()
    held = [*made.student.parameters(), *made.teacher.parameters()]
    return {
        "steps": [done.step for done in seen],
        "losses": [done.measured.loss for done in seen],
        "norms": [done.gradient_norm for done in seen],
        "peaks": [done.peak_bytes for done in seen],
        "validation": None if stop else made.result.last.loss,
        "state": made.state,
        "share": sum(local(each).numel() for each in held) / sum(each.numel() for each in held),
    }


@jointly
def main():
    folder, out, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    mine, device = processes(), torch.device(kind, local_rank() if kind == "cuda" else None)
    torch.backends.cudnn.allow_tf32 = False
    found = {"ddp": train(folder, out / "ddp", mine, device)}
    found["stopped"] = train(folder, out / "again", mine, device, stop=3)
    found["again"] = train(folder, out / "again", mine, device, sharding="fsdp")
    for name, sharding, lean, together in (
        ("ddp-bf16", "none", False, 1),
        ("pairs-bf16", "none", False, 2),
        ("fsdp-bf16", "fsdp", False, 1),
        ("lean-bf16", "fsdp", True, 1),
    ):
        execution = {"sharding": sharding, "gradient_checkpointing": lean, "autocast": True, "validate_every": 25}
        execution["micro_batch"] = together
        # Lean from the beginning: the leader alone has the weights.
        alone = "in memory" if mine.leader else "nowhere"
        weights = alone if lean else "on device"
        found[name] = train(
            folder, out / name, mine, device, steps=LONG, weights=weights, **{**execution, "save_every": 25}
        )
    torch.save(found, out / f"rank-{mine.rank}.pt")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    tiny_gated_deltanet(folder / "base")
    words = ["the", "state", "of", "a", "layer", "is", "read", "by", "queries", "and", "written", "with", "values"]
    rows = [f'{{"text": "{" ".join(words[i % 13 :] * (1 + i % 9))}"}}\n' for i in range(400)]
    (folder / "text.jsonl").write_text("".join(rows))
    return folder


@pytest.fixture(autouse=True)
def convolutions_in_fp32(monkeypatch):
    """cuDNN's convolutions are in TF32 by default, torch's matrix products are not."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not torch.backends.cuda.matmul.allow_tf32


def test_stopped_on_one_gpu_it_goes_on_to_the_same(place, tmp_path):
    unbroken = train(place, tmp_path / "unbroken", ALONE, torch.device("cuda", 0))
    train(place, tmp_path / "broken", ALONE, torch.device("cuda", 0), stop=3)
    again = train(place, tmp_path / "broken", ALONE, torch.device("cuda", 0))
    assert again["steps"] == [3, 4, 5]
    for what in ("losses", "norms"):
        assert again[what] == pytest.approx(unbroken[what][2:], rel=ROUNDING), what
    assert again["validation"] == pytest.approx(unbroken["validation"], rel=ROUNDING)
    assert min(unbroken["peaks"]) > 0


@pytest.fixture(scope="module")
def two(place, tmp_path_factory):
    """What each of two processes saw."""
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    out = tmp_path_factory.mktemp("out")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__,
         str(place), str(out), "cuda"],
        capture_output=True, text=True, check=False, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [torch.load(out / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def test_both_see_the_same_and_have_the_same(two):
    first, second = two
    for name, mine in first.items():
        for what in ("steps", "losses", "norms", "peaks", "validation"):
            assert mine[what] == second[name][what], (name, what)
        assert all(torch.equal(value, second[name]["state"][key]) for key, value in mine["state"].items()), name


def test_two_gpus_train_what_one_trains(place, two, tmp_path):
    wanted = train(place, tmp_path, ALONE, torch.device("cuda", 0))
    found = two[0]["ddp"]
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(wanted[what], rel=ROUNDING), what
    assert found["validation"] == pytest.approx(wanted["validation"], rel=ROUNDING)


def test_sharded_it_goes_on_where_whole_copies_stopped(two):
    found, wanted = two[0]["again"], two[0]["ddp"]
    assert found["steps"] == [3, 4, 5]
    assert found["losses"] == pytest.approx(wanted["losses"][2:], rel=ROUNDING)
    # Rows are dealt out whole: a parameter of one row is one process's.
    assert all(0.4 < mine["again"]["share"] < 0.6 for mine in two)


def apart(found, wanted):
    """The largest difference of two curves, of their values."""
    return max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["fsdp-bf16", "lean-bf16"])
def test_sharded_in_bf16_it_follows_whole_copies(two, name):
    found, wanted = two[0][name], two[0]["ddp-bf16"]
    assert found["steps"] == [*range(1, LONG + 1)]
    assert found["losses"][0] == pytest.approx(wanted["losses"][0], rel=ROUNDING)
    # A rounding of step 1 grows until step 50. How far: as far as it takes whole copies whose rows come in pairs, so
    # that the same products are added up in another order. Two draws of one spread are rarely three times each other.
    pairs = two[0]["pairs-bf16"]
    assert 0 < apart(pairs["losses"], wanted["losses"]) < 2**-6
    assert apart(found["losses"], wanted["losses"]) < 3 * apart(pairs["losses"], wanted["losses"])
    assert apart([found["validation"]], [wanted["validation"]]) < 3 * apart(pairs["losses"], wanted["losses"])
    assert wanted["losses"][-1] < wanted["losses"][0]


if __name__ == "__main__":
    main()
