"""The operator through fla's kernels: imported lazily, asked first whether it is right for the call at hand.

Source: flash-linear-attention 0.6, `fla.ops.gated_delta_rule`, `fla.ops.delta_rule`, `fla.ops.comba`, `fla.ops.kda`.
"""

import importlib
import importlib.util
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lapkernels import verdicts
from lapkernels._triton import is_hopper, kernels_can_run, triton_version

WIDEST_KEY = 256
"""fla keeps a whole key head in one block, of at most this width."""
SHORT = 64
"""Up to so many steps without a gradient fla's one-kernel recurrence is faster than its chunks."""
_HALF = (torch.bfloat16, torch.float16)


def why_unavailable(
    device: torch.device, dtype: torch.dtype, key_width: int, *, gated: bool, erasing: bool, by_channel: bool = False
) -> str | None:
    """Why fla cannot run this call at all, or `None`."""
    if not is_installed("fla"):
        return "flash-linear-attention is not installed (pip install 'lapcli[gpu]')"
    if device.type != "cuda":
        return f"fla needs a GPU and the tensors are on {device}"
    if not kernels_can_run(device):
        return "triton kernels cannot run here"
    if dtype == torch.float64 or (dtype == torch.float32 and not (gated or erasing)):
        return f"fla has no kernel of this operator for {dtype}"
    if by_channel and erasing:
        return "fla has no kernel with a decay of each key channel and an erase direction of its own"
    if key_width > WIDEST_KEY:
        return f"fla takes keys up to {WIDEST_KEY} wide, not {key_width}"
    return None


def why_wrong(
    device: torch.device, *, gated: bool, needs_gradient: bool, erasing: bool = False, by_channel: bool = False
) -> str | None:
    """Why fla would run this call and be wrong, as far as is known or was measured here, or `None`.

    Source: fla issue 640; `fla/ops/common/chunk_o.py` raises for the same versions, but only in the backward pass.
    Decays of each key channel do not go through it.
    """
    version = triton_version()
    hopper = (
        (gated or erasing)
        and not by_channel
        and needs_gradient
        and version is not None
        and is_hopper(device.index or 0)
    )
    if hopper and version is not None and (3, 4) <= version < (3, 7, 1) and not _tilelang_takes_over():
        shown = ".".join(map(str, version))
        return f"fla's gated backward pass is wrong on Hopper with triton {shown} (3.7.1 or tilelang mends it)"
    variant = variant_of(gated=gated, erasing=erasing, by_channel=by_channel)
    return verdicts.why_wrong("delta_rule", "fla", device, variant=variant, needs_gradient=needs_gradient)


def variant_of(*, gated: bool, erasing: bool, by_channel: bool = False) -> str:
    """What a verdict calls the operator with such arguments; each runs another kernel of fla's."""
    if by_channel:
        return "decay by channel"
    if erasing:
        return "with an erase direction"
    return "gated" if gated else "plain"


def why_imprecise(dtype: torch.dtype) -> str | None:
    """Why fla is right but less precise than the dtype promises, or `None`."""
    return None if dtype in _HALF else f"fla multiplies {dtype} in TF32"


def why_faster(
    device: torch.device,
    time: int,
    value_width: int | None,
    *,
    key_width: int,
    gated: bool,
    erasing: bool,
    needs_gradient: bool,
    by_channel: bool = False,
) -> str | None:
    """Why fla is to be preferred to this folder's own kernels for such a call, or `None` where it is slower.

    Source: `python -m benchmarks.delta_rule` and `lapcli bench operator` on an H200 (docs/performance.md).
    """
    if not is_hopper(device.index or 0):
        return "fla's kernels are right here, and lapkernels' were measured on Hopper alone"
    if erasing:
        return None
    if by_channel:
        return "fla's kernels of decays by channel are right here, and lapkernels' were not measured"
    if time <= SHORT and not needs_gradient:
        return f"fla's recurrence in one kernel is the fastest up to {SHORT} steps"
    # Without the compiler that it is written for it lies there and cannot be imported.
    if gated and (key_width, value_width) == (128, 128) and is_installed("flash_qla") and is_installed("tilelang"):
        return "fla hands K = V = 128 to FlashQLA, which is the fastest there"
    return None


def delta_rule_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    erase: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    *,
    qk_l2norm: bool,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run the operator by fla. Arguments as `delta_rule` has checked and completed them.

    fla's default state layout `[sequences, HV, K, V]` is ours; it is asked for by name where there is a choice.

    Returns:
        The output `[B, T, HV, V]` in q's dtype, and the final state `[sequences, HV, K, V]` in fp32 or `None`.
    """
    packing: dict[str, Any] = {}
    if cu_seqlens is not None:
        packing["cu_seqlens"] = cu_seqlens.to(q.device)
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    common: dict[str, Any] = {
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        **packing,
    }
    short = q.shape[1] <= SHORT and not needs_gradient
    repeats = v.shape[2] // q.shape[2]

    if erase is not None:
        return _comba(q, k, v, beta, g, erase, repeats, common)
    if g is not None and g.ndim == 4:
        # Decay, error, write, read, as here; eps of the normalisation and the state's layout are ours too.
        by_channel = _kernel("kda", "fused_recurrent" if short else "chunk")
        return by_channel(
            q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), g=g.float().contiguous(), beta=beta.contiguous(),
            use_qk_l2norm_in_kernel=qk_l2norm, state_v_first=False, **common,
        )  # fmt: skip
    if g is not None:
        gated = _kernel("gated_delta_rule", "fused_recurrent" if short else "chunk")
        return gated(
            q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), g=g.float().contiguous(), beta=beta.contiguous(),
            use_qk_l2norm_in_kernel=qk_l2norm, state_v_first=False, **common,
        )  # fmt: skip
    # Without a gate fla knows one key head for each value head only.
    plain = _kernel("delta_rule", "fused_recurrent" if short else "chunk")
    return plain(
        q=_repeat(q, repeats), k=_repeat(k, repeats), v=v.contiguous(), beta=beta.to(q.dtype).contiguous(),
        use_qk_l2norm_in_kernel=qk_l2norm, **common,
    )  # fmt: skip


def _comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    erase: Tensor,
    repeats: int,
    common: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    value_heads = v.shape[2]
    decay = torch.zeros_like(beta, dtype=torch.float32) if g is None else g.float()
    direction = erase.repeat_interleave(value_heads // erase.shape[2], dim=2)
    # comba takes its error from the state before the decay; the delta rule takes it after.
    direction = (direction.float() * decay.exp().unsqueeze(-1)).to(q.dtype)
    return _kernel("comba", "chunk")(
        q=_repeat(q, repeats),
        k=_repeat(k, repeats),
        v=v.contiguous(),
        p=direction.contiguous(),
        g=decay.contiguous(),
        beta=beta.contiguous(),
        use_qk_l2norm_in_kernel=False,
        **common,
    )


def _kernel(operator: str, form: str) -> Any:
    """The function that fla has for an operator, `chunk` or `fused_recurrent`; imported at the first call."""
    return getattr(importlib.import_module(f"fla.ops.{operator}"), f"{form}_{operator}")


def _repeat(x: Tensor, repeats: int) -> Tensor:
    return (x if repeats == 1 else x.repeat_interleave(repeats, dim=2)).contiguous()


@cache
def is_installed(package: str) -> bool:
    """Whether a package is there; asked once, because the search walks the file system at every call."""
    return importlib.util.find_spec(package) is not None


def _tilelang_takes_over() -> bool:
    """Whether fla replaces the kernel that is wrong by one in tilelang, by fla's own rules."""
    if not is_installed("tilelang") or os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return False
    if os.environ.get("FLA_TILELANG", "1") == "0":
        return False
    try:
        from fla.utils import has_usable_nvcc
    except ImportError:
        # Earlier releases of fla asked for the package alone.
        return True
    return has_usable_nvcc()
