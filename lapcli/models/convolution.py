"""The short causal convolution before the state: one filter a channel, plain PyTorch, with its memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.models.precision import widened
from lapcli.models.tokens import Packing, Padding


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time, then SiLU where asked for. Sums are fp32, the output has x's dtype.

    Args:
        channels: how many, one filter each.
        width: W, taps of a filter; the last one meets the current token.
        silu: whether SiLU follows.

    Attributes:
        weight: `[channels, 1, W]`, as in fla and `nn.Conv1d`.
    """

    def __init__(self, channels: int, width: int, silu: bool):
        super().__init__()
        self.channels = channels
        self.width = width
        self.silu = silu
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.channels}, width={self.width}, silu={self.silu}"

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        padding: Padding | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve.

        Args:
            x: `[B, T, channels]`; `[1, T, channels]` with `packing`.
            state: `[B or sequences, W - 1, channels]`, the inputs before these; `None` for zeros.
            padding: positions to pass over, as if they were not there; outputs there mean nothing.
            packing: sequences that must not see one another.

        Returns:
            The output `[B, T, channels]` and the new state, the last `W - 1` inputs of each row or sequence.
        """
        past = self.width - 1
        rows = x.shape[0] if packing is None else packing.sequences
        if state is None:
            state = x.new_zeros(rows, past, self.channels)
        state = state.to(x.dtype)
        if packing is not None:
            return self._packed(x, state, packing)
        if padding is not None and x.shape[1] > 1:
            x = x.take_along_dim(padding.order.unsqueeze(-1), dim=1)
        extended = torch.cat((state, x), dim=1)
        y = self._filter(extended)
        if padding is None:
            # A copy: a view would keep the inputs of all steps alive for as long as the state.
            return y, extended[:, extended.shape[1] - past :].clone()
        if x.shape[1] > 1:
            y = y.take_along_dim(padding.place.unsqueeze(-1), dim=1)
        last = padding.count.unsqueeze(1) + torch.arange(past, device=x.device)
        return y, extended.take_along_dim(last.unsqueeze(-1), dim=1)

    def _packed(self, x: Tensor, state: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Give each sequence its own past by laying it before its tokens, then convolve the whole row at once."""
        past = self.width - 1
        spans = list(zip(packing.bounds[:-1], packing.bounds[1:], strict=True))
        extended = torch.cat(
            [part for (start, stop), before in zip(spans, state, strict=True) for part in (before, x[0, start:stop])]
        ).unsqueeze(0)
        # Sequence n's tokens are n + 1 pasts further to the right than in x; the filter's output starts one past in.
        own = torch.cat([torch.arange(start, stop) + n * past for n, (start, stop) in enumerate(spans)])
        ends = torch.tensor([stop + n * past for n, (_, stop) in enumerate(spans)])
        last = (ends.unsqueeze(1) + torch.arange(past)).flatten()
        y = self._filter(extended).index_select(1, own.to(x.device))
        return y, extended[0].index_select(0, last.to(x.device)).unflatten(0, (len(spans), past))

    def _filter(self, extended: Tensor) -> Tensor:
        """`[B, W - 1 + T, channels]` to `[B, T, channels]`: a sum of shifted products."""
        time = extended.shape[1] - self.width + 1
        taps = widened(self.weight).squeeze(1).unbind(1)
        wide = widened(extended)
        y = taps[0] * wide[:, :time]
        for lag in range(1, self.width):
            y = y + taps[lag] * wide[:, lag : lag + time]
        return (F.silu(y) if self.silu else y).to(extended.dtype)
