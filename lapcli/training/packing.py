"""Packed documents through a decoder, each as if it were alone.

lapcli's own models read where documents begin, and so do decoders of softmax attention alone (`reads_packing`). Other
models of transformers do so by halves: some hand `cu_seq_lens_q` or
`seq_idx` on to the packages that they bind, whose PyTorch stand-ins take no notice of it, and others know neither, so
that states would leak without a word. They get documents as rows of a batch, those of similar lengths together, each
filled up at its end: what comes after a token has no say in its hidden state.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lapcli.families.dual_state import TEACHERS, teacher_type
from lapcli.models.decoder import RecurrentPreTrainedModel
from lapcli.models.loss import next_token_labels
from lapcli.training.stream import PackedSequence, stack_sequences

_CALL_TOKENS = 256
"""What a call costs beside its tokens, in tokens: to fill rows up by fewer is cheaper than another call."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Rows of packed documents, on the CPU.

    Attributes:
        ids: int64 `[B, T]`.
        position_ids: from 0 in each document, int64 `[B, T]`.
        labels: what each position predicts, `IGNORED` where nothing, int64 `[B T]`.
        documents: where each begins and ends, counted over all rows.
    """

    ids: Tensor
    position_ids: Tensor
    labels: Tensor
    documents: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sequences: Sequence[PackedSequence]) -> "PackedBatch":
        """Stack sequences of one length."""
        columns = stack_sequences(sequences)
        length = columns["input_ids"].shape[1]
        documents = tuple(
            (row * length + start, row * length + end)
            for row, sequence in enumerate(sequences)
            for start, end in zip(sequence.starts, (*sequence.starts[1:], length), strict=True)
        )
        labels = next_token_labels(columns["labels"]).flatten()
        return cls(columns["input_ids"], columns["position_ids"], labels, documents)

    @cached_property
    def calls(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The documents of more than one token, parted into those that a decoder runs as the rows of one call."""
        longest_of = _together(end - start for start, end in self.documents if end - start > 1)
        found: dict[int, list[tuple[int, int]]] = {}
        for start, end in self.documents:
            if end - start > 1:
                found.setdefault(longest_of[end - start], []).append((start, end))
        return tuple(tuple(found[longest]) for longest in sorted(found, reverse=True))


def _together(lengths: Iterable[int]) -> dict[int, int]:
    """Of each length, the longest one that it shares a call with, so that padding and calls cost least in all."""
    rows = Counter(lengths)
    sizes = sorted(rows, reverse=True)
    before = [0, *accumulate(rows[size] for size in sizes)]
    # For the first so many sizes: the least cost, and where the last call of it begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(sizes) + 1):
        ways = ((best[i][0] + sizes[i] * (before[end] - before[i]) + _CALL_TOKENS, i) for i in range(end))
        best.append(min(ways))
    longest_of: dict[int, int] = {}
    end = len(sizes)
    while end:
        begin = best[end][1]
        longest_of |= dict.fromkeys(sizes[begin:end], sizes[begin])
        end = begin
    return longest_of


def reads_packing(model: Any) -> bool:
    """Whether a model keeps packed documents apart by their positions.

    lapcli's own do, and so does softmax attention of transformers' decoders without a mask and a cache, with layers
    that were converted to dual states among it.
    """
    config = getattr(model, "config", None)
    softmax = teacher_type({"model_type": getattr(config, "model_type", None)}) in TEACHERS
    return softmax or isinstance(model, RecurrentPreTrainedModel)


def last_hidden(model: Any, batch: PackedBatch) -> Tensor:
    """What enters a model's output layer, each document as if alone.

    A model that reads no boundaries gets documents as rows, in as many calls as `PackedBatch.calls` has.

    Args:
        model: a causal language model, out of any wrapper.
        batch: goes to the model's device.

    Returns:
        `[B T, D]`. For such a model it is 0 in documents of one token, which predict nothing.
    """
    decoder, device = model.get_decoder(), model.device
    if reads_packing(model):
        # lapcli's own look at the positions in memory, so that the device need not be waited for.
        own = isinstance(model, RecurrentPreTrainedModel)
        positions = batch.position_ids if own else batch.position_ids.to(device)
        output = decoder(input_ids=batch.ids.to(device), position_ids=positions, use_cache=False)
        return output.last_hidden_state.flatten(0, 1)
    tokens = batch.ids.flatten()
    if not batch.calls:
        width = model.get_output_embeddings().weight.shape[1]
        return torch.zeros(len(tokens), width, dtype=model.dtype, device=device)
    found: list[Tensor] = []
    places: list[Tensor] = []
    for documents in batch.calls:
        starts, ends = (torch.tensor(side)[:, None] for side in zip(*documents, strict=True))
        place = starts + torch.arange(int((ends - starts).max()))
        inside = place < ends
        # Rows are filled up with their last token: an id that there is, whatever the model.
        ids = tokens[place.minimum(ends - 1)].to(device)
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        if not inside.all():
            hidden = hidden.index_select(0, inside.flatten().nonzero().squeeze(1).to(device))
        found.append(hidden)
        places.append(place[inside])
    rows = torch.cat(found)
    return rows.new_zeros(len(tokens), rows.shape[1]).index_copy(0, torch.cat(places).to(device), rows)
