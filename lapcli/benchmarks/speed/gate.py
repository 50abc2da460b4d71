"""Whether a way computes what it should, asked before it is timed."""

from typing import NamedTuple

import torch
from torch import Tensor

ROWS_AT_ONCE = 16


class Verdict(NamedTuple):
    """What a comparison says.

    Attributes:
        share: the largest error over what is allowed of it; above 1 is wrong.
        text: which error that is.
    """

    share: float
    text: str

    @property
    def right(self) -> bool:
        """Whether the results may be timed."""
        return self.share <= 1


def compare(actual: Tensor, truth: Tensor, yardstick: Tensor, dtype: torch.dtype, terms: int = 1) -> Verdict:
    """Hold results against the truth, on the device where they lie.

    Allowed is what `lapkernels.testing.precisions` allows: twice the yardstick's own error, and the rounding of `terms`
    summands of the largest result; for the largest entry and for the root mean square.

    Args:
        actual: `[B, ...]`; row b should be row `b % R` of the truth.
        truth: `[R, ...]`, from a wider dtype.
        yardstick: `[R, ...]`, what a plain computation in `dtype` gives.
        dtype: the one whose rounding is allowed.
        terms: as there.
    """
    rows = truth.shape[0]
    if actual.shape[1:] != truth.shape[1:]:
        return Verdict(float("inf"), f"shape {list(actual.shape)}, not {list(truth.shape)}")
    largest = squares = 0.0
    for start in range(0, actual.shape[0], ROWS_AT_ONCE):
        part = actual[start : start + ROWS_AT_ONCE].double()
        index = torch.arange(start, start + part.shape[0], device=truth.device) % rows
        difference = part - truth[index].to(part.device).double()
        # One that is not finite must not hide behind a maximum that passes NaN over.
        if not bool(difference.isfinite().all()):
            return Verdict(float("inf"), "a result is not finite")
        largest = max(largest, float(difference.abs().max()))
        squares += float(difference.square().sum())
    eps = torch.finfo(dtype).eps * terms**0.5
    exact = truth.double()
    plain = yardstick.double() - exact
    found = {
        "largest": (largest, 2 * float(plain.abs().max()) + eps * float(exact.abs().max())),
        "rms": ((squares / actual.numel()) ** 0.5, 2 * _rms(plain) + eps * _rms(exact)),
    }
    worst = max(found, key=lambda kind: _share(*found[kind]))
    error, allowed = found[worst]
    return Verdict(_share(error, allowed), f"{worst} error {error:.3e}, allowed {allowed:.3e}")


def _share(error: float, allowed: float) -> float:
    return error / allowed if allowed > 0 else 0.0 if error == 0 else float("inf")


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
