"""Make `demo:transformer`, the teacher that ships with lapcli, from raw text on one GPU in one call.

python scripts/train_demo_gdn.py export-builtin FILE
python scripts/train_demo_transformer.py --data DIR --builtin FILE --output DIR --minutes 9
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# So that it also runs from a bare copy of the repository, where lapcli is not installed.
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT), str(ROOT / "kernels")]


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gutenberg_train.jsonl.xz and so on")
    parser.add_argument("--builtin", type=Path, required=True, help="what export-builtin wrote, by Python 3.11")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole run, from start to end")
    parser.add_argument("--steps", type=int, default=None, help="end after that many steps, whatever the clock says")
    parser.add_argument("--batch", type=int, default=64, help="rows of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=ROOT / "lapcli" / "demo" / "gdn" / "tokenizer.json",
        help="tokenizer.json to take; default: that of demo:gdn",
    )
    parser.add_argument("--modes", default=None, help="how the step may run, in order of preference")
    parser.add_argument("--answer-weight", type=float, default=3.0, help="weight of recalled tokens in the loss")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.003)
    parser.add_argument("--decay-from", type=float, default=0.4, help="progress at which the rates begin to fall")
    parser.add_argument(
        "--recall-rows", type=int, default=24_000, help="made for the first stage of three; the last gets three times"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=None, help="characters to keep of each source")
    parser.add_argument("--tiny", action="store_true", help="two layers, little text, few rows: a trial of the script")
    arguments = parser.parse_args()

    from demo_gdn.step import MODES
    from demo_gdn.train import Settings, train
    from demo_transformer.modelling import TRANSFORMER

    if arguments.tiny:
        arguments.limit = arguments.limit or 300_000
        arguments.batch, arguments.length = min(arguments.batch, 8), min(arguments.length, 256)
        arguments.recall_rows = min(arguments.recall_rows, 256)
    settings = {name: value for name, value in vars(arguments).items() if name != "modes"}
    modes = MODES if arguments.modes is None else tuple(arguments.modes.split(","))
    train(Settings(modes=modes, impl="sdpa", **settings), TRANSFORMER)


if __name__ == "__main__":
    main()
