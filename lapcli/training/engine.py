"""The training loop of recovery: a student that was given adapters, perhaps a teacher, and a stream of packed text.

Between two steps everything that matters is in one place: the trained parameters, the optimiser's moments, the
generators of random numbers, and the position in the stream. A checkpoint holds just that, and on a CPU a run that went
on from one ends with the bits of a run that never stopped.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from pydantic import Field
from torch import nn

from lapcli.artifacts import Lineage, digest_document
from lapcli.errors import ModelError
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource
from lapcli.models.loss import IGNORED
from lapcli.recipe import Settings
from lapcli.reporting import Reporter, SilentReporter
from lapcli.training.adapters import AdapterPlan, check_coverage, trained_parameters
from lapcli.training.checkpoints import KIND, Checkpoints, restore_parameters, restore_training, training_tensors
from lapcli.training.curve import Curve
from lapcli.training.distillation import Head, Sums, distillation_sums, head_of, total
from lapcli.training.packing import PackedBatch, last_hidden, reads_packing
from lapcli.training.schedule import learning_rate_factor
from lapcli.training.stream import PackedSequence

CHECKPOINTS = "checkpoints"
CURVE = "curve.jsonl"


class TrainingSettings(Settings):
    """How the model is trained: what its numbers depend on, beside model, teacher, adapters and stream."""

    steps: int = Field(default=2000, gt=0, description="optimiser steps")
    batch: int = Field(default=16, gt=0, description="sequences of a step, over all devices and parts")
    lr: float = Field(default=1e-4, gt=0, description="largest learning rate")
    lr_min: float = Field(default=1e-5, ge=0, description="last learning rate")
    warmup: float = Field(default=0.05, ge=0, le=1, description="share of the steps in which the rate rises")
    weight_decay: float = Field(default=0.0, ge=0, description="of AdamW")
    clip: float = Field(default=1.0, gt=0, description="largest norm of a step's gradient")
    kl_weight: float = Field(default=1.0, ge=0, description="w in cross entropy + w T^2 KL")
    temperature: float = Field(default=2.0, gt=0, description="T in it")
    validation: int = Field(default=64, ge=0, description="sequences held out")
    seed: int = Field(default=0, ge=0, description="of whatever the model draws")


@dataclass(frozen=True)
class Execution:
    """How training runs here; results differ by rounding at most.

    Attributes:
        micro_batch: sequences that are computed at once.
        gradient_checkpointing: whether blocks run again in the backward pass, instead of keeping their activations.
        autocast: whether products are in bf16 on a GPU.
        validate_every: steps between two validations.
        save_every: steps between two checkpoints; the model is validated before each.
        keep: checkpoints that remain, beside the newest good one.
        divergence: training stops when the validation loss is above this many times the first one.
    """

    micro_batch: int = 1
    gradient_checkpointing: bool = False
    autocast: bool = True
    validate_every: int = 100
    save_every: int = 100
    keep: int = 2
    divergence: float = 1.5


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
    """

    step: int
    measured: Measured
    learning_rate: float
    gradient_norm: float
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Recovery:
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


class Stream(Protocol):
    """What is asked of a stream (`lapcli.training.stream.TrainingStream`)."""

    def __next__(self) -> PackedSequence:
        """The next sequence."""
        ...

    def held_out(self, count: int) -> Sequence[PackedSequence]:
        """Sequences that are never given."""
        ...

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on there."""
        ...


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


def recover(
    student: nn.Module,
    teacher: nn.Module | None,
    stream: Stream,
    plan: AdapterPlan,
    settings: TrainingSettings,
    folder: Path,
    *,
    lineage: Lineage,
    execution: Execution | None = None,
    vocabulary: int | None = None,
    on_step: Callable[[StepDone], None] | None = None,
    reporter: Reporter | None = None,
) -> Recovery:
    """Train what was planned, or go on where a training with the same settings was stopped.

    SIGINT and SIGTERM let the step at hand end, save, and interrupt; a second signal interrupts at once.

    Args:
        student: with adapters (`apply_adapters`), on its device. Its trained parameters are changed in place.
        teacher: frozen by this call, on any device; `None` for plain cross entropy.
        stream: of text, from its beginning.
        plan: what the student trains.
        settings: of the training.
        folder: gets `checkpoints/` and `curve.jsonl`. Nobody else may be at work in it.
        lineage: of `training_lineage`.
        execution: how it runs here.
        vocabulary: leading ids that both models have, as for `distillation_sums`.
        on_step: hears of every step.
        reporter: where progress and remarks go.

    Returns:
        How it ended. Where training diverged, the student has the parameters of the last good checkpoint.

    Raises:
        ArtifactError: checkpoints of a training with other settings, or only damaged ones; a full disk.
        DataError: the stream cannot be read, or is not the one of the checkpoint.
        FamilyError: the student does not train what is planned.
        KeyboardInterrupt: after a signal, unless whoever handled it before raises something else.
        ModelError: the loss is not finite before the first step, or the models have no heads to distil.
        ValueError: sizes that make no sense.
    """
    loop = _Loop(
        student, teacher, stream, plan, settings, folder, lineage, execution or Execution(), vocabulary,
        on_step or (lambda _done: None), reporter or SilentReporter(),
    )  # fmt: skip
    return loop.run()


class _Diverged(Exception):
    """Training has gone wrong; the text says how."""


class _Model:
    """One of the two models, out of its wrapper: hidden states and head."""

    def __init__(self, model: Any):
        self.base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.head: Head = head_of(self.base)
        self.device: torch.device = self.base.device


class _Loop:
    """A training under way."""

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | None,
        stream: Stream,
        plan: AdapterPlan,
        settings: TrainingSettings,
        folder: Path,
        lineage: Lineage,
        execution: Execution,
        vocabulary: int | None,
        on_step: Callable[[StepDone], None],
        reporter: Reporter,
    ):
        for name in ("micro_batch", "validate_every", "save_every"):
            if getattr(execution, name) < 1:
                raise ValueError(f"{name} should be at least 1, not {getattr(execution, name)}")
        if settings.lr_min > settings.lr:
            raise ValueError(f"lr_min = {settings.lr_min} is above lr = {settings.lr}")
        check_coverage(student, plan)
        self.model, self.student = student, _Model(student)
        self.teacher = None if teacher is None else _Model(teacher.requires_grad_(False).eval())
        self.stream, self.settings, self.execution = stream, settings, execution
        self.vocabulary, self.on_step, self.reporter = vocabulary, on_step, reporter
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, lineage, keep=execution.keep, reporter=reporter)
        self.curve = Curve(folder / CURVE)
        self.optimizer = torch.optim.AdamW(
            list(trained_parameters(student).values()), lr=settings.lr, weight_decay=settings.weight_decay
        )
        self.step, self.tokens = 0, 0
        self.first: Measured | None = None
        self.last: Measured | None = None
        self.saved: int | None = None
        """The step of the newest checkpoint."""
        self.validated: int | None = None
        """The step at which the model was last found sound."""

    def run(self) -> Recovery:
        """Train to the end."""
        self._begin()
        if self.execution.gradient_checkpointing:
            _keep_only_inputs_of_blocks(self.student.base)
        for name, model in (("student", self.student), ("teacher", self.teacher)):
            if model is not None and not reads_packing(model.base):
                self.reporter.notice(
                    f"the {name} ({type(model.base).__name__}) reads no boundaries of packed documents: it gets one "
                    "document after another, so that none sees another's state"
                )
        self.model.train()
        stopped = None
        try:
            with (
                self.reporter.task("recovering", total=self.settings.steps, unit="steps") as task,
                _finishing_steps() as stop,
            ):
                task.advance(self.step)
                while True:
                    if stop.asked:
                        self._save()
                        break
                    self._look_after()
                    if self.step == self.settings.steps:
                        break
                    if not stop.asked:
                        self._advance()
                        task.advance()
        except _Diverged as error:
            stopped = str(error)
            self._go_back(stopped)
        self.model.eval()
        assert self.saved is not None
        path = self.checkpoints.folder / f"step-{self.saved}"
        return Recovery(self.step, self.tokens, self.first, self.last, path, stopped)

    def _begin(self) -> None:
        """Start, or go on from the newest checkpoint."""
        found = self.checkpoints.newest()
        if found is None:
            torch.manual_seed(self.settings.seed)
        else:
            restore_training(self.model, self.optimizer, self.student.device, found.tensors)
            self.stream.restore(found.state["stream"])
            self._recall(found.step, found.good, found.state)
            self.reporter.notice(f"training goes on after step {found.step} of {self.settings.steps} ({found.path})")
        self.held_out = self.stream.held_out(self.settings.validation)
        self.position = self.stream.state()
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

    def _advance(self) -> None:
        """One step of the optimiser."""
        begun = time.perf_counter()
        settings = self.settings
        try:
            sequences = [next(self.stream) for _ in range(settings.batch)]
        except Exception:
            # Nothing of this step was computed yet, so that what was trained can be kept.
            self._save()
            raise
        rate = settings.lr * learning_rate_factor(
            self.step, settings.steps, warmup=settings.warmup, floor=settings.lr_min / settings.lr
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        measured = self._gradient(sequences)
        norm = float(nn.utils.clip_grad_norm_(trained_parameters(self.model).values(), settings.clip))
        for name, value in (("loss", measured.loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise _Diverged(f"the {name} of step {self.step + 1} is {value}")
        self.optimizer.step()
        self.step, self.tokens, self.position = self.step + 1, self.tokens + measured.tokens, self.stream.state()
        done = StepDone(self.step, measured, rate, norm, self.tokens, time.perf_counter() - begun)
        self.curve.add(
            self.step,
            {
                **measured.document(),
                "learning_rate": rate,
                "gradient_norm": norm,
                "tokens": self.tokens,
                "seconds": round(done.seconds, 4),
            },
        )
        self.on_step(done)

    def _gradient(self, sequences: Sequence[PackedSequence]) -> Measured:
        """Leave the gradient of a step's loss in the parameters.

        The one place where parts of a batch meet: each part's loss is a sum divided by the tokens of all parts, so the
        parts' gradients add up. With several devices the number of tokens is to be summed over them before the first
        backward pass, and gradients and sums (not means) after the last.
        """
        batches = self._batches(sequences)
        tokens = sum(_counted(batch) for batch in batches)
        sums: list[Sums] = []
        for batch in batches:
            part = self._sums(batch)
            loss = total(part, tokens, weight=self.settings.kl_weight, temperature=self.settings.temperature)
            if loss.requires_grad:
                loss.backward()
            sums.append(Sums(part.cross_entropy.detach(), part.kl.detach(), part.tokens))
        return self._measured(sums, tokens)

    @torch.no_grad()
    def _validate(self) -> None:
        """Measure the held-out sequences.

        Raises:
            _Diverged: a parameter or the loss is not finite, or the loss is far above the first one.
        """
        for name, parameter in trained_parameters(self.model).items():
            if not bool(parameter.isfinite().all()):
                raise _Diverged(f"{name} is not finite after step {self.step}")
        if self.held_out:
            self.model.eval()
            batches = self._batches(self.held_out)
            measured = self._measured([self._sums(batch) for batch in batches], sum(map(_counted, batches)))
            self.model.train()
            if not math.isfinite(measured.loss):
                raise _Diverged(f"the validation loss after step {self.step} is {measured.loss}")
            first = self.first or measured
            if measured.loss > self.execution.divergence * first.loss:
                raise _Diverged(
                    f"the validation loss after step {self.step} is {measured.loss:.4g}, more than "
                    f"{self.execution.divergence:g} times the first one ({first.loss:.4g})"
                )
            self.first, self.last = first, measured
            self.curve.add(self.step, {"validation": measured.document()})
        self.validated = self.step

    def _save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self.saved == self.step:
            return
        self.curve.sync()
        state = {
            "steps": self.settings.steps,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens": self.tokens,
            "first": None if self.first is None else asdict(self.first),
            "last": None if self.last is None else asdict(self.last),
            "stream": self.position,
        }
        tensors = training_tensors(self.model, self.optimizer, self.student.device)
        self.checkpoints.save(self.step, state, tensors, good=self.validated == self.step)
        self.saved = self.step

    def _go_back(self, reason: str) -> None:
        """Give the student the last good parameters, and say so."""
        self.curve.add(self.step, {"diverged": reason})
        good = self.checkpoints.newest(good=True)
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

    def _sums(self, batch: PackedBatch) -> Sums:
        """The sums of a part, with a gradient unless there is `no_grad`."""
        student, teacher = self.student, self.teacher
        with self._precision(student.device):
            hidden = last_hidden(student.base, batch)
        guide = None
        if teacher is not None:
            with torch.no_grad(), self._precision(teacher.device):
                guide = last_hidden(teacher.base, batch)
        with self._precision(student.device):
            return distillation_sums(
                hidden,
                student.head,
                guide,
                None if teacher is None else teacher.head,
                batch.labels.to(student.device),
                vocabulary=self.vocabulary,
                temperature=self.settings.temperature,
            )

    def _precision(self, device: torch.device) -> Any:
        if device.type != "cuda" or not self.execution.autocast:
            return contextlib.nullcontext()
        return torch.autocast("cuda", torch.bfloat16)

    def _measured(self, sums: Sequence[Sums], tokens: int) -> Measured:
        """The means of parts; waits for the device."""
        if not sums:
            return Measured(0.0, 0.0, 0.0, 0)
        entropy, kl = (
            torch.stack([torch.stack([part.cross_entropy, part.kl]) for part in sums]).double().sum(0).tolist()
        )
        weight, count = self.settings.kl_weight * self.settings.temperature**2, max(tokens, 1)
        return Measured((entropy + weight * kl) / count, entropy / count, kl / count, tokens)


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
    """Whether a signal asked training to stop."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}

    @property
    def asked(self) -> bool:
        """Whether one did."""
        return self._number is not None

    def let_go(self) -> None:
        """Give the signals back to those who handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self) -> None:
        """Tell them what came, if anything did."""
        if self._number is None:
            return
        handler = self._before[signal.Signals(self._number)]
        if callable(handler):
            handler(self._number, None)
        raise KeyboardInterrupt

    def _take(self, number: int, _frame: FrameType | None) -> None:
        # Whoever asks twice does not wait for the end of a step.
        self.pass_on()
        self._number = number


class _NoStop:
    """Where no signals arrive: Python hands them to the main thread alone."""

    asked = False


@contextlib.contextmanager
def _finishing_steps() -> Generator[_Stop | _NoStop]:
    """Hold back SIGINT and SIGTERM, and at the end pass one on that came."""
    if threading.current_thread() is not threading.main_thread():
        yield _NoStop()
        return
    stop = _Stop()
    try:
        yield stop
    finally:
        stop.let_go()
    stop.pass_on()
