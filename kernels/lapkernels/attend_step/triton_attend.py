"""The step's kernels: a program reads a share of one row's tokens for one key head; a second one joins the shares."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lapkernels.decoding.configs import power_of_two

_TOKENS = 64
"""Tokens that a program takes at a time, where their keys and values are not too wide."""
_TILE_BYTES = 32768
"""Of keys and values that a program takes at a time, at most: two such lie in 100 KB of shared memory."""
_PROGRAMS = 264
"""That a GPU should have at least to be busy: two for each of an H200's multiprocessors."""


@triton.jit
def _attend_shares(
    query, key, value, keys, values, pages, position, slots, sums, peaks, totals,
    query_row, query_head, key_row, key_head, value_row, value_head,
    keys_page, keys_head, keys_token, values_page, values_head, values_token, pages_slot,
    scale, window,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    BG: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    SHARES: tl.constexpr, WINDOWED: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    row, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    # A padding row has no tokens.
    at = tl.where(slot < 0, 0, tl.load(position + row).to(tl.int64))
    g, kk, vv, nn = tl.arange(0, BG), tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BN)
    row64, head64 = row.to(tl.int64), head.to(tl.int64)
    q = tl.load(
        query + row64 * query_row + (head64 * G + g)[:, None] * query_head + kk[None, :],
        mask=(g < G)[:, None] & (kk < K)[None, :],
        other=0.0,
    )  # [BG, BK]
    first = at * 0
    if WINDOWED:
        first = tl.maximum(at + 1 - window, 0)
    # Blocks begin at multiples of their size, so that each lies in one page.
    low = first // BN * BN
    size = tl.cdiv(tl.cdiv(at - low, SHARES), BN) * BN
    begin = low + share * size
    end = tl.minimum(begin + size, at)
    table = pages + slot * pages_slot

    peak = tl.full((BG,), float("-inf"), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    found = tl.zeros((BG, BV), tl.float32)
    if (share == 0) & (slot >= 0):
        # The new token comes from where it is, and no other program reads where it goes.
        new_key = tl.load(key + row64 * key_row + head64 * key_head + kk, mask=kk < K, other=0.0)
        new_value = tl.load(value + row64 * value_row + head64 * value_head + vv, mask=vv < V, other=0.0)
        page = tl.load(table + at // P).to(tl.int64)
        to_key = keys + page * keys_page + head64 * keys_head + at % P * keys_token + kk
        to_value = values + page * values_page + head64 * values_head + at % P * values_token + vv
        tl.store(to_key, new_key.to(keys.dtype.element_ty), mask=kk < K)
        tl.store(to_value, new_value.to(values.dtype.element_ty), mask=vv < V)
        peak = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
        total = tl.full((BG,), 1.0, tl.float32)
        found = tl.zeros((BG, BV), tl.float32) + new_value.to(tl.float32)[None, :]
    for start in range(begin, end, BN):
        token = start + nn
        there = (token >= first) & (token < end)
        index = start // P
        page = tl.load(table + index).to(tl.int64)
        place = start - index * P + nn
        k = tl.load(
            keys + page * keys_page + head64 * keys_head + place[None, :] * keys_token + kk[:, None],
            mask=there[None, :] & (kk < K)[:, None],
            other=0.0,
        )  # [BK, BN]
        v = tl.load(
            values + page * values_page + head64 * values_head + place[:, None] * values_token + vv[None, :],
            mask=there[:, None] & (vv < V)[None, :],
            other=0.0,
        )  # [BN, BV]
        if IEEE:
            scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee") * scale
        else:
            scores = tl.dot(q, k.to(q.dtype)) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp(peak - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        if IEEE:
            more = tl.dot(weights, v.to(tl.float32), input_precision="ieee")
        else:
            more = tl.dot(weights.to(q.dtype), v.to(q.dtype))
        found = found * shrink[:, None] + more
        peak = higher
    place = ((row64 * H + head64) * G + g) * SHARES + share
    tl.store(peaks + place, peak, mask=g < G)
    tl.store(totals + place, total, mask=g < G)
    tl.store(sums + place[:, None] * V + vv[None, :], found, mask=(g < G)[:, None] & (vv < V)[None, :])


@triton.jit
def _join_shares(
    sums, peaks, totals, output, V: tl.constexpr, BV: tl.constexpr, SHARES: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    ss, vv = tl.arange(0, SHARES), tl.arange(0, BV)
    peak = tl.load(peaks + head * SHARES + ss)
    total = tl.load(totals + head * SHARES + ss)
    found = tl.load(sums + (head * SHARES + ss)[:, None] * V + vv[None, :], mask=(vv < V)[None, :], other=0.0)
    highest = tl.max(peak, axis=0)
    # A share without tokens, and a padding row's, has no peak.
    weight = tl.where(total > 0, tl.exp(peak - tl.where(highest == float("-inf"), 0.0, highest)), 0.0)
    whole = tl.sum(weight * total, axis=0)
    read = tl.sum(weight[:, None] * found, axis=0) / tl.where(whole > 0, whole, 1.0)
    tl.store(output + head * V + vv, read.to(output.dtype.element_ty), mask=vv < V)


def tokens_of(key_block: int, value_block: int, itemsize: int) -> int:
    """How many tokens a program takes at a time: a power of two, 16 at least, as a matrix product asks."""
    tokens = _TOKENS
    while tokens > 16 and tokens * (key_block + value_block) * itemsize > _TILE_BYTES:
        tokens //= 2
    return tokens


def shares_of(programs: int, length: int) -> int:
    """How many programs share a row's tokens: a power of two, so many that the GPU is busy where the rows are long.

    It depends on shapes alone, so that a graph that was captured holds for rows of any length.
    """
    shares = 1
    while shares < 64 and programs * shares < _PROGRAMS and shares * 2 * _TOKENS <= length:
        shares *= 2
    return shares


def attend_step_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    position: Tensor,
    slots: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Run the step. Arguments as `attend_step` has checked and completed them; returns `[B, HQ, V]`."""
    batch, query_heads, key_width = query.shape
    heads, page, value_width = key.shape[1], keys.shape[2], values.shape[-1]
    group, shares = query_heads // heads, shares_of(batch * heads, pages.shape[1] * page)
    output = torch.empty(batch, query_heads, value_width, dtype=query.dtype, device=query.device)
    sums = torch.empty(batch * query_heads * shares * value_width, dtype=torch.float32, device=query.device)
    peaks, totals = torch.empty(2, batch * query_heads * shares, dtype=torch.float32, device=query.device)
    attend_shares: Any = _attend_shares
    join_shares: Any = _join_shares
    # A matrix product has 16 rows at least.
    key_block, value_block = (power_of_two(max(width, 16)) for width in (key_width, value_width))
    blocks: dict[str, Any] = {"BV": value_block, "SHARES": shares, "num_warps": 4}
    with torch.cuda.device(query.device.index if query.is_cuda else -1):
        attend_shares[(batch, heads, shares)](
            query, key, value, keys, values, pages, position, slots, sums, peaks, totals,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
            pages.stride(0), scale, window or 0,
            H=heads, G=group, K=key_width, V=value_width, P=page,
            BG=power_of_two(max(group, 16)), BK=key_block,
            BN=min(page, tokens_of(key_block, value_block, keys.element_size())), num_stages=2,
            WINDOWED=window is not None, IEEE=query.dtype == torch.float32, **blocks,
        )  # fmt: skip
        join_shares[(batch * query_heads,)](sums, peaks, totals, output, V=value_width, **blocks)
    return output
