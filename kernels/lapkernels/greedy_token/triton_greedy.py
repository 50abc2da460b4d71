"""One program a row: it finds the first group of neighbours that has the largest logit, then where in it that is.

A thread reads a group at once and keeps its maximum alone, so that hardly more is done for a logit than to read it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lapkernels._triton import may_begin_early
from lapkernels.decoding.configs import power_of_two
from lapkernels.decoding.triton_parts import take_turn

BLOCK = 32768
"""Logits at once: those of 16 bits that 32 warps read with four instructions of 16 bytes each."""


@triton.jit
def _larger(a, b):
    """The larger number; NaN where one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _as_large(x, largest):
    """Where the largest numbers are: NaN, where that is what is largest."""
    # As a block, since the interpreter takes a scalar's comparison for a number where it meets one.
    largest = tl.zeros_like(x) + largest
    return (x == largest) | ((x != x) & (largest != largest))


@triton.jit
def _greedy_kernel(logits_ptr, tokens_ptr, positions_ptr, slots_ptr, stride, width, BLOCK: tl.constexpr,
                   GROUP: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    position = tl.load(positions_ptr + row) + (tl.load(slots_ptr + row) >= 0).to(tl.int64)
    best, group = float("-inf"), 0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + at, mask=at < width, other=float("-inf")).to(tl.float32)
        most = tl.reduce(x.reshape(BLOCK // GROUP, GROUP), 1, _larger)
        largest = tl.reduce(most, 0, _larger)
        number = start // GROUP + tl.arange(0, BLOCK // GROUP)
        first = tl.min(tl.where(_as_large(most, largest), number, start + BLOCK), 0)
        # Nothing is larger than NaN.
        if (best == best) & ((largest > best) | (largest != largest)):
            best = largest
            group = first
    at = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(logits_ptr + at, mask=at < width, other=float("-inf")).to(tl.float32)
    token = tl.min(tl.where(_as_large(x, best), at, width), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(positions_ptr + row, position)


def greedy_token_triton(logits: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Arguments as `greedy_token` has checked them."""
    (rows, width), early = logits.shape, may_begin_early(logits.device)
    if not rows:
        return
    group = 16 // logits.element_size()
    # Rows that begin anywhere are read number by number, for which there are fewer registers.
    most = BLOCK if logits.stride(0) % group == 0 else BLOCK // 2
    block = max(group, min(most, power_of_two(width)))
    launch: Any = _greedy_kernel[(rows,)]
    with torch.cuda.device(logits.device.index if logits.is_cuda else -1):
        launch(
            logits, tokens, positions, slots, logits.stride(0), width, BLOCK=block, GROUP=group,
            EARLY=early, num_warps=max(1, min(32, block // 512)), launch_pdl=early,
        )  # fmt: skip
