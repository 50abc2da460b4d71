"""The contract of the operator's arguments, checked in the same way for every implementation."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from lapkernels.delta_rule.gates import RawGates
from lapkernels.errors import InvalidInput

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Sizes(NamedTuple):
    """The axes of one call."""

    batch: int
    time: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    sequences: int
    """`batch`, or the number of packed sequences."""


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    erase: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
    chunk_size: int,
    lamb: Tensor | None = None,
    released: bool = False,
) -> Sizes:
    """Check the arguments of `delta_rule` and return their sizes. Reads shapes only, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise InvalidInput(f"{name} should have the axes [B, T, heads, width], and has shape {_shape(tensor)}")
    batch, time, key_heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    if time < 1:
        raise InvalidInput("q has no time step: T should be 1 or more")
    if min(batch, key_heads, key_width, value_heads, value_width) < 1:
        raise InvalidInput(f"an axis is empty: q {_shape(q)}, v {_shape(v)}")
    if value_heads % key_heads:
        raise InvalidInput(
            f"v has HV = {value_heads} heads, which is no multiple of the H = {key_heads} heads of q and k"
        )
    sequences = batch
    if cu_seqlens is not None:
        sequences = check_boundaries(cu_seqlens, batch)

    _check_shape("k", k, (batch, time, key_heads, key_width))
    _check_shape("v", v, (batch, time, value_heads, value_width))
    _check_shape("beta", beta, (batch, time, value_heads))
    if g is not None and tuple(g.shape) != (batch, time, value_heads, key_width):
        if g.ndim == 4:
            raise InvalidInput(
                f"g has shape {_shape(g)}; it should be {[batch, time, value_heads]}, or "
                f"{[batch, time, value_heads, key_width]} for a decay of each key channel"
            )
        _check_shape("g", g, (batch, time, value_heads))
    if released and g is not None and g.ndim == 4:
        raise InvalidInput(
            f"released=True with a decay of each key channel (g has shape {_shape(g)}): Q-Delta's released kernels "
            "have none; g should be [B, T, HV]"
        )
    if lamb is not None:
        if erase is not None:
            raise InvalidInput("erase and lamb both say what is erased; lamb means k + lamb q, so give one of the two")
        _check_shape("lamb", lamb, (batch, time, value_heads))
    elif released:
        raise InvalidInput("released=True is about query feedback, and there is no lamb")
    if erase is not None:
        if qk_l2norm:
            raise InvalidInput(
                "qk_l2norm=True with an erase direction: whether the erase direction is built before or after "
                "the normalisation is the caller's to say, so normalise q and k first (l2_normalise), or give lamb"
            )
        if tuple(erase.shape) != (batch, time, value_heads, key_width):
            _check_shape("erase", erase, (batch, time, key_heads, key_width))
    if initial_state is not None:
        _check_shape("initial_state", initial_state, (sequences, value_heads, key_width, value_width))

    for name, tensor in (
        ("q", q), ("k", k), ("v", v), ("beta", beta), ("g", g), ("erase", erase), ("lamb", lamb),
        ("initial_state", initial_state),
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
    return Sizes(batch, time, key_heads, value_heads, key_width, value_width, sequences)


def check_gates(gates: RawGates, g: Tensor | None, sizes: Sizes, device: torch.device) -> None:
    """Check what `beta` and `g` still have to go through. Reads shapes only, never values.

    Raises:
        InvalidInput: a parameter of the wrong shape, place or dtype, or one without what it belongs to.
    """
    if gates.strength is not None and not gates.strength > 0:
        raise InvalidInput(f"gates.strength is {gates.strength}; it should be above 0")
    if gates.A_log is not None and g is None:
        raise InvalidInput("gates.A_log says how g makes the decay; there is no g")
    if gates.dt_bias is not None and gates.A_log is None:
        raise InvalidInput("without gates.A_log, g is the log decay itself; gates.dt_bias has no meaning")
    if gates.decay_lower_bound is not None:
        if gates.A_log is None:
            raise InvalidInput("without gates.A_log, g is the log decay itself; gates.decay_lower_bound has no meaning")
        if not gates.decay_lower_bound < 0:
            raise InvalidInput(f"gates.decay_lower_bound is {gates.decay_lower_bound}; it should be below 0")
    heads = (sizes.value_heads,)
    biases = heads if g is None or g.ndim == 3 else (*heads, sizes.key_width)
    for name, tensor, shape in (("gates.A_log", gates.A_log, heads), ("gates.dt_bias", gates.dt_bias, biases)):
        if tensor is not None:
            _check_shape(name, tensor, shape)
            if tensor.dtype not in _FLOATS:
                raise InvalidInput(f"{name} has dtype {tensor.dtype}; it should be fp64, fp32, bf16 or fp16")
            if tensor.device != device:
                raise InvalidInput(f"{name} is on {tensor.device}, q on {device}; they should be on one device")


def read_boundaries(cu_seqlens: Tensor, time: int) -> list[int]:
    """The boundaries of packed sequences as integers. Waits for the device when they lie on one.

    Raises:
        InvalidInput: they do not rise strictly from 0 to `time`.
    """
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != time:
        raise InvalidInput(f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it should run from 0 to T = {time}")
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if stop <= start:
            raise InvalidInput(f"cu_seqlens gives sequence {index} no token (from {start} to {stop})")
    return bounds


def check_boundaries(cu_seqlens: Tensor, batch: int) -> int:
    """The number of packed sequences that boundaries speak of. Reads their shape and dtype, never values.

    Raises:
        InvalidInput: they are no row of integers, or there is more than one row of tokens.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(
            f"cu_seqlens should be a row of two or more int32 or int64 boundaries; it has shape {_shape(cu_seqlens)} "
            f"and dtype {cu_seqlens.dtype}"
        )
    if batch != 1:
        raise InvalidInput(f"with cu_seqlens the sequences are packed in one row, but B = {batch}")
    return cu_seqlens.numel() - 1


def _check_shape(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise InvalidInput(f"{name} has shape {_shape(tensor)}; it should be {list(wanted)}")


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
