"""What a training step of recovery takes: against the dense loss, against training without a teacher, against the chip.

Model FLOP of a token, a product of `[m, k]` and `[k, n]` counting `2 m k n`. `M` is the number of entries of a model's
linear layers and short convolutions without embedding and head (the student's with its LoRA), `h` that of its head, `A`
that of the matrices and filters that are trained, `r` what its recurrent layers multiply beside that:

    student, forward        2 (M + h) + r
    student, backward       2 (M + h) + 2 r + 2 A
    teacher, forward        2 (M' + h') + r'

The backward pass multiplies by each weight once more, for the gradient of what goes in; the gradient of a weight itself
is one product more, and only `A` of them have one. In the recurrence both factors of each product have gradients. What
an implementation computes twice (blocks under gradient checkpointing, parts of chunks in a kernel's backward pass, the
two gradients of lapcli's loss) is work, not model FLOP. Norms, gates, softmaxes and the embedding are left out.

A recurrent layer in chunks of `C` tokens, by value head, with `R` of them on a key head, in multiplications per token
(the symbols are those of `kernels/lapkernels/delta_rule/README.md`):

    k k^T and q k^T, by key head            2 C K / R
    (I + A)^-1, against the identity        C^2 / 2
    W_v and W_x                             C (V + K)
    U, the new state, and the reading       3 K V
    M U                                     C V

so `r` is `2 HV (2 C K / R + C^2 / 2 + C (2 V + K) + 3 K V)` a layer. Triangles count as the squares that tiles compute.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.artifacts import Lineage
from lapcli.benchmarks.chips import NOMINAL_FLOPS
from lapcli.errors import ModelError
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource
from lapcli.machine import Machine
from lapcli.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from lapcli.models.convolution import ShortConvolution
from lapcli.models.loss import IGNORED
from lapcli.reporting import Reporter, SilentReporter
from lapcli.training.adapters import AdapterPlan, apply_adapters, plan_adapters, trained_parameters
from lapcli.training.checkpoints import KIND
from lapcli.training.distillation import Head, head_of
from lapcli.training.engine import Execution, StepDone, TrainingSettings, train
from lapcli.training.packing import PackedBatch, last_hidden, reads_packing
from lapcli.training.stream import PackedSequence
from lapkernels.timing import free, out_of_memory, product_rate, synchronize

CHUNK = 64
"""C of the formula: fla's, and the default of lapkernels."""

LARGE: dict[str, Any] = {"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 4, "head_dim": 256, "expand_v": 2.0}
"""A Gated DeltaNet of 1.365 billion parameters, with a vocabulary of 32000."""

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 259,
}
"""The same architecture as a toy."""

_DOCUMENT = 700
"""Tokens of a document, on average."""


@dataclass(frozen=True)
class RecoverySizes:
    """How much is measured.

    Attributes:
        seq_len: tokens of a sequence.
        batch: sequences of a step.
        warmup: steps before those that are timed, at least one.
        steps: timed steps.
    """

    seq_len: int = 2048
    batch: int = 16
    warmup: int = 3
    steps: int = 5


@dataclass(frozen=True)
class RecoveryRow:
    """One model, trained one way. What does not fit the device has no figures.

    Attributes:
        model: its name.
        way: one of `WAYS`. `lapcli`: a step as `lapcli.training.engine` makes it; `no teacher`: the same with cross
            entropy alone; `dense loss`: the same with all logits of student and teacher in memory and torch's losses;
            `checkpointing`: as `lapcli`, with gradient checkpointing.
        kernel: what computes the recurrence.
        parameters: of the student, without LoRA.
        trained: how many numbers are trained.
        tokens: of a step.
        micro_batch: sequences that are computed at once: the most that fit, halving from the batch.
        step_seconds: median over the timed steps, optimiser and data included.
        tokens_per_second: of it.
        flop_per_token: model FLOP by the formula of this module; `None` where the model is not one of lapcli's own.
        flops: model FLOP a second.
        product_flops: what one large product reaches in the same run: bf16 on a GPU, the model's dtype elsewhere.
        share_of_product: `flops` over it.
        share_of_nominal: `flops` over the chip's nominal rate (`NOMINAL_FLOPS`).
        peak_bytes: what tensors took of the device at most in a timed step, the weights of the models that it uses
            included; `None` without a GPU.
        loss: of the first step; the ways start alike and see the same text, so those with a teacher should agree.
    """

    model: str
    way: str
    kernel: str
    parameters: int
    trained: int
    tokens: int
    micro_batch: int | None
    step_seconds: float | None
    tokens_per_second: float | None
    flop_per_token: float | None
    flops: float | None
    product_flops: float
    share_of_product: float | None
    share_of_nominal: float | None
    peak_bytes: int | None
    loss: float | None


class SyntheticStream:
    """Random tokens as packed documents, the same for the same seed; a `Stream` of the engine.

    Args:
        vocabulary: ids are below.
        seq_len: tokens of a sequence.
        seed: of all of it.
    """

    def __init__(self, vocabulary: int, seq_len: int, seed: int = 0):
        self._vocabulary, self._seq_len, self._seed = vocabulary, seq_len, seed
        self.reporter: Reporter = SilentReporter()
        self.restore({"given": 0})

    @property
    def share(self) -> tuple[int, int]:
        """All of it is for one process."""
        return 0, 1

    def __next__(self) -> PackedSequence:
        """Documents begin anywhere, `_DOCUMENT` tokens apart on average."""
        self._given += 1
        ids = torch.randint(self._vocabulary, (self._seq_len,), generator=self._chance)
        begins = torch.rand(self._seq_len, generator=self._chance) < 1 / _DOCUMENT
        begins[0] = True
        return PackedSequence(ids, tuple(begins.nonzero().flatten().tolist()), "synthetic")

    def held_out(self, count: int) -> Sequence[PackedSequence]:
        """As many as asked for."""
        return [next(self) for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """How many were given."""
        return {"given": self._given}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on behind so many: they are drawn once more."""
        self._chance, self._given = torch.Generator().manual_seed(self._seed), 0
        while self._given < state["given"]:
            next(self)


def recovery_benchmark(
    source: ModelSource,
    *,
    machine: Machine | None = None,
    sizes: RecoverySizes | None = None,
    random_model: dict[str, Any] | None = None,
    reporter: Reporter | None = None,
) -> list[RecoveryRow]:
    """Train a model, and one of random weights, for a few steps each way.

    Args:
        source: the first model; its teacher is the same model.
        machine: where it runs.
        sizes: how much is measured.
        random_model: fields of `GatedDeltaNetConfig` for the second, default `LARGE`; its teacher has other random
            weights.
        reporter: told of the progress.

    Raises:
        ModelError: the model cannot be loaded, or its kernel cannot run here.
        UsageError: the device, dtype or kernel cannot be.
    """
    from lapcli.families.loading import load_model

    machine, sizes, reporter = machine or Machine(), sizes or RecoverySizes(), reporter or SilentReporter()
    device = machine.torch_device()
    layers = family_for(source.config).layers(source.config)
    machine.check(source.config, layers, needs_gradient=True)
    dtype = machine.torch_dtype(source.config)
    # Before anything is loaded, while there is room.
    product = product_rate(device, torch.bfloat16 if device.type == "cuda" else dtype)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "kernel": machine.kernel}

    config = GatedDeltaNetConfig(**(random_model or LARGE))
    random_dtype = machine.torch_dtype({"dtype": "bfloat16"})
    models: list[tuple[str, dict[str, Any], Callable[[int], Any]]] = [
        (source.name, source.config, lambda _seed: load_model(source, **options)),
        (
            f"random Gated DeltaNet, {config.num_hidden_layers} x {config.hidden_size}",
            config.to_dict(),
            lambda seed: _random(config, device, random_dtype, machine.kernel, seed),
        ),
    ]
    rows: list[RecoveryRow] = []
    with reporter.task("recovery", total=len(models) * len(WAYS), unit="ways") as task:
        for name, document, make in models:
            model, teacher = make(0), make(1)
            machine.announce(model, reporter, needs_gradient=True)
            plan = plan_adapters(model, document)
            case = _Case(name, apply_adapters(model, plan), teacher, plan, sizes, product)
            for way in WAYS:
                rows.append(case.row(way))
                task.advance()
            del model, teacher, case
            free(device)
    return rows


def flop_per_token(student: Any, teacher: Any | None, config: dict[str, Any]) -> float:
    """Model FLOP of a step for each of its tokens, by the formula of this module.

    Args:
        student: of lapcli's own architectures, with adapters, out of peft's wrapper.
        teacher: of the same shape, or `None` for cross entropy alone.
        config: of both.
    """
    recurrence = sum(
        2
        * layer.value_heads
        * (
            2 * CHUNK * layer.key_width * layer.heads / layer.value_heads
            + CHUNK**2 / 2
            + CHUNK * (2 * layer.value_width + layer.key_width)
            + 3 * layer.key_width * layer.value_width
        )
        for layer in family_for(config).layers(config)
    )
    weights = _weights(student)
    trained = sum(value.numel() for value in trained_parameters(student).values() if value.ndim > 1)
    forward, backward = 2 * weights + recurrence, 2 * weights + 2 * recurrence + 2 * trained
    return forward + backward + (0 if teacher is None else 2 * _weights(teacher) + recurrence)


def _weights(model: Any) -> int:
    """Entries of linear layers, LoRA's too, convolutions and head."""
    modules = [module for module in model.get_decoder().modules() if isinstance(module, nn.Linear | ShortConvolution)]
    return sum(module.weight.numel() for module in [*modules, model.get_output_embeddings()])


WAYS = ("lapcli", "no teacher", "dense loss", "checkpointing")
"""The ways to train. The last one leaves gradient checkpointing switched on."""


@dataclass(frozen=True, eq=False)
class _Timed:
    """What one run gave."""

    seconds: float
    loss: float
    peak_bytes: int | None


class _Case:
    """A student and its teacher, to be trained the ways that are compared."""

    def __init__(
        self,
        name: str,
        student: Any,
        teacher: Any,
        plan: AdapterPlan,
        sizes: RecoverySizes,
        product: float,
    ):
        self.name, self.student, self.teacher, self.plan = name, student, teacher, plan
        self.sizes, self.product = sizes, product
        self.base: Any = student.get_base_model() if hasattr(student, "get_base_model") else student
        self.device: torch.device = self.base.device
        # On the CPU, so that it does not count as memory of a step.
        self.begin = {key: value.detach().cpu().clone() for key, value in trained_parameters(student).items()}
        self.settings = TrainingSettings(batch=sizes.batch, steps=sizes.warmup + sizes.steps, validation=0)

    def row(self, way: str) -> RecoveryRow:
        """Train one way with as large a micro-batch as fits."""
        size: int | None = self.sizes.batch
        timed = None
        while size and timed is None:
            timed = self._attempt(way, size)
            if timed is None:
                size //= 2
        own = reads_packing(self.base)
        teacher = None if way == "no teacher" else self.teacher
        work = flop_per_token(self.base, teacher, self.base.config.to_dict()) if own else None
        tokens = self.sizes.batch * self.sizes.seq_len
        speed = None if timed is None else tokens / timed.seconds
        flops = None if work is None or speed is None else work * speed
        nominal = NOMINAL_FLOPS.get(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        return RecoveryRow(
            model=self.name,
            way=way,
            kernel=self.base.kernel_choice(self.sizes.seq_len, training=True).name if own else "the library's",
            parameters=sum(parameter.numel() for parameter in self.teacher.parameters()),
            trained=self.plan.trained,
            tokens=tokens,
            micro_batch=size or None,
            step_seconds=None if timed is None else timed.seconds,
            tokens_per_second=speed,
            flop_per_token=work,
            flops=flops,
            product_flops=self.product,
            share_of_product=None if flops is None else flops / self.product,
            share_of_nominal=None if flops is None or nominal is None else flops / nominal,
            peak_bytes=None if timed is None else timed.peak_bytes,
            loss=None if timed is None else timed.loss,
        )

    def _attempt(self, way: str, micro_batch: int) -> _Timed | None:
        """Train one way from the beginning; `None` where the device's memory does not do."""
        with torch.no_grad():
            for name, parameter in trained_parameters(self.student).items():
                parameter.copy_(self.begin[name])
        self.student.zero_grad(set_to_none=True)
        free(self.device)
        try:
            return self._train(way, micro_batch)
        except (RuntimeError, ModelError) as error:
            # The engine makes an error of its own of torch's.
            if not out_of_memory(error):
                raise
        return None

    def _train(self, way: str, micro_batch: int) -> _Timed:
        teacher = None if way == "no teacher" else self.teacher
        stream = SyntheticStream(self.base.get_input_embeddings().weight.shape[0], self.sizes.seq_len)
        times: list[float] = []
        losses: list[float] = []
        peaks: list[int] = []

        def note(loss: float, peak: int | None = None) -> None:
            # The engine's own seconds begin and end with the optimiser's kernels of a step still under way.
            synchronize(self.device)
            times.append(time.perf_counter())
            losses.append(loss)
            if self.device.type == "cuda":
                peaks.append(max(peak or 0, torch.cuda.max_memory_allocated(self.device)))
                torch.cuda.reset_peak_memory_stats(self.device)

        if way == "dense loss":
            self._dense_steps(stream, micro_batch, note)
        else:
            self._steps(stream, teacher, micro_batch, way == "checkpointing", note)
        periods = [after - before for before, after in pairwise(times)]
        idle = 0 if teacher is not None else sum(value.nbytes for value in self.teacher.parameters())
        # Kernels that tune themselves take memory of their own in the first steps.
        peak = max(peaks[self.sizes.warmup :]) - idle if peaks else None
        return _Timed(statistics.median(periods[self.sizes.warmup - 1 :]), losses[0], peak)

    def _steps(
        self,
        stream: SyntheticStream,
        teacher: Any,
        micro_batch: int,
        checkpointing: bool,
        note: Callable[[float, int | None], None],
    ) -> None:
        """Lapcli's steps; what it saves before the first and after the last is outside of all periods."""

        def stepped(done: StepDone) -> None:
            # The engine begins to count anew in each step, before the optimiser's part of it.
            note(done.measured.loss, done.peak_bytes)

        never = self.settings.steps + 1
        with tempfile.TemporaryDirectory() as folder:
            train(
                self.student,
                teacher,
                stream,
                self.plan,
                self.settings,
                Path(folder),
                lineage=Lineage(KIND, {"name": self.name}, self.base.config.model_type, {"benchmark": True}),
                execution=Execution(
                    micro_batch=micro_batch,
                    gradient_checkpointing=checkpointing,
                    validate_every=never,
                    save_every=never,
                ),
                on_step=stepped,
            )

    def _dense_steps(self, stream: SyntheticStream, micro_batch: int, note: Callable[[float], None]) -> None:
        """The same steps, with the loss as it stands in the paper."""
        settings = self.settings
        parameters = list(trained_parameters(self.student).values())
        optimizer = torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
        self.student.train()
        for _step in range(settings.steps):
            sequences = [next(stream) for _ in range(settings.batch)]
            parts = [sequences[start : start + micro_batch] for start in range(0, len(sequences), micro_batch)]
            batches = [PackedBatch.of(part) for part in parts]
            tokens = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
            optimizer.zero_grad(set_to_none=True)
            summed = torch.zeros((), device=self.device)
            for batch in batches:
                loss = self._dense_loss(batch) / tokens
                loss.backward()
                summed += loss.detach()
            nn.utils.clip_grad_norm_(parameters, settings.clip)
            optimizer.step()
            note(float(summed))
        self.student.eval()

    def _dense_loss(self, batch: PackedBatch) -> Tensor:
        """The sum of a part, from all logits at once."""
        temperature = self.settings.temperature
        counts = batch.labels != IGNORED
        labels, rows = batch.labels[counts].to(self.device), counts.to(self.device)
        with torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext():
            logits = _dense_logits(self.base, batch, rows)
            with torch.no_grad():
                guide = _dense_logits(self.teacher, batch, rows)
        kl = F.kl_div(
            F.log_softmax(logits / temperature, -1),
            F.log_softmax(guide / temperature, -1),
            reduction="sum",
            log_target=True,
        )
        entropy = F.cross_entropy(logits, labels, reduction="sum")
        return entropy + self.settings.kl_weight * temperature**2 * kl


def _dense_logits(model: Any, batch: PackedBatch, rows: Tensor) -> Tensor:
    head: Head = head_of(model)
    logits = head.scale * F.linear(last_hidden(model, batch)[rows], head.weight, head.bias).float()
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def _random(config: GatedDeltaNetConfig, device: torch.device, dtype: torch.dtype, kernel: str, seed: int) -> Any:
    """A model of random weights, made where it will lie."""
    torch.manual_seed(seed)
    with device:
        model: Any = GatedDeltaNetForCausalLM._from_config(config, dtype=dtype)
    model.set_kernel(kernel)
    return model.eval()
