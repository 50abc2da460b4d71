"""`lapcli replay`: a trace of requests sent to a server, or worked off by engines that are only thought of."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.cli import options
from lapcli.errors import UsageError

if TYPE_CHECKING:
    from lapcli.reporting import Reporter
    from lapcli.serving.costs import StepCosts
    from lapcli.serving.modes import Mode, Wish
    from lapcli.serving.replay_engines import Engines
    from lapcli.serving.replay_results import Outcome
    from lapcli.serving.replay_trace import Fitted, Turn

Results = dict[str, "tuple[dict[str, Any], list[Outcome]]"]
"""By mode: figures, and what came of each request."""

_BEGINNING = b'{"trace": '
"""Of a file that a replay wrote."""
_LOAD = "The load"
_SIMULATION = "Simulation"
_ENGINE = "Engines that are started or simulated here"
_MODES = "Modes of a conversion"
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
    url: Annotated[
        str | None, typer.Option(help="Of the server. Default: http://127.0.0.1:8000.", rich_help_panel=_LOAD)
    ] = None,
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
    replicas: Annotated[int, typer.Option(help="Engines.", rich_help_panel=_SIMULATION)] = 1,
    modes: Annotated[
        str | None,
        typer.Option(
            help="How a conversion is served, one after the other, by servers that are started here, or simulated: "
            "never,static:0.5,adaptive.",
            rich_help_panel=_MODES,
        ),
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(
            help="Of adaptive: see lapcli serve. Of others it is said whether they are within. Default: 10%.",
            rich_help_panel=_MODES,
        ),
    ] = None,
    caps: Annotated[str | None, typer.Option(help="Of adaptive: see lapcli serve.", rich_help_panel=_MODES)] = None,
    offload: Annotated[
        bool, typer.Option("--offload", help="Of adaptive: see lapcli serve.", rich_help_panel=_MODES)
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model that is served for --modes, or whose step costs are measured.", rich_help_panel=_ENGINE
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Of the weights, keys and values of an engine: 20GiB.", rich_help_panel=_ENGINE),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer.", rich_help_panel=_ENGINE)
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(help="Requests that an engine decodes together.", rich_help_panel=_ENGINE)
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait for an engine.", rich_help_panel=_ENGINE)
    ] = 1024,
    output: Annotated[
        Path | None, typer.Option(help="File for the figures and each request's, as JSON.", rich_help_panel="Output")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    require_fast: options.RequireFast = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Send each request when it is due, whatever became of those before, and print latencies and throughput."""
    import asyncio

    from lapcli.artifacts import refuse_unmarked
    from lapcli.cli import display
    from lapcli.serving.modes import DEFAULT_INCREASE, Wish, parse_modes
    from lapcli.serving.replay_client import DEFAULT_URL
    from lapcli.serving.replay_engines import Engines
    from lapcli.serving.replay_trace import make_sessions, read_trace, scaled
    from lapcli.stages.planning import memory_bytes

    for name, value in (
        ("requests", requests), ("replicas", replicas), ("max-rows", max_rows), ("max-length", max_length)
    ):  # fmt: skip
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: at least 1")
    if turns < 0 or turns > 100:
        raise UsageError(f"--turns {turns}: 0 (no history) to 100")
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}")
    if output is not None:
        refuse_unmarked(output, _BEGINNING, "lapcli replay")
    wish = Wish(None, None, max_ppl_increase, caps, offload)
    size = None if memory is None else memory_bytes(memory)
    engine = Engines(model, size, max_length, max_rows, max_waiting, device, dtype, replicas, require_fast)
    chosen = None if modes is None else parse_modes(modes)
    engine.check(chosen, wish, simulated=simulate is not None, url=url)
    limit = DEFAULT_INCREASE if wish.limit is None else wish.limit
    arrivals = read_trace(trace)[:requests]
    plain = make_sessions(arrivals, turns, seed)
    reporter = display.DisplayReporter(quiet)
    said = make_sessions(scaled(arrivals, time_scale, length_scale), turns, seed)
    head: dict[str, Any] = {"trace": trace.name, "turns": turns, "seed": seed, "time_scale": time_scale}
    head |= {"length_scale": length_scale, **_lengths(plain)}
    # A mode that memory does not hold is not found out after hours of others.
    rooms = None if chosen is None or simulate is not None else engine.planned(chosen, wish)
    if dry_run:
        last = said[-1].seconds
        would = {**head, "requests": len(said), "seconds": last, "writes": str(output or "nothing")}
        if chosen is not None:
            would["modes"] = [mode.name for mode in chosen]
        if rooms is not None:
            would["engines"] = rooms
        if simulate is not None:
            would |= _would_simulate(engine, simulate, chosen, wish)
        display.would_do(would, as_json)
        return
    if simulate is not None:
        results = _simulate(said, engine.costs(simulate, reporter), chosen, wish, engine)
    elif chosen is None:
        results = {"as served": asyncio.run(_send(said, url or DEFAULT_URL, tokenizer, seed, reporter))}
    else:
        results = _serve_modes(said, chosen, wish, engine, tokenizer, seed, output, reporter)
    document = {**head, **_together(results, None if chosen is None else limit)}
    if as_json:
        display.emit(document)
    elif not quiet:
        _show(head, {name: found for name, (found, _) in results.items()}, document.get("compared"), limit)
    # Last: what took long is shown whatever becomes of the file.
    if output is not None:
        _write(output, document, results)


def _would_simulate(engine: "Engines", file: Path, modes: "list[Mode] | None", wish: "Wish") -> dict[str, Any]:
    """By which costs, and on engines of which room; what would be refused is refused."""
    from dataclasses import replace

    from lapcli.serving.replay_modes import plan_mode

    costs = engine.known_costs(file)
    if costs is None:
        return {"costs": f"measured of {engine.model} and written to {file}", "engines": engine.planned(modes, wish)}
    costs = replace(costs, window=min(costs.window, engine.max_length or costs.window))
    rooms = {}
    for mode in modes or [None]:
        plan = plan_mode(mode, costs, wish, engine.memory, engine.max_rows)
        room = {"rows": plan.rows, "bytes": plan.row_bytes or "any number", "piece": plan.piece}
        rooms["simulated" if mode is None else mode.name] = room
    return {"costs": f"{file}, of {costs.model}", "engines": rooms}


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
    turns: "list[Turn]", url: str, named: str | None, seed: int, reporter: "Reporter", mode: str = "as served"
) -> "tuple[dict[str, Any], list[Outcome]]":
    """Replay against a server."""
    from lapcli.families.loading import load_tokenizer, resolve_model
    from lapcli.serving.keys import VARIABLE
    from lapcli.serving.replay_client import Client
    from lapcli.serving.replay_modes import served_figures
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
    before = await client.metrics()
    with reporter.task(f"replaying, {mode}", len(fitted.turns), "requests") as task:
        outcomes = await client.replay(fitted.turns, prompts, card["id"], lambda _: task.advance())
    figures = served_figures(before, await client.metrics())
    found = summary(outcomes, mode=mode)
    if found["latest_send_seconds"] > 0.25:
        reporter.warn(f"a request was sent {found['latest_send_seconds']:.2f} s late: this client is too slow for that")
    return {"model": card["id"], **_fitting(fitted, window), **found, **figures}, outcomes


def _serve_modes(
    turns: "list[Turn]", modes: "list[Mode]", wish: "Wish", engine: "Engines", named: str | None, seed: int,
    output: Path | None, reporter: "Reporter",
) -> "Results":  # fmt: skip
    """Replay against a server of each mode."""
    import asyncio

    from lapcli.serving.replay_engines import started

    assert engine.model is not None
    results: Results = {}
    logs: list[Path] = []
    try:
        for mode in modes:
            log = None if output is None else output.with_name(f"{output.name}.{mode.name.replace(':', '-')}.log")
            logs += [] if log is None else [log]
            reporter.notice(f"{mode.name}: lapcli serve {engine.model} {' '.join(engine.options(mode, wish))}")
            with started(engine.model, engine.options(mode, wish), log) as url:
                results[mode.name] = asyncio.run(_send(turns, url, named, seed, reporter, mode.name))
    except Exception:
        # What a server said tells why it failed.
        raise
    except BaseException:
        # An interrupted replay keeps nothing.
        for log in logs:
            log.unlink(missing_ok=True)
        raise
    return results


def _simulate(
    turns: "list[Turn]", costs: "StepCosts", modes: "list[Mode] | None", wish: "Wish", engine: "Engines"
) -> "Results":
    """Replay by measured costs."""
    from dataclasses import replace

    from lapcli.serving.replay_modes import simulate_mode
    from lapcli.serving.replay_trace import fit

    window = min(costs.window, engine.max_length or costs.window)
    fitted = fit(turns, window)
    results: Results = {}
    for mode in modes or [None]:
        found, outcomes = simulate_mode(
            mode,
            fitted,
            replace(costs, window=window),
            wish,
            memory=engine.memory,
            max_rows=engine.max_rows,
            replicas=engine.replicas,
            waiting=engine.max_waiting,
        )
        head = {"model": costs.model, **_fitting(fitted, window)}
        results["simulated" if mode is None else mode.name] = {**head, **found}, outcomes
    return results


def _together(results: Results, limit: float | None) -> dict[str, Any]:
    """One document of the figures of all modes, and of which are within a limit of perplexity; of one without."""
    from lapcli.serving.replay_results import compared

    figures = {name: found for name, (found, _) in results.items()}
    if limit is None:
        return next(iter(figures.values()))
    for found in figures.values():
        found["within_limit"] = _within(found, limit)
    return {"max_ppl_increase": limit, "modes": figures, "compared": compared(figures)}


def _within(found: dict[str, Any], limit: float) -> bool | None:
    """Whether a mode kept a limit of perplexity; a mean over many tokens is not exact."""
    increase = found["ppl_increase"]
    return None if increase is None else increase <= limit + 1e-9


def _write(file: Path, document: dict[str, Any], results: Results) -> None:
    import json
    from dataclasses import asdict

    from lapcli.artifacts.atomic import atomic_file

    each = {name: [asdict(outcome) for outcome in outcomes] for name, (_, outcomes) in results.items()}
    with atomic_file(file) as temporary:
        found = each if "modes" in document else next(iter(each.values()))
        temporary.write_text(json.dumps({**document, "each": found}) + "\n")


def _show(
    head: dict[str, Any],
    figures: dict[str, dict[str, Any]],
    compared: dict[str, dict[str, float | None]] | None,
    limit: float,
) -> None:
    from lapcli.cli import display
    from lapcli.serving.replay_results import PERCENTILES

    shares, paper = head["percent_of_prompts_from"], head["percent_in_the_paper"]
    display.table(
        "prompts by tokens, before any is cut or scaled",
        ["", *shares],
        [
            [label, *(f"{share:.2f} %" for share in found.values())]
            for label, found in (("this replay", shares), ("arXiv 2506.09316", paper))
        ],
    )
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    for found in figures.values():
        rows = [
            [label, *(f"{found[name][column] * factor:.1f} {unit}" for column in columns)]
            for name, label, factor, unit in _ROWS
            if found[name] is not None
        ]
        display.table(f"{found['mode']}: {found['model']}", ["", *columns], rows)
    if compared is not None or any(found["share_converted"] for found in figures.values()):
        _show_modes(figures, compared or {}, limit)
    for found in figures.values():
        cut = f"{found['prompts_cut']} prompts cut to the window of {found['window']} tokens"
        cut += f", {found['answers_cut']} answers" if found["answers_cut"] else ""
        rate = "" if found["tokens_per_second"] is None else f", {found['tokens_per_second']:.1f} tokens/s"
        mode = "" if compared is None else f"{found['mode']}: "
        display.closing(
            f"{mode}{found['done']} of {found['requests']} requests in {found['seconds']:.1f} s{rate}; "
            f"{found['refused']} refused, {found['failed']} failed; {cut}"
        )


def _show_modes(figures: dict[str, dict[str, Any]], compared: dict[str, dict[str, float | None]], limit: float) -> None:
    """What each mode converted, and what that cost and gained."""
    from lapcli.cli import display

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f} %"

    def several(value: float | None, factor: float, unit: str) -> str:
        return "-" if value is None else f"{value * factor:.2f} {unit}"

    judged = all("within_limit" in found for found in figures.values())
    said = {True: "yes", False: "no", None: "-"}
    lines: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("layers converted, mean over tokens", lambda found: percent(found["share_converted"])),
        ("perplexity above the base's, mean over tokens", lambda found: percent(found["ppl_increase"])),
        *([(f"within {100 * limit:g} %", lambda found: said[found["within_limit"]])] if judged else []),
        ("keys, values and states in pages at most", lambda found: several(found["rows_peak_bytes"], 1 / 2**20, "MiB")),
        ("of", lambda found: several(found["rows_total_bytes"], 1 / 2**20, "MiB")),
        ("memory of the engine at most", lambda found: several(found.get("peak_memory_bytes"), 1 / 2**20, "MiB")),
        ("handed over", lambda found: f"{sum(found['switches'].values()):.0f}"),
        ("of these, by replay", lambda found: f"{found['replays']:.0f}"),
        ("tokens replayed", lambda found: f"{found['switch_tokens']:.0f}"),
        ("a replay takes", lambda found: several(found["switch_mean_seconds"], 1.0, "s")),
        ("steps with several configurations", lambda found: f"{found['mixed_steps']:.0f} of {found['steps']:.0f}"),
        ("one of those takes", lambda found: several(found["mixed_mean_seconds"], 1e3, "ms")),
        ("of that, to split and rejoin", lambda found: several(found["split_mean_seconds"], 1e3, "ms")),
        ("rows set back for want of memory", lambda found: f"{found['set_back']:.0f}"),
    ]
    rows = [[label, *(value(found) for found in figures.values())] for label, value in lines]
    display.table("what was converted", ["", *figures], rows)
    names = {
        "normalised_seconds": "answer / token, mean",
        "first_token_seconds": "first token, p95",
        "inter_token_seconds": "between tokens, p95",
        "answer_seconds": "answer, p99",
        "rows_peak_bytes": "keys, values and states in pages at most",
    }
    if compared:
        rows = [
            [label, *("-" if found[name] is None else f"{found[name]:.2f} x" for found in compared.values())]
            for name, label in names.items()
        ]
        display.table("how many times as much", ["", *compared], rows)
