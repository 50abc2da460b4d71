"""lapkernels' functions in the place of those that a library's model calls, where they are right and the fastest.

transformers' Qwen3-Next, Qwen3.5, OLMo-Hybrid and Lara-Mini run prompts and training through fla's
`chunk_gated_delta_rule`, or PyTorch's where fla is missing. fla's is fast at K = V = 128 where FlashQLA is installed,
and slow at the widths that pruning leaves. Kimi Linear, GLM-5 Next and Bailing Hybrid run them through `chunk_kda`,
whose PyTorch function is slow everywhere.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lapkernels.delta_rule import delta_rule, select_impl
from lapkernels.errors import InvalidInput

_OTHERWISE = frozenset(
    {"A_log", "dt_bias", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
     "transpose_state_layout", "head_first"}
)  # fmt: skip
"""Arguments of fla's function that mean another one; no model passes them yet."""

LONG = 1024
"""Tokens of a usual prompt or training sequence, for whoever asks without one."""


def chunk_gated_delta_rule(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None] | None:
    """The library's function of this name by `delta_rule`: its Triton kernels, or `None` where they are not the choice.

    Arguments and results as of `_run`, of which a model passes the first five and whatever else it likes.
    """
    return _run(False, *args, **options)


def chunk_kda(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None] | None:
    """The same of the function whose log decay is of each key channel, g `[B, T, HV, K]`."""
    return _run(True, *args, **options)


def _run(
    by_channel: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
    before_pytorch: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """A library's function by `delta_rule`, or `None` where that is not the choice.

    Args:
        by_channel: whether the log decay is of each key channel.
        query: `[B, T, H, K]`.
        key: likewise.
        value: `[B, T, HV, V]`; HV is a multiple of H.
        g: `[B, T, HV]` or `[B, T, HV, K]`, log decay.
        beta: `[B, T, HV]`.
        chunk_size: passed over: it changes no result.
        initial_state: `[B, HV, K, V]`.
        output_final_state: whether the state is wanted.
        use_qk_l2norm_in_kernel: whether query and key get unit length.
        scale: factor on query; `None` for `K ** -0.5`.
        cu_seqlens: boundaries of packed sequences.
        impl: of `delta_rule`, where one was asked for by name; it runs whatever the choice would be.
        before_pytorch: whether the library's PyTorch function would run otherwise, before which the chunked form goes.
        others: passed over, as the library does, but for those that mean another function.

    Returns:
        The output `[B, T, HV, V]` and the state, in fp32, or `None` in its place; or `None` for both.

    Raises:
        InvalidInput: an argument means another function, and `impl` was asked for by name.
    """
    if other := _OTHERWISE & others.keys():
        if impl != "auto":
            raise InvalidInput(f"the {impl} kernel does not take {', '.join(sorted(other))}")
        return None
    if impl == "auto":
        if torch.compiler.is_compiling():
            return None
        given = (query, key, value, g, beta, initial_state)
        gradient = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
        found = _choice(
            query.device, query.dtype, query.shape[-1], value.shape[-1], query.shape[1], gradient, by_channel,
            before_pytorch,
        )  # fmt: skip
        if found is None:
            return None
        impl = found
    return delta_rule(
        query, key, value, beta, g, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel, impl=impl,
    )  # fmt: skip


def _choice(
    device: torch.device, dtype: torch.dtype, key_width: int, value_width: int, time: int, needs_gradient: bool,
    by_channel: bool, before_pytorch: bool,
) -> str | None:  # fmt: skip
    """Which implementation goes before the library's function for such a call, if one does."""
    call: dict[str, Any] = {"by_channel": True} if by_channel else {}
    name = select_impl(
        device, dtype, key_width=key_width, value_width=value_width, time=time, gated=True,
        needs_gradient=needs_gradient, **call,
    ).name  # fmt: skip
    return name if name == "triton" or (name == "chunked" and before_pytorch) else None


STAND_INS: dict[str, Callable[..., Any]] = {"chunk_gated_delta_rule": chunk_gated_delta_rule, "chunk_kda": chunk_kda}
"""By the name of the function whose place they take."""

BY_CHANNEL = frozenset({"chunk_kda"})
"""Those whose log decay is of each key channel."""

BEFORE_PYTORCH = BY_CHANNEL
"""Those that go before the library's PyTorch function too, on a CPU and where nothing faster is installed.

transformers' makes a number for each pair of a chunk's steps and each key channel, and took 0.98 s where the chunked
form took 0.07 (2048 steps of 4 heads, 128 x 128, fp32, one thread on two x86-64 cores, 2026-12-01).
"""


def stands_in(
    name: str, model: Any, device: torch.device, *, needs_gradient: bool = False, before_pytorch: bool = False
) -> bool:
    """Whether the stand-in of a function, if it has one, is what a model runs over many tokens.

    Args:
        name: of the function.
        model: of transformers.
        device: where it computes.
        needs_gradient: whether a backward pass will follow.
        before_pytorch: whether the library's PyTorch function would run otherwise.
    """
    widths = widths_of(model.config.to_dict()) if name in STAND_INS else set()
    before = before_pytorch and name in BEFORE_PYTORCH
    return bool(widths) and all(
        _choice(device, model.dtype, key, value, LONG, needs_gradient, name in BY_CHANNEL, before) is not None
        for key, value in widths
    )


def widths_of(config: Mapping[str, Any]) -> set[tuple[int, int]]:
    """K and V of the stateful layers of a model of this config; none where no family knows it."""
    # Here, since families come from there.
    from lapcli.families.registry import find_family

    family = find_family(config)
    layers = () if family is None else family.layers(config)
    return {(layer.key_width, layer.value_width) for layer in layers}
