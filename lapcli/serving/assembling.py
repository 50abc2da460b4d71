"""From settings to the parts of a server, put together."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lapcli import __version__
from lapcli.errors import ModelError, UsageError
from lapcli.families.source import ModelSource
from lapcli.serving.keys import ApiKeys
from lapcli.serving.settings import EngineSettings, Limits
from lapcli.shipped import recipes_folder

if TYPE_CHECKING:
    from lapcli.serving.dispatch import Dispatcher
    from lapcli.serving.gate import App
    from lapcli.serving.policy import Policy
    from lapcli.serving.supervisor import Supervisor


def refuse_without_the_extra() -> None:
    """Refuse where the HTTP server's packages are missing.

    Raises:
        ModelError: naming the first.
    """
    for package in ("fastapi", "uvicorn"):
        try:
            __import__(package)
        except ImportError as error:
            raise ModelError(f"lapcli serve needs {package}", "pip install 'lapcli[serve]'") from error


def read_chat_template(file: Path | None) -> str | None:
    """The text of a chat template: of a file, or of one that ships, by its name.

    Raises:
        UsageError: it cannot be read, or is no template.
    """
    if file is None:
        return None
    from jinja2 import Environment, TemplateSyntaxError

    shipped = {path.stem: path for path in (recipes_folder() / "serve").glob("*.jinja")}
    if not file.exists():
        file = shipped.get(str(file), file)
    try:
        text = file.read_text(encoding="utf-8")
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        hint = f"name a file with a Jinja template, or one that ships: {', '.join(sorted(shipped))}"
        raise UsageError(f"--chat-template {file}: {why}", hint) from error
    return text


def model_name(source: ModelSource) -> str:
    """By which name clients call a model: its hub id or demo name, or its directory's own."""
    return source.path.resolve().name if Path(source.name).exists() else source.name


class Parts(NamedTuple):
    """What a server consists of, whoever runs it.

    Attributes:
        app: the application.
        dispatcher: between requests and the engine.
        supervisor: keeps the engine; nothing runs before its `run`.
        name: by which clients call the model.
    """

    app: "App"
    dispatcher: "Dispatcher"
    supervisor: "Supervisor"
    name: str


def assemble(
    source: ModelSource,
    settings: EngineSettings,
    limits: Limits,
    keys: ApiKeys,
    *,
    name: str | None = None,
    chat_template: str | None = None,
    policy: "Policy | None" = None,
    command: Sequence[str] | None = None,
) -> Parts:
    """Put a server together; nothing is started yet.

    Args:
        source: the model.
        settings: what the engine is told of it.
        limits: of what clients may send.
        keys: who may come in.
        name: by which clients call the model; default: see `model_name`.
        chat_template: in place of the tokenizer's own.
        policy: which configuration a request gets; default: the only one.
        command: that starts an engine; default: lapcli's own.

    Raises:
        ModelError: a package is missing, or the model has no tokenizer.
    """
    refuse_without_the_extra()
    from lapcli.families.loading import load_tokenizer
    from lapcli.runtime.generation import end_tokens
    from lapcli.serving.app import Served, Service, make_app
    from lapcli.serving.dispatch import Dispatcher
    from lapcli.serving.metrics import Registry
    from lapcli.serving.policy import OneConfiguration
    from lapcli.serving.supervisor import WORKER, Supervisor
    from lapcli.serving.texts import Texts

    tokenizer = load_tokenizer(source, trust_remote_code=settings.trust_remote_code)
    registry = Registry()
    dispatcher = Dispatcher(limits, policy or OneConfiguration(), registry)
    served = Served(
        name or model_name(source),
        source.name,
        int(time.time()),
        settings.max_length,
        end_tokens(source.config, source.path, tokenizer),
        __version__,
    )
    service = Service(served, limits, dispatcher, Texts(tokenizer, chat_template, settings.max_length))
    supervisor = Supervisor(settings.document(), dispatcher, command or WORKER)
    return Parts(make_app(service, registry, keys), dispatcher, supervisor, served.name)
