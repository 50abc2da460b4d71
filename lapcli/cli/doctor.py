"""`lapcli doctor`: does this machine compute the kernels right, and fast."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lapcli.cli import options
from lapcli.errors import LapcliError, ModelError, UsageError

if TYPE_CHECKING:
    from lapcli.doctor.diagnosis import Diagnosis
    from lapcli.doctor.facts import Facts
    from lapcli.doctor.kernels import Check

_SHOWN = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "fla": "fla-core",
    "tilelang": "tilelang",
    "causal-conv1d": "causal-conv1d",
    "mamba-ssm": "mamba-ssm",
    "FlashQLA": "flash-qla",
    "FlashInfer": "flashinfer-python",
}
_STYLES = {"wrong": "bold red", "slow": "yellow", "note": "dim"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "doctor",
        help="Check this machine: versions, every kernel against fp64, bandwidth and matrix rate, what will run.",
    )(run)


def run(
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="Check kernels at more widths, and as their autotuners choose them: minutes."),
    ] = False,
    limit: Annotated[
        float | None, typer.Option(help="Seconds after which no further kernel is checked. Default: 40, or none.")
    ] = None,
    device: options.Device = "auto",
    require_fast: options.RequireFast = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Print one screen, or JSON; exit 1 when something that will be used here is wrong."""
    from lapcli.cli import display

    if limit is not None and not limit > 0:
        raise UsageError(f"--limit {limit:g}: seconds above 0")
    try:
        import torch  # noqa: F401 -- whether it can be imported is the first thing to know
    except ImportError as error:
        raise LapcliError(f"torch cannot be imported: {error}", "pip install torch, then run this again") from error
    from lapcli.doctor.diagnosis import LIMIT, diagnose
    from lapcli.machine import Machine
    from lapkernels.verdicts import verdicts_file

    where = Machine(device).torch_device()
    if dry_run:
        from lapcli.doctor.kernels import trials

        planned = trials(where, thorough=thorough)
        display.would_do(
            {
                "device": str(where),
                "checks": sum(trial.why_not is None for trial in planned),
                "cannot run here": sum(trial.why_not is not None for trial in planned),
                "writes, where a kernel is wrong": str(verdicts_file()),
            },
            as_json,
        )
        return
    most = limit if limit is not None else None if thorough else LIMIT
    found = diagnose(where, thorough=thorough, limit=most, reporter=display.DisplayReporter(quiet))
    if as_json:
        display.emit(found.to_json())
    elif not quiet:
        _show(found)
    if not found.sound:
        wrong = sum(finding.level == "wrong" for finding in found.findings)
        raise LapcliError(
            f"{wrong} {'thing' if wrong == 1 else 'things'} that would be used here "
            f"{'is' if wrong == 1 else 'are'} wrong; see above",
            None if found.verdicts is None else f"kernels that are wrong here are kept in {found.verdicts}",
        )
    slow = [use for use in found.uses if not use.fast]
    if require_fast and slow:
        raise ModelError(
            f"--require-fast: {'; '.join(f'{use.work} runs the {use.name} kernel ({use.reason})' for use in slow)}",
            "install 'lapcli[gpu]' on a machine with a CUDA device, or drop --require-fast",
        )
    display.closing("what will be used here is right", quiet=quiet)


def _show(found: "Diagnosis") -> None:
    from lapcli.cli import display

    facts = found.facts
    display.facts(None, _machine(found, facts))
    rows = _rows(found.checks)
    absent = [row[0] for row in rows if set(row[1:]) <= {"-", "not here"}]
    display.table(None, ["kernel", "forward", "backward", "decode"], [row for row in rows if row[0] not in absent])
    if absent:
        display.closing(f"  not here: {', '.join(absent)}")
    for use in found.uses:
        display.closing(f"  {use.work}: {use.name} ({use.reason})")
    for finding in found.findings:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        display.remark(f"{finding.level}: {finding.what}{remedy}", _STYLES[finding.level])


def _machine(found: "Diagnosis", facts: "Facts") -> dict[str, str]:
    import lapcli
    from lapcli.cli.display import size

    versions = [f"{name} {facts.versions.get(package, '-')}" for name, package in _SHOWN.items()]
    gpu = next((gpu for gpu in facts.gpus if gpu.name == found.device), None)
    where = f"{found.device}, {facts.cpus} cores"
    if gpu is not None:
        driver = "" if facts.driver_cuda is None else f", driver for CUDA {facts.driver_cuda[0]}.{facts.driver_cuda[1]}"
        more = f" (one of {len(facts.gpus)})" if len(facts.gpus) > 1 else ""
        where = (
            f"{gpu.name}{more}, {gpu.capability[0]}.{gpu.capability[1]}, {gpu.processors} multiprocessors, "
            f"{size(gpu.free)} of {size(gpu.memory)} free{driver}"
        )
    rates = found.rates
    set_here = ", ".join(f"{name}={value}" for name, value in facts.environment.items())
    return {
        "lapcli": f"{lapcli.__version__}, Python {facts.python}, {facts.system}",
        "packages": ", ".join(versions),
        "device": where,
        "rates": f"copies {rates.copy_bytes / 1e9:.4g} GB/s, {rates.product_dtype} products "
        f"{rates.product_flops / 1e12:.3g} TFLOP/s",
        **({"environment": set_here} if set_here else {}),
    }


def _rows(checks: "Sequence[Check]") -> list[list[str]]:
    """A row for each implementation: the worst of its variants in each way, as a share of the error allowed."""
    rows: list[list[str]] = []
    for operator, impl in dict.fromkeys((check.operator, check.impl) for check in checks):
        row = [f"{operator} {impl}"]
        for way in ("forward", "backward", "decode"):
            ours = [check for check in checks if (check.operator, check.impl, check.way) == (operator, impl, way)]
            row.append(_cell(ours))
        rows.append(row)
    return rows


def _cell(checks: "Sequence[Check]") -> str:
    if not checks:
        return "-"
    for status, shown in (("failed", "FAILS"), ("wrong", "WRONG")):
        if any(check.status == status for check in checks):
            return shown
    shares = [check.share for check in checks if check.share is not None]
    if not shares:
        return checks[0].status
    part = "" if len(shares) == len(checks) else f" ({len(shares)} of {len(checks)})"
    return f"right, {max(shares):.2f}{part}"
