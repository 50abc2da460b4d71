"""Make the model that ships with lapcli, `demo:gdn`, from raw text on one GPU in one call.

python scripts/train_demo_gdn.py export-builtin FILE
python scripts/train_demo_gdn.py train --data DIR --builtin FILE --output DIR --minutes 9
python scripts/train_demo_gdn.py profile --steps 20
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
    commands = parser.add_subparsers(dest="command", required=True)

    export = commands.add_parser("export-builtin", help="write the builtin corpus of this Python as JSONL")
    export.add_argument("file", type=Path)

    train = commands.add_parser("train", help="train the model")
    train.add_argument("--data", type=Path, required=True, help="folder with gutenberg_train.jsonl.xz and so on")
    train.add_argument("--builtin", type=Path, required=True, help="what export-builtin wrote, by Python 3.11")
    train.add_argument("--output", type=Path, required=True)
    train.add_argument("--minutes", type=float, default=9.0, help="of the whole run, from start to end")
    train.add_argument("--steps", type=int, default=None, help="end after that many steps, whatever the clock says")
    train.add_argument("--batch", type=int, default=64, help="rows of a step")
    train.add_argument("--length", type=int, default=1024, help="tokens of a row")
    train.add_argument("--vocab-size", type=int, default=4096)
    train.add_argument("--tokenizer", type=Path, default=None, help="tokenizer.json to take instead of training one")
    train.add_argument("--impl", default="chunked", help="chunked, products, triton or fla")
    train.add_argument("--modes", default=None, help="how the step may run, in order of preference")
    train.add_argument("--answer-weight", type=float, default=3.0, help="weight of recalled tokens in the loss")
    train.add_argument("--muon-rate", type=float, default=0.02)
    train.add_argument("--adam-rate", type=float, default=0.003)
    train.add_argument("--decay-from", type=float, default=0.4, help="progress at which the rates begin to fall")
    train.add_argument(
        "--recall-rows",
        type=int,
        default=24_000,
        help="made for the first stage of three; the last gets three times as many",
    )
    train.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--limit", type=int, default=None, help="characters to keep of each source")
    train.add_argument("--tiny", action="store_true", help="two layers, little text, few rows: a trial of the script")

    profile = commands.add_parser("profile", help="time the training step, variant by variant")
    profile.add_argument("--steps", type=int, default=20, help="timed steps of each variant")
    profile.add_argument("--variants", default="chunked,products,triton")
    profile.add_argument("--modes", default="eager,compiled,compiled+graph")
    profile.add_argument("--batches", default="64")
    profile.add_argument("--length", type=int, default=1024)
    profile.add_argument("--kernels", action="store_true", help="list the kernels of the last variant")

    arguments = parser.parse_args()
    if arguments.command == "export-builtin":
        from demo_gdn.corpus import export_builtin

        print(export_builtin(arguments.file))
    elif arguments.command == "profile":
        from demo_gdn.profiling import profile as run_profile

        run_profile(
            arguments.variants.split(","), arguments.modes.split(","), [int(n) for n in arguments.batches.split(",")],
            steps=arguments.steps, length=arguments.length, kernels=arguments.kernels,
        )  # fmt: skip
    else:
        _train(arguments)


def _train(arguments: argparse.Namespace) -> None:
    from demo_gdn.step import MODES
    from demo_gdn.train import Settings, train

    if arguments.tiny:
        arguments.limit = arguments.limit or 300_000
        arguments.batch, arguments.length = min(arguments.batch, 8), min(arguments.length, 256)
        arguments.vocab_size = min(arguments.vocab_size, 1024)
        arguments.recall_rows = min(arguments.recall_rows, 256)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("command", "modes")}
    modes = MODES if arguments.modes is None else tuple(arguments.modes.split(","))
    train(Settings(modes=modes, **settings))


if __name__ == "__main__":
    main()
