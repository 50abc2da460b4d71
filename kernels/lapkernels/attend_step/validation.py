"""The contract of an attention step's arguments, checked in the same way for every implementation."""

import torch
from torch import Tensor

from lapkernels.decoding.rows import check_last_axis, check_tensor
from lapkernels.errors import InvalidInput


def check_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    position: Tensor,
    slots: Tensor,
    window: int | None,
) -> None:
    """Check the arguments of `attend_step`. Reads shapes only, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    if query.ndim != 3 or keys.ndim != 4 or values.ndim != 4:
        raise InvalidInput(
            f"query has shape {list(query.shape)}, keys {list(keys.shape)}, values {list(values.shape)}; they should "
            "be [B, HQ, K], [pages, H, P, K] and [pages, H, P, V]"
        )
    (batch, query_heads, width), (count, heads, size, _), device = query.shape, keys.shape, query.device
    if query_heads % heads:
        raise InvalidInput(f"{query_heads} query heads; a multiple of the {heads} key heads is wanted")
    check_tensor("query", query, (batch, query_heads, width), device)
    check_tensor("keys", keys, (count, heads, size, width), device)
    check_tensor("values", values, (count, heads, size, values.shape[-1]), device)
    check_tensor("key", key, (batch, heads, width), device)
    check_tensor("value", value, (batch, heads, values.shape[-1]), device)
    for name, tensor in (("query", query), ("key", key), ("value", value), ("keys", keys), ("values", values)):
        check_last_axis(name, tensor)
    if size < 16 or size & (size - 1):
        raise InvalidInput(f"pages of {size} tokens; a power of two is wanted, 16 at least")
    if pages.ndim != 2 or pages.dtype != torch.int32 or pages.device != device or not pages.shape[1]:
        raise InvalidInput(
            f"pages has shape {list(pages.shape)}, dtype {pages.dtype}, on {pages.device}; it should be "
            f"[slots, pages of a row], int32, on {device}"
        )
    check_last_axis("pages", pages)
    for name, index in (("position", position), ("slots", slots)):
        if tuple(index.shape) != (batch,) or index.dtype not in (torch.int32, torch.int64) or index.device != device:
            raise InvalidInput(
                f"{name} has shape {list(index.shape)}, dtype {index.dtype}, on {index.device}; it should be "
                f"[{batch}], int32 or int64, on {device}"
            )
    if window is not None and window < 1:
        raise InvalidInput(f"window = {window}; a row sees 1 token at least, its own")
