"""Reporting: a run directory or a sweep in, one HTML and one Markdown file out. `lapcli.reports` does the rendering."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lapcli.artifacts import atomic_file
from lapcli.errors import ArtifactError
from lapcli.reports.collect import collect
from lapcli.reports.html import html
from lapcli.reports.markdown import markdown
from lapcli.reports.sections import compose

HTML = "report.html"
MARKDOWN = "report.md"


@dataclass(frozen=True)
class Report:
    """What a report left.

    Attributes:
        html: the HTML file.
        markdown: the Markdown file.
        chains: runs or cells that it speaks of.
        whole: how many of them are whole.
        problems: what could not be read, a sentence each.
    """

    html: Path
    markdown: Path
    chains: int
    whole: int
    problems: tuple[str, ...]


def report(source: Path, output: Path, *, benches: Iterable[Path] = (), overwrite: bool = False) -> Report:
    """Write a report; earlier ones of the same source give way.

    Args:
        source: a run directory or a sweep's.
        output: the folder of the two files; made if missing.
        benches: files of `lapcli bench --output`, beside those that lie in the source.
        overwrite: whether files of these names that lapcli did not write give way.

    Raises:
        ArtifactError: the source is neither, a file is in the way, or one that was named holds no results.
    """
    found = collect(source, benches)
    check_place(output, overwrite=overwrite)
    document = compose(found)
    files = {output / HTML: html(document), output / MARKDOWN: markdown(document)}
    for path, text in files.items():
        with atomic_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    whole = sum(entry.failure is None for entry in found.entries)
    return Report(output / HTML, output / MARKDOWN, len(found.entries), whole, tuple(found.problems))


def check_place(output: Path, *, overwrite: bool = False) -> None:
    """Refuse a folder that a report cannot or should not be written to.

    Args:
        output: the folder; it need not be there.
        overwrite: whether files of these names that lapcli did not write give way.

    Raises:
        ArtifactError: what is in the way.
    """
    if output.exists() and not output.is_dir():
        raise ArtifactError(f"{output} is no folder", "name another with --output")
    for path in (output / HTML, output / MARKDOWN):
        if path.is_dir():
            raise ArtifactError(f"{path} is a folder", "name another place with --output")
        if path.exists() and not overwrite and not _ours(path):
            raise ArtifactError(
                f"{path} is there, but lapcli did not write it",
                "name another folder with --output, or pass --overwrite",
            )


def _ours(path: Path) -> bool:
    try:
        return _MARK in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


_MARK = "\N{PLUS-MINUS SIGN} is one standard error."
"""Stands in every report."""
