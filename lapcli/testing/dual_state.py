"""Tiny real teachers of every kind whose attention can be converted, converted models, and an oracle of the layer."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli.artifacts import Lineage, write_artifact
from lapcli.families.dual_state import TEACHERS
from lapcli.families.loading import load_model
from lapcli.families.remote.lapcli_dual_state import DualStateSettings, convert_layers, dual_state_layers
from lapcli.families.source import ModelSource, resolve_model
from lapcli.linearising.plan import Place
from lapcli.linearising.record import KIND
from lapcli.stages.dual_state_writing import write_converted

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"head_dim": 12, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "smollm3": {},
    "phi": {"qk_layernorm": True, "partial_rotary_factor": 0.5},
    "phi3": {},
}
"""What is particular about each: biases, tied embeddings, heads of a width of their own, norms, partial rotation."""


def tiny_teacher(model_type: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **change: Any) -> Any:
    """A model of three layers with grouped heads, in eval mode, matrices from N(0, 1 / fan_in), biases not zero.

    Args:
        model_type: of `TEACHERS`.
        dtype: of its weights.
        seed: of the draw.
        change: fields of the config.
    """
    import transformers

    config: Any = getattr(transformers, f"{TEACHERS[model_type]}Config")(
        **{**_SIZES, **_KINDS[model_type], **change}, attn_implementation="sdpa"
    )
    torch.manual_seed(seed)
    model: Any = getattr(transformers, f"{TEACHERS[model_type]}ForCausalLM")(config)
    fill(model, seed)
    return model.to(dtype).eval()


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw all weights of a model: matrices from N(0, 1 / fan_in), all else around what it begins as."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            parameter.copy_(drawn * (1.0 if "embed" in name else parameter.shape[1] ** -0.5))
        else:
            parameter.add_(0.1 * drawn)


def tiny_source(model_type: str, folder: Path, *, shards: str | None = None, **options: Any) -> ModelSource:
    """A tiny teacher on disk, with a tokenizer of one token a byte."""
    from lapcli.testing.models import byte_tokenizer

    model = tiny_teacher(model_type, **{"vocab_size": 300, **options})
    model.save_pretrained(folder, **({} if shards is None else {"max_shard_size": shards}))
    byte_tokenizer().save_pretrained(folder)
    return resolve_model(str(folder))


def converted(model: Any, *layers: int, seed: int = 1, **settings: Any) -> Any:
    """Convert layers of a model in place; the new weights are drawn, so that no gate or mixture is at its beginning."""
    convert_layers(model, DualStateSettings(layers=layers, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in dual_state_layers(model).values():
            for parameter in layer.new_parameters().values():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def tiny_pair(
    model_type: str = "llama",
    *,
    before: Sequence[int] = (2,),
    layer: int = 1,
    kernel: str = "auto",
    teacher: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """A student in the training of a layer, and its teacher.

    Args:
        model_type: of the teacher.
        before: layers that were converted and trained before.
        layer: the one that is trained, in fp32 unless the rest is wider.
        kernel: of all of them.
        teacher: as for `tiny_teacher`.
        settings: of the layers.
    """
    guide = tiny_teacher(model_type, **{"dtype": torch.float64, **(teacher or {})}).requires_grad_(False)
    student = copy.deepcopy(guide)
    for number in before:
        converted(student, number, seed=number + 5, **settings)
    student.requires_grad_(False)
    converted(student, layer, seed=4, **settings)
    attention = student.model.layers[layer].self_attn
    attention.to(torch.promote_types(guide.dtype, torch.float32)).requires_grad_(True)
    for each in dual_state_layers(student).values():
        each.kernel = kernel
    return student.train(), guide


def converted_source(
    source: ModelSource, folder: Path, layers: Sequence[int] = (2, 0), **settings: Any
) -> tuple[ModelSource, Any]:
    """A converted model on disk, and the same in memory as it was before it was written."""
    model: Any = load_model(source)
    chosen = DualStateSettings(layers=tuple(layers), **settings)
    converted(model, *layers, **settings)
    write_converted(source, chosen.as_config(), layer_tensors(model, layers), folder, card="# a test\n")
    return resolve_model(str(folder)), model


def layer_tensors(model: Any, layers: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of attention modules, buffers too, by their names in the model."""
    prefixes = tuple(f"model.layers.{layer}.self_attn." for layer in layers)
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefixes)}


def tiny_conversion(
    root: Path, model_type: str = "llama", order: Sequence[int] = (2, 0, 1), *, teacher: Any = None, **settings: Any
) -> Path:
    """The directory of a conversion whose layers are drawn, not trained; all that a trained one has for its readers.

    Args:
        root: the directory.
        model_type: of the teacher.
        order: of the layers, as far as they are converted.
        teacher: fields of its config, or `dtype` and `shards`, as for `tiny_source`.
        settings: of the layers.
    """
    place = Place(root)
    base = tiny_source(model_type, place.base, **(teacher or {}))
    generator = torch.Generator().manual_seed(7)
    for number, layer in enumerate(order, 1):
        model: Any = load_model(base)
        # Every tensor of the layer differs from the teacher's.
        tensors = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in layer_tensors(converted(model, layer, **settings), [layer]).items()
        }
        write_layer(
            place, base, number, layer, tensors, settings=DualStateSettings(**settings),
            teacher_cross_entropy=2.0, worse=0.1 * number,
        )  # fmt: skip
    return root


def write_layer(
    place: Place,
    base: ModelSource,
    number: int,
    layer: int,
    tensors: Mapping[str, Tensor],
    *,
    settings: DualStateSettings,
    teacher_cross_entropy: float,
    worse: float,
) -> None:
    """Write a converted layer as `lapcli convert --to dsla` does, with all that its readers look for.

    Args:
        place: of the conversion.
        base: its teacher.
        number: of the layer in the order of conversion, from 1.
        layer: its place in the model.
        tensors: of its attention module, by their names in the model.
        settings: of the layers.
        teacher_cross_entropy: nats a token that the teacher is said to have.
        worse: nats more that the model with the first `number` layers converted is said to have.
    """
    lineage = Lineage(
        kind=KIND,
        model=base.describe(),
        family="dsla",
        settings={
            "number": number,
            "layer": layer,
            "dual_state": {**settings.as_config(), "layers": []},
            "distillation": {
                "data": "none",
                "chained": True,
                "validation": 1,
                "seq_len": 64,
                "steps": 1,
                "batch": 1,
                "lr": 1e-3,
            },
        },
        record={
            "number": number,
            "layer": layer,
            "alignment": {"before": 1.0, "after": 0.5},
            "cross_entropy": teacher_cross_entropy + worse,
            "kl": worse,
            "teacher_cross_entropy": teacher_cross_entropy,
            "mixture": None if settings.window is not None else [1 / settings.states] * settings.states,
            "tokens": 1000,
            "tasks": [],
        },
    )
    write_artifact(place.prefix(number, layer), lineage, tensors)


def recorded(call: Callable[[], Sequence[Tensor]], _device: torch.device) -> tuple[Callable[[], None], list[Tensor]]:
    """What a CUDA graph is, without CUDA: the call again, its results where they were the first time."""
    found = [each.clone() for each in call()]

    def replay() -> None:
        for place, value in zip(found, call(), strict=True):
            place.copy_(value)

    return replay, found
