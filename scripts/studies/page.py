"""Tables between two marks of a page."""

from pathlib import Path


def put(tables: str, page: Path, begin: str, end: str) -> None:
    """Put tables between the marks of a page.

    Raises:
        SystemExit: it has no such marks.
    """
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"{page} needs the lines\n{begin}\n{end}\nonce each, in this order, where the tables go")
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    page.write_text(f"{before}\n{tables}{after}", encoding="utf-8")
