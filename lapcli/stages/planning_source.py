"""The model of a plan: on disk as for every command, but of a hub's model only the config and the weights' headers."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from lapcli.artifacts import SafetensorsHeader, TensorEntry
from lapcli.errors import ModelError
from lapcli.families.source import DEMO_PREFIX, ModelSource, resolve_model


class HubHeaders(ModelSource):
    """A hub's model of which nothing but `config.json` is on disk; headers come by ranged requests."""

    @cached_property
    def headers(self) -> tuple[SafetensorsHeader, ...]:
        """The headers of the weight files, checked against the config where the family is known.

        Raises:
            ModelError: there are no safetensors, they do not fit the config, or the hub could not be asked.
        """
        from huggingface_hub import get_safetensors_metadata
        from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

        try:
            found = get_safetensors_metadata(self.name, revision=self.revision)
        except NotASafetensorsRepoError as error:
            raise ModelError(
                f"the hub's model {self.name} holds no safetensors; lapcli reads nothing else",
                "convert them: load the model with transformers and call save_pretrained(DIR)",
            ) from error
        except (HfHubHTTPError, SafetensorsParsingError, OSError) as error:
            raise ModelError(
                f"the headers of {self.name} could not be read from the hub ({type(error).__name__})",
                "name a local directory, or try again with a network",
            ) from error
        return self._checked(tuple(_header(self.path / name, file) for name, file in found.files_metadata.items()))


def _header(path: Path, file: Any) -> SafetensorsHeader:
    entries = {
        name: TensorEntry(
            name, info.dtype, tuple(info.shape), info.data_offsets[0], info.data_offsets[1] - info.data_offsets[0]
        )
        for name, info in file.tensors.items()
    }
    return SafetensorsHeader(path, dict(file.metadata or {}), entries)


def headers_of(name: str, revision: str | None = None) -> ModelSource:
    """Find a model as `resolve_model` does, but download no weights of one on the hub.

    Args:
        name: a directory, a hub id, or `demo:NAME`.
        revision: a commit, branch or tag of the hub.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    here = name.startswith((DEMO_PREFIX, ".", "/", "~")) or name.count("/") != 1 or Path(name).exists()
    if here:
        return resolve_model(name, revision)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    from lapcli.data.hub import try_network, without_retry_lines

    try:
        with without_retry_lines():
            try_network()
            path = Path(hf_hub_download(name, "config.json", revision=revision))
        config = json.loads(path.read_text())
    except OfflineModeIsEnabled:
        return resolve_model(name, revision)  # what is in the hub's cache, whole
    # The client raises errors of the HTTP library that it happens to use.
    except Exception as error:
        raise _not_fetched(name, error) from error
    if not isinstance(config, dict):
        raise ModelError(f"config.json of {name} holds no object with named fields", "name another model")
    return HubHeaders(name=name, path=path.parent, revision=revision, config=config)


def _not_fetched(name: str, error: Exception) -> ModelError:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return ModelError(
            f"the hub's model {name} is gated", "accept its terms on its page, then log in with `hf auth login`"
        )
    # The client's word for "not in the cache, and no network" is a kind of "no such file".
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return ModelError(f"the hub's {name} has no config.json, so it is no model", "an adapter? merge it first")
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return ModelError(f"{name!r} is neither a directory here nor a model on the hub", "`lapcli list models`")
    return ModelError(
        f"{name!r} is no directory here, and the hub could not be asked for it ({type(error).__name__})",
        "name a local directory, or try again with a network",
    )
