"""A conversion whose weights are drawn at random: for what does not depend on them, as time and memory do not."""

import json
from pathlib import Path
from typing import Any

DRAWN = "drawn.json"
"""A file in its directory, which says that it is one."""
_INCREASE = 0.004
"""Nats that each layer is said to cost. Nothing was measured: policies want a number."""


def draw(root: Path, *, shape: str = "smollm2-like", fraction: float = 0.5, seed: int = 0, **change: Any) -> Path:
    """Write a conversion as `lapcli convert --to dsla` leaves it.

    Args:
        root: the directory; where one is, it is left as it is.
        shape: a Transformer's of `lapcli bench decode --config`.
        fraction: of the layers that are converted, every second one first.
        seed: of the draw.
        change: fields of its config.
    """
    import torch
    import transformers

    from lapcli.benchmarks.speed.configs import CONFIGS
    from lapcli.families.loading import load_model, load_tokenizer
    from lapcli.families.remote.lapcli_dual_state import DualStateSettings, convert_layers
    from lapcli.families.source import resolve_model
    from lapcli.linearising.plan import Place
    from lapcli.testing.dual_state import layer_tensors, write_layer

    place = Place(root)
    if (root / DRAWN).is_file():
        return root
    tokenizer = load_tokenizer(resolve_model("demo:gdn"))
    document = {**CONFIGS[shape], **change, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    document.pop("model_type")
    document["max_position_embeddings"] = min(document["max_position_embeddings"], 8192)
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**document, dtype="bfloat16"))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(place.base)
    tokenizer.save_pretrained(place.base)
    base = resolve_model(str(place.base))
    layers = document["num_hidden_layers"]
    order = [*range(1, layers, 2), *range(0, layers, 2)][: max(1, round(fraction * layers))]
    model, settings = load_model(base, dtype=torch.bfloat16), DualStateSettings()
    convert_layers(model, settings, order)
    for number, layer in enumerate(order, 1):
        write_layer(
            place, base, number, layer, layer_tensors(model, [layer]), settings=settings,
            teacher_cross_entropy=3.0, worse=_INCREASE * number,
        )  # fmt: skip
    (root / DRAWN).write_text(json.dumps({"shape": shape, "seed": seed, "change": change}) + "\n")
    return root
