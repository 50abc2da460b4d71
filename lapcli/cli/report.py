"""`lapcli report`: a run or a sweep as one HTML and one Markdown file."""

from pathlib import Path
from typing import Annotated

import typer

from lapcli.cli import options


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "report", help="Report on a run or a sweep: curves, tables, settings, as one HTML and one Markdown file."
    )(run)


def run(
    source: Annotated[
        Path, typer.Argument(help="A directory of a run, a sweep or `lapcli eval`. Default: lapcli-run.")
    ] = options.DEFAULT_RUN,
    output: Annotated[Path | None, typer.Option(help="Folder for the two files. Default: the run's own.")] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of `lapcli bench --output`; may be given often. Those that lie in the directory are found."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files of these names that are no reports.")
    ] = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Write `report.html` and `report.md`; neither needs any other file."""
    from lapcli.cli import display
    from lapcli.reports.collect import collect
    from lapcli.stages.reporting import HTML, MARKDOWN, check_place, report

    folder = output or source
    if dry_run:
        found = collect(source, bench or ())
        check_place(folder, overwrite=overwrite)
        facts = {
            "reads": f"{len(found.entries)} {'cells' if found.sweep else 'evaluation' if found.bare else 'run'}",
            "benchmarks": [str(each.path) for each in found.benches],
            "not readable": found.problems,
            "writes": [str(folder / HTML), str(folder / MARKDOWN)],
        }
        display.would_do(facts, as_json)
        return
    made = report(source, folder, benches=bench or (), overwrite=overwrite)
    if as_json:
        display.emit(
            {
                "html": str(made.html),
                "markdown": str(made.markdown),
                "chains": made.chains,
                "whole": made.whole,
                "problems": list(made.problems),
            }
        )
    reporter = display.DisplayReporter(quiet)
    for problem in made.problems:
        reporter.warn(f"not in the report: {problem}")
    display.closing(f"reported: {made.html} and {made.markdown}", quiet=quiet)
