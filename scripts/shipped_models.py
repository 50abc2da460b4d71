"""Write the table of the models that ship into README.md, from what lies in lapcli/demo: names, what their cards say
that they are, sizes.

python scripts/shipped_models.py            # writes
python scripts/shipped_models.py --check    # fails if the page is stale
"""

import sys
from pathlib import Path

from studies.page import filled

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- shipped-models: begin -->", "<!-- shipped-models: end -->"


def table() -> str:
    """The table, a row for each folder of lapcli/demo that holds a model."""
    from lapcli.families.source import demo_models

    lines = ["| model | what it is | files, MB |", "| --- | --- | --- |"]
    for name, folder in demo_models().items():
        size = sum(file.stat().st_size for file in folder.iterdir())
        card = Path("lapcli") / "demo" / folder.name / "README.md"
        lines.append(f"| [`{name}`]({card.as_posix()}) | {what(folder / 'README.md')} | {size / 1e6:.1f} |")
    return "\n".join(lines) + "\n"


def what(card: Path) -> str:
    """The first sentence of a card's text.

    Raises:
        SystemExit: it has none.
    """
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    paragraphs = text.partition("\n# ")[2].split("\n\n")[1:]
    if not paragraphs:
        raise SystemExit(f"{card} needs a heading `# demo:NAME`, and a sentence below it that says what the model is")
    sentence, found, _rest = " ".join(paragraphs[0].split()).partition(". ")
    return sentence + ("." if found else "")


def main() -> None:
    """Write the page, or check it."""
    fresh = filled(table(), PAGE, BEGIN, END)
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text(encoding="utf-8") != fresh:
            raise SystemExit(f"{PAGE} is stale; run: python scripts/shipped_models.py")
        return
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
