"""Where the training of a converted layer begins: how much each of its heads counts, beside the teacher's."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lapcli.linearising.watching import output_projection

_RIDGE = 1e-6
"""Of the mean square of a head's output: enough that a head which gives nothing gets 0."""
_TOKENS_AT_ONCE = 512


@torch.no_grad()
def fit_scale(attention: Any, mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """Fit one factor for each query head by least squares.

    Softmax attention is a mean of values; a state is a sum of them, hundreds of tokens long, with products of queries
    and keys for weights. Left alone, the first steps would be spent on shrinking it. The factors of all heads are
    fitted together, to what the layer gives in the end. `scaled` trains with them, `fold_scale` makes them part of
    weights that the layer has anyway.

    Args:
        attention: the converted module.
        mine: what entered its output projection in each forward pass, `[B, T, HQ V]`.
        theirs: what the teacher's module gave in each, `[B, T, D]`, on the same text.

    Returns:
        The factors, `[HQ]` in fp64 on the CPU.
    """
    heads = attention.config.num_attention_heads
    projection = output_projection(attention)
    weight = projection.weight.double().unflatten(1, (heads, -1))
    gram, product = weight.new_zeros(heads, heads), weight.new_zeros(heads)
    for given, wanted in zip(mine, theirs, strict=True):
        target = wanted.detach().to(weight).flatten(0, 1)
        target = target if projection.bias is None else target - projection.bias.double()
        rows = given.detach().to(weight).flatten(0, 1).unflatten(1, (heads, -1))
        for part, goal in zip(rows.split(_TOKENS_AT_ONCE), target.split(_TOKENS_AT_ONCE), strict=True):
            # What each head adds to the output, [N, HQ, D].
            shares = torch.einsum("nhv,dhv->nhd", part, weight)
            gram += torch.einsum("nhd,nkd->hk", shares, shares)
            product += torch.einsum("nhd,nd->h", shares, goal)
    gram, product = gram.cpu(), product.cpu()
    ridge = _RIDGE * gram.diagonal().mean().clamp(min=1e-30)
    factors = torch.linalg.solve(gram + ridge * torch.eye(heads, dtype=gram.dtype), product)
    return factors


@contextmanager
def scaled(attention: Any, factors: Tensor) -> Generator[None]:
    """Multiply what enters the output projection by a factor for each query head, for the time of the context.

    Training takes place in here, not behind `fold_scale`: the factors are thousandths, and AdamW, whose steps do not
    know the size of a weight, would change folded weights by many times what they are in its first step.
    """
    projection = output_projection(attention)
    rows = _by_column(projection, factors)

    def before(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Where heads are in half precision the product is wider: a rounded factor would be another one than is folded.
        return (args[0] * rows.to(torch.promote_types(args[0].dtype, torch.float32)), *args[1:])

    handle = projection.register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def fold_scale(attention: Any, factors: Tensor) -> None:
    """Make the factors of query heads, `[HQ]`, part of the output projection."""
    projection = output_projection(attention)
    projection.weight.mul_(_by_column(projection, factors).to(projection.weight.dtype))


def _by_column(projection: Any, factors: Tensor) -> Tensor:
    """The factor of each input of a projection, on its device."""
    return factors.repeat_interleave(projection.weight.shape[1] // len(factors)).to(projection.weight.device)


def output_variance(outputs: Sequence[Tensor]) -> float:
    """The variance of a layer's output over tokens, mean over features, in fp64.

    Args:
        outputs: `[..., D]` of each forward pass.
    """
    rows = torch.cat([output.detach().flatten(0, -2).double().cpu() for output in outputs])
    return float(rows.var(0, correction=0).mean())
