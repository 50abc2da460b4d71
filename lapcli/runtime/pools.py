"""What the rows under way keep between steps: one place a slot in tensors that never move."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lapcli.errors import ModelError


class RecurrentShape(NamedTuple):
    """What one slot of a recurrent layer holds.

    Attributes:
        state: of the matrix states, without the slot: `(HV, K, V)`, or `(H, P, N)` for Mamba-2.
        channels: of the short convolution; 0 without one.
        past: inputs that the convolution looks back on, `W - 1`.
        turned: whether the last but one axis of the states is the contiguous one in memory, which Mamba-2's step is
            faster with.
    """

    state: tuple[int, ...]
    channels: int
    past: int
    turned: bool = False


class RecurrentPool:
    """States and convolution inputs of one layer.

    Args:
        shape: of one slot.
        slots: how many.
        state_dtype: of the states, fp32 or bf16.
        input_dtype: of the convolution's inputs, the model's own.
        device: where.
        lookahead: tokens that one step may take in; the ring has room for them beside the past.

    Attributes:
        state: `[slots, *shape.state]`.
        inputs: `[slots, past + lookahead, channels]`, a ring: that of position `p` is at `p % (past + lookahead)`.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        slots: int,
        *,
        state_dtype: torch.dtype,
        input_dtype: torch.dtype,
        device: torch.device,
        lookahead: int = 1,
    ):
        self.shape = shape
        self.ring = shape.past + lookahead
        *outer, rows, columns = shape.state
        last = (columns, rows) if shape.turned else (rows, columns)
        state = torch.zeros(slots, *outer, *last, dtype=state_dtype, device=device)
        self.state = state.transpose(-1, -2) if shape.turned else state
        self.inputs = torch.zeros(slots, self.ring, shape.channels, dtype=input_dtype, device=device)

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept."""
        return self.state, self.inputs

    @property
    def state_numbers(self) -> int:
        """Of a row's states."""
        return math.prod(self.shape.state)

    @property
    def slot_bytes(self) -> int:
        """Of one slot."""
        return sum(tensor[0].nbytes for tensor in self.tensors())

    def place(self, slot: int) -> int:
        """Where a slot's row lies in the tensors."""
        return slot

    def write(self, slot: int, position: int, state: Tensor, past: Tensor) -> None:
        """Set a slot to what it is before position `position`, whatever stood there.

        Args:
            slot: which.
            position: tokens seen.
            state: `[*shape.state]`.
            past: `[past, channels]`, the last inputs; zeros before the first token.
        """
        slot = self.place(slot)
        self.state[slot].copy_(state)
        if self.shape.channels:
            places = [(position - self.shape.past + index) % self.ring for index in range(self.shape.past)]
            self.inputs[slot].zero_()
            self.inputs[slot, places] = past.to(self.inputs.dtype)

    def write_rows(self, slots: Sequence[int], positions: Sequence[int], states: Tensor, past: Tensor) -> None:
        """Do as `write` does for many slots at once.

        Args:
            slots: which, each once.
            positions: tokens that each has seen.
            states: `[B, *shape.state]`.
            past: `[B, past, channels]`.
        """
        index = torch.tensor([self.place(slot) for slot in slots], device=self.state.device)
        self.state[index] = states.to(self.state.dtype)
        if self.shape.channels:
            last = torch.tensor(positions, device=index.device).unsqueeze(1) - self.shape.past
            places = (last + torch.arange(self.shape.past, device=index.device)) % self.ring
            self.inputs[index] = 0
            self.inputs[index.unsqueeze(1), places] = past.to(self.inputs.dtype)

    def read(self, slot: int, position: int) -> tuple[Tensor, Tensor]:
        """A slot's state and its last `past` inputs, as `write` takes them; copies."""
        slot = self.place(slot)
        places = [(position - self.shape.past + index) % self.ring for index in range(self.shape.past)]
        return self.state[slot].clone(), self.inputs[slot][places]


class PagedStates(RecurrentPool):
    """States of one layer that is attention in other configurations: they lie where pages of these might.

    A row has a block of pages for them while it lasts, so that it takes memory for the layers that it converts only.

    Args:
        shape: of one row; without a convolution.
        state_dtype: fp32 or bf16.

    Attributes:
        state: `[blocks, *shape.state]`, once the pages are there; of all layers together.
        number: of the layer among those that lie so.
        blocks: of the rows that have states in this layer, by slot.
    """

    number: int

    def __init__(self, shape: RecurrentShape, state_dtype: torch.dtype):
        assert not shape.channels
        assert not shape.turned
        self.shape, self.ring, self.dtype = shape, shape.past + 1, state_dtype
        self.blocks: dict[int, int] = {}

    @property
    def block_bytes(self) -> int:
        """That a row's states take."""
        return self.state_numbers * self.dtype.itemsize

    def lie_in(self, blocks: Tensor, number: int) -> None:
        """Say where the blocks are, `[blocks, bytes or more]` of any dtype, and which of the layers this is."""
        states = blocks.view(self.dtype)[:, : self.state_numbers]
        self.state, self.number = states.unflatten(1, self.shape.state), number
        self.inputs = states.new_zeros(len(blocks), self.ring, 0)

    def tensors(self) -> tuple[Tensor, ...]:
        """Nothing: pages are not the layer's own."""
        return ()

    def place(self, slot: int) -> int:
        """The row's block."""
        return self.blocks[slot]


class Slots:
    """Which slots are taken, and how many tokens each has seen.

    Args:
        count: how many there are.

    Attributes:
        positions: tokens seen, of each slot that is taken.
        converted: layers that are states for its row, likewise; 0 where a model has one configuration.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self.positions: dict[int, int] = {}
        self.converted: dict[int, int] = {}

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self, converted: int = 0) -> int:
        """Take one for a row of a configuration.

        Raises:
            ModelError: none is free.
        """
        if not self._free:
            raise ModelError(
                f"all {self.count} rows of the engine are taken", "release one, or make the engine with more max_rows"
            )
        slot = self._free.pop()
        self.positions[slot], self.converted[slot] = 0, converted
        return slot

    def give_back(self, slot: int) -> None:
        """Let a slot be taken again.

        Raises:
            ModelError: it is not taken.
        """
        self.check((slot,))
        del self.positions[slot], self.converted[slot]
        self._free.append(slot)

    def check(self, slots: Iterable[int]) -> None:
        """Refuse slots that nobody has taken.

        Raises:
            ModelError: naming the first.
        """
        for slot in slots:
            if slot not in self.positions:
                raise ModelError(f"slot {slot} holds no row; rows are in {sorted(self.positions) or 'none'}")
