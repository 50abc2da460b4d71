"""Tables between two marks of a page."""

from pathlib import Path


def filled(tables: str, page: Path, begin: str, end: str) -> str:
    """The text of a page with tables between its marks.

    Raises:
        SystemExit: it has no such marks.
    """
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"{page} needs the lines\n{begin}\n{end}\nonce each, in this order, where the tables go")
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    return f"{before}\n{tables}{after}"


def put(tables: str, page: Path, begin: str, end: str) -> None:
    """Put tables between the marks of a page.

    Raises:
        SystemExit: it has no such marks.
    """
    page.write_text(filled(tables, page, begin, end), encoding="utf-8")
