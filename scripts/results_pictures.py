"""Copy the pictures of docs/results.md out of what the recipes of recipes/demo left.

python scripts/results_pictures.py --work DIR

DIR/NAME is the directory in which the recipe demo/NAME was run by the commands of its header. Charts are those of
`report.html`, one SVG each; the others are what `lapcli analyze` drew.
"""

import argparse
import re
import shutil
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "img"
LIMIT = 1 << 20
"""Bytes of all pictures together."""
CHARTS = {
    "selectors-perplexity": ("selectors", "builtin, token perplexity"),
    "selectors-recall": ("selectors", "niah 512, exact match"),
    "pca-perplexity": ("pca", "builtin, token perplexity"),
    "states-utilisation": ("states", "Rank utilisation of the states"),
}
"""By the picture's name: the recipe, and how the chart's title begins."""
DRAWN = {
    "states-conditioning": "states/lapcli-sweep/cells/drrqr-0.75-builtin-64x1024-s0/analysis/conditioning.svg",
    "recovered-spectra": "recovered-states/lapcli-run/analysis/spectra.svg",
}
"""By the picture's name: the file."""


def chart(report: Path, title: str) -> str:
    """The first chart of a report whose title begins so."""
    for found in re.findall(r"<svg .*?</svg>", report.read_text(), re.DOTALL):
        if re.search(rf"<title[^>]*>{re.escape(title)}", found):
            return found
    raise SystemExit(f"{report} has no chart {title!r}")


def main() -> None:
    """Write docs/img."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where the recipes were run, a directory each")
    work = parser.parse_args().work
    IMAGES.mkdir(exist_ok=True)
    for name, (recipe, title) in CHARTS.items():
        (IMAGES / f"{name}.svg").write_text(chart(work / recipe / "lapcli-sweep" / "report.html", title) + "\n")
    for name, path in DRAWN.items():
        shutil.copyfile(work / path, IMAGES / f"{name}.svg")
    total = sum(path.stat().st_size for path in IMAGES.iterdir())
    if total > LIMIT:
        raise SystemExit(f"{IMAGES} holds {total} bytes, more than {LIMIT}")


if __name__ == "__main__":
    main()
