"""What recovery trains: LoRA on the projections that make q, k and v; convolutions, norms, query feedback in full.

Only mixers that keep a state, and the norms of their blocks, are touched. Which modules those are follows from what a
family declares and from the loaded model itself; each layer is counted and checked, so that no layer is left out
without a word.

Every trained parameter is a leaf in fp32, whatever the base is in: peft makes LoRA matrices of a bf16 or fp16 base in
fp32 (`autocast_adapter_dtype`), casts a layer's input to their dtype and its result back to that of the layer; a
parameter that is trained in full gets an fp32 original from which its module reads a cast one
(`torch.nn.utils.parametrize`), so that stock code and fused kernels see the dtype they saw before. The optimiser thus
needs no master copies of its own, and all that is trained has one dtype, as FSDP2 wants it.
"""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lapcli.artifacts import (
    Lineage,
    atomic_directory,
    atomic_file,
    read_artifact,
    read_document,
    taken,
    write_artifact,
    write_document,
)
from lapcli.errors import ArtifactError, FamilyError, RecipeError
from lapcli.families.base import StatefulLayer
from lapcli.families.registry import family_for
from lapcli.families.source import ModelSource
from lapcli.models.convolution import ShortConvolution
from lapcli.stages.lineage import LINEAGE_FILE

RANK = 32
ALPHA = 64
LORA_FILE = "adapter_model.safetensors"
LORA_CONFIG = "adapter_config.json"
"""peft's own names, so that stock peft loads what was saved."""
FULL_FILE = "trained_in_full.safetensors"

_PEFT = "base_model.model."
_ORIGINAL = re.compile(r"\.parametrizations\.(\w+)\.original$")
_LORA = re.compile(r"\.lora_([AB])\.default\.weight$")
_SHOWN = 12


class TrainingPlan(Protocol):
    """What is asked of a plan that says what a model trains (`AdapterPlan`, `lapcli.training.fresh.WholePlan`)."""

    @property
    def trained(self) -> int:
        """How many numbers are trained."""
        ...

    def names(self) -> set[str]:
        """The names that `trained_parameters` gives what is trained."""
        ...

    def undecayed(self) -> frozenset[str]:
        """Those of them that no weight decay touches."""
        ...


@dataclass(frozen=True)
class LayerPlan:
    """What is trained in one stateful layer, by names in memory.

    Attributes:
        index: number of the layer.
        mixer: its mixer.
        lora: modules that get LoRA.
        lora_parameters: how many numbers that adds.
        full: parameters trained in full.
        full_parameters: how many numbers those are.
    """

    index: int
    mixer: str
    lora: tuple[str, ...]
    lora_parameters: int
    full: tuple[str, ...]
    full_parameters: int


@dataclass(frozen=True)
class AdapterPlan:
    """What is trained in a model.

    Attributes:
        layers: its stateful layers.
        rank: of the LoRA matrices.
        alpha: their product counts `alpha / rank` times.
        dtypes: by parameter trained in full, the dtype it was loaded in.
    """

    layers: tuple[LayerPlan, ...]
    rank: int
    alpha: int
    dtypes: Mapping[str, str]

    @property
    def lora(self) -> tuple[str, ...]:
        """All modules that get LoRA."""
        return tuple(name for layer in self.layers for name in layer.lora)

    @property
    def full(self) -> tuple[str, ...]:
        """All parameters trained in full."""
        return tuple(name for layer in self.layers for name in layer.full)

    @property
    def trained(self) -> int:
        """How many numbers are trained."""
        return sum(layer.lora_parameters + layer.full_parameters for layer in self.layers)

    @property
    def changed(self) -> set[str]:
        """The parameters of the model that merging changes."""
        return {f"{name}.weight" for name in self.lora} | set(self.full)

    def names(self) -> set[str]:
        """The names that `trained_parameters` gives what is trained."""
        return {f"{name}.lora_{side}.weight" for name in self.lora for side in "AB"} | set(self.full)

    def undecayed(self) -> frozenset[str]:
        """None: a decay that is asked for holds for all."""
        return frozenset()


def plan_adapters(
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    full: bool = False,
    targets: Sequence[str] | None = None,
    rank: int = RANK,
    alpha: int = ALPHA,
) -> AdapterPlan:
    """Find what is to be trained in each stateful layer of a loaded model.

    Args:
        model: the loaded model, without adapters.
        config: the parsed `config.json` of its checkpoint.
        full: whether the mixers are trained whole, without LoRA.
        targets: modules that get LoRA instead of those that make q, k and v, by whole names or the ends of names as
            peft takes them. They count within stateful mixers only.
        rank: of the LoRA matrices.
        alpha: their product counts `alpha / rank` times.

    Raises:
        FamilyError: the family is unknown, no layer keeps a state, or the model does not have the modules that its
            family promises.
        RecipeError: the targets match a convolution, or not every stateful layer; or a LoRA product of this rank would
            have more numbers than it could need.
    """
    layers = family_for(config).layers(config)
    if not layers:
        raise FamilyError("the model has no layer with a state, so there is nothing to recover")
    if full and targets is not None:
        raise RecipeError("with --full the mixers are trained whole, so no LoRA targets can be named")
    chosen: dict[int, tuple[str, ...]]
    if full:
        chosen = {layer.index: () for layer in layers}
    elif targets is None:
        chosen = {layer.index: _makers(model, layer) for layer in layers}
    else:
        chosen = _matched(model, layers, targets)
    planned = tuple(_plan_layer(model, layer, chosen[layer.index], full, rank) for layer in layers)
    _refuse_rank(model, [name for layer in planned for name in layer.lora], rank)
    names = [name for layer in planned for name in layer.full]
    dtypes = {name: str(model.get_parameter(name).dtype).removeprefix("torch.") for name in names}
    return AdapterPlan(planned, rank, alpha, dtypes)


def apply_adapters(model: Any, plan: AdapterPlan) -> Any:
    """Give a model its LoRA modules, free what is trained in full, and freeze all else.

    Args:
        model: the loaded model, which is changed in place.
        plan: made for it.

    Returns:
        peft's model around it; the model itself where the plan has no LoRA. LoRA starts as no change at all.

    Raises:
        FamilyError: not all of what is planned is trained then, or more than that.
        RecipeError: peft refuses a module.
    """
    model.requires_grad_(False)
    wrapped = model
    if plan.lora:
        from peft import get_peft_model

        try:
            with warnings.catch_warnings():
                # peft asks transformers for a property by a name that is going away.
                warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
                wrapped = get_peft_model(model, _lora_config(plan), autocast_adapter_dtype=True)
        except ValueError as error:
            raise RecipeError(
                f"peft refuses these LoRA targets: {error}", "name others, or pass --full to train the mixers whole"
            ) from error
    for name in plan.full:
        _train_in_full(model, name)
    check_coverage(wrapped, plan)
    return wrapped


def check_coverage(model: nn.Module, plan: TrainingPlan) -> None:
    """See that a model trains what is planned, layer by layer, and nothing else.

    Raises:
        FamilyError: it does not.
    """
    found, wanted = trained_parameters(model), plan.names()
    if found.keys() != wanted:
        missing, more = sorted(wanted - found.keys()), sorted(found.keys() - wanted)
        raise FamilyError(
            "the model does not train what was planned: "
            + "; ".join(
                f"{what} {_listed(names)}" for what, names in (("not trained:", missing), ("beyond it:", more)) if names
            )
        )
    count = sum(parameter.numel() for parameter in found.values())
    if count != plan.trained:
        raise FamilyError(f"the model trains {count} numbers, but {plan.trained} were planned")
    other = {name: parameter.dtype for name, parameter in found.items() if parameter.dtype != torch.float32}
    if other:
        name, dtype = next(iter(other.items()))
        raise FamilyError(f"{name} is trained in {dtype}; what is trained is to be in fp32")


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What a model trains, by the names that the parameters have without peft and without a cast.

    Looked up anew with each call, since FSDP2 puts other parameters in the place of those it shards.

    Args:
        model: with adapters, out of DDP's wrapper.
    """
    return {_plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def whole(value: Any) -> Tensor:
    """A tensor, or all of a sharded one, for which every process must call this at once."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what a model trains, fp32, on the CPU. Where it is sharded, every rank must call this at once."""
    found: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(model).items():
        found[name] = whole(parameter.detach()).to("cpu", torch.float32, copy=True).contiguous()
    return found


def save_adapter(
    folder: Path,
    source: ModelSource,
    plan: AdapterPlan,
    state: Mapping[str, Tensor],
    *,
    settings: Mapping[str, Any] | None = None,
    parents: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write an adapter: LoRA as peft does, and beside it the parameters trained in full.

    Args:
        folder: appears whole or not at all.
        source: the model that was trained, which is the one it can be merged into.
        plan: what was trained.
        state: of `trained_state`.
        settings: of the training, for the lineage.
        parents: digests of what it was made from, likewise.
        overwrite: whether an adapter of that name gives way.

    Returns:
        The folder.

    Raises:
        ArtifactError: something is there already, a value is not finite, or the disk is full.
    """
    from safetensors.torch import save_file

    if state.keys() != plan.names():
        raise ArtifactError(f"what is to be saved is not what was planned: {_listed(state.keys() ^ plan.names())}")
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise ArtifactError(f"{name} holds NaN or infinity; {folder} was not written", "go on from a checkpoint")
    if overwrite and folder.exists() and not (folder / LINEAGE_FILE).is_file():
        raise taken(folder)
    lineage = Lineage(
        kind="adapter",
        model=source.describe(),
        family=family_for(source.config).name,
        settings={"rank": plan.rank, "alpha": plan.alpha, "lora": bool(plan.lora), **(settings or {})},
        parents=dict(parents or {}),
        record={"dtypes": dict(plan.dtypes), "trained": plan.trained},
    )
    full = set(plan.full)
    with atomic_directory(folder, replace=overwrite) as made:
        if plan.lora:
            config = _lora_config(plan, base=str(source.path), inference_mode=True)
            config.save_pretrained(str(made))
            lora = {_PEFT + name: tensor.contiguous() for name, tensor in state.items() if name not in full}
            with atomic_file(made / LORA_FILE) as temporary:  # whose mode is not private to this user
                save_file(lora, temporary, metadata={"format": "pt"})
        write_artifact(made / FULL_FILE, lineage, {name: state[name] for name in plan.full})
        write_document(made / LINEAGE_FILE, lineage)
    return folder


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Put a saved adapter's values into a model that trains the same, in place.

    Raises:
        ArtifactError: there is none, it is damaged, or it holds other parameters than the model trains.
    """
    saved, found = read_adapter(folder)[1], trained_parameters(model)
    if saved.keys() != found.keys():
        raise ArtifactError(
            f"{folder} holds other parameters than the model trains: {_listed(saved.keys() ^ found.keys())}",
            "give the model adapters with the settings that the adapter was made with",
        )
    with torch.no_grad():
        for name, parameter in found.items():
            if saved[name].shape != parameter.shape:
                raise ArtifactError(
                    f"{name} has the shape {list(saved[name].shape)} in {folder}, the model's {list(parameter.shape)}"
                )
            parameter.copy_(saved[name])


def read_adapter(folder: Path) -> tuple[Lineage, dict[str, Tensor]]:
    """Read an adapter that `save_adapter` wrote: its lineage, and the values by the names of `trained_parameters`.

    Raises:
        ArtifactError: there is none, it is damaged, or its LoRA is of a kind that lapcli does not make.
    """
    import json

    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (folder / LINEAGE_FILE).is_file():
        raise ArtifactError(
            f"{folder} is no adapter of lapcli's: it holds no {LINEAGE_FILE}",
            "make one with `lapcli recover`; an adapter of another tool is merged by that tool",
        )
    lineage = read_document(folder / LINEAGE_FILE, "adapter")
    values = read_artifact(folder / FULL_FILE, "adapter").tensors()
    if lineage.settings.get("lora"):
        try:
            config = json.loads((folder / LORA_CONFIG).read_text())
            lora = load_file(folder / LORA_FILE)
        except (OSError, ValueError, SafetensorError) as error:
            raise ArtifactError(f"{folder} is damaged: {error}", "save the adapter again, from a checkpoint") from error
        found = (config.get("peft_type"), config.get("r"), config.get("lora_alpha"))
        special = [name for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if config.get(name)]
        if found != ("LORA", lineage.settings["rank"], lineage.settings["alpha"]) or special:
            raise ArtifactError(f"{folder / LORA_CONFIG} is not as lapcli wrote it", "save the adapter again")
        values |= {name.removeprefix(_PEFT): tensor for name, tensor in lora.items()}
    bad = next((name for name, tensor in values.items() if not tensor.isfinite().all()), None)
    if bad is not None:
        raise ArtifactError(f"{bad} of {folder} holds NaN or infinity", "save an adapter of an earlier checkpoint")
    return lineage, values


class _Cast(nn.Module):
    """What a module reads of its fp32 original."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, original: Tensor) -> Tensor:
        """In the dtype that the module had."""
        return original.to(self.dtype)


def _train_in_full(model: nn.Module, name: str) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    parameter = module.get_parameter(leaf)
    if parameter.dtype == torch.float32:
        parameter.requires_grad_(True)
        return
    setattr(module, leaf, nn.Parameter(parameter.detach().float()))
    # "Unsafe" is the change of dtype, which is the point.
    parametrize.register_parametrization(module, leaf, _Cast(parameter.dtype), unsafe=True)


def _plain_name(name: str) -> str:
    return _LORA.sub(r".lora_\1.weight", _ORIGINAL.sub(r".\1", name.removeprefix(_PEFT)))


def _lora_config(plan: AdapterPlan, base: str | None = None, inference_mode: bool = False) -> Any:
    from peft import LoraConfig

    # Without a task type peft's model passes on what it is called with, which some models' signatures need.
    return LoraConfig(
        r=plan.rank,
        lora_alpha=plan.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(plan.lora),
        base_model_name_or_path=base,
        inference_mode=inference_mode,
    )


def _module(model: nn.Module, name: str, layer: StatefulLayer) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise FamilyError(f"layer {layer.index} has no module {name}, where q, k or v are made") from error


def _makers(model: nn.Module, layer: StatefulLayer) -> tuple[str, ...]:
    """The projections that make q, k and v: one with all three, or one each."""
    if layer.keys is not None and layer.queries is not None:
        names = [layer.queries.projection, layer.keys.projection]
    else:
        # A family without taps runs in lapcli's own classes, whose names in memory are those on disk.
        tensors = {member.role: member.tensor for member in layer.members}
        names = [tensors[role].removesuffix(".weight") for role in ("query projection", "key projection")]
    packed = names[0] == names[1]
    if not packed:
        names.append(f"{layer.mixer}.v_proj")
    keys, values = layer.heads * layer.key_width, layer.heads * layer.value_width
    if packed:
        # Beside them it may have gates.
        needed = 2 * keys + layer.value_heads * layer.value_width
        fits = _linear(_module(model, names[0], layer), names[0]).out_features >= needed
    else:
        # Each head may be there more than once: read by several, or written several times by one token.
        rows = [_linear(_module(model, name, layer), name).out_features for name in names]
        fits = not any(found % side for found, side in zip(rows, (keys, keys, values), strict=True))
    if not fits:
        raise FamilyError(
            f"{', '.join(dict.fromkeys(names))} of layer {layer.index} do not have the rows for {layer.heads} heads of "
            f"{layer.key_width} key and {layer.value_width} value channels"
        )
    return tuple(dict.fromkeys(names))


def _linear(module: nn.Module, name: str) -> nn.Linear:
    if _is_convolution(module):
        raise RecipeError(
            f"{name} is a short convolution; LoRA on it is not what merging can undo",
            "leave it out of the targets: the convolutions of recurrent layers are trained in full anyway",
        )
    if not isinstance(module, nn.Linear):
        raise RecipeError(f"{name} is a {type(module).__name__}; LoRA is for linear projections", "leave it out")
    return module


def _matched(model: nn.Module, layers: Iterable[StatefulLayer], targets: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """By layer, the modules that targets match as peft does, each target in each layer."""
    names = [name for name, module in model.named_modules() if name and getattr(module, "weight", None) is not None]
    found: dict[int, list[str]] = {}
    unmatched: dict[str, list[int]] = {}
    mixers = {layer.index: layer.mixer for layer in layers}
    for index, mixer in mixers.items():
        inside = [name for name in names if name.startswith(f"{mixer}.")]
        hits = {
            target: [name for name in inside if name == target or name.endswith(f".{target}")] for target in targets
        }
        found[index] = sorted({name for matches in hits.values() for name in matches})
        for target, matches in hits.items():
            others = _names_layer(target, mixers, index)
            if not matches and not others:
                unmatched.setdefault(target, []).append(index)
    for name in (name for matches in found.values() for name in matches):
        _linear(model.get_submodule(name), name)
    bare = [index for index, matches in found.items() if not matches]
    if bare or unmatched or not targets:
        _refuse_uncovered(model, names, mixers, found, targets, unmatched)
    return {index: tuple(matches) for index, matches in found.items()}


def _refuse_rank(model: nn.Module, names: Sequence[str], rank: int) -> None:
    """A product of matrices has no higher rank than the narrower side of what it is added to."""
    widths = {name: min(model.get_parameter(f"{name}.weight").shape) for name in names}
    if not widths or rank <= min(widths.values()):
        return
    narrowest = min(widths, key=widths.__getitem__)
    rows, columns = model.get_parameter(f"{narrowest}.weight").shape
    above = sum(rank > width for width in widths.values())
    raise RecipeError(
        f"LoRA of rank {rank} is more than {above} of the {len(widths)} matched projections can take, first "
        f"{narrowest}, which is {rows} x {columns}: its changes have rank {min(rows, columns)} at most",
        f"pass --lora-rank {widths[narrowest]} or less, or --full to train the mixers whole",
    )


def _names_layer(target: str, mixers: Mapping[int, str], index: int) -> bool:
    """Whether a target is the whole name of a module of another layer, so that it need not be in this one."""
    return any(target.startswith(f"{mixer}.") for other, mixer in mixers.items() if other != index)


def _refuse_uncovered(
    model: nn.Module,
    names: Sequence[str],
    mixers: Mapping[int, str],
    found: Mapping[int, Sequence[str]],
    targets: Sequence[str],
    unmatched: Mapping[str, Sequence[int]],
) -> None:
    lines = [
        f"layer {index} ({mixers[index]}): "
        + (", ".join(name.removeprefix(f"{mixers[index]}.") for name in matches) or "none")
        for index, matches in found.items()
    ]
    inside = tuple(f"{mixer}." for mixer in mixers.values())
    elsewhere = [
        name
        for name in names
        if not name.startswith(inside) and any(name == target or name.endswith(f".{target}") for target in targets)
    ]
    covered = sum(bool(matches) for matches in found.values())
    message = f"the LoRA targets {', '.join(targets) or '(none)'} match {covered} of {len(found)} recurrent layers"
    if unmatched:
        message += "; " + "; ".join(
            f"{target} is missing from layers {list(rows)}" for target, rows in unmatched.items()
        )
    message += ". Matched modules per layer:\n  " + "\n  ".join(lines)
    if elsewhere:
        message += f"\n  outside of recurrent mixers, never trained: {_listed(elsewhere)}"
    first = next(iter(mixers.values()))
    in_full = getattr(model.get_submodule(first), "retrained", ())
    linear = [
        name.removeprefix(f"{first}.")
        for name in names
        if name.startswith(f"{first}.")
        and isinstance(model.get_submodule(name), nn.Linear)
        and f"{name.removeprefix(f'{first}.')}.weight" not in in_full
    ]
    raise RecipeError(
        message,
        "leave the targets out, which takes the projections of q, k and v in every recurrent layer, or name some of "
        + ", ".join(linear),
    )


def _plan_layer(model: nn.Module, layer: StatefulLayer, lora: tuple[str, ...], full: bool, rank: int) -> LayerPlan:
    mixer = _module(model, layer.mixer, layer)
    block_name = layer.mixer.rpartition(".")[0]
    modules = [(f"{layer.mixer}.{name}", module) for name, module in mixer.named_modules() if name]
    convolutions = {name: module for name, module in modules if _is_convolution(module)}
    _check_convolutions(layer, convolutions)
    norms = {name: module for name, module in modules if _is_norm(module)}
    norms |= _block_norms(model.get_submodule(block_name), block_name)
    owners = {**({layer.mixer: mixer} if full else {}), **convolutions, **norms}
    names = dict.fromkeys(
        f"{owner}.{name}" for owner, module in owners.items() for name, _parameter in module.named_parameters()
    )
    # Of lapcli's own models what else they ask for (Q-Delta's feedback).
    names |= dict.fromkeys(f"{layer.mixer}.{name}" for name in getattr(mixer, "retrained", ()))
    twice = next((name for name in lora if f"{name}.weight" in names), None)
    if twice is not None:
        raise RecipeError(
            f"{twice} is trained in full whatever gets LoRA, so that it cannot get any", "leave it out of --lora-target"
        )
    linears = [_linear(model.get_submodule(name), name) for name in lora]
    return LayerPlan(
        index=layer.index,
        mixer=layer.mixer,
        lora=lora,
        lora_parameters=sum(rank * (linear.in_features + linear.out_features) for linear in linears),
        full=tuple(names),
        full_parameters=sum(prod(model.get_parameter(name).shape) for name in names),
    )


def _check_convolutions(layer: StatefulLayer, convolutions: Mapping[str, nn.Module]) -> None:
    declared = {tap.convolution for tap in (layer.keys, layer.queries) if tap is not None} - {None}
    channels = sum(_channels(module) for module in convolutions.values())
    wanted = 0 if layer.convolution is None else layer.convolution.channels
    if channels != wanted or not declared <= convolutions.keys():
        raise FamilyError(
            f"the short convolutions of layer {layer.index} ({', '.join(convolutions) or 'none'}) have {channels} "
            f"channels, but its family declares {wanted}"
        )


def _channels(convolution: nn.Module) -> int:
    """Of a short convolution; lapcli's own may have one filter for several."""
    if isinstance(convolution, ShortConvolution):
        return convolution.channels
    return convolution.get_parameter("weight").shape[0]


def _is_convolution(module: nn.Module) -> bool:
    """Whether a module is a short convolution: one filter a channel, `[channels, 1, taps]`, as every library has it.

    Of lapcli's own the first axis may count heads instead.
    """
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 3 and weight.shape[1] == 1


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, which libraries say in the names of their classes alone."""
    parameters = list(module.parameters())
    return "norm" in type(module).__name__.lower() and all(parameter.ndim == 1 for parameter in parameters)


def _block_norms(block: nn.Module, name: str) -> dict[str, nn.Module]:
    """The norms around a mixer, also where hyper-connections hold them; those within MLPs or softmax are others'."""
    found = {f"{name}.{child}": module for child, module in block.named_children() if _is_norm(module)}
    for child, module in block.named_children():
        if "HyperConnection" in type(module).__name__:
            found |= {f"{name}.{child}.{inner}": norm for inner, norm in module.named_children() if _is_norm(norm)}
    return found


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_SHOWN]) + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")
