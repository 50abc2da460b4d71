"""A report before it is HTML or Markdown: sections of plain blocks. All text is raw; who renders it escapes it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TypeAlias

from lapcli.evaluation.table import format_value


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True)
class Listing:
    """Lines of a terminal, as typed."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: what it shows.
        columns: headings.
        rows: cells, one a column.
        text_columns: how many columns from the left hold text; the others hold numbers.
        note: a line below.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    note: str = ""


@dataclass(frozen=True)
class Point:
    """A point of a line.

    Attributes:
        x: place.
        y: value.
        error: one standard error.
        interval: from where to where the value may lie, where that is known better than as the error up and down.
    """

    x: float
    y: float
    error: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def bar(self) -> tuple[float, float] | None:
        """The ends of the error bar; `None` where it has none."""
        if self.interval is not None or not self.error:
            return self.interval
        return self.y - self.error, self.y + self.error

    def text(self) -> str:
        """The value as tables have it, and the interval."""
        # Losses and the like come without an error.
        said = format_value(self.y, self.error)
        if self.interval is None:
            return said
        low, high = self.interval
        return f"{said} ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        name: in the legend.
        points: in the order in which they are joined.
        thin: whether it is a background to the others.
    """

    name: str
    points: tuple[Point, ...]
    thin: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure of lines.

    Attributes:
        title: what it shows.
        description: in a sentence, for who cannot see it.
        x_label: with its unit.
        y_label: with its unit.
        series: the lines.
        bytes_on_x: whether x counts bytes.
        log_y: whether y is logarithmic.
    """

    title: str
    description: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    bytes_on_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Picture:
    """A PNG that is there already.

    Attributes:
        title: what it shows.
        description: in a sentence.
        data: the file's bytes.
        file: its name, for who reads the Markdown.
    """

    title: str
    description: str
    data: bytes
    file: str


Block: TypeAlias = Paragraph | Listing | Items | Table | Chart | Picture


@dataclass
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class Document:
    """A report."""

    title: str
    lead: str
    sections: Sequence[Section]


def facts(caption: str, values: dict[str, str]) -> Table:
    """Names and values as a table."""
    return Table(caption, ("", ""), tuple(values.items()), text_columns=2)


def size(count: float) -> str:
    """Bytes for a person, in binary units."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count:.0f} B"


def printable(text: str) -> str:
    """Text without the control characters that neither HTML nor a terminal should get."""
    return "".join(
        char
        if char in "\n\t" or (char.isprintable() and not 0xD800 <= ord(char) <= 0xDFFF) or char == "\xa0"
        else "\ufffd"
        for char in text
    )


def markup(text: str) -> str:
    """Text as HTML and SVG want it."""
    return escape(printable(text))
