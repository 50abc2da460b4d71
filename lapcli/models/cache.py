"""What a model with a recurrent state remembers between calls; its size does not depend on the tokens seen."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LayerState:
    """The memory of one layer.

    Attributes:
        recurrent: `[B, HV, K, V]`, fp32 (fp64 in an fp64 model).
        convolution: the last inputs of each short convolution, `[B, W - 1, channels]`; empty without convolutions.
    """

    recurrent: Tensor
    convolution: tuple[Tensor, ...] = ()

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept."""
        return (self.recurrent, *self.convolution)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())


class RecurrentCache:
    """The states of all layers, in the place where transformers keeps keys and values.

    With packed sequences (`cu_seqlens`) the batch axis counts sequences. There is no way back: a state cannot
    forget its last tokens, so `crop` refuses.

    Args:
        in_place: write new states into the tensors that are there, which keeps their addresses (a CUDA graph
            needs that); otherwise new tensors take their place, which saves one copy.

    Attributes:
        layers: one `LayerState` a layer, `None` before its first call.
        seen_tokens: tokens of the padded rows so far, pads included.
    """

    is_compileable = False

    def __init__(self, in_place: bool = False):
        self.in_place = in_place
        self.layers: list[LayerState | None] = []
        self.seen_tokens = 0

    def __len__(self) -> int:
        return len(self.layers)

    def get(self, layer: int) -> LayerState | None:
        """The state of a layer, `None` before its first call."""
        return self.layers[layer] if layer < len(self.layers) else None

    def put(self, layer: int, state: LayerState) -> None:
        """Keep a layer's new state."""
        while len(self.layers) <= layer:
            self.layers.append(None)
        held = self.layers[layer]
        if self.in_place and held is not None:
            for old, new in zip(held.tensors(), state.tensors(), strict=True):
                old.copy_(new)
        else:
            self.layers[layer] = state

    def advance(self, tokens: int) -> None:
        """Count tokens that all layers have taken in."""
        self.seen_tokens += tokens

    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes() for state in self.layers if state is not None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, under the name that transformers asks by."""
        return self.seen_tokens

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """`-1`: there is no longest sequence."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue from what was row `beam_idx[i]` (beam search); `beam_idx` may be of another length."""
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows named, in that order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        """Forget everything."""
        self.layers.clear()
        self.seen_tokens = 0

    def crop(self, max_length: int) -> None:
        """Refuse to go back.

        Raises:
            NotImplementedError: `max_length` is less than the tokens seen.
        """
        if max_length < 0 or max_length < self.seen_tokens:
            raise NotImplementedError("a recurrent state cannot be rolled back to fewer tokens; keep a copy instead")

    def copy(self) -> "RecurrentCache":
        """A cache of its own tensors, to go on from here more than once."""
        twin = RecurrentCache(self.in_place)
        twin.layers = list(self.layers)
        twin.seen_tokens = self.seen_tokens
        twin._map(torch.clone)
        return twin

    def _map(self, function) -> None:
        self.layers = [
            None
            if state is None
            else LayerState(function(state.recurrent), tuple(function(tensor) for tensor in state.convolution))
            for state in self.layers
        ]
