"""Loading models and tokenizers: lapcli's own classes where stock libraries cannot run, theirs otherwise."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lapcli.errors import ModelError
from lapcli.families.source import (
    DEFAULT_MODEL,
    ModelSource,
    load_failure,
    refuse_quantised,
    resolve_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DEFAULT_MODEL", "ModelSource", "load_model", "load_tokenizer", "resolve_model"]


@contextmanager
def _without_progress_bars() -> Generator[None]:
    """Silence the bars of transformers; lapcli's callers draw theirs."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _own_class(model_type: str | None) -> Any:
    if model_type == "gated_deltanet":
        from lapcli.models import GatedDeltaNetForCausalLM

        return GatedDeltaNetForCausalLM
    if model_type == "delta_net":
        from lapcli.models import DeltaNetForCausalLM

        return DeltaNetForCausalLM
    return None


def load_model(
    source: ModelSource,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    kernel: str = "auto",
    trust_remote_code: bool = False,
) -> "PreTrainedModel":
    """Load a model for inference.

    Args:
        source: the resolved model.
        device: where its weights go.
        dtype: of the weights.
        kernel: which implementation of the delta rule runs (`lapkernels.delta_rule`), for lapcli's own models.
        trust_remote_code: whether code in the model's directory may run.

    Returns:
        The model in eval mode.

    Raises:
        ModelError: the weights are quantised or pickled, or the installed transformers does not know the type.
    """
    import transformers

    refuse_quantised(source.config, source.name)
    assert source.headers  # raises where there are no safetensors, or damaged ones
    own = _own_class(source.config.get("model_type"))
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "local_files_only": True}
    model: Any
    try:
        with _without_progress_bars():
            if own is not None:
                model = own.from_pretrained(source.path, **options)
            else:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    source.path, trust_remote_code=trust_remote_code, **options
                )
    except (ValueError, KeyError, ImportError, OSError, RuntimeError) as error:
        model_type = source.config.get("model_type")
        if own is None and model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
            raise ModelError(
                f"transformers {transformers.__version__} does not know the model type {model_type!r} of {source.name}",
                "install a version that does, or pass --trust-remote-code if the model brings its own code",
            ) from error
        raise load_failure(source, error) from error
    model = model.to(device).eval()
    if own is not None:
        # After the move: whether a kernel can run depends on the device.
        model.set_kernel(kernel)
    return model


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that lies beside a model, and check that the model can embed all that it makes.

    Raises:
        ModelError: there is none, or it has more tokens than the model embeds.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    own = (source.path / "tokenizer.json").is_file() and _own_class(source.config.get("model_type")) is not None
    try:
        # AutoTokenizer would ask for a registered config, which fla alone has for these types.
        tokenizer: Any = (
            PreTrainedTokenizerFast.from_pretrained(source.path, local_files_only=True)
            if own
            else AutoTokenizer.from_pretrained(source.path, local_files_only=True, trust_remote_code=trust_remote_code)
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelError(
            f"{source.name} has no tokenizer that loads ({str(error).splitlines()[0] if str(error) else error!r})",
            "put the base model's tokenizer files into its directory",
        ) from error
    vocabulary = source.config.get("vocab_size") or (source.config.get("text_config") or {}).get("vocab_size")
    if vocabulary is not None and len(tokenizer) > vocabulary:
        raise ModelError(
            f"the tokenizer of {source.name} has {len(tokenizer)} tokens, but the model embeds {vocabulary}",
            "the tokenizer does not fit the model; use the one it was trained with",
        )
    return tokenizer
