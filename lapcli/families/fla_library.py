"""fla, for the models that its own classes alone run: whether it can run here, and its registration."""

import importlib.util
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from lapcli.errors import ModelError
from lapcli.families.registry import find_family

_NOT_IN_FP32 = ("gated_deltaproduct",)
"""Types whose chunked kernel, which runs more than 64 tokens and every gradient, refuses fp32."""


def needs_fla(config: Mapping[str, Any]) -> bool:
    """Whether fla's own classes run a model with this config."""
    family = find_family(config)
    return family is not None and family.library == "fla"


def refuse_where_fla_cannot_run(config: Mapping[str, Any], device_type: str, dtype: torch.dtype | None = None) -> None:
    """Refuse a model that fla runs where fla cannot, before any work; other models pass.

    Args:
        config: of the model.
        device_type: `"cpu"`, or that of a GPU.
        dtype: of the weights, where texts of any length are to run.

    Raises:
        ModelError: fla is not installed, the device is not CUDA (and Triton does not interpret), or fla has no kernel
            for the dtype.
    """
    if not needs_fla(config):
        return
    model_type = config["model_type"]
    if importlib.util.find_spec("fla") is None:
        raise ModelError(
            f"fla runs {model_type} models, and it is not installed",
            "pip install 'lapcli[gpu]' on a machine with a CUDA device; slicing needs neither",
        )
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelError(
            f"fla's {model_type} runs on a CUDA device only; --device {device_type} is asked for or all there is",
            "run this on a machine with a CUDA device; `slice`, `select` and `inspect` need none",
        )
    if model_type in _NOT_IN_FP32 and dtype is torch.float32:
        raise ModelError(f"fla runs {model_type} models in bfloat16, not in float32", "pass --dtype bfloat16")


def register_fla(config: Mapping[str, Any]) -> None:
    """Let transformers know fla's classes.

    Raises:
        ModelError: the fla installed has no model of this type.
    """
    with warnings.catch_warnings():
        # About drivers and versions, at every import.
        warnings.simplefilter("ignore")
        import fla
        import fla.models
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config["model_type"] not in CONFIG_MAPPING:
        raise ModelError(
            f"fla {fla.__version__} has no model of type {config['model_type']!r}", "pip install a newer fla"
        )
