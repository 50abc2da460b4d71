"""Memory that a kernel's programs meet in: counters that are zero between launches, and scratch."""

from typing import NamedTuple

import torch
from torch import Tensor

from lapkernels.errors import InvalidInput, KernelUnavailable


class Workspace(NamedTuple):
    """Where programs of one launch meet.

    Attributes:
        counters: int32, all zero before and after every launch.
        scratch: fp32, anything.
    """

    counters: Tensor
    scratch: Tensor

    @staticmethod
    def allocate(counters: int, numbers: int, device: torch.device | str) -> "Workspace":
        """A new one."""
        return Workspace(
            torch.zeros(counters, dtype=torch.int32, device=device),
            torch.empty(numbers, dtype=torch.float32, device=device),
        )


# Never freed: a CUDA graph that was captured with one goes on using it.
_kept: dict[torch.device, list[Workspace]] = {}


def shared_workspace(counters: int, numbers: int, device: torch.device) -> Workspace:
    """The workspace of a device, grown where it is too small.

    Launches that follow one another may share it, eager or replayed; steps that run at the same time on several
    streams of one device may not: give each its own.

    Raises:
        KernelUnavailable: it would have to grow while a CUDA graph is captured, where nothing can be set to zero.
    """
    kept = _kept.setdefault(device, [])
    if kept and kept[-1].counters.numel() >= counters and kept[-1].scratch.numel() >= numbers:
        return kept[-1]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelUnavailable(
            f"the workspace of {device} is too small for this step and cannot grow while a CUDA graph is captured; "
            "make the same step once before the capture, as a warm-up, or pass a workspace"
        )
    held = kept[-1] if kept else None
    # Doubled, so that batches that grow one by one do not leave many behind.
    counters = max(counters, 1 << 16, 2 * held.counters.numel() if held and held.counters.numel() < counters else 0)
    numbers = max(numbers, 1 << 20, 2 * held.scratch.numel() if held and held.scratch.numel() < numbers else 0)
    kept.append(Workspace.allocate(counters, numbers, device))
    return kept[-1]


def meeting_place(own: Workspace | None, counters: int, numbers: int, device: torch.device) -> Workspace:
    """The caller's own workspace, or the device's.

    Raises:
        InvalidInput: the caller's own is too small.
        KernelUnavailable: see `shared_workspace`.
    """
    if own is None:
        return shared_workspace(counters, numbers, device)
    if own.counters.numel() < counters or own.scratch.numel() < numbers:
        raise InvalidInput(
            f"the workspace has {own.counters.numel()} counters and {own.scratch.numel()} numbers; this step needs "
            f"{counters} and {numbers}"
        )
    return own
