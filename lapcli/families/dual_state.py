"""Decoders of which some attention layers were turned into dual-state linear attention, DSLA (arXiv 2506.09316).

Each head has n states with a gate for each key channel, which is cut with the keys. Queries and keys are those of the
teacher's attention after its rotary embedding, which turns channels in pairs: so the projections stay whole, and the
layer picks the kept channels out of what comes of them (`key_channels`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lapcli.errors import FamilyError, ModelError
from lapcli.families.base import Family, Member, ModelCode, Observer, Role, StatefulLayer
from lapcli.families.fields import bad_field, optional_integer, positive_integer

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.utils.hooks import RemovableHandle

    from lapkernels.delta_rule import Choice

TEACHERS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "phi": "Phi",
    "phi3": "Phi3",
}
"""The model types whose attention layers can be converted, and how the library's classes of each begin."""

_OWN_TYPE = "lapcli_dual_state_"
_SETTINGS = "dual_state"


def teacher_type(config: Mapping[str, Any]) -> str:
    """The model type of what a config's model is, or was before its layers were converted."""
    return str(config.get("model_type", "")).removeprefix(_OWN_TYPE)


def model_code(config: Mapping[str, Any]) -> ModelCode:
    """The code that a converted model of this type needs beside it.

    Raises:
        FamilyError: no model of this type can be converted.
    """
    name = TEACHERS.get(teacher_type(config))
    if name is None:
        raise FamilyError(
            f"model_type {config.get('model_type')!r} has no attention that can become dual-state; these have: "
            + ", ".join(TEACHERS),
            "name a Llama-like decoder",
        )
    return ModelCode(
        module="modeling_lapcli_dual_state",
        imports=(
            "lapcli_dual_state",
            "lapcli_dual_state_cache",
            "lapcli_dual_state_portable",
            "lapcli_dual_state_window",
        ),
        config=f"LapcliDualState{name}Config",
        model=f"LapcliDualState{name}ForCausalLM",
    )


def converted_config(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model some of whose layers are converted; without any, the teacher's own.

    Args:
        config: the teacher's, or a converted model's.
        settings: as `DualStateSettings.as_config` gives them.

    Raises:
        FamilyError: no model of this type can be converted.
    """
    code, teacher = model_code(config), teacher_type(config)
    plain = {name: value for name, value in config.items() if name not in (_SETTINGS, "auto_map")}
    # What a teacher's repository says of code is said of other classes; its tokenizer's code stays where it is.
    others = {
        name: place
        for name, place in (config.get("auto_map") or {}).items()
        if name != "AutoConfig" and not name.startswith("AutoModel")
    }
    if not settings["layers"]:
        found = {**plain, "model_type": teacher, "architectures": [f"{TEACHERS[teacher]}ForCausalLM"]}
        return {**found, "auto_map": others} if others else found
    return {
        **plain,
        "model_type": _OWN_TYPE + teacher,
        "architectures": [code.model],
        "auto_map": {**code.auto_map(), **others},
        _SETTINGS: dict(settings),
    }


def has_states(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config has layers with states: converted ones, of which none attends to a window."""
    settings = config.get(_SETTINGS)
    if not str(config.get("model_type", "")).startswith(_OWN_TYPE) or not isinstance(settings, Mapping):
        return False
    return bool(settings.get("layers")) and settings.get("window") is None


def kernel_choice(
    kernel: str, device: "torch.device", dtype: "torch.dtype", *, needs_gradient: bool = False
) -> "Choice":
    """Which implementation of `lapkernels.dual_state` runs where a name was asked for, and why.

    Args:
        kernel: its name, or `auto`.
        device: where.
        dtype: of the model.
        needs_gradient: whether a backward pass will follow.

    Raises:
        ModelError: it cannot run there, or there is none of this name.
    """
    from lapkernels.delta_rule import Choice
    from lapkernels.dual_state import IMPLEMENTATIONS, select_impl, why_not

    if kernel == "auto":
        return select_impl(device, dtype, time=2, needs_gradient=needs_gradient)
    if kernel not in IMPLEMENTATIONS:
        raise ModelError(
            f"--kernel {kernel}: layers with gated states have {', '.join(IMPLEMENTATIONS)}", "use --kernel auto"
        )
    wrong = why_not(kernel, device, dtype, needs_gradient=needs_gradient)
    if wrong is not None:
        raise ModelError(f"--kernel {kernel} cannot run here: {wrong}", "use --kernel auto")
    return Choice(kernel, "asked for by name")


def set_kernel(model: "Module", kernel: str, device: "torch.device") -> None:
    """Let all layers with states of a model run an implementation of `lapkernels.dual_state`.

    Args:
        model: some of whose layers are converted.
        kernel: its name, or `auto`.
        device: where the model will compute.

    Raises:
        ModelError: it cannot run there.
    """
    from lapcli.families.remote.lapcli_dual_state import dual_state_layers

    dtype: Any = next(model.parameters()).dtype
    kernel_choice(kernel, device, dtype)
    for layer in dual_state_layers(model).values():
        layer.kernel = kernel


class DualState(Family):
    """The heads are the teacher's key heads; each keeps `dual_state.states` states."""

    name = "dsla"
    model_types = tuple(_OWN_TYPE + teacher for teacher in TEACHERS)
    tested = "masked oracle on the converted attention of transformers' own classes, reload by stock transformers"

    def layers(self, config: Mapping[str, Any]) -> tuple[StatefulLayer, ...]:
        """Declare the converted layers; none of a window, which keeps keys and values."""
        settings = self._settings(config)
        if settings.get("window") is not None:
            return ()
        readers = positive_integer(config, "num_attention_heads")
        heads = optional_integer(config, "num_key_value_heads", readers)
        if readers % heads:
            raise bad_field("num_key_value_heads", heads, f"a divisor of num_attention_heads = {readers}")
        width = optional_integer(config, "head_dim", positive_integer(config, "hidden_size") // readers)
        states = settings["states"]
        own = settings.get("key_width") or width
        further = (settings.get("width", 1) - 1) * width
        return tuple(
            StatefulLayer(
                index=index,
                mixer=_mixer(index),
                heads=heads,
                value_heads=heads * states,
                key_width=own + further,
                value_width=width,
                states=states,
                # Channels with projections of their own make another key axis, which no selection reaches.
                members=() if further else self._members(config, index, heads, readers, width, own, states),
            )
            for index in sorted(settings["layers"])
        )

    def _members(
        self, config: Mapping[str, Any], index: int, heads: int, readers: int, width: int, own: int, states: int
    ) -> tuple[Member, ...]:
        mixer, copies = _mixer(index), readers // heads
        packed = teacher_type(config) == "phi3"
        query, key = ("qkv_proj.weight",) * 2 if packed else ("q_proj.weight", "k_proj.weight")
        found = [
            Member(f"{mixer}.{query}", "query projection", stride=copies * width, offset=copy * width, stays=True)
            for copy in range(copies)
        ]
        first = readers * width if packed else 0
        found.append(Member(f"{mixer}.{key}", "key projection", stride=width, offset=first, stays=True))
        gates: tuple[tuple[str, Role], ...] = (
            ("forget_proj.weight", "gate projection"),
            ("forget_proj.bias", "gate bias"),
        )
        found += [
            Member(f"{mixer}.{tensor}", role, stride=own, offset=state * heads * own)
            for tensor, role in gates
            for state in range(states)
        ]
        return (*found, Member(f"{mixer}.key_channels", "key channels", stride=own))

    def sliced_config(self, config: Mapping[str, Any], kept_width: int) -> dict[str, Any]:
        """Set the key width among the settings; with all channels the config stays as it is.

        Raises:
            FamilyError: channels were cut before, or some have projections of their own.
        """
        settings = self._settings(config)
        if settings.get("key_width") is not None:
            raise FamilyError(
                f"the states of this model were cut to {settings['key_width']} key channels before, and which of its "
                "projections' rows those are is no longer what selectors expect",
                "prune the model that it was cut from, with a larger ratio",
            )
        if settings.get("width", 1) > 1:
            raise FamilyError(
                f"the states of this model have width = {settings['width']}: a control with channels of its own, which "
                "cannot be cut",
                "convert its teacher with `lapcli convert --width 1`",
            )
        layers = self.layers(config)
        if not layers or kept_width == layers[0].key_width:
            return dict(config)
        return {**config, _SETTINGS: {**config[_SETTINGS], "key_width": kept_width}}

    def model_code(self, config: Mapping[str, Any]) -> ModelCode | None:
        """Lapcli's own."""
        return model_code(config)

    def attach(self, model: "Module", layer: StatefulLayer, observer: Observer) -> "list[RemovableHandle]":
        """Hook the mixer's input, and its tap, which returns q and k and may be given others."""
        mixer = model.get_submodule(layer.mixer)

        def before(_module: "Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            observer.mixer_input(args[0] if args else kwargs["hidden_states"])

        def tapped(_module: "Module", _args: tuple[Any, ...], output: "tuple[Tensor, Tensor]") -> Any:
            q, k = output
            # Query heads that share a key head lie side by side.
            changed = observer.queries_keys(q.unflatten(2, (layer.heads, -1)).transpose(2, 3), k)
            return None if changed is None else (changed[0].transpose(2, 3).flatten(2, 3), changed[1])

        return [
            mixer.register_forward_pre_hook(before, with_kwargs=True),
            mixer.get_submodule("tap").register_forward_hook(tapped),
        ]

    def parameter(self, model: "Module", layer: StatefulLayer, member: Member) -> "Parameter":
        """Names in memory are the names on disk."""
        return model.get_parameter(member.tensor)

    def _settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        settings = config.get(_SETTINGS)
        whole = settings.get("layers") if isinstance(settings, Mapping) else None
        if not isinstance(settings, Mapping) or not isinstance(whole, list):
            raise ModelError(
                f"config.json has {_SETTINGS} = {settings!r}; the settings of converted layers are wanted",
                "put config.json right, or convert the model again",
            )
        count = positive_integer(config, "num_hidden_layers")
        if not all(isinstance(index, int) and 0 <= index < count for index in whole) or len(set(whole)) < len(whole):
            raise bad_field(f"{_SETTINGS}.layers", whole, f"each layer's number once, from 0 to {count - 1}")
        positive_integer(settings, "states")
        return settings


def _mixer(index: int) -> str:
    return f"model.layers.{index}.self_attn"
