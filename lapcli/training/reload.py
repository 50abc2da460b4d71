"""Whether what was written computes what was trained: both are read from disk and run by a fresh process.

Of an adapter (`check_reload`) the process loads the model that was trained and gives it the saved adapter, unmerged;
of a whole model (`check_trained`) it puts the training checkpoint's values into the model, rounded as they are stored.
Then it loads what was written as any user would, and compares the logits of a few tokens.

    python -m lapcli.training.reload < REQUEST.json
"""

import gc
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli.artifacts import read_artifact
from lapcli.errors import ArtifactError
from lapcli.families.loading import load_model
from lapcli.families.source import ModelSource, resolve_model
from lapcli.machine import Machine
from lapcli.recipe import RecoverySettings
from lapcli.training.adapters import apply_adapters, load_adapter, plan_adapters
from lapcli.training.checkpoints import KIND as CHECKPOINT
from lapcli.training.checkpoints import TENSORS_FILE

EXACT = 1e-4
"""Bound where weights are stored in fp32: ten times the 1e-5 that merging is tested to."""
ROUNDED = 2**-7
"""Where they are stored in half precision: each merged weight is rounded by up to 2^-9 of itself (bf16), which moves
the logits by some such share. Many layers add up to more; up to half of what training changed is allowed then, since a
part that was left out of the merge moves the logits by as much as it changed."""

_WIDE_BYTES = 4 * 2**30
"""Checkpoints up to this size are compared in fp32 on a GPU too."""


@dataclass(frozen=True)
class Reloaded:
    """What the fresh process found.

    Attributes:
        error: of the merged model's logits, in Frobenius norms relative to the unmerged one's.
        bound: on it.
        effect: the same measure between the model without what was trained and the unmerged one.
    """

    error: float
    bound: float
    effect: float


def check_reload(
    student: ModelSource, settings: RecoverySettings, adapter: Path, merged: Path, ids: list[int], machine: Machine
) -> Reloaded:
    """Compare a merged checkpoint with the model and the adapter that it was made from.

    Args:
        student: the model that was trained.
        settings: of its recovery.
        adapter: the saved adapter.
        merged: the merged checkpoint.
        ids: tokens to run.
        machine: where to.

    Raises:
        ArtifactError: it cannot be loaded there, or computes something else.
    """
    request = {"student": str(student.path), "settings": settings.document(), "adapter": str(adapter)}
    kept = f"the adapter is whole ({adapter}); the same command tries again from the last checkpoint"
    measured = _ask(request, "the merged model", merged, ids, machine, kept)
    stored = {entry.dtype for header in resolve_model(str(merged)).headers for entry in header.tensors.values()}
    bound = EXACT if stored == {"F32"} else max(ROUNDED, measured["effect"] / 2)
    found = Reloaded(**measured, bound=bound)
    if not found.error <= found.bound:
        raise ArtifactError(
            f"the merged model does not compute what was trained: its logits differ by {found.error:.2g} of their "
            f"norm, and {found.bound:g} is allowed",
            f"the adapter is whole ({adapter}), the merged model was not kept; please report this",
        )
    return found


@dataclass(frozen=True)
class Restored:
    """What the fresh process found of a whole model.

    Attributes:
        error: of the written model's logits, in Frobenius norms relative to those of the trained values as stored.
        bound: on it.
        rounding: the same measure between the trained values as stored and as they were trained, in fp32.
    """

    error: float
    bound: float
    rounding: float


def check_trained(checkpoint: Path, written: Path, ids: list[int], machine: Machine) -> Restored:
    """Compare a model directory with the training checkpoint that it was made from.

    Args:
        checkpoint: a folder of `lapcli.training.checkpoints` that holds all of the model's parameters.
        written: the model directory.
        ids: tokens to run.
        machine: where to.

    Raises:
        ArtifactError: it cannot be loaded there, or computes something else.
    """
    kept = f"the checkpoint is whole ({checkpoint}); the same command tries again"
    measured = _ask({"checkpoint": str(checkpoint)}, "the trained model", written, ids, machine, kept)
    found = Restored(**measured, bound=EXACT)
    if not found.error <= found.bound:
        raise ArtifactError(
            f"the model that was written does not compute what was trained: its logits differ by {found.error:.2g} of "
            f"their norm, and {found.bound:g} is allowed",
            f"the checkpoint is whole ({checkpoint}), the model was not kept; please report this",
        )
    return found


def _ask(
    request: dict[str, Any], what: str, written: Path, ids: list[int], machine: Machine, kept: str
) -> dict[str, float]:
    """What a fresh process measures.

    Args:
        request: what the written model is compared with.
        what: it is called.
        written: its directory.
        ids: tokens to run.
        machine: where to.
        kept: what to say where the process fails.

    Raises:
        ArtifactError: it fails.
    """
    size = sum(path.stat().st_size for path in written.glob("*.safetensors"))
    device, dtype = machine.torch_device(), machine.torch_dtype(resolve_model(str(written)).config)
    request |= {
        "written": str(written),
        "ids": ids,
        "device": str(device),
        "dtype": str(torch.float32 if size <= _WIDE_BYTES or device.type == "cpu" else dtype).removeprefix("torch."),
        "kernel": machine.kernel,
        "trust_remote_code": machine.trust_remote_code,
    }
    # A process of its own, not one of those that trained.
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "lapcli.training.reload"],
        input=json.dumps(request), capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["?"])[-1]
        raise ArtifactError(f"{what} cannot be run by a fresh process: {said}", kept)
    return json.loads(done.stdout)


def _logits(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits.double().cpu()


def _compare(request: dict[str, Any]) -> dict[str, float]:
    options: dict[str, Any] = {
        "device": request["device"],
        "dtype": getattr(torch, request["dtype"]),
        "kernel": request["kernel"],
        "trust_remote_code": request["trust_remote_code"],
    }
    if "checkpoint" in request:
        return _compare_whole(request, options)
    settings, student = RecoverySettings.model_validate(request["settings"]), resolve_model(request["student"])
    model = load_model(student, **options)
    before = _logits(model, request["ids"])
    plan = plan_adapters(model, student.config, **settings.adapters())
    model = apply_adapters(model, plan)
    load_adapter(model, Path(request["adapter"]))
    unmerged = _logits(model.eval(), request["ids"])
    del model
    gc.collect()
    merged = _logits(load_model(resolve_model(request["written"]), **options), request["ids"])
    return {name: _relative(found, unmerged) for name, found in (("error", merged), ("effect", before))}


@torch.no_grad()
def _compare_whole(request: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    source = resolve_model(request["written"])
    model: Any = load_model(source, **options)
    written = _logits(model, request["ids"])
    trained = read_artifact(Path(request["checkpoint"]) / TENSORS_FILE, CHECKPOINT).tensors()
    found: list[Tensor] = []
    for rounded in (True, False):
        for name, parameter in model.named_parameters():
            value = trained[f"parameter/{name}"]
            stored = torch.float32 if source.tensors[name][1].dtype == "F32" else torch.bfloat16
            parameter.copy_(value.to(stored) if rounded else value)
        found.append(_logits(model, request["ids"]))
    as_stored, as_trained = found
    return {"error": _relative(written, as_stored), "rounding": _relative(as_stored, as_trained)}


def _relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_compare(json.load(sys.stdin))))
