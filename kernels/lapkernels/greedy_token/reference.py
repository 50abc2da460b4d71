"""The definition."""

import torch
from torch import Tensor


def greedy_token_reference(logits: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Arguments as `greedy_token` has checked them."""
    torch.argmax(logits, dim=-1, out=tokens)
    positions += slots >= 0
