"""The dtype that sums are made in, whatever the model's own dtype is."""

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """`x` in fp32, or untouched when it is fp64: the dtype of norms, gates, filters and states."""
    return x if x.dtype == torch.float64 else x.float()
