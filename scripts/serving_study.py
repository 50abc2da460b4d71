"""What does adapting gain, and what does it cost? A conversion served in its modes on one trace under pressure, and
the same simulated; a cut model against the whole one at one memory; and many requests: the tables of docs/serve.md.

python scripts/serving_study.py run --trace TRACE --work DIR --output runs.jsonl --gpus 1 --seconds 270
python scripts/serving_study.py write runs.jsonl docs/serve.md

`run` starts the commands that a user would type, one after the other on one device, since they would measure one
another. Each finished piece is one line that is added to `--output`; what is there, or in files named by `--known`, is
not measured again. `--seconds` sets an end: pieces that would not be done by then are left for the next call. Parts:

modes      `lapcli replay --modes`, each mode by itself, of the conversion `--model`; without one, of a conversion of
           SmolLM2-135M's shape whose weights are drawn (times and bytes do not depend on them). Step costs are
           measured first (`--simulate`), and by them the load is chosen: the first of a row of time scales at which
           the simulated latency of unconverted serving is 2.5 times that of an idle engine (or `--time-scale`).
           Of 1280 MiB weights take 288 and a prompt of 8192 tokens on its way 180; passes, steps and graphs take some
           200, as estimated, and what is left holds keys and values of 28,000 tokens, which that load fills.
fixed      `demo:gdn` and its cut (`lapcli prune`), each answering as many requests at once as `--gdn-memory` holds, of
           `--burst` requests that are sent at once. A request keeps 420 KiB of the whole model, and half of that of the
           cut one, so that 256 MiB hold some hundreds: fewer than prompts could fill.
near       unconverted serving under half that load, served and simulated: near saturation latencies multiply what step
           costs differ by.
endurance  `serve_endurance.py`, for `--endurance-seconds` at most.

A part, a mode or a model that fails is said and ends nothing else; the exit code is 0 only if all was finished.

`write` puts the tables between the two marks in the page, or prints them where no page is named.

One call on one H200: a minute for drawing and for step costs, three modes of about 45 s each (25 s of replay, a server
that begins, and answers that are late), 30 s for each of two models, and half the load and many requests in what is
left: 300 s, or another call. These are estimates; of these parts only the last was finished on a GPU yet.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from serving.drawn import draw
from serving.pieces import Evidence, rows_at_most
from serving.tables import BEGIN, END, put, write
from studies.arguments import json_object, names_of
from studies.boundary import answer, data_files

__all__ = ["BEGIN", "END", "draw", "put", "rows_at_most", "write"]

PARTS = ("modes", "fixed", "near", "endurance")


def main(arguments: Iterable[str] | None = None) -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("run", help="measure what is not there yet")
    made.add_argument("--trace", type=Path, required=True, help="requests, as `lapcli replay` reads them")
    made.add_argument("--work", type=Path, required=True, help="work under way and models that were made")
    made.add_argument("--output", type=Path, required=True, help="JSON lines; one is added for each finished piece")
    made.add_argument("--known", type=Path, action="append", default=[], help="more files whose lines count")
    made.add_argument("--gpus", type=int, default=0, help="0: on the CPU")
    made.add_argument("--seconds", type=float, default=None, help="then end")
    made.add_argument("--parts", type=names_of(PARTS), default=list(PARTS), help="names with commas, in their order")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--model", help="directory of a conversion; default: one of drawn weights")
    made.add_argument("--shape", default="smollm2-like", help="of drawn weights: of `lapcli bench decode --config`")
    made.add_argument("--change", type=json_object, default={}, help="fields of its config, as JSON")
    made.add_argument("--modes", type=lambda text: text.split(","), default=["adaptive", "never", "static:0.5"])
    made.add_argument("--memory", default="1280MiB", help="of an engine of the conversion")
    made.add_argument("--max-length", type=int, default=8192)
    made.add_argument("--max-ppl-increase", help="of adaptive")
    made.add_argument("--caps", help="of adaptive")
    made.add_argument("--length-scale", type=float, default=1.0)
    made.add_argument("--time-scale", type=float, help="default: by simulation")
    made.add_argument("--replay-seconds", type=float, default=25.0, help="in which requests come")
    made.add_argument("--gdn", default="demo:gdn")
    made.add_argument("--ratio", default="0.5", help="of its key width, cut")
    made.add_argument("--method", default="l1", help="selector")
    made.add_argument("--gdn-memory", default="256MiB")
    made.add_argument("--burst", type=int, default=3000, help="requests at once")
    made.add_argument("--burst-length", type=int, default=1024)
    made.add_argument("--burst-length-scale", type=float, default=0.25)
    made.add_argument("--endurance", type=int, default=20_000)
    made.add_argument("--endurance-seconds", type=float, default=60.0)
    shown = commands.add_parser("write", help="make the tables")
    shown.add_argument("files", type=Path, nargs="+", help="JSON lines; a page to put the tables in comes last")
    answer(parser, commands, _do, arguments)


def _do(options: argparse.Namespace) -> bool | None:
    """One command; of `run` whether everything is there."""
    if options.command == "run":
        return Evidence(options).run()
    files, page = data_files(options.files)
    tables = write(files)
    if page is None:
        sys.stdout.write(tables)
    else:
        put(tables, page)
    return None


if __name__ == "__main__":
    main()
