"""`lapcli bench`: what things take here, as ratios within one run, with the floor beside them."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.cli import options
from lapcli.errors import UsageError

if TYPE_CHECKING:
    from lapcli.benchmarks.speed.request import Request
    from lapcli.benchmarks.speed.results import Results, Row

_STAGES = ("selection", "calibration", "slicing", "recovery", "commands")
_SPEED = ("decode", "prefill", "mixer", "operator")
_CELLS = "Of decode, prefill, mixer, operator"
_MACHINE = "This machine"
_OUTPUT = "Output"


def _axis(text: str, *names: str) -> Any:
    return typer.Option(*names, help=f"{text}; several with commas.", rich_help_panel=_CELLS)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "bench",
        help="Time decoding, prompts, mixers and operators, or selection, calibration, slicing, recovery and whole "
        "commands here; see docs/benchmarks.md.",
    )(run)


def run(
    what: Annotated[str | None, typer.Argument(help=" | ".join((*_SPEED, *_STAGES)))] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Measure what the paper's Tables 17 to 19 hold.")] = False,
    model: Annotated[
        str | None, typer.Option(help="The model of calibration, recovery and commands. Default: demo:gdn.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Toy sizes: shows that it runs, measures nothing.")] = False,
    config: Annotated[
        str | None,
        _axis(
            "Models with random weights: gdn, qwen3.5-like, delta-net, toy, demo:gdn, a directory or config.json; "
            "Transformers, whole and converted: llama-like, smollm2-like, toy-llama, a Llama's config.json; "
            "layers of an operator: gdn, qwen3.5, toy. Default: gdn, and qwen3.5 as a layer"
        ),
    ] = None,
    ratio: Annotated[str | None, _axis("Removed fractions of the key width. Default: 0,0.5,0.75")] = None,
    share: Annotated[str | None, _axis("Of a Transformer's layers that are made states. Default: 0,0.25,0.5")] = None,
    batch: Annotated[str | None, _axis("Rows, the most telling first. Default: 64,1,16,256; prompts: 8,1")] = None,
    tokens: Annotated[
        str | None, _axis("Tokens seen before a decode step, or of a prompt. Default: 512; prompts: 512 to 8192")
    ] = None,
    widths: Annotated[str | None, _axis("Key widths of an operator. Default: from the layer's own to 32")] = None,
    phase: Annotated[str | None, _axis("Of a mixer or an operator: decode, prefill. Default: both")] = None,
    ways: Annotated[
        str | None, _axis("What computes it, such as lapcli, fla, fla graph. Default: all that are here")
    ] = None,
    state_dtype: Annotated[str | None, _axis("Of recurrent states: float32, bfloat16. Default: float32")] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="Gradients of an operator too.", rich_help_panel=_CELLS)
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="decode: where a captured step's time goes, by kernel.", rich_help_panel=_CELLS),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            help="decode, which need not be named: fill so much with sequences (80GiB) and measure there.",
            rich_help_panel=_CELLS,
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(help="Independent trials, whose median is the figure.", rich_help_panel=_CELLS)
    ] = 3,
    budget: Annotated[
        float | None, typer.Option(help="Seconds: what has not begun by then is left out.", rich_help_panel=_CELLS)
    ] = None,
    first_config: Annotated[
        bool,
        typer.Option(
            "--first-config",
            help="Keep every Triton autotuner at its first configuration: fla starts at once, and may be slower.",
            rich_help_panel=_CELLS,
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="JSON file that holds every row as soon as it is made.", rich_help_panel=_OUTPUT)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of what was measured (.png, .svg).", rich_help_panel=_OUTPUT)
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernel: options.Kernel = "auto",
    require_fast: options.RequireFast = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Print a table, or JSON."""
    # Sequences that fill memory are decoded, so that nobody needs to say so.
    kind = "paper" if paper else "decode" if what is None and memory is not None else what
    if kind is None or (paper and what is not None):
        raise UsageError(
            "name one benchmark, or --paper",
            f"there is: {', '.join((*_SPEED, *_STAGES))}; for example `lapcli bench decode`",
        )
    if kind not in ("paper", *_SPEED, *_STAGES):
        raise UsageError(f"there is no benchmark {kind!r}; there is: {', '.join((*_SPEED, *_STAGES))}")
    given: dict[str, Any] = {
        "--config": config, "--ratio": ratio, "--share": share, "--batch": batch, "--tokens": tokens,
        "--widths": widths,
        "--phase": phase, "--ways": ways, "--state-dtype": state_dtype, "--backward": backward or None,
        "--profile": profile or None,
        "--memory": memory, "--budget": budget, "--first-config": first_config or None, "--output": output,
        "--plot": plot,
    }  # fmt: skip
    if kind in _STAGES:
        _refuse(kind, given, dry_run)
        _stage(kind, model or "demo:gdn", quick, (device, dtype, kernel, require_fast), as_json, quiet)
        return
    if model is not None or kernel != "auto":
        named = "--model" if model is not None else "--kernel"
        raise UsageError(f"{named} is not for `bench {kind}`", "models are configs here (--config), kernels are --ways")
    if kind == "paper":
        _refuse(kind, {name: value for name, value in given.items() if name in _NOT_FOR_PAPER}, False)
    if budget is not None and not budget > 0:
        raise UsageError(f"--budget {budget:g}: seconds above 0")
    if trials < 1:
        raise UsageError(f"--trials {trials}: at least 1")
    from lapcli.benchmarks.speed.decode import DecodeSettings
    from lapcli.benchmarks.speed.request import Request

    request = Request(
        kind,
        configs=_words(config),
        ratios=_words(ratio),
        shares=_words(share),
        batches=_numbers("--batch", batch),
        tokens=_numbers("--tokens", tokens),
        widths=_numbers("--widths", widths),
        phases=_words(phase),
        ways=_words(ways),
        state_dtypes=_words(state_dtype),
        backward=backward,
        memory=_bytes(memory),
        quick=quick,
        settings=DecodeSettings(trials=trials, profile=profile),
    )
    _speed(request, (device, dtype, require_fast), seed, budget, first_config, output, plot, as_json, dry_run, quiet)


_NOT_FOR_PAPER = (
    "--config", "--ratio", "--share", "--batch", "--tokens", "--widths", "--phase", "--ways", "--state-dtype",
    "--backward", "--memory", "--profile",
)  # fmt: skip


def _refuse(kind: str, given: dict[str, Any], dry_run: bool) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} is not for `bench {'--' if kind == 'paper' else ''}{kind}`", "drop it")
    if dry_run:
        raise UsageError(f"`bench {kind}` writes nothing", "drop --dry-run")


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in (text or "").split(","))))


def _numbers(name: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError as error:
        raise UsageError(f"{name} {text!r} is no list of whole numbers", "for example 64,1") from error


def _bytes(text: str | None) -> float | None:
    from lapcli.stages.planning import memory_bytes

    return None if text is None else memory_bytes(text)


def _speed(
    request: "Request",
    machine: tuple[str, str, bool],
    seed: int,
    budget: float | None,
    first_config: bool,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    import shlex
    import sys

    from lapcli.benchmarks.speed.pictures import check_picture, draw
    from lapcli.benchmarks.speed.request import plan, refuse_slow
    from lapcli.benchmarks.speed.request import run as measure
    from lapcli.benchmarks.speed.results import Budget, Results, check_output, machine_facts
    from lapcli.cli import display
    from lapcli.machine import Machine
    from lapkernels.timing import copy_bandwidth, product_rate

    work = plan(request)
    if plot is not None:
        check_picture(plot)
    if output is not None:
        check_output(output)
    if plot is not None and output == plot:
        raise UsageError(f"--output and --plot are both {plot}", "name two files")
    where = Machine(machine[0], machine[1])
    device = where.torch_device()
    # fp32 on a CPU; the configs that are measured name no dtype, and bf16 is what such models have.
    dtype = where.torch_dtype({"dtype": "bfloat16"})
    _refuse_more_than_there_is(request.memory, device.type)
    if machine[2]:
        refuse_slow(work, device, dtype)
    if dry_run:
        writes = [str(path) for path in (output, plot) if path is not None]
        facts = {
            **work.facts(),
            "memory": _memory_said(request.memory, as_json),
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "writes": writes,
        }
        display.would_do({name: value for name, value in facts.items() if value}, as_json)
        return
    clock = Budget(budget)
    facts = machine_facts(device, copy_bandwidth(device), product_rate(device, dtype))
    if not quiet:
        display.closing(
            f"{facts['device']}: copies {facts['copy_bytes'] / 1e9:.4g} GB/s, products "
            f"{facts['product_flops'] / 1e12:.3g} TFLOP/s, {str(dtype).removeprefix('torch.')}"
        )
    command = "lapcli " + shlex.join(_without_paths(sys.argv[1:]))
    results = Results(
        command, facts, path=output, budget=clock, each=None if quiet else lambda row: display.closing(_line(row)),
        subjects=[one.to_json() for some in work.subjects for one in some], quick=request.quick,
    )  # fmt: skip
    measure(work, results, device, dtype, seed=seed, first_config=first_config)
    if plot is not None and not draw(results.rows, plot):
        plot = None
    if as_json:
        display.emit(results.to_json())
    elif not quiet:
        _show(results, request.kind)
    if not quiet:
        written = [str(path) for path in (output, plot) if path is not None]
        display.closing(f"measured: {', '.join(written)}" if written else "measured; --output FILE keeps the rows")


def _memory_said(memory: float | None, as_json: bool) -> float | str | None:
    from lapcli.cli.display import size

    return memory if memory is None or as_json else size(memory)


def _refuse_more_than_there_is(memory: float | None, device: str) -> None:
    """A CPU has no allocator that refuses: the system would end the process instead."""
    import os

    from lapcli.cli.display import size

    if memory is None or device != "cpu":
        return
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory > there:
        raise UsageError(
            f"--memory {size(memory)} is more than the {size(there)} of this machine",
            f"pass less, or let `lapcli plan --memory {size(memory).replace(' ', '')}` count the sequences",
        )


def _without_paths(arguments: list[str]) -> list[str]:
    """What was typed, but for where results go, which is nobody else's business."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not skip and name not in ("--output", "--plot"):
            kept.append(argument)
        skip = not skip and name in ("--output", "--plot") and not equals
    return kept


def _line(row: "Row") -> str:
    cell = row.cell
    name = f"{cell.what}, {cell.model} K {cell.key_width}, batch {cell.batch}, tokens {cell.tokens}, {cell.way}"
    if row.seconds is None:
        return f"{name}: {row.status}{f' ({row.detail})' if row.detail else ''}"
    floor = "" if row.over_floor is None else f", {row.over_floor:.2f} of the floor"
    return f"{name}: {row.seconds * 1e3:.4g} ms{floor}"


def _show(results: "Results", kind: str) -> None:
    from lapcli.benchmarks.speed.paper import paper_tables
    from lapcli.benchmarks.speed.tables import (
        generation_crossings,
        notes,
        prefill_crossings,
        share_crossings,
        tables,
    )
    from lapcli.cli import display

    for table in paper_tables(results.rows) if kind == "paper" else tables(results.rows):
        display.table(table.title, table.columns, table.rows)
    crossed = (prefill_crossings, share_crossings, generation_crossings)
    for text in [line for look in crossed for line in look(results.rows)]:
        display.closing(text)
    for text in notes(results.rows):
        display.remark(text, "dim")


def _stage(kind: str, model: str, quick: bool, machine: tuple[str, str, str, bool], as_json: bool, quiet: bool) -> None:
    from lapcli.cli import display

    reporter = display.DisplayReporter(quiet)
    if kind == "selection":
        rows = _selection(quick, reporter)
    elif kind == "calibration":
        rows = _calibration(model, quick, machine, reporter)
    elif kind == "slicing":
        rows = _slicing(quick, reporter)
    elif kind == "recovery":
        rows = _recovery(model, quick, machine, reporter)
    else:
        rows = _commands(model, quick, reporter)
    if as_json:
        display.emit(rows)
        return
    for row in rows:
        display.facts(None, {name.replace("_", " "): _shown(name, value) for name, value in row.items()} | {"": ""})


def _shown(name: str, value: Any) -> str:
    from lapcli.cli.display import size

    if value is None:
        return "-"
    if "bytes" in name:
        return size(value)
    if isinstance(value, float):
        return f"{value:.3g} s" if name.endswith(("seconds", "slowest")) else f"{value:.3g}"
    return str(value)


def _selection(quick: bool, reporter: Any) -> list[dict[str, Any]]:
    from lapcli.benchmarks.selection import SelectionCase, activations, selection_benchmark

    cases = [SelectionCase("toy", 1, 2, 16, 8, lambda head: activations(200, 16, head))] if quick else None
    return [
        {
            **asdict(row),
            "ratio": row.ratio,
            "ratio_with_bounds": row.ratio_with_bounds,
            "ratio_fp32": row.ratio_fp32,
            "note": row.note,
        }
        for row in selection_benchmark(cases, reporter=reporter)
    ]


def _calibration(model: str, quick: bool, machine: tuple[str, str, str, bool], reporter: Any) -> list[dict[str, Any]]:
    from lapcli.benchmarks.calibration import calibration_benchmark
    from lapcli.families.source import resolve_model
    from lapcli.machine import Machine

    sizes: dict[str, int] = {"batch": 1, "seq_len": 64, "pairs": 2} if quick else {}
    return [asdict(calibration_benchmark(resolve_model(model), machine=Machine(*machine), reporter=reporter, **sizes))]


def _slicing(quick: bool, reporter: Any) -> list[dict[str, Any]]:
    from lapcli.benchmarks.slicing import slicing_benchmark

    sizes: dict[str, Any] = {"gib": 0.01, "small": True, "runs": 1} if quick else {}
    row = slicing_benchmark(reporter=reporter, **sizes)
    return [{**asdict(row), "ratio": row.ratio}]


def _recovery(model: str, quick: bool, machine: tuple[str, str, str, bool], reporter: Any) -> list[dict[str, Any]]:
    from lapcli.benchmarks.recovery import SMALL, RecoverySizes, recovery_benchmark
    from lapcli.families.source import resolve_model
    from lapcli.machine import Machine

    toy: dict[str, Any] = {"sizes": RecoverySizes(64, 2, 1, 2), "random_model": SMALL} if quick else {}
    rows = recovery_benchmark(resolve_model(model), machine=Machine(*machine), reporter=reporter, **toy)
    return [asdict(row) for row in rows]


def _commands(model: str, quick: bool, reporter: Any) -> list[dict[str, Any]]:
    from lapcli.benchmarks.commands import command_benchmark

    runs = {"quick_runs": 1} if quick else {}
    return [asdict(row) for row in command_benchmark(model, reporter=reporter, **runs)]
