"""`lapcli calibrate`: measure what the selectors need."""

from pathlib import Path
from typing import Annotated

import typer

from lapcli.cli import options
from lapcli.cli.processes import check_processes, in_several
from lapcli.parallel import jointly, processes
from lapcli.pipeline import stage


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate", help=stage("calibrate").summary)(jointly(run))


def run(
    model: options.Model = None,
    data: options.Data = None,
    samples: options.Samples = None,
    seq_len: options.SeqLen = None,
    grad: Annotated[
        bool, typer.Option("--grad", help="Also measure what the grad selector needs (backward passes).")
    ] = False,
    rows: Annotated[
        int | None, typer.Option(help="Draw so many keys and queries (the paper: about 2500) instead of using all.")
    ] = None,
    normalized: Annotated[bool, typer.Option("--normalized", help="L2-normalise keys and queries first.")] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Also keep a streamed QR, which resolves singular values below 1e-8 of the largest."
        ),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="File to write. Default: RUN/calibration.safetensors.")] = None,
    seed: options.Seed = 0,
    gpus: options.Gpus = None,
    run_path: options.Run = options.DEFAULT_RUN,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernel: options.Kernel = "auto",
    require_fast: options.RequireFast = False,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a calibration; `--grad` extends one that is there by saliency."""
    from lapcli.cli import context, display

    directory = context.run_directory(run_path)
    source = context.base_model(model, directory)
    settings = context.calibration_settings(
        source, data=data, samples=samples, seq_len=seq_len, seed=seed, rows=rows, normalized=normalized, exact=exact
    )
    target = output or directory.calibration

    from lapcli.data import check_source, parse_mixture
    from lapcli.machine import Machine
    from lapcli.reporting import SilentReporter
    from lapcli.stages.calibration import assist, calibrate, check_calibration, existing_calibration

    reporter = display.DisplayReporter(quiet)
    source.check_tokenizer()
    for part in parse_mixture(settings.data):
        check_source(part.name)
    layers = check_calibration(source, settings, SilentReporter())
    machine = Machine(device, dtype, kernel, require_fast, trust_remote_code)
    check_processes(gpus, device, samples=settings.samples)
    machine.check(source.config, layers, needs_gradient=grad)
    if dry_run:
        doubles = sum(2 * layer.heads * layer.key_width**2 for layer in layers)
        facts = {
            "model": source.name,
            "tokens": settings.samples * settings.seq_len,
            "text": settings.data,
            "passes": "forward and backward" if grad else "forward",
            "writes": str(target),
            "bytes": doubles * 8,
        }
        display.would_do(facts, as_json)
        return
    _found, whole = existing_calibration(source, settings, target, machine=machine, saliency=grad, overwrite=overwrite)
    if not whole and in_several(gpus):
        return
    ours = processes()
    ours.wait()
    if not ours.leader:
        assist(source, settings, target, machine=machine, processes=ours)
        return
    with directory.lock():
        artifact, worked = calibrate(
            source,
            settings,
            target,
            machine=machine,
            saliency=grad,
            overwrite=overwrite,
            reporter=reporter,
            processes=ours,
        )
        directory.note(source.describe(), "calibrate", {"settings": settings.document(), "output": str(target)})
    if as_json:
        record = artifact.lineage.record
        display.emit(
            {"calibration": str(target), "worked": worked, "tokens": record["tokens"], "corpus": record["corpus"]}
        )
    done = "calibrated" if worked else "nothing to do, it is there already"
    display.closing(f"{done}: {target}\nnext: lapcli select --ratio 0.5{options.run_flag(run_path)}", quiet=quiet)
