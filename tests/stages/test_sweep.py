"""Sweeps: which cells there are, what they share, what a failure and a kill leave, what is not done again."""

import json
import os
import signal
import time

import pytest

from lapcli.cli.sweep import _causes
from lapcli.errors import ArtifactError, DataError, ModelError, RecipeError, UsageError
from lapcli.evaluation import run as evaluation_run
from lapcli.families.source import resolve_model
from lapcli.machine import Machine
from lapcli.recipe import Recipe
from lapcli.reporting import SilentReporter
from lapcli.stages import sweeping
from lapcli.stages.recovery import RecoveryResult
from lapcli.stages.sweeping import _unlike, plan_sweep, run_sweep, slots_for
from lapcli.sweeps import work
from lapcli.sweeps.cells import expand
from lapcli.sweeps.pool import Pool, Slot
from lapcli.sweeps.record import SweepDirectory, read_sweep
from lapcli.sweeps.work import Job
from lapcli.testing.models import tiny_delta_net
from lapcli.testing.processes import subprocess_of_forks

CPU = Machine(device="cpu")


def recipe(source="builtin", recovery=None, tasks=None, **sweep):
    return Recipe.model_validate(
        {
            "calibration": {"data": str(source), "samples": 8, "seq_len": 64},
            "selection": {},
            "recovery": recovery,
            "evaluation": tasks and {"tasks": tasks, "limit": 2},
            "sweep": {"ratio": ["0.5"], **sweep},
        }
    )


def names(*arguments, **options):
    return [cell.name for cell in expand(recipe(*arguments, **options), "here")]


class TestCells:
    def test_a_name_does_not_depend_on_the_other_cells(self):
        few = names(method=["grad"], ratio=[0.25])
        assert few == ["grad-0.25-builtin-8x64-s0"]
        many = names(method=["l1", "grad"], ratio=[0.5, 0.25], seed=[1, 0], score_from=["key", "both"])
        assert len(many) == 16
        assert len(set(many)) == 16
        assert few[0] in many
        assert "l1-0.5-from-key-builtin-8x64-s1" in many

    def test_texts_of_one_file_name_in_two_folders_differ(self):
        first, second = names("x", method=["l1"]), names(method=["l1"], data=["a/t.txt", "b/t.txt"])
        assert first == ["l1-0.5-x-8x64-s0"]
        assert len(set(second)) == 2
        assert all("/" not in name for name in second)

    def test_cells_that_differ_in_nothing_are_one(self):
        seeds = {"seed": [0, 1, 2], "method": ["drrqr", "rand"]}
        assert len(names(**seeds)) == 6
        # Only rand draws, so three seeds of drrqr's selection are one.
        assert len(names(**seeds, seed_of=["selection"])) == 1 + 3

    def test_seeds_go_where_they_are_wanted(self):
        recovery = {"data": "builtin", "seq_len": 32, "steps": 5}
        cell = expand(recipe(recovery=recovery, method=["rand"], seed=[7], seed_of=["recovery"]), "here")[0]
        assert (cell.calibration.seed, cell.selection.seed, cell.recovery.seed) == (0, 0, 7)

    def test_recoveries_change_what_they_name(self):
        recovery = {"data": "builtin", "seq_len": 32, "samples": 64}
        variants = {"a": {}, "b": {"steps": 3, "lr": 0.01}}
        cells = expand(recipe(recovery=recovery, recoveries=variants), "here")
        assert [cell.name.rsplit("-", 1)[1] for cell in cells] == ["a", "b"]
        assert [cell.recovery.training().steps for cell in cells] == [4, 3]
        assert len({cell.slice_key for cell in cells}) == 1

    def test_query_feedback_is_a_recovery_like_others(self):
        recovery = {"data": "builtin", "seq_len": 32, "samples": 64}
        variants = {"plain": {}, "feedback": {"add_query_feedback": True}, "more": {"add_query_feedback": True,
                    "lambda_init": 0.2}}  # fmt: skip
        cells = expand(recipe(recovery=recovery, recoveries=variants), "here")
        assert [cell.axes["recovery"] for cell in cells] == list(variants)
        assert len({cell.slice_key for cell in cells}) == 1
        plain, feedback, more = (cell.settings() for cell in cells)
        # As before there was such a setting: what was recovered then is found again.
        assert not {"add_query_feedback", "lambda_init"} & plain["recovery"].keys()
        assert _unlike(plain, plain) is None
        for one, other in ((plain, feedback), (feedback, plain), (feedback, more), (more, feedback)):
            assert _unlike(one, other) is not None

    @pytest.mark.parametrize(
        ("changes", "wanted"),
        [
            ({"ratio": ["0.5"], "keep": [8]}, "give either ratio or keep"),
            ({"method": ["l1", "l1"]}, "is there twice"),
            ({"recoveries": {"a": {}}}, "which is not there"),
            ({"recovery": {"data": "x", "seq_len": 9, "steps": 1, "control": True}}, "control"),
            ({"recovery": {"data": "x", "seq_len": 9, "steps": 1}, "recoveries": {"a": {"lrr": 1}}}, "'lrr'"),
            ({"recovery": {"data": "x", "seq_len": 9, "steps": 1, "lambda_init": 0.1}}, "add_query_feedback"),
        ],
        ids=["two budgets", "twice", "no recovery", "control", "unknown setting", "no feedback to begin"],
    )
    def test_refused(self, changes, wanted):
        with pytest.raises((RecipeError, ValueError), match=wanted):
            expand(recipe(**changes), "here")


@pytest.fixture
def plan(model, text, tmp_path):
    def make(*, overwrite=False, tasks=(), limit=2, **sweep):
        request = recipe(text, tasks=[*tasks, f"text:{text}"], **sweep)
        evaluation = request.evaluation.model_copy(update={"limit": limit})
        cells = expand(request, "here")
        directory = SweepDirectory(tmp_path / "sweep")
        return plan_sweep(model, cells, evaluation, directory, machine=CPU, overwrite=overwrite), directory

    return make


RECOVERY = {"seq_len": 32, "steps": 2, "batch": 2, "validation": 1, "add_query_feedback": True}


def test_a_cell_recovers_a_q_delta_where_its_recovery_says_so(model, text, tmp_path, monkeypatch):
    cell = expand(recipe(text, recovery={"data": str(text), **RECOVERY}), "here")[0]
    sweep = SweepDirectory(tmp_path / "sweep")
    common = {"sweep": str(sweep.path), "model": model.describe(), "machine": {"device": "cpu"}}
    plans = []

    def record(plan, run, **_):
        plans.append(plan)
        return RecoveryResult(run.recovered, run.recovery, {"stopped": None}, worked=True)

    monkeypatch.setattr(work, "recover_into", record)
    calibration = cell.calibration.document()
    work.do(Job("calibrate", cell.calibration_name, settings=calibration, **common), SilentReporter())
    job = Job("cell", cell.name, settings=cell.settings(), calibration=cell.calibration_name, **common)
    for _ in range(2):
        work.do(job, SilentReporter())
    assert [plan.student.path for plan in plans] == [(sweep.cell(cell.name).path / "converted").resolve()] * 2
    assert plans[0].student.config["model_type"] == "qdelta"
    assert plans[0].student.config["head_dim"] < model.config["head_dim"]
    assert plans[0].teacher.digest == model.digest
    assert any("lamb_gain" in name for name in plans[0].adapters.changed)


def test_query_feedback_is_refused_before_any_work_where_there_can_be_none(text, tmp_path):
    base = resolve_model(str(tiny_delta_net(tmp_path / "base")))
    cells = expand(recipe(text, recovery={"data": str(text), **RECOVERY}), "here")
    with pytest.raises(ModelError, match="becomes a Q-Delta is a gated_deltanet"):
        plan_sweep(base, cells, None, SweepDirectory(tmp_path / "sweep"), machine=CPU)
    assert not (tmp_path / "sweep").exists()


def test_what_comes_from_the_hub_is_said_and_fetched_before_anything_costly(plan, monkeypatch):
    asked = []

    def refuse(name, *_):
        asked.append(name)
        raise DataError(f"the data of {name} could not be loaded", "give a local copy with --task-data DIR")

    monkeypatch.setattr(evaluation_run, "load_task", refuse)
    first, directory = plan(tasks=["wikitext"])
    assert first.fetched == ("wikitext",)
    assert first.document()["data_from_the_hub"] == ["wikitext"]
    assert asked == []
    with pytest.raises(DataError, match=r"wikitext could not be loaded\n.*--task-data DIR"):
        run_sweep(first, directory, [Slot(0)])
    assert asked == ["wikitext"]
    assert not directory.path.exists()
    assert plan()[0].fetched == ()


class FailingPool:
    """Every job fails."""

    def __init__(self, slots, logs):
        self.idle, self.jobs = slots, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, job, slot):
        self.jobs.append(job)

    def events(self, seconds):
        jobs, self.jobs = self.jobs, []
        return [(job, {"event": "failed", "message": f"no {job.kind}", "hint": "make room"}) for job in jobs]


def test_what_lacks_a_part_that_failed_names_its_cause(plan, monkeypatch):
    monkeypatch.setattr(sweeping, "Pool", FailingPool)
    first, directory = plan(method=["l1", "drrqr"])
    record = run_sweep(first, directory, [Slot(0)])
    failed = record.failed()
    root = f"calibration {first.cells[0].calibration_name}"
    assert list(failed) == ["base", root, *(cell.name for cell in first.cells)]
    assert failed[root]["failure"]["cause"] is None
    for cell in first.cells:
        failure = failed[cell.name]["failure"]
        assert (failure["cause"], failure["hint"]) == ("no calibrate", "make room")
        assert failure["message"] == f"{root} failed: no calibrate"
    others = ", ".join(cell.name for cell in first.cells)
    assert _causes(failed).splitlines() == [
        "  base: no base", "    make room", f"  {root}: no calibrate (and for that 2 more: {others})", "    make room",
    ]  # fmt: skip


def stamps(directory, names_):
    files = [path for name in names_ for path in directory.cell(name).path.rglob("*") if path.name != ".lock"]
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_failing_cell_a_second_try_and_a_third(plan, monkeypatch):
    monkeypatch.setattr("lapcli.sweeps.pool.subprocess", subprocess_of_forks())
    axes = {"method": ["drrqr", "grad"], "ratio": ["0.25", "0.5"]}
    first, directory = plan(**axes)
    assert first.document()["calibration_tokens"] == 8 * 64
    assert len(first.to_do) == 4
    assert not directory.path.exists()
    bad = first.cells[1].name
    broken = directory.cell(bad)
    broken.path.mkdir(parents=True)
    broken.selection.write_bytes(b"no safetensors")

    record = run_sweep(first, directory, [Slot(0)])
    assert list(record.failed()) == [bad]
    assert "truncated or no safetensors file" in record.cells[bad]["failure"]["message"]
    good = [cell.name for cell in first.cells if cell.name != bad]
    assert all(record.cells[name]["state"] == "done" for name in good)
    assert read_sweep(directory).document() == record.document()
    # One calibration for all, with what grad needs, of which each cell holds a second name.
    assert [path.name for path in (directory.path / "calibrations").iterdir()] == [first.cells[0].calibration_name]
    shared = directory.calibration(first.cells[0].calibration_name).calibration
    assert all(directory.cell(name).calibration.samefile(shared) for name in good)
    rows = [record.cells[name]["rows"][0]["values"] for name in good]
    assert len({row["base"]["value"] for row in rows}) == 1
    assert record.base["rows"][0]["values"]["base"] == rows[0]["base"]
    assert record.cells[good[0]]["state_bytes"]["after"] < record.cells[good[0]]["state_bytes"]["before"]

    # A value that no measurement gives: what is measured once is found again in every later cell.
    document = json.loads(directory.base.evaluation.read_text())
    document["models"][0]["scores"][0]["estimate"]["value"] = 123456.0
    directory.base.evaluation.write_text(json.dumps(document))
    broken.selection.unlink()
    before = stamps(directory, good)
    second, _ = plan(**axes)
    assert [cell.name for cell in second.to_do] == [bad]
    record = run_sweep(second, directory, [Slot(0)])
    assert record.failed() == {}
    assert "failure" not in record.cells[bad]
    assert record.cells[bad]["rows"][0]["values"]["base"]["value"] == 123456.0
    assert stamps(directory, good) == before

    third, _ = plan(**axes)
    assert third.to_do == []
    assert run_sweep(third, directory, [Slot(0)]).sessions == record.sessions
    assert len(record.sessions) == 2
    # A cell whose model is not what was measured is done again.
    config = directory.cell(good[0]).sliced / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": "edited"}))
    assert [cell.name for cell in plan(**axes)[0].to_do] == [good[0]]
    with pytest.raises(ArtifactError, match="measured with limit 2, not 3"):
        plan(**axes, limit=3)
    text = directory.record.read_text()
    directory.record.write_text(text.replace(record.model["digest"], "0" * 64))
    with pytest.raises(ArtifactError, match="is a sweep of"):
        plan(**axes)
    directory.record.write_text("{")
    with pytest.raises(ArtifactError, match=r"no JSON.*\n.*the cells beside it stay valid"):
        plan(**axes)


def job(tmp_path):
    model = {"name": str(tmp_path / "none"), "revision": None, "digest": "0"}
    return Job("base", "base", str(tmp_path), model, {"device": "cpu"})


def test_a_worker_that_is_killed_is_a_failed_job_and_the_next_gets_another(tmp_path):
    with Pool([Slot(0)], tmp_path / "logs") as pool:
        pool.start(job(tmp_path), pool.idle[0])
        assert pool.idle == []
        worker = pool.workers[0].process
        os.kill(worker.pid, signal.SIGKILL)
        events = []
        while not events:
            events += pool.events(0.5)
        assert events[0][1]["event"] == "failed"
        assert "killed by signal 9" in events[0][1]["message"]
        assert len(pool.idle) == 1
        pool.start(job(tmp_path), pool.idle[0])
        assert pool.workers[0].process.pid != worker.pid
        events = []
        while not events:
            events += [event for event in pool.events(0.5) if event[1]["event"] != "progress"]
        assert "none" in events[0][1]["message"]
        last = pool.workers[0].process
    assert last.poll() == 0


def test_an_interruption_ends_the_workers(tmp_path):
    pool = Pool([Slot(0), Slot(1)], tmp_path / "logs")
    processes = []

    def interrupted():
        with pool:
            for slot in pool.slots:
                pool.start(job(tmp_path), slot)
            processes.extend(worker.process for worker in pool.workers.values())
            raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(processes) == 2
    assert all(process.returncode is not None for process in processes)
    assert time.monotonic() - begun < 30


def test_slots(monkeypatch):
    assert [slot.number for slot in slots_for(None, 3, "cpu")] == [0, 1, 2]
    with pytest.raises(UsageError, match="at least 1"):
        slots_for(None, 0, "cpu")
    with pytest.raises(UsageError, match="a GPU of its own"):
        slots_for(1, 1, "cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert [slot.gpu for slot in slots_for(2, 2, "auto")] == ["5", "3", "5", "3"]
    with pytest.raises(UsageError, match="there are 2 CUDA devices"):
        slots_for(3, 1, "auto")
