"""The contract of the operator's arguments, checked in the same way for every implementation."""

from typing import NamedTuple

import torch
from torch import Tensor

from lapkernels.delta_rule.validation import check_boundaries
from lapkernels.errors import InvalidInput

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Sizes(NamedTuple):
    """The axes of one call."""

    batch: int
    time: int
    query_heads: int
    heads: int
    states: int
    key_width: int
    value_width: int
    sequences: int
    """`batch`, or the number of packed sequences."""


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    mixture: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> Sizes:
    """Check the arguments of `dual_state` and return their sizes. Reads shapes only, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise InvalidInput(f"{name} should have the axes [B, T, heads, width], and has shape {_shape(tensor)}")
    if g.ndim != 5:
        raise InvalidInput(f"g should have the axes [B, T, states, H, K], and has shape {_shape(g)}")
    batch, time, query_heads, key_width = q.shape
    heads, value_width, states = k.shape[2], v.shape[3], g.shape[2]
    if time < 1:
        raise InvalidInput("q has no time step: T should be 1 or more")
    if min(batch, query_heads, heads, key_width, value_width, states) < 1:
        raise InvalidInput(f"an axis is empty: q {_shape(q)}, k {_shape(k)}, v {_shape(v)}, g {_shape(g)}")
    if query_heads % heads:
        raise InvalidInput(f"q has HQ = {query_heads} heads, which is no multiple of the H = {heads} heads of k and v")
    sequences = batch
    if cu_seqlens is not None:
        sequences = check_boundaries(cu_seqlens, batch)

    for name, tensor, wanted in (
        ("k", k, (batch, time, heads, key_width)),
        ("v", v, (batch, time, heads, value_width)),
        ("g", g, (batch, time, states, heads, key_width)),
        ("mixture", mixture, (states,)),
        ("initial_state", initial_state, (sequences, states, heads, key_width, value_width)),
    ):
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise InvalidInput(f"{name} has shape {_shape(tensor)}; it should be {list(wanted)}")
    for name, tensor in (
        ("q", q), ("k", k), ("v", v), ("g", g), ("mixture", mixture), ("initial_state", initial_state),
    ):  # fmt: skip
        if tensor is None:
            continue
        if tensor.dtype not in _FLOATS:
            raise InvalidInput(f"{name} has dtype {tensor.dtype}; it should be fp64, fp32, bf16 or fp16")
        if tensor.device != q.device:
            raise InvalidInput(f"{name} is on {tensor.device}, q on {q.device}; they should be on one device")
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidInput(f"q, k and v should share a dtype, and have {q.dtype}, {k.dtype}, {v.dtype}")
    if chunk_size < 1:
        raise InvalidInput(f"chunk_size is {chunk_size}; it should be 1 or more")
    return Sizes(batch, time, query_heads, heads, states, key_width, value_width, sequences)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
