"""A report as one Markdown file: the tables of the HTML, and of each figure the numbers."""

import re
from html import escape

from lapcli.reports.document import Block, Chart, Document, Items, Listing, Paragraph, Picture, Table, printable, size


def markdown(document: Document) -> str:
    """The whole file."""
    lines = [f"# {_text(document.title)}", "", _text(document.lead), ""]
    for section in document.sections:
        lines += [f"## {_text(section.title)}", ""]
        for block in section.blocks:
            lines += [*_block(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def _block(block: Block) -> list[str]:
    match block:
        case Paragraph():
            return [_text(block.text)]
        case Items():
            return [f"- {_text(item)}" for item in block.items]
        case Listing():
            return ["    " + printable(line).replace("\n", " ") for line in block.lines]
        case Table():
            return _table(block)
        case Picture():
            return [f"Figure, in the HTML report and in {_text(block.file)}: {_text(block.title)}."]
        case Chart():
            return _numbers(block)


def _table(table: Table) -> list[str]:
    marks = ["---" if number < table.text_columns else "---:" for number in range(len(table.columns))]
    lines = [f"**{_text(table.caption)}**", "", _row(table.columns), "| " + " | ".join(marks) + " |"]
    lines += [_row(row) for row in table.rows]
    return [*lines, "", _text(table.note)] if table.note else lines


def _numbers(chart: Chart) -> list[str]:
    """The points of a chart as a table; of a long line every few."""
    rows: list[tuple[str, ...]] = []
    for line in chart.series:
        if line.thin:
            continue
        every = max(1, len(line.points) // 12)
        for point in line.points[::every]:
            whole = f"{point.x:,.0f}" if float(point.x).is_integer() else f"{point.x:g}"
            rows.append((line.name, size(point.x) if chart.bytes_on_x else whole, point.text()))
    columns = ("", chart.x_label, chart.y_label)
    return _table(Table(f"Figure: {chart.title}", columns, tuple(rows)))


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_text(cell) for cell in cells) + " |"


def _text(text: str) -> str:
    """Text that Markdown, and the HTML in it, leave as it is."""
    plain = " ".join(printable(text).split())
    # Entities, since not every renderer knows a backslash before these.
    return re.sub(r"([\\`*_{}\[\]#|~$])", r"\\\1", escape(plain, quote=False))
