"""`lapcli serve`: a model behind the OpenAI HTTP interface."""

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.cli import options
from lapcli.errors import UsageError

if TYPE_CHECKING:
    from lapcli.families.source import ModelSource
    from lapcli.serving.modes import Served
    from lapcli.serving.server import Running
    from lapcli.serving.settings import EngineSettings

_HTTP = "Who may come in"
_ROOM = "Room"
_CONVERTED = "Converted models"
_LIMITS = "Limits"
_MACHINE = "This machine"
_CONTEXT = "CUDA's context: about 0.5 GiB"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", help="Serve a model over the OpenAI HTTP interface, with continuous batching.")(run)


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Directory, hub id or demo:NAME; or the directory of a conversion (lapcli convert --to dsla), which "
            "adapts to what is asked. Default: the run's model, else demo:gdn."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=_HTTP)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0: any free one.", rich_help_panel=_HTTP)] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys, one a line, beside that of LAPCLI_API_KEY. Default: everybody may come in.",
            rich_help_panel=_HTTP,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="By which clients call the model. Default: its own.", rich_help_panel=_HTTP)
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="File of a Jinja template of chats, in place of the tokenizer's; plain-chat, which ships, for models "
            "without one."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and answer. Default: what the model was made for, at most 4096.",
            rich_help_panel=_ROOM,
        ),
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(
            help="Requests decoded together. Default: what memory holds, at most 256; on a CPU 16.",
            rich_help_panel=_ROOM,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="What may be held in all, with its unit: 20GiB: weights, what requests keep, and what passes, steps "
            "and graphs take, but for CUDA's own half a GiB or so. Default: 0.9 of what is free on a GPU.",
            rich_help_panel=_ROOM,
        ),
    ] = None,
    prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens between two steps, at most; halved where memory is too short for a pass of so many. "
            "Default: 2048 on a GPU, 256 on a CPU.",
            rich_help_panel=_ROOM,
        ),
    ] = None,
    adapt: Annotated[
        bool | None,
        typer.Option(
            "--adapt/--no-adapt",
            help="Convert more or fewer layers for each request, as its length and memory demand. Default of a "
            "conversion, unless there is a --fraction.",
            rich_help_panel=_CONVERTED,
        ),
    ] = None,
    fraction: Annotated[
        str | None,
        typer.Option(
            help="Of the layers that are converted, for every request: 0.3 or 30%; 0: none.", rich_help_panel=_CONVERTED
        ),
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(
            help="Of perplexity, as measured at the conversion, that converted layers may cost: 10% or 0.1. Default of "
            "--adapt: 10%.",
            rich_help_panel=_CONVERTED,
        ),
    ] = None,
    caps: Annotated[
        str | None,
        typer.Option(
            help="Layers that are converted while memory is free, by tokens of the prompt. Default: "
            "0:12.5%,2048:25%,4096:37.5%,8192:50%.",
            rich_help_panel=_CONVERTED,
        ),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="With --adapt: attention weights of layers that can be converted lie in the host's memory and are "
            "fetched when a request needs them.",
            rich_help_panel=_CONVERTED,
        ),
    ] = False,
    max_waiting: Annotated[
        int, typer.Option(help="Prompts that may wait for room; more get 429.", rich_help_panel=_LIMITS)
    ] = 1024,
    max_per_client: Annotated[
        int,
        typer.Option(
            help="Prompts of one key, or one address where there are no keys, on their way.", rich_help_panel=_LIMITS
        ),
    ] = 256,
    max_connections: Annotated[int, typer.Option(help="Connections at once.", rich_help_panel=_LIMITS)] = 4096,
    max_body: Annotated[str, typer.Option(help="Size of a request, with its unit.", rich_help_panel=_LIMITS)] = "4MiB",
    drain_seconds: Annotated[
        float, typer.Option(help="For what is under way after SIGTERM.", rich_help_panel=_LIMITS)
    ] = 30.0,
    run_path: options.Run = options.DEFAULT_RUN,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernel: options.DecodeKernel = "auto",
    state_dtype: options.StateDtype = "float32",
    require_fast: options.RequireFast = False,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then end what is under way, and take no more."""
    from lapcli.cli import context, display
    from lapcli.families.packed import longest_sequence
    from lapcli.linearising.kept import kept_teacher
    from lapcli.linearising.plan import Place, holds_conversion
    from lapcli.machine import Machine
    from lapcli.runtime.engine import DEFAULT_LENGTH
    from lapcli.serving.assembling import assemble, read_chat_template, refuse_without_the_extra
    from lapcli.serving.gate import is_loopback
    from lapcli.serving.keys import read_keys
    from lapcli.serving.modes import Wish, find_conversion
    from lapcli.serving.server import Running, address, bind
    from lapcli.serving.settings import EngineSettings, Limits
    from lapcli.stages.planning import memory_bytes

    for option, value in (("length", max_length), ("rows", max_rows)):
        if value is not None and value < 1:
            raise UsageError(f"--max-{option} {value}: at least 1")
    if prefill_tokens is not None and prefill_tokens < 1:
        raise UsageError(f"--prefill-tokens {prefill_tokens}: at least 1")
    limits = Limits(
        body_bytes=memory_bytes(max_body, "--max-body"),
        waiting=max_waiting,
        per_client=max_per_client,
        connections=max_connections,
        drain_seconds=drain_seconds,
    )
    keys = read_keys(os.environ, api_key_file)
    template = read_chat_template(chat_template)
    # What a damaged one is to be served as need not be said.
    teacher = kept_teacher(Place(Path(model))) if model is not None and holds_conversion(model) else None
    found = find_conversion(model, Wish(adapt, fraction, max_ppl_increase, caps, offload))
    if found is None or teacher is None:
        source = context.last_model(model, context.run_directory(run_path))
    else:
        source, name = teacher, name or found.conversion.root.resolve().name
    machine = Machine(
        device, dtype, context.prompt_kernel(kernel), require_fast=require_fast, trust_remote_code=trust_remote_code
    )
    states = context.state_dtype(state_dtype)
    context.refuse_steps(machine, source)
    made_for = longest_sequence(source.config)
    settings = EngineSettings(
        model=str(source.path) if source.revision else source.name,
        device=str(machine.torch_device()),
        dtype=str(machine.torch_dtype(source.config)).removeprefix("torch."),
        kernel=kernel,
        state_dtype=str(states).removeprefix("torch."),
        max_length=max_length or min(made_for or DEFAULT_LENGTH, DEFAULT_LENGTH),
        max_rows=max_rows,
        memory=None if memory is None else memory_bytes(memory),
        piece=prefill_tokens,
        require_fast=require_fast,
        trust_remote_code=trust_remote_code,
        **({} if found is None else found.settings),
    )
    reporter = display.DisplayReporter(quiet)
    if made_for is not None and settings.max_length > made_for:
        reporter.warn(f"requests of up to {settings.max_length} tokens; {source.name} was made for {made_for}")
    if not is_loopback(host) and not len(keys):
        reporter.warn(f"--host {host}: everybody who reaches it may use this model; set LAPCLI_API_KEY")
    refuse_without_the_extra()
    with contextlib.closing(bind(host, port)) as taken:
        if dry_run:
            would = {"url": address(taken), "keys": len(keys), **_dry(source, settings), **_dry_converted(found)}
            display.would_do(would, as_json)
            return
        policy = None if found is None else found.policy
        parts = assemble(source, settings, limits, keys, name=name, chat_template=template, policy=policy)
        _serve(Running(parts, taken, limits), _what(source, found), as_json=as_json, quiet=quiet)


def _what(source: "ModelSource", found: "Served | None") -> str:
    """What is served, for whoever started it."""
    if found is None:
        return source.name
    names = [each.name for each in found.configurations]
    which = names[0] if len(names) == 1 else f"{len(names)} configurations from {names[0]} to {names[-1]}"
    return f"{found.conversion.root} ({which})"


def _serve(running: "Running", what: str, *, as_json: bool, quiet: bool) -> None:
    """Serve, and say where once there is an engine."""
    import asyncio
    import gc

    from lapcli.cli import display
    from lapcli.serving.logs import log_libraries

    def started() -> None:
        if as_json:
            display.emit({"url": running.url, "model": running.name, "pid": os.getpid()})
            sys.stdout.flush()
        display.closing(
            f"serving {what} as {running.name} at {running.url}/v1; Ctrl-C ends what is under way, then the server",
            quiet=quiet,
        )

    log_libraries()
    # The libraries' million objects would let Python look for garbage among the old ones far too rarely.
    gc.freeze()
    asyncio.run(running.run(started))


def _dry(source: "ModelSource", settings: "EngineSettings") -> dict[str, Any]:
    from lapcli.families.loading import skeleton
    from lapcli.runtime.plans import why_no_plan
    from lapcli.serving.worker import planned

    room = planned(settings)
    why = why_no_plan(skeleton(source))
    return {
        "model": source.name,
        "device": settings.device,
        "dtype": settings.dtype,
        "weights_on_disk": sum(shard.stat().st_size for shard in source.shards),
        "memory": settings.memory or "what there is",
        "weights": room["weights"],
        "tokens_of_a_request": settings.max_length,
        "such_a_request": room["longest_request"],
        "rows_together": room["rows"],
        "tokens_of_a_piece": room["piece"],
        "beside_weights_and_requests": room.get("beside", {}),
        **({"outside_memory": _CONTEXT} if settings.device.startswith("cuda") else {}),
        "steps": "fused" if why is None else f"the library's forward pass, row by row ({why})",
        "writes": "nothing",
    }


def _dry_converted(found: "Served | None") -> dict[str, Any]:
    if found is None:
        return {}
    return {
        "conversion": str(found.conversion.root),
        "offloads": found.settings["offload"],
        "configurations": {
            each.name: {"converted": round(each.share, 4), "ppl_increase": round(each.increase, 4)}
            for each in found.configurations
        },
    }
