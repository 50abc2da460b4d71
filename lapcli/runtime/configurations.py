"""One model in several configurations: a prefix of its converted layers are states, the others attention."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lapcli.artifacts import Artifact
from lapcli.errors import ArtifactError, ModelError, UsageError
from lapcli.families.remote.lapcli_dual_state import DualStateSettings, convert_layers, decoder_of
from lapcli.runtime.llama_models import input_projections, output_projection
from lapcli.runtime.offload import Offload
from lapcli.runtime.pages import AttentionPool
from lapcli.runtime.pools import RecurrentPool

if TYPE_CHECKING:
    from lapcli.families.loading import Weights

ONLY = "base"
"""Name of the configuration of a model that has one."""


class Configuration(NamedTuple):
    """A way to run a model.

    Attributes:
        name: `n-of-L`; `base` for a model that comes in one configuration.
        converted: n, layers that are states.
        layers: L, all of them.
        fixed_bytes: of a row's states, whole pages where they lie in such.
        token_bytes: of keys and values, for each token of a row.
        quality: what was measured when it was converted: `cross_entropy` and `perplexity` on held-out text, `increase`
            of the perplexity over the base's (0.05 is five per cent), `kl` from it, `tasks` with their scores.
    """

    name: str
    converted: int
    layers: int
    fixed_bytes: int
    token_bytes: int
    quality: Mapping[str, Any]


class Convertible:
    """A Transformer and what some of its layers were converted to, all of it in memory once.

    Args:
        model: the Transformer; its blocks hold the modules of the configuration that was asked for last.
        order: of its layers' numbers, in which they were converted.
        numbers: converted layers of each configuration, rising.
        attention: the library's modules of those layers that are attention in some configuration and states in another.
        states: the converted modules of all layers that are states in any.
        quality: of each configuration, by its number.
        offload: what brings the projections of `attention` to the device; `None` where they are there.
    """

    def __init__(
        self,
        model: Any,
        order: Sequence[int],
        numbers: Sequence[int],
        attention: Mapping[int, nn.Module],
        states: Mapping[int, nn.Module],
        quality: Mapping[int, Mapping[str, Any]],
        offload: Offload | None = None,
    ):
        self.model, self.order, self.numbers, self.quality = model, tuple(order), tuple(numbers), quality
        self.attention, self.states, self.offload = dict(attention), dict(states), offload
        self.converted = -1
        for module in (*self.attention.values(), *self.states.values()):
            module.requires_grad_(False).eval()
        if offload is not None:
            for layer, module in self.attention.items():
                _bring(module, layer, offload, self)
        self.configure(self.numbers[-1])

    def configure(self, converted: int) -> None:
        """Let the model be one configuration."""
        if converted == self.converted:
            return
        self.converted = converted
        blocks: Any = decoder_of(self.model).layers
        for rank, layer in enumerate(self.order[: self.numbers[-1]]):
            blocks[layer].self_attn = self.states[layer] if rank < converted else self.attention[layer]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers of all configurations."""
        for module in (self.model, *self.attention.values(), *self.states.values()):
            yield from module.parameters()
            yield from module.buffers()

    @property
    def layer_bytes(self) -> tuple[int, int]:
        """Bytes of the weights of a layer as attention, and as states; none where no layer is both."""
        layer = next(iter(self.attention), None)
        if layer is None:
            return 0, 0
        attention, states = (
            storage_bytes((*module.parameters(), *module.buffers()))
            for module in (self.attention[layer], self.states[layer])
        )
        return attention, states

    def configurations(self, block_bytes: int, attention: Mapping[int, AttentionPool]) -> tuple[Configuration, ...]:
        """What an engine offers.

        Args:
            block_bytes: that the states of a layer take of a row.
            attention: its pools of keys and values.
        """
        layers = len(decoder_of(self.model).layers)
        found: list[Configuration] = []
        for number in self.numbers:
            states = self.order[:number]
            token = _token_bytes(pool for layer, pool in attention.items() if layer not in states)
            name, fixed = f"{number}-of-{layers}", number * block_bytes
            found.append(Configuration(name, number, layers, fixed, token, self.quality[number]))
        return tuple(found)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors take, several of which may lie in one place, and with room beside them."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def only_configuration(
    model: Any, recurrent: Mapping[int, RecurrentPool], attention: Mapping[int, AttentionPool]
) -> Configuration:
    """That of a model which comes in one, by its pools."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return Configuration(ONLY, 0, layers, _row_bytes(recurrent.values()), _token_bytes(attention.values()), {})


def load_convertible(
    root: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    kernel: str = "auto",
    configurations: Iterable[int] | None = None,
    offload: bool = False,
    weights: "Weights" = "on device",
) -> Convertible:
    """Load the directory of a conversion, `lapcli convert --to dsla --output DIR`.

    Args:
        root: the directory.
        device: where rows are decoded.
        dtype: of weights and activations.
        kernel: of `lapkernels.dual_state`, for prompts.
        configurations: converted layers of each that is wanted; `None` for all, from none to all that were converted.
        offload: whether projections of attention layers that can be states lie in memory beside the device.
        weights: `nowhere` for tensors without contents, as `load_model` makes them; nothing can be offloaded then.

    Raises:
        ArtifactError: so many layers were not converted, or the model beside them has changed since.
        ModelError: layers that became windows are wanted, or the model cannot be loaded.
        UsageError: no configuration is asked for, or one of fewer layers than none.
    """
    from lapcli.families.dual_state import set_kernel
    from lapcli.families.loading import load_model
    from lapcli.linearising.kept import checked, kept_teacher
    from lapcli.linearising.plan import Place

    place = Place(Path(root))
    base = kept_teacher(place)
    found = checked(place, base)
    numbers = _wanted(place.root, len(found), configurations)
    settings = DualStateSettings(**found[0].lineage.settings["dual_state"]) if found else DualStateSettings()
    if settings.window is not None and numbers[-1]:
        raise ModelError(
            f"the layers of {root} attend to a window with sinks, a control: there is no mixing them with attention",
            "export one configuration (lapcli convert --export), or convert to states",
        )
    device = torch.device(device)
    # What is offloaded comes to the device when it is needed, so that all of it need not fit there at any time.
    there = "in memory" if offload and weights == "on device" else weights
    model: Any = load_model(base, device=device, dtype=dtype, weights=there)
    order = [artifact.lineage.settings["layer"] for artifact in found]
    ranks = {layer: rank for rank, layer in enumerate(order[: numbers[-1]])}
    bringer = Offload(device) if offload else None
    attention: dict[int, nn.Module] = {}
    states: dict[int, nn.Module] = {}
    for layer, rank in sorted(ranks.items()):
        block = decoder_of(model).layers[layer]
        library = block.self_attn
        # A config is not the layer's own.
        block.self_attn = copy.deepcopy(library, {id(library.config): library.config})
        convert_layers(model, settings, [layer])
        states[layer] = block.self_attn
        if weights != "nowhere":
            states[layer].load_state_dict(_tensors(found[rank], base))
        if rank >= numbers[0]:
            attention[layer] = library
            if bringer is not None:
                bringer.keep(layer, rank, input_projections(library), output_projection(library))
                # Norms, if it has any; its projections are where they come to.
                library.to(device)
    if bringer is not None:
        model.to(device)
    set_kernel(model, kernel, device)
    quality = {number: _quality(found, number) for number in numbers}
    return Convertible(model, order, numbers, attention, states, quality, bringer)


def _wanted(root: Path, count: int, configurations: Iterable[int] | None) -> list[int]:
    """Converted layers of each configuration, rising."""
    numbers = sorted(set(range(count + 1) if configurations is None else configurations))
    if not numbers or numbers[0] < 0:
        raise UsageError(f"configurations {numbers}: numbers of converted layers are wanted, 0 for the base")
    if numbers[-1] > count:
        from lapcli.linearising.command import convert_command

        raise ArtifactError(
            f"{root} holds {count} converted layers, and a configuration of {numbers[-1]} is asked for",
            convert_command(root, "F"),
        )
    return numbers


def _tensors(artifact: Artifact, base: Any) -> dict[str, torch.Tensor]:
    """Those of a converted layer's module, as an exported model has them."""
    from lapcli.stages.dual_state_writing import as_stored

    return {
        name.partition(".self_attn.")[2]: as_stored(base, name, tensor) for name, tensor in artifact.tensors().items()
    }


def _quality(found: Sequence[Artifact], number: int) -> dict[str, Any]:
    """What was measured of a prefix, as `conversion.json` has it."""
    if not found:
        return {}
    base = found[0].lineage.record["teacher_cross_entropy"]
    record = found[number - 1].lineage.record if number else {"cross_entropy": base, "kl": 0.0, "tasks": []}
    return {
        "cross_entropy": record["cross_entropy"],
        "perplexity": math.exp(record["cross_entropy"]),
        "increase": math.expm1(record["cross_entropy"] - base),
        "kl": record["kl"],
        "tasks": record["tasks"],
    }


def _bring(module: nn.Module, layer: int, offload: Offload, convertible: Convertible) -> None:
    """Have a module's weights at hand when the library's own pass calls it."""
    module.register_forward_pre_hook(lambda *_: offload.use(layer, convertible.converted))
    module.register_forward_hook(lambda *_: offload.done(layer))


def _row_bytes(pools: Iterable[RecurrentPool]) -> int:
    return sum(tensor[0].nbytes for pool in pools for tensor in pool.tensors())


def _token_bytes(pools: Iterable[AttentionPool]) -> int:
    # Heads of one slot, of one token.
    return sum(tensor[0, :, 0].nbytes for pool in pools for tensor in pool.tensors())
