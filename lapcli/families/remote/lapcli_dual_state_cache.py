"""What converted layers remember between calls, in the places where the library's cache has keys and values.

Written by lapcli beside models that it converted. Licence: Apache 2.0.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class DualStateCacheLayer(CacheLayerMixin):
    """The states of one layer, in the place where the library keeps keys and values; its size does not grow.

    Attributes:
        recurrent: `[B, states, H, K, V]`, fp32 (fp64 in an fp64 model).
        seen: tokens of the rows so far, pads included.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.recurrent: Tensor | None = None
        self.seen = 0

    def tensors(self) -> dict[str, Tensor]:
        """All that is kept, by the attribute that holds it; rows along the first axis."""
        return {} if self.recurrent is None else {"recurrent": self.recurrent}

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is made before the first states are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse keys and values.

        Raises:
            ValueError: always.
        """
        raise ValueError("a dual-state layer keeps no keys and values; this cache is another model's")

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """As a full attention layer's, whose mask the library may size by this one."""
        return self.seen + query_length, 0

    def get_seq_length(self, *args: Any) -> int:
        """Tokens so far."""
        return self.seen

    def get_max_length(self) -> int:
        """`-1`: there is no longest sequence."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same, under its name before transformers 5.24."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        for name in self.tensors():
            setattr(self, name, None)
        self.seen = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to go back.

        Raises:
            NotImplementedError: there is something to take away.
        """
        if tokens_to_remove:
            raise NotImplementedError("states cannot be rolled back to fewer tokens; keep a copy of the cache instead")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from what was row `beam_idx[i]`."""
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows named, in that order."""
        self._map(lambda tensor: tensor[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Move to memory."""
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """States that were moved come back when they are next read."""

    def _map(self, function: Any) -> None:
        for name, tensor in self.tensors().items():
            setattr(self, name, function(tensor))


class WindowCacheLayer(DualStateCacheLayer):
    """Keys and values of the first and the last tokens, in the slots of a ring.

    Attributes:
        keys: `[B, H, sinks + window, K]`.
        values: `[B, H, sinks + window, V]`.
        ranks: `[B, sinks + window]`, number of the token in each slot within its sequence, -1 where there is none.
        counts: `[B]`, tokens of each row so far, pads not counted.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.ranks: Tensor | None = None
        self.counts: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All that is kept."""
        named = {name: getattr(self, name) for name in ("keys", "values", "ranks", "counts")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}
