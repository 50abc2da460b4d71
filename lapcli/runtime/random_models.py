"""Models with random weights from a config alone, for measuring: what a step costs does not depend on their values."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from lapcli.errors import ModelError


def random_model(config: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Build a language model as its library initialises it.

    Args:
        config: the document of a `config.json`, with its `model_type`.
        device: where the weights are drawn.
        dtype: of the weights, but for those that the library keeps in fp32.
        seed: of the weights.

    Returns:
        The model in eval mode.

    Raises:
        ModelError: the document has no `model_type`, or one that neither lapcli nor transformers knows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from lapcli.families.library_kernels import choose_by_device
    from lapcli.families.loading import own_class
    from lapcli.families.registry import find_family

    fields = dict(config)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ModelError("the config has no model_type, so nobody knows which model it is of")
    family = find_family(config)
    code = None if family is None else family.model_code(config)
    own = own_class(model_type)
    if own is None and code is not None:
        own = getattr(import_module(f"lapcli.families.remote.{code.module}"), code.model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        if own is not None:
            model = own._from_config(own.config_class(**fields), dtype=dtype)
        else:
            try:
                made = AutoConfig.for_model(model_type, **fields)
            except ValueError as error:
                raise ModelError(f"transformers does not know the model type {model_type!r}") from error
            model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    model = model.to(device).eval()
    choose_by_device(model)
    return model
