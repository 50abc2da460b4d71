"""The contract of the arguments, checked in the same way for every implementation."""

import torch
from torch import Tensor

from lapkernels.decoding.rows import check_contiguous, check_last_axis, check_tensor
from lapkernels.errors import InvalidInput


def check_arguments(logits: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Check the arguments of `greedy_token`. Reads shapes only, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    if logits.ndim != 2 or not logits.shape[1]:
        raise InvalidInput(f"logits have shape {list(logits.shape)}; they should be [B, vocabulary], a token at least")
    check_tensor("logits", logits, tuple(logits.shape), logits.device)
    check_last_axis("logits", logits)
    for name, rows, dtypes in (
        ("tokens", tokens, (torch.int64,)),
        ("positions", positions, (torch.int64,)),
        ("slots", slots, (torch.int32, torch.int64)),
    ):
        if tuple(rows.shape) != (len(logits),) or rows.dtype not in dtypes:
            wanted = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise InvalidInput(
                f"{name} has shape {list(rows.shape)} and dtype {rows.dtype}; it should be [{len(logits)}], {wanted}"
            )
        check_contiguous(name, rows)
        if rows.device != logits.device:
            raise InvalidInput(f"{name} is on {rows.device}, logits on {logits.device}; they should be on one device")
