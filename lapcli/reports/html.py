"""A report as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

import base64
import re

from lapcli.reports.charts import draw
from lapcli.reports.document import Block, Chart, Document, Items, Listing, Paragraph, Picture, Table, markup

_LEAST = 0.75 * 96 / 150
"""Of a picture's width in its own pixels: three quarters of the size that it was drawn for, 150 pixels to the inch."""

_COLUMN = 608
"""Pixels of a column of figures, as below (38rem)."""

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem; color: #111; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .75rem; padding-top: .5rem; border-top: 1px solid #bbb; }
p, ul { max-width: 48rem; }
nav ul { columns: 2 16rem; padding-left: 1.2rem; }
a { color: #0b4a8f; }
.box { overflow-x: auto; margin: 1rem 0; max-width: 100%; }
.box:focus { outline: 2px solid #0b4a8f; outline-offset: 2px; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
caption span { position: sticky; left: 0; display: inline-block; max-width: calc(100vw - 3rem); white-space: normal; }
th, td { padding: .3rem .7rem .3rem 0; text-align: right; vertical-align: top; white-space: nowrap; }
th.text, td.text { text-align: left; }
table.facts td.text { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
thead th { border-bottom: 1px solid #111; white-space: normal; vertical-align: bottom; min-width: 4.5rem; }
tbody tr { border-bottom: 1px solid #e3e3e3; }
.note { color: #444; font-size: .875rem; margin-top: -.5rem; }
pre { background: #f4f4f4; padding: .75rem; margin: 0; font-size: .8125rem; }
figure { margin: 1.25rem 0; max-width: 38rem; }
figure svg, figure img { width: 100%; height: auto; display: block; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
figure .box { margin: 0; }
figure.wide { max-width: none; grid-column: 1 / -1; }
@media (min-width: 60rem) { .figures { display: grid; grid-template-columns: 1fr 1fr; gap: 0 2rem; } }
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  nav { display: none; }
  .figures { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1rem; }
  .box { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { white-space: normal; padding-right: .4rem; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  h2 { break-after: avoid; }
  figure img { min-width: 0 !important; }
  figure, tr { break-inside: avoid; }
  thead { display: table-header-group; }
  a { color: inherit; text-decoration: none; }
}
"""


def html(document: Document) -> str:
    """The whole file."""
    places = {section.title: f"s{number}-{_slug(section.title)}" for number, section in enumerate(document.sections)}
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # What was read from files cannot load anything, should an escape be missing.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
        f"<title>{markup(document.title)}</title><style>{_STYLE}</style></head><body>",
        f"<header><h1>{markup(document.title)}</h1><p>{markup(document.lead)}</p></header>",
        '<nav aria-label="Contents"><ul>',
        *(f'<li><a href="#{places[section.title]}">{markup(section.title)}</a></li>' for section in document.sections),
        "</ul></nav><main>",
    ]
    figures = 0
    for section in document.sections:
        place = places[section.title]
        parts.append(f'<section aria-labelledby="{place}"><h2 id="{place}">{markup(section.title)}</h2>')
        inside = False
        for block in section.blocks:
            drawn = isinstance(block, Chart | Picture)
            if drawn != inside:
                parts.append('<div class="figures">' if drawn else "</div>")
                inside = drawn
            figures += drawn
            parts.append(_block(block, f"f{figures}"))
        parts.append("</div></section>" if inside else "</section>")
    return "\n".join([*parts, "</main></body></html>"]) + "\n"


def _block(block: Block, name: str) -> str:
    match block:
        case Paragraph():
            return f"<p>{markup(block.text)}</p>"
        case Items():
            return "<ul>" + "".join(f"<li>{markup(item)}</li>" for item in block.items) + "</ul>"
        case Listing():
            lines = "\n".join(markup(line) for line in block.lines)
            return f'<div class="box" tabindex="0" role="region" aria-label="Commands"><pre>{lines}</pre></div>'
        case Table():
            return _table(block)
        case Chart():
            return f"<figure><figcaption>{markup(block.title)}</figcaption>{draw(block, name)}</figure>"
        case Picture():
            return _picture(block)


def _picture(picture: Picture) -> str:
    """A picture that keeps a size at which its text can be read, and scrolls where the page has no room for that."""
    least = round(_LEAST * int.from_bytes(picture.data[16:20], "big"))
    wide = ' class="wide"' if least > _COLUMN else ""
    data = base64.b64encode(picture.data).decode()
    image = f'<img alt="{markup(picture.description)}" style="min-width: {least}px" src="data:image/png;base64,{data}">'
    box = f'<div class="box" tabindex="0" role="region" aria-label="{markup(picture.title)}">{image}</div>'
    return f"<figure{wide}><figcaption>{markup(picture.title)}</figcaption>{box}</figure>"


def _table(table: Table) -> str:
    def cell(kind: str, number: int, text: str, scope: str = "") -> str:
        css = ' class="text"' if number < table.text_columns else ""
        return f"<{kind}{scope}{css}>{markup(text)}</{kind}>"

    plain = not any(table.columns)
    head = "".join(cell("th", number, text, ' scope="col"') for number, text in enumerate(table.columns))
    body = "".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", number, text) for number, text in enumerate(row[1:], 1))
        + "</tr>"
        for row in table.rows
    )
    heading = "" if plain else f"<thead><tr>{head}</tr></thead>"
    note = f'<p class="note">{markup(table.note)}</p>' if table.note else ""
    css = ' class="facts"' if plain else ""
    return (
        f'<div class="box" tabindex="0" role="region" aria-label="{markup(table.caption)}">'
        f"<table{css}><caption><span>{markup(table.caption)}</span></caption>{heading}<tbody>{body}</tbody></table></div>{note}"
    )


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
