"""Which positions of the rows at hand are tokens, and where one sequence ends and the next begins."""

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapcli.errors import ModelError


@dataclass
class Padding:
    """Rows with positions that are no tokens, wherever these lie.

    Attributes:
        is_token: bool `[B, T]`.
        order: `[B, T]`, the positions of each row with its tokens first, in their order.
        place: `[B, T]`, the inverse of `order`.
        count: `[B]`, tokens of each row.
    """

    is_token: Tensor
    order: Tensor
    place: Tensor
    count: Tensor

    def keep(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """`x` `[B, T, ...]` with `fill` wherever there is no token; what stood there leaves no trace, not even NaN."""
        return torch.where(self.is_token.reshape(*self.is_token.shape, *(1,) * (x.ndim - 2)), x, fill)

    def tokens_first(self, x: Tensor) -> Tensor:
        """`x` `[B, T, ...]` with the tokens of each row before its padding."""
        return x.take_along_dim(self.order.reshape(*self.order.shape, *(1,) * (x.ndim - 2)), dim=1)

    def back_in_place(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_first`."""
        return x.take_along_dim(self.place.reshape(*self.place.shape, *(1,) * (x.ndim - 2)), dim=1)

    @classmethod
    def of(cls, attention_mask: "Tensor | Padding | None", time: int) -> "Padding | None":
        """Read a mask `[B, T or more]`, of which the last `time` columns are for the tokens at hand; or take one read.

        Returns:
            `None` when every position is a token.

        Raises:
            ModelError: the mask has other axes, or fewer columns than tokens.
        """
        if attention_mask is None or isinstance(attention_mask, Padding):
            return attention_mask
        if attention_mask.ndim != 2 or attention_mask.shape[1] < time:
            raise ModelError(
                f"attention_mask has shape {list(attention_mask.shape)}; it should be [rows, {time} or more], "
                "1 for a token and 0 for padding"
            )
        is_token = attention_mask[:, -time:].bool()
        if _may_look_at(is_token) and bool(is_token.all()):
            return None
        order = torch.argsort(is_token, dim=1, descending=True, stable=True)
        return cls(is_token, order, torch.argsort(order, dim=1), is_token.sum(dim=1))


class PaddedEnd(Padding):
    """Rows whose tokens all come first, so that none has to be moved."""

    @classmethod
    def behind(cls, count: Tensor, time: int) -> "PaddedEnd":
        """Rows of `count` `[B]` tokens and padding up to `time`. Nothing here waits for a device."""
        places = torch.arange(time, device=count.device).expand(len(count), -1)
        return cls(places < count.unsqueeze(1), places, places, count)

    def tokens_first(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def back_in_place(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x


@dataclass
class Packing:
    """Sequences that lie one behind the other in one row.

    Attributes:
        bounds: where they begin, and where the last one ends.
        cu_seqlens: the same, int64 `[sequences + 1]` in host memory.
    """

    bounds: list[int]
    cu_seqlens: Tensor
    _spread: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _bounds: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @property
    def sequences(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1

    def bounds_on(self, device: torch.device) -> Tensor:
        """`cu_seqlens` on a device, where it is brought once for all layers."""
        if device not in self._bounds:
            self._bounds[device] = self.cu_seqlens.to(device)
        return self._bounds[device]

    def first_tokens(self, device: torch.device) -> Tensor:
        """`[sequences]`, the position of each sequence's first token."""
        return self.bounds_on(device)[:-1]

    def spread(self, past: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where tokens `[T]` and pasts `[sequences * past]` lie once each sequence has its past laid before it.

        Made at the first call: all layers ask for the same.
        """
        if (past, device) not in self._spread:
            number = torch.repeat_interleave(torch.arange(1, self.sequences + 1), self.cu_seqlens.diff())
            own = torch.arange(len(number)) + past * number
            starts = self.cu_seqlens[:-1] + past * torch.arange(self.sequences)
            edges = (starts.unsqueeze(1) + torch.arange(past)).flatten()
            self._spread[past, device] = own.to(device), edges.to(device)
        return self._spread[past, device]

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, position_ids: Tensor | None, rows: int, time: int) -> "Packing | None":
        """Read boundaries, or positions that start again from 0 within a row (several rows are laid in one).

        Returns:
            `None` when no row holds more than one sequence.

        Raises:
            ModelError: boundaries with more than one row, or that do not rise strictly from 0 to `time`.
        """
        if cu_seqlens is not None:
            bounds = cu_seqlens.tolist()
            if rows != 1:
                raise ModelError(f"cu_seqlens is for sequences packed in one row, and there are {rows} rows")
            if bounds[0] != 0 or bounds[-1] != time or any(b <= a for a, b in itertools.pairwise(bounds)):
                raise ModelError(f"cu_seqlens should rise strictly from 0 to {time}; it is {bounds}")
        elif position_ids is not None and position_ids.ndim == 2 and time > 1:
            restarts = position_ids.cpu() == 0
            restarts = restarts.expand(rows, time).clone()
            if not bool(restarts[:, 1:].any()):
                return None
            restarts[:, 0] = True
            bounds = [*restarts.flatten().nonzero().flatten().tolist(), rows * time]
        else:
            return None
        return cls(bounds, torch.tensor(bounds))


def _may_look_at(x: Tensor) -> bool:
    """Whether control flow may depend on values here: not while compiling, nor inside a CUDA graph."""
    if torch.compiler.is_compiling():
        return False
    return x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
