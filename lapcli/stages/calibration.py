"""Calibration: a model and text in, the sums that every selector needs out.

Keys and queries are taken after convolution and activation, and summed as Gram matrices in fp64: column pivots,
triangular factors and residuals of `M = [Kc; Qc]` depend on `M` only through `M^T M`, so nothing has to be
subsampled and memory is `O(layers x H x K^2)` whatever the number of tokens (arXiv 2602.04852, Sec. 3.4).

A calibration that is stopped leaves its sums beside the output and goes on from there; on a CPU the result is bit
for bit that of an unbroken run. Of several processes (`lapcli.parallel`) each sums over its share of the samples.
"""

import glob
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapcli.artifacts import Artifact, Lineage, read_artifact, write_artifact
from lapcli.data import TokenBlocks, token_blocks
from lapcli.errors import ArtifactError, DataError, ModelError, UsageError
from lapcli.families.base import Family, Member, StatefulLayer
from lapcli.families.fla_library import refuse_where_fla_cannot_run
from lapcli.families.library_kernels import kernels_of
from lapcli.families.loading import kept_off_devices, load_model, load_tokenizer
from lapcli.families.packed import longest_sequence, text_part
from lapcli.families.registry import family_for
from lapcli.families.right_gradients import use_right_gradients
from lapcli.families.source import ModelSource
from lapcli.machine import Machine
from lapcli.parallel import ALONE, Processes
from lapcli.recipe import CalibrationSettings
from lapcli.reporting import Reporter, SilentReporter
from lapcli.selectors.l1 import channel_magnitudes
from lapcli.selectors.s_wanda import channel_wanda
from lapcli.stages.lineage import calibration_lineage, existing_result
from lapcli.stages.observation import observe

_TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 32768}
# A GPU that is full of weights has less room for activations.
_TOKENS_PER_BATCH_SPLIT = 4096


def has_saliency(calibration: Artifact) -> bool:
    """Whether a calibration holds what the Grad selector needs."""
    return any(name.endswith(".saliency_key") for name in calibration.names)


class _Partial:
    """The sums of a calibration under way, on disk: written now and then, taken up by the next run.

    They hold for the same tokens in the same batches and dtype, on the same kind of device with the same kernels: all
    but the first decide how the sums round. Of several processes each writes its own.
    """

    def __init__(self, path: Path, lineage: Lineage, key: dict[str, Any], every_seconds: float):
        self.path = path
        self.lineage = lineage
        self.key = key
        self.every_seconds = every_seconds
        self.written = time.monotonic()

    def load(self) -> tuple[int, dict[str, Tensor]]:
        """The number of samples done, and the sums; zero where there is nothing that fits."""
        if not self.path.is_file():
            return 0, {}
        try:
            artifact = read_artifact(self.path, self.lineage.kind)
            record = artifact.lineage.record
            if artifact.lineage.identity() != self.lineage.identity() or record.get("key") != self.key:
                return 0, {}
            return record["samples_done"], artifact.tensors()
        except ArtifactError:
            return 0, {}

    def save(self, done: int, tensors: dict[str, Tensor]) -> None:
        """Write the sums if the last time is long enough ago."""
        if time.monotonic() - self.written < self.every_seconds:
            return
        record = {"samples_done": done, "key": self.key}
        write_artifact(self.path, replace(self.lineage, record=record), tensors)
        self.written = time.monotonic()

    def remove(self) -> None:
        """Delete it, and those of more processes than there are now; the whole result is there."""
        self.path.unlink(missing_ok=True)
        for other in self.path.parent.glob(f"{glob.escape(self.path.name)}.[0-9]*"):
            other.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Stream:
    """The text of a calibration, fed to a step batch by batch; a pass over it can be left and taken up again.

    Attributes:
        blocks: all of the text.
        settings: its sizes.
        share: the samples that this process takes.
        batch: samples of a batch.
        device: where they go.
        home: where the sums lie; `None` for wherever what they are of lies.
        processes: among which the samples are shared.
        reporter: where progress goes.
    """

    blocks: TokenBlocks
    settings: CalibrationSettings
    share: range
    batch: int
    device: torch.device
    home: torch.device | None
    processes: Processes
    reporter: Reporter

    def tokens_before(self, done: int) -> int:
        """Tokens of the text before the one that comes after `done` samples of the share."""
        return (self.share.start + done) * self.settings.seq_len

    def earlier(self, partial: _Partial, what: str) -> tuple[int, dict[str, Tensor]]:
        """The number of samples that an earlier process got through, and its sums."""
        done, stored = partial.load()
        if done:
            self.reporter.notice(f"going on after {done} of {len(self.share)} samples of {what}")
        return done, stored

    def feed(
        self,
        title: str,
        step: Callable[[Tensor], None],
        done: int,
        partial: _Partial,
        sums: Callable[[], dict[str, Tensor]],
    ) -> None:
        """Call `step` with every batch after the first `done` of the share; write what it sums up now and then."""
        length, mine = self.settings.seq_len, self.blocks.ids[self.share.start : self.share.stop]
        with self.reporter.task(title, total=len(mine) * length, unit="tokens") as task:
            task.advance(done * length)
            for start in range(done, len(mine), self.batch):
                ids = mine[start : start + self.batch]
                step(ids.to(self.device))
                task.advance(ids.numel())
                partial.save(start + len(ids), sums())


def _gram_pass(
    family: Family, model: Any, layers: Sequence[StatefulLayer], stream: _Stream, partial: _Partial, name: str
) -> dict[str, Tensor]:
    """Stream all tokens through the model once and add up what the selectors need."""
    done, stored = stream.earlier(partial, "earlier sums")
    observation = observe(layers, stream.settings, seen=stream.tokens_before(done), home=stream.home)
    if done:
        observation.restore(stored, stream.tokens_before(done), stream.home or stream.device)

    def step(ids: Tensor) -> None:
        # The head's logits are not needed: the body alone runs.
        model.get_decoder()(input_ids=ids, use_cache=False)

    with torch.inference_mode(), observation.attached(family, model):
        stream.feed("calibrating", step, done, partial, observation.tensors)
    observation.combine(stream.processes)
    observation.check_finite(name)
    return observation.tensors()


def _projections(layer: StatefulLayer) -> dict[str, list[Member]]:
    """The key and the query projection of a layer, as "key" and "query"; several members where heads have copies."""
    return {
        side: [member for member in layer.members if member.role == f"{side} projection"] for side in ("key", "query")
    }


def _head_rows(values: Tensor, member: Member, layer: StatefulLayer) -> Tensor:
    """The channels of a projection `[..., D]` per head: `[H, K, D]` in fp64."""
    rows = torch.tensor([list(head) for head in member.rows(layer.heads, layer.key_width)], device=values.device)
    return values[rows].double()


def _gradient_name(layer: int, side: str) -> str:
    return f"layers.{layer}.gradient_{side}"


def _saliency_pass(
    family: Family, model: Any, layers: Sequence[StatefulLayer], stream: _Stream, partial: _Partial
) -> dict[str, Tensor]:
    """`sum_i |W_ij dL/dW_ij|` per channel, L the mean loss over the whole text; gradients added up in fp32.

    Source: arXiv 2602.04852, Sec. 3.4 (Grad).
    """
    model.requires_grad_(False)
    weights = {
        # The copies of a head lie in one tensor.
        (layer.index, side): family.parameter(model, layer, members[0]).requires_grad_(True)
        for layer in layers
        for side, members in _projections(layer).items()
    }
    done, stored = stream.earlier(partial, "an earlier saliency pass")
    gradients = {
        key: (stored[_gradient_name(*key)] if done else torch.zeros(weight.shape)).to(stream.home or weight.device)
        for key, weight in weights.items()
    }
    predicted = stream.settings.samples * (stream.settings.seq_len - 1)

    def step(ids: Tensor) -> None:
        with torch.enable_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / predicted
        for key, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            gradients[key] += gradient.float().to(gradients[key].device)

    def sums() -> dict[str, Tensor]:
        return {_gradient_name(*key): gradient for key, gradient in gradients.items()}

    stream.feed("saliency", step, done, partial, sums)
    gradients = {key: gradient.cpu() for key, gradient in gradients.items()}
    stream.processes.add(gradients.values())
    saliency: dict[str, Tensor] = {}
    for layer in layers:
        for side, members in _projections(layer).items():
            weight = weights[layer.index, side].detach().cpu().double()
            gradient = gradients[layer.index, side].double()
            if not torch.isfinite(gradient).all():
                raise ModelError(f"the gradient of {members[0].tensor} is NaN or infinite", "try --dtype float32")
            products = (weight * gradient).abs()
            per_copy = torch.stack([_head_rows(products, member, layer).sum(-1) for member in members])
            saliency[f"layers.{layer.index}.saliency_{side}"] = per_copy.sum(0).cpu()
    return saliency


def read_rows(source: ModelSource, layer: StatefulLayer, member: Member) -> Tensor:
    """A projection's rows per head, read from disk: `[H, K, D]` in fp64."""
    from safetensors import safe_open

    header, _entry = source.tensors[member.tensor]
    with safe_open(header.path, framework="pt") as handle:
        return _head_rows(handle.get_tensor(member.tensor), member, layer)


def _weight_statistics(
    source: ModelSource, layers: Sequence[StatefulLayer], sums: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What L1 and S-Wanda need of the weights, as the model scales them, so that selection needs no model."""
    found: dict[str, Tensor] = {}
    family = family_for(source.config)
    shapes = {name: entry.shape for name, (_header, entry) in source.tensors.items()}
    for layer in layers:
        inputs = sums[f"layers.{layer.index}.input_sq"]
        stored = replace(layer, members=family.members(layer, shapes))
        for side, members in _projections(stored).items():
            copies = [read_rows(source, layer, member) * member.factor for member in members]
            magnitudes = torch.stack([channel_magnitudes(rows) for rows in copies])
            found[f"layers.{layer.index}.magnitude_{side}"] = magnitudes.sum(0)
            wanda = torch.stack([channel_wanda(rows, inputs) for rows in copies])
            found[f"layers.{layer.index}.wanda_{side}"] = wanda.sum(0)
    return found


def check_calibration(
    source: ModelSource, settings: CalibrationSettings, reporter: Reporter
) -> tuple[StatefulLayer, ...]:
    """Refuse, before any work, what cannot give usable statistics.

    Returns:
        The stateful layers.

    Raises:
        DataError: too few tokens, or longer sequences than the model takes.
        FamilyError: the family is unknown.
        ModelError: no layer keeps a state, or config and weights do not fit.
        UsageError: normalised keys and queries are wanted of a model that does not normalise them.
    """
    layers = family_for(source.config).layers(source.config)
    assert source.headers  # raises where the weights do not fit the config
    if not layers:
        raise ModelError(f"{source.name} has no layer with a state, so there is nothing to calibrate")
    raw = [layer for layer in layers if not layer.l2_normalised]
    if settings.normalized and raw:
        raise UsageError(
            f"--normalized: {source.name} ({family_for(source.config).name}) gives keys and queries to its state "
            f"without L2 normalisation (layer {raw[0].index}), so normalised ones are not what the state sees",
            "drop --normalized",
        )
    text = text_part(source.config)
    without = text.get("num_hidden_layers", len(layers)) - len(layers)
    if without:
        layers_are = "layer keeps no state and is" if without == 1 else "layers keep no state and are"
        reporter.notice(f"{source.name}: {without} {layers_are} skipped")
    widest = max(layer.key_width for layer in layers)
    tokens = settings.samples * settings.seq_len
    counted = settings.rows or tokens
    if counted < widest:
        raise DataError(
            f"{counted} tokens cannot span the {widest} key channels of a head",
            f"pass --samples and --seq-len with a product of {widest} at the least; thousands are better",
        )
    check_length(source, settings.seq_len)
    return layers


def check_length(source: ModelSource, seq_len: int) -> None:
    """Refuse sequences that a model does not take.

    Raises:
        DataError: they are longer than its config says.
    """
    longest = longest_sequence(source.config)
    if longest is not None and seq_len > longest:
        raise DataError(
            f"--seq-len {seq_len} is longer than the {longest} tokens that {source.name} takes",
            f"pass --seq-len {longest} or less",
        )


@dataclass(frozen=True)
class _Job:
    """What the leader has found to do.

    Attributes:
        blocks: the text.
        dtype: that of a calibration which is to be extended, so that one file is computed in one dtype; `None` for the
            machine's.
        sums: whether the sums are to be computed.
        saliency: whether the gradients are.
    """

    blocks: TokenBlocks
    dtype: str | None
    sums: bool
    saliency: bool


@dataclass(frozen=True)
class _Calibrator:
    """One process at work on a calibration.

    Attributes:
        source: the model.
        settings: the text and its amount.
        output: beside which sums under way are written.
        machine: where it runs.
        reporter: where progress goes.
        checkpoint_seconds: how often sums under way are written.
        processes: this process among all.
    """

    source: ModelSource
    settings: CalibrationSettings
    output: Path
    machine: Machine
    reporter: Reporter
    checkpoint_seconds: float
    processes: Processes

    def work(
        self, job: _Job, layers: Sequence[StatefulLayer], keep: Callable[[dict[str, Tensor], dict[str, Any]], None]
    ) -> None:
        """Compute what is to be computed; `keep` is given the tensors of each pass, and what decided how they round."""
        machine = self.machine if job.dtype is None else replace(self.machine, dtype=job.dtype)
        device = machine.first_device()
        model: Any = load_model(
            self.source,
            device=device,
            dtype=machine.torch_dtype(self.source.config),
            kernel=machine.kernel,
            trust_remote_code=machine.trust_remote_code,
            split=machine.split,
        )
        machine.announce(model, self.reporter, needs_gradient=job.saliency)
        if job.saliency:
            _refuse_kept_off(model, self.source.name)
            use_right_gradients(model, device, self.reporter)
        share = self.processes.share(self.settings.samples)
        tokens = _TOKENS_PER_BATCH_SPLIT if machine.split else _TOKENS_PER_BATCH.get(device.type, 4096)
        batch = max(1, tokens // self.settings.seq_len)
        home = torch.device("cpu") if machine.split else None
        stream = _Stream(job.blocks, self.settings, share, batch, device, home, self.processes, self.reporter)
        rounding = {"device": device.type, "dtype": str(model.dtype).removeprefix("torch.")}
        key = {**rounding, "batch": batch, "corpus": job.blocks.digest, "share": [share.start, share.stop]}
        family = family_for(self.source.config)
        # Triton launches on the current device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            partial = self._partial("sums", {**key, "kernel": _kernel(model, self.settings.seq_len, training=False)})
            if job.sums:
                found = _gram_pass(family, model, layers, stream, partial, self.source.name)
                keep(found, rounding)
            self._forget(partial)
            if job.saliency:
                kernel = _kernel(model, self.settings.seq_len, training=True)
                partial = self._partial("gradients", {**key, "kernel": kernel})
                keep(_saliency_pass(family, model, layers, stream, partial), rounding)
                self._forget(partial)

    def _partial(self, what: str, key: dict[str, Any]) -> _Partial:
        number = "" if self.processes.leader else f".{self.processes.rank}"
        path = self.output.with_name(f".{self.output.name}.{what}{number}")
        return _Partial(path, calibration_lineage(self.source, self.settings), key, self.checkpoint_seconds)

    def _forget(self, partial: _Partial) -> None:
        # No process lets go of its share before the leader has written the whole.
        self.processes.wait()
        partial.remove()


def _kernel(model: Any, time: int, *, training: bool) -> str | dict[str, str]:
    """What runs the layers of a loaded model over rows of `time` tokens: of stock ones, each function's package."""
    return model.kernel_choice(time, training=training).name if hasattr(model, "kernel_choice") else kernels_of(model)


def _refuse_kept_off(model: Any, name: str) -> None:
    """Refuse a backward pass through layers whose weights come and go."""
    away = kept_off_devices(model)
    if away:
        raise ModelError(
            f"--grad needs the weights of {name} to stay where they compute, but the devices have no room for "
            f"{', '.join(away[:3]) or 'all of it'}{' …' if len(away) > 3 else ''}",
            "use more or larger GPUs, or a method that needs no gradient: drrqr, s-wanda, l1",
        )


def calibrate(
    source: ModelSource,
    settings: CalibrationSettings,
    output: Path,
    *,
    machine: Machine | None = None,
    saliency: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    checkpoint_seconds: float = 20.0,
    processes: Processes = ALONE,
) -> tuple[Artifact, bool]:
    """Measure what the selectors need, or find that it is there.

    Args:
        source: the model.
        settings: the text and its amount.
        output: the artifact to write.
        machine: where it runs.
        saliency: whether the Grad selector's statistics are wanted too; they extend a calibration without them.
        overwrite: whether a calibration of other inputs, in another dtype, or a damaged one gives way.
        reporter: where progress goes.
        checkpoint_seconds: how often the sums under way are written beside `output`.
        processes: which this process leads; the others call `assist`.

    Returns:
        The calibration, and whether any work was done.

    Raises:
        ArtifactError: there is a calibration of other inputs, or in another dtype than the one asked for, or a damaged
            one, and `overwrite` is false.
        DataError: the text cannot be read or is too little.
        FamilyError: the family is unknown.
        ModelError: the model cannot be loaded, or its statistics are not finite (the layer is named), or gradients are
            wanted of a model too large for the devices.
        UsageError: there are more processes than samples.
    """
    machine = machine or Machine()
    reporter = reporter or SilentReporter()
    lineage = calibration_lineage(source, settings)
    existing, whole = existing_calibration(
        source, settings, output, machine=machine, saliency=saliency, overwrite=overwrite
    )
    if existing is not None and whole:
        processes.tell(None)
        return existing, False

    layers = check_calibration(source, settings, reporter)
    if processes.size > settings.samples:
        raise UsageError(
            f"{processes.size} processes cannot share {settings.samples} samples",
            f"start {settings.samples} at the most, or pass more --samples",
        )
    refuse_where_fla_cannot_run(source.config, machine.first_device().type, machine.torch_dtype(source.config))
    tokenizer = load_tokenizer(source, trust_remote_code=machine.trust_remote_code)
    blocks = token_blocks(
        settings.data,
        tokenizer,
        samples=settings.samples,
        seq_len=settings.seq_len,
        seed=settings.seed,
        reporter=reporter,
    )
    if existing is not None and existing.lineage.record["corpus"] != blocks.digest:
        raise ArtifactError(
            f"{output} was calibrated on a text that has changed since "
            f"(digest {existing.lineage.record['corpus'][:12]}, now {blocks.digest[:12]}); saliency cannot extend it",
            "pass --overwrite to calibrate anew",
        )
    stored: dict[str, Tensor] = {} if existing is None else existing.tensors()
    dtype = None if existing is None else existing.lineage.record["dtype"]
    job: _Job = processes.tell(_Job(blocks, dtype, existing is None, saliency))

    def keep(found: dict[str, Tensor], rounding: dict[str, Any]) -> None:
        nonlocal existing
        stored.update(found)
        if existing is None:
            stored.update(_weight_statistics(source, layers, stored))
            record = {
                "tokens": settings.samples * settings.seq_len,
                "corpus": blocks.digest,
                "text": blocks.description,
                "layers": [
                    {"index": layer.index, "heads": layer.heads, "key_width": layer.key_width} for layer in layers
                ],
                **rounding,
            }
        else:
            record = existing.lineage.record
        # Sums are whole on disk before the saliency pass begins, so that a kill in there does not cost them.
        existing = write_artifact(output, replace(lineage, record=record), stored)

    _Calibrator(source, settings, output, machine, reporter, checkpoint_seconds, processes).work(job, layers, keep)
    assert existing is not None
    return existing, True


def assist(
    source: ModelSource,
    settings: CalibrationSettings,
    output: Path,
    *,
    machine: Machine,
    processes: Processes,
    checkpoint_seconds: float = 20.0,
) -> None:
    """Compute this process's share of what the leader is calibrating, if it has anything to do; see `calibrate`.

    Raises:
        LapcliError: the model cannot be loaded or run here, or another process ended.
    """
    job: _Job | None = processes.tell(None)
    if job is None:
        return
    reporter = SilentReporter()
    layers = check_calibration(source, settings, reporter)
    calibrator = _Calibrator(source, settings, output, machine, reporter, checkpoint_seconds, processes)
    calibrator.work(job, layers, lambda _found, _rounding: None)


def existing_calibration(
    source: ModelSource,
    settings: CalibrationSettings,
    output: Path,
    *,
    machine: Machine,
    saliency: bool = False,
    overwrite: bool = False,
) -> tuple[Artifact | None, bool]:
    """The calibration of these inputs that is there, and whether it leaves nothing to do; see `calibrate`.

    Raises:
        ArtifactError: there is one of other inputs, or in another dtype than the one asked for, or a damaged one, and
            `overwrite` is false.
    """
    existing = existing_result(
        output, calibration_lineage(source, settings), _undamaged if overwrite else lambda found: found,
        dtype=machine.dtype_by_name(source.config), overwrite=overwrite,
    )  # fmt: skip
    return existing, existing is not None and (not saliency or has_saliency(existing))


def _undamaged(calibration: Artifact) -> Artifact:
    calibration.tensors()  # raises where they are damaged
    return calibration
