"""The contract of a step's arguments, checked in the same way for every implementation."""

from torch import Tensor

from lapkernels.decoding.rows import check_contiguous, check_last_axis, check_pool, check_rows, check_tensor
from lapkernels.errors import InvalidInput


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    gate: Tensor,
    mixture: Tensor,
    normaliser: float,
    position: Tensor | None,
    slots: Tensor | None,
    commit: Tensor | None,
) -> None:
    """Check the arguments of `dual_state_step`. Reads shapes only, never values.

    Raises:
        InvalidInput: naming the argument, what it is and what it should be.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise InvalidInput(
                f"{name} has shape {list(tensor.shape)}; it should have four axes, [batch, T, heads, width]"
            )
    batch, time, query_heads, key_width = q.shape
    heads, value_width = k.shape[2], v.shape[3]
    if min(batch, time, query_heads, key_width, heads, value_width) < 1:
        raise InvalidInput(f"an axis is empty: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
    if query_heads % heads:
        raise InvalidInput(f"q has {query_heads} heads, which is no multiple of the {heads} heads of k and v")
    if mixture.ndim != 1 or not len(mixture):
        raise InvalidInput(f"mixture has shape {list(mixture.shape)}; it should be [states]")
    states, device = len(mixture), q.device
    check_tensor("q", q, (batch, time, query_heads, key_width), device)
    check_tensor("k", k, (batch, time, heads, key_width), device)
    check_tensor("v", v, (batch, time, heads, value_width), device)
    check_tensor("gate", gate, (batch, time, states, heads, key_width), device)
    check_tensor("mixture", mixture, (states,), device)
    check_contiguous("mixture", mixture)
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidInput(f"q, k and v should share a dtype, and have {q.dtype}, {k.dtype}, {v.dtype}")
    for name, tensor in (("q", q), ("k", k), ("v", v), ("gate", gate)):
        check_last_axis(name, tensor)
    wanted = (states, heads, key_width, value_width)
    if state.ndim != 5 or tuple(state.shape[1:]) != wanted:
        raise InvalidInput(
            f"the state has shape {list(state.shape)}; it should be [slots, {', '.join(map(str, wanted))}]"
        )
    if state.shape[0] and not state[0].is_contiguous():
        raise InvalidInput(f"the state has strides {state.stride()}; each slot should be contiguous (allocate_state)")
    check_pool(state.flatten(1, 2), (states * heads, key_width, value_width), device)
    if not normaliser > 0:
        raise InvalidInput(f"normaliser is {normaliser}; it should be above 0")
    check_rows(batch, time, device, state, position, slots, commit, None, 0, q.dtype)
