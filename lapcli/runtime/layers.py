"""The parts of a decoding step, each written once: what reads a row's state, and what does not.

Each part is called with hidden states `[B, D]`, one token a row, and returns `[B, D]`. Nothing here waits for the
device or looks at a value, so that a whole step can be captured in a CUDA graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.runtime.pools import RecurrentPool
from lapkernels.delta_step import ConvState, delta_step
from lapkernels.few_linear import few_linear, few_swiglu, is_faster
from lapkernels.norm import rms_norm, swiglu
from lapkernels.thin_linear import Normed, thin_linear

_ALIGN = 64
"""Rows of a fused projection are padded to a multiple of this, so that its results are aligned in memory."""
ROTATION = "rotation"
"""Under this name a step's rows keep the cosines and sines of their positions."""


_NONE = torch.empty(0, 0, dtype=torch.int32)


class Mix(NamedTuple):
    """Which configurations of a model the rows of a step have.

    Attributes:
        converted: `[B]`, int64, layers that are states for each row, the first ones of an order.
        least: of them, as the host knows it.
        most: likewise.
    """

    converted: Tensor
    least: int
    most: int


@dataclass
class Rows:
    """Which rows a step is for.

    Attributes:
        slots: `[B]`, int32, where each row's state lies; negative for a row that is only padding.
        positions: `[B]`, int64, tokens that each row has seen before this one.
        longest: tokens of the longest row, this one counted, where the host knows it; else `None`.
        mix: of configurations; `None` for a model that has one.
        blocks: `[layers, B]`, int32, where each row's states lie of each layer whose states lie in pages; negative
            where it has none.
        few: whether products are those of `lapkernels.few_linear`; `None`: where that was measured to be faster.
    """

    slots: Tensor
    positions: Tensor
    longest: int | None = None
    mix: Mix | None = None
    blocks: Tensor = _NONE
    few: bool | None = None
    kept: dict[str, Any] = field(default_factory=dict)


class Part(Protocol):
    """Something between two norms."""

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """`[B, D]` to `[B, D]`."""
        ...


@runtime_checkable
class DirectPart(Protocol):
    """A part that can do its norm and its residual sum within its own products, which few rows gain by."""

    def direct(self, x: Tensor, norm: "Norm", scale: float, rows: Rows) -> Tensor:
        """From the stream `[B, D]` to the stream with what the part adds to it."""
        ...


@runtime_checkable
class SplitPart(Protocol):
    """A part that can leave the sum of its last product to what reads it, where that product is for few rows."""

    def split(self, hidden: Tensor, rows: Rows, scale: float) -> Tensor:
        """`[B, D]`, normed, to `scale` times what the part gives, `[B, D]`, or `[S, B, D]` in fp32, to be summed."""
        ...


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> Tensor:
    """`x W^T + bias`, by the kernel for few rows where the step asks for it."""
    few = is_faster(x, weight) if rows.few is None else rows.few
    return few_linear(x, weight, bias, ready=True) if few else F.linear(x, weight, bias)


def split_linear(x: Tensor, layer: nn.Linear, rows: Rows, scale: float) -> Tensor:
    """`scale (x W^T + bias)`, `[B, N]`; or `[S, B, N]`, to be summed, by the kernel for few rows."""
    few = is_faster(x, layer.weight, apart=True) if rows.few is None else rows.few
    if few:
        return few_linear(x, layer.weight, layer.bias, scale=scale, apart=True, ready=True)
    found = layer(x)
    return found if scale == 1.0 else found * scale


class Norm:
    """`x / rms(x) * weight`, summed in fp32, with a residual addition before it.

    Args:
        weight: `[D]`.
        eps: added to the mean square.
        centred: whether the weight is what is added to 1.
    """

    def __init__(self, weight: Tensor, eps: float, *, centred: bool = False):
        self.weight, self.eps, self.offset = weight.detach(), eps, 1.0 if centred else 0.0
        self.normed = Normed(self.weight, eps, self.offset)

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalise `[B, D]`, into `dtype`."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset, dtype=dtype, ready=True).output

    def after(self, x: Tensor, change: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`x + change` in x's dtype, and its norm in `dtype`: one kernel on a GPU. `change` may be `[S, B, D]`."""
        normed, total = rms_norm(
            change,
            self.weight,
            self.eps,
            residual=x,
            offset=self.offset,
            shares=change.ndim > x.ndim,
            dtype=dtype,
            ready=True,
        )
        return total, normed


class LayerNorm(Norm):
    """`(x - mean) / std * weight + bias`, by PyTorch.

    Args:
        module: the library's.
    """

    def __init__(self, module: nn.LayerNorm):
        self.module = module

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalise `[.., D]`, into `dtype`."""
        return self.module(x).to(dtype)

    def after(self, x: Tensor, change: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`x + change` in x's dtype, and its norm in `dtype`."""
        total = x + change
        return total, self(total, dtype)


def fused(linears: Sequence[nn.Linear], own_bias: Sequence[nn.Linear] = ()) -> tuple[Tensor, Tensor | None]:
    """The weights of linear layers of one input below each other, as one matrix; the layers become views of it.

    Layers that are views of such a matrix already stay where they are.

    Args:
        linears: layers of one input; either all or none has a bias.
        own_bias: those among them whose bias, if any, is left out.

    Returns:
        `[rows of all, up to a multiple, D]`, the padding zero, and the bias likewise.
    """
    weights = [linear.weight for linear in linears]
    counts = [len(weight) for weight in weights]
    total = -(-sum(counts) // _ALIGN) * _ALIGN
    there = _below_each_other(weights, total)
    biases = [None if any(linear is other for other in own_bias) else linear.bias for linear in linears]
    if there is not None and linears[0].bias is None:
        return there, None
    if there is not None and (held := _below_each_other(biases, total, counts)) is not None:
        return there, held
    whole = weights[0].new_zeros(total, weights[0].shape[1])
    bias = None if linears[0].bias is None else weights[0].new_zeros(total)
    start = 0
    for linear, count in zip(linears, counts, strict=True):
        part = slice(start, start + count)
        whole[part].copy_(linear.weight.detach())
        linear.weight.data = whole[part]
        if bias is not None and not any(linear is other for other in own_bias):
            bias[part].copy_(linear.bias.detach())
            linear.bias.data = bias[part]
        start += count
    return whole, bias


def _below_each_other(parts: Sequence[Tensor | None], total: int, counts: Sequence[int] | None = None) -> Tensor | None:
    """The tensor of so many rows whose first ones these are, each behind the one before; `None` where there is none.

    Args:
        parts: contiguous; of `None` nothing is asked.
        total: rows of the whole.
        counts: rows of each; default: of what is there.
    """
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return None
    storage, row = first.untyped_storage(), first[0].numel() * first.element_size()
    if storage.nbytes() != total * row:
        return None
    counts, start = [len(part) for part in parts if part is not None] if counts is None else counts, 0
    for part, count in zip(parts, counts, strict=True):
        if part is not None and (part.data_ptr() != storage.data_ptr() + start * row or not part.is_contiguous()):
            return None
        start += count
    return first.detach().as_strided((total, *first.shape[1:]), first.stride(), 0)


def laid_by_tap(taps: Tensor) -> Tensor:
    """`[channels, W]` as it is, with neighbouring channels side by side in memory, as kernels read them."""
    return taps.detach().t().contiguous().t()


class DeltaHeads(NamedTuple):
    """How the output of a fused projection `[q, k, v, gate, b, a, lamb, padding]` divides."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        keys = self.key_heads * self.key_width
        return keys, keys, self.value_heads * self.value_width


class Decay(NamedTuple):
    """How the state of a delta rule layer decays.

    Attributes:
        A_log: `[HV]`.
        dt_bias: `[HV]`, or `[HV, K]` for a decay of each key channel.
        lower_bound: of the log decay, where the layer has one.
        up: `[HV * K, rank]`, to a decay of each key channel from what the fused projection gives; `None` where that is
            the decay itself.
    """

    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None
    up: Tensor | None = None

    @property
    def width(self) -> int:
        """Rows of the fused projection."""
        return self.dt_bias.numel() if self.up is None else self.up.shape[1]


class Gate(NamedTuple):
    """How the output of a delta rule layer is gated.

    Attributes:
        activation: `silu` or `sigmoid`.
        up: `[HV * V, rank]`, to the gate from what the fused projection gives; `None` where that is the gate itself.
    """

    activation: str
    up: Tensor | None = None


class Feedback(NamedTuple):
    """How a delta rule layer's queries have a part in what is erased.

    Attributes:
        learned: whether the fused projection has a part for it.
        read: from that part `[B, 1, HV]` (or `None`) and `b` `[B, 1, HV]`, to the feedback that is used.
    """

    learned: bool
    read: Callable[[Tensor | None, Tensor], Tensor]


class DeltaMixer:
    """A delta rule layer: one product for everything that reads the input, one fused step, one product.

    Args:
        pool: where the states lie.
        heads: of the layer.
        weight: `[q, k, v, gate if any, b if any, decay if any, feedback if any, padding]` below each other,
            `[rows, D]`.
        output: the output projection.
        taps: `[channels, W]` of the convolution over [q, k, v]; `None` for none.
        norm_weight: `[V]`, of the output norm.
        norm_eps: of it.
        gate: of the output; `None` for none.
        learned_strength: whether there is a `b`; else the write strength is constant.
        decay: of the state; `None` for none.
        feedback: of the queries; `None` for none.
        strength: factor on the write strength.
        silu: whether SiLU follows the convolution of q and k.
        impl: which `delta_step`.
    """

    def __init__(
        self,
        pool: RecurrentPool,
        heads: DeltaHeads,
        weight: Tensor,
        output: nn.Linear,
        *,
        taps: Tensor | None,
        norm_weight: Tensor,
        norm_eps: float,
        gate: Gate | None,
        decay: Decay | None,
        feedback: Feedback | None = None,
        learned_strength: bool = True,
        strength: float = 1.0,
        silu: bool = True,
        impl: str = "auto",
    ):
        self.pool, self.heads, self.weight, self.output = pool, heads, weight, output
        self.convolution = None if taps is None else ConvState(laid_by_tap(taps), None, pool.inputs)
        self.norm_weight, self.norm_eps = norm_weight, norm_eps
        self.gate, self.decay, self.strength, self.silu = gate, decay, strength, silu
        self.feedback, self.impl = feedback, impl
        gates = 0 if gate is None else heads.sizes[2] if gate.up is None else gate.up.shape[1]
        betas = heads.value_heads if learned_strength else 0
        lambs = heads.value_heads if feedback is not None and feedback.learned else 0
        sizes = [*heads.sizes, gates, betas, 0 if decay is None else decay.width, lambs]
        self.sizes = [*sizes, len(weight) - sum(sizes)]

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Take one token of each row in, write its state, read it."""
        return linear(
            self._step(linear(hidden, self.weight, None, rows), rows), self.output.weight, self.output.bias, rows
        )

    def split(self, hidden: Tensor, rows: Rows, scale: float) -> Tensor:
        """The same, the sum of the last product left to what reads it."""
        return split_linear(self._step(linear(hidden, self.weight, None, rows), rows), self.output, rows, scale)

    def direct(self, x: Tensor, norm: Norm, scale: float, rows: Rows) -> Tensor:
        """The same with norm and sum."""
        mixed = self._step(thin_linear(x, self.weight, norm=norm.normed, ready=True), rows)
        return thin_linear(mixed, self.output.weight, self.output.bias, residual=x, scale=scale, ready=True)

    def _step(self, projected: Tensor, rows: Rows) -> Tensor:
        """From all projections to what the output projection reads."""
        heads, decay = self.heads, self.decay
        q, k, v, gate, b, a, lamb, _ = projected.unsqueeze(1).split(self.sizes, dim=-1)
        keys, values = (heads.key_heads, heads.key_width), (heads.value_heads, heads.value_width)
        if decay is not None and decay.up is not None:
            a = F.linear(a, decay.up)
        if decay is not None and decay.dt_bias.ndim == 2:
            a = a.unflatten(-1, (heads.value_heads, heads.key_width))
        if self.gate is not None and self.gate.up is not None:
            gate = F.linear(gate, self.gate.up)
        mixed = delta_step(
            q.unflatten(-1, keys),
            k.unflatten(-1, keys),
            v.unflatten(-1, values),
            self.pool.state,
            b=b if b.shape[-1] else None,
            a=None if decay is None else a,
            A_log=None if decay is None else decay.A_log,
            dt_bias=None if decay is None else decay.dt_bias,
            decay_lower_bound=None if decay is None else decay.lower_bound,
            conv=self.convolution,
            position=rows.positions,
            slots=rows.slots,
            gate=None if self.gate is None else gate.unflatten(-1, values),
            norm_weight=self.norm_weight,
            norm_eps=self.norm_eps,
            gate_activation="silu" if self.gate is None else self.gate.activation,
            lamb=None if self.feedback is None else self.feedback.read(lamb if self.feedback.learned else None, b),
            strength=self.strength,
            silu_q=self.silu,
            silu_k=self.silu,
            impl=self.impl,
        )
        return mixed.flatten(2).squeeze(1)


class GatedMlp:
    """`down(SiLU(gate(x)) * up(x))` with one product for gate and up.

    Args:
        gate: the projection whose output goes through SiLU.
        up: the other; `None` where `gate` has both, one behind the other.
        down: back to D.
    """

    def __init__(self, gate: nn.Linear, up: nn.Linear | None, down: nn.Linear):
        self.width, self.down = gate.out_features if up is not None else gate.out_features // 2, down
        self.weight, self.bias = fused((gate,) if up is None else (gate, up))

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """`[B, D]` to the same."""
        return linear(self._inner(hidden, rows), self.down.weight, self.down.bias, rows)

    def split(self, hidden: Tensor, rows: Rows, scale: float) -> Tensor:
        """The same, the sum of the last product left to what reads it."""
        return split_linear(self._inner(hidden, rows), self.down, rows, scale)

    def _inner(self, hidden: Tensor, rows: Rows) -> Tensor:
        # Without the padding.
        weight, bias = self.weight[: 2 * self.width], None if self.bias is None else self.bias[: 2 * self.width]
        few = is_faster(hidden, weight, gated=True) if rows.few is None else rows.few
        if few:
            return few_swiglu(hidden, weight, bias, ready=True)
        return swiglu(linear(hidden, self.weight, self.bias, rows)[:, : 2 * self.width])

    def direct(self, x: Tensor, norm: Norm, scale: float, rows: Rows) -> Tensor:
        """The same with norm and sum."""
        inner = thin_linear(x, self.weight, self.bias, norm=norm.normed, ready=True)[:, : 2 * self.width]
        return thin_linear(inner, self.down.weight, self.down.bias, gated=True, residual=x, scale=scale, ready=True)


class Head:
    """From the stream to logits.

    Args:
        linear: the output embedding.
        scale: factor on the logits.
        widened: whether the library gives them in fp32.
    """

    def __init__(self, linear: nn.Linear, scale: float = 1.0, *, widened: bool = False):
        self.linear, self.scale, self.widened = linear, scale, widened

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """`[B, D]`, normed, to `[B, vocabulary]`."""
        logits = linear(hidden, self.linear.weight, self.linear.bias, rows)
        logits = logits.float() if self.widened else logits
        return logits if self.scale == 1.0 else logits * self.scale

    def direct(self, x: Tensor, norm: Norm) -> Tensor:
        """The same with the norm."""
        logits = thin_linear(x, self.linear.weight, self.linear.bias, norm=norm.normed, scale=self.scale, ready=True)
        return logits.float() if self.widened else logits


class Sum:
    """Parts of one input, added: each with a factor on its input and one on its output.

    Args:
        parts: factor before, part, factor behind.
    """

    def __init__(self, *parts: tuple[float, Part, float]):
        self.parts = parts

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """`[B, D]` to the same."""
        found: Tensor | None = None
        for before, part, behind in self.parts:
            each = part(hidden if before == 1.0 else hidden * before, rows)
            each = each if behind == 1.0 else each * behind
            found = each if found is None else found + each
        assert found is not None
        return found


class LibraryModule:
    """A module of the library's own that keeps nothing between tokens (experts, an unusual MLP), as it is.

    Args:
        module: from `[B, 1, D]` to the same, or to a tuple that begins with it.
    """

    def __init__(self, module: Callable[..., Any]):
        self.module = module

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """`[B, D]` to the same."""
        found = self.module(hidden.unsqueeze(1))
        return (found[0] if isinstance(found, tuple) else found).squeeze(1)
