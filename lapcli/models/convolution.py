"""The short causal convolution before the state, with its memory: one filter a channel or a head.

On a GPU it is a kernel of `lapkernels.short_conv`, forward and backward; elsewhere, and compiled, plain PyTorch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lapcli.models.precision import by_one_kernel, widened
from lapcli.models.tokens import Packing, Padding
from lapkernels.short_conv import select_impl, short_conv


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time, then SiLU where asked for. Sums are fp32, the output has x's dtype.

    Args:
        channels: how many.
        width: W, taps of a filter; the last one meets the current token.
        silu: whether SiLU follows.
        heads: where the channels of a head share a filter, how many heads there are; `None` for one filter a channel.

    Attributes:
        weight: `[channels, 1, W]`, as in fla and `nn.Conv1d`; `[heads, 1, W]` where filters are shared.
    """

    def __init__(self, channels: int, width: int, silu: bool, heads: int | None = None):
        super().__init__()
        self.channels = channels
        self.width = width
        self.silu = silu
        self.weight = nn.Parameter(torch.empty(channels if heads is None else heads, 1, width))

    def filters(self) -> Tensor:
        """The filter of every channel, `[channels, W]`, in the weight's dtype."""
        shared = self.channels // self.weight.shape[0]
        filters = self.weight.squeeze(1)
        return filters if shared == 1 else filters.repeat_interleave(shared, dim=0)

    def extra_repr(self) -> str:
        """Show the sizes."""
        shared = "" if len(self.weight) == self.channels else f", filters={len(self.weight)}"
        return f"{self.channels}{shared}, width={self.width}, silu={self.silu}"

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        padding: Padding | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve; arguments and results are those of `convolve` for one convolution."""
        (y,), states = convolve((self,), (x,), None if state is None else (state,), padding, packing)
        return y, states[0]


def convolve(
    layers: Sequence[ShortConvolution],
    inputs: Sequence[Tensor],
    states: Sequence[Tensor] | None = None,
    padding: Padding | None = None,
    packing: Packing | None = None,
    *,
    keep_states: bool = True,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run several convolutions of one width, all with SiLU or all without, as one over the joined channels.

    Args:
        layers: the convolutions.
        inputs: `[B, T, channels]` each; `[1, T, channels]` with `packing`.
        states: `[B or sequences, W - 1, channels]` each, the inputs before these; `None` for zeros.
        padding: positions to pass over, as if they were not there; outputs there mean nothing.
        packing: sequences that must not see one another.
        keep_states: whether the new states are wanted.

    Returns:
        The outputs `[B, T, channels]` and the new states, the last `W - 1` inputs of each row or sequence; no states
        where they are not wanted.
    """
    past, time = layers[0].width - 1, inputs[0].shape[1]
    if padding is not None and time > 1:
        inputs = [padding.tokens_first(x) for x in inputs]
    if by_one_kernel(inputs[0], select_impl):
        bounds = None if packing is None else packing.bounds_on(inputs[0].device)
        olds = (
            [None] * len(layers)
            if states is None
            else [state.to(x.dtype) for state, x in zip(states, inputs, strict=True)]
        )
        outputs = tuple(
            short_conv(x, layer.filters(), old, cu_seqlens=bounds, silu=layer.silu)
            for layer, x, old in zip(layers, inputs, olds, strict=True)
        )
    else:
        before = None if states is None else torch.cat([state.to(inputs[0].dtype) for state in states], dim=-1)
        own = edges = None
        if packing is not None:
            own, edges = packing.spread(past, inputs[0].device)
        # Autocast would widen every operand of its own accord, by a copy each.
        with torch.autocast(inputs[0].device.type, enabled=False):
            weight = torch.cat([widened(layer.filters()) for layer in layers])
            outputs = _Filter.apply(weight, before, own, edges, layers[0].silu, *inputs)
    if padding is not None and time > 1:
        outputs = tuple(padding.back_in_place(y) for y in outputs)
    if not keep_states:
        return outputs, ()
    olds = [None] * len(layers) if states is None else states
    return outputs, tuple(_last(x, old, past, padding, packing) for x, old in zip(inputs, olds, strict=True))


def _last(x: Tensor, state: Tensor | None, past: int, padding: Padding | None, packing: Packing | None) -> Tensor:
    """The state after `x`, whose tokens come first where there is padding."""
    rows = x.shape[0] if packing is None else packing.sequences
    state = x.new_zeros(rows, past, x.shape[-1]) if state is None else state.to(x.dtype)
    if packing is not None:
        ends = packing.cu_seqlens[1:, None] - past + torch.arange(past)
        reached = packing.cu_seqlens[:-1, None]
        # Among the states, which lie behind the tokens here, where the sequence is shorter than its memory.
        held = x.shape[1] + torch.arange(rows).unsqueeze(1) * past + past - reached + ends
        place = torch.where(ends < reached, held, ends).flatten().to(x.device)
        return torch.cat((x[0], state.flatten(0, 1))).index_select(0, place).unflatten(0, (rows, past))
    extended = torch.cat((state, x[:, -past:] if padding is None and past else x), dim=1)
    if padding is None:
        # A copy: a view would keep the inputs of all steps alive for as long as the state.
        return extended[:, extended.shape[1] - past :].clone()
    last = padding.count.unsqueeze(1) + torch.arange(past, device=x.device)
    return extended.take_along_dim(last.unsqueeze(-1), dim=1)


class _Filter(torch.autograd.Function):
    """Sums of shifted products over the joined inputs, then SiLU; products read narrow inputs as they are.

    Written by hand, since autograd would keep and widen a copy of the input for each tap, and make a gradient as long
    as the whole input for each shift.

    Args:
        weight: `[channels of all, W]`, fp32 or wider.
        before: `[B or sequences, W - 1, channels of all]`, or `None` for zeros.
        own: `[T]`, where the tokens of packed sequences lie once each sequence has room for its past before it.
        edges: `[sequences * (W - 1)]`, where those pasts lie.
        silu: whether SiLU follows.
        inputs: `[B, T, channels]` each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        before: Tensor | None,
        own: Tensor | None,
        edges: Tensor | None,
        silu: bool,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        past = weight.shape[1] - 1
        ctx.widths = [x.shape[-1] for x in inputs]
        ctx.before = None if before is None else before.shape
        # With the past of each row before it, or of each packed sequence; rows without a past need no zeros.
        ctx.skip = 0 if before is None or own is not None else past
        if own is None or edges is None:
            x = _joined(inputs)
            x = x if before is None else torch.cat((before, x), dim=1)
        else:
            x = inputs[0].new_zeros(1, len(own) + len(edges), len(weight))
            for part, one in zip(x.split(ctx.widths, dim=-1), inputs, strict=True):
                part.index_copy_(1, own, one)
            if before is not None:
                x.index_copy_(1, edges, before.flatten(0, 1).unsqueeze(0))
        taps = weight.unbind(1)
        y = x * taps[-1]
        for lag in range(1, min(past + 1, x.shape[1])):
            y[:, lag:].addcmul_(x[:, :-lag], taps[-1 - lag])
        ctx.save_for_backward(weight, x, y if silu else None, own, edges)
        z = F.silu(y) if silu else y
        if not silu and torch.compiler.is_compiling():
            # Of torch 2.11 wrong, see "Compiled" in the README of `lapkernels.delta_rule`. No copy remains of this.
            z = y.clone()
        return tuple(_unspread(part, ctx.skip, own, x.dtype) for part in z.split(ctx.widths, dim=-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, y, own, edges = ctx.saved_tensors
        past = weight.shape[1] - 1
        if own is None:
            d = _joined(gradients)
            d = F.pad(d, (0, 0, ctx.skip, 0)) if ctx.skip else d
        else:
            d = torch.zeros_like(x)
            for part, one in zip(d.split(ctx.widths, dim=-1), gradients, strict=True):
                part.index_copy_(1, own, one)
        d = d.to(weight.dtype) if y is None else torch.ops.aten.silu_backward(d, y)
        lags = range(min(past + 1, x.shape[1]))
        d_weight = None
        if ctx.needs_input_grad[0]:
            sums = [(d[:, lag:] * x[:, : x.shape[1] - lag]).sum((0, 1)) for lag in lags]
            sums += [torch.zeros_like(sums[0])] * (past + 1 - len(sums))
            d_weight = torch.stack(sums[::-1], dim=1)
        taps = weight.unbind(1)
        d_x = d * taps[-1]
        for lag in lags[1:]:
            d_x[:, :-lag].addcmul_(d[:, lag:], taps[-1 - lag])
        d_before = None
        if ctx.needs_input_grad[1]:
            d_before = d_x[:, :past] if own is None else d_x[0].index_select(0, edges).view(ctx.before)
            d_before = d_before.to(x.dtype)
        parts = d_x.split(ctx.widths, dim=-1)
        return d_weight, d_before, None, None, None, *(_unspread(part, ctx.skip, own, x.dtype) for part in parts)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)


def _unspread(x: Tensor, skip: int, own: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The tokens alone, in a dtype, contiguous."""
    x = x[:, skip:]
    if x.dtype != dtype or not x.is_contiguous():
        # Not `contiguous()` of what is contiguous: the same tensor again, see "Compiled" as well.
        x = x.to(dtype, memory_format=torch.contiguous_format, copy=True)
    return x if own is None else x.index_select(1, own)
