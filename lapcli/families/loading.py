"""Loading models and tokenizers: lapcli's own classes where stock libraries cannot run, theirs otherwise."""

import functools
import math
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from logging import ERROR, Filter, LogRecord, getLogger
from typing import TYPE_CHECKING, Any, Literal

import torch

from lapcli.errors import ModelError
from lapcli.families import library_kernels
from lapcli.families.dual_state import has_states, set_kernel
from lapcli.families.fla_library import needs_fla, refuse_where_fla_cannot_run, register_fla
from lapcli.families.registry import find_family
from lapcli.families.source import (
    DEFAULT_MODEL,
    ModelSource,
    load_failure,
    refuse_quantised,
    resolve_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Weights = Literal["on device", "in memory", "nowhere"]
"""Where those of a loaded model are."""

__all__ = ["DEFAULT_MODEL", "ModelSource", "load_model", "load_tokenizer", "resolve_model"]


class _ErrorsOnly(Filter):
    """Lets nothing below an error pass."""

    def filter(self, record: LogRecord) -> bool:
        """Whether it is one."""
        return record.levelno >= ERROR


@contextmanager
def _quietly() -> Generator[None]:
    """Silence the bars and the load report of transformers; lapcli draws its own, and what is reported is refused."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    # accelerate's says of a model that is spread what is announced anyway.
    reports = [logging.get_logger("transformers.modeling_utils"), getLogger("accelerate.big_modeling")]
    errors_only = _ErrorsOnly()
    logging.disable_progress_bar()
    # Not its level: from a level of WARNING on, that module says more.
    for report in reports:
        report.addFilter(errors_only)
    try:
        with warnings.catch_warnings():
            # transformers imports fla with a hybrid; on a CPU it warns of what `choose_by_device` puts right.
            warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
            yield
    finally:
        for report in reports:
            report.removeFilter(errors_only)
        if drawn:
            logging.enable_progress_bar()


def _refuse_partial(source: ModelSource, loaded: Mapping[str, Any]) -> None:
    """Refuse a model of which the checkpoint does not fill every part, or which leaves a part of it over."""
    hint = "the weights and config.json do not belong together: put config.json right, or download the model again"
    for name, found, wanted in sorted(loaded["mismatched_keys"]):
        raise ModelError(
            f"{name} of {source.name} has the shape {list(found)}, but the model's is {list(wanted)}", hint
        )
    for name in sorted(loaded["missing_keys"]):
        raise ModelError(f"{source.name} has no tensor {name}, which its config.json implies", hint)
    for name in sorted(loaded["unexpected_keys"]):
        raise ModelError(f"{source.name} has a tensor {name}, which its config.json does not imply", hint)


def packaged_class(source: ModelSource, trust_remote_code: bool) -> Any:
    """Lapcli's class for a slice that stock classes cannot load, if the code beside the slice is this very one.

    Raises:
        ModelError: the slice's code is another one, and may not be run.
    """
    family = find_family(source.config)
    code = None if family is None else family.model_code(source.config)
    if code is None:
        return None
    other = code.missing(source.path)
    if not other:
        with _quietly():
            return getattr(import_module(f"lapcli.families.remote.{code.module}"), code.model)
    if not trust_remote_code:
        raise ModelError(
            f"{source.name} needs {other[0]}, and does not have it as this lapcli writes it",
            "slice its base again, or read that file and pass --trust-remote-code",
        )
    return None


def library_class(source: ModelSource) -> Any:
    """The `Auto` class that finds a model; some models with a vision tower have no text model of their own.

    Where another package has put its own class in the place of transformers', it is transformers' class itself: fla
    does so with Mamba-2 when it is imported, which Qwen's models do wherever it is installed.
    """
    import transformers

    mapped = transformers.models.auto.modeling_auto
    model_type = str(source.config.get("model_type"))
    texts, images = mapped.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, mapped.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if model_type in texts and model_type in configs and not configs[model_type].__module__.startswith("transformers."):
        return getattr(transformers, texts[model_type])
    if model_type in images and model_type not in texts:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def runs_its_code(source: ModelSource) -> bool:
    """Whether a model comes as code of its own where that is allowed.

    One that transformers knows does not: adapters are written for the stock classes. A slice does whose code is not the
    packaged one, as no stock class can load it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = find_family(source.config)
    sliced = family is not None and family.model_code(source.config) is not None
    return sliced or source.config.get("model_type") not in CONFIG_MAPPING


def own_class(model_type: str | None) -> Any:
    """Lapcli's own class of a model type that stock libraries cannot run anywhere, or `None`."""
    if model_type == "gated_deltanet":
        from lapcli.models import GatedDeltaNetForCausalLM

        return GatedDeltaNetForCausalLM
    if model_type == "delta_net":
        from lapcli.models import DeltaNetForCausalLM

        return DeltaNetForCausalLM
    if model_type == "qdelta":
        from lapcli.models import QDeltaForCausalLM

        return QDeltaForCausalLM
    return None


def _room() -> dict[Any, int]:
    """Bytes of weights that each device may take, the GPUs first; the rest of a GPU is for activations."""
    from transformers.integrations.accelerate import get_max_memory

    return {place: int(free * (0.8 if place != "cpu" else 0.9)) for place, free in get_max_memory().items()}


@contextmanager
def _spreading() -> Generator[dict[str, Any]]:
    """Options of `from_pretrained` that spread a model over the devices, and the folder for what lies on disk."""
    from transformers.integrations import accelerate

    integration: Any = accelerate
    dispatch = integration.dispatch_model

    @functools.wraps(dispatch)
    def whole_blocks(model: Any, **options: Any) -> Any:
        """Layers that lie elsewhere come to the device whole.

        Left alone, accelerate brings the weights of a module when it is called, but libraries, and our taps, read
        those of a convolution without a call.
        """
        return dispatch(model, preload_module_classes=sorted(model._no_split_modules or ()), **options)

    folder = tempfile.mkdtemp(prefix="lapcli-split-")
    integration.dispatch_model = whole_blocks
    try:
        yield {"device_map": "auto", "max_memory": _room(), "offload_folder": folder}
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        integration.dispatch_model = dispatch


def kept_off_devices(model: Any) -> list[str]:
    """Parts of a model that come to a device only while they compute."""
    places: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {}
    gpus = any(place not in ("cpu", "disk") for place in places.values())
    return [name for name, place in places.items() if place == "disk" or (gpus and place == "cpu")]


def load_model(
    source: ModelSource,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    kernel: str = "auto",
    trust_remote_code: bool = False,
    split: bool = False,
    weights: Weights = "on device",
) -> "PreTrainedModel":
    """Load a model for inference.

    Args:
        source: the resolved model.
        device: where it will compute; with `split`, where tokens will go.
        dtype: of the weights.
        kernel: which implementation of the delta rule runs (`lapkernels.delta_rule`), for lapcli's own models and
            those of transformers that call it as a function, or of gated states (`lapkernels.dual_state`), for
            converted ones.
        trust_remote_code: whether code in the model's directory may run; it does where transformers does not know the
            model's type, and where it is a slice's that lapcli's own differs from.
        split: whether to spread it, layer by layer, over all GPUs, then memory, then a temporary folder on disk. Layers
            that lie in memory beside a GPU, or on disk, come to the device for as long as they compute.
        weights: whether they are on the device, in memory, or nowhere (tensors on the meta device, of the same names,
            shapes and dtypes): for who puts them on the device part by part. Kernels of lapcli's own models are the
            device's in any case; a library's go by where each tensor is.

    Returns:
        The model in eval mode.

    Raises:
        ModelError: the weights are quantised or pickled, or do not fit the config, or the installed transformers does
            not know the type.
    """
    import transformers

    refuse_quantised(source.config, source.name)
    assert source.headers  # raises where there are no safetensors, damaged ones, or others than the config implies
    own = own_class(source.config.get("model_type"))
    packaged = packaged_class(source, trust_remote_code)
    if needs_fla(source.config):
        refuse_where_fla_cannot_run(source.config, torch.device(device).type)
        register_fla(source.config)
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "local_files_only": True}
    # Tensors of another shape are then listed, not raised as a report; `_refuse_partial` refuses them.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if weights == "nowhere":
        options["device_map"] = "meta"
    found: Any
    spreading = _spreading() if split else nullcontext({})
    try:
        with _quietly(), spreading as places:
            options |= places
            if source.config.get("model_type") == "qdelta":
                # The caller may have asked for another recurrence than the file does (`families.qdelta.with_compat`).
                options["compat"] = source.config.get("compat")
            if own is not None or packaged is not None:
                found = (own or packaged).from_pretrained(source.path, **options)
            else:
                trusted = trust_remote_code and runs_its_code(source)
                found = library_class(source).from_pretrained(source.path, trust_remote_code=trusted, **options)
    except (ValueError, KeyError, TypeError, ImportError, OSError, RuntimeError) as error:
        model_type = source.config.get("model_type")
        known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
        if own is None and packaged is None and model_type not in known:
            raise ModelError(
                f"transformers {transformers.__version__} does not know the model type {model_type!r} of {source.name}",
                "install a version that does, or pass --trust-remote-code if the model brings its own code",
            ) from error
        raise load_failure(source, error) from error
    model, loaded = found
    if split:
        weakref.finalize(model, shutil.rmtree, options["offload_folder"], ignore_errors=True)
    _refuse_partial(source, loaded)
    if weights == "nowhere":
        # It would say that accelerate has spread the model.
        vars(model).pop("hf_device_map", None)
    model = (model.to(device) if weights == "on device" and not split else model).eval()
    library_kernels.choose_by_device(model)
    if own is not None:
        # Whether a kernel can run depends on the device.
        model.set_kernel(kernel, torch.device(device))
    elif packaged is not None and has_states(source.config):
        set_kernel(model, kernel, torch.device(device))
    else:
        library_kernels.set_kernel(model, kernel, torch.device(device))
    return model


def skeleton(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The model as `load_model` makes it, of tensors without contents (on the meta device).

    Args:
        source: the resolved model.
        trust_remote_code: as for `load_model`.
    """
    if needs_fla(source.config):
        register_fla(source.config)
    own = own_class(source.config.get("model_type")) or packaged_class(source, trust_remote_code)
    trusted = trust_remote_code and runs_its_code(source)
    with torch.device("meta"), _quietly():
        if own is not None:
            return own(own.config_class.from_pretrained(source.path))
        from transformers import AutoConfig

        library = library_class(source)
        if not hasattr(library, "from_config"):
            return library(library.config_class.from_pretrained(source.path))
        config: Any = AutoConfig.from_pretrained(source.path, trust_remote_code=trusted, local_files_only=True)
        if type(config) in library._model_mapping:
            made: Any = library._model_mapping[type(config)]
            made = made[0] if isinstance(made, list | tuple) else made
            # As `from_pretrained` does where a family's text model is what its whole config loads.
            if made.config_class == getattr(config, "sub_configs", {}).get("text_config"):
                config = config.get_text_config()
            return made(config)
        return library.from_config(config, trust_remote_code=trusted)


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that lies beside a model, and check that the model can embed all that it makes.

    Raises:
        ModelError: there is none, or it has a token that the model has no row for.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source.check_tokenizer()
    unknown = (
        own_class(source.config.get("model_type")) is not None
        or needs_fla(source.config)
        or packaged_class(source, trust_remote_code) is not None
    )
    own = (source.path / "tokenizer.json").is_file() and unknown
    try:
        # AutoTokenizer would ask for a registered config, which transformers alone does not have for these types.
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
    beyond = {index: token for token, index in tokenizer.get_vocab().items() if index >= (vocabulary or math.inf)}
    if beyond:
        raise ModelError(
            f"the tokenizer of {source.name} has the id {min(beyond)} ({beyond[min(beyond)]!r}), but the model embeds "
            f"{vocabulary} ids, from 0 on",
            "the tokenizer does not fit the model; use the one it was trained with",
        )
    return tokenizer
