"""Training by two processes on the CPU: what one process trains, sharded or not, and stopped and gone on with as one.

One launch, as torchrun's, runs all scenarios, each process writes what it saw, and the tests compare.
"""

import fcntl
import os
import signal
import sys
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lapcli.errors import DataError, LapcliError, ModelError, RecipeError
from lapcli.parallel import ALONE, Processes, jointly, processes
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.processes import run_together
from lapcli.testing.stock_models import tiny_stock_model
from lapcli.training.adapters import whole
from lapcli.training.distributed import Objective, Parallel, local, nothing_of, unwrapped
from lapcli.training.packing import PackedBatch
from lapcli.training.stream import TrainingStream

# fp32 sums of the same terms in another order, relative to their size.
ROUNDING = 1e-5
WAYS = (("own", "none"), ("own", "fsdp"), ("tied", "fsdp"), ("mamba2", "none"), ("mamba2", "fsdp"))
WHOLE = (("tied", "none"), ("tied", "fsdp"), ("own", "fsdp"))
STEPS = 4
# Tied, in two dtypes at once with tables of angles, and with blocks that share tensors.
APART = (
    ("own", torch.float32),
    ("tied", torch.bfloat16),
    ("zamba2", torch.float32),
    ("olmo_hybrid", torch.bfloat16),
)


@cache
def engine_tests():
    """The bench of the engine's tests, which is no package to import from."""
    import importlib.util

    name = "lapcli_test_engine"
    specification = importlib.util.spec_from_file_location(name, Path(__file__).with_name("test_engine.py"))
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def train(
    folder, run, model, mine, *, sharding="none", on_step=None, drawing=False, settings=None, teacher="the same",
    **execution,
):  # fmt: skip
    """A training from its beginning or from where it was left; the bench, and what was measured step by step."""
    guide = model if teacher == "the same" else teacher
    bench = engine_tests().Bench(
        folder, student=model, teacher=guide, processes=mine, **{"steps": STEPS, **(settings or {})}
    )
    if drawing:
        for name in bench.plan.lora:
            module = bench.student.get_base_model().get_submodule(name)
            module.register_forward_hook(lambda module, _in, out: F.dropout(out, 0.2, module.training))
    seen = []

    def hear(done):
        seen.append(done)
        if on_step is not None:
            on_step(done)

    bench.seen = seen
    with suppress(Killed, KeyboardInterrupt):
        bench.run(run, on_step=hear, sharding=sharding, **{"save_every": 2, "micro_batch": 1, **execution})
    return bench


class Killed(Exception):
    pass


def killed_at(step):
    def kill(done):
        if done.step == step:
            raise Killed

    return kill


def told(bench):
    """What a process writes down of a training."""
    return {
        "state": bench.state,
        "losses": [done.measured.loss for done in bench.seen],
        "norms": [done.gradient_norm for done in bench.seen],
        "tokens": [done.measured.tokens for done in bench.seen],
        "positions": [done.positions for done in bench.seen],
        "steps": [done.step for done in bench.seen],
        "notices": bench.reporter.notices,
        "warnings": bench.reporter.warnings,
        "result": getattr(bench, "result", None),
    }


# What two processes do.


def follow_one(folder, out, mine):
    for model, sharding in WAYS:
        lean = sharding == "fsdp" and model != "tied"
        run = out / f"{model}-{sharding}"
        bench = train(folder, run, model, mine, sharding=sharding, gradient_checkpointing=lean)
        yield f"{model}-{sharding}", told(bench)
    held = [*bench.student.parameters(), *bench.teacher.parameters()]
    yield "held", {"mine": sum(local(each).numel() for each in held), "all": sum(each.numel() for each in held)}


def half_precision(folder, out, mine):
    for sharding in ("none", "fsdp"):
        settings = {"load": {"dtype": torch.bfloat16}, "steps": 2}
        yield (
            f"bf16-{sharding}",
            told(train(folder, out / f"bf16-{sharding}", "own", mine, sharding=sharding, settings=settings)),
        )


def stop_and_go_on(folder, out, mine):
    yield "unbroken", told(train(folder, out / "unbroken", "own", mine, drawing=True))
    for name, first, second in (("again", "none", "none"), ("to-fsdp", "none", "fsdp"), ("to-ddp", "fsdp", "none")):
        train(folder, out / name, "own", mine, drawing=True, sharding=first, on_step=killed_at(3))
        mine.wait()
        yield name, told(train(folder, out / name, "own", mine, drawing=True, sharding=second))
    yield "from-one", told(train(folder, out / "from-one", "own", mine))
    train(folder, out / "to-one", "own", mine, sharding="fsdp", on_step=killed_at(3))
    mine.wait()


def signalled(folder, out, mine):
    def ask(done):
        if done.step == 3 and not mine.leader:
            os.kill(os.getpid(), signal.SIGTERM)

    bench = train(folder, out / "signalled", "own", mine, on_step=ask)
    yield "signalled", told(bench)


def gone_wrong(folder, out, mine):
    for sharding in ("none", "fsdp"):
        settings = {"full": True, "lr": 0.01, "warmup": 1.0, "kl_weight": 1e3, "steps": 10}
        execution = {"validate_every": 1, "save_every": 1, "divergence": 8.0, "micro_batch": 2}
        run = out / f"diverged-{sharding}"
        yield (
            f"diverged-{sharding}",
            told(train(folder, run, "own", mine, sharding=sharding, settings=settings, **execution)),
        )


def one_cannot_read(folder, out, mine):
    class Broken(TrainingStream):
        def __next__(self):
            if self.sequences == 8 and not mine.leader:
                raise DataError("line 7 is not UTF-8")
            return super().__next__()

    bench = engine_tests().Bench(folder, student="own", teacher="own", processes=mine, steps=STEPS)
    bench.stream.__class__ = Broken
    try:
        bench.run(out / "unread")
    except LapcliError as error:
        yield "unread", {"kind": type(error).__name__, "said": str(error)}


def few_held_out(folder, out, mine):
    """One sequence for two processes, of a model whose decoder runs document by document."""
    for sharding in ("none", "fsdp"):
        run = out / f"one-held-{sharding}"
        yield (
            f"one-held-{sharding}",
            told(train(folder, run, "mamba2", mine, sharding=sharding, settings={"validation": 1, "steps": 1})),
        )


def apart(mine):
    """Options of a bench whose models the leader alone has."""
    return {"load": {"weights": "in memory" if mine.leader else "nowhere"}}


def everything(bench, mine):
    """All tensors of a bench's models once they are sharded, and the most numbers that a part had whole meanwhile."""
    import torch.distributed.fsdp as fsdp

    objective, shard, most = Objective(bench.student, bench.teacher), fsdp.fully_shard, 0

    def look(module, **options):
        nonlocal most
        parameters = {id(each): each for each in objective.parameters()}.values()
        here = [each.numel() for each in parameters if not each.is_meta and not hasattr(each, "device_mesh")]
        most = max(most, sum(here))
        return shard(module, **options)

    fsdp.fully_shard = look
    try:
        Parallel(objective, mine, "fsdp", torch.device("cpu"))
    finally:
        fsdp.fully_shard = shard
    named = (*objective.named_parameters(remove_duplicate=False), *objective.named_buffers(remove_duplicate=False))
    return most, {name: (each.requires_grad, whole(each.detach()).clone()) for name, each in named}


def leaders_alone(folder, out, mine):
    """The leader has the weights in memory, the others have none."""
    for model, dtype in APART:
        options = apart(mine)
        options["load"]["dtype"] = dtype
        make = partial(engine_tests().Bench, folder, student=model, teacher=model, processes=mine)
        common, bench = make(load={"dtype": dtype}), make(**options)
        models = [unwrapped(bench.student), bench.teacher]
        frozen = [each for model in models for each in model.parameters() if not each.requires_grad]
        yield (
            f"leaders-{model}-{dtype}",
            {
                "on": {each.device.type for each in frozen},
                "frozen": sum(each.numel() for each in frozen),
                "common": everything(common, mine),
                "alone": everything(bench, mine),
            },
        )
    run, lean = out / "alone-fsdp", {"gradient_checkpointing": True}
    yield "alone-fsdp", told(train(folder, run, "own", mine, sharding="fsdp", settings=apart(mine), **lean))


EVERYTHING = {"everything": True, "kl_weight": 0.0, "weight_decay": 0.1}


def whole_models(folder, out, mine):
    """All of a model is trained, its tied head too; sharded, the leader alone has it first."""
    for model, sharding in WHOLE:
        settings = {**EVERYTHING, **(apart(mine) if sharding == "fsdp" else {})}
        run = out / f"whole-{model}-{sharding}"
        bench = train(folder, run, model, mine, sharding=sharding, settings=settings, teacher=None)
        yield f"whole-{model}-{sharding}", told(bench)


SCENARIOS = (
    follow_one,
    whole_models,
    half_precision,
    leaders_alone,
    stop_and_go_on,
    signalled,
    gone_wrong,
    one_cannot_read,
    few_held_out,
)


@jointly
def main():
    # transformers would import it with a hybrid, for seconds of each process, and nothing of it runs on a CPU.
    sys.modules.setdefault("fla", None)
    folder, out, mine = Path(sys.argv[1]), Path(sys.argv[2]), processes()
    torch.save({k: v for each in SCENARIOS for k, v in each(folder, out, mine)}, out / f"rank-{mine.rank}.pt")


# What is to come of it.


@pytest.fixture(scope="module")
def made_once(tmp_path_factory, worker_id):
    """A folder for all workers of pytest, and how one of them fills a part of it."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "two-processes"
    shared.mkdir(exist_ok=True)

    def make(name, fill):
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shared / f"{name}.whole").exists():
                (shared / name).mkdir(exist_ok=True)
                fill(shared / name)
                (shared / f"{name}.whole").touch()
        return shared / name

    return make


@pytest.fixture(scope="module")
def place(made_once):
    return made_once("place", write_models)


def write_models(folder):
    tiny_gated_deltanet(folder / "own")
    tiny_gated_deltanet(folder / "tied", tie_word_embeddings=True)
    for model_type in ("mamba2", "zamba2", "olmo_hybrid"):
        tiny_stock_model(model_type, folder / model_type)
    engine_tests().write_text(folder / "text.jsonl")


@pytest.fixture(scope="module")
def out(place, made_once):
    """The folder in which two processes ran all scenarios."""
    return made_once("out", lambda folder: run_all(place, folder))


def run_all(place, folder):
    train(place, folder / "from-one", "own", ALONE, on_step=killed_at(3))
    program = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    done = run_together(2, place, folder, program=program)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def seen(out):
    """What each of them saw."""
    return [torch.load(out / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    """The same trainings by one process, with parts of one sequence and of four."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        (model, size): told(train(place, folder / f"{model}-{size}", model, ALONE, micro_batch=size))
        for model in ("own", "tied", "mamba2")
        for size in (1, 4)
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def distance(one, other):
    assert one.keys() == other.keys()
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def test_both_see_the_same_and_have_the_same(seen):
    first, second = seen
    assert first.keys() == second.keys()
    for name, mine in first.items():
        theirs = second[name]
        if "state" in mine:
            assert same(mine["state"], theirs["state"]), name
            for what in ("losses", "norms", "tokens", "steps", "result"):
                assert mine[what] == theirs[what], (name, what)
            # The leader alone speaks.
            assert not theirs["notices"] + theirs["warnings"]


@pytest.mark.parametrize(("model", "sharding"), WAYS)
def test_two_processes_train_what_one_trains(seen, alone, model, sharding):
    wanted, other, found = alone[model, 1], alone[model, 4], seen[0][f"{model}-{sharding}"]
    assert found["steps"] == wanted["steps"] == [*range(1, STEPS + 1)]
    assert found["tokens"] == wanted["tokens"]
    assert len(set(found["tokens"])) > 1
    assert found["positions"] == [4 * 32] * STEPS
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(wanted[what], rel=ROUNDING), what
    for what in ("first", "last"):
        assert getattr(found["result"], what).loss == pytest.approx(getattr(wanted["result"], what).loss, rel=ROUNDING)
    # AdamW makes steps of one size from gradients of any, so that rounding counts as it does between two ways of
    # adding up in one process; the ulp of a parameter near 1 beside it.
    band = distance(wanted["state"], other["state"])
    assert distance(found["state"], wanted["state"]) <= 4 * band + 2**-22
    start, end = found["result"].first, found["result"].last
    assert start.loss != end.loss


@pytest.mark.parametrize(("model", "sharding"), WHOLE)
def test_two_processes_train_all_of_a_model_as_one_does(place, seen, model, sharding, tmp_path):
    options = {"settings": EVERYTHING, "teacher": None}
    wanted, other = (
        told(train(place, tmp_path / str(size), model, ALONE, micro_batch=size, **options)) for size in (1, 4)
    )
    found = seen[0][f"whole-{model}-{sharding}"]
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(wanted[what], rel=ROUNDING), what
    band = distance(wanted["state"], other["state"])
    assert distance(found["state"], wanted["state"]) <= 4 * band + 2**-22


def test_a_sharded_process_holds_a_share(seen):
    for mine in seen:
        held = mine["held"]
        # Rows are dealt out whole: a parameter of one row is one process's.
        assert 0.4 * held["all"] < held["mine"] < 0.6 * held["all"]


@pytest.mark.parametrize(("model", "dtype"), APART)
def test_weights_of_the_leader_alone_are_sharded_as_those_of_all(seen, model, dtype):
    leader, other = (mine[f"leaders-{model}-{dtype}"] for mine in seen)
    (_, wanted), (_, found), (_, theirs) = leader["common"], leader["alone"], other["alone"]
    assert wanted.keys() == found.keys() == theirs.keys()
    for name, (trained, value) in wanted.items():
        for needs_gradient, tensor in (found[name], theirs[name]):
            assert (needs_gradient, tensor.dtype) == (trained, value.dtype), name
            assert torch.equal(tensor, value), name
    assert leader["on"] == {"cpu"}
    assert other["on"] == {"meta"}
    # Never more than adapters and one part, where all who load for themselves begin with everything.
    assert other["common"][0] > other["frozen"]
    assert other["alone"][0] < 0.7 * other["frozen"]


def test_from_weights_of_the_leader_alone_the_same_is_trained(seen):
    for mine in seen:
        assert same(mine["alone-fsdp"]["state"], mine["own-fsdp"]["state"])
        assert mine["alone-fsdp"]["losses"] == mine["own-fsdp"]["losses"]


def test_weights_in_bf16_beside_what_is_trained_in_fp32(seen):
    whole, sharded = seen[0]["bf16-none"], seen[0]["bf16-fsdp"]
    # Before the first update all is the same; of the gradient, fp32 sums of bf16 terms, only the order differs.
    assert sharded["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-6)
    assert sharded["norms"][0] == pytest.approx(whole["norms"][0], rel=ROUNDING)
    # Then parameters near enough to each other may round to neighbours in bf16.
    assert sharded["losses"][1] == pytest.approx(whole["losses"][1], rel=2**-8)


def test_stopped_and_gone_on_with_it_ends_with_the_same_bits(seen, out):
    assert same(seen[0]["again"]["state"], seen[0]["unbroken"]["state"])
    assert seen[0]["again"]["steps"] == [3, 4]
    lines = engine_tests().curve
    assert lines(out / "again") == lines(out / "unbroken")
    # Each draws for itself, and not as where nothing is drawn.
    assert not same(seen[0]["unbroken"]["state"], seen[0]["own-none"]["state"])


@pytest.mark.parametrize("name", ["to-fsdp", "to-ddp"])
def test_sharded_or_not_it_goes_on_from_the_other(seen, name):
    found, wanted = seen[0][name], seen[0]["unbroken"]
    assert found["steps"] == [3, 4]
    assert found["losses"] == pytest.approx(wanted["losses"][2:], rel=ROUNDING)
    assert not any("fewer than" in notice for notice in found["notices"])


def test_two_go_on_from_one(seen, alone):
    found, wanted = seen[0]["from-one"], alone["own", 1]
    assert found["steps"] == [3, 4]
    assert found["losses"] == pytest.approx(wanted["losses"][2:], rel=ROUNDING)
    assert found["tokens"] == wanted["tokens"][2:]
    assert any("fewer than 2 processes" in notice for notice in found["notices"])


def test_one_goes_on_from_two_that_were_sharded(place, out, alone):
    found, wanted = told(train(place, out / "to-one", "own", ALONE)), alone["own", 1]
    assert found["steps"] == [3, 4]
    assert found["losses"] == pytest.approx(wanted["losses"][2:], rel=ROUNDING)
    assert found["tokens"] == wanted["tokens"][2:]


def test_a_signal_to_one_stops_both_at_one_step(place, seen, out):
    for mine in seen:
        assert mine["signalled"]["steps"] == [1, 2, 3]
        assert mine["signalled"]["result"] is None
    assert engine_tests().checkpoints_in(out / "signalled") == ["step-2", "step-3"]
    again = told(train(place, out / "signalled", "own", ALONE))
    assert again["steps"] == [4]


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_both_turn_back_together(seen, sharding):
    for mine in seen:
        found = mine[f"diverged-{sharding}"]
        assert "times the first one" in found["result"].stopped
        assert 0 < found["result"].step == found["steps"][-1] - 1
        # What was turned back to is what was measured there.
        assert all(value.isfinite().all() for value in found["state"].values())
    assert len(seen[0][f"diverged-{sharding}"]["warnings"]) == 1


def test_text_that_one_cannot_read_is_said_by_both_and_no_step_is_lost(seen, out):
    assert [mine["unread"]["kind"] for mine in seen] == ["LapcliError", "DataError"]
    assert all("line 7 is not UTF-8" in mine["unread"]["said"] for mine in seen)
    assert engine_tests().checkpoints_in(out / "unread")[-1] == "step-2"


def test_one_sequence_held_out_for_two(seen):
    whole, sharded = (seen[1][f"one-held-{sharding}"]["result"] for sharding in ("none", "fsdp"))
    assert whole.first.tokens == sharded.first.tokens > 0
    assert sharded.first.loss == pytest.approx(whole.first.loss, rel=ROUNDING)


# In one process.


@pytest.fixture(scope="module")
def bench(place):
    return {
        model: engine_tests().Bench(place, student=model, teacher=model, processes=ALONE) for model in ("own", "mamba2")
    }


def rows(*lengths):
    tests = engine_tests()
    return PackedBatch.of([tests.sequence(*tests.documents(*each)) for each in lengths])


PARTS = {"one": ((32,),), "several": ((7, 1, 12, 12), (20, 12)), "nothing": ((1,) * 32,)}


@pytest.mark.parametrize("part", list(PARTS))
@pytest.mark.parametrize("model", ["own", "mamba2"])
def test_idle_passes_run_blocks_and_change_nothing(bench, model, part):
    """Under FSDP2 every process calls every block equally often, or all wait for ever."""
    student, teacher = bench[model].student, bench[model].teacher
    objective, batch = Objective(student, teacher), rows(*PARTS[part])
    block = objective.models()[0].get_decoder().layers[0]
    calls = []
    handle = block.register_forward_hook(lambda *_: calls.append(0))
    wanted = objective(batch)
    assert len(calls) == (1 if model == "own" else objective.passes(batch))
    calls.clear()
    found = objective(batch, passes=5)
    assert len(calls) == (1 if model == "own" else 5)
    handle.remove()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert found[0].requires_grad


def test_a_teacher_may_lie_anywhere(bench):
    """DDP refuses modules on devices of several types, so it is not to see the teacher."""
    objective = Objective(bench["own"].student, bench["own"].teacher)
    assert {*objective.parameters()} == {*bench["own"].student.parameters()}


def test_nothing_of_a_part_counts(bench):
    objective = Objective(bench["own"].student, bench["own"].teacher)
    assert [float(each.detach()) for each in objective(nothing_of(rows((32,))))] == [0, 0, 0]


def test_a_batch_that_cannot_be_shared_alike_is_refused(place, tmp_path):
    bench = engine_tests().Bench(place, student="own", teacher="own")
    bench.processes = Processes(0, 3)
    with pytest.raises(RecipeError, match="batch of 4 sequences cannot be shared alike by 3 processes"):
        bench.run(tmp_path)


def test_a_stream_for_another_process_is_refused(place, tmp_path):
    bench = engine_tests().Bench(place, student="own", teacher="own")
    bench.processes = Processes(1, 2)
    with pytest.raises(ValueError, match="for rank 0 of 1"):
        bench.run(tmp_path)


def test_a_device_that_is_too_small_keeps_what_was_trained(place, tmp_path):
    bench = engine_tests().Bench(place, student="own", teacher="own")

    def fill(done):
        if done.step == 4:
            module = bench.student.get_base_model().get_submodule(bench.plan.lora[0])
            module.register_forward_hook(exhausted)

    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(ModelError, match="too small for 2 sequences of 32 tokens") as refused:
        bench.run(tmp_path, on_step=fill)
    assert "--micro-batch 1 or --gradient-checkpointing" in refused.value.hint
    assert "after step 3" in refused.value.hint
    assert engine_tests().checkpoints_in(tmp_path)[-1] == "step-3"


if __name__ == "__main__":
    main()
