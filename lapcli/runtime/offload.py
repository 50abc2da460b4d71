"""Projections that lie in memory beside the device and come to it, one layer ahead of their use."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lapcli.runtime.layers import fused


class Projections(NamedTuple):
    """What a layer multiplies by: its projections of one input below each other, and its last one."""

    weight: Tensor
    bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None

    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        return [tensor for tensor in self if tensor is not None]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Projections":
        """The same of each."""

        def of(bias: Tensor | None) -> Tensor | None:
            return None if bias is None else function(bias)

        return Projections(function(self.weight), of(self.bias), function(self.output), of(self.output_bias))


class Offload:
    """Weights of layers that some configurations of a model need and others do not.

    Two places on the device take turns: while one layer computes, a second stream brings the next. Every pass brings
    anew what it needs, so a pass can be captured: its copies are nodes of its graph. Without a CUDA device the copies
    are plain ones, made when they are started.

    Args:
        device: where layers compute.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._held: dict[int, Projections] = {}
        self._rank: dict[int, int] = {}
        self._place: dict[int, int] = {}
        self._places: list[Projections] = []
        self._queues: list[deque[int]] = []
        self._under_way: dict[int, Any] = {}
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Bytes that lie beside the device."""
        return sum(tensor.nbytes for held in self._held.values() for tensor in held.tensors())

    def keep(self, layer: int, rank: int, inputs: Sequence[nn.Linear], output: nn.Linear) -> None:
        """Take a layer's projections off the device; they become views of the place that they come to.

        Args:
            layer: its number; layers are given in rising order.
            rank: a pass needs the layer where so many layers or fewer are converted.
            inputs: its projections of one input.
            output: its last one.
        """
        for linear in (*inputs, output):
            linear.to("cpu")
        held = Projections(
            *fused(inputs), output.weight.detach(), None if output.bias is None else output.bias.detach()
        )
        number = len(self._held) % 2
        if len(self._places) == number:
            self._places.append(held.map(lambda tensor: torch.empty_like(tensor, device=self.device)))
        place = self._places[number]
        assert [tensor.shape for tensor in held.tensors()] == [tensor.shape for tensor in place.tensors()]
        self._held[layer] = held if self._side is None else held.map(Tensor.pin_memory)
        self._rank[layer], self._place[layer] = rank, number
        start = 0
        for linear in inputs:
            rows = slice(start, start + linear.out_features)
            linear.weight.data, start = place.weight[rows], rows.stop
            if place.bias is not None:
                linear.bias.data = place.bias[rows]
        output.weight.data = place.output
        if place.output_bias is not None:
            output.bias.data = place.output_bias

    def place(self, layer: int) -> Projections:
        """Where a layer's weights come to on the device."""
        return self._places[self._place[layer]]

    @contextmanager
    def at_hand(self, layer: int, converted: int) -> Generator[None]:
        """Have a layer's weights on the device, and the next ones on their way.

        Args:
            layer: which.
            converted: converted layers of the pass, at least: says which layers it needs.
        """
        self.use(layer, converted)
        yield
        self.done(layer)

    def use(self, layer: int, converted: int) -> None:
        """Let the current stream wait until a layer's weights have come."""
        if layer not in self._under_way:
            self._begin(layer, converted)
        arrived = self._under_way.pop(layer)
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)

    def done(self, layer: int) -> None:
        """Let the next layer come to the place of one that was used."""
        self._start(self._place[layer])

    def _begin(self, layer: int, converted: int) -> None:
        """A pass begins; what one that failed left under way is of no use."""
        self._under_way = {}
        needed = [each for each in self._held if each >= layer and self._rank[each] >= converted]
        self._queues = [deque(each for each in needed if self._place[each] == place) for place in (0, 1)]
        for place in (0, 1):
            self._start(place)

    def _start(self, place: int) -> None:
        """Bring the next layer of a place, once what was computed with the last one is done."""
        if not self._queues[place]:
            return
        layer = self._queues[place].popleft()
        pairs = zip(self._places[place].tensors(), self._held[layer].tensors(), strict=True)
        if self._side is None:
            for target, source in pairs:
                target.copy_(source)
            self._under_way[layer] = None
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._under_way[layer] = self._side.record_event()
