"""Planning: what a ratio means for a model, from its config and the headers of its weights alone.

Nothing here imports torch or reads a weight, so the answer comes at once whatever the model's size. `docs/plan.md`
states every formula.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lapcli.errors import FamilyError, LapcliError, UsageError
from lapcli.families.base import StatefulLayer
from lapcli.families.fields import optional_integer, positive_integer
from lapcli.families.packed import longest_sequence, text_part
from lapcli.families.registry import family_for
from lapcli.families.source import DEMO_PREFIX, ModelSource, refuse_quantised, resolve_model
from lapcli.selectors.budget import KeptWidth, kept_width, kept_width_from_keep
from lapcli.stages.cutting import Mtp, cutting
from lapcli.stages.kernel_table import OPERATORS, Operator, kernels_for
from lapcli.stages.lineage import cut_from

StateDtype = Literal["fp32", "bf16"]
STATE_ITEMSIZE: dict[str, int] = {"fp32": 4, "bf16": 2}
CACHE_ITEMSIZE = 2
"""Of the convolution's inputs and of a KV cache: bf16."""
DEFAULT_CONTEXT = 4096

_UNITS = {unit: 1024**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))} | {
    unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), start=1)
}
# What configs call a layer with a KV cache; Zamba-2's "hybrid" is a Mamba-2 layer with attention beside it.
_SOFTMAX = {"full_attention", "attention", "chunked_attention", "hybrid"}
_SLIDING = "sliding_attention"
_WITHOUT_CACHE = {"linear_attention", "mamba", "mlp", "moe"}
_LISTS = ("layer_types", "layers_block_type")
# Softmax attention beside the state in every layer, which no list of layer types says.
_ATTENTION_EVERYWHERE = {"falcon_h1"}


@dataclass(frozen=True)
class Change:
    """A size in bytes, of the base and of what the ratio would leave."""

    before: int
    after: int


@dataclass(frozen=True)
class LayerRow:
    """Stateful layers that are alike.

    Attributes:
        layers: their numbers.
        key_heads: `H`; groups in Mamba-2.
        value_heads: `HV`.
        key_width: `K`.
        kept_width: `K'`.
        value_width: `V`.
        state_bytes: of one sequence in one of them.
        convolution_bytes: likewise, the inputs that the short convolution keeps.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_width: int
    kept_width: int
    value_width: int
    state_bytes: Change
    convolution_bytes: Change


@dataclass(frozen=True)
class SoftmaxCache:
    """The KV cache of a hybrid's softmax layers.

    Attributes:
        bytes_per_token: of one sequence over those layers; `None` where the config does not say.
        layers: how many there are.
        heads: KV heads of each.
        note: what was counted, or why nothing was.
        sliding_layers: those of them that keep a window of tokens only.
        window: how many tokens that is.
    """

    bytes_per_token: int | None
    layers: int
    heads: int
    note: str
    sliding_layers: int = 0
    window: int = 0

    def bytes_of(self, tokens: int) -> int:
        """What a sequence of that many tokens keeps; 0 where it is not counted."""
        if self.bytes_per_token is None:
            return 0
        each = self.bytes_per_token // self.layers
        return each * (
            (self.layers - self.sliding_layers) * tokens + self.sliding_layers * min(tokens, self.window or tokens)
        )


@dataclass(frozen=True)
class Concurrency:
    """How many sequences fit beside the weights.

    Attributes:
        memory: bytes of one device.
        devices: how many there are.
        context: tokens whose KV cache each sequence holds.
        sequence_bytes: of one sequence, all devices together.
        before: sequences beside the base.
        after: sequences beside the pruned model.
    """

    memory: int
    devices: int
    context: int
    sequence_bytes: Change
    before: int
    after: int

    @property
    def ratio(self) -> float | None:
        """How many times as many; `None` where none fitted before."""
        return self.after / self.before if self.before else None


@dataclass(frozen=True)
class Plan:
    """What a ratio means for a model.

    Attributes:
        model: what the user called it.
        family: its family.
        operator: its layers' operator, as far as the kernel table knows it.
        width: the kept width and what became of the ratio.
        unaligned: the width that the ratio alone would give; `None` where the width itself was asked for.
        alignment_bytes: state that alignment gives up beyond what was asked for (below 0: keeps in excess).
        rows: the stateful layers, those alike together.
        state_dtype: of the states counted.
        state_bytes: of one sequence over all layers.
        convolution_bytes: likewise.
        weight_bytes: of all tensors, as slicing writes them.
        cut_tensors: how many tensors get smaller.
        cache: the KV cache of a hybrid; `None` where every layer keeps a state only.
        concurrency: how many sequences fit.
        heads_per_device: key heads and value heads of each kind of layer on one device.
        replicated: whether each device holds the one group of a Mamba-2 layer.
        pruned_before: the model that this one was cut from, and its width where it is at hand.
        mtp: what slicing does to a head that predicts further tokens; `None` where there is none.
        kernels: rows of the kernel table for these widths, JSON-able.
    """

    model: str
    family: str
    operator: Operator | None
    width: KeptWidth
    unaligned: int | None
    alignment_bytes: int
    rows: tuple[LayerRow, ...]
    state_dtype: StateDtype
    state_bytes: Change
    convolution_bytes: Change
    weight_bytes: Change
    cut_tensors: int
    cache: SoftmaxCache | None
    concurrency: Concurrency
    heads_per_device: tuple[tuple[int, int], ...]
    replicated: bool
    pruned_before: dict[str, Any] | None
    mtp: Mtp | None
    kernels: list[dict[str, Any]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The plan, JSON-able."""
        width, place = self.width, self.concurrency

        def change(value: Change) -> dict[str, int]:
            return {"before": value.before, "after": value.after}

        return {
            "model": self.model,
            "family": self.family,
            "operator": self.operator,
            "pruned_before": self.pruned_before,
            "width": {
                "kept": width.width,
                "of": width.original,
                "removed": width.achieved,
                "asked": None if width.asked is None else str(width.asked),
                "align": width.align,
                "kept_by_ratio_alone": self.unaligned,
                "alignment_state_bytes": self.alignment_bytes,
            },
            "layers": [
                {
                    **{name: getattr(row, name) for name in ("key_heads", "value_heads", "key_width", "kept_width")},
                    "layers": list(row.layers),
                    "value_width": row.value_width,
                    "state_bytes": change(row.state_bytes),
                    "convolution_bytes": change(row.convolution_bytes),
                }
                for row in self.rows
            ],
            "state_dtype": self.state_dtype,
            "state_bytes": change(self.state_bytes),
            "convolution_bytes": change(self.convolution_bytes),
            "weight_bytes": change(self.weight_bytes),
            "cut_tensors": self.cut_tensors,
            "mtp": self.mtp,
            "kv_cache": None if self.cache is None else dict(self.cache.__dict__),
            "concurrency": {
                "memory": place.memory,
                "devices": place.devices,
                "context": place.context,
                "sequence_bytes": change(place.sequence_bytes),
                "before": place.before,
                "after": place.after,
                "ratio": place.ratio,
            },
            "tensor_parallel": {
                "devices": place.devices,
                "heads_per_device": [{"key": key, "value": value} for key, value in self.heads_per_device],
                "group_replicated": self.replicated,
            },
            "kernels": self.kernels,
        }


def plan_ratio(
    source: ModelSource,
    *,
    ratio: str | None = None,
    keep: int | None = None,
    align: int | None = None,
    memory: str = "80GiB",
    devices: int = 1,
    state_dtype: str = "fp32",
    context: int | None = None,
) -> Plan:
    """Say what a ratio means for a model, without reading any weights.

    Args:
        source: the model.
        ratio: the removed fraction of the key width, as typed; or
        keep: the kept width.
        align: the kept width is a multiple of it.
        memory: of one device, such as `80GiB`.
        devices: tensor-parallel width, which must divide key heads and value heads.
        state_dtype: what the states are kept in: fp32, bf16.
        context: tokens whose KV cache each sequence of a hybrid holds.

    Raises:
        UsageError: the request cannot be met: a ratio, a memory, a dtype, a number of devices that do not fit.
        LapcliError: whatever `prune` would refuse of the model: quantised, unknown, damaged, not the config's.
    """
    if (ratio is None) == (keep is None):
        raise UsageError("give either --ratio or --keep", "for example --ratio 0.5")
    if state_dtype not in STATE_ITEMSIZE:
        raise UsageError(f"--state-dtype {state_dtype} is unknown", f"one of: {', '.join(STATE_ITEMSIZE)}")
    capacity, itemsize = memory_bytes(memory), STATE_ITEMSIZE[state_dtype]
    refuse_quantised(source.config, source.name)
    family = family_for(source.config)
    layers = family.layers(source.config)
    if not layers:
        raise FamilyError(f"{source.name} has no layer with a state, so there is nothing to prune")
    key_width = _one_width(source, layers)
    if keep is not None:
        width, unaligned = kept_width_from_keep(key_width, keep, align), None
    else:
        assert ratio is not None
        width, unaligned = kept_width(key_width, ratio, align), kept_width(key_width, ratio, 1).width
    operator = OPERATORS.get(family.name)
    replicated = _refuse_indivisible(layers, devices, operator)
    # Which channels go makes no difference to sizes.
    gone = {layer.index: [range(width.width, key_width)] * layer.heads for layer in layers}
    cut = cutting(source, layers, gone)
    weights = Change(cut.bytes_before, cut.bytes_after)
    cache = softmax_cache(source.config, layers)
    tokens = _context(source.config, cache, context)

    def state(kept: int | None = None) -> int:
        return sum(layer.state_bytes(kept, itemsize) for layer in layers)

    family.sliced_config(source.config, width.width)  # raises where no config says that width
    states = Change(state(), state(width.width))
    convolutions = Change(
        sum(layer.convolution_bytes() for layer in layers),
        sum(layer.convolution_bytes(width.width) for layer in layers),
    )
    # A KV head that fewer devices than there are could share is kept on each of them.
    copies = max(1, devices // cache.heads) if cache and cache.heads else 1
    cached = cache.bytes_of(tokens) * copies if cache else 0
    sequence = Change(states.before + convolutions.before + cached, states.after + convolutions.after + cached)
    heads = dict.fromkeys((layer.heads, layer.value_heads) for layer in layers)
    shapes = dict.fromkeys(layer.value_width for layer in layers)
    return Plan(
        model=source.name,
        family=family.name,
        operator=operator,
        width=width,
        unaligned=unaligned,
        alignment_bytes=0 if unaligned is None else state(unaligned) - states.after,
        rows=_rows(layers, width.width, itemsize),
        state_dtype="bf16" if state_dtype == "bf16" else "fp32",
        state_bytes=states,
        convolution_bytes=convolutions,
        weight_bytes=weights,
        cut_tensors=cut.cut_tensors,
        cache=cache,
        concurrency=Concurrency(
            capacity,
            devices,
            tokens,
            sequence,
            _fitting(capacity * devices, weights.before, sequence.before),
            _fitting(capacity * devices, weights.after, sequence.after),
        ),
        heads_per_device=tuple((max(1, key // devices), value // devices) for key, value in heads),
        replicated=replicated,
        pruned_before=_pruned_before(source),
        mtp=cut.mtp,
        kernels=[
            {**kernel.row((key_width, value), (width.width, value)), "value_width": value}
            for value in shapes
            for kernel in (kernels_for(operator) if operator else ())
        ],
    )


def memory_bytes(text: str, option: str = "--memory") -> int:
    """A size with its unit, such as `80GiB` or `80 GB`.

    Args:
        text: as it was typed.
        option: behind which.

    Raises:
        UsageError: no number above 0, or no unit of those known.
    """
    number = text.strip().rstrip("BKMGTikmgtb ")
    unit = text.strip()[len(number) :].strip()
    known = {name.lower(): size for name, size in _UNITS.items()}
    try:
        value = float(number) * known[unit.lower()]
    except (KeyError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 1:
        meant = f"did you mean {number}GiB? " if unit.lower() in ("", "g") and _is_number(number) else ""
        raise UsageError(f"{option} {text} is no size", f"{meant}a number and a unit: 80GiB (2^30 bytes), 80GB (10^9)")
    return int(value)


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _one_width(source: ModelSource, layers: Sequence[StatefulLayer]) -> int:
    widths = {layer.key_width for layer in layers}
    if len(widths) != 1:
        raise FamilyError(
            f"the layers of {source.name} have different key widths ({sorted(widths)}); one config field holds them all"
        )
    return widths.pop()


def _rows(layers: Iterable[StatefulLayer], kept: int, itemsize: int) -> tuple[LayerRow, ...]:
    alike: dict[tuple[Any, ...], list[StatefulLayer]] = {}
    for layer in layers:
        convolution = layer.convolution_bytes(), layer.convolution_bytes(kept)
        shape = (layer.heads, layer.value_heads, layer.key_width, layer.value_width)
        alike.setdefault((*shape, convolution), []).append(layer)
    return tuple(
        LayerRow(
            layers=tuple(layer.index for layer in group),
            key_heads=group[0].heads,
            value_heads=group[0].value_heads,
            key_width=group[0].key_width,
            kept_width=kept,
            value_width=group[0].value_width,
            state_bytes=Change(group[0].state_bytes(None, itemsize), group[0].state_bytes(kept, itemsize)),
            convolution_bytes=Change(*convolution),
        )
        for (*_shape, convolution), group in alike.items()
    )


def _fitting(memory: int, weights: int, sequence: int) -> int:
    return max(0, memory - weights) // sequence


def _refuse_indivisible(layers: Iterable[StatefulLayer], devices: int, operator: Operator | None) -> bool:
    """Refuse heads that cannot be shared out; whether one Mamba-2 group is kept on each device instead.

    Raises:
        UsageError: naming the numbers, and the nearest ones that fit.
    """
    if devices < 1:
        raise UsageError(f"--tp {devices} is below 1")
    # vLLM keeps a single group on every device (`extra_groups_for_head_shards` in its mamba_utils.py).
    replicated = operator == "Mamba-2" and all(layer.heads == 1 for layer in layers)
    counts: dict[str, set[int]] = {"value heads": {layer.value_heads for layer in layers}}
    if not replicated:
        name = "groups" if operator == "Mamba-2" else "key heads"
        counts = {name: {layer.heads for layer in layers}} | counts
    wrong = [f"{count} {name}" for name, found in counts.items() for count in sorted(found) if count % devices]
    if wrong:
        common = math.gcd(*(count for found in counts.values() for count in found))
        fitting = [number for number in range(1, common + 1) if common % number == 0]
        near = [max(number for number in fitting if number < devices)]
        near += [number for number in fitting if number > devices][:1]
        raise UsageError(
            f"--tp {devices} does not divide {' and '.join(wrong)}",
            "the nearest that does: " + " or ".join(f"--tp {number}" for number in near),
        )
    return replicated and devices > 1


def softmax_cache(config: Mapping[str, Any], layers: Sequence[StatefulLayer]) -> SoftmaxCache | None:
    """What a token of one sequence takes in the KV cache of a hybrid, in bf16; `None` without softmax layers.

    Raises:
        ModelError: a field has no usable value.
    """
    text = text_part(config)
    attention = text.get("attn")
    unknown = sorted(set(_kinds(text)) - _SOFTMAX - {_SLIDING} - _WITHOUT_CACHE)
    if unknown:
        return SoftmaxCache(
            None, 0, 0, f"not counted: layers of the kind {', '.join(unknown)} keep more than keys and values"
        )
    if isinstance(attention, Mapping):  # fla's hybrids
        count, fields = len(attention.get("layers") or ()), {"hidden_size": text.get("hidden_size"), **attention}
        names = ("num_kv_heads", "num_heads")
    else:
        count, fields = _softmax_layers(text, layers), text
        names = ("num_key_value_heads", "num_attention_heads")
    if count == 0:
        return None
    if count is None:
        return SoftmaxCache(None, 0, 0, "not counted: the config does not say which layers are softmax attention")
    if fields.get("kv_lora_rank"):
        return SoftmaxCache(None, count, 0, "not counted: latent attention, which engines keep in forms of their own")
    if fields.get(names[1]) is None:
        return SoftmaxCache(None, count, 0, f"not counted: the config has no {names[1]}")
    queries = positive_integer(fields, names[1])
    heads = optional_integer(fields, names[0], queries)
    given = next((name for name in ("head_dim", "attention_head_dim") if fields.get(name) is not None), None)
    width = positive_integer(fields, given) if given else positive_integer(fields, "hidden_size") // queries
    sliding = _kinds(text).count(_SLIDING)
    window = optional_integer(text, "sliding_window", 0) if sliding else 0
    note = f"{count} softmax layers x 2 x {heads} KV heads x {width} x {CACHE_ITEMSIZE} bytes"
    if window:
        note += f", {sliding} of them a window of {window} tokens"
    return SoftmaxCache(
        count * 2 * heads * width * CACHE_ITEMSIZE, count, heads, note, sliding if window else 0, window
    )


def _kinds(text: Mapping[str, Any]) -> list[str]:
    """What a config's list of layers calls them; empty where it has none."""
    listed = next((text[name] for name in _LISTS if isinstance(text.get(name), list)), [])
    return [str(kind) for kind in listed]


def _softmax_layers(text: Mapping[str, Any], layers: Sequence[StatefulLayer]) -> int | None:
    """How many layers have softmax attention; `None` where the config leaves it open."""
    pattern = text.get("hybrid_override_pattern")
    for listed in (*(text.get(name) for name in _LISTS), pattern):
        if isinstance(listed, str):
            return listed.count("*")
        if isinstance(listed, Sequence):
            return sum(kind in _SOFTMAX or kind == _SLIDING for kind in listed)
    total = text.get("num_hidden_layers")
    if text.get("model_type") in _ATTENTION_EVERYWHERE:
        return len(layers)
    if not isinstance(total, int) or total < len(layers):
        return None
    if total == len(layers):
        return None if text.get("num_key_value_heads") is not None else 0
    return total - len(layers)


def _context(config: Mapping[str, Any], cache: SoftmaxCache | None, asked: int | None) -> int:
    """The tokens that are counted: as asked, else the default, never more than the model takes."""
    if asked is not None and asked < 0:
        raise UsageError(f"--context {asked} is below 0")
    if cache is None or cache.bytes_per_token is None:
        return 0
    longest = longest_sequence(config)
    if longest is None:
        return DEFAULT_CONTEXT if asked is None else asked
    if asked is not None and asked > longest:
        raise UsageError(
            f"--context {asked} is longer than the model takes (max_position_embeddings = {longest})",
            f"pass --context {longest} or less",
        )
    return min(DEFAULT_CONTEXT, longest) if asked is None else asked


def _pruned_before(source: ModelSource) -> dict[str, Any] | None:
    """What a sliced model was cut from, and its key width where that base is at hand."""
    lineage = cut_from(source.path)
    if lineage is None:
        return None
    name = str(lineage.model.get("name"))
    width = None
    # A hub id is not asked for here: that would download it.
    if name.startswith((DEMO_PREFIX, "/", ".")) or (source.path.parent / name).is_dir():
        try:
            base = resolve_model(name)
            width = family_for(base.config).layers(base.config)[0].key_width
        except (LapcliError, IndexError):
            width = None
    return {"model": name, "key_width": width}
