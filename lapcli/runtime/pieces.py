"""Prompts in pieces of a few fixed lengths, each a forward pass that a CUDA graph holds.

A forward pass of a model is some thousand launches, which take the host longer than a GPU takes for a thousand tokens
of a model of a billion parameters. Captured once for a length, they are one. The last piece of a prompt is filled up
behind its tokens, where nothing is written, nothing decays, and no token looks.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapcli.models.cache import LayerState, RecurrentCache
from lapcli.models.tokens import PaddedEnd
from lapkernels.timing import out_of_memory

LENGTHS = (64, 256, 1024, 2048)
"""Tokens of a piece. The last one of a prompt computes no more than four times what it has tokens for."""


def lengths_within(tokens: int | None) -> tuple[int, ...]:
    """Those of `LENGTHS` that are no more than so many tokens, the shortest in any case; all for `None`."""
    return tuple(length for length in LENGTHS if tokens is None or length <= max(tokens, LENGTHS[0]))


class Piece(NamedTuple):
    """A part of a prompt.

    Attributes:
        start: its first token.
        count: its tokens.
        length: positions that are computed, of which those behind the tokens mean nothing.
    """

    start: int
    count: int
    length: int


def pieces_of(tokens: int, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Piece]:
    """A prompt as pieces of the longest length, and one of the shortest that the rest fits in.

    Args:
        tokens: of the prompt.
        lengths: rising.
    """
    start = 0
    while tokens - start >= lengths[-1]:
        yield Piece(start, lengths[-1], lengths[-1])
        start += lengths[-1]
    if start < tokens:
        yield Piece(start, tokens - start, next(length for length in lengths if length >= tokens - start))


class Pieces:
    """Runs prompts of one row through one of lapcli's own models, piece by piece.

    Args:
        model: in eval mode.
        capture: whether to capture graphs, which needs a CUDA device; else the same passes run one launch at a time.
        lengths: rising.

    Attributes:
        failure: why a pass could not be captured, after which none is.
    """

    def __init__(self, model: Any, *, capture: bool, lengths: tuple[int, ...] = LENGTHS):
        self.model, self.capture, self.lengths = model, capture, lengths
        self.failure: str | None = None
        device = model.device
        self._tokens = torch.zeros(1, lengths[-1], dtype=torch.int64, device=device)
        self._count = torch.ones(1, dtype=torch.int64, device=device)
        self._cache: RecurrentCache | None = None
        self._held: list[Tensor] = []
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle() if capture else None

    def run(self, tokens: Tensor, cache: RecurrentCache) -> Tensor:
        """Run tokens on from a cache.

        Args:
            tokens: `[1, T]`, at least one.
            cache: what was seen before; has seen these too afterwards.

        Returns:
            `[1, vocabulary]`, the logits behind the last token.
        """
        own = self._room()
        if cache.layers:
            _copy_all(self._held, [tensor for state in cache.layers if state for tensor in state.tensors()])
        else:
            for tensor in self._held:
                tensor.zero_()
        logits = None
        for piece in pieces_of(tokens.shape[1], self.lengths):
            self._tokens[:, : piece.count].copy_(tokens[:, piece.start : piece.start + piece.count])
            self._count.fill_(piece.count)
            logits = self._pass(piece.length, piece.count == piece.length)
        assert logits is not None
        for layer, state in enumerate(own.layers):
            if state is not None:
                parts = tuple(part.clone() for part in state.convolution)
                cache.put(layer, LayerState(state.recurrent.clone(), parts))
        cache.advance(tokens.shape[1])
        return logits.clone()

    def _room(self) -> RecurrentCache:
        """The cache whose tensors the passes read and write, in place."""
        if self._cache is None:
            # Its shapes are those that the model makes.
            probe = RecurrentCache()
            self.model(input_ids=self._tokens[:, :1], cache=probe, use_cache=True, logits_to_keep=1)
            self._cache = RecurrentCache(in_place=True)
            self._cache.layers = list(probe.layers)
            self._held = [tensor for state in probe.layers if state is not None for tensor in state.tensors()]
        return self._cache

    def _pass(self, length: int, full: bool) -> Tensor:
        """One piece, from what is in the tensors that it reads; the logits, which the next pass may overwrite."""
        found = self._graph(length, full) if self.capture else None
        if found is None:
            return self._forward(length, full)
        graph, logits = found
        graph.replay()
        return logits

    def _forward(self, length: int, full: bool) -> Tensor:
        """The model's own forward pass over the first positions."""
        padding = None if full else PaddedEnd.behind(self._count, length)
        found = self.model(
            input_ids=self._tokens[:, :length],
            attention_mask=padding,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1 if full else self._count - 1,
        )
        return found.logits[:, -1]

    def _graph(self, length: int, full: bool) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """The graph of a pass and its logits; `None` where something in it cannot be captured."""
        key = length, full
        if key not in self._graphs:
            kept = [tensor.clone() for tensor in self._held]
            try:
                self._graphs[key] = captured(lambda: self._forward(*key), self.model.device, self._memory)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                # What runs eagerly all the same is only slower.
                self.capture, self.failure = False, str(error).partition("\n")[0]
            _copy_all(self._held, kept)
        return self._graphs.get(key)


def _copy_all(tensors: list[Tensor], sources: list[Tensor]) -> None:
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.copy_(source)


def captured(
    call: Callable[[], Tensor], device: torch.device, memory: Any = None
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a call that waits for nothing, after running it twice, so that kernels are compiled and room is there.

    Args:
        call: reads and writes tensors that stay where they are.
        device: where.
        memory: the pool of graphs that never run at the same time; `None` for one of its own.

    Returns:
        The graph, and what the call returns, which each replay overwrites.

    Raises:
        RuntimeError: it cannot be captured.
        torch.OutOfMemoryError: there is no memory for it.
    """
    stream, now = _side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(now)
    try:
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                for _ in range(2):
                    call()
        finally:
            now.wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"),
        ):
            found = call()
    except RuntimeError as error:
        if out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
            # A capture that ran out of memory may fail a second time as it is ended, in other words.
            raise torch.OutOfMemoryError(str(error.__context__ or error)) from error
        raise
    return graph, found


_side_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which all is captured.

    One for all: cuBLAS keeps a workspace for each stream that ever computed a product, 32 MiB on a Hopper.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _side_streams:
        _side_streams[index] = torch.cuda.Stream(index)
    return _side_streams[index]
