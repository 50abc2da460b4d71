"""What training needs to go on, bit for bit, in folders `step-N` that are whole or not there.

A folder holds `state.safetensors` (trained parameters and moments of the optimiser in fp32, whole however they were
sharded, and the states of each process's generators of random numbers) and `state.json` (step, schedule, data position,
settings, lineage). The tensors carry their digest and the same document once more, so that a damaged half is told from
a whole one. Nothing is pickled.

Writing relies on one process at a time being at work in a folder (`RunDirectory.lock`).
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lapcli.artifacts import (
    Artifact,
    Lineage,
    atomic_directory,
    read_artifact,
    read_document,
    write_artifact,
    write_document,
)
from lapcli.errors import ArtifactError
from lapcli.parallel import ALONE, Processes
from lapcli.reporting import Reporter, SilentReporter
from lapcli.stages.lineage import refuse_stale
from lapcli.training.adapters import trained_parameters, whole
from lapcli.training.distributed import placed_like

STATE_FILE = "state.json"
TENSORS_FILE = "state.safetensors"
KIND = "checkpoint"

_NAME = re.compile(r"step-(\d+)")
_OF_OPTIMISERS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
ANEW = "pass --restart to begin anew, or --run DIR to keep both"
"""What to do where no checkpoint can be gone on from."""
_DAMAGE = (ArtifactError, SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of training after a step.

    Attributes:
        path: its folder.
        step: how many steps were done.
        good: whether the model was found sound at that step.
        state: JSON-able: schedule, data position and whatever else the engine keeps.
        tensors: on the CPU, as `training_tensors` names them.
    """

    path: Path
    step: int
    good: bool
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Checkpoints:
    """The checkpoints of one training.

    Args:
        folder: where they lie; made when the first is saved.
        lineage: model, teacher and settings of the training; its record is not read.
        keep: how many of the newest remain when one is saved, that one included; the newest good one always does.
        reporter: hears of damaged ones.
        anew: what whoever can go on from none is told to do.
    """

    def __init__(
        self, folder: Path, lineage: Lineage, *, keep: int = 2, reporter: Reporter | None = None, anew: str = ANEW
    ):
        if keep < 1:
            raise ValueError(f"keep should be at least 1, not {keep}")
        self.folder, self._keep, self._anew = folder, keep, anew
        self._lineage = replace(lineage, kind=KIND, record={})
        self._reporter = reporter or SilentReporter()
        self._damaged: set[Path] = set()

    def newest(self, *, good: bool = False) -> Checkpoint | None:
        """The newest whole checkpoint.

        Args:
            good: whether only those count that were found sound.

        Returns:
            `None` where there is none at all.

        Raises:
            ArtifactError: it is of a training with other settings, models or parents, which the message names; or there
                are checkpoints, but not one is whole.
        """
        found = self._found()
        for checkpoint, artifact in self._readable(found):
            if good and not checkpoint.good:
                continue
            try:
                return replace(checkpoint, tensors=artifact.tensors())
            except _DAMAGE as error:
                self._skip(checkpoint.path, error)
        self._refuse_all_damaged(found)
        return None

    def position(self) -> Checkpoint | None:
        """The newest checkpoint as its documents have it: no tensor is read, so that damage to one goes unnoticed.

        Raises:
            ArtifactError: as `newest`.
        """
        found = self._found()
        for checkpoint, _artifact in self._readable(found):
            return checkpoint
        self._refuse_all_damaged(found)
        return None

    def _readable(self, found: Sequence[Path]) -> Iterator[tuple[Checkpoint, Artifact]]:
        """Those whose documents are whole and of this training, the newest first, without tensors; and these."""
        for path in reversed(found):
            try:
                lineage = read_document(path / STATE_FILE, KIND)
                step, sound, state = (lineage.record[name] for name in ("step", "good", "state"))
            except _DAMAGE as error:
                self._skip(path, error)
                continue
            refuse_stale(self._lineage, lineage, path, f"go on with the inputs that it was made with, or {self._anew}")
            try:
                artifact = read_artifact(path / TENSORS_FILE, KIND)
                if artifact.lineage != lineage or step != _step(path):
                    raise ArtifactError(f"{STATE_FILE} and {TENSORS_FILE} do not belong together")
            except _DAMAGE as error:
                self._skip(path, error)
                continue
            yield Checkpoint(path, step, sound, state, {}), artifact

    def _refuse_all_damaged(self, found: Sequence[Path]) -> None:
        if found and self._damaged.issuperset(found):
            raise ArtifactError(
                f"none of the {len(found)} checkpoints in {self.folder} is whole: {', '.join(p.name for p in found)}",
                f"put them back from a copy, or {self._anew}",
            )

    def save(self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor], *, good: bool) -> Path:
        """Write a checkpoint, and only when it is whole remove those that it makes superfluous.

        What remains: the new one, the `keep - 1` whole ones before it, and the newest good one.

        Args:
            step: how many steps were done.
            state: JSON-able.
            tensors: of `training_tensors`.
            good: whether the model was found sound at this step.

        Returns:
            Its folder.

        Raises:
            ArtifactError: it cannot be written; those that were there before remain.
        """
        path = self.folder / f"step-{step}"
        lineage = replace(self._lineage, record={"step": step, "good": good, "state": dict(state)})
        with atomic_directory(path, replace=True) as made:
            write_artifact(made / TENSORS_FILE, lineage, tensors)
            write_document(made / STATE_FILE, lineage)
        self._damaged.discard(path)
        self._prune(path)
        return path

    def _found(self) -> list[Path]:
        """The folders of checkpoints, in the order of their steps."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=_step)

    def _skip(self, path: Path, error: BaseException) -> None:
        if path not in self._damaged:
            said = error.message if isinstance(error, ArtifactError) else f"{type(error).__name__}: {error}"
            self._reporter.notice(f"the checkpoint {path} is damaged and is passed over: {said}")
        self._damaged.add(path)

    def _prune(self, new: Path) -> None:
        # What is later than the new one was passed over when training went on from before it.
        whole = [path for path in self._found() if _step(path) <= _step(new) and path not in self._damaged]
        kept = set(whole[-self._keep :])
        kept.update([path for path in whole if self._is_good(path)][-1:])
        for path in self._found():
            if path not in kept:
                # A folder that loses its files one by one would look damaged.
                os.replace(path, path.with_name(f".{path.name}.removed"))
        # Also what processes left that were killed while they wrote.
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _is_good(self, path: Path) -> bool:
        try:
            return bool(read_document(path / STATE_FILE, KIND).record["good"])
        except _DAMAGE:
            return False


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def shared_with_all(found: Checkpoint | None, processes: Processes) -> Checkpoint | None:
    """What the leader found, on every process: only its machine need have the folder."""
    if processes.size == 1:
        return found
    shapes = {} if found is None else {name: (value.shape, value.dtype) for name, value in found.tensors.items()}
    told, shapes = processes.tell((None if found is None else replace(found, tensors={}), shapes))
    if told is None:
        return None
    tensors = (
        {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        if found is None
        else {name: value.contiguous() for name, value in found.tensors.items()}
    )
    processes.hand_out(tensors.values())
    return replace(told, tensors=tensors)


def latest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint in a folder, whole or not; `None` where there is none."""
    return max((_step(path) for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), default=None)


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, processes: Processes = ALONE
) -> dict[str, Tensor]:
    """Copies of all that a step changes, on the CPU. Of several processes every one must call this at once.

    Args:
        model: with adapters; perhaps sharded.
        optimizer: of its trained parameters.
        device: where the model computes, for its generator of random numbers.
        processes: those that train it together.

    Returns:
        `parameter/NAME` and what the optimiser holds of it (`step/NAME` with `exp_avg/NAME` and `exp_avg_sq/NAME`, or
        with `momentum_buffer/NAME`) in fp32, `rng/RANK/cpu` and `rng/RANK/cuda` of every process as bytes. Of several
        processes the leader alone has more than the latter.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(model).items():
        for part, value in {"parameter": parameter, **optimizer.state.get(parameter, {})}.items():
            full = whole(value.detach())
            if processes.leader:
                found[f"{part}/{name}"] = full.to("cpu", torch.float32, copy=True).contiguous()
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    for name, mine in states.items():
        for rank, state in enumerate(processes.collect(mine)):
            found[f"rng/{rank}/{name}"] = state
    return found


def restore_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put the trained parameters of a checkpoint back, in place; where they are sharded, each process its part.

    Raises:
        ArtifactError: the model trains others.
    """
    saved = _part("parameter", tensors)
    found = trained_parameters(model)
    shapes = {name: tuple(value.shape) for name, value in saved.items()}
    wanted = {name: tuple(value.shape) for name, value in found.items()}
    if shapes != wanted:
        name = min(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
        raise ArtifactError(
            f"the checkpoint does not fit what is trained: {name} has the shape {shapes.get(name)} in it, and "
            f"{wanted.get(name)} in the model",
            ANEW,
        )
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(placed_like(parameter, saved[name]))


def restore_training(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put parameters and moments back that `training_tensors` took, sharded in whatever way or not.

    Args:
        model: with adapters.
        optimizer: of its trained parameters.
        tensors: of the checkpoint.

    Raises:
        ArtifactError: the model trains other parameters.
    """
    restore_parameters(model, tensors)
    parts = {part: _part(part, tensors) for part in _OF_OPTIMISERS}
    names = {parameter: name for name, parameter in trained_parameters(model).items()}
    state: dict[int, dict[str, Tensor]] = {}
    # The optimiser counts parameters group by group.
    for number, parameter in enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]):
        saved = {part: values[names[parameter]].clone() for part, values in parts.items() if names[parameter] in values}
        if saved:
            state[number] = {
                part: value if part == "step" else placed_like(parameter, value) for part, value in saved.items()
            }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def restore_random(tensors: Mapping[str, Tensor], device: torch.device, rank: int, seed: int) -> None:
    """Put this process's generators of random numbers back.

    Args:
        tensors: of the checkpoint.
        device: where the model computes.
        rank: of this process.
        seed: for generators that the checkpoint does not have, since other processes or devices made it.
    """
    torch.manual_seed(seed)
    if f"rng/{rank}/cpu" in tensors:
        torch.set_rng_state(tensors[f"rng/{rank}/cpu"])
    if device.type == "cuda" and f"rng/{rank}/cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rng/{rank}/cuda"], device)


def _part(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{name}/"
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
