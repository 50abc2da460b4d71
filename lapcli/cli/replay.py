"""`lapcli replay`: a trace of requests sent to a server, or worked off by engines that are only thought of."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.cli import options
from lapcli.errors import UsageError

if TYPE_CHECKING:
    from lapcli.reporting import Reporter
    from lapcli.serving.costs import StepCosts
    from lapcli.serving.replay_results import Outcome
    from lapcli.serving.replay_trace import Fitted, Turn

_LOAD = "The load"
_SIMULATION = "Simulation"
_ROWS = (
    ("normalised_seconds", "answer / token", 1e3, "ms"),
    ("first_token_seconds", "first token", 1e3, "ms"),
    ("inter_token_seconds", "between tokens", 1e3, "ms"),
    ("answer_seconds", "answer", 1.0, "s"),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replay", help="Replay a trace of requests against a server, or simulate it by measured step costs.")(
        run
    )


def run(
    trace: Annotated[
        Path, typer.Argument(help="CSV file, also packed by xz, with TIMESTAMP, ContextTokens, GeneratedTokens.")
    ],
    url: Annotated[str, typer.Option(help="Of the server.", rich_help_panel=_LOAD)] = "http://127.0.0.1:8000",
    requests: Annotated[
        int | None, typer.Option(help="The first so many requests. Default: all.", rich_help_panel=_LOAD)
    ] = None,
    time_scale: Annotated[
        float, typer.Option(help="Seconds for each second of the trace; 0.5: twice as fast.", rich_help_panel=_LOAD)
    ] = 1.0,
    length_scale: Annotated[
        float, typer.Option(help="Tokens for each token of the trace.", rich_help_panel=_LOAD)
    ] = 1.0,
    turns: Annotated[
        float,
        typer.Option(help="Mean turns of a session (Poisson); 0: requests without history.", rich_help_panel=_LOAD),
    ] = 3.0,
    seed: options.Seed = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model whose tokenizer counts. Default: the one that is served.", rich_help_panel=_LOAD),
    ] = None,
    simulate: Annotated[
        Path | None,
        typer.Option(
            help="Send nothing: simulate by the step costs of this file. Where there is none, they are measured here "
            "with --model, and written.",
            rich_help_panel=_SIMULATION,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model whose step costs are measured.", rich_help_panel=_SIMULATION)
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(help="Requests that an engine decodes together.", rich_help_panel=_SIMULATION)
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait for an engine.", rich_help_panel=_SIMULATION)
    ] = 1024,
    replicas: Annotated[int, typer.Option(help="Engines.", rich_help_panel=_SIMULATION)] = 1,
    output: Annotated[
        Path | None, typer.Option(help="File for the figures and each request's, as JSON.", rich_help_panel="Output")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Send each request when it is due, whatever became of those before, and print latencies and throughput."""
    import asyncio

    from lapcli.cli import display
    from lapcli.serving.replay_trace import make_sessions, read_trace, scaled

    for name, value in (("requests", requests), ("replicas", replicas), ("max-rows", max_rows)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: at least 1")
    if turns < 0 or turns > 100:
        raise UsageError(f"--turns {turns}: 0 (no history) to 100")
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}")
    arrivals = read_trace(trace)[:requests]
    plain = make_sessions(arrivals, turns, seed)
    reporter = display.DisplayReporter(quiet or as_json)
    said = make_sessions(scaled(arrivals, time_scale, length_scale), turns, seed)
    head: dict[str, Any] = {"trace": trace.name, "turns": turns, "seed": seed, "time_scale": time_scale}
    head |= {"length_scale": length_scale, **_lengths(plain)}
    if dry_run:
        last = said[-1].seconds
        display.would_do({**head, "requests": len(said), "seconds": last, "writes": str(output or "nothing")}, as_json)
        return
    if simulate is not None:
        costs = _costs(simulate, model, max_rows, device, dtype, reporter)
        found, outcomes = _simulate(said, costs, replicas, max_waiting)
    else:
        found, outcomes = asyncio.run(_send(said, url, tokenizer, seed, reporter))
    document = {**head, **found}
    if output is not None:
        _write(output, document, outcomes)
    if as_json:
        display.emit(document)
    else:
        _show(document, quiet)


def _lengths(turns: "list[Turn]") -> dict[str, Any]:
    """Shares of prompts by length, beside the paper's."""
    from lapcli.serving.replay_trace import BUCKETS, PAPER_SHARES, shares

    found = shares([turn.prompt for turn in turns])
    named = [f"{low}+" for low in BUCKETS]
    return {
        "percent_of_prompts_from": dict(zip(named, (round(share, 2) for share in found), strict=True)),
        "percent_in_the_paper": dict(zip(named, PAPER_SHARES, strict=True)),
    }


def _fitting(fitted: "Fitted", window: int) -> dict[str, Any]:
    return {"window": window, "prompts_cut": fitted.prompts_cut, "answers_cut": fitted.answers_cut}


async def _send(
    turns: "list[Turn]", url: str, named: str | None, seed: int, reporter: "Reporter"
) -> "tuple[dict[str, Any], list[Outcome]]":
    """Replay against a server."""
    from lapcli.families.loading import load_tokenizer, resolve_model
    from lapcli.serving.keys import VARIABLE
    from lapcli.serving.replay_client import Client
    from lapcli.serving.replay_results import summary
    from lapcli.serving.replay_texts import Prompts
    from lapcli.serving.replay_trace import fit

    client = Client(url, os.environ.get(VARIABLE))
    card = await client.card()
    window = int(card.get("max_model_len") or 4096)
    fitted = fit(turns, window)
    name = named or card.get("root") or card["id"]
    prompts = Prompts(load_tokenizer(resolve_model(name)), seed)
    if not prompts.as_text:
        reporter.notice(f"the tokenizer of {name} has no words that stay whole; prompts are token ids")
    with reporter.task("replaying", len(fitted.turns), "requests") as task:
        outcomes = await client.replay(fitted.turns, prompts, card["id"], lambda _: task.advance())
    after = await client.metrics()
    found = summary(outcomes, mode="as served")
    if found["latest_send_seconds"] > 0.25:
        reporter.warn(f"a request was sent {found['latest_send_seconds']:.2f} s late: this client is too slow for that")
    memory = after.get("lapcli_peak_memory_bytes")
    return {"model": card["id"], **_fitting(fitted, window), **found, "peak_memory_bytes": memory}, outcomes


def _simulate(
    turns: "list[Turn]", costs: "StepCosts", replicas: int, waiting: int
) -> "tuple[dict[str, Any], list[Outcome]]":
    """Replay by measured costs."""
    from lapcli.serving.replay_results import summary
    from lapcli.serving.replay_trace import fit
    from lapcli.serving.simulation import simulate

    fitted = fit(turns, costs.window)
    outcomes = simulate(fitted.turns, costs, replicas=replicas, waiting=waiting)
    found = summary(outcomes, mode="simulated")
    return {"model": costs.model, "replicas": replicas, **_fitting(fitted, costs.window), **found}, outcomes


def _costs(
    file: Path, model: str | None, max_rows: int | None, device: str, dtype: str, reporter: "Reporter"
) -> "StepCosts":
    """The step costs of a file, measured first where there is none."""
    from dataclasses import replace

    from lapcli.serving.costs import measure_costs, read_costs

    if file.exists():
        costs = read_costs(file)
        if model is not None and model != costs.model:
            raise UsageError(f"{file} holds the costs of {costs.model}, not of {model}", "name another file")
        return costs if max_rows is None else replace(costs, rows=max_rows)
    if model is None:
        raise UsageError(f"there is no {file}", "pass --model MODEL too, to measure its step costs here")
    if not file.parent.is_dir():
        raise UsageError(f"--simulate {file}: there is no folder {file.parent}")
    from lapcli.families.packed import longest_sequence
    from lapcli.families.source import resolve_model
    from lapcli.machine import Machine
    from lapcli.runtime.engine import DEFAULT_LENGTH
    from lapcli.serving.settings import EngineSettings
    from lapcli.serving.worker import prepare

    source = resolve_model(model)
    machine = Machine(device, dtype)
    machine.check(source.config)
    window = min(longest_sequence(source.config) or DEFAULT_LENGTH, DEFAULT_LENGTH)
    settings = EngineSettings(
        model,
        str(machine.torch_device()),
        str(machine.torch_dtype(source.config)).removeprefix("torch."),
        max_length=window,
        max_rows=max_rows,
    )
    with reporter.task(f"measuring the steps of {model}"):
        batch, _ = prepare(settings)
        costs = measure_costs(batch, model=model, window=window)
    costs.write(file)
    reporter.notice(f"step costs are in {file}")
    return costs


def _write(file: Path, document: dict[str, Any], outcomes: "list[Outcome]") -> None:
    import json
    from dataclasses import asdict

    from lapcli.artifacts.atomic import atomic_file

    with atomic_file(file) as temporary:
        temporary.write_text(json.dumps({**document, "each": [asdict(each) for each in outcomes]}) + "\n")


def _show(found: dict[str, Any], quiet: bool) -> None:
    from lapcli.cli import display
    from lapcli.serving.replay_results import PERCENTILES

    if quiet:
        return
    shares, paper = found["percent_of_prompts_from"], found["percent_in_the_paper"]
    display.table(
        "prompts by tokens, before any is cut or scaled",
        ["", *shares],
        [
            [label, *(f"{share:.2f} %" for share in found.values())]
            for label, found in (("this replay", shares), ("arXiv 2506.09316", paper))
        ],
    )
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    rows = [
        [label, *(f"{found[name][column] * factor:.1f} {unit}" for column in columns)]
        for name, label, factor, unit in _ROWS
        if found[name] is not None
    ]
    display.table(f"{found['mode']}: {found['model']}", ["", *columns], rows)
    cut = f"{found['prompts_cut']} prompts cut to the window of {found['window']} tokens"
    cut += f", {found['answers_cut']} answers" if found["answers_cut"] else ""
    rate = "" if found["tokens_per_second"] is None else f", {found['tokens_per_second']:.1f} tokens/s"
    display.closing(
        f"{found['done']} of {found['requests']} requests in {found['seconds']:.1f} s{rate}; "
        f"{found['refused']} refused, {found['failed']} failed; {cut}"
    )
