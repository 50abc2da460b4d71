"""Calibration: a model and text in, the sums that every selector needs out.

Keys and queries are taken after convolution and activation, and summed as Gram matrices in fp64: column pivots,
triangular factors and residuals of `M = [Kc; Qc]` depend on `M` only through `M^T M`, so nothing has to be
subsampled and memory is `O(layers x H x K^2)` whatever the number of tokens (arXiv 2602.04852, Sec. 3.4).

A calibration that is stopped leaves its sums beside the output and goes on from there; on a CPU the result is bit
for bit that of an unbroken run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapcli.artifacts import Artifact, Lineage, read_artifact, refuse_foreign, write_artifact
from lapcli.data import TokenBlocks, token_blocks
from lapcli.errors import ArtifactError, DataError, ModelError
from lapcli.families.base import Family, Member, StatefulLayer
from lapcli.families.fields import optional_integer
from lapcli.families.fla_library import refuse_where_fla_cannot_run
from lapcli.families.loading import load_model, load_tokenizer
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings
from lapcli.reporting import Reporter, SilentReporter
from lapcli.selectors.l1 import channel_magnitudes
from lapcli.selectors.s_wanda import channel_wanda
from lapcli.stages.lineage import STALE_HINT, calibration_lineage, refuse_stale
from lapcli.stages.observation import observe

_TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 32768}


def has_saliency(calibration: Artifact) -> bool:
    """Whether a calibration holds what the Grad selector needs."""
    return any(name.endswith(".saliency_key") for name in calibration.names)


class _Partial:
    """The sums of a calibration under way, on disk: written now and then, taken up by the next run.

    They hold for the same tokens in the same batches and dtype on the same kind of device: all but the first decide
    how the sums round.
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
        """Delete it; the whole result is there."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Stream:
    """The text of a calibration, fed to a step batch by batch; a pass over it can be left and taken up again."""

    blocks: TokenBlocks
    settings: CalibrationSettings
    batch: int
    device: torch.device
    reporter: Reporter

    def earlier(self, partial: _Partial, what: str) -> tuple[int, dict[str, Tensor]]:
        """The number of samples that an earlier process got through, and its sums."""
        done, stored = partial.load()
        if done:
            self.reporter.notice(f"going on after {done} of {self.settings.samples} samples of {what}")
        return done, stored

    def feed(
        self,
        title: str,
        step: Callable[[Tensor], None],
        done: int,
        partial: _Partial,
        sums: Callable[[], dict[str, Tensor]],
    ) -> None:
        """Call `step` with every batch after the first `done` samples; write what it sums up now and then."""
        length = self.settings.seq_len
        with self.reporter.task(title, total=self.settings.samples * length, unit="tokens") as task:
            task.advance(done * length)
            for start in range(done, len(self.blocks.ids), self.batch):
                ids = self.blocks.ids[start : start + self.batch]
                step(ids.to(self.device))
                task.advance(ids.numel())
                partial.save(start + len(ids), sums())


def _gram_pass(
    family: Family, model: Any, layers: Sequence[StatefulLayer], stream: _Stream, partial: _Partial, name: str
) -> dict[str, Tensor]:
    """Stream all tokens through the model once and add up what the selectors need."""
    observation = observe(layers, stream.settings)
    done, stored = stream.earlier(partial, "earlier sums")
    if done:
        observation.restore(stored, done * stream.settings.seq_len, stream.device)

    def step(ids: Tensor) -> None:
        # The head's logits are not needed: the body alone runs.
        model.get_decoder()(input_ids=ids, use_cache=False)

    with torch.inference_mode(), observation.attached(family, model):
        stream.feed("calibrating", step, done, partial, observation.tensors)
    observation.check_finite(name)
    return {key: tensor.cpu() for key, tensor in observation.tensors().items()}


def _projections(layer: StatefulLayer) -> dict[str, list[Member]]:
    """The key and the query projection of a layer, as "key" and "query"; several members where heads have copies."""
    return {
        side: [member for member in layer.members if member.role == f"{side} projection"] for side in ("key", "query")
    }


def _head_rows(values: Tensor, member: Member, layer: StatefulLayer) -> Tensor:
    """The channels of a projection `[..., D]` per head: `[H, K, D]` in fp64."""
    rows = torch.arange(layer.key_width) + member.stride * torch.arange(layer.heads).unsqueeze(1) + member.offset
    return values[rows.to(values.device)].double()


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
        key: stored[_gradient_name(*key)].to(stream.device) if done else torch.zeros_like(weight, dtype=torch.float32)
        for key, weight in weights.items()
    }
    predicted = stream.settings.samples * (stream.settings.seq_len - 1)

    def step(ids: Tensor) -> None:
        with torch.enable_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / predicted
        for key, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            gradients[key] += gradient.float()

    def sums() -> dict[str, Tensor]:
        return {_gradient_name(*key): gradient for key, gradient in gradients.items()}

    stream.feed("saliency", step, done, partial, sums)
    saliency: dict[str, Tensor] = {}
    for layer in layers:
        for side, members in _projections(layer).items():
            weight, gradient = weights[layer.index, side].detach().double(), gradients[layer.index, side].double()
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
    """What L1 and S-Wanda need of the weights, so that selection needs no model."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        inputs = sums[f"layers.{layer.index}.input_sq"]
        for side, members in _projections(layer).items():
            copies = [read_rows(source, layer, member) for member in members]
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
    """
    layers = family_for(source.config).layers(source.config)
    assert source.headers  # raises where the weights do not fit the config
    if not layers:
        raise ModelError(f"{source.name} has no layer with a state, so there is nothing to calibrate")
    without = source.config.get("num_hidden_layers", len(layers)) - len(layers)
    if without:
        reporter.notice(f"{without} layers of {source.name} keep no state and are skipped")
    widest = max(layer.key_width for layer in layers)
    tokens = settings.samples * settings.seq_len
    counted = settings.rows or tokens
    if counted < widest:
        raise DataError(
            f"{counted} tokens cannot span the {widest} key channels of a head",
            f"pass --samples and --seq-len with a product of {widest} at the least; thousands are better",
        )
    longest = optional_integer(source.config, "max_position_embeddings", settings.seq_len)
    if settings.seq_len > longest:
        raise DataError(
            f"--seq-len {settings.seq_len} is longer than the {longest} tokens that {source.name} takes",
            f"pass --seq-len {longest} or less",
        )
    return layers


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

    Returns:
        The calibration, and whether any work was done.

    Raises:
        ArtifactError: there is a calibration of other inputs, or in another dtype than the one asked for, or a damaged
            one, and `overwrite` is false.
        DataError: the text cannot be read or is too little.
        FamilyError: the family is unknown.
        ModelError: the model cannot be loaded, or its statistics are not finite (the layer is named).
    """
    machine = machine or Machine()
    reporter = reporter or SilentReporter()
    lineage = calibration_lineage(source, settings)
    existing = _existing(output, lineage, source, machine, overwrite)
    if existing is not None and (not saliency or has_saliency(existing)):
        return existing, False

    family = family_for(source.config)
    layers = check_calibration(source, settings, reporter)
    refuse_where_fla_cannot_run(source.config, machine.torch_device().type, machine.torch_dtype(source.config))
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
    stored: dict[str, Tensor] = {}
    if existing is not None:
        stored = existing.tensors()
        # What is in one file was computed in one dtype.
        machine = replace(machine, dtype=existing.lineage.record["dtype"])
    device = machine.torch_device()
    model: Any = load_model(
        source,
        device=device,
        dtype=machine.torch_dtype(source.config),
        kernel=machine.kernel,
        trust_remote_code=machine.trust_remote_code,
    )
    machine.announce(model, reporter, needs_gradient=saliency)
    dtype = str(model.dtype).removeprefix("torch.")
    batch = max(1, _TOKENS_PER_BATCH.get(device.type, 4096) // settings.seq_len)
    stream = _Stream(blocks, settings, batch, device, reporter)
    key = {"batch": batch, "device": device.type, "dtype": dtype, "corpus": blocks.digest}
    sums, gradients = (
        _Partial(output.with_name(f".{output.name}.{part}"), lineage, key, checkpoint_seconds)
        for part in ("sums", "gradients")
    )
    if existing is None:
        stored = _gram_pass(family, model, layers, stream, sums, source.name)
        stored |= _weight_statistics(source, layers, stored)
        record = {
            "tokens": settings.samples * settings.seq_len,
            "corpus": blocks.digest,
            "text": blocks.description,
            "layers": [{"index": layer.index, "heads": layer.heads, "key_width": layer.key_width} for layer in layers],
            "device": device.type,
            "dtype": dtype,
        }
        # Whole before the saliency pass begins, so that a kill in there does not cost the sums.
        existing = write_artifact(output, replace(lineage, record=record), stored)
    sums.remove()
    if saliency:
        stored |= _saliency_pass(family, model, layers, stream, gradients)
        existing = write_artifact(output, replace(lineage, record=existing.lineage.record), stored)
        gradients.remove()
    return existing, True


def _existing(
    output: Path, lineage: Lineage, source: ModelSource, machine: Machine, overwrite: bool
) -> Artifact | None:
    """The calibration that is there, where it is the one wanted.

    Raises:
        ArtifactError: another one is there, or a damaged one, and `overwrite` is false; or something else.
    """
    if not output.exists():
        return None
    try:
        existing = read_artifact(output, "calibration")
        refuse_stale(lineage, existing.lineage, output)
        wanted = str(machine.torch_dtype(source.config)).removeprefix("torch.")
        found = existing.lineage.record["dtype"]
        if machine.dtype != "auto" and wanted != found:
            raise ArtifactError(
                f"{output} was computed in {found}, but --dtype {wanted} is asked for",
                f"{STALE_HINT}; without --dtype it is used as it is",
            )
        if overwrite:
            existing.tensors()  # raises where they are damaged
        return existing
    except ArtifactError:
        if not overwrite:
            raise
        refuse_foreign(output)
        return None
