"""Whether a merged checkpoint computes what was trained: both are read from disk and run by a fresh process.

The process loads the model that was trained and gives it the saved adapter, unmerged; then it loads the merged
checkpoint as any user would; then it compares their logits on a few tokens.

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

from lapcli.errors import ArtifactError
from lapcli.families.loading import load_model
from lapcli.families.source import ModelSource, resolve_model
from lapcli.machine import Machine
from lapcli.recipe import RecoverySettings
from lapcli.training.adapters import apply_adapters, load_adapter, plan_adapters

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
    size = sum(path.stat().st_size for path in merged.glob("*.safetensors"))
    device, dtype = machine.torch_device(), machine.torch_dtype(student.config)
    request: dict[str, Any] = {
        "student": str(student.path),
        "settings": settings.document(),
        "adapter": str(adapter),
        "merged": str(merged),
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
        raise ArtifactError(
            f"the merged model cannot be run by a fresh process: {(done.stderr.strip().splitlines() or ['?'])[-1]}",
            f"the adapter is whole ({adapter}); the same command tries again from the last checkpoint",
        )
    stored = {entry.dtype for header in resolve_model(str(merged)).headers for entry in header.tensors.values()}
    measured = json.loads(done.stdout)
    bound = EXACT if stored == {"F32"} else max(ROUNDED, measured["effect"] / 2)
    found = Reloaded(**measured, bound=bound)
    if not found.error <= found.bound:
        raise ArtifactError(
            f"the merged model does not compute what was trained: its logits differ by {found.error:.2g} of their "
            f"norm, and {found.bound:g} is allowed",
            f"the adapter is whole ({adapter}), the merged model was not kept; please report this",
        )
    return found


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
    settings, student = RecoverySettings.model_validate(request["settings"]), resolve_model(request["student"])
    model = load_model(student, **options)
    before = _logits(model, request["ids"])
    plan = plan_adapters(model, student.config, **settings.adapters())
    model = apply_adapters(model, plan)
    load_adapter(model, Path(request["adapter"]))
    unmerged = _logits(model.eval(), request["ids"])
    del model
    gc.collect()
    merged = _logits(load_model(resolve_model(request["merged"]), **options), request["ids"])
    return {name: _relative(found, unmerged) for name, found in (("error", merged), ("effect", before))}


def _relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_compare(json.load(sys.stdin))))
