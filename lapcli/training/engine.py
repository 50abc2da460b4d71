"""The training loop: a model that trains some or all of its numbers, perhaps a teacher, and a stream of packed text.

Recovery trains adapters beside a teacher, pre-training a whole model alone; what is trained is a `TrainingPlan`.

Between two steps everything that matters is in one place: the trained parameters, the optimiser's moments, the
generators of random numbers, and the position in the stream. A checkpoint holds just that, and on a CPU a run that went
on from one ends with the bits of a run that never stopped.

Several processes train one model on one batch (`lapcli.training.distributed`). They meet twice a step: before it, to
tell each other of signals, failures and numbers of tokens, and after it, to add up what they measured. So all see the
same loss and the same norm, and go on, stop or turn back as one. The leader alone reads and writes checkpoints.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from lapcli.artifacts import CURVE_FILE, Lineage, digest_document
from lapcli.errors import LapcliError, ModelError, RecipeError
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource
from lapcli.models.loss import IGNORED
from lapcli.parallel import ALONE, Processes
from lapcli.recipe import TrainingSettings
from lapcli.reporting import Reporter, SilentReporter
from lapcli.training.adapters import AdapterPlan, TrainingPlan, check_coverage, trained_parameters, whole
from lapcli.training.checkpoints import (
    ANEW,
    KIND,
    Checkpoints,
    restore_parameters,
    restore_random,
    restore_training,
    shared_with_all,
    training_tensors,
)
from lapcli.training.compiling import compile_blocks
from lapcli.training.curve import Curve
from lapcli.training.distillation import Sums, total
from lapcli.training.distributed import Objective, Parallel, Sharding, local, nothing_of, unwrapped
from lapcli.training.optimisers import optimiser_of
from lapcli.training.packing import PackedBatch, reads_packing
from lapcli.training.prefetch import ReadAhead
from lapcli.training.schedule import learning_rate_factor
from lapcli.training.stream import PackedSequence, Stream

CHECKPOINTS = "checkpoints"

STEPS_AHEAD = 4
"""So many steps' sequences lie ready at most, of 8 bytes a token."""

Watch = Callable[[], contextlib.AbstractContextManager[Callable[[], Mapping[str, Any]]]]


@dataclass(frozen=True)
class Execution:
    """How training runs here; results differ by rounding at most.

    Attributes:
        micro_batch: sequences that a process computes at once.
        gradient_checkpointing: whether blocks run again in the backward pass, instead of keeping their activations.
        autocast: whether products are in bf16 on a GPU.
        validate_every: steps between two validations.
        save_every: steps between two checkpoints; the model is validated before each.
        keep: checkpoints that remain, beside the newest good one.
        divergence: training stops when the validation loss is above this many times the first one.
        sharding: how several processes hold the models: `none` (DDP, each whole) or `fsdp` (FSDP2, each a share).
        compile: whether the trained model's blocks are compiled (`lapcli.training.compiling`).
    """

    micro_batch: int = 1
    gradient_checkpointing: bool = False
    autocast: bool = True
    validate_every: int = 100
    save_every: int = 100
    keep: int = 2
    divergence: float = 1.5
    sharding: Sharding = "none"
    compile: bool = False


@dataclass(frozen=True)
class Measured:
    """Means per token.

    Attributes:
        loss: cross entropy + `w T^2` KL.
        cross_entropy: of the student.
        kl: from the teacher, without its factor; 0 without one.
        tokens: how many counted.
    """

    loss: float
    cross_entropy: float
    kl: float
    tokens: int

    def document(self) -> dict[str, Any]:
        """The means, for the curve."""
        return {"loss": self.loss, "cross_entropy": self.cross_entropy, "kl": self.kl}


@dataclass(frozen=True)
class StepDone:
    """What is known when a step is done.

    Attributes:
        step: how many are done now.
        measured: before its update.
        learning_rate: of its update.
        gradient_norm: before clipping.
        tokens: that counted so far.
        seconds: that it took.
        positions: tokens that the sequences of this step hold, of all processes, whether they count or not.
        peak_bytes: the most that tensors took on a device since the last step, of the process with most; `None` on a
            CPU.
    """

    step: int
    measured: Measured
    learning_rate: float
    gradient_norm: float
    tokens: int
    seconds: float
    positions: int
    peak_bytes: int | None

    def in_words(self) -> str:
        """A line of the numbers that tell whether training goes well."""
        rate = self.positions / max(self.seconds, 1e-9)
        speed = f"{rate / 1000:.1f} k" if rate >= 1000 else f"{rate:.0f}"
        memory = "" if self.peak_bytes is None else f", {self.peak_bytes / 2**30:.1f} GiB"
        kl = f", KL {self.measured.kl:.4f}" if self.measured.kl else ""
        return f"loss {self.measured.loss:.3f}{kl}, {speed} tokens/s{memory}"


@dataclass(frozen=True)
class TrainingEnd:
    """How training ended.

    Attributes:
        step: the step whose parameters the model has now.
        tokens: that counted up to there.
        first: validation before the first step; `None` where nothing is held out.
        last: validation of what the model has now, likewise.
        checkpoint: the folder of that step.
        stopped: why it ended early, or `None`.
    """

    step: int
    tokens: int
    first: Measured | None
    last: Measured | None
    checkpoint: Path
    stopped: str | None = None


def training_lineage(
    source: ModelSource, teacher: ModelSource | None, plan: AdapterPlan, settings: TrainingSettings
) -> Lineage:
    """What a training is known by, so that no checkpoint of another one is taken up.

    The text, the tokenizer and the length of sequences are checked by the stream itself.

    Args:
        source: the model that is trained.
        teacher: the model it learns from, if any.
        plan: what is trained in it.
        settings: of the training.
    """
    return Lineage(
        kind=KIND,
        model=source.describe(),
        family=family_for(source.config).name,
        settings={
            **settings.document(),
            "rank": plan.rank,
            "alpha": plan.alpha,
            "trained": plan.trained,
            "parameters": digest_document(sorted(plan.names())),
        },
        parents={} if teacher is None else {"teacher": teacher.digest},
    )


def train(
    student: nn.Module,
    teacher: nn.Module | None,
    stream: Stream,
    plan: TrainingPlan,
    settings: TrainingSettings,
    folder: Path,
    *,
    lineage: Lineage,
    execution: Execution | None = None,
    vocabulary: int | None = None,
    objective: Callable[..., Objective] = Objective,
    on_step: Callable[[StepDone], None] | None = None,
    on_validation: Callable[[int, Measured], None] | None = None,
    watch: Watch | None = None,
    doing: str = "training",
    anew: str = ANEW,
    reporter: Reporter | None = None,
    processes: Processes = ALONE,
    device: torch.device | None = None,
) -> TrainingEnd:
    """Train what was planned, or go on where a training with the same settings was stopped.

    SIGINT and SIGTERM let the step at hand end, save, and interrupt; a second signal interrupts at once.

    Of several processes all call this with the same arguments, each with models on its device and its share of the
    stream. They take the same sequences in each step as one process would, however many they are, and any number can
    go on, sharded or not, where any other stopped. A signal to one of them interrupts all, at the same step. At the end
    each has the trained parameters. Those that were sharded stay so: then `trained_state` is for all at once.

    Args:
        student: as its plan has it (`apply_adapters`, `train_whole`), on its device. Its trained parameters are changed
            in place. Where it will be sharded, student and teacher may be in the leader's memory, and nowhere in the
            other processes.
        teacher: frozen by this call, on any device; `None` for plain cross entropy.
        stream: of text, from its beginning.
        plan: what the student trains.
        settings: of the training.
        folder: gets `checkpoints/` and `curve.jsonl`. Nobody else may be at work in it.
        lineage: what the training is known by, as `training_lineage` makes it for adapters.
        execution: how it runs here, the same in all processes.
        vocabulary: leading ids that both models have, as for `distillation_sums`.
        objective: makes what is minimised of student, teacher, `vocabulary`, `temperature` and `autocast`.
        on_step: hears of every step, in each process.
        on_validation: hears of every validation: steps done, and means over what is held out; likewise.
        watch: a context that lasts as long as a validation, and gives what makes figures of what it saw there; they
            are written into the curve. Each process enters it, and sees what this one computes.
        doing: what progress is called.
        anew: what is said to do where training can go on from no checkpoint.
        reporter: where progress and remarks go; the leader's alone is used.
        processes: those that train together, under `lapcli.parallel.jointly` if there are several.
        device: where this process computes; by default where the student is.

    Returns:
        How it ended. Where training diverged, the student has the parameters of the last good checkpoint.

    Raises:
        ArtifactError: checkpoints of a training with other settings, or only damaged ones; a full disk.
        DataError: the stream cannot be read, or is not the one of the checkpoint.
        FamilyError: the student does not train what is planned.
        KeyboardInterrupt: after a signal, unless whoever handled it before raises something else.
        LapcliError: another process ended, or cannot read its text.
        ModelError: the loss is not finite before the first step, the models have no heads to distil, or the device's
            memory is too small.
        RecipeError: the batch cannot be shared alike by so many processes.
        ValueError: sizes that make no sense, or a stream that is not for this process.
    """
    loop = _Loop(
        student, teacher, stream, plan, settings, folder, lineage, execution or Execution(), vocabulary,
        objective, on_step or (lambda _done: None), on_validation or (lambda _step, _found: None),
        watch or (lambda: contextlib.nullcontext(dict)), doing, anew,
        reporter or SilentReporter(), processes, device,
    )  # fmt: skip
    return loop.run()


class _Diverged(Exception):
    """Training has gone wrong; the text says how."""


@dataclass(frozen=True, eq=False)
class _Share:
    """This process's part of a step, and what all processes know of it.

    Attributes:
        batches: what is computed at once.
        passes: for each of them, as `Objective.forward` takes it.
        tokens: that count, in all processes.
        positions: all tokens, likewise.
        signal: the number of one that came to any process, or 0.
        failure: why there are no sequences, here or in another process.
    """

    batches: list[PackedBatch]
    passes: list[int]
    tokens: int
    positions: int
    signal: int
    failure: Exception | None


class _Loop:
    """A training under way."""

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | None,
        stream: Stream,
        plan: TrainingPlan,
        settings: TrainingSettings,
        folder: Path,
        lineage: Lineage,
        execution: Execution,
        vocabulary: int | None,
        objective: Callable[..., Objective],
        on_step: Callable[[StepDone], None],
        on_validation: Callable[[int, Measured], None],
        watch: Watch,
        doing: str,
        anew: str,
        reporter: Reporter,
        processes: Processes,
        device: torch.device | None,
    ):
        for name in ("micro_batch", "validate_every", "save_every"):
            if getattr(execution, name) < 1:
                raise ValueError(f"{name} should be at least 1, not {getattr(execution, name)}")
        if settings.lr_min > settings.lr:
            raise ValueError(f"lr_min = {settings.lr_min} is above lr = {settings.lr}")
        if settings.batch % processes.size:
            raise RecipeError(
                f"a batch of {settings.batch} sequences cannot be shared alike by {processes.size} processes",
                f"pass a multiple of {processes.size} to --batch-size, or start another number of processes",
            )
        if processes.size > 1 and stream.share != (processes.rank, processes.size):
            raise ValueError(f"the stream is for rank {stream.share[0]} of {stream.share[1]}, not for {processes}")
        check_coverage(student, plan)
        if teacher is not None:
            teacher.requires_grad_(False).eval()
        self.model, self.base = student, unwrapped(student)
        self.objective = objective(
            student,
            teacher,
            vocabulary=vocabulary,
            temperature=settings.temperature,
            autocast=execution.autocast,
        )
        self.parallel = Parallel(self.objective, processes, execution.sharding, device)
        self.settings, self.execution, self.processes = settings, execution, processes
        self.count = settings.batch // processes.size
        """Sequences of a step that this process takes."""
        self.stream = ReadAhead(stream, STEPS_AHEAD * self.count)
        self.on_step, self.on_validation, self.watch, self.doing = on_step, on_validation, watch, doing
        self.reporter = reporter if processes.leader else SilentReporter()
        self.checkpoints = Checkpoints(
            folder / CHECKPOINTS, lineage, keep=execution.keep, reporter=self.reporter, anew=anew
        )
        self.curve = Curve(folder / CURVE_FILE)
        if execution.compile:
            compile_blocks(self.base)
        self.optimizer = optimiser_of(student, plan, settings)
        self.step, self.tokens = 0, 0
        self.first: Measured | None = None
        self.last: Measured | None = None
        self.saved: int | None = None
        """The step of the newest checkpoint."""
        self.validated: int | None = None
        """The step at which the model was last found sound."""

    def run(self) -> TrainingEnd:
        """Train to the end."""
        self._begin()
        if self.execution.gradient_checkpointing:
            _keep_only_inputs_of_blocks(self.base)
        for name, model in zip(("student", "teacher"), self.objective.models(), strict=False):
            if not reads_packing(model):
                self.reporter.notice(
                    f"the {name} ({type(model).__name__}) reads no boundaries of packed documents: it gets them as "
                    "rows of similar lengths, so that none sees another's state"
                )
        self.model.train()
        stopped = None
        try:
            with (
                self.stream,
                self.reporter.task(self.doing, total=self.settings.steps, unit="steps") as task,
                _finishing_steps() as stop,
            ):
                self.stream.begin((self.settings.steps - self.step) * self.count)
                task.advance(self.step)
                while True:
                    share = self._meet(stop.number)
                    if share.signal:
                        self._save()
                        break
                    if share.failure is not None and self.saved is None:
                        # Nothing was begun: no checkpoint is to tie the next attempt to this text and these settings.
                        raise share.failure
                    self._look_after()
                    if share.failure is not None:
                        # Nothing of this step was computed yet, so that what was trained can be kept.
                        self._save()
                        raise share.failure
                    if self.step == self.settings.steps:
                        break
                    done = self._advance(share)
                    task.advance()
                    task.note(done.in_words())
                stop.hear(int(self._of_all([stop.number])[:, 0].max()))
        except _Diverged as error:
            stopped = str(error)
            self._go_back(stopped)
        self.model.eval()
        assert self.saved is not None
        path = self.checkpoints.folder / f"step-{self.saved}"
        return TrainingEnd(self.step, self.tokens, self.first, self.last, path, stopped)

    def _begin(self) -> None:
        """Start, or go on from the newest checkpoint."""
        found = shared_with_all(self.checkpoints.newest() if self.processes.leader else None, self.processes)
        rank = self.processes.rank
        if found is None:
            torch.manual_seed(_seed(self.settings.seed, rank, 0))
        else:
            restore_training(self.model, self.optimizer, found.tensors)
            restore_random(found.tensors, self.base.device, rank, _seed(self.settings.seed, rank, found.step))
            self.stream.restore(found.state["stream"])
            self._recall(found.step, found.good, found.state)
            self.reporter.notice(f"training goes on after step {found.step} of {self.settings.steps} ({found.path})")
            if f"rng/{self.processes.size - 1}/cpu" not in found.tensors:
                self.reporter.notice(
                    f"fewer than {self.processes.size} processes made that checkpoint: what the model draws in the "
                    "others, if it draws anything, begins anew from the seed"
                )
        self.held_out = self.stream.held_out(self.settings.validation)
        self.position = self.stream.state()
        if self.processes.leader:
            self.curve.truncate(None if found is None else found.step)

    def _recall(self, step: int, good: bool, state: Any) -> None:
        """Know again what is not in the tensors."""
        self.step, self.saved, self.validated = step, step, step if good else None
        self.tokens = state["tokens"]
        self.first, self.last = (None if state[name] is None else Measured(**state[name]) for name in ("first", "last"))

    def _look_after(self) -> None:
        """Validate and save, where this step is one to do so and it was not done yet."""
        step, end = self.step, self.settings.steps
        save = step in (0, end) or step % self.execution.save_every == 0
        if (save or step % self.execution.validate_every == 0) and self.validated != step:
            self._validate()
        if save and self.saved != step:
            self._save()

    def _meet(self, signal: int) -> _Share:
        """Take this process's sequences of the next step, and hear of all processes.

        They go on as one: what any of them says holds for all, and each says the same number of words.

        Args:
            signal: that this process was sent, or 0.
        """
        sequences, batches = [], []
        failure: Exception | None = None
        if not signal and self.step < self.settings.steps:
            try:
                sequences = [next(self.stream) for _ in range(self.count)]
                batches = self._batches(sequences)
            except Exception as error:
                failure = error
        passes = [self.objective.passes(batch) for batch in batches]
        room = [0] * (ceil(self.count / self.execution.micro_batch) - len(passes))
        positions = sum(len(sequence.ids) for sequence in sequences)
        mine = [signal, failure is not None, sum(map(_counted, batches)), positions, *passes, *room]
        found = self._of_all(mine)
        if found[:, 1].any():
            failure = self._whose_failure(failure)
        tokens, positions = found[:, 2:4].sum(0).tolist()
        return _Share(
            batches, self._least_passes(passes, found[:, 4:]), tokens, positions, int(found[:, 0].max()), failure
        )

    def _whose_failure(self, mine: Exception | None) -> Exception:
        """What this process is to raise where one or another failed: whichever is heard first says why."""
        room = 2000
        said = f"{type(mine).__name__}: {mine}".encode()[:room] if mine is not None else b""
        found = self.processes.collect(torch.tensor(list(said.ljust(room, b"\0")), dtype=torch.uint8))
        others = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in found]
        return mine or LapcliError(f"another process of this run failed with {next(filter(None, others))}")

    def _of_all(self, numbers: Sequence[int]) -> torch.Tensor:
        """Numbers of every process, `[processes, numbers]`, int64."""
        return torch.stack(self.processes.collect(torch.tensor(numbers, dtype=torch.int64)))

    def _least_passes(self, mine: Sequence[int], everyones: torch.Tensor) -> list[int]:
        """How often decoders have to run for each part, by how often they would in each process."""
        if self.parallel.sharded:
            return [max(1, most) for most in everyones.amax(0).tolist()]
        # Under DDP every process needs some gradient, if it is 0.
        return [1 if self.processes.size > 1 else 0 for _ in mine]

    def _advance(self, share: _Share) -> StepDone:
        """One step of the optimiser."""
        begun = time.perf_counter()
        settings = self.settings
        rate = settings.lr * learning_rate_factor(
            self.step, settings.steps, warmup=settings.warmup, floor=settings.lr_min / settings.lr
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        with self._room_for(share.batches):
            measured, peak = self._gradient(share)
            norm = float(whole(nn.utils.clip_grad_norm_(trained_parameters(self.model).values(), settings.clip)))
            for name, value in (("loss", measured.loss), ("norm of the gradient", norm)):
                if not isfinite(value):
                    raise _Diverged(f"the {name} of step {self.step + 1} is {value}")
            self.optimizer.step()
        self.step, self.tokens, self.position = self.step + 1, self.tokens + measured.tokens, self.stream.state()
        seconds = time.perf_counter() - begun
        done = StepDone(self.step, measured, rate, norm, self.tokens, seconds, share.positions, peak)
        self._note(
            {
                **measured.document(),
                "learning_rate": rate,
                "gradient_norm": norm,
                "tokens": self.tokens,
                "seconds": round(done.seconds, 4),
            },
        )
        self.on_step(done)
        return done

    def _gradient(self, share: _Share) -> tuple[Measured, int | None]:
        """Leave the gradient of a step's loss in the parameters; what was measured, and `StepDone.peak_bytes`.

        The one place where parts of a batch meet: each part's loss is a sum divided by the tokens of all parts of all
        processes, so the parts' gradients add up.
        """
        sums: list[Sums] = []
        for number, (batch, passes) in enumerate(zip(share.batches, share.passes, strict=True), 1):
            with self.parallel.accumulating(last=number == len(share.batches)):
                part = self.parallel.sums(batch, passes)
                loss = total(part, share.tokens, weight=self.settings.kl_weight, temperature=self.settings.temperature)
                if loss.requires_grad:
                    self.parallel.average_of(loss).backward()
            sums.append(Sums(part.cross_entropy.detach(), part.kl.detach(), part.tokens))
        device = self.base.device
        if device.type != "cuda":
            return self._measured(sums, share.tokens)[0], None
        found = self._measured(sums, share.tokens, torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return found

    @torch.no_grad()
    def _validate(self) -> None:
        """Measure the held-out sequences.

        Raises:
            _Diverged: a parameter or the loss is not finite, or the loss is far above the first one.
        """
        trained = trained_parameters(self.model)
        sound = (bool(local(parameter).isfinite().all()) for parameter in trained.values())
        first_bad = next((number for number, each in enumerate(sound) if not each), len(trained))
        first_bad = int(self._of_all([first_bad]).min())
        if first_bad < len(trained):
            raise _Diverged(f"{list(trained)[first_bad]} is not finite after step {self.step}")
        if self.held_out:
            self.model.eval()
            with self.watch() as figures:
                measured = self._measured_held_out()
            watched = figures()
            self.model.train()
            if not isfinite(measured.loss):
                raise _Diverged(f"the validation loss after step {self.step} is {measured.loss}")
            first = self.first or measured
            if measured.loss > self.execution.divergence * first.loss:
                raise _Diverged(
                    f"the validation loss after step {self.step} is {measured.loss:.4g}, more than "
                    f"{self.execution.divergence:g} times the first one ({first.loss:.4g})"
                )
            self.first, self.last = first, measured
            self._note({"validation": measured.document()})
            if watched:
                # Its own line, so that who reads the curve for losses need not know of it.
                self._note(watched)
            self.on_validation(self.step, measured)
        self.validated = self.step

    def _measured_held_out(self) -> Measured:
        """The means over the sequences held out, of which each process computes its share."""
        count = len(self.held_out)
        batches = self._batches([self.held_out[number] for number in self.processes.share(count)])
        if self.parallel.sharded:
            # Every process takes part in as many forward passes as the one with the largest share.
            most = ceil(ceil(count / self.processes.size) / self.execution.micro_batch)
            batches += [nothing_of(PackedBatch.of(self.held_out[:1]))] * (most - len(batches))
        tokens = int(self._of_all([sum(map(_counted, batches))]).sum())
        passes = [self.objective.passes(batch) for batch in batches]
        least = self._least_passes(passes, self._of_all(passes)) if self.parallel.sharded else [0] * len(batches)
        with self._room_for(batches):
            sums = [self.parallel.sums(*each) for each in zip(batches, least, strict=True)]
            self.parallel.rest()
            return self._measured(sums, tokens)[0]

    def _save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self.saved == self.step:
            return
        state = {
            "steps": self.settings.steps,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens": self.tokens,
            "first": None if self.first is None else asdict(self.first),
            "last": None if self.last is None else asdict(self.last),
            "stream": self.position,
        }
        tensors = training_tensors(self.model, self.optimizer, self.base.device, self.processes)
        if self.processes.leader:
            self.curve.sync()
            self.checkpoints.save(self.step, state, tensors, good=self.validated == self.step)
        # A process that ends would have torchrun end the leader, perhaps while it writes.
        self.processes.wait()
        self.saved = self.step

    def _note(self, values: Mapping[str, Any]) -> None:
        """Write a line of the curve."""
        if self.processes.leader:
            self.curve.add(self.step, values)

    def _go_back(self, reason: str) -> None:
        """Give the student the last good parameters, and say so."""
        self._note({"diverged": reason})
        leads = self.processes.leader
        good = shared_with_all(self.checkpoints.newest(good=True) if leads else None, self.processes)
        if good is None:
            raise ModelError(
                f"{reason}, before any training",
                "see that the model computes finite logits on this text (`lapcli eval`)",
            )
        restore_parameters(self.model, good.tensors)
        self._recall(good.step, good.good, good.state)
        self.reporter.warn(
            f"training diverged: {reason}. It was stopped, and the model has the parameters of the last good "
            f"checkpoint, after step {good.step} ({good.path}). Try a lower learning rate than {self.settings.lr:g}."
        )

    def _batches(self, sequences: Sequence[PackedSequence]) -> list[PackedBatch]:
        """What is computed at once."""
        size = self.execution.micro_batch
        return [PackedBatch.of(sequences[start : start + size]) for start in range(0, len(sequences), size)]

    @contextlib.contextmanager
    def _room_for(self, batches: Sequence[PackedBatch]) -> Generator[None]:
        """Say what to do where the device's memory is too small; nothing is saved, which might take more of it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            rows, length = batches[0].ids.shape if batches else (0, 0)
            ways = [f"--micro-batch {rows // 2}"] if rows > 1 else []
            if not self.execution.gradient_checkpointing:
                ways.append("--gradient-checkpointing")
            kept = "nothing was trained yet" if not self.saved else f"training goes on after step {self.saved}"
            raise ModelError(
                f"the memory of {self.base.device} is too small for {rows} sequences of {length} tokens at once",
                f"try {' or '.join(ways) or 'shorter sequences (--seq-len)'}; {kept}",
            ) from error

    def _measured(self, sums: Sequence[Sums], tokens: int, peak: int = 0) -> tuple[Measured, int]:
        """The means of the parts of all processes, and the largest of their peaks; waits for devices and processes."""
        mine = torch.zeros(2, dtype=torch.float64)
        if sums:
            mine = torch.stack([torch.stack([part.cross_entropy, part.kl]) for part in sums]).double().sum(0).cpu()
        found = torch.stack(self.processes.collect(torch.cat([mine, mine.new_tensor([float(peak)])])))
        entropy, kl = found[:, :2].sum(0).tolist()
        weight, count = self.settings.kl_weight * self.settings.temperature**2, max(tokens, 1)
        return Measured((entropy + weight * kl) / count, entropy / count, kl / count, tokens), int(found[:, 2].max())


def _seed(seed: int, rank: int, step: int) -> int:
    """What generators of random numbers begin with in a process that has no saved state of them."""
    return seed if rank == step == 0 else int(digest_document([seed, rank, step])[:15], 16)


def _counted(batch: PackedBatch) -> int:
    return int((batch.labels != IGNORED).sum())


def _keep_only_inputs_of_blocks(model: Any) -> None:
    """Turn gradient checkpointing on, in the form that needs no gradient at a block's input and survives hooks."""
    options = {"use_reentrant": False}
    # The older name warns where there is a newer one.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


class _Stop:
    """Whether a signal asked training to stop.

    Args:
        listening: whether signals arrive here: Python hands them to the main thread alone.
    """

    def __init__(self, listening: bool) -> None:
        self.number = 0
        """The signal's, 0 for none."""
        numbers = (signal.SIGINT, signal.SIGTERM) if listening else ()
        self._before = {number: signal.signal(number, self._take) for number in numbers}

    def hear(self, number: int) -> None:
        """Take one that came to any of the processes as one's own; 0 for none."""
        self.number = number or self.number

    def let_go(self) -> None:
        """Give the signals back to those who handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self) -> None:
        """Tell them what came, if anything did."""
        if not self.number:
            return
        handler = self._before.get(signal.Signals(self.number))
        if callable(handler):
            handler(self.number, None)
        raise KeyboardInterrupt

    def _take(self, number: int, _frame: FrameType | None) -> None:
        # Whoever asks twice does not wait for the end of a step.
        self.pass_on()
        self.number = number


@contextlib.contextmanager
def _finishing_steps() -> Generator[_Stop]:
    """Hold back SIGINT and SIGTERM, and at the end pass one on that came."""
    stop = _Stop(listening=threading.current_thread() is threading.main_thread())
    try:
        yield stop
    finally:
        stop.let_go()
    stop.pass_on()
