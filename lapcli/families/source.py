"""A model by name: a local directory, a hub id, or `demo:NAME`, resolved to files without loading any weights."""

import filecmp
import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from lapcli.artifacts import SafetensorsHeader, TensorEntry, digest_document, digest_file, digest_weights, read_header
from lapcli.errors import LapcliError, ModelError
from lapcli.families.fit import refuse_misfit
from lapcli.families.qdelta import COMPATS, QDelta
from lapcli.families.registry import find_family

DEMO_PREFIX = "demo:"
DEFAULT_MODEL = "demo:gdn"
INDEX_FILE = "model.safetensors.index.json"
"""Says in which file of a sharded checkpoint each tensor lies."""
LOADED_BY_CODE = (
    "Load model and tokenizer with `trust_remote_code=True`: the Python files here are lapcli's, since the library "
    "has no class for this model."
)
"""What is said of a model that lapcli's code lies beside (`lapcli.families.base.ModelCode`)."""
_SINGLE = "model.safetensors"
_TOKENIZER = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
    "tokenization_*.py",
    "chat_template*",
    "additional_chat_templates/*",
)
"""Files that make a tokenizer, as transformers names them."""
_VOCABULARY = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tokenization_*.py")
"""Those of them without one of which there is none."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_OF_THE_MODEL = {"config.json", "README.md", "lapcli.json", "training_log.json"}
_DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*")
_JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "truth value"}


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint on disk.

    Attributes:
        name: what the user typed.
        path: the directory.
        revision: the hub's commit, where it came from the hub.
        config: the parsed `config.json`.
    """

    name: str
    path: Path
    revision: str | None
    config: dict[str, Any]

    @cached_property
    def index(self) -> dict[str, Any] | None:
        """The parsed weight index of a sharded checkpoint; `None` for a single file."""
        path = self.path / INDEX_FILE
        return _read_json(path) if path.is_file() else None

    @property
    def shards(self) -> tuple[Path, ...]:
        """The weight files.

        Raises:
            ModelError: there are none, or one that the index names is missing.
        """
        if self.index is not None:
            shard_of = self.index.get("weight_map")
            if not isinstance(shard_of, dict) or not all(isinstance(name, str) for name in shard_of.values()):
                raise ModelError(
                    f"{self.path / INDEX_FILE} has no weight_map from tensor to file", "download the model again"
                )
            names = sorted(set(shard_of.values()))
            missing = [name for name in names if not (self.path / name).is_file()]
            if missing:
                raise ModelError(
                    f"{self.path} lacks {missing[0]}, which its weight index names", "download the model again"
                )
            return tuple(self.path / name for name in names)
        if (self.path / _SINGLE).is_file():
            return (self.path / _SINGLE,)
        pickled = sorted(file.name for file in self.path.glob("*.bin"))
        if pickled:
            raise ModelError(
                f"{self.path} holds only pickled weights ({pickled[0]}); lapcli reads safetensors only",
                "convert them: load the model with transformers and call save_pretrained(DIR)",
            )
        raise ModelError(f"{self.path} holds no model.safetensors and no {INDEX_FILE}")

    @cached_property
    def headers(self) -> tuple[SafetensorsHeader, ...]:
        """The headers of the weight files, checked against the config where the family is known.

        Raises:
            ArtifactError: a file is damaged.
            ModelError: there are no weights, or they do not fit the config.
        """
        headers = tuple(read_header(shard) for shard in self.shards)
        self._check_index(headers)
        return self._checked(headers)

    def _check_index(self, headers: tuple[SafetensorsHeader, ...]) -> None:
        """Refuse an index that does not say where the tensors lie: a loader that follows it would fail.

        Raises:
            ModelError: naming the first tensor, and where it is.
        """
        if self.index is None:
            return
        named = self.index["weight_map"]
        found = {name: header.path.name for header in headers for name in header.tensors}
        for name in sorted(named.keys() | found.keys()):
            if named.get(name) != found.get(name):
                raise ModelError(
                    f"{self.path / INDEX_FILE} says that {name} is in {named.get(name, 'no file')}, "
                    f"but it is in {found.get(name, 'none of its files')}",
                    "download the model again",
                )

    def _checked(self, headers: tuple[SafetensorsHeader, ...]) -> tuple[SafetensorsHeader, ...]:
        """The headers, if they fit the config.

        Raises:
            ModelError: they do not.
        """
        family = find_family(self.config)
        # Quantised checkpoints have tensors of their own; what would cut or run them refuses them.
        if family is not None and not self.config.get("quantization_config"):
            tensors = {name: entry for header in headers for name, entry in header.tensors.items()}
            refuse_misfit(self.name, family, self.config, tensors)
        return headers

    @cached_property
    def tensors(self) -> dict[str, tuple[SafetensorsHeader, TensorEntry]]:
        """Every tensor by name, with the file that holds it."""
        return {name: (header, entry) for header in self.headers for name, entry in header.tensors.items()}

    @cached_property
    def digest(self) -> str:
        """Names config, index and weights (see `lapcli.artifacts.digest_weights`)."""
        return digest_weights(self.shards, {"config": self.config, "index": self.index})

    @cached_property
    def tokenizer_digest(self) -> str:
        """Names the contents of all files that make the tokenizer, chat templates too, and nothing else."""
        return digest_document({name: digest_file(self.path / name) for name in tokenizer_files(self.path)})

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer lies beside it."""
        return any(path.is_file() for pattern in _VOCABULARY for path in self.path.glob(pattern))

    def check_tokenizer(self) -> None:
        """Refuse a model that comes without a tokenizer: transformers would make an empty one.

        Raises:
            ModelError: there is none.
        """
        if not self.has_tokenizer:
            raise ModelError(
                f"{self.name} has no tokenizer: {self.path} holds none of {', '.join(_VOCABULARY)}",
                "put the base model's tokenizer files into its directory",
            )

    @cached_property
    def is_demo(self) -> bool:
        """Whether it is a model that ships with lapcli, or a copy of one, such as a conversion keeps of its teacher."""
        if self.name.startswith(DEMO_PREFIX):
            return True
        # Only what has the config of one is worth reading whole.
        alike = [name for name, folder in demo_models().items() if _read_json(folder / "config.json") == self.config]
        return any(resolve_model(name).digest == self.digest for name in alike)

    @property
    def loading(self) -> str | None:
        """What has to be said where transformers loads it, in a sentence; `None` where it loads as any model does."""
        family = find_family(self.config)
        return None if family is None or family.model_code(self.config) is None else LOADED_BY_CODE

    def describe(self) -> dict[str, Any]:
        """Name, revision and digest, as artifacts record their base model."""
        return {"name": self.name, "revision": self.revision, "digest": self.digest}


def tokenizer_files(folder: Path) -> list[str]:
    """The names of all files in a folder that make a tokenizer, chat templates too."""
    files = {path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in files)


def resolve_tokenizer(name: str, config: Mapping[str, Any]) -> ModelSource:
    """Find a tokenizer's files; from the hub these alone are downloaded, no weights.

    Args:
        name: a directory with or without a model, a hub id, or `demo:NAME`.
        config: of the model that it is for.

    Returns:
        The tokenizer's folder as if the model lay in it, for `lapcli.families.loading.load_tokenizer`.

    Raises:
        ModelError: there is no such tokenizer, or it cannot be fetched.
    """
    commit = None
    if name.startswith(DEMO_PREFIX):
        path = resolve_model(name).path
    elif Path(name).is_dir():
        path = Path(name).resolve()
    elif name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists():
        raise ModelError(f"{name} is no directory", "name a directory with a tokenizer, a hub id, or demo:NAME")
    else:
        path, commit = _download(name, None, _TOKENIZER)
    source = ModelSource(name=name, path=path, revision=commit, config=dict(config))
    source.check_tokenizer()
    return source


def companions(source: ModelSource) -> list[str]:
    """What goes along with other weights of a model: tokenizer, generation settings, licence and code, by their names.

    Config, card, training record and lapcli's lineage are the model's own and stay behind. So does what belongs to
    weights in other forms: indices of files that are not copied, Mistral's `consolidated` ones.
    """
    files = [*source.path.iterdir(), *source.path.glob("additional_chat_templates/*")]
    return sorted(
        file.relative_to(source.path).as_posix()
        for file in files
        if file.is_file()
        and file.suffix not in _WEIGHTS
        and file.name not in _OF_THE_MODEL
        and not file.name.startswith((".", "consolidated"))
        and not file.name.endswith(".index.json")
    )


def lost_companions(source: ModelSource, folder: Path, but: Collection[str] = ()) -> list[str]:
    """What a model's companions a folder that was made of it lacks, or has with other contents.

    Args:
        source: the model.
        folder: with other weights of it.
        but: names of which the contents may differ.
    """
    return [
        name
        for name in companions(source)
        if not (folder / name).is_file()
        or (name not in but and not filecmp.cmp(source.path / name, folder / name, shallow=False))
    ]


def copy_companions(source: ModelSource, folder: Path, names: Iterable[str] | None = None) -> None:
    """Put a model's companions, or those of these names, into a folder with other weights of it."""
    for name in companions(source) if names is None else names:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source.path / name, folder / name)


def demo_models() -> dict[str, Path]:
    """The models that ship with lapcli, by `demo:` name."""
    root = Path(str(resources.files("lapcli"))) / "demo"
    found = sorted(root.iterdir()) if root.is_dir() else []
    return {DEMO_PREFIX + folder.name: folder for folder in found if (folder / "config.json").is_file()}


def is_demo_model(name: str, digest: str | None) -> bool:
    """Whether a model of this name and digest, as artifacts record it, ships with lapcli or is a copy of one."""
    return name.startswith(DEMO_PREFIX) or digest in {resolve_model(demo).digest for demo in demo_models()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(
            f"{path} holds a JSON {_JSON_NAMES.get(type(document), 'null')}; an object with named fields is wanted",
            "put it right, or download the model again",
        )
    return document


def _download(name: str, revision: str | None, patterns: Sequence[str] = _DOWNLOADED) -> tuple[Path, str | None]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        path = Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ModelError(
            f"the hub's model {name} is gated", "accept its terms on its page, then log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{name!r} is neither a directory here nor a model on the hub",
            f"shipped models: {', '.join(demo_models()) or 'none'}",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{name!r} is no directory here, and the hub could not be asked for it ({type(error).__name__})",
            "name a local directory, or try again with a network",
        ) from error
    return path, path.name


def resolve_model(name: str, revision: str | None = None) -> ModelSource:
    """Find a model's files and read its config; downloads from the hub when the name is neither local nor a demo.

    Args:
        name: a directory, a hub id, or `demo:NAME`.
        revision: a commit, branch or tag of the hub.

    Raises:
        ModelError: there is no such model, it is an adapter or pickled, or it cannot be fetched.
    """
    commit: str | None = None
    if name.startswith(DEMO_PREFIX):
        demos = demo_models()
        if name not in demos:
            raise ModelError(f"no model {name!r} ships with lapcli; there is: {', '.join(demos) or 'none'}")
        path = demos[name]
    elif Path(name).is_dir():
        path = Path(name).resolve()
    elif name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists():
        raise ModelError(f"{name} is no directory", "name a directory with config.json, a hub id, or demo:NAME")
    else:
        path, commit = _download(name, revision)
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ModelError(
                f"{path} is an adapter, not a model",
                "merge it into its base first: peft's merge_and_unload(), then save_pretrained(DIR)",
            )
        hint = None
        if (path / "base" / "config.json").is_file() and (path / "conversion.json").is_file():
            hint = (
                f"it holds a conversion in several configurations: name one of {path}/models, or write one by "
                f"`lapcli convert --export 0.25 --output {path}`; `lapcli serve {path}` takes all"
            )
        elif any(path.glob("prefixes/*.safetensors")):
            hint = "it holds the converted layers of a model that is missing: `lapcli inspect` says more"
        raise ModelError(f"{path} has no config.json, so it is no model directory", hint)
    return ModelSource(name=name, path=path, revision=commit or revision, config=_read_json(path / "config.json"))


def with_compat(source: ModelSource, compat: str | None) -> ModelSource:
    """The same checkpoint, to be run as `compat` says; it then is another model, with a digest of its own.

    Args:
        source: a Q-Delta; any model where `compat` is `None`.
        compat: `released`, or `None` for what the config says.

    Raises:
        ModelError: it is no Q-Delta, or there is no such thing to be compatible with.
    """
    if compat is None:
        return source
    if compat not in COMPATS:
        raise ModelError(f"--compat {compat!r}: there is {', '.join(COMPATS)}")
    if source.config.get("model_type") != QDelta.name:
        raise ModelError(
            f"--compat {compat}: {source.name} is a {source.config.get('model_type')}, and only Q-Delta has a release "
            "that computes something else",
            "drop --compat",
        )
    return replace(source, config={**source.config, "compat": compat})


def refuse_quantised(config: Mapping[str, Any], name: str) -> None:
    """Refuse checkpoints whose weights carry scales.

    Raises:
        ModelError: the config names a quantisation.
    """
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise ModelError(
            f"{name} is quantised ({method}); its tensors cannot be cut without their scales",
            "prune the unquantised checkpoint, then quantise the result",
        )


def load_failure(source: ModelSource, error: Exception) -> LapcliError:
    """Turn a library's failure to load into the error that names the remedy."""
    text = str(error)
    if "trust_remote_code" in text:
        return ModelError(
            f"{source.name} needs code of its own, which is not run unless you allow it",
            "read that code, then pass --trust-remote-code",
        )
    return ModelError(f"{source.name} could not be loaded: {text.splitlines()[0] if text else type(error).__name__}")
