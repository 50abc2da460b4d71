"""What training a whole model costs: arithmetic counted, memory counted on tensors without contents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lapcli.families.base import StatefulLayer
from lapcli.training.distillation import TEMPORARY_BYTES
from lapcli.training.fresh import class_of
from lapcli.training.optimisers import hidden_matrices


@dataclass(frozen=True)
class Costs:
    """Of one training.

    Attributes:
        operations: in floating point, of the whole training: six for each token and number that it is multiplied
            with, and eighteen for each of a state's (error, write and read, and twice that backward).
        state_bytes: of one sequence, over all layers, in fp32.
        held_bytes: on each device, of what lies there all the time: weights, gradients and moments in fp32; AdamW
            has two, Muon one.
        passing_bytes: on each device, an estimate of what is needed during a step beside that: what one part of a
            batch leaves for the backward pass of PyTorch's chunked kernel (copies of weights in half precision among
            it), and the loss.
    """

    operations: float
    state_bytes: int
    held_bytes: int
    passing_bytes: int


def costs_of(
    config: Any,
    layers: Sequence[StatefulLayer],
    tokens: int,
    *,
    seq_len: int,
    micro_batch: int,
    half: bool,
    checkpointing: bool,
    shards: int = 1,
    muon: bool = False,
) -> Costs:
    """Count them, without a model's weights.

    Args:
        config: of the model.
        layers: its stateful layers.
        tokens: of the training.
        seq_len: tokens of a sequence.
        micro_batch: sequences that a device computes at once.
        half: whether products are in bf16.
        checkpointing: whether blocks run again in the backward pass.
        shards: devices over which weights and moments are spread.
        muon: whether Muon trains the blocks' matrices.
    """
    with FakeTensorMode():
        model = class_of(config.model_type)(config)
        model.set_kernel("chunked")
        model.train()
        numbers = sum(parameter.numel() for parameter in model.parameters())
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        active = numbers - (0 if embedding is head else embedding.numel())
        by_muon = sum(model.get_parameter(name).numel() for name in hidden_matrices(model)) if muon else 0
        left = _left_for_backward(model, micro_batch, seq_len, half)
    in_states = sum(layer.value_heads * layer.key_width * layer.value_width for layer in layers)
    blocks, width = config.num_hidden_layers, config.hidden_size
    if checkpointing:
        # The inputs of all blocks, and one block's own.
        left = left // blocks + blocks * micro_batch * seq_len * width * 4
    # One for the gradient of hidden states, and one for that of the output layer, which is not yet in its place.
    loss = TEMPORARY_BYTES + 4 * (micro_batch * seq_len * width + head.numel())
    return Costs(
        operations=tokens * (6.0 * active + 18.0 * in_states),
        state_bytes=sum(layer.state_bytes() for layer in layers),
        held_bytes=math.ceil((16 * numbers - 4 * by_muon) / shards),
        passing_bytes=left + loss,
    )


def _left_for_backward(model: Any, rows: int, seq_len: int, half: bool) -> int:
    """Bytes that a forward pass keeps, each tensor once, weights left out."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    # With the storages, whose numbers must not be given to others meanwhile.
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=True),
    ):
        output = model.get_decoder()(input_ids=torch.zeros(rows, seq_len, dtype=torch.long), use_cache=False)
    del output
    return sum(storage.nbytes() for storage in kept.values())
