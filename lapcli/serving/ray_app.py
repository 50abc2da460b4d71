"""Replicas behind Ray Serve, which starts them, spreads requests over them, and replaces those that fail.

`recipes/serve/ray.yaml` names `build`. Replicas share nothing, so that any of them can answer any request.
"""

import asyncio
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.errors import UsageError
from lapcli.serving.modes import Wish, find_conversion
from lapcli.serving.settings import EngineSettings, Limits

if TYPE_CHECKING:
    from lapcli.serving.assembling import Parts

_ENGINE = {field.name for field in fields(EngineSettings)} - {
    "device",
    "dtype",
    "conversion",
    "configurations",
    "offload",
}
_LIMITS = {field.name for field in fields(Limits)}
_CONVERTED = set(Wish._fields)
_OTHERS = {"device", "dtype", "name", "chat_template", "api_key_file"}


def build(arguments: dict[str, Any]) -> Any:
    """Make an application of Ray Serve's.

    Args:
        arguments: `model`, and besides fields of `EngineSettings`, `Limits` and `Wish` (for a conversion, what
            fractions and shares there are as texts), and `name`, `chat_template` and `api_key_file` as of
            `lapcli serve`. Paths are those of the replicas' machines.

    Returns:
        An application with one deployment, `Model`.

    Raises:
        UsageError: an argument that nobody knows, or no model.
    """
    known = _ENGINE | _LIMITS | _CONVERTED | _OTHERS
    unknown = sorted(set(arguments) - known)
    if unknown or "model" not in arguments:
        raise UsageError(
            f"no such argument: {unknown[0]}" if unknown else "no model is named",
            f"args of the application may be: {', '.join(sorted(known))}",
        )

    from ray import serve  # pyright: ignore[reportMissingImports]

    def replica() -> Replica:
        return Replica(arguments)

    class Model:
        """A replica; what it answers is the application's that it wraps."""

    return serve.deployment(name="Model")(serve.ingress(replica)(Model)).bind()


class Replica:
    """A server's application that starts its engine with itself, as ASGI's lifespan says.

    Args:
        arguments: see `build`.
    """

    def __init__(self, arguments: dict[str, Any]):
        self.parts = _parts(arguments)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or begin and end."""
        if scope["type"] != "lifespan":
            await self.parts.app(scope, receive, send)
            return
        await receive()
        engine = asyncio.create_task(self.parts.supervisor.run())
        try:
            await self._ready(engine)
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        # Ray sends nothing to a replica that is about to end, and has waited for what was under way.
        self.parts.dispatcher.draining = True
        await self.parts.supervisor.stop()
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _ready(self, engine: "asyncio.Task[None]") -> None:
        """Wait for the engine.

        Raises:
            LapcliError: it cannot begin.
        """
        while not self.parts.dispatcher.ready:
            if engine.done():
                engine.result()
            await asyncio.sleep(0.02)


def _parts(arguments: dict[str, Any]) -> "Parts":
    """The parts of a server, for the machine of a replica."""
    from lapcli.families.packed import longest_sequence
    from lapcli.families.source import resolve_model
    from lapcli.machine import Machine
    from lapcli.runtime.engine import DEFAULT_LENGTH
    from lapcli.serving.assembling import assemble, read_chat_template
    from lapcli.serving.keys import read_keys

    wish = Wish(**_as_typed(arguments))
    found = find_conversion(str(arguments["model"]), wish)
    source = resolve_model(str(arguments["model"] if found is None else found.conversion.place.base))
    machine = Machine(str(arguments.get("device", "auto")), str(arguments.get("dtype", "auto")))
    machine.check(source.config)
    given = {name: value for name, value in arguments.items() if name in _ENGINE}
    if found is not None:
        given |= {"model": str(source.path), **found.settings}
    given.setdefault("max_length", min(longest_sequence(source.config) or DEFAULT_LENGTH, DEFAULT_LENGTH))
    settings = EngineSettings(
        device=str(machine.torch_device()),
        dtype=str(machine.torch_dtype(source.config)).removeprefix("torch."),
        **given,
    )
    limits = Limits(**{name: value for name, value in arguments.items() if name in _LIMITS})
    keys, template = (arguments.get(name) for name in ("api_key_file", "chat_template"))
    return assemble(
        source,
        settings,
        limits,
        read_keys(os.environ, None if keys is None else Path(keys)),
        name=arguments.get("name") or (None if found is None else found.conversion.root.resolve().name),
        policy=None if found is None else found.policy,
        chat_template=read_chat_template(None if template is None else Path(template)),
    )


def _as_typed(arguments: dict[str, Any]) -> dict[str, Any]:
    """What there is of a `Wish`: texts of the command line may be numbers in YAML."""
    given = {name: value for name, value in arguments.items() if name in _CONVERTED}
    return {name: value if isinstance(value, bool) else str(value) for name, value in given.items()}
