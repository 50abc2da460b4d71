"""The dtype that sums are made in, whatever the model's own dtype is, and when one kernel may make them."""

from collections.abc import Callable

import torch
from torch import Tensor

from lapkernels.delta_rule import Choice


def widened(x: Tensor) -> Tensor:
    """`x` in fp32, or untouched when it is fp64: the dtype of norms, gates, filters and states."""
    return x if x.dtype == torch.float64 else x.float()


def as_product_input(x: Tensor) -> Tensor:
    """`x` as matrix products take it under autocast, else untouched.

    For what several products read: autocast would cast it for each of them, and its gradient back from each.
    """
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def by_one_kernel(x: Tensor, select_impl: Callable[..., Choice]) -> bool:
    """Whether an operator of lapkernels may take `x` by a kernel, which has gradients too where they are wanted."""
    if torch.compiler.is_compiling():
        return False
    return select_impl(x.device, x.dtype, needs_gradient=torch.is_grad_enabled()).name == "triton"
