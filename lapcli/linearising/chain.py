"""One layer after the other: trained with those before it in place, measured, and written down.

Source: arXiv 2506.09316, Sec. 4.4.
"""

import contextlib
import math
import shutil
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapcli.artifacts import Artifact, write_artifact
from lapcli.errors import ArtifactError
from lapcli.evaluation.run import evaluate_model
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.families.dual_state import set_kernel
from lapcli.families.loading import load_model, load_tokenizer
from lapcli.families.packed import longest_sequence
from lapcli.families.remote.lapcli_dual_state import convert_layers, restore_layer
from lapcli.linearising.captured import Capturing, disagreement, gradients_of
from lapcli.linearising.objective import LayerObjective
from lapcli.linearising.passes import Pair, Text, why_not_by_ranks
from lapcli.linearising.plan import LinearisingPlan
from lapcli.linearising.record import MEND, converted, layer_lineage, measured, summarise
from lapcli.linearising.start import fit_scale, fold_scale, output_variance, scaled
from lapcli.linearising.watching import attention_of
from lapcli.machine import Machine
from lapcli.reporting import Reporter
from lapcli.training import distributed
from lapcli.training.checkpoints import KIND as CHECKPOINT
from lapcli.training.distillation import distillation_sums, head_of
from lapcli.training.engine import CHECKPOINTS, Execution, train
from lapcli.training.fresh import WholePlan
from lapcli.training.packing import PackedBatch, last_hidden
from lapcli.training.stream import PackedSequence, TrainingStream
from lapkernels.dual_state import why_not


class Chain:
    """The training of one layer after the other.

    Args:
        plan: of the conversion.
        order: of all layers.
        machine: where it runs.
        micro_batch: sequences that are computed at once; `None` for about 8192 tokens.
        tasks: on which each prefix is measured beside the held-out text.
        limit: items of each task.
        reporter: where progress goes.
        cuda_graphs: whether training steps are CUDA graphs on a GPU, where they can be.
    """

    def __init__(
        self,
        plan: LinearisingPlan,
        order: Sequence[int],
        machine: Machine,
        micro_batch: int | None,
        tasks: Sequence[str],
        limit: int | None,
        reporter: Reporter,
        cuda_graphs: bool = True,
    ):
        self.plan, self.order, self.machine, self.reporter = plan, order[: plan.number], machine, reporter
        self.micro_batch = micro_batch or max(1, 8192 // plan.settings.distillation.seq_len)
        self.tasks, self.limit = list(tasks), limit
        self._of_teacher: float | None = None
        self._cuda_graphs = cuda_graphs
        self._by_ranks: bool | None = None
        """Whether models are told of documents by ranks; not known before the first layer."""
        self._said: set[str] = set()

    def run(self) -> int:
        """Convert what is not converted; how many layers that was."""
        done = converted(self.plan)
        for number, artifact in enumerate(done[: len(self.order)]):
            if artifact.lineage.settings["layer"] != self.order[number]:
                raise ArtifactError(
                    f"{artifact.path} is layer {artifact.lineage.settings['layer']}, but layer {self.order[number]} is "
                    f"the {number + 1}. by {self.plan.settings.order}", MEND,
                )  # fmt: skip
        if len(done) >= len(self.order):
            return 0
        self._load()
        for artifact in done:
            self._put_in_place(artifact)
        for number in range(len(done), len(self.order)):
            done.append(self._convert(number + 1, self.order[number], done))
        return len(self.order)

    def _load(self) -> None:
        source, machine = self.plan.source, self.machine
        self.tokenizer = load_tokenizer(source)
        models = [
            load_model(source, device=machine.torch_device(), dtype=machine.torch_dtype(source.config))
            for _ in range(2)
        ]
        self.teacher, self.student = models
        for model in models:
            model.requires_grad_(False)
        self.settings = self.plan.layer_settings()

    def _put_in_place(self, artifact: Artifact) -> None:
        """Give the student a layer that was converted before."""
        layer = artifact.lineage.settings["layer"]
        self._make(layer)
        named = self.student.state_dict()
        with torch.no_grad():
            for name, tensor in artifact.tensors().items():
                named[name].copy_(tensor)
        self._freeze(layer)

    def _make(self, layer: int) -> None:
        """A new layer in the student, on the kernel that was asked for."""
        convert_layers(self.student, self.settings, [layer])
        set_kernel(self.student, self.machine.kernel, self.machine.torch_device())

    def _freeze(self, layer: int) -> None:
        attention_of(self.student, layer).to(dtype=self.teacher.dtype).requires_grad_(False)

    def _take_out(self, layer: int) -> None:
        """Give the student the teacher's layer again."""
        restore_layer(self.student, layer)
        attention_of(self.student, layer).load_state_dict(attention_of(self.teacher, layer).state_dict())

    def _convert(self, number: int, layer: int, before: Sequence[Artifact]) -> Artifact:
        """Train one layer and write it down."""
        plan, distillation = self.plan, self.plan.settings.distillation
        begun = time.monotonic()
        stream = TrainingStream(
            distillation.data, self.tokenizer, distillation.seq_len, seed=distillation.seed, reporter=self.reporter
        )
        if before and distillation.chained:
            # The text goes on where the last layer left it.
            stream.restore(before[-1].lineage.record["stream"])
        held_out = stream.held_out(distillation.validation)
        if not distillation.chained:
            for artifact in before:
                self._take_out(artifact.lineage.settings["layer"])
        self._make(layer)
        attention: Any = attention_of(self.student, layer)
        # What is trained is in fp32, whatever the rest is in.
        attention.float().requires_grad_(True)
        attention.start_states(torch.Generator().manual_seed(distillation.seed + layer))
        batches = self._batches(held_out)
        if self._by_ranks is None:
            self._by_ranks = self._can_go_by_ranks(layer, held_out)
        variance, factors = self._start(layer, batches)
        objective = partial(
            LayerObjective, layer=layer, variance=variance, distillation=distillation, by_ranks=self._by_ranks
        )
        look = objective(self.student, self.teacher, temperature=distillation.temperature)
        trained = {name: tuple(p.shape) for name, p in self.student.named_parameters() if p.requires_grad}
        lineage = layer_lineage(plan, number, layer, before)
        folder = plan.place.training(number, layer)
        with (
            contextlib.nullcontext() if factors is None else scaled(attention, factors),
            self._capturing() as capturing,
        ):
            first = self._measure(look, batches)
            ended = train(
                self.student,
                self.teacher,
                stream,
                WholePlan(trained),
                distillation.training(),
                folder,
                lineage=replace(lineage, kind=CHECKPOINT),
                execution=Execution(
                    micro_batch=self.micro_batch,
                    validate_every=max(1, distillation.steps // 4),
                    save_every=max(1, distillation.steps // 4),
                    divergence=math.inf,
                ),
                objective=partial(objective, capturing=capturing),
                anew=MEND,
                doing=f"layer {layer} ({number} of {len(self.order)})",
                reporter=self.reporter,
            )
        if factors is not None:
            fold_scale(attention, factors)
        if not distillation.chained:
            last_alone = self._measure(look, batches)
            for artifact in before:
                self._put_in_place(artifact)
        last = self._measure(look, batches)
        prefix = f"model.layers.{layer}.self_attn."
        tensors = {name: value for name, value in self.student.state_dict().items() if name.startswith(prefix)}
        mixture = self._mixture(attention)
        # From here on in the teacher's dtype, as it will be in the models that are written.
        self._freeze(layer)
        record: dict[str, Any] = {
            "number": number,
            "layer": layer,
            "alignment": {"before": first["alignment"], "after": last["alignment"]},
            "similarity": {"before": first["similarity"], "after": last["similarity"]},
            "mixture": mixture,
            "cross_entropy": last["cross_entropy"],
            "kl": last["kl"],
            "teacher_cross_entropy": self._teacher_loss(batches),
            "tokens": ended.tokens,
            "trained_parameters": sum(math.prod(shape) for shape in trained.values()),
            "stopped": ended.stopped,
            "seconds": round(time.monotonic() - begun, 1),
            "tasks": self._tasks(),
            "stream": stream.state(),
        }
        if not distillation.chained:
            record["alone"] = {name: last_alone[name] for name in ("alignment", "cross_entropy", "kl")}
        artifact = write_artifact(plan.place.prefix(number, layer), replace(lineage, record=record), tensors)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        summarise(plan, [*before, artifact], measured(plan))
        self.reporter.notice(
            f"layer {layer}: alignment {first['alignment']:.4f} -> {last['alignment']:.4f}, KL of the prefix "
            f"{last['kl']:.4f}, perplexity {math.exp(last['cross_entropy']):.2f}"
        )
        return artifact

    def _batches(self, sequences: Sequence[Any]) -> list[Any]:
        size = self.micro_batch
        return [PackedBatch.of(sequences[start : start + size]) for start in range(0, len(sequences), size)]

    def _start(self, layer: int, batches: Sequence[Any]) -> tuple[float, Tensor | None]:
        """The variance of what the teacher's layer gives, and the size that each head of the new one should have."""
        pair, precision = Pair(self.student, self.teacher, layer), distributed.product_precision
        fits = self.plan.settings.distillation.fit and self.settings.window is None
        outputs, heads = [], []
        with torch.no_grad():
            for batch in batches:
                text = Text.of(batch, self.student.device) if self._by_ranks else batch
                if fits:
                    mine, theirs = pair.run(text, precision)
                    heads += mine.seen.heads
                else:
                    theirs = pair.of_teacher(text, precision)
                outputs += theirs.seen.outputs
        factors = fit_scale(attention_of(self.student, layer), heads, outputs) if fits else None
        return output_variance(outputs), factors

    def _can_go_by_ranks(self, layer: int, sequences: Sequence[PackedSequence]) -> bool:
        """Whether models are told of documents by ranks: on a GPU, where shapes that are known save most of a step.

        Compared once with what the host reads off positions, on the first layer as it begins, its states in PyTorch.
        """
        device = self.student.device
        if not _ranks_pay(device) or not sequences:
            return False
        time = len(sequences[0].ids)
        why = why_not_by_ranks(self.student, time)
        if why is None:
            # Text may have no boundary here: these get some, one document of a single token among them.
            more = {time // 3, time // 3 + 1, 2 * time // 3} - {0, time}
            parted = [replace(each, starts=tuple(sorted(more.union(each.starts)))) for each in sequences]
            batch = self._batches(parted)[0]
            settings: dict[str, Any] = {"variance": 1.0, "distillation": self.plan.settings.distillation}
            sure = "reference" if why_not("chunked", device, torch.bfloat16, needs_gradient=True) else "chunked"
            found: list[list[Tensor]] = []
            try:
                for by_ranks, kernel in ((True, self.machine.kernel), (False, sure)):
                    objective = LayerObjective(self.student, self.teacher, layer=layer, by_ranks=by_ranks, **settings)
                    set_kernel(self.student, kernel, device)
                    found.append(gradients_of(objective, objective.read(batch)))
                why = disagreement(*found)
            except torch.OutOfMemoryError:
                why = "there is no memory to compare both ways"
            finally:
                set_kernel(self.student, self.machine.kernel, device)
        if why is not None:
            self._say_once(f"the host tells documents apart: {why}")
        return why is None

    @contextlib.contextmanager
    def _capturing(self) -> Generator[Capturing | None]:
        """What makes the steps of a layer CUDA graphs, if they are to be."""
        if not (self._cuda_graphs and self._by_ranks):
            yield None
            return
        with Capturing() as capturing:
            yield capturing
        if capturing.failure is not None:
            # What cannot be captured in one layer cannot in the next.
            self._cuda_graphs = False
            self._say_once(f"training steps are launched kernel by kernel: {capturing.failure}")
        elif capturing.steps:
            self._say_once(
                "training steps are CUDA graphs; each layer's first one is compared with the same without it"
            )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.reporter.notice(text)

    def _measure(self, look: Any, batches: Sequence[Any]) -> dict[str, float]:
        with torch.no_grad():
            parts = [look.sums(batch) for batch in batches]
        count = sum(int(part.tokens) for part in parts)
        means = [part.means(count) for part in parts]
        return {name: math.fsum(each[name] for each in means) for name in means[0]}

    def _teacher_loss(self, batches: Sequence[Any]) -> float:
        if self._of_teacher is not None:
            return self._of_teacher
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                hidden = last_hidden(self.teacher, batch)
                sums = distillation_sums(hidden, head_of(self.teacher), None, None, batch.labels)
                total, count = total + float(sums.cross_entropy), count + int(sums.tokens)
        self._of_teacher = total / max(count, 1)
        return self._of_teacher

    def _mixture(self, attention: Any) -> list[float] | None:
        if self.settings.window is not None:
            return None
        return attention.mixture.detach().float().softmax(0).tolist()

    def _tasks(self) -> list[dict[str, Any]]:
        """The prefix on the tasks that were asked for."""
        if not self.tasks:
            return []
        settings = EvaluationSettings(limit=self.limit)
        longest = longest_sequence(self.plan.source.config)
        # A teacher is of no use beyond its positions, and so is what it taught.
        within = tuple(length for length in settings.niah_lengths if longest is None or length <= longest)
        settings = replace(settings, niah_lengths=within or settings.niah_lengths)
        found = evaluate_model(self.student, self.tokenizer, self.tasks, settings, reporter=self.reporter)
        return [
            {
                "task": score.task,
                "metric": score.metric,
                "length": score.length,
                "value": score.estimate.value,
                "stderr": score.estimate.stderr,
            }
            for score in found.models[0].scores
        ]


def _ranks_pay(device: torch.device) -> bool:
    """Whether it is launches and waiting that take the time there, rather than what is computed."""
    return device.type == "cuda"
