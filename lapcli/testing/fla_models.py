"""Tiny models of the families that fla's own classes run.

Sizes fit Triton's interpreter: about 0.05 M parameters, so that a forward pass takes seconds on a CPU.
"""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lapcli.testing.models import byte_tokenizer, fill_weights

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 16, "expand_v": 1.5}


@cache
def _gdn2() -> tuple[type, type]:
    """A config and a model for fla's GDN-2 layer: KDA's blocks with it in the place of theirs.

    fla 0.6 has the layer alone. Both are registered, so that a checkpoint of it loads as that of any other family.
    Where fla has a model of its own, that is it.
    """
    import fla.models
    from fla.layers.gdn2 import GatedDeltaNet2
    from fla.models import KDAConfig, KDAForCausalLM
    from transformers import AutoConfig, AutoModelForCausalLM

    published = tuple(getattr(fla.models, name, None) for name in ("GDN2Config", "GDN2ForCausalLM"))
    if published[0] is not None and published[1] is not None:
        return published[0], published[1]

    class GDN2Config(KDAConfig):
        model_type = "gdn2"

        # Without one of its own, transformers would generate one that leaves KDA's out.
        def __init__(self, **fields: Any):
            super().__init__(**fields)

    class GDN2ForCausalLM(KDAForCausalLM):
        config_class = GDN2Config

        def __init__(self, config: Any):
            super().__init__(config)
            names = ("hidden_size", "expand_v", "head_dim", "num_heads", "num_v_heads", "use_short_conv")
            names += ("allow_neg_eigval", "conv_size", "norm_eps")
            for index, block in enumerate(self.model.layers):
                block.attn = GatedDeltaNet2(
                    layer_idx=index, mode=config.attn_mode, **{name: getattr(config, name) for name in names}
                )

    AutoConfig.register("gdn2", GDN2Config)
    AutoModelForCausalLM.register(GDN2Config, GDN2ForCausalLM)
    return GDN2Config, GDN2ForCausalLM


def _stock(name: str) -> Callable[[], tuple[type, type]]:
    def classes() -> tuple[type, type]:
        import fla.models

        return getattr(fla.models, f"{name}Config"), getattr(fla.models, f"{name}ForCausalLM")

    return classes


FLA_MODELS: dict[str, tuple[Callable[[], tuple[type, type]], dict[str, Any]]] = {
    "gla": (_stock("GLA"), {"expand_k": 1.0, "expand_v": 1.5}),
    "kda": (_stock("KDA"), _HEADS),
    "gdn2": (_gdn2, _HEADS),
    "gated_deltaproduct": (_stock("GatedDeltaProduct"), {**_HEADS, "num_householder": 2}),
}
"""By `model_type`: the config's and the model's class, and config fields. Key width 16, value width 24, two heads."""


def register_gdn2() -> None:
    """Let transformers load what `tiny_fla_model("gdn2", ...)` wrote, in a process that did not write it."""
    _gdn2()


def tiny_fla_model(model_type: str, folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **config: Any) -> Path:
    """Write a tiny model of a class of fla's and a byte tokenizer; needs fla, and no GPU.

    Weights are those of `fill_weights`, in fp32.

    Args:
        model_type: a key of `FLA_MODELS`.
        folder: where to; made if missing.
        seed: of the weights.
        max_shard_size: a small one makes several shards and an index.
        config: fields of the config that are to be otherwise.

    Returns:
        The folder.
    """
    tokenizer = byte_tokenizer()
    classes, fields = FLA_MODELS[model_type]
    with warnings.catch_warnings():
        # About drivers, and that a model without short convolutions learns worse.
        warnings.simplefilter("ignore")
        config_class, model_class = classes()
        torch.manual_seed(seed)  # for what `fill_weights` leaves as the library draws it
        model: Any = model_class(config_class(**{**_SIZES, **fields, "vocab_size": len(tokenizer), **config}))
    fill_weights(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder
