"""Packed documents through a decoder, each as if it were alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapcli.models.decoder import RecurrentPreTrainedModel
from lapcli.models.loss import next_token_labels
from lapcli.training.stream import PackedSequence, stack_sequences


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


def reads_packing(model: Any) -> bool:
    """Whether a model keeps packed documents apart by their positions, as lapcli's own do."""
    return isinstance(model, RecurrentPreTrainedModel)


def last_hidden(model: Any, batch: PackedBatch) -> Tensor:
    """What enters a model's output layer, each document as if alone.

    A model that reads no boundaries gets one document after another, those of one length together.

    Args:
        model: a causal language model, out of any wrapper.
        batch: goes to the model's device.

    Returns:
        `[B T, D]`. For such a model it is 0 in documents of one token, which predict nothing.
    """
    decoder, device = model.get_decoder(), model.device
    if reads_packing(model):
        # The positions are looked at in memory, so that the device need not be waited for.
        output = decoder(input_ids=batch.ids.to(device), position_ids=batch.position_ids, use_cache=False)
        return output.last_hidden_state.flatten(0, 1)
    tokens = batch.ids.flatten()
    starts: dict[int, list[int]] = {}
    for start, end in batch.documents:
        if end - start > 1:
            starts.setdefault(end - start, []).append(start)
    places = [torch.tensor(begins)[:, None] + torch.arange(length) for length, begins in starts.items()]
    found = [decoder(input_ids=tokens[place].to(device), use_cache=False).last_hidden_state for place in places]
    if not found:
        width = model.get_output_embeddings().weight.shape[1]
        return torch.zeros(len(tokens), width, dtype=model.dtype, device=device)
    rows = torch.cat([hidden.flatten(0, 1) for hidden in found])
    where = torch.cat([place.flatten() for place in places]).to(device)
    return rows.new_zeros(len(tokens), rows.shape[1]).index_copy(0, where, rows)
