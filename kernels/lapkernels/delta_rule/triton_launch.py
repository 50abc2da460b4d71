"""What the Triton kernels of the chunked form are launched with: tiles, scratch, and how packed sequences lie."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from lapkernels.decoding.configs import power_of_two
from lapkernels.delta_rule.gates import GIVEN, RawGates
from lapkernels.delta_rule.reference import compute_dtype
from lapkernels.delta_rule.triton_channels import channel_pairs, decay_channels, invert
from lapkernels.delta_rule.triton_chunked import prepare, walk
from lapkernels.delta_rule.validation import read_boundaries

CHUNK = 64
"""C: four blocks of 16 steps, the smallest that tensor cores take."""

LEVELS = CHUNK.bit_length() - 1
"""How often a chunk can be halved."""

BY_CHANNEL = {"ERASE": True, "ERASE_R": True}
"""What a walk is told whose directions have decays of their own: each value head has all three of them."""


class Tiles(NamedTuple):
    """How the walk is cut up; `prepare` is always single warps.

    Attributes:
        value_block: BV, channels of V that a program holds.
        warps: of a program.
        stages: of its loads.
        q_late: whether q is loaded for the chunk at hand alone, which leaves shared memory for another program.
    """

    value_block: int
    warps: int
    stages: int
    q_late: bool = False


class Kept(NamedTuple):
    """What a backward pass needs of the forward pass.

    Attributes:
        total: running sums of the log decay, `[M, HV, C]`, of each key channel `[M, HV, C, K]`; empty without a gate.
        pairs: M with the scale, and `(I + A)^-1` transposed with and without beta, `[M, HV, 3, C, C]` (see `prepare`).
        factors: of rows, `[M, HV, 4, C]` (see `prepare`).
        kept: the decay over each chunk, `[M, HV]`, of each key channel `[M, HV, K]`.
        norms: one over the lengths of q and of k, `[2, M, H, C]`; empty without normalisation.
        starts: the state before each chunk, `[M, HV, K, V]`.
        updates: U, what is written, `[M, HV, C, V]`.
        decayed: read, erase and write directions with the decays of their channels, `[3, M C, HV, K]`; empty without.
    """

    total: Tensor
    pairs: Tensor
    factors: Tensor
    kept: Tensor
    norms: Tensor
    starts: Tensor
    updates: Tensor
    decayed: Tensor


def key_tile(width: int) -> int:
    """Channels of K that one program, or one turn of its loop, holds where they need not meet."""
    if width % 64 in range(1, 33) and width > 32:
        return 32
    return min(64, max(16, power_of_two(width)))


def key_blocks(width: int) -> tuple[int, int]:
    """K as one block of a power of two, or as two where that covers less: 96 is 64 + 32, 100 is 128."""
    whole = max(16, power_of_two(width))
    half = whole // 2
    if half < 16 or width <= half:
        return whole, 0
    rest = max(16, power_of_two(width - half))
    return (half, rest) if half + rest < whole else (whole, 0)


def choose_tiles(
    key_width: int, value_width: int, dtype: torch.dtype, states: int = 1 << 20, *, erasing: bool = False
) -> Tiles:
    """The tiles for a call.

    Args:
        key_width: K.
        value_width: V.
        dtype: of q, k and v.
        states: sequences times value heads.
        erasing: whether erase directions are operands of their own.
    """
    if dtype == torch.float32:
        return Tiles(min(power_of_two(max(16, value_width)), 32 if key_width <= 128 else 16), 4, 1)
    if erasing and key_width > 192:
        # Three operands of which two chunks are under way take more than the 227 KiB of a Hopper.
        return Tiles(64, 8, 1)
    # Four warps a program, whatever the widths: eight were slower in every shape on an H200. Wide blocks load q, k and
    # pairs once; they pay where the state fits its registers and there are enough of them for all multiprocessors.
    if key_width <= 64 and value_width >= 128 and states * -(-value_width // 128) >= 128:
        return Tiles(128, 4, 2)
    # 64 even where V is less: compiled by triton 3.6, blocks of 32 ended in illegal accesses on an H200. Of 128
    # channels two programs share a multiprocessor where q is in no pipeline: worth it where they queue.
    shared = 96 < key_width <= 128 and states * -(-value_width // 64) > 2 * 132
    return Tiles(64, 4, 2, q_late=shared)


class Layout(NamedTuple):
    """How steps make chunks; the tensors are `None` for rows of one length."""

    count: int
    chunks: int
    all_chunks: int
    table: Tensor | None
    bounds: Tensor | None
    chunk_starts: Tensor | None


@lru_cache(maxsize=8)
def _packed_layout(bounds: tuple[int, ...], device: torch.device) -> Layout:
    with torch.inference_mode(False):
        lengths = torch.tensor(bounds).diff()
        counts = (lengths + CHUNK - 1) // CHUNK
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
        index = torch.arange(int(starts[-1])) - starts[sequence]
        table = torch.stack((sequence, index), 1).to(device, torch.int32)
        return Layout(
            len(counts), 0, len(table), table,
            torch.tensor(bounds, dtype=torch.int32).to(device), starts.to(device, torch.int32),
        )  # fmt: skip


def layout_of(q: Tensor, cu_seqlens: Tensor | None) -> Layout:
    """How a call's steps make chunks; reads the boundaries of packed sequences."""
    batch, time = q.shape[:2]
    if cu_seqlens is None:
        chunks = -(-time // CHUNK)
        return Layout(batch, chunks, batch * chunks, None, None, None)
    return _packed_layout(tuple(read_boundaries(cu_seqlens, time)), q.device)


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    erase: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    gates: RawGates = GIVEN,
    qk_l2norm: bool = False,
    norm_eps: float = 1e-6,
    final_state: bool = True,
    keep: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor | None, Kept | None]:
    """Run the forward pass. Arguments as `delta_rule` has checked and completed them; `erase` `None` means `k`.

    Args:
        q: as of `delta_rule`, like the following ones.
        k: likewise.
        v: likewise.
        beta: likewise.
        g: likewise.
        erase: likewise.
        scale: likewise.
        initial_state: likewise.
        cu_seqlens: likewise.
        gates: likewise.
        qk_l2norm: whether q and k are still to be normalised.
        norm_eps: added to their squared lengths.
        final_state: whether to return it.
        keep: whether to keep what a backward pass needs.
        tiles: instead of `choose_tiles`.

    Returns:
        The output `[B, T, HV, V]` in v's dtype, the final state in fp32, and what is kept.
    """
    _, time, key_heads, key_width = q.shape
    value_heads, value_width = v.shape[2:]
    wide = compute_dtype(q)
    layout = layout_of(q, cu_seqlens)
    if tiles is None:
        own_erase = erase is not None or (g is not None and g.ndim == 4)
        tiles = choose_tiles(key_width, value_width, q.dtype, layout.count * value_heads, erasing=own_erase)
    all_chunks = layout.all_chunks
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    x = k if erase is None else erase if erase.stride(-1) == 1 else erase.contiguous()
    gate = beta if g is None else g
    by_channel = gate.ndim == 4
    repeats = value_heads // key_heads
    per_value_head = erase is not None and erase.shape[2] == value_heads and repeats > 1
    block0, block1 = key_blocks(key_width)

    exact = q.dtype == torch.float32
    per_chunk = (all_chunks, value_heads)
    running = torch.float64 if exact else torch.float32
    summed = (*per_chunk, CHUNK, key_width) if by_channel else (*per_chunk, CHUNK) if keep and g is not None else (0,)
    total = empty(q, summed, dtype=running)
    pairs = empty(q, (*per_chunk, 3 if keep else 2, CHUNK, CHUNK))
    factors = empty(q, (*per_chunk, 4, CHUNK), dtype=wide)
    kept = empty(q, (*per_chunk, key_width) if by_channel else per_chunk, dtype=wide)
    decayed = empty(q, (3, all_chunks * CHUNK, value_heads, key_width) if by_channel else (0,))
    norms = empty(q, (2, all_chunks, key_heads, CHUNK) if keep and qk_l2norm else (0,), dtype=wide)
    output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final = empty(q, (layout.count, value_heads, key_width, value_width) if final_state else (0,), dtype=wide)
    starts = empty(q, (*per_chunk, key_width, value_width) if keep else (0,))
    updates = empty(q, (*per_chunk, CHUNK, value_width) if keep else (0,))
    initial = final if initial_state is None else initial_state.contiguous()
    table, bounds, chunk_starts = (
        total if each is None else each for each in (layout.table, layout.bounds, layout.chunk_starts)
    )
    shared: dict[str, Any] = {
        "H": key_heads, "R": repeats, "K": key_width, "C": CHUNK, "ERASE": erase is not None,
        "ERASE_R": per_value_head, "PACKED": cu_seqlens is not None, "KEEP": keep,
    }  # fmt: skip
    precision, solve = "ieee" if exact else "tf32", tl.float32 if exact else tl.float16
    programs = (all_chunks * value_heads,)
    strides = (*q.stride()[:3], *k.stride()[:3], *x.stride()[:3])
    last: Any = walk[(layout.count * value_heads * -(-value_width // tiles.value_block),)]
    with on_device(q):
        if by_channel:
            # A before it is inverted, as fp16 like the products that invert it.
            lower = empty(q, (*per_chunk, CHUNK, CHUNK), dtype=torch.float32 if exact else torch.float16)
            each: Any = decay_channels[programs]
            channels = min(32, key_tile(key_width))
            each(
                q, k, x, gate, beta, decayed, total, pairs, factors, kept, norms, table, bounds, scale,
                gates.strength or 1.0, time, layout.chunks, all_chunks, *strides, *gate.stride(), *beta.stride(),
                **shared, BK=channels, NORM=qk_l2norm, EPS=norm_eps, RAW=gates.strength is not None, num_warps=8,
            )  # fmt: skip
            each = channel_pairs[programs]
            each(
                q, k, x, total, pairs, lower, factors, table, bounds, time, layout.chunks, *strides, **shared,
                BK=channels, LEVELS=LEVELS, PRECISION=precision, num_warps=2, num_stages=1,
            )  # fmt: skip
            each = invert[programs]
            each(lower, pairs, factors, C=CHUNK, KEEP=keep, SOLVE=solve, num_warps=1)
            q, x, k = decayed.unsqueeze(1)
            strides = (*q.stride()[:3], *k.stride()[:3], *x.stride()[:3])
            shared |= BY_CHANNEL
        else:
            each = prepare[programs]
            each(
                q, k, x, gate, beta, *gate_parameters(gates, factors), total, pairs, factors, kept, norms, table,
                bounds, scale, gates.strength or 1.0, time, layout.chunks, all_chunks, *strides, *gate.stride(),
                *beta.stride(), **shared, BK=min(16 if exact else 64, max(16, power_of_two(key_width))),
                GATED=g is not None, NORM=qk_l2norm, EPS=norm_eps, SOLVE=solve, PRECISION=precision,
                **gate_flags(gates), num_warps=1, num_stages=1,
            )  # fmt: skip
        last(
            q, k, x, v, output, pairs, factors, kept, initial, final, starts, updates, bounds, chunk_starts,
            time, layout.chunks, *strides, *v.stride()[:3], *output.stride()[:3], **shared,
            V=value_width, BK0=block0, BK1=block1, BV=tiles.value_block, INITIAL=initial_state is not None,
            FINAL=final_state, Q_LATE=tiles.q_late, BY_CHANNEL=by_channel, PRECISION=precision,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    everything = Kept(total, pairs, factors, kept, norms, starts, updates, decayed) if keep else None
    return output, final if final_state else None, everything


def gate_parameters(gates: RawGates, none: Tensor) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias; a pointer that is never followed for what there is not."""
    found = (gates.A_log, gates.dt_bias)
    return tuple(none if each is None else each.contiguous() for each in found)  # pyright: ignore[reportReturnType]


def gate_flags(gates: RawGates) -> dict[str, bool]:
    """Which activations are still to be done, as kernels are told."""
    return {
        "RAW": gates.strength is not None, "RATED": gates.A_log is not None, "DT_BIAS": gates.dt_bias is not None
    }  # fmt: skip


def on_device(x: Tensor) -> Any:
    """Launch where a tensor lies; nothing on a CPU."""
    return torch.cuda.device(x.device.index if x.is_cuda else -1)


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Fresh memory beside a tensor, of its dtype unless another is named."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
