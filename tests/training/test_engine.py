"""The training loop: stopped anywhere it goes on bit for bit, it learns what is planned and nothing else, and it stops.

Losses and gradients are compared with those of the model's own forward pass on single documents.
"""

import json
import os
import random
import signal
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lapcli.artifacts import Lineage, read_document
from lapcli.errors import ArtifactError, DataError, FamilyError, ModelError
from lapcli.families.loading import load_model, load_tokenizer
from lapcli.families.source import resolve_model
from lapcli.parallel import ALONE
from lapcli.reporting import Reporter, SilentReporter
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.processes import run_forked
from lapcli.testing.slices import random_kept, sliced_by
from lapcli.testing.stock_models import tiny_stock_model
from lapcli.training import engine
from lapcli.training.adapters import apply_adapters, plan_adapters, trained_parameters, trained_state
from lapcli.training.engine import Execution, TrainingSettings, train, training_lineage
from lapcli.training.fresh import WholePlan, train_whole
from lapcli.training.packing import PackedBatch, last_hidden
from lapcli.training.stream import PackedSequence, TrainingStream

ROUNDING = 1e-5  # fp32, as the contract of families
SHORT = {"steps": 10, "batch": 4, "lr": 3e-3, "lr_min": 3e-4, "validation": 3}
MODELS = {"gated_deltanet": tiny_gated_deltanet, "mamba2": partial(tiny_stock_model, "mamba2")}
WORDS = ("the", "state", "of", "a", "layer", "is", "read", "by", "queries", "and", "written", "with", "values")


def write_text(path):
    """Texts of very different lengths, so that rows hold one document or several."""
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.choice((1, 3, 6, 30)))) for _ in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module", params=list(MODELS))
def place(request, tmp_path_factory):
    """A folder with a model, `base`, a slice of it, `sliced`, and a text."""
    folder = tmp_path_factory.mktemp(request.param)
    MODELS[request.param](folder / "base")
    base = resolve_model(str(folder / "base"))
    sliced_by(base, random_kept(base, 8), folder)
    write_text(folder / "text.jsonl")
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    tiny_gated_deltanet(folder / "base")
    write_text(folder / "text.jsonl")
    return folder


class Bench:
    """All that a training takes, made anew as another process would."""

    def __init__(
        self, folder, *, student="base", teacher="base", full=False, everything=False, length=32, rank=4,
        processes=ALONE, load=None, **settings,
    ):  # fmt: skip
        self.source = resolve_model(str(folder / student))
        teacher_source = None if teacher is None else resolve_model(str(folder / teacher))
        torch.manual_seed(7)
        model = load_model(self.source, **(load or {}))
        if everything:
            train_whole(model)
            self.plan, self.student = WholePlan.of(model), model
        else:
            self.plan = plan_adapters(model, self.source.config, full=full, rank=rank)
            self.student = apply_adapters(model, self.plan)
        self.teacher = None if teacher_source is None else load_model(teacher_source, **(load or {}))
        self.settings = TrainingSettings(**{**SHORT, **settings})
        share = {"rank": processes.rank, "world": processes.size}
        self.stream = TrainingStream(str(folder / "text.jsonl"), load_tokenizer(self.source), length, seed=3, **share)
        if everything:
            self.lineage = Lineage("checkpoint", self.source.describe(), "any", self.settings.document())
        else:
            self.lineage = training_lineage(self.source, teacher_source, self.plan, self.settings)
        self.reporter, self.processes = SilentReporter(), processes
        self.device = torch.device((load or {}).get("device", "cpu"))

    def run(self, folder, *, on_step=None, **execution):
        self.result = train(
            self.student, self.teacher, self.stream, self.plan, self.settings, folder, lineage=self.lineage,
            execution=Execution(**{"micro_batch": 2, "save_every": 3, "validate_every": 2, **execution}),
            on_step=on_step, reporter=self.reporter, processes=self.processes, device=self.device,
        )  # fmt: skip
        return self.result

    @property
    def state(self):
        return trained_state(self.student)


def curve(folder):
    """Lines without what the clock says."""
    lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def checkpoints_in(folder):
    return sorted((path.name for path in (folder / "checkpoints").iterdir()), key=lambda name: int(name[5:]))


class Killed(Exception):
    pass


def raising_at(step, what=Killed):
    def raise_it(done):
        if done.step == step:
            raise what

    return raise_it


def sequence(*documents):
    """Documents packed in one row."""
    starts = [sum(map(len, documents[:i])) for i in range(len(documents))]
    return PackedSequence(torch.tensor(list(chain(*documents))), tuple(starts), "test")


def documents(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 259, (length,), generator=generator).tolist() for length in lengths]


# Case 21.


def test_killed_at_step_7_it_goes_on_bit_for_bit(place, tmp_path):
    unbroken = Bench(place, student="sliced")
    unbroken.run(tmp_path / "unbroken")
    first = Bench(place, student="sliced")
    with pytest.raises(Killed):
        first.run(tmp_path / "broken", on_step=raising_at(7))
    assert checkpoints_in(tmp_path / "broken")[-1] == "step-6"
    assert curve(tmp_path / "broken")[-1]["step"] == 7
    again = Bench(place, student="sliced")
    steps = []
    result = again.run(tmp_path / "broken", on_step=lambda done: steps.append(done.step))
    assert steps == [7, 8, 9, 10]
    assert any("goes on after step 6 of 10" in notice for notice in again.reporter.notices)
    assert same(again.state, unbroken.state)
    assert curve(tmp_path / "broken") == curve(tmp_path / "unbroken")
    assert (result.tokens, result.first, result.last) == tuple(
        getattr(unbroken.result, name) for name in ("tokens", "first", "last")
    )
    assert checkpoints_in(tmp_path / "broken") == checkpoints_in(tmp_path / "unbroken") == ["step-9", "step-10"]


def everything_of(place, **settings):
    """A training of all that a model has, with a decay that passes over vectors."""
    return Bench(place, teacher=None, everything=True, **{"kl_weight": 0.0, "weight_decay": 0.1, **settings})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_whole_model_goes_on_bit_for_bit(own, tmp_path, optimizer):
    unbroken, first, again = (everything_of(own, optimizer=optimizer) for _ in range(3))
    before = unbroken.state
    unbroken.run(tmp_path / "unbroken")
    assert before.keys() == {name for name, _ in unbroken.student.named_parameters()}
    assert not any(torch.equal(value, before[name]) for name, value in unbroken.state.items())
    with pytest.raises(Killed):
        first.run(tmp_path / "broken", on_step=raising_at(7))
    again.run(tmp_path / "broken")
    assert same(again.state, unbroken.state)
    assert curve(tmp_path / "broken") == curve(tmp_path / "unbroken")
    assert unbroken.result.last.loss < unbroken.result.first.loss


def test_a_step_of_a_whole_model_is_torchs_with_its_vectors_left_undecayed(own, tmp_path):
    bench = everything_of(own, steps=1, warmup=1.0, beta1=0.8, beta2=0.95, eps=1e-6, clip=1e9)
    model = load_model(bench.source)
    groups = [[p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        lr=bench.settings.lr, betas=(0.8, 0.95), eps=1e-6,
    )  # fmt: skip
    bench.stream.held_out(bench.settings.validation)
    batch = PackedBatch.of([next(bench.stream) for _ in range(4)])
    logits = model(batch.ids, position_ids=batch.position_ids, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), batch.labels, ignore_index=-100).backward()
    optimizer.step()
    again = everything_of(own, steps=1, warmup=1.0, beta1=0.8, beta2=0.95, eps=1e-6, clip=1e9)
    again.run(tmp_path)
    # A first step has the size of the rate, whatever the gradient, so that rounding shows relative to that.
    for name, parameter in model.named_parameters():
        assert (again.state[name] - parameter).abs().max() < 1e-2 * bench.settings.lr, name


def test_what_is_watched_is_in_the_curve(own, tmp_path):
    bench = everything_of(own, steps=2)

    @contextmanager
    def watch():
        rows = []
        hook = bench.student.model.norm.register_forward_hook(lambda module, _in, out: rows.append(module.training))
        yield lambda: {"trained": rows}
        hook.remove()

    train(
        bench.student, None, bench.stream, bench.plan, bench.settings, tmp_path, lineage=bench.lineage,
        execution=Execution(validate_every=1, micro_batch=2), watch=watch,
    )  # fmt: skip
    # Three sequences are held out.
    watched = [line for line in curve(tmp_path) if "trained" in line]
    assert watched == [{"step": step, "trained": [False, False]} for step in (0, 1, 2)]


def test_compiled_blocks_train_as_they_are(own, tmp_path, monkeypatch):
    plain, compiled = everything_of(own, steps=2), everything_of(own, steps=2)
    plain.run(tmp_path / "plain")
    seen = []

    def compile_(forward, **options):
        seen.append(options)
        return forward

    monkeypatch.setattr(torch, "compile", compile_)
    compiled.run(tmp_path / "compiled", compile=True, gradient_checkpointing=True)
    assert same(compiled.state, plain.state)
    assert len(seen) == plain.student.config.num_hidden_layers
    assert all(each["options"].get("triton.mix_order_reduction", False) is False for each in seen)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiler_that_errs_is_found_out(own, tmp_path, monkeypatch, checkpointing):
    """The right values, but not all of the gradient."""

    def compile_(forward, **_):
        def erring(hidden, *others, **named):
            return forward(0.9 * hidden + 0.1 * hidden.detach(), *others, **named)

        return erring

    monkeypatch.setattr(torch, "compile", compile_)
    with pytest.raises(ModelError, match=r"wrong gradient of its input of a .*Block.*without the compiler"):
        everything_of(own, steps=2).run(tmp_path, compile=True, gradient_checkpointing=checkpointing)


def test_what_a_model_draws_goes_on_too(own, tmp_path):
    def drawing():
        bench = Bench(own)
        for name in bench.plan.lora:
            module = bench.student.get_base_model().get_submodule(name)
            module.register_forward_hook(lambda module, _in, out: F.dropout(out, 0.2, module.training))
        return bench

    unbroken, first, again = drawing(), drawing(), drawing()
    unbroken.run(tmp_path / "unbroken")
    with pytest.raises(Killed):
        first.run(tmp_path / "broken", on_step=raising_at(7))
    again.run(tmp_path / "broken")
    assert same(again.state, unbroken.state)
    plain = Bench(own)
    plain.run(tmp_path / "plain")
    assert not same(plain.state, unbroken.state)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_engine import Bench

def kill(done):
    if done.step == 7:
        os.kill(os.getpid(), int(sys.argv[4]))

Bench(Path(sys.argv[2]), student="sliced").run(Path(sys.argv[3]), on_step=kill)
"""


def in_another_process(place, folder, number):
    arguments = [os.path.dirname(__file__), place, folder, int(number)]
    done = run_forked(*arguments, program=KILLED, threads=torch.get_num_threads())
    return done.returncode, done.stderr


def test_a_process_killed_at_step_7(place, tmp_path):
    unbroken = Bench(place, student="sliced")
    unbroken.run(tmp_path / "unbroken")
    code, said = in_another_process(place, tmp_path / "broken", signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    assert checkpoints_in(tmp_path / "broken")[-1] == "step-6"
    again = Bench(place, student="sliced")
    again.run(tmp_path / "broken")
    assert same(again.state, unbroken.state)
    assert curve(tmp_path / "broken") == curve(tmp_path / "unbroken")


def test_a_process_that_is_asked_to_end_saves_first(own, tmp_path):
    (tmp_path / "model").mkdir()
    source = resolve_model(str(own / "base"))
    sliced_by(source, random_kept(source, 8), tmp_path / "model")
    for name in ("base", "text.jsonl"):
        (tmp_path / "model" / name).symlink_to(own / name)
    code, said = in_another_process(tmp_path / "model", tmp_path / "run", signal.SIGTERM)
    assert code not in (0, -signal.SIGTERM)
    assert said.strip().endswith("KeyboardInterrupt")
    assert checkpoints_in(tmp_path / "run")[-1] == "step-7"


@pytest.fixture
def pythons_own_handlers():
    """Signals as a fresh process handles them: a command that ran in this one before leaves its own handlers."""
    fresh = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in fresh.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.usefixtures("pythons_own_handlers")
def test_a_signal_lets_the_step_end_and_saves(own, number, tmp_path):
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    unbroken = Bench(own)
    unbroken.run(tmp_path / "unbroken")
    first = Bench(own)
    with pytest.raises(KeyboardInterrupt):
        first.run(tmp_path / "run", on_step=lambda done: done.step == 7 and os.kill(os.getpid(), number))
    assert {each: signal.getsignal(each) for each in handlers} == handlers
    assert checkpoints_in(tmp_path / "run") == ["step-6", "step-7"]
    # Nobody looked whether it is sound, so the newest that is known to be stays beside it.
    assert not read_document(tmp_path / "run" / "checkpoints" / "step-7" / "state.json").record["good"]
    again = Bench(own)
    steps = []
    again.run(tmp_path / "run", on_step=lambda done: steps.append(done.step))
    assert steps == [8, 9, 10]
    assert same(again.state, unbroken.state)
    assert curve(tmp_path / "run") == curve(tmp_path / "unbroken")


@pytest.mark.usefixtures("pythons_own_handlers")
def test_a_second_signal_does_not_wait(own, tmp_path):
    bench = Bench(own)

    def twice(done):
        if done.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        bench.run(tmp_path, on_step=twice)
    assert checkpoints_in(tmp_path)[-1] == "step-3"


def test_whoever_handled_a_signal_before_hears_of_it(own, tmp_path):
    class Theirs(Exception):
        pass

    def theirs(_number, _frame):
        raise Theirs

    before = signal.signal(signal.SIGTERM, theirs)
    try:
        with pytest.raises(Theirs):
            Bench(own).run(tmp_path, on_step=lambda done: done.step == 4 and os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert checkpoints_in(tmp_path)[-1] == "step-4"


def test_it_runs_in_a_thread(own, tmp_path):
    bench = Bench(own, steps=1)
    thread = threading.Thread(target=bench.run, args=(tmp_path,))
    thread.start()
    thread.join()
    assert bench.result.step == 1


def test_a_finished_training_is_not_trained_again(own, tmp_path):
    first = Bench(own)
    first.run(tmp_path)
    again = Bench(own)
    assert again.run(tmp_path, on_step=raising_at(1)) == first.result
    assert same(again.state, first.state)


def test_text_that_ends_loses_no_step(own, tmp_path):
    bench = Bench(own)
    take, left = bench.stream.__class__.__next__, iter(range(22))

    class Short(TrainingStream):
        def __next__(self):
            if next(left, None) is None:
                raise DataError("the hub does not answer")
            return take(self)

    bench.stream.__class__ = Short
    with pytest.raises(DataError, match="does not answer"):
        bench.run(tmp_path / "run")
    assert checkpoints_in(tmp_path / "run")[-1] == "step-5"
    unbroken, again = Bench(own), Bench(own)
    unbroken.run(tmp_path / "unbroken")
    again.run(tmp_path / "run")
    assert same(again.state, unbroken.state)


def test_other_settings_are_refused_by_name(own, tmp_path):
    Bench(own, steps=2).run(tmp_path)
    with pytest.raises(ArtifactError, match=r"lr: 0\.001 wanted, 0\.003 found"):
        Bench(own, steps=2, lr=0.001).run(tmp_path)
    with pytest.raises(ArtifactError, match="made from teacher: none wanted"):
        Bench(own, steps=2, teacher=None).run(tmp_path)
    with pytest.raises(DataError, match="seq_len was 32 and is 16"):
        Bench(own, steps=2, length=16).run(tmp_path)
    # How it runs is no setting of the method.
    Bench(own, steps=2).run(tmp_path, micro_batch=1, keep=1)


# What is computed.


def gradients(bench, sequences, **execution):
    """The measured means and the gradient of one step, of what has one."""
    loop = loop_of(bench, **execution)
    bench.student.train().zero_grad(set_to_none=True)
    batches = loop._batches(sequences)
    tokens = sum(map(engine._counted, batches))
    measured, _ = loop._gradient(engine._Share(batches, [0] * len(batches), tokens, 0, 0, None))
    found = trained_parameters(bench.student)
    return measured, {name: each.grad.clone() for name, each in found.items() if each.grad is not None}


def loop_of(bench, **execution):
    return engine._Loop(
        bench.student, bench.teacher, bench.stream, bench.plan, bench.settings, Path("nowhere"), bench.lineage,
        Execution(**execution), None, engine.Objective, lambda _done: None, lambda _step, _found: None,
        nullcontext, "training", "begin anew", bench.reporter, ALONE, None,
    )  # fmt: skip


def disturb(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def close(one, other):
    scale = max(value.abs().max() for value in other.values())
    return one.keys() == other.keys() and all((one[name] - other[name]).abs().max() < ROUNDING * scale for name in one)


def test_four_parts_of_one_are_one_part_of_four(place):
    bench = Bench(place, student="sliced")
    disturb(bench.student)
    # Rows in which different numbers of tokens count: a mean of means would show.
    rows = [sequence(*documents(*lengths)) for lengths in ((32,), (1,) * 20 + (12,), (16, 16), (2,) * 16)]
    whole, gradient = gradients(bench, rows, micro_batch=4)
    parts, summed = gradients(bench, rows, micro_batch=1)
    assert whole.tokens == parts.tokens == 31 + 11 + 30 + 16
    assert parts.loss == pytest.approx(whole.loss, rel=ROUNDING)
    assert close(summed, gradient)


def test_a_part_in_which_nothing_counts(place):
    bench = Bench(place)
    empty, full = sequence(*documents(*[1] * 32)), sequence(*documents(32))
    measured, gradient = gradients(bench, [empty, full])
    alone, wanted = gradients(bench, [full])
    assert measured.loss == pytest.approx(alone.loss, rel=ROUNDING)
    assert close(gradient, wanted)
    nothing, gradient = gradients(bench, [empty])
    assert (nothing.tokens, nothing.loss) == (0, 0.0)
    assert not any(value.any() for value in gradient.values())


def test_loss_and_gradient_are_those_of_documents_alone(place):
    """Case 9: packed documents, against the dense formula on each by itself."""
    bench = Bench(place, student="sliced")
    disturb(bench.student)
    texts = documents(7, 1, 12, 12, 20, 12)
    rows = [sequence(*texts[:4]), sequence(*texts[4:])]
    measured, gradient = gradients(bench, rows, micro_batch=2)

    bench.student.zero_grad(set_to_none=True)
    entropy = kl = count = 0
    for text in texts:
        if len(text) == 1:
            continue
        ids = torch.tensor([text])
        logits = bench.student(input_ids=ids, use_cache=False).logits[0, :-1]
        with torch.no_grad():
            guide = bench.teacher(input_ids=ids, use_cache=False).logits[0, :-1]
        entropy = entropy + F.cross_entropy(logits, ids[0, 1:], reduction="sum")
        own, theirs = F.log_softmax(logits / 2, -1), F.log_softmax(guide / 2, -1)
        kl = kl + F.kl_div(own, theirs, reduction="sum", log_target=True)
        count += len(text) - 1
    ((entropy + 4 * kl) / count).backward()
    entropy, kl = entropy.detach(), kl.detach()
    wanted = {name: parameter.grad for name, parameter in trained_parameters(bench.student).items()}
    assert measured.tokens == count
    assert measured.cross_entropy == pytest.approx(float(entropy / count), rel=ROUNDING)
    assert measured.kl == pytest.approx(float(kl / count), rel=1e-4)  # a difference of near distributions
    assert close(gradient, wanted)


def test_the_second_document_of_a_row_is_as_if_alone(place):
    bench = Bench(place)
    one, two, other = documents(17, 15, 17)
    with torch.no_grad():
        alone = last_hidden(bench.teacher, PackedBatch.of([sequence(two)]))
        for first in (one, other):
            packed = last_hidden(bench.teacher, PackedBatch.of([sequence(first, two)]))
            assert (packed[17:] - alone).abs().max() < ROUNDING * alone.abs().max()
        # Rows of one batch do not meet either.
        rows = last_hidden(bench.teacher, PackedBatch.of([sequence(one, two), sequence(two, one)]))
        assert (rows[32:47] - alone).abs().max() < ROUNDING * alone.abs().max()
    assert (place.name.startswith("mamba2")) == (not engine.reads_packing(bench.teacher))


def test_without_a_teacher_the_loss_is_the_models_own(place):
    bench = Bench(place, teacher=None)
    disturb(bench.student)
    row = sequence(*documents(32))
    measured, gradient = gradients(bench, [row])
    assert measured.kl == 0
    assert measured.loss == measured.cross_entropy
    bench.student.zero_grad(set_to_none=True)
    ids = row.ids[None]
    logits = bench.student(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()
    assert measured.loss == pytest.approx(float(loss.detach()), rel=ROUNDING)
    assert close(gradient, {name: parameter.grad for name, parameter in trained_parameters(bench.student).items()})


def test_gradient_checkpointing_changes_nothing(place, tmp_path):
    plain, lean = Bench(place, steps=3), Bench(place, steps=3)
    plain.run(tmp_path / "plain")
    calls = []
    lean.student.get_base_model().get_submodule(lean.plan.lora[0]).register_forward_hook(lambda *_: calls.append(0))
    lean.run(tmp_path / "lean", gradient_checkpointing=True)
    assert same(plain.state, lean.state)
    assert len(calls) > 0
    # Forward and again backward, but once in validation.
    passes = []
    plain.student.get_base_model().get_submodule(plain.plan.lora[0]).register_forward_hook(lambda *_: passes.append(0))
    row = sequence(*documents(32))
    gradients(plain, [row])
    calls.clear()
    gradients(lean, [row])
    assert len(calls) == 2 * len(passes) > 0


# What is learned.


def weights_of(model):
    return {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_only_what_is_planned_changes_and_the_teacher_never(place, full, tmp_path):
    bench = Bench(place, student="sliced", full=full)
    student, teacher = weights_of(bench.student), weights_of(bench.teacher)
    bench.teacher.train().requires_grad_(True)
    before = bench.state
    bench.run(tmp_path)
    assert same(weights_of(bench.teacher), teacher)
    assert all(parameter.grad is None for parameter in bench.teacher.parameters())
    assert not bench.teacher.training
    trained = {id(parameter) for parameter in trained_parameters(bench.student).values()}
    for name, parameter in bench.student.named_parameters():
        assert torch.equal(parameter, student[name]) == (id(parameter) not in trained), name
    assert {name for name, value in bench.state.items() if not torch.equal(value, before[name])} == bench.plan.names()


def test_more_trained_than_planned_is_refused(own, tmp_path):
    bench = Bench(own)
    bench.student.get_base_model().lm_head.weight.requires_grad_(True)
    with pytest.raises(FamilyError, match=r"beyond it: lm_head\.weight"):
        bench.run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_pruned_student_comes_nearer_to_its_teacher(place, tmp_path):
    # The weight of the KL is large, since this teacher knows nothing of the text: the labels say otherwise.
    bench = Bench(place, student="sliced", steps=30, lr=3e-3, rank=16, kl_weight=1e3)
    result = bench.run(tmp_path, save_every=100, validate_every=100)
    assert result.stopped is None
    assert 0 < result.last.kl < 0.7 * result.first.kl
    validations = [line["validation"]["kl"] for line in curve(tmp_path) if "validation" in line]
    assert validations == [result.first.kl, result.last.kl]


class Same:
    """A stream of one row."""

    def __init__(self):
        self.row = sequence(*documents(32))
        self.reporter: Reporter = SilentReporter()

    def __next__(self):
        return self.row

    def held_out(self, count):
        return [self.row] * count

    def state(self):
        return {}

    def restore(self, state):
        assert state == {}


def test_it_learns_a_row_by_heart(place, tmp_path):
    bench = Bench(place, teacher=None, full=True, steps=40, batch=1, lr=2e-2, validation=1)
    bench.stream = Same()
    result = bench.run(tmp_path, save_every=100)
    assert result.last.loss < 0.5 * result.first.loss


# When it goes wrong.


def test_a_loss_that_grows_stops_it_with_the_last_good_parameters(own, tmp_path):
    # From the model itself every step leads away, and far where it is so large.
    bench = Bench(own, full=True, lr=0.01, warmup=1.0, kl_weight=1e3)
    states = {}
    result = bench.run(tmp_path, validate_every=1, save_every=1, divergence=8.0,
                       on_step=lambda done: states.update({done.step: bench.state}))  # fmt: skip
    assert "times the first one" in result.stopped
    last = max(states)
    assert 0 < result.step == last - 1 < 9
    assert same(bench.state, states[result.step])
    assert result.checkpoint == tmp_path / "checkpoints" / f"step-{result.step}"
    assert result.checkpoint.is_dir()
    assert result.last.loss <= 8 * result.first.loss
    (said,) = bench.reporter.warnings
    assert "diverged" in said
    assert str(result.checkpoint) in said
    assert curve(tmp_path)[-1] == {"step": last, "diverged": result.stopped}
    assert not (tmp_path / "checkpoints" / f"step-{last}").exists()


@pytest.mark.parametrize("what", ["value", "gradient"])
def test_what_is_not_finite_stops_it_before_the_update(own, what, tmp_path):
    bench = Bench(own)
    parameter = next(iter(trained_parameters(bench.student).values()))

    def spoil(done):
        if done.step == 5 and what == "value":
            with torch.no_grad():
                parameter.view(-1)[0] = float("nan")
        elif done.step == 5:
            parameter.register_hook(lambda gradient: gradient * float("inf"))

    result = bench.run(tmp_path, on_step=spoil)
    assert ("loss" if what == "value" else "gradient") in result.stopped
    assert "step 6" in result.stopped
    # Step 4 was validated, step 3 saved.
    assert result.step == 3
    assert all(value.isfinite().all() for value in bench.state.values())
    assert checkpoints_in(tmp_path)[-1] == "step-3"


def test_a_model_that_is_broken_from_the_start(own, tmp_path):
    bench = Bench(own)
    with torch.no_grad():
        bench.student.get_base_model().lm_head.weight[5] = float("nan")
    with pytest.raises(ModelError, match="before any training"):
        bench.run(tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_it_says_that_stock_models_get_documents_as_rows(place, tmp_path):
    bench = Bench(place, steps=1)
    bench.run(tmp_path)
    said = [notice for notice in bench.reporter.notices if "as rows of similar lengths" in notice]
    assert len(said) == (2 if place.name.startswith("mamba2") else 0)


@pytest.mark.parametrize(
    ("settings", "execution"),
    [({"lr_min": 1.0}, {}), ({}, {"micro_batch": 0}), ({}, {"save_every": 0}), ({}, {"keep": 0})],
    ids=["lr_min", "micro_batch", "save_every", "keep"],
)
def test_sizes_that_make_no_sense(own, settings, execution, tmp_path):
    with pytest.raises(ValueError, match=r"lr_min|at least 1"):
        Bench(own, **settings).run(tmp_path, **execution)
