"""The layer part that holds the state, as DeltaNet, Gated DeltaNet and Q-Delta share it."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.models.cache import LayerState, RecurrentCache
from lapcli.models.convolution import ShortConvolution, convolve
from lapcli.models.norms import GatedRMSNorm, RMSNorm
from lapcli.models.precision import as_product_input
from lapcli.models.tokens import Packing, Padding
from lapkernels.delta_rule import GIVEN, RawGates, delta_rule


class MixerShape(NamedTuple):
    """The heads of a mixer."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    @property
    def key_channels(self) -> int:
        """Rows of the query projection, and of the key projection."""
        return self.key_heads * self.key_width

    @property
    def value_channels(self) -> int:
        """Rows of the value projection."""
        return self.value_heads * self.value_width


class Tap(nn.Module):
    """Hands queries and keys on as they are, so that a forward hook on it can read them or put others in place."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, T, H, K]` both, after convolution and activation, before any normalisation; zero at padding."""
        return q, k


class RuleInputs(NamedTuple):
    """What a mixer hands to the delta rule, for who watches it.

    Attributes:
        q: `[B, T, H, K]`, after convolution and activation; before the rule's own L2 norm where there is one.
        k: likewise.
        v: `[B, T, HV, V]`.
        beta: `[B, T, HV]`, write strength; 0 at padding.
        g: `[B, T, HV]`, log decay, or `None`.
        lamb: `[B, T, HV]`, query feedback, or `None`.
        initial_state: `[B or sequences, HV, K, V]`, or `None` for zeros.
        normalise: whether the rule normalises q and k.
        padding: positions that are no tokens, or `None`.
        packing: sequences in one row, or `None`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None
    lamb: Tensor | None
    initial_state: Tensor | None
    normalise: bool
    padding: Padding | None
    packing: Packing | None


class DeltaRuleMixer(nn.Module):
    """Projections, short convolutions, the delta rule, output norm and output projection, under fla's names.

    A subclass adds the projections of its write strength and gate and says how they are read
    (`raw_gates`), and how q and k are treated after the convolution.

    Args:
        hidden_size: D.
        shape: the heads.
        layer: the number of the layer, under which its state is cached.
        conv_size: taps of the short convolutions; `None` for none.
        silu_on_keys: whether SiLU follows q and k (it always follows v).
        use_gate: whether a gate on the output is learned.
        gate_activation: `swish`, `silu` or `sigmoid`.
        norm_eps: of the output norm.
        head_shared_conv: whether the channels of a key head share one filter, in the convolutions of q and of k.

    Attributes:
        tap: see `Tap`.
        read_scale: the factor on q; `None` for `K ** -0.5`.
        kernel: the `impl` that `delta_rule` is called with.
        watch: called with what the delta rule gets, at every pass; `None` for nobody.
        watched: whether `watch` is; apart from it, since what is compiled depends on a truth value more surely than on
            a function.
        gated: whether the state decays.
        erasing: whether there is query feedback.
        retrained: parameters of a subclass's own, by their names within it, that recovery trains in full.
        released: whether chunks are those of Q-Delta's released kernels (see `delta_rule`).
    """

    gated: bool
    erasing = False
    retrained: tuple[str, ...] = ()
    released = False
    normalise_in_kernel = True
    watch: Callable[[RuleInputs], None] | None = None
    watched = False

    def __init__(
        self,
        hidden_size: int,
        shape: MixerShape,
        layer: int,
        *,
        conv_size: int | None,
        silu_on_keys: bool,
        use_gate: bool,
        gate_activation: str,
        norm_eps: float,
        head_shared_conv: bool = False,
    ):
        super().__init__()
        self.shape = shape
        self.layer_idx = layer
        self.use_gate = use_gate
        self.use_short_conv = conv_size is not None
        self.silu_on_keys = silu_on_keys
        self.kernel = "auto"
        self.read_scale: float | None = None

        self.q_proj = nn.Linear(hidden_size, shape.key_channels, bias=False)
        self.k_proj = nn.Linear(hidden_size, shape.key_channels, bias=False)
        self.v_proj = nn.Linear(hidden_size, shape.value_channels, bias=False)
        if conv_size is not None:
            heads = shape.key_heads if head_shared_conv else None
            self.q_conv1d = ShortConvolution(shape.key_channels, conv_size, silu_on_keys, heads)
            self.k_conv1d = ShortConvolution(shape.key_channels, conv_size, silu_on_keys, heads)
            self.v_conv1d = ShortConvolution(shape.value_channels, conv_size, True)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, shape.value_channels, bias=False)
            self.o_norm = GatedRMSNorm(shape.value_width, norm_eps, gate_activation)
        else:
            self.o_norm = RMSNorm(shape.value_width, norm_eps)
        self.o_proj = nn.Linear(shape.value_channels, hidden_size, bias=False)
        self.tap = Tap()

    def raw_gates(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None, RawGates]:
        """Write strength and log decay (or `None`), `[B, T, HV]`, and what they still have to go through."""
        raise NotImplementedError

    def query_feedback(self, hidden_states: Tensor, beta: Tensor) -> Tensor | None:
        """Query feedback `[B, T, HV]`, in fp32 or wider, for the write strength beside it; by default there is none."""
        return None

    def activate_keys(self, x: Tensor) -> Tensor:
        """What follows the convolution of q and k, beside the SiLU inside it: `[B, T, H, K]` to the same."""
        return x

    def normalise_keys(self, x: Tensor) -> Tensor:
        """What norm q and k get before the delta rule, where that is not the rule's own L2 norm."""
        return x

    def forward(
        self,
        hidden_states: Tensor,
        *,
        padding: Padding | None = None,
        packing: Packing | None = None,
        cache: RecurrentCache | None = None,
        use_cache: bool = False,
        kept: slice | Tensor | None = None,
    ) -> Tensor:
        """Mix along time.

        Args:
            hidden_states: `[B, T, D]`; `[1, T, D]` with `packing`.
            padding: positions to pass over.
            packing: sequences in one row.
            cache: states to start from; not written unless `use_cache`.
            use_cache: whether to write the new states to `cache`.
            kept: positions whose outputs are wanted; `None` for all.

        Returns:
            `[B, T, D]`, or the kept positions of it. At padding it means nothing.
        """
        if padding is not None:
            hidden_states = padding.keep(hidden_states)
        hidden_states = as_product_input(hidden_states)
        held = None if cache is None else cache.get(self.layer_idx)

        q, k, v, convolution = self._project(hidden_states, held, padding, packing, use_cache)
        q = self.activate_keys(q.unflatten(-1, (self.shape.key_heads, -1)))
        k = self.activate_keys(k.unflatten(-1, (self.shape.key_heads, -1)))
        v = v.unflatten(-1, (self.shape.value_heads, -1))
        beta, g, gates = self.raw_gates(hidden_states)
        if padding is not None or self.erasing or self.watched:
            # Whoever makes zeros of them, or looks at them, needs them as they are used, not the rule's kernel alone.
            (beta, g), gates = gates.activated(beta, g), GIVEN
        lamb = self.query_feedback(hidden_states, beta)
        if padding is not None:
            # A token that writes nothing and lets nothing decay leaves the state as it is, to the bit.
            q, k, v, beta = (padding.keep(x) for x in (q, k, v, beta))
            g = None if g is None else padding.keep(g)
        q, k = self.tap(q, k)
        q, k = self.normalise_keys(q), self.normalise_keys(k)
        before = None if held is None else held.recurrent
        if self.watched and self.watch is not None:
            self.watch(RuleInputs(q, k, v, beta, g, lamb, before, self.normalise_in_kernel, padding, packing))

        # The release's chunks count tokens, where ours, which do not matter, count positions.
        reordered = padding if self.released else None
        if reordered is not None:
            q, k, v, beta = (reordered.tokens_first(x) for x in (q, k, v, beta))
            g, lamb = (None if x is None else reordered.tokens_first(x) for x in (g, lamb))
        output, state = delta_rule(
            q,
            k,
            v,
            beta,
            g,
            lamb=lamb,
            gates=gates,
            scale=self.read_scale,
            initial_state=before,
            output_final_state=use_cache,
            cu_seqlens=None if packing is None else packing.cu_seqlens,
            qk_l2norm=self.normalise_in_kernel,
            released=self.released,
            impl=self.kernel,
        )
        if reordered is not None:
            output = reordered.back_in_place(output)
        if use_cache and cache is not None and state is not None:
            cache.put(self.layer_idx, LayerState(state, convolution))

        if kept is not None:
            output, hidden_states = output[:, kept], hidden_states[:, kept]
        if self.use_gate:
            gate = self.g_proj(hidden_states).unflatten(-1, (self.shape.value_heads, -1))
            output = self.o_norm(output, gate)
        else:
            output = self.o_norm(output)
        return self.o_proj(output.flatten(-2))

    def _project(
        self,
        hidden_states: Tensor,
        held: LayerState | None,
        padding: Padding | None,
        packing: Packing | None,
        keep_states: bool,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """q, k, v `[B, T, channels]` after convolution and SiLU, and the convolutions' new states if wanted."""
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if not self.use_short_conv:
            return (F.silu(q), F.silu(k), F.silu(v), ()) if self.silu_on_keys else (q, k, F.silu(v), ())
        layers, inputs = (self.q_conv1d, self.k_conv1d, self.v_conv1d), (q, k, v)
        states = None if held is None else held.convolution
        outputs: list[Tensor] = []
        news: list[Tensor] = []
        # Convolutions that end alike run as one.
        for part in (slice(3),) if self.silu_on_keys else (slice(2), slice(2, 3)):
            before = None if states is None else states[part]
            found = convolve(layers[part], inputs[part], before, padding, packing, keep_states=keep_states)
            outputs += found[0]
            news += found[1]
        q, k, v = outputs
        return q, k, v, tuple(news)
